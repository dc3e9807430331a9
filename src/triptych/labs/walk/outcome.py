"""Where a walk ends: logits and the next token, the word behind a mask, a label, or a vector for the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.labs.walk import again
from triptych.labs.walk.around import OUT
from triptych.labs.walk.stack import Applied, Stack
from triptych.labs.walk.steps import Again, Given, Shown, Step
from triptych.model import Model
from triptych.probe import Trace
from triptych.spec import (
    ClassHeadSpec,
    LinearSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    PoolingSpec,
    ReplacedHeadSpec,
    SpanHeadSpec,
    TokenHeadSpec,
    TransformSpec,
)

TOP = 8  # candidates printed
WARM = 0.7  # the temperature shown beside 1


@dataclass(frozen=True)
class Outcome:
    """The last steps, what they say in words, and the token chosen where there is one."""

    steps: list[Step]
    said: str
    token: int | None = None


def outcome(model: Model, at: Stack, trace: Trace, row: int) -> Outcome:
    """What the model's own head makes of the last hidden states."""
    head, logits = model.spec.head, trace.logits[0].cpu()
    if isinstance(head, LMHeadSpec):
        return _next(model, at, head, logits[-1])
    mask = None if model.tokenizer is None else model.tokenizer.mask_id
    if isinstance(head, MaskedLMHeadSpec) and mask is not None and mask in at.ids:
        place = row if at.ids[row] == mask else list(at.ids).index(mask)
        return _filled(model, at, head, logits[place], place)
    if isinstance(head, ClassHeadSpec):
        return _label(at, head, logits.reshape(-1))
    if isinstance(head, TokenHeadSpec):
        said = f"label {int(logits[row].argmax())} of {head.classes.outputs} for {at.labels[row]}"
        return Outcome([_scored(at, head.transform, "classes", head.classes, logits, "Labels of each token.")], said)
    if isinstance(head, SpanHeadSpec):
        first, last = logits.argmax(0).tolist()
        said = f"the answer begins at {first}, {at.labels[first]}, and ends at {last}, {at.labels[last]}"
        why = "Two numbers a token: does an answer begin here, does it end here."
        return Outcome([_scored(at, head.transform, "ends", head.ends, logits, why)], said)
    if isinstance(head, ReplacedHeadSpec):
        said = f"{at.labels[row]}: {float(logits[row, 0]):.4f}, above 0 where it was put in another's place"
        return Outcome([_scored(at, head.transform, "proj", head.proj, logits, "One number a token.")], said)
    return _pooled(model, at, head if isinstance(head, PoolingSpec) else PoolingSpec())


def _parameters(at: Stack, name: str, spec: LinearSpec, symbol: str, letters: str) -> list[Shown]:
    """Of the head, whose names have no stack before them."""
    weight = _parameter(at, f"{name}.weight", f"W{symbol}", letters)
    return [weight, _parameter(at, f"{name}.bias", f"b{symbol}", letters.split()[0])] if spec.bias else [weight]


def _parameter(at: Stack, name: str, symbol: str, letters: str) -> Shown:
    return Shown(f"head.{name}", symbol, letters, at.module.get_parameter(f"head.{name}").detach().cpu())


def _linear(g: Given, x: Tensor, uses: Sequence[Shown]) -> Tensor:
    return again.linear(x, g[uses[0].name], g[uses[1].name] if len(uses) > 1 else None)


def _next(model: Model, at: Stack, head: LMHeadSpec, logits: Tensor) -> Outcome:
    uses = _parameters(at, "proj", head.proj, "_head", "V D")
    scale = 1.0 if head.scale is None else head.scale
    inside = ("h" if head.scale is None else f"({scale:.4g} · h)") + "[last] W_headᵀ" + " + b_head" * head.proj.bias
    formula = inside if head.softcap is None else f"c · tanh({inside} / c), c = {head.softcap:g}"

    def once_more(g: Given) -> Tensor:
        found = _linear(g, g[at.final][-1] * scale, uses).double()
        return found if head.softcap is None else head.softcap * torch.tanh(found / head.softcap)

    why = "One number for each word of the vocabulary, from the last token's vector alone."
    shown = Shown("logits", "l", "V", logits)
    steps = [_logits(f"l = {formula}", why, shown, once_more, uses), _candidates(model, logits)]
    token = int(logits.argmax())
    last = Shown("token", "token", "new", torch.tensor([token]), columns=_names(model, [token]))
    why = (
        "Greedy decoding takes the likeliest. Sampling divides the logits by a temperature, may drop the tail (top-k,"
        " top-p), and draws one; then the walk begins again with one token more."
    )
    steps.append(Step(OUT, "Next token", "token = argmax l", why, [last], lambda g: g["logits"].argmax()[None]))
    chance = float(logits.softmax(-1)[token])
    return Outcome(steps, f"next token: “{_names(model, [token])[0]}” (id {token}, p {chance:.4f})", token)


