"""`explain`: every step of the forward of a text, in each of the three layouts.

It ends in logits and the next token, the word behind a mask, a label, or a vector for the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych import arguments
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe.prompts import name_tokens
from triptych.program import Instruction, lower
from triptych.spec import (
    ClassHeadSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    PoolingSpec,
    ReplacedHeadSpec,
    SpanHeadSpec,
    TokenHeadSpec,
)
from . import reference_ops
from .expressions import AppliedOp, computed, evaluate, formula
from .from_program import OUT, StepBuilder
from .stack_run import StackRun
from .steps import PrintedTensors, ShownTensor, Walk, WalkStep

WRITTEN = 6  # tokens an encoder-decoder generates; the last of them is explained
TOP = 8  # candidates printed
WARM = 0.7  # the temperature shown beside 1
TOKEN = "One number for each word of the vocabulary, from the vector of {} alone."
SAMPLING = (
    "Greedy decoding takes the likeliest. Sampling divides the logits by a temperature, may drop the tail (top-k,"
    " top-p), and draws one; then the forward runs again with one token more."
)

Outcome = tuple[list[WalkStep], str, int | None]  # the last steps, their result in words, and the token, if one is


@arguments.checked
def explain(model: Model, text: str | Sequence[int], *, layer: int = 0, head: int = 0, row: int | None = None) -> Walk:
    """Every step of the forward of `text` (or ids), from token ids to the output of the model.

    A decoder ends in the token that greedy generation takes next, an encoder-decoder in the last of the first few it
    generates, an encoder in the word behind its first mask, its label, or its pooled vector.  One block is shown in
    full: `layer` (a stack with fewer blocks shows its last), `head` the one printed of each attention, `row` the token
    followed, by default the one that determines the output.  The steps, their order and their equations are those of
    the model's program (`triptych.program`).

    Raises InputError for an empty text, one longer than the model's context, a layer, head or row out of range, and a
    model in half precision or without a head.
    """
    ids, target = checked(model, text, layer, head)
    followed, program = _followed(model, ids, row), lower(model.module)
    runs: list[StackRun] = []
    for name in model.spec.stacks:
        own, focus = (ids, followed) if target is None or name == "encoder" else (target, len(target) - 1)
        runs.append(StackRun(
            model=model, program=program, name=name, ids=own, layer=layer, head=head, focus=focus,
            source=runs[0] if runs else None,
        ))  # fmt: skip
    reads = dict.fromkeys(site for run in runs for site in run.reads)
    trace = model.trace([ids], None if target is None else [target], read=list(reads))
    steps, memory = [], ""
    for run in runs:
        run.trace, run.memory = trace, memory
        builder = StepBuilder(run)
        steps.append(_read(model, run, text if isinstance(text, str) and run is runs[0] else None))
        steps += [*builder.beginning(), *builder.inside(), *builder.ending()]
        memory = builder.output
    last, summary, token = _outcome(model, builder, followed)
    return Walk("A forward, step by step", facts(model, text, runs), [*steps, *last], summary, token)


def checked(model: Model, text: str | Sequence[int], layer: int, head: int) -> tuple[list[int], list[int] | None]:
    """The ids that the model reads, and those of the decoder beside an encoder: its start token and all but the last of
    what it generates, or of the text where it only labels.  Raises InputError for what `explain` refuses.
    """
    model.check_words("explain")
    ids, spec = model.ids([text])[0], model.spec
    if not ids or (isinstance(text, str) and not text.strip()):
        raise InputError("the text is empty; give a sentence")
    if spec.context is not None and len(ids) > spec.context:
        raise InputError(f"the text is {len(ids)} tokens and the model has {spec.context} positions; shorten it")
    if spec.head is None:
        raise InputError(f"this {spec.family} model has no head, so its forward has no output to explain")
    dtype = model.module.dtype
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"{str(dtype)[6:]} cannot hold numbers to 1e-5; load the model with dtype=torch.float32")
    depth = max(len(stack.blocks) for stack in spec.stacks.values())
    in_range("layer", layer, depth)
    for stack in spec.stacks.values():
        block = stack.blocks[min(layer, len(stack.blocks) - 1)]
        in_range("head", head, block.attn.heads)
    if spec.layout != "encoder-decoder":
        return ids, None
    start = spec.start_id()
    written = model.generate([ids], max_new_tokens=WRITTEN)[0].ids if isinstance(spec.head, LMHeadSpec) else ids
    return ids, [start, *written[:-1]]


def in_range(what: str, value: int, n: int) -> None:
    if not 0 <= value < n:
        raise InputError(f"{what} {value} is out of range; {what}s are 0 to {n - 1}")


def facts(model: Model, text: str | Sequence[int], stacks: Sequence[StackRun]) -> list[tuple[str, str]]:
    """The model, the text, and what of the forward is shown."""
    named = [(f"{stack.name} " if len(stacks) > 1 else "", stack) for stack in stacks]
    return [
        ("Model", f"{model.spec.family}, {model.spec.layout}"),
        ("Text", text if isinstance(text, str) else " ".join(map(str, text))),
        *((f"{name}block".capitalize(), f"{one.layer}, of blocks 0 to {len(one.stack.blocks) - 1}")
          for name, one in named),
        ("Head", f"{stacks[0].head}, of heads 0 to {stacks[0].heads - 1}"),
        *((f"{name}row".capitalize(), f"{one.first + one.focus}, {one.labels[one.focus]}") for name, one in named),
    ]  # fmt: skip


def _followed(model: Model, ids: Sequence[int], row: int | None) -> int:
    """The row that is followed: `row`, else the first mask, else the last token that is a word."""
    if row is not None:
        in_range("row", row, len(ids))
        return row
    tokenizer = model.tokenizer
    if model.spec.layout == "decoder" or tokenizer is None:
        return len(ids) - 1
    if tokenizer.mask_id in ids:
        return ids.index(tokenizer.mask_id)
    special = (tokenizer.cls_id, tokenizer.sep_id, tokenizer.eos_id, tokenizer.pad_id)
    return max((i for i, token in enumerate(ids) if token not in special), default=len(ids) - 1)


def _read(model: Model, stack: StackRun, text: str | None) -> WalkStep:
    """Ids and tokens.  A text is tokenized once more; a decoder's own tokens are shown as they are."""
    ids = torch.tensor(list(stack.ids))
    n = f"{len(stack.ids)} token" + "s" * (len(stack.ids) != 1)
    shown = ShownTensor(f"{stack.prefix}ids", "ids", "N", ids, columns=stack.labels)
    title, formula, meaning = "Tokens", "ids = tokenize(text)", f"The text is cut into {n} of a fixed vocabulary."
    if stack.source is not None:
        title, formula = "Tokens so far", "ids = [start, generated]"
        meaning = f"The decoder has read {n}: its start token, and those it has generated."

    def once_more(_: object) -> torch.Tensor:
        again = list(stack.ids) if text is None else model.ids([text])[0]
        return torch.tensor(again)

    return WalkStep(stack.part("text in"), title, formula, meaning, [shown], once_more)


