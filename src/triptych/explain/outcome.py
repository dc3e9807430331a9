"""Where a walk ends: logits and the next token, the word behind a mask, a label, or a vector for the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.explain import reference_ops
from triptych.explain.expressions import Applied, computed, evaluate
from triptych.explain.formula import formula
from triptych.explain.from_program import OUT, StepBuilder
from triptych.explain.steps import Printed, Shown, Step
from triptych.model import Model
from triptych.program import Instruction
from triptych.spec import (
    ClassHeadSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    PoolingSpec,
    ReplacedHeadSpec,
    SpanHeadSpec,
    TokenHeadSpec,
)

TOP = 8  # candidates printed
WARM = 0.7  # the temperature shown beside 1
TOKEN = "One number for each word of the vocabulary, from the vector of {} alone."
SAMPLING = (
    "Greedy decoding takes the likeliest. Sampling divides the logits by a temperature, may drop the tail (top-k,"
    " top-p), and draws one; then the forward runs again with one token more."
)


@dataclass(frozen=True)
class Outcome:
    """The last steps, their result in words, and the token chosen where there is one."""

    steps: list[Step]
    summary: str
    token: int | None = None


def outcome(model: Model, builder: StepBuilder, row: int) -> Outcome:
    """What the model's own head makes of the final vectors."""
    at, head = builder.at, model.spec.head
    logits = at.trace.logits[0].cpu()
    mask = None if model.tokenizer is None else model.tokenizer.mask_id
    if isinstance(head, LMHeadSpec):
        return _token(model, builder, logits[-1], None)
    if isinstance(head, MaskedLMHeadSpec) and mask is not None and mask in at.ids:
        return _token(model, builder, logits, row if at.ids[row] == mask else list(at.ids).index(mask))
    if isinstance(head, ClassHeadSpec):
        shown = Shown("logits", "l", "C", logits.reshape(-1))
        why = "One number for each label, from one vector for the whole text; the largest wins."
        return Outcome([_logits(builder, shown, why)], f"label {int(logits.argmax())} of {logits.numel()}")
    shown = at.by_token("logits", "l", logits, "N C")
    if isinstance(head, TokenHeadSpec):
        summary = f"label {int(logits[row].argmax())} of {logits.shape[-1]} for {at.labels[row]}"
        return Outcome([_logits(builder, shown, "Labels of each token.")], summary)
    if isinstance(head, SpanHeadSpec):
        first, last = logits.argmax(0).tolist()
        summary = f"the answer begins at {first}, {at.labels[first]}, and ends at {last}, {at.labels[last]}"
        why = "Two numbers for each token: does an answer begin here, does it end here."
        return Outcome([_logits(builder, shown, why)], summary)
    if isinstance(head, ReplacedHeadSpec):
        summary = f"{at.labels[row]}: {float(logits[row, 0]):.4f}, above 0 where the token was replaced"
        return Outcome([_logits(builder, shown, "One number for each token.")], summary)
    value = model.encode([list(at.ids)])[0].cpu()
    why = "One vector for the whole text: texts with similar meanings have similar vectors."
    mean = Applied(Instruction("pool", ("mean",), {"x": builder.output}, {}, {"mode": "mean"}), {"x": builder.output})
    step = _logits(
        builder, Shown("pooled", "v", "D", value), why, value=None if isinstance(head, PoolingSpec) else mean,
        title="Pooled vector",
    )  # fmt: skip
    return Outcome([step], f"a vector of {len(value):,} numbers, length {float(value.norm()):.4f}")


def _logits(
    builder: StepBuilder, shown: Shown, why: str, *, title: str = "Logits", which: str = "",
    chosen: Callable[[Tensor], Tensor] = lambda h: h, value: Applied | None = None,
) -> Step:  # fmt: skip
    """What the head computes, by the entry `unembed` of the program; of the `chosen` vector only, called `which`."""
    final, entries = builder.output, builder.at.program.entries
    if value is None:
        steps = entries["unembed"].instructions
        value = computed(entries, "unembed", steps, {"hidden": final}, together=True)[-1].value
    text, definitions = formula(value, builder.symbols | {final: f"{builder.symbols[final]}{which}"})

    def once_more(g: Printed) -> Tensor:
        return evaluate(value, g, {final: chosen(g[final])})

    equation = ",  ".join([f"{shown.symbol} = {text}", *definitions])
    return Step(OUT, title, equation, why, [shown], once_more, builder.uses(value, shown))


def _token(model: Model, builder: StepBuilder, logits: Tensor, place: int | None) -> Outcome:
    """The next token, or the word at the mask at `place`."""
    row, which = (-1, "last") if place is None else (place, str(place))
    values = logits if place is None else logits[place]
    where = "the last token" if place is None else "the mask"
    token = int(values.argmax())
    name, chance = _names(model, [token])[0], float(values.softmax(-1)[token])
    title, why = ("Next token", SAMPLING) if place is None else ("The word", "The likeliest word replaces the mask.")
    last = Shown("token", "token", "new", torch.tensor([token]), columns=[name])
    shown = Shown("logits", "l", "V", values)
    steps = [
        _logits(builder, shown, TOKEN.format(where), which=f"[{which}]", chosen=lambda h: h[row]),
        _candidates(model, values),
        Step(OUT, title, "token = argmax l", why, [last], lambda g: g["logits"].argmax()[None]),
    ]
    summary = "next token:" if place is None else f"the mask at {place} is"
    return Outcome(steps, f"{summary} “{name}” (id {token}, p {chance:.4f})", token)


def _candidates(model: Model, logits: Tensor) -> Step:
    """The likeliest, with what a temperature makes of their probabilities."""
    top = min(TOP, len(logits))

    def table(values: Tensor, p: Tensor, warm: Tensor) -> Tensor:
        best = values.topk(top).indices
        return torch.stack([values[best], p[best], warm[best]], 1)

    value = table(logits, logits.softmax(-1), (logits / WARM).softmax(-1))
    labels = _names(model, logits.topk(top).indices.tolist())
    shown = Shown("candidates", "p", "top ·", value, labels, ["l", "p", f"p, τ={WARM}"], focus=0)
    rest = len(logits) - top
    why = "Softmax over the vocabulary. " + (
        f"The other {rest:,} tokens share {1 - float(value[:, 1].sum()):.1%}." if rest else ""
    )
    return Step(
        OUT, "Candidates", "p = softmax(l),  p at τ = softmax(l / τ)", why.strip(), [shown],
        lambda g: table(g["logits"], reference_ops.softmax(g["logits"]), reference_ops.softmax(g["logits"] / WARM)),
    )  # fmt: skip


def _names(model: Model, ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)