def _filled(model: Model, at: Stack, head: MaskedLMHeadSpec, logits: Tensor, place: int) -> Outcome:
    transform, proj = _transform(at, head.transform), _parameters(at, "proj", head.proj, "_head", "V D")
    formula = f"l = t W_headᵀ + b_head,  t = {transform.formula} of x = h[{place}]"
    why = "One number for each word of the vocabulary, from the vector at the mask alone."
    token = int(logits.argmax())
    name, chance = _names(model, [token])[0], float(logits.softmax(-1)[token])
    last = Shown("token", "token", "new", torch.tensor([token]), columns=[name])

    def once_more(g: Given) -> Tensor:
        return _linear(g, transform.run(g, g[at.final][place]), proj)

    steps = [
        _logits(formula, why, Shown("logits", "l", "V", logits), once_more, [*transform.uses, *proj]),
        _candidates(model, logits),
        Step(
            OUT, "The word", "token = argmax l", "The likeliest word goes where the mask was.", [last],
            lambda g: g["logits"].argmax()[None],
        ),
    ]  # fmt: skip
    return Outcome(steps, f"the mask at {place} is “{name}” (id {token}, p {chance:.4f})", token)


def _label(at: Stack, head: ClassHeadSpec, logits: Tensor) -> Outcome:
    transform, classes = _transform(at, head.transform), _parameters(at, "classes", head.classes, "_c", "C D")
    where = {"first": "h[0]", "last": "h[last]", "mean": "mean of h over tokens"}[head.pool]

    def once_more(g: Given) -> Tensor:
        h = g[at.final]
        x = {"first": h[0], "last": h[-1], "mean": h.sum(0) / len(h)}[head.pool]
        return _linear(g, transform.run(g, x), classes)

    why = "One number for each label, from one vector for the whole text; the largest wins."
    formula = f"l = t W_cᵀ + b_c,  t = {transform.formula} of x = {where}"
    step = _logits(formula, why, Shown("logits", "l", "C", logits), once_more, [*transform.uses, *classes])
    return Outcome([step], f"label {int(logits.argmax())} of {len(logits)}")


def _scored(at: Stack, spec: TransformSpec | None, name: str, last: LinearSpec, logits: Tensor, why: str) -> Step:
    """A few numbers for each token."""
    transform, proj = _transform(at, spec), _parameters(at, name, last, "_c", "C D")
    shown = at.row_each("logits", "l", logits, "N C")

    def once_more(g: Given) -> Tensor:
        return _linear(g, transform.run(g, g[at.final]), proj)

    formula = f"l = t W_cᵀ + b_c,  t = {transform.formula} of x = h"
    return _logits(formula, why, shown, once_more, [*transform.uses, *proj])


def _transform(at: Stack, spec: TransformSpec | None) -> Applied:
    """What a head does before its last matrix."""
    if spec is None:
        return Applied([], "x", lambda g, x: x)
    dense, kind = _parameters(at, "transform.dense", spec.dense, "_d", "D D"), spec.norm
    norm = [] if kind is None else [_parameter(at, f"transform.norm.{leaf}", leaf[0], "D") for leaf in kind.tensors()]

    def run(g: Given, x: Tensor) -> Tensor:
        x = again.activation(spec.act, _linear(g, x, dense))
        return x if kind is None else again.norm(x, kind, g[norm[0].name], g[norm[1].name] if len(norm) > 1 else None)

    formula = f"{spec.act}(x W_dᵀ + b_d)" if spec.dense.bias else f"{spec.act}(x W_dᵀ)"
    return Applied([*dense, *norm], formula if kind is None else f"norm({formula})", run)


def _pooled(model: Model, at: Stack, how: PoolingSpec) -> Outcome:
    value = model.encode([list(at.ids)])[0].cpu()
    dense = [] if how.mode != "dense" or how.dense is None else _parameters(at, "dense", how.dense, "_d", "D D")
    formula = {"mean": "v = mean of h over tokens", "first": "v = h[0]", "dense": "v = tanh(h[0] W_dᵀ + b_d)"}[how.mode]

    def once_more(g: Given) -> Tensor:
        h = g[at.final]
        found = h.sum(0) / len(h) if how.mode == "mean" else h[0]
        found = torch.tanh(_linear(g, found, dense)) if dense else found
        return found / (found * found).sum() ** 0.5 if how.normalize else found

    formula += ",  v ← v / |v|" if how.normalize else ""
    why = "One vector for the whole text: texts that mean alike point alike."
    step = Step(OUT, "Pooled vector", formula, why, [Shown("pooled", "v", "D", value)], once_more, dense)
    return Outcome([step], f"a vector of {len(value):,} numbers, length {float(value.norm()):.4f}")


def _logits(formula: str, why: str, shown: Shown, once_more: Again, uses: Sequence[Shown]) -> Step:
    return Step(OUT, "Logits", formula, why, [shown], once_more, uses)


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
        lambda g: table(g["logits"], again.softmax(g["logits"]), again.softmax(g["logits"] / WARM)),
    )  # fmt: skip


def _names(model: Model, ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)
