"""The packed types of GGUF: their blocks as numbers, and numbers as their blocks.

Layouts and arithmetic are ggml's (github.com/ggml-org/ggml, ggml-common.h, `dequantize_row_*` and
`quantize_row_*_ref` in ggml-quants.c).  A block holds 32 elements (`Q4_0` ... `Q8_0`) or 256 (`*_K`) with fp16 scales.
A reader splits blocks `[n, bytes of a block]`, uint8, into integer codes and scales, and computes float32
`[n, elements]` from them; writers, which exist for the types without importance weights, do the inverse.  Both
compute in float32 in ggml's order, so the results are equal to ggml's bit for bit.

Codes and scales are what `quantize.repack` needs, so the types that kernels multiply are read here.  The numbers of all
others come from the package `gguf`, which gives no codes, and whose own reader trusts the sizes that a file states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from triptych.errors import CheckpointError
from triptych.mapping.gguf_types import TYPES, GGUFType

_READ_CHUNK = 1 << 15  # elements unpacked at a time: the temporaries then stay in the core's cache
_CHUNK = 1 << 18  # elements packed at a time, or read by the package gguf: the temporaries stay small beside the tensor


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The parts of n blocks: numbers `scale * code + minimum`, or `(scale * factor) * code`, in groups of one scale."""

    codes: Tensor  #: `[n, groups, width]`, uint8 or int8
    scales: Tensor  #: `[n, groups]` float32, or `[n, 1]` where there are factors
    minimums: Tensor | None = None  #: `[n, groups]` float32
    factors: Tensor | None = None  #: `[n, groups]` int8

    def values(self) -> Tensor:
        """The numbers, float32 `[n, elements]`."""
        scales = self.scales if self.factors is None else self.scales * self.factors.float()
        values = torch.mul(scales.unsqueeze(-1), self.codes.float())
        if self.minimums is not None:
            values += self.minimums.unsqueeze(-1)
        return values.flatten(1)


