"""A strict reader of GGUF versions 2 and 3, little-endian.  It allocates no more than the file has bytes for.

The format (github.com/ggml-org/ggml, docs/gguf.md): magic, version, two counts; key/value pairs; one entry a
tensor; then, aligned, the data.  Every count is compared with the bytes that remain before it is used.

`gguf.GGUFReader` does not serve here: it trusts the counts, sizes and offsets of a file, and imports NumPy.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.errors import CheckpointError, shown
from triptych.mapping import Values
from triptych.mapping.gguf_types import BY_NUMBER, TYPES
from .source import Source, TensorInfo, check_places, fault, map_file, view

if TYPE_CHECKING:
    import torch

    from .gguf_blocks import PackedBlocks

MAX_PAIRS = MAX_TENSORS = 1 << 16
MAX_KEY = 1 << 16  # bytes; the format's own limit
MAX_NAME = 256  # bytes of a tensor's name; ggml itself stops at 64
MAX_STRING = 1 << 24  # bytes
MAX_ARRAY = 1 << 24  # elements
MAX_ALIGNMENT = 1 << 20
MAX_ELEMENTS = 1 << 60

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


class GGUFSource(Source):
    """Named tensors and metadata of one GGUF file."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        self.metadata, self.infos = parse(self._data, path)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        info = self.info(name)
        plain = TYPES[info.dtype].torch_dtype
        if plain is None:
            return self.blocks(name).dense(dtype or torch.float32)
        stored = view(self._data, info, getattr(torch, plain), info.shape)
        return stored if dtype is None else stored.to(dtype)

    def is_packed(self, name: str) -> bool:
        return TYPES[self.info(name).dtype].torch_dtype is None

    def blocks(self, name: str) -> PackedBlocks:
        """The tensor in its stored blocks, a view of the mapped file.  Raises CheckpointError for a plain type."""
        from .gguf_blocks import PackedBlocks, block_format

        return PackedBlocks(block_format(self.info(name).dtype), self.read_raw(name))

    def read_raw(self, name: str) -> torch.Tensor:
        import torch

        info = self.info(name)
        kind = TYPES[info.dtype]
        shape = (info.nbytes,) if kind.elements == 1 else kind.raw_shape(info.shape)
        return view(self._data, info, torch.uint8, shape)


