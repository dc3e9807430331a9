"""A trace as one safetensors file: tensors, and in its metadata as JSON what each of them is.

A tensor that several sites passed on is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from triptych.checkpoints.safetensors import open_file
from triptych.checkpoints.save import replacing, write_safetensors
from triptych.checkpoints.source import fault
from triptych.errors import first_line
from triptych.probe.records import Record

KEY = "triptych.trace"
Number = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Row(_Strict):
    """One row at one site: the name of its tensor, and its positions, `[first, end]` of neighbouring ones."""

    item: Number
    tensor: str
    positions: list[tuple[Number, Number]]
    how: Literal["tokens", "queries", "sum", "mean"]


class _Contents(_Strict):
    version: Literal[1]
    texts: list[str]
    tokens: list[list[int]]
    targets: list[list[int]]
    fired: dict[str, int]
    logits: list[str]
    sites: dict[str, list[_Row]]


@dataclass(frozen=True)
class StoredTrace:
    """What a file holds of a trace, under the names of `Trace`."""

    texts: list[str]
    tokens: list[list[int]]
    targets: list[list[int]]
    fired: dict[str, int]
    logits: list[Tensor]
    records: dict[str, dict[int, Record]]


def save(trace: StoredTrace, path: str | Path) -> None:
    """As `Trace.save`."""
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[object, ...], str] = {}

    def named(value: Tensor) -> str:
        key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (len(names),)
        if key not in names:
            names[key] = f"{len(names)}"
            tensors[names[key]] = value.detach()
        return names[key]

    sites: dict[str, list[_Row]] = {}
    for site, rows in trace.records.items():
        for item, record in sorted(rows.items()):
            value = record.joined(site.rpartition(".")[2])
            how = "tokens" if record.how == "mean" else record.how  # a mean is divided by now
            row = _Row(item=item, tensor=named(value), positions=_ranges(record.at()), how=how)
            sites.setdefault(site, []).append(row)
    contents = _Contents(
        version=1, texts=trace.texts, tokens=trace.tokens, targets=trace.targets, fired=trace.fired,
        logits=[named(value) for value in trace.logits], sites=sites,
    )  # fmt: skip
    with replacing(path) as file:
        write_safetensors(file, tensors, {"format": "pt", KEY: contents.model_dump_json()})


def load(path: str | Path) -> StoredTrace:
    """As `Trace.load`."""
    path = Path(path)
    source = open_file(path)
    text = source.metadata.get(KEY)
    if text is None:
        raise fault(path, "holds tensors and no trace; give a file that Trace.save wrote")
    try:
        contents = _Contents.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise fault(
            path, f"its trace is damaged: {first_line(ValueError(first['msg']))} at {where or 'its beginning'}"
        ) from None
    except RecursionError:
        raise fault(path, "its trace is damaged: nested too deeply") from None
    tensors = {name: source.read(name).clone() for name in source.names}
    logits = [_tensor(tensors, name, path) for name in contents.logits]
    records: dict[str, dict[int, Record]] = {}
    for site, rows in contents.sites.items():
        for row in rows:
            record = Record(row.how, [_positions(row, path)], [_tensor(tensors, row.tensor, path)])
            records.setdefault(site, {})[row.item] = record
    return StoredTrace(contents.texts, contents.tokens, contents.targets, contents.fired, logits, records)


MOST = 1 << 24  # positions of one row


def _positions(row: _Row, path: Path) -> tuple[int, ...]:
    if sum(max(0, end - first) for first, end in row.positions) > MOST:
        raise fault(path, f"its trace is damaged: a row of more than {MOST:,} positions")
    return tuple(position for first, end in row.positions for position in range(first, end))


def _tensor(tensors: dict[str, Tensor], name: str, path: Path) -> Tensor:
    if name not in tensors:
        raise fault(path, f"its trace is damaged: it names a tensor {name[:40]!r} that the file does not hold")
    return tensors[name]


def _ranges(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges
