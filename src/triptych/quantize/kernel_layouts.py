"""The layouts of matrices at run time (`native/matmul.h`); blocks of files are in `checkpoints/gguf_blocks.py`.

Codes (whole numbers) and their scales go in with `Layout.pack` and come back with `Layout.unpack`; what they stand for,
`scale * code + minimum` in float32, is what the kernels multiply with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triptych.errors import InputError, shown
from triptych.native import Input, Library, Matrix, library, step, usable_threads, why_not

BAND, GROUP, SUPERGROUP = step.BAND, step.GROUP, step.SUPERGROUP
Allocator = Callable[[int], Tensor]
"""Where a matrix is to lie: so many bytes, `[n]`, uint8."""
_CHUNK = 1 << 18  # numbers packed or unpacked at a time: the temporaries stay small beside the matrix


@dataclass(frozen=True, eq=False)
class Codes:
    """Numbers of whole bands: `scale * code + minimum`, or `scale * factor * code`."""

    codes: Tensor  #: `[rows, columns]`, uint8 (U4, U5) or int8
    scales: Tensor  #: `[rows, columns / 32]` (S8X16: `/ 256`), of numbers that fp16 holds
    minimums: Tensor | None = None  #: `[rows, columns / 32]`, likewise
    factors: Tensor | None = None  #: `[rows, columns / 16]`, int8

    def values(self) -> Tensor:
        """The numbers, float32 `[rows, columns]`."""
        scales = self.scales.float()
        if self.factors is not None:
            scales = scales.repeat_interleave(SUPERGROUP // 16, dim=1) * self.factors.float()
        values = torch.mul(self.codes.float().view(*scales.shape, -1), scales.unsqueeze(-1))
        if self.minimums is not None:
            values += self.minimums.float().unsqueeze(-1)
        return values.flatten(1)

    def whole_bands(self) -> Codes:
        """The same with rows of zeros up to whole bands."""

        def whole(part: Tensor | None) -> Any:
            return None if part is None else torch.nn.functional.pad(part, (0, 0, 0, -len(part) % BAND))

        return Codes(whole(self.codes), whole(self.scales), whole(self.minimums), whole(self.factors))


@dataclass(frozen=True)
class Layout:
    """One layout.  `code` is its number in matmul.h, `block` the columns that are stored together."""

    name: str
    code: int
    block: int
    block_bytes: int  #: of one band and `block` columns; 0 in dense layouts

    @property
    def dense(self) -> bool:
        """Whether rows are stored as torch stores them."""
        return not self.block_bytes

    @property
    def bits(self) -> float:
        """Bits for one number, with its share of the scales."""
        return 8 * self.nbytes(BAND, self.block) / (BAND * self.block)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix `[rows, columns]`.  InputError where columns are not whole blocks."""
        if columns % self.block:
            raise InputError(f"{columns} columns are not whole blocks of {self.block} ({self.name})")
        if self.dense:
            return rows * columns * (4 if self.name == "F32" else 2)
        return -(-rows // BAND) * (columns // self.block) * self.block_bytes

    def pack(self, numbers: Codes) -> Tensor:
        """The bytes of whole bands, uint8, flat."""
        parts = [_lines(numbers.codes, self), _halves(numbers.scales)]
        if numbers.minimums is not None:
            parts.append(_halves(numbers.minimums))
        if numbers.factors is not None:
            factors = numbers.factors.view(-1, BAND, numbers.scales.shape[1], SUPERGROUP // 16).permute(0, 2, 3, 1)
            parts.insert(1, factors.flatten(2).view(torch.uint8))
        return torch.cat(parts, dim=2).flatten()

    def unpack(self, data: Tensor, columns: int) -> Codes:
        """The inverse of `pack`."""
        blocks = data.view(-1, columns // self.block, self.block_bytes)
        if self.name == "S8X16":
            lines, factors, scales = blocks.split([BAND * SUPERGROUP, SUPERGROUP, 2 * BAND], dim=2)
            factors = factors.reshape(*blocks.shape[:2], -1, BAND).permute(0, 3, 1, 2).flatten(2).flatten(0, 1)
            return Codes(_from_lines(lines, self), _from_halves(scales), factors=factors.view(torch.int8))
        halves = [2 * BAND] if self.name == "S8" else [2 * BAND, 2 * BAND]  # the bytes of scales, and of minimums
        lines, *numbers = blocks.split([self.block_bytes - sum(halves), *halves], dim=2)
        return Codes(_from_lines(lines, self), *map(_from_halves, numbers))


#: Every layout, by its name.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("F32", step.MatrixLayout.F32, 1, 0),
        Layout("BF16", step.MatrixLayout.BF16, 1, 0),
        Layout("U4", step.MatrixLayout.U4, GROUP, BAND * GROUP // 2 + 4 * BAND),
        Layout("U5", step.MatrixLayout.U5, GROUP, BAND * GROUP // 2 + BAND * GROUP // 8 + 4 * BAND),
        Layout("S8", step.MatrixLayout.S8, GROUP, BAND * GROUP + 2 * BAND),
        Layout("S8X16", step.MatrixLayout.S8X16, SUPERGROUP, BAND * SUPERGROUP + SUPERGROUP + 2 * BAND),
    )
}
_DENSE = {torch.float32: LAYOUTS["F32"], torch.bfloat16: LAYOUTS["BF16"]}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A matrix in a layout: `data` is uint8, flat, or the tensor itself in dense layouts."""

    layout: Layout
    rows: int
    columns: int
    data: Tensor

    def __post_init__(self) -> None:
        expected = self.layout.nbytes(self.rows, self.columns)
        if self.data.nbytes != expected or not self.data.is_contiguous() or self.data.device.type != "cpu":
            raise InputError(
                f"{self.layout.name} [{self.rows}, {self.columns}] needs {expected} contiguous bytes on the CPU; "
                f"the data has {self.data.nbytes} with strides {list(self.data.stride())} on {self.data.device}"
            )

    @staticmethod
    def of(weight: Tensor) -> PackedMatrix:
        """A dense tensor `[rows, columns]`, float32 or bfloat16, as it is; its memory is shared.

        Raises InputError for other dtypes, and for a tensor that is not contiguous.
        """
        if weight.dtype not in _DENSE or weight.dim() != 2:
            raise InputError(f"a dense matrix is float32 or bfloat16, not {weight.dtype} {list(weight.shape)}")
        rows, columns = weight.shape
        return PackedMatrix(_DENSE[weight.dtype], rows, columns, weight.detach())

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns]."""
        return self.rows, self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, `[rows, columns]` in `dtype`, rounded from float32: what the kernels multiply with."""
        if self.layout.dense:
            return self.data.to(dtype)
        out = torch.empty((self.rows, self.columns), dtype=dtype)
        band = self.layout.nbytes(BAND, self.columns)
        for start, stop in chunks(self.rows, self.columns):
            data = self.data[start // BAND * band : -(-stop // BAND) * band]
            out[start:stop] = self.layout.unpack(data, self.columns).values()[: stop - start]
        return out

    def slice(self, start: int, stop: int) -> PackedMatrix:
        """Rows [start, stop), sharing memory.  InputError where `start` does not begin a band of 16 rows."""
        if not 0 <= start <= stop <= self.rows or (not self.layout.dense and start % BAND):
            raise InputError(f"rows {start} to {stop} of {self.rows} cannot be shared: bands have {BAND} rows")
        if self.layout.dense:
            return PackedMatrix(self.layout, stop - start, self.columns, self.data[start:stop])
        first, size = self.layout.nbytes(start, self.columns), self.layout.nbytes(stop - start, self.columns)
        return PackedMatrix(self.layout, stop - start, self.columns, self.data[first : first + size])


def plain_memory(nbytes: int) -> Tensor:
    """`[nbytes]`, uint8, as torch allocates it."""
    return torch.empty(nbytes, dtype=torch.uint8)


def chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, of whole bands but for the last, that together are all rows."""
    step = max(BAND, _CHUNK // max(columns, 1) // BAND * BAND)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def packed_rows(
    layout: Layout, shape: Sequence[int], memory: Allocator, codes_of: Callable[[int, int], Codes], width: int = 1
) -> PackedMatrix:
    """The matrix of this shape whose rows [start, stop) are `codes_of(start, stop)`, `width` times fewer at a time."""
    rows, columns = shape
    data = memory(layout.nbytes(rows, columns))
    for start, stop in chunks(rows, width * columns):
        first, packed = layout.nbytes(start, columns), layout.pack(codes_of(start, stop).whole_bands())
        data[first : first + len(packed)] = packed
    return PackedMatrix(layout, rows, columns, data)


def _lines(codes: Tensor, layout: Layout) -> Tensor:
    """`[rows, columns]` -> the lines `[bands, blocks, bytes]`, four bytes for each row."""
    rows, columns = codes.shape
    if layout.name in ("S8", "S8X16"):
        quads = codes.view(rows // BAND, BAND, columns // layout.block, layout.block // 4, 4)
        return quads.permute(0, 2, 3, 1, 4).flatten(2).view(torch.uint8)
    quads = codes.view(rows // BAND, BAND, columns // GROUP, 4, 2, 4) & 15
    lines = (quads[..., 0, :] | (quads[..., 1, :] << 4)).permute(0, 2, 3, 1, 4).flatten(2)
    if layout.name == "U4":
        return lines
    fifth = (codes >> 4).view(rows // BAND, BAND, columns // GROUP, 8, 4) << _bit_numbers()
    return torch.cat([lines, fifth.sum(dim=3, dtype=torch.uint8).transpose(1, 2).flatten(2)], dim=2)


def _from_lines(lines: Tensor, layout: Layout) -> Tensor:
    """The inverse of `_lines`."""
    bands, blocks, _ = lines.shape
    if layout.name in ("S8", "S8X16"):
        quads = lines.reshape(bands, blocks, layout.block // 4, BAND, 4).permute(0, 3, 1, 2, 4)
        return quads.reshape(bands * BAND, -1).view(torch.int8)
    nibbles = lines[:, :, : BAND * GROUP // 2].reshape(bands, blocks, 4, BAND, 4).permute(0, 3, 1, 2, 4)
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=4).flatten(3, 4)  # [bands, 16, blocks, 8, 4]
    if layout.name == "U5":
        fifth = lines[:, :, BAND * GROUP // 2 :].reshape(bands, blocks, BAND, 4).transpose(1, 2).unsqueeze(3)
        codes = codes | ((fifth >> _bit_numbers()) & 1) << 4
    return codes.reshape(bands * BAND, -1)


def _bit_numbers() -> Tensor:
    return torch.arange(8, dtype=torch.uint8)[:, None]


def _halves(numbers: Tensor) -> Tensor:
    """`[rows, blocks]` -> fp16, as bytes `[bands, blocks, 32]`."""
    return numbers.half().view(-1, BAND, numbers.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _from_halves(data: Tensor) -> Tensor:
    """The inverse of `_halves`."""
    return data.contiguous().view(torch.float16).transpose(1, 2).flatten(0, 1)


MOST_THREADS = 1024  # OpenMP ends the process where it has no memory for its threads


def multiply(
    weight: PackedMatrix, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """`x @ weight.T + bias`, float32 `[count, rows]`, for `x [count, columns]`, float32.

    Packed layouts round x to 8 bits in groups of 32 columns.  A row of the result has the same bits for any `count` and
    any `threads` (by default those of torch; in a forked process one).  `out`, where given, receives the result.  No
    gradients.

    Raises InputError for shapes and dtypes that do not fit, for `threads` outside [1, MOST_THREADS], and where the
    native kernels are not there.
    """
    kernels = library()
    if kernels is None:
        raise InputError(why_not() or "")
    threads = torch.get_num_threads() if threads is None else threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads={shown(threads)} must be an integer from 1 to {MOST_THREADS}")
    if not isinstance(x, Tensor):
        raise InputError(f"x={shown(x)} must be a tensor [count, {weight.columns}]")
    count = len(x) if x.dim() else 0
    if out is None:
        out = torch.empty((count, weight.rows), dtype=torch.float32)
    _check("x", x, (count, weight.columns))
    _check("out", out, (count, weight.rows))
    if bias is not None:
        _check("bias", bias, (weight.rows,))
    if count and weight.rows:
        _run(kernels, weight, x, bias, out, usable_threads(threads))
    return out


def matrix_struct(weight: PackedMatrix) -> Matrix:
    """`struct matrix` of matmul.h; `weight` must live as long as it."""
    return Matrix(weight.layout.code, weight.rows, weight.columns, 0, weight.data.data_ptr())


def _run(kernels: Library, weight: PackedMatrix, x: Tensor, bias: Tensor | None, out: Tensor, threads: int) -> None:
    functions, count = kernels.functions, x.shape[0]
    vectors = Input(count, weight.columns, floats_of(x), x.stride(0))
    if not weight.layout.dense:
        memory = torch.empty(functions.place_input(vectors, None), dtype=torch.uint8)
        functions.place_input(vectors, memory.data_ptr())
    added = None if bias is None else bias.data_ptr()
    functions.multiply_parallel(matrix_struct(weight), vectors, out.data_ptr(), out.stride(0), added, threads)


def floats_of(x: Tensor) -> ctypes._Pointer[ctypes.c_float]:
    """The address of the numbers of a float32 tensor, which must live as long as it is used."""
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))


def _check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """InputError unless x is float32 on the CPU, has this shape, and its last dimension is contiguous."""
    if tuple(x.shape) != shape or x.dtype != torch.float32 or x.device.type != "cpu":
        raise InputError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; needed is float32 {list(shape)} on the CPU"
        )
    if (x.stride(-1) != 1 and x.shape[-1] > 1) or (x.dim() == 2 and x.shape[0] > 1 and x.stride(0) < x.shape[1]):
        raise InputError(f"{name} has strides {list(x.stride())}; its rows must be contiguous")