@dataclass(frozen=True)
class GGUFBlockFormat:
    """One packed type with the functions that read and write its blocks, where there are any here."""

    type: GGUFType
    parts: Callable[[Tensor], BlockParts] | None = None
    write: Callable[[Tensor], Tensor] | None = None

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.type.elements

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.type.nbytes

    @property
    def band(self) -> int:
        """Rows that are stored interleaved: 1, each row by itself."""
        return 1

    def multiply(self, raw: Tensor, rows: int, x: Tensor) -> None:
        """No kernel multiplies with the blocks of a file; `quantize.repack` gives what kernels take."""

    @property
    def stored_as(self) -> str:
        """This type."""
        return self.type.name

    def stored(self, raw: Tensor, rows: int, file: Callable[[], Tensor | None]) -> Tensor:
        """The blocks themselves."""
        return raw

    def unpack(self, raw: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`raw [..., bytes of a row]`, uint8 -> `[..., elements of a row]` in `dtype`, rounded from float32."""
        blocks = raw.reshape(-1, self.nbytes)
        out = torch.empty((len(blocks), self.elements), dtype=dtype, device=raw.device)
        step = (_CHUNK if self.parts is None else _READ_CHUNK) // self.elements
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            out[start : start + step] = self._by_gguf(part) if self.parts is None else self.parts(part).values()
        return out.view(*raw.shape[:-1], raw.shape[-1] // self.nbytes * self.elements)

    def _by_gguf(self, blocks: Tensor) -> Tensor:
        """The numbers of blocks, float32 `[n, elements]`, where only the package `gguf` reads the type."""
        try:
            from gguf import GGMLQuantizationType, quants
        except ImportError:
            ours = ", ".join(name for name, form in FORMATS.items() if form.parts)
            problem = f"the blocks of {self.type.name} are read by the package gguf, which is not installed"
            raise CheckpointError(f"{problem}: pip install gguf, or requantize the file to one of {ours}") from None
        with np.errstate(all="ignore"):  # a damaged scale is infinite or NaN, as in ggml
            values = quants.dequantize(blocks.reshape(1, -1).cpu().numpy(), GGMLQuantizationType[self.type.name])
        return torch.from_numpy(values).view(-1, self.elements)

    def pack(self, values: Tensor) -> Tensor:
        """`values [..., elements of a row]`, of any floating dtype -> uint8 `[..., bytes of a row]`.

        Raises CheckpointError for a type that is only read, for rows that are not whole blocks, and for numbers that
        are not finite or whose scale does not fit fp16.
        """
        if self.write is None:
            raise CheckpointError(f"{self.type.name} can be read but not written; use {', '.join(WRITABLE)}")
        if values.shape[-1] % self.elements:
            problem = f"rows of {values.shape[-1]} are not whole blocks of {self.elements}"
            raise CheckpointError(f"{problem} ({self.type.name})")
        blocks = values.reshape(-1, self.elements)
        out = torch.empty((len(blocks), self.nbytes), dtype=torch.uint8)
        step = _CHUNK // self.elements
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step].float()
            if not bool(part.isfinite().all()):
                raise CheckpointError(f"holds numbers that are not finite, which {self.type.name} cannot store")
            out[start : start + step] = self.write(part)
        return out.view(self.type.raw_shape(tuple(values.shape)))


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """A stored tensor as its file has it: `raw` uint8 `[..., bytes of a row]` in the blocks of `format`."""

    format: GGUFBlockFormat
    raw: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the blocks stand for."""
        return (*self.raw.shape[:-1], self.raw.shape[-1] // self.format.nbytes * self.format.elements)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, `[*shape]` in `dtype`."""
        return self.format.unpack(self.raw, dtype)

    def rows(self, start: int, stop: int) -> PackedBlocks:
        """Entries [start, stop) of the first dimension, sharing memory."""
        return PackedBlocks(self.format, self.raw[start:stop])


def block_format(name: str) -> GGUFBlockFormat:
    """The packed type called `name`.  Raises CheckpointError for any other type."""
    if name not in FORMATS:
        raise CheckpointError(f"{name} is not a packed type; known are {', '.join(FORMATS)}")
    return FORMATS[name]


# ---------------------------------------------------------------- readers


def _scale_at(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _bits(packed: Tensor, width: int) -> Tensor:
    """The `width`-bit fields of each byte, lowest first: `[n, ..., c]` -> `[n, ..., 8 / width, c]`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return torch.bitwise_and(packed.unsqueeze(-2) >> shifts[:, None], 2**width - 1)


def _parts_of_32(b: Tensor, bits: int, minimum: bool) -> BlockParts:
    """An fp16 scale, with `minimum` an fp16 minimum, the fifth bits where codes have `bits` = 5, and 16 bytes of
    nibbles, first the low ones; without a minimum, codes are less than zero up to the middle."""
    at = 4 if minimum else 2
    codes = _bits(b[:, -16:], 4).flatten(1)
    if bits == 5:  # four bytes: bit i belongs to element i
        codes |= _bits(b[:, at : at + 4], 1).transpose(1, 2).flatten(1) << 4
    if minimum:
        return BlockParts(codes.unsqueeze(1), _scale_at(b, 0), _scale_at(b, 2))
    return BlockParts(codes.view(torch.int8).unsqueeze(1) - 2 ** (bits - 1), _scale_at(b, 0))


def _parts_q8_0(b: Tensor) -> BlockParts:
    return BlockParts(b[:, 2:].view(torch.int8).unsqueeze(1), _scale_at(b, 0))


def _scales_and_minimums(b: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minimums `[n, 8]` of a `Q4_K` or `Q5_K` block, six bits each in twelve bytes."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1)
    mins = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], dim=1)
    return _scale_at(b, 0) * scales.float(), -_scale_at(b, 2) * mins.float()


def _parts_q4_k(b: Tensor) -> BlockParts:
    """144 bytes for 256 numbers: fp16 scale of the scales, fp16 scale of the minimums, which are subtracted, 12 bytes
    of scales and minimums for 8 groups, 128 bytes of nibbles, of which 32 bytes hold group 2i in their low halves and
    group 2i + 1 in their high halves."""
    codes = _bits(b[:, 16:].reshape(-1, 4, 32), 4).flatten(1, 2)  # [n, 8, 32]
    return BlockParts(codes, *_scales_and_minimums(b))


def _parts_q5_k(b: Tensor) -> BlockParts:
    codes = _bits(b[:, 48:].reshape(-1, 4, 32), 4).flatten(1, 2)
    fifth = _bits(b[:, 16:48], 1) << 4  # bit j of byte i belongs to element i of group j
    return BlockParts(codes | fifth, *_scales_and_minimums(b))


def _parts_q6_k(b: Tensor) -> BlockParts:
    low = _bits(b[:, :128].reshape(-1, 2, 64), 4)  # [n, 2, 2, 64]
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), 2)  # [n, 2, 4, 32]
    codes = (low.flatten(1) | (high.flatten(1) << 4)).view(torch.int8).view(-1, 16, 16) - 32
    return BlockParts(codes, _scale_at(b, 208), factors=b[:, 192:208].view(torch.int8))


# ---------------------------------------------------------------- writers


def _scale_bytes(scale: Tensor) -> Tensor:
    """`[n, 1]` as the two bytes of its fp16."""
    half = scale.half()
    if not bool(half.isfinite().all()):
        raise CheckpointError("holds numbers too large for the fp16 scale of a packed block; use bf16 or f32")
    return half.view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _nibble_bytes(codes: Tensor) -> Tensor:
    """`[n, 32]` numbers from 0 to 15 -> `[n, 16]` bytes: the first half in the low nibbles."""
    low, high = codes.clamp(0, 15).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def _write_q4_0(x: Tensor) -> Tensor:
    """The element farthest from zero gets the code -8, whatever its sign."""
    scale = x.gather(1, x.abs().argmax(dim=1, keepdim=True)) / -8
    return torch.cat([_scale_bytes(scale), _nibble_bytes((x * _inverse(scale) + 8.5).trunc())], dim=1)


def _write_q4_1(x: Tensor) -> Tensor:
    low = x.amin(dim=1, keepdim=True)
    scale = (x.amax(dim=1, keepdim=True) - low) / 15
    return torch.cat(
        [_scale_bytes(scale), _scale_bytes(low), _nibble_bytes(((x - low) * _inverse(scale) + 0.5).trunc())], dim=1
    )


def _write_q8_0(x: Tensor) -> Tensor:
    """Codes are rounded as C's `roundf` does, halves away from zero."""
    scale = x.abs().amax(dim=1, keepdim=True) / 127
    y = x * _inverse(scale)
    whole = y.abs().floor()
    codes = (whole + (2 * (y.abs() - whole)).floor()) * y.sign()
    return torch.cat([_scale_bytes(scale), codes.to(torch.int8).view(torch.uint8)], dim=1)


# ---------------------------------------------------------------- the table

_READERS: dict[str, Callable[[Tensor], BlockParts]] = {
    "Q4_0": partial(_parts_of_32, bits=4, minimum=False),
    "Q4_1": partial(_parts_of_32, bits=4, minimum=True),
    "Q5_0": partial(_parts_of_32, bits=5, minimum=False),
    "Q5_1": partial(_parts_of_32, bits=5, minimum=True),
    "Q8_0": _parts_q8_0,
    "Q4_K": _parts_q4_k,
    "Q5_K": _parts_q5_k,
    "Q6_K": _parts_q6_k,
}
_WRITERS = {"Q4_0": _write_q4_0, "Q4_1": _write_q4_1, "Q8_0": _write_q8_0}
#: Every packed type, by its name in GGUF; first those that are read here.
FORMATS = {
    name: GGUFBlockFormat(TYPES[name], _READERS.get(name), _WRITERS.get(name))
    for name in dict.fromkeys((*_READERS, *TYPES))
    if TYPES[name].torch_dtype is None
}
#: Those that can be written.
WRITABLE = tuple(name for name, kind in FORMATS.items() if kind.write is not None)
