"""Repacks the packed matrices of files into the layouts that the kernels read, and back into the blocks of GGUF.

Codes are kept as they are.  Scales are too, except those of `Q4_K` and `Q5_K`, products of an fp16 number and a whole
number of six bits, which are rounded to fp16, by 1 part in 2048 at most.  Small ones lose nothing: every fp16 number is
a multiple of 2^-24, so the products are too, and fp16 holds all of those below 2^-13.  Blocks of the other types come
back byte for byte.

Of AWQ and GPTQ, whose numbers are `(code - zero) * scale`, codes and fp16 scales are kept; the minimum of a group of
four bits, `-zero * scale`, is rounded to fp16.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.checkpoints.packed_groups import PackedGroups
from triptych.errors import CheckpointError
from triptych.native import library, usable_threads
from .kernel_layouts import (
    BAND,
    GROUP,
    LAYOUTS,
    Allocator,
    Codes,
    PackedMatrix,
    chunks,
    matrix_struct,
    packed_rows,
    plain_memory,
)

#: The layout of each packed type of GGUF, by its name there.
LAYOUT_OF = {
    name: LAYOUTS[layout]
    for layout, names in {
        "U4": ("Q4_0", "Q4_1", "Q4_K"),
        "U5": ("Q5_0", "Q5_1", "Q5_K"),
        "S8": ("Q8_0",),
        "S8X16": ("Q6_K",),
    }.items()
    for name in names
}
#: The types whose blocks the layouts hold completely.
INVERTIBLE = tuple(name for name in LAYOUT_OF if name not in ("Q4_K", "Q5_K"))
#: The type of GGUF that has the same codes, scales and minimums as a layout.
SAME_NUMBERS = {"U4": "Q4_1", "U5": "Q5_1", "S8": "Q8_0", "S8X16": "Q6_K"}
_NATIVE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the types that `repack_blocks` in native/repack.c reads
_LOWEST = {"Q4_0": -8, "Q5_0": -16}  # the lowest code of the types whose codes are signed and become unsigned


def repack(blocks: PackedBlocks, memory: Allocator = plain_memory) -> PackedMatrix:
    """The matrix `[rows, columns]` that `blocks` hold, in the layout for their type.

    Raises CheckpointError for a type without a layout, and where a scale or a minimum is too large for fp16; such a
    matrix can be used as dense numbers.
    """
    kind = blocks.format.type.name
    if len(blocks.shape) != 2:
        raise CheckpointError(f"a matrix has two dimensions, not {list(blocks.shape)}")
    rows, columns = blocks.shape
    if kind not in LAYOUT_OF:
        raise CheckpointError(f"no kernel multiplies with {kind}")
    layout = LAYOUT_OF[kind]
    kernels = library()
    if kernels is None or kind not in _NATIVE or blocks.raw.device.type != "cpu" or not blocks.raw.numel():
        return packed_rows(layout, blocks.shape, memory, partial(_codes, blocks))
    matrix = PackedMatrix(layout, rows, columns, memory(layout.nbytes(rows, columns)))
    raw = blocks.raw.contiguous()
    if raw.nbytes != blocks.format.type.size((rows, columns)):
        raise CheckpointError(f"{list(raw.shape)} bytes are not whole blocks of {kind}")
    threads = usable_threads(torch.get_num_threads())
    if kernels.functions.repack_blocks(blocks.format.type.number, raw.data_ptr(), matrix_struct(matrix), threads) != 1:
        raise _too_large(kind)
    return matrix


def _codes(blocks: PackedBlocks, start: int, stop: int) -> Codes:
    """The parts of the blocks of rows [start, stop), codes counted from the lowest one of the type on."""
    kind = blocks.format.type.name
    assert blocks.format.parts is not None
    parts = blocks.format.parts(blocks.raw[start:stop].reshape(-1, blocks.format.nbytes))
    codes, minimums, lowest = parts.codes, parts.minimums, _LOWEST.get(kind, 0)
    if lowest:
        codes, minimums = (codes - lowest).view(torch.uint8), parts.scales * lowest

    def by_row(numbers: Tensor | None) -> Any:
        return None if numbers is None else numbers.reshape(stop - start, -1)

    numbers = Codes(by_row(codes), by_row(parts.scales), by_row(minimums), by_row(parts.factors))
    _check_halves(numbers, kind)
    return numbers


def blocks_of(matrix: PackedMatrix, kind: str) -> PackedBlocks:
    """The inverse of `repack` for a matrix that came from blocks of the type `kind`, byte for byte.

    Raises CheckpointError for a type whose blocks the layout does not hold completely (see `INVERTIBLE`).
    """
    if kind not in INVERTIBLE:
        raise CheckpointError(f"the layout at run time does not hold all of a {kind} block")
    format = block_format(kind)
    raw = torch.empty((matrix.rows, matrix.columns // format.elements * format.nbytes), dtype=torch.uint8)
    band = matrix.layout.nbytes(BAND, matrix.columns)
    for start, stop in chunks(matrix.rows, matrix.columns):
        numbers = matrix.layout.unpack(matrix.data[start // BAND * band : -(-stop // BAND) * band], matrix.columns)
        raw[start:stop] = _block_bytes(numbers, kind).view(-1, raw.shape[1])[: stop - start]
    return PackedBlocks(format, raw)


def repack_groups(groups: PackedGroups, memory: Allocator = plain_memory) -> tuple[PackedMatrix, Tensor | None]:
    """The matrix `[out, in]` of AWQ or GPTQ in a layout, and the order of its columns there where it is another one.

    With act-order the inputs of a group do not follow each other; the matrix then has its columns sorted by group, and
    its product takes `x[:, order]`.  Raises CheckpointError where 32 columns do not share a scale, where a scale does
    not fit fp16, or where codes of eight bits less their zero point do not fit eight bits; such a matrix can be used as
    dense numbers.
    """
    columns = groups.shape[1]
    order = groups.of.argsort(stable=True)
    of = groups.of[order]
    if columns % GROUP or not torch.equal(of[::GROUP].repeat_interleave(GROUP), of):
        raise CheckpointError(f"its groups of inputs are not whole groups of {GROUP}")
    moved, of = None if torch.equal(order, torch.arange(columns)) else order, of[::GROUP]
    layout = LAYOUTS["U4" if groups.bits == 4 else "S8"]

    def numbers(start: int, stop: int) -> Codes:
        codes = groups.codes[start:stop] if moved is None else groups.codes[start:stop, moved]
        scales, zeros = groups.scales[start:stop, of], groups.zeros[start:stop, of]
        eight = groups.bits == 8
        made = Codes(_signed(codes, zeros), scales) if eight else Codes(codes, scales, -zeros * scales)
        _check_halves(made, "packed")
        return made

    return packed_rows(layout, groups.shape, memory, numbers), moved


def _signed(codes: Tensor, zeros: Tensor) -> Tensor:
    """Codes of eight bits less their zero points, int8."""
    signed = codes.view(len(codes), -1, GROUP).short() - zeros.short().unsqueeze(-1)
    if int(signed.min()) < -128 or int(signed.max()) > 127:
        raise CheckpointError("its codes less their zero points do not fit eight bits")
    return signed.to(torch.int8).flatten(1)


def _check_halves(numbers: Codes, kind: str) -> None:
    """Raise CheckpointError where fp16 does not hold a scale or a minimum."""
    for halves in (numbers.scales, numbers.minimums):
        if halves is not None and not bool(halves.half().isfinite().all()):
            raise _too_large(kind)


def _too_large(kind: str) -> CheckpointError:
    problem = "a scale or a minimum in it is not finite or too large for fp16"
    return CheckpointError(f"the {kind} matrix can be used as dense numbers only: {problem}")


def _half_bytes(numbers: Tensor) -> Tensor:
    """fp16 numbers, as their bytes `[n, 2]`."""
    return numbers.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).view(-1, 2)


def _block_bytes(numbers: Codes, kind: str) -> Tensor:
    """The blocks `[n, bytes of a block]` of one type of GGUF that hold these numbers."""
    elements = block_format(kind).elements
    codes = numbers.codes.view(-1, elements)
    scales = _half_bytes(numbers.scales)
    if kind == "Q8_0":
        return torch.cat([scales, codes.view(torch.uint8)], dim=1)
    if kind == "Q6_K":
        assert numbers.factors is not None
        low, high = ((codes + 32).view(torch.uint8) & 15), ((codes + 32).view(torch.uint8) >> 4)
        quarters, nibbles = high.view(-1, 2, 4, 32), low.view(-1, 2, 2, 64)
        packed = quarters[:, :, 0] | (quarters[:, :, 1] << 2) | (quarters[:, :, 2] << 4) | (quarters[:, :, 3] << 6)
        factors = numbers.factors.view(-1, 16).view(torch.uint8)
        lower = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
        return torch.cat([lower.flatten(1), packed.flatten(1), factors, scales], dim=1)
    parts = [scales]
    if kind in ("Q4_1", "Q5_1"):
        assert numbers.minimums is not None
        parts.append(_half_bytes(numbers.minimums))
    if kind in ("Q5_0", "Q5_1"):
        bits = (codes >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.append(bits.sum(dim=2, dtype=torch.uint8))
    low, high = (codes & 15).chunk(2, dim=1)
    return torch.cat([*parts, low | (high << 4)], dim=1)
