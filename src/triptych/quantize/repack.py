"""From the packed matrices of files to the layouts that the kernels read, and back to the blocks of GGUF.

Codes are kept as they are.  Scales are too, except those of `Q4_K` and `Q5_K`, products of an fp16 number and a whole
number of six bits, which are rounded to fp16, by 1 part in 2048 at most.  Small ones lose nothing: every fp16 number is
a multiple of 2^-24, so the products are too, and fp16 holds all of those below 2^-13.  Blocks of the other types come
back byte for byte.

Of AWQ and GPTQ, whose numbers are `(code - zero) * scale`, codes and fp16 scales are kept; the minimum of a group of
four bits, `-zero * scale`, is rounded to fp16.

Plain numbers are rounded to our own packed forms, `int8` and `int4`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.checkpoints.packed_safetensors import PackedGroups
from triptych.errors import CheckpointError, InputError, nearest, shown
from triptych.native import library, usable_threads
from triptych.quantize.layouts import (
    BAND,
    GROUP,
    LAYOUTS,
    Codes,
    Memory,
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


def repack(blocks: PackedBlocks, memory: Memory = plain_memory) -> PackedMatrix:
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


def repack_groups(groups: PackedGroups, memory: Memory = plain_memory) -> tuple[PackedMatrix, Tensor | None]:
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


# ---------------------------------------------------------------- rounding

# Steps between the least and the largest number of a group that are tried first.  With 15 of them both have a code;
# with fewer, numbers at the ends are cut off or the others are rounded more finely.
_STEPS = tuple(15 + 0.4 * i for i in range(-7, 4))
_PIECE = 1 << 12  # groups rounded at a time: the temporaries stay in the core's cache


def quantize(weight: Tensor, form: str, memory: Memory = plain_memory) -> PackedMatrix:
    """`weight [rows, columns]`, of any floating dtype, in a packed form, with scales for every 32 columns of a row.

    - `int8`: symmetric, the largest magnitude over 127 as the scale, numbers rounded to the nearest; layout S8.
    - `int4`: 16 codes from a minimum on; of several scales and minimums, each fitted to its own codes by least squares,
      the pair with the smallest squared error; layout U4.

    Raises InputError for another form, for columns that are not whole groups of 32, and for numbers that are not finite
    or too large for fp16 scales.
    """
    if form not in FORMS:
        raise InputError(f"unknown packed form {form!r}{nearest(str(form), FORMS)}; known are {', '.join(FORMS)}")
    if not isinstance(weight, Tensor) or weight.device.type == "meta":
        raise InputError(f"{form} packs matrices of numbers, not {shown(weight)}")
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise InputError(f"{form} packs matrices with columns in groups of {GROUP}, not {list(weight.shape)}")
    name, rounded = FORMS[form]

    def numbers(start: int, stop: int) -> Codes:
        codes, scales, minimums = rounded(weight[start:stop].detach().float().reshape(-1, GROUP))
        if not bool(scales.isfinite().all() and (minimums is None or minimums.isfinite().all())):
            raise InputError(f"the matrix {list(weight.shape)} has numbers that are not finite or too large for {form}")
        rows = stop - start
        least = None if minimums is None else minimums.view(rows, -1)
        return Codes(codes.view(rows, -1), scales.view(rows, -1), least)

    return packed_rows(LAYOUTS[name], weight.shape, memory, numbers, 8)  # the search needs several times the memory


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """`x / y`, and 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y)


def _int8(x: Tensor) -> tuple[Tensor, Tensor, None]:
    """`[groups, 32]` -> codes, fp16 scales `[groups, 1]`."""
    scale = (x.abs().amax(dim=1, keepdim=True) / 127).half()
    return _quotient(x, scale.float()).round().clamp(-127, 127).to(torch.int8), scale, None


def _int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[groups, 32]` -> codes, fp16 scales and minimums `[groups, 1]`."""
    groups = len(x)
    codes, scales, minimums = torch.empty((groups, GROUP), dtype=torch.uint8), torch.empty(groups), torch.empty(groups)
    for start in range(0, groups, _PIECE):
        part = slice(start, start + _PIECE)
        columns, scales[part], minimums[part] = _int4_columns(x[part].T.contiguous())
        codes[part] = columns.T
    return codes, scales.half().unsqueeze(1), minimums.half().unsqueeze(1)


def _int4_columns(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[32, groups]` -> codes, and scales and minimums `[groups]`, of numbers that fp16 holds.

    A group is a column, so that every operation and every sum goes along contiguous memory.  The numbers are taken
    relative to the middle of their group, where the sums that the error follows from lose the least.
    """
    low, high = x.amin(dim=0), x.amax(dim=0)
    middle = (low + high) / 2
    x, low = x - middle, low - middle
    total, codes = x.sum(dim=0), torch.empty_like(x)
    best: _Fitted | None = None
    for step in _STEPS:
        fitted = _fit(x, total, _code(x, (high - middle - low) / step, low, codes), middle)
        best = fitted if best is None else best.better(fitted)
    assert best is not None
    for _ in range(2):  # with a better scale and minimum the codes change, and with them the best scale
        best = best.better(_fit(x, total, _code(x, best.scale, best.minimum - middle, codes), middle))
    return _code(x, best.scale, best.minimum - middle, codes).to(torch.uint8), best.scale, best.minimum


@dataclass(frozen=True, eq=False)
class _Fitted:
    """Scales and minimums, of numbers that fp16 holds, and the squared error of each group; all `[groups]`."""

    scale: Tensor
    minimum: Tensor
    error: Tensor

    def better(self, other: _Fitted) -> _Fitted:
        """Of each group the one with the smaller error."""
        other_is, both = other.error < self.error, zip(astuple(other), astuple(self), strict=True)
        return _Fitted(*(torch.where(other_is, theirs, ours) for theirs, ours in both))


def _code(x: Tensor, scale: Tensor, minimum: Tensor, out: Tensor) -> Tensor:
    """The nearest codes of `x [32, groups]`, in `out`."""
    inverse = _quotient(torch.ones_like(scale), scale)
    return torch.addcmul(-minimum * inverse, x, inverse, out=out).round_().clamp_(0, 15)


def _fit(x: Tensor, total: Tensor, codes: Tensor, middle: Tensor) -> _Fitted:
    """The scale and the minimum with the least squared error for these codes, rounded to fp16.

    The error follows from sums: that of `(scale * code + minimum - x)^2` less that of `x^2`, the same for all codes.
    """
    first, second, mixed = codes.sum(dim=0), codes.square().sum(dim=0), (codes * x).sum(dim=0)
    scale = _quotient(GROUP * mixed - first * total, GROUP * second - first * first)
    minimum = ((total - scale * first) / GROUP + middle).half().float()
    low = minimum - middle
    scale = _quotient(mixed - low * first, second).half().float()  # the best one with this minimum
    error = scale * (scale * second + 2 * (low * first - mixed)) + low * (GROUP * low - 2 * total)
    return _Fitted(scale, minimum, error)


FORMS: dict[str, tuple[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]]] = {
    "int8": ("S8", _int8),
    "int4": ("U4", _int4),
}
