"""Reads safetensors, one file or sharded, after a strict check of the header.

The format (github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON object
`name -> {dtype, shape, data_offsets}` with an optional `__metadata__` of strings, then the data, which the
tensors must tile exactly.  A file that breaks any rule is refused before any tensor of it is read.

`safetensors.safe_open` does not serve here: it imports NumPy or torch to open a file, which reading a header must not
wait for, and it gives no offsets, by which a tensor is a view of the mapped file.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.errors import CheckpointError, shown
from .source import (
    Source,
    TensorInfo,
    check_places,
    fault,
    is_plain_name,
    json_object,
    map_file,
    read_json,
    view,
)

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER = 100_000_000  # the format's own limit, bytes
MAX_ELEMENTS = 2**60

# How the format spells a dtype -> how torch does.  Sub-byte types are not whole bytes an element: refused.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
ITEMSIZE = {name: int(re.findall(r"\d+|$", name)[0] or 8) // 8 for name in DTYPES}  # bytes, of the bits in a name


class SafetensorsSource(Source):
    """Named tensors of one safetensors file, or of the shards an index lists."""

    def __init__(self, path: Path, shards: Iterable[Path]) -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self.metadata: dict[str, Any] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for shard in shards:
            self._maps[shard] = map_file(shard)
            infos, metadata = parse_header(self._maps[shard], shard)
            for name in infos.keys() & self.infos.keys():
                raise fault(shard, f"tensor {shown(name)} is also in {self.infos[name].file.name}")
            self.infos |= infos
            self.metadata |= metadata

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        import torch

        info = self.info(name)
        stored = view(self._maps[info.file], info, getattr(torch, DTYPES[info.dtype]), info.shape)
        return stored if dtype is None else stored.to(dtype)

    def read_raw(self, name: str) -> torch.Tensor:
        import torch

        info = self.info(name)
        return view(self._maps[info.file], info, torch.uint8, (info.nbytes,))


def open_file(path: Path) -> SafetensorsSource:
    """One safetensors file; `CheckpointError` when it breaks the format."""
    return SafetensorsSource(path, [path])


def open_sharded(index: Path) -> SafetensorsSource:
    """The shards that `index` (`*.safetensors.index.json`) lists, each tensor in the shard that the index names."""
    where = read_index(index)
    shards = [index.parent / name for name in sorted(set(where.values()))]
    for shard in shards:
        if not shard.is_file():
            raise fault(index, f"lists the shard {shown(shard.name)}, which is not there; download it again")
    source = SafetensorsSource(index, shards)
    for name, file in where.items():
        if name not in source.infos:
            raise fault(index, f"lists the tensor {shown(name)}, which {shown(file)} does not hold")
        if (actual := source.infos[name].file.name) != file:
            raise fault(index, f"puts the tensor {shown(name)} in {shown(file)}; it is in {shown(actual)}")
    for name in source.infos.keys() - where.keys():
        raise fault(index, f"does not list the tensor {shown(name)} of {source.infos[name].file.name}")
    return source


def read_index(index: Path) -> dict[str, str]:
    """The `weight_map` of an index, tensor -> shard; every shard is a plain file name in the same directory."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise fault(index, "has no weight_map of tensor names to shard files")
    for name, file in where.items():
        if not isinstance(file, str) or not is_plain_name(file) or not file.endswith(".safetensors"):
            raise fault(index, f"tensor {shown(name)}: {shown(file)} is not the name of a shard in the same directory")
    return where


def parse_header(data: mmap.mmap | bytes, path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and metadata of a whole safetensors file; `path` only names it in errors."""
    total = len(data)
    length = int.from_bytes(data[:8], "little")
    if total < 8:
        raise fault(path, f"is {total} bytes long, too short for a safetensors file")
    if length > MAX_HEADER or 8 + length > total:
        raise fault(path, f"declares a header of {length} bytes and has {total - 8}; truncated, or not safetensors")
    raw = data[8 : 8 + length]
    if raw[:1] != b"{":
        raise fault(path, "its header is not a JSON object; not a safetensors file")
    header = json_object(raw, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fault(path, "its __metadata__ is not an object of strings")
    infos = {name: _tensor(name, entry, path, 8 + length) for name, entry in header.items()}
    check_places(infos.values(), path, 8 + length, total, gaps=False)
    return infos, metadata


def _tensor(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    """One header entry, checked on its own; `start` is where the data begins."""

    def bad(problem: str) -> CheckpointError:
        return fault(path, f"tensor {shown(name)}: {problem}")

    try:
        name.encode()
    except UnicodeEncodeError:
        raise bad("its name is not valid Unicode") from None
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad("its entry is not {dtype, shape, data_offsets}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"unknown dtype {shown(dtype)}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise bad(f"shape {shown(shape)} is not a list of sizes")
    # Sizes first, zeros left out: torch refuses a shape whose product overflows even when it has no elements.
    if len(shape) > 32 or math.prod(size for size in shape if size) > MAX_ELEMENTS:
        raise bad(f"shape {shown(shape)} has too many elements or dimensions")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(at) is int and at >= 0 for at in offsets):
        raise bad(f"data_offsets {shown(offsets)} are not two positions")
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise bad(f"data_offsets {shown(offsets)} do not span the {nbytes} bytes of {dtype} {shape}")
    return TensorInfo(name, dtype, tuple(shape), nbytes, path, start + offsets[0])