# ---------------------------------------------------------------- where it ends


def _outcome(model: Model, builder: StepBuilder, row: int) -> Outcome:
    """The outcome of the model's own head for the final vectors."""
    at, head = builder.at, model.spec.head
    logits = at.trace.logits[0].cpu()
    mask = None if model.tokenizer is None else model.tokenizer.mask_id
    if isinstance(head, LMHeadSpec):
        return _token(model, builder, logits, None)
    if isinstance(head, MaskedLMHeadSpec) and mask is not None and mask in at.ids:
        return _token(model, builder, logits, row if at.ids[row] == mask else list(at.ids).index(mask))
    shown = at.by_token("logits", "l", logits, "N C")
    if isinstance(head, ClassHeadSpec):
        shown = ShownTensor("logits", "l", "C", logits.reshape(-1))
        why = "One number for each label, from one vector for the whole text; the largest wins."
        summary = f"label {int(logits.argmax())} of {logits.numel()}"
    elif isinstance(head, TokenHeadSpec):
        why = "Labels of each token."
        summary = f"label {int(logits[row].argmax())} of {logits.shape[-1]} for {at.labels[row]}"
    elif isinstance(head, SpanHeadSpec):
        first, last = logits.argmax(0).tolist()
        why = "Two numbers for each token: does an answer begin here, does it end here."
        summary = f"the answer begins at {first}, {at.labels[first]}, and ends at {last}, {at.labels[last]}"
    elif isinstance(head, ReplacedHeadSpec):
        why = "One number for each token."
        summary = f"{at.labels[row]}: {float(logits[row, 0]):.4f}, above 0 where the token was replaced"
    else:
        return _pooled(model, builder)
    return [_logits(builder, shown, why)], summary, None