def parse(data: mmap.mmap | bytes, path: Path) -> tuple[Values, dict[str, TensorInfo]]:
    """Metadata and tensors of a whole GGUF file; `path` is for errors only.  Raises CheckpointError."""
    reader = _Cursor(data, path)
    if reader.take(4, "magic") != b"GGUF":
        raise fault(path, "does not start with GGUF; not a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        why = "big-endian" if version & 0xFFFF == 0 and version else f"version {version}"
        raise fault(path, f"is a {why} GGUF; versions 2 and 3, little-endian, can be read")
    tensors = reader.count(MAX_TENSORS, 24, "tensors")
    pairs = reader.count(MAX_PAIRS, 13, "key/value pairs")
    metadata: Values = {}
    for _ in range(pairs):
        key = reader.string(MAX_KEY, "key")
        if key in metadata:
            raise fault(path, f"key {shown(key)} twice")
        metadata[key] = reader.value(key)
    alignment = _check_metadata(metadata, path)
    entries = [_entry(reader) for _ in range(tensors)]
    start = -(-reader.position // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in infos:
            raise fault(path, f"tensor {shown(entry.name)} twice")
        if entry.offset % alignment:
            problem = f"offset {entry.offset} is not a multiple of the alignment {alignment}"
            raise fault(path, f"tensor {shown(entry.name)}: {problem}")
        infos[entry.name] = replace(entry, offset=start + entry.offset)
    check_places(infos.values(), path, start, len(data), gaps=True)
    return metadata, infos


def _check_metadata(metadata: Values, path: Path) -> int:
    """The alignment of the data, bytes.  Raises CheckpointError without an architecture and for a split file."""
    if not isinstance(metadata.get("general.architecture"), str):
        raise fault(path, f"general.architecture is {shown(metadata.get('general.architecture'))}, not a string")
    split = metadata.get("split.count", 0)
    if split not in (0, 1):
        raise fault(path, f"is one of {shown(split)} parts; join them first with llama-gguf-split --merge")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise fault(path, f"general.alignment is {shown(alignment)}, not a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _entry(reader: _Cursor) -> TensorInfo:
    """One tensor, with its offset in the data section."""
    name = reader.string(MAX_NAME, "tensor name")

    def bad(problem: str) -> CheckpointError:
        return fault(reader.path, f"tensor {shown(name)}: {problem}")

    rank = reader.number("I")
    if not 1 <= rank <= 4:
        raise bad(f"has {rank} dimensions, not 1 to 4")
    dims = struct.unpack(f"<{rank}Q", reader.take(8 * rank, "dimensions"))
    number, offset = reader.number("I"), reader.number("Q")
    if number not in BY_NUMBER:
        known = ", ".join(name for name in TYPES if name[0] != "I")
        raise bad(f"has type number {number}, which cannot be read; requantize to one of {known}")
    kind = BY_NUMBER[number]
    if not 0 < math.prod(dims) <= MAX_ELEMENTS:
        raise bad(f"dimensions {shown(dims)} hold no elements, or too many")
    if dims[0] % kind.elements:
        raise bad(f"rows of {dims[0]} are not whole blocks of {kind.elements} ({kind.name})")
    return TensorInfo(name, kind.name, dims[::-1], kind.size(dims), reader.path, offset)


class _Cursor:
    """Reads values one after another; a length is checked against the bytes that are left before it is used."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > len(self.data) - self.position:
            left = len(self.data) - self.position
            raise fault(self.path, f"truncated: {what} at byte {self.position} needs {nbytes} bytes, {left} are left")

    def take(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def number(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size, "a number"))[0]

    def count(self, limit: int, nbytes: int, what: str) -> int:
        """A stored count, at most `limit`, of items of at least `nbytes` bytes each."""
        count: int = self.number("Q")
        if count > limit:
            raise fault(self.path, f"has {count} {what} according to its header, more than the limit of {limit}")
        self.need(count * nbytes, f"{count} {what}")
        return count

    def string(self, limit: int, what: str) -> str:
        raw = self.take(self.count(limit, 1, f"bytes of a {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise fault(self.path, f"a {what} is not UTF-8: {shown(raw)}") from None

    def value(self, key: str) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string(MAX_STRING, f"value of {shown(key)}")
        if kind != _ARRAY:
            return self.scalars(kind, 1, key)[0]
        kind = self.number("I")
        if kind == _ARRAY:
            raise fault(self.path, f"key {shown(key)}: an array of arrays")
        count = self.count(MAX_ARRAY, 8 if kind == _STRING else 1, f"elements of {shown(key)}")
        return self.strings(count, key) if kind == _STRING else self.scalars(kind, count, key)

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise fault(self.path, f"key {shown(key)}: unknown value type {kind}")
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = list(layout.unpack(self.take(layout.size, f"value of {shown(key)}")))
        if kind != _BOOL:
            return values
        if not set(values) <= {0, 1}:
            raise fault(self.path, f"key {shown(key)}: a boolean is neither 0 nor 1")
        return [value == 1 for value in values]

    def strings(self, count: int, key: str) -> list[str]:
        """`count` strings, in one loop without calls: a tokenizer has a hundred thousand of them."""
        data, position, total = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        values: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_at(data, position)
                start = position + 8
                position = start + length
                if length > MAX_STRING or position > total:
                    raise fault(self.path, f"key {shown(key)}: a string of {length} bytes at byte {start}")
                values.append(data[start:position].decode())
        except struct.error:
            raise fault(self.path, f"truncated: strings of {shown(key)} at byte {position}") from None
        except UnicodeDecodeError:
            raise fault(self.path, f"key {shown(key)}: string {len(values)} is not UTF-8") from None
        self.position = position
        return values
