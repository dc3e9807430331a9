"""`explain`: every step of the forward of a text, in each of the three layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.errors import InputError
from triptych.explain.from_program import StepBuilder
from triptych.explain.outcome import outcome
from triptych.explain.stack_run import StackRun, sections
from triptych.explain.steps import Shown, Step, Walk
from triptych.model import Model
from triptych.program import lower
from triptych.spec import LMHeadSpec

WRITTEN = 6  # tokens an encoder-decoder generates; the last of them is explained


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
    layers = {name: min(layer, len(stack.blocks) - 1) for name, stack in model.spec.stacks.items()}
    parts = {name: sections(model.module, program, name, at) for name, at in layers.items()}
    reads = [site for part in parts.values() for site in part.reads]
    trace = model.trace([ids], None if target is None else [target], read=list(dict.fromkeys(reads)))
    stacks: list[StackRun] = []
    steps, memory = [], ""
    for name, at in layers.items():
        own, focus = (ids, followed) if target is None or name == "encoder" else (target, len(target) - 1)
        stack = StackRun(
            module=model.module, program=program, sections=parts[name], trace=trace, name=name,
            labels=tokens(model, own), ids=own, layer=at, head=head, focus=focus,
            source=stacks[0] if stacks else None, memory=memory,
        )  # fmt: skip
        builder = StepBuilder(stack)
        steps.append(_read(model, stack, text if isinstance(text, str) and not stacks else None))
        steps += [*builder.beginning(), *builder.inside(), *builder.ending()]
        stacks.append(stack)
        memory = builder.output
    end = outcome(model, builder, followed)
    return Walk("A forward, step by step", facts(model, text, stacks), [*steps, *end.steps], end.summary, end.token)


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
    if spec.ids.start is None:
        raise InputError("the config has no decoder_start_token_id, which the decoder needs as its first token")
    written = model.generate([ids], max_new_tokens=WRITTEN)[0].ids if isinstance(spec.head, LMHeadSpec) else ids
    return ids, [spec.ids.start, *written[:-1]]


def in_range(what: str, value: int, n: int) -> None:
    if not 0 <= value < n:
        raise InputError(f"{what} {value} is out of range; {what}s are 0 to {n - 1}")


def tokens(model: Model, ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)


def facts(model: Model, text: str | Sequence[int], stacks: Sequence[StackRun]) -> list[tuple[str, str]]:
    """The model, the text, and what of the forward is shown."""
    lines = [("Model", f"{model.spec.family}, {model.spec.layout}")]
    lines.append(("Text", text if isinstance(text, str) else " ".join(map(str, text))))
    for stack in stacks:
        which = f"{stack.name} " if len(stacks) > 1 else ""
        lines.append((f"{which}block".capitalize(), f"{stack.layer}, of blocks 0 to {len(stack.stack.blocks) - 1}"))
    heads = stacks[0].heads
    lines.append(("Head", f"{stacks[0].head}, of heads 0 to {heads - 1}"))
    for stack in stacks:
        which = f"{stack.name} row" if len(stacks) > 1 else "row"
        lines.append((which.capitalize(), f"{stack.first + stack.focus}, {stack.labels[stack.focus]}"))
    return lines


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


def _read(model: Model, stack: StackRun, text: str | None) -> Step:
    """Ids and tokens.  A text is tokenized once more; a decoder's own tokens are shown as they are."""
    ids = torch.tensor(list(stack.ids))
    n = f"{len(stack.ids)} token" + "s" * (len(stack.ids) != 1)
    shown = Shown(f"{stack.prefix}ids", "ids", "N", ids, columns=stack.labels)
    title, formula, meaning = "Tokens", "ids = tokenize(text)", f"The text is cut into {n} of a fixed vocabulary."
    if stack.source is not None:
        title, formula = "Tokens so far", "ids = [start, generated]"
        meaning = f"The decoder has read {n}: its start token, and those it has generated."

    def once_more(_: object) -> torch.Tensor:
        again = list(stack.ids) if text is None else model.ids([text])[0]
        return torch.tensor(again)

    return Step(stack.part("text in"), title, formula, meaning, [shown], once_more)
