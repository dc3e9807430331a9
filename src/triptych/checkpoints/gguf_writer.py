"""Writes GGUF version 3, little-endian: metadata, then tensors one at a time; the file appears complete or not at all.

The format: github.com/ggml-org/ggml, docs/gguf.md; the reader is `triptych.checkpoints.gguf_reader`.  `gguf.GGUFWriter`
does not serve here: it writes into the file of that name, so that a crash leaves half of one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.errors import CheckpointError, first_line, shown
from triptych.mapping.gguf_types import TYPES
from .save import replacing

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 32
_U8, _I32, _ARRAY = 0, 5, 9
#: The type of GGUF for each type of Python, and the letter of `struct` for its values.
_KINDS = {bool: (7, "?"), int: (4, "I"), float: (6, "f"), str: (8, "s")}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor to write: its type by GGUF's name, its shape, and a function that returns its numbers, or for a packed
    type its blocks, uint8 `[..., bytes of a row]`."""

    name: str
    kind: str
    shape: tuple[int, ...]  # outermost dimension first
    values: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return TYPES[self.kind].size(self.shape)


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Sequence[GGUFTensor]) -> int:
    """Write the file `path`; its size, bytes.

    Metadata are strings, booleans, numbers (unsigned 32-bit integers, 32-bit floats), lists of one of these, bytes.
    Raises CheckpointError when anything cannot be written; `path` is then as it was before.
    """
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(key, value) for key, value in metadata.items())
    at = 0
    for entry in tensors:
        dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        header += _string(entry.name) + dims + struct.pack("<IQ", TYPES[entry.kind].number, at)
        at += _aligned(entry.nbytes)
    with replacing(path) as file:
        file.write(header + bytes(_aligned(len(header)) - len(header)))
        for entry in tensors:
            file.write(_content(entry))
            file.write(bytes(_aligned(entry.nbytes) - entry.nbytes))
    return _aligned(len(header)) + at


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _content(entry: GGUFTensor) -> Any:
    """The tensor's bytes as stored."""
    import torch

    from .gguf_blocks import block_format

    values, plain = entry.values().detach().cpu(), TYPES[entry.kind].torch_dtype
    packed = plain is None and values.dtype == torch.uint8
    shape = TYPES[entry.kind].raw_shape(entry.shape) if packed else entry.shape
    if values.shape != shape:
        raise CheckpointError(f"{entry.name} is {list(values.shape)}, not {list(shape)}")
    try:
        stored = values if packed else block_format(entry.kind).pack(values) if plain is None else _plain(values, plain)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {shown(entry.name)}: {error}") from None
    return stored.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _plain(values: Tensor, dtype: str) -> Tensor:
    import torch

    stored = values.to(getattr(torch, dtype))
    if dtype == "float16" and bool((stored.isinf() & ~values.isinf()).any()):
        raise CheckpointError("holds numbers too large for f16; use bf16 or f32")
    return stored


def _string(text: str) -> bytes:
    raw = text.encode(errors="replace")  # of half of a surrogate pair, as in a file's name that is not UTF-8
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """A value, preceded by its type."""
    if isinstance(value, bytes):
        return struct.pack("<IIQ", _ARRAY, _U8, len(value)) + value
    listed = isinstance(value, list)
    values: list[Any] = value if listed else [value]
    for item in values:
        if type(item) not in _KINDS:
            raise CheckpointError(f"key {shown(key)}: {shown(item)} cannot be written as GGUF metadata")
    kinds = {_KINDS[type(item)] for item in values} or {_KINDS[str]}
    if len(kinds) > 1:
        raise CheckpointError(f"key {shown(key)}: a list of several types cannot be written")
    kind, code = kinds.pop()
    if listed and code == "I":  # lists of integers are signed: that is how the types of tokens are stored
        kind, code = _I32, "i"
    start = struct.pack("<IIQ", _ARRAY, kind, len(values)) if listed else struct.pack("<I", kind)
    if code == "s":
        return start + b"".join(map(_string, values))
    try:
        return start + b"".join(struct.pack("<" + code, item) for item in values)
    except (struct.error, OverflowError) as error:
        raise CheckpointError(f"key {shown(key)}: a value is out of range for GGUF ({first_line(error)})") from None