def _pooled(model: Model, builder: StepBuilder) -> Outcome:
    """One vector: by the model's own pooling, or the mean."""
    value, vectors = model.encode([list(builder.at.ids)])[0].cpu(), {"x": builder.output}
    why = "One vector for the whole text: texts with similar meanings have similar vectors."
    mean = AppliedOp(Instruction("pool", ("mean",), vectors, {}, {"mode": "mean"}), dict(vectors))
    own = isinstance(model.spec.head, PoolingSpec)
    shown = ShownTensor("pooled", "v", "D", value)
    step = _logits(builder, shown, why, value=None if own else mean, title="Pooled vector")
    return [step], f"a vector of {len(value):,} numbers, length {float(value.norm()):.4f}", None


def _logits(
    builder: StepBuilder, shown: ShownTensor, why: str, *, title: str = "Logits", row_name: str = "",
    chosen: Callable[[Tensor], Tensor] = lambda h: h, value: AppliedOp | None = None,
) -> WalkStep:  # fmt: skip
    """The step of the head, by the entry `unembed` of the program; of the `chosen` vector only, called `row_name`."""
    final, entries = builder.output, builder.at.program.entries
    if value is None:
        steps = entries["unembed"].instructions
        value = computed(entries, "unembed", steps, {"hidden": final}, together=True)[-1].value
    text, definitions = formula(value, builder.symbols | {final: f"{builder.symbols[final]}{row_name}"})

    def once_more(g: PrintedTensors) -> Tensor:
        return evaluate(value, g, {final: chosen(g[final])})

    equation = ",  ".join([f"{shown.symbol} = {text}", *definitions])
    return WalkStep(OUT, title, equation, why, [shown], once_more, builder.uses(value, shown))


def _token(model: Model, builder: StepBuilder, logits: Tensor, place: int | None) -> Outcome:
    """The next token, or the word at the mask at `place`."""
    row, row_name, token_text, title = -1, "last", "the last token", "Next token"
    explanation, summary = SAMPLING, "next token:"
    if place is not None:
        row, row_name, token_text, title, summary = place, str(place), "the mask", "The word", f"the mask at {place} is"
        explanation = "The likeliest word replaces the mask."
    values = logits[row]
    token = int(values.argmax())
    name, chance = name_tokens(model, [token])[0], float(values.softmax(-1)[token])
    last = ShownTensor("token", "token", "new", torch.tensor([token]), columns=[name])
    shown = ShownTensor("logits", "l", "V", values)
    steps = [
        _logits(builder, shown, TOKEN.format(token_text), row_name=f"[{row_name}]", chosen=lambda h: h[row]),
        _candidates(model, values),
        WalkStep(OUT, title, "token = argmax l", explanation, [last], lambda g: g["logits"].argmax()[None]),
    ]
    return steps, f"{summary} “{name}” (id {token}, p {chance:.4f})", token


def _candidates(model: Model, logits: Tensor) -> WalkStep:
    """The likeliest, with what a temperature makes of their probabilities."""
    top = min(TOP, len(logits))

    def table(values: Tensor, p: Tensor, warm: Tensor) -> Tensor:
        best = values.topk(top).indices
        return torch.stack([values[best], p[best], warm[best]], 1)

    value = table(logits, logits.softmax(-1), (logits / WARM).softmax(-1))
    labels = name_tokens(model, logits.topk(top).indices.tolist())
    shown = ShownTensor("candidates", "p", "top ·", value, labels, ["l", "p", f"p, τ={WARM}"], focus=0)
    rest = len(logits) - top
    why = "Softmax over the vocabulary. " + (
        f"The other {rest:,} tokens share {1 - float(value[:, 1].sum()):.1%}." if rest else ""
    )
    return WalkStep(
        OUT, "Candidates", "p = softmax(l),  p at τ = softmax(l / τ)", why.strip(), [shown],
        lambda g: table(g["logits"], reference_ops.softmax(g["logits"]), reference_ops.softmax(g["logits"] / WARM)),
    )  # fmt: skip
