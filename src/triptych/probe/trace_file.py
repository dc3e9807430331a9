"""The JSON metadata of a saved trace: which tensor holds which site, row and positions.

A module of its own because importing pydantic is slow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.checkpoints.safetensors import open_file
from triptych.checkpoints.source import fault
from triptych.errors import CheckpointError, InputError, first_line
from .trace_values import How

KEY = "triptych.trace"
Number = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StoredRow(_Strict):
    """One row at one site of a file: the name of its tensor, and its positions, `[first, end]` of neighbouring ones."""

    item: Number
    tensor: str
    positions: list[tuple[Number, Number]]
    how: How


class Contents(_Strict):
    """A file's description of its tensors; one that several sites passed on is written once."""

    version: Literal[1]
    texts: list[str]
    tokens: list[list[int]]
    targets: list[list[int]]
    fired: dict[str, int]
    logits: list[str]
    sites: dict[str, list[StoredRow]]


def check_place(path: Path) -> None:
    """Raise InputError for the ending of another format, CheckpointError for a file that is no saved trace."""
    if path.suffix in (".pt", ".pth", ".npy", ".npz", ".json"):
        raise InputError(f"{path}: a trace is a safetensors file; write {path.with_suffix('.safetensors').name}")
    try:
        if os.path.isfile(path) and os.path.getsize(path):
            contents_of(open_file(path).metadata.get(KEY), path)
    except CheckpointError:
        raise CheckpointError(f"{path} is there and is no saved trace; choose another name, or remove it") from None


def contents_of(text: str | None, path: Path) -> Contents:
    if text is None:
        raise fault(path, "holds tensors and no trace; give a file that Trace.save wrote")
    try:
        return Contents.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise fault(
            path, f"its trace is damaged: {first_line(ValueError(first['msg']))} at {where or 'its beginning'}"
        ) from None
    except RecursionError:
        raise fault(path, "its trace is damaged: nested too deeply") from None


def ranges(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges
