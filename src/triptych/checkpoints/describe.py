"""The contents of a checkpoint, read from its header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from triptych import families
from triptych.count import count
from triptych.mapping import Values
from triptych.spec import LinearSpec, ModelSpec, Part
from triptych.spec.masks import mask_text
from triptych.spec.part import part_name
from . import open_source
from .header import Header, read_header


@dataclass(frozen=True)
class StoredTensor:
    """One stored tensor: the parameters it becomes, its shape, type, size and file."""

    name: str
    becomes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str
    op: str  # the operations of loading, in words


@dataclass(frozen=True)
class PartLine:
    """One part of the spec tree; a run of equal parts is one line."""

    name: str  # within its parent: "attn", "blocks.0-29"
    text: str
    below: tuple[PartLine, ...]


@dataclass(frozen=True)
class Description:
    """The facts about a checkpoint that `triptych inspect MODEL` prints."""

    path: str
    family: str
    layout: str
    parameters: int
    stored_bytes: int
    vocab: int
    context: int | None
    tree: PartLine
    tensors: tuple[StoredTensor, ...]
    ties: dict[str, str]
    ignored: dict[str, str]
    tokenizer: Values | None
    spec: ModelSpec

    def to_dict(self) -> Values:
        """Plain data for JSON, without the spec."""
        return {name: value for name, value in asdict(self).items() if name != "spec"}


def describe(model: str | Path, *, ignore: Sequence[str] = (), offline: bool = False) -> Description:
    """The contents of a checkpoint, without reading a weight.

    Raises CheckpointError or ConfigError where loading would: a key or a tensor that is not understood.
    """
    header = read_header(model, ignore=ignore, offline=offline)
    tensors, ignored = _tensors(header, ignore)
    spec = header.spec
    return Description(
        path=str(header.path),
        family=spec.family,
        layout=spec.layout,
        parameters=count(spec).total,
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        vocab=spec.vocab,
        context=spec.context,
        tree=_line("model", spec),
        tensors=tensors,
        ties=dict(spec.ties),
        ignored=ignored,
        tokenizer=_tokenizer(header),
        spec=spec,
    )


def _tensors(header: Header, ignore: Sequence[str]) -> tuple[tuple[StoredTensor, ...], dict[str, str]]:
    source = header.source or open_source(header.path)  # without weights this raises
    plan = families.plan(header.spec, source.kind, source.names, ignore=ignore, where=str(header.path))
    tensors = []
    for step in plan.loads:
        info = source.infos[step.source]
        op = " + ".join(re.sub(r"(?<!^)(?=[A-Z])", " ", type(op).__name__).lower() for op in step.ops)
        split = f"split in {len(step.ours)}" if len(step.ours) > 1 else ""
        does = ", ".join(filter(None, (op, split, "compare" if step.duplicate else "")))
        tensors.append(StoredTensor(info.name, step.ours, info.shape, info.dtype, info.nbytes, info.file.name, does))
    return tuple(tensors), dict(plan.ignored)


def _tokenizer(header: Header) -> Values | None:
    tokenizer = header.tokenizer()
    if tokenizer is None:
        return None
    return {
        "tokens": tokenizer.vocab_size,
        "specials": {
            name: {"text": text, "id": tokenizer.backend.token_to_id(text)}
            for name, text in tokenizer.specials.named().items()
        },
        "stop_ids": sorted(tokenizer.stop_ids),
        "chat_template": tokenizer.chat is not None,
    }


def _line(name: str, part: Part) -> PartLine:
    """A part and its children."""
    return PartLine(name, _part_text(part), tuple(_below(part)))


def _below(part: Part) -> Iterator[PartLine]:
    """Children, equal ones that follow each other in one line: `blocks.0-29`."""

    def alike(named: tuple[str, Part]) -> tuple[str, Part]:
        stem, _, number = named[0].rpartition(".")
        return (stem if number.isdecimal() else named[0]), named[1]

    for _, run in groupby(part.children(), alike):
        (first, child), *others = run
        yield _line(f"{first}-{others[-1][0].rpartition('.')[2]}" if others else first, child)


def _part_text(part: Part) -> str:
    """A part in one line: its class and those of its own values that are not the default."""
    name = part_name(part)
    if isinstance(part, LinearSpec):
        return f"{name} {part.inputs:,} → {part.outputs:,}{' + bias' if part.bias else ''}"
    values = [_value(item.name, getattr(part, item.name), item.default) for item in fields(part)]
    return f"{name} {', '.join(filter(None, values))}".strip()


def _value(name: str, value: Any, default: Any) -> str:
    """One field in words; empty for its default, and for a part, which has its own line."""
    if name == "mask":
        return f"mask {mask_text(value)}"
    if value == default or value is False or not isinstance(value, int | float | str):
        return ""
    if value is True:
        return name
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return f"{name} {value:,.0f}" if is_whole else f"{name} {value}"
