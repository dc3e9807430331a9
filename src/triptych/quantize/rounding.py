"""Round the numbers of a matrix to our own packed forms, `int8` and `int4`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from triptych.errors import InputError, nearest, shown
from .kernel_layouts import GROUP, LAYOUTS, Allocator, Codes, PackedMatrix, packed_rows, plain_memory

# Steps between the least and the largest number of a group that are tried first.  With 15 of them both have a code;
# with fewer, numbers at the ends are cut off or the others are rounded more finely.
_STEPS = tuple(15 + 0.4 * i for i in range(-7, 4))
_PIECE = 1 << 12  # groups rounded at a time: the temporaries stay in the core's cache


def quantize(weight: Tensor, form: str, memory: Allocator = plain_memory) -> PackedMatrix:
    """`weight [rows, columns]`, of any floating dtype, in a packed form, with scales for every 32 columns of a row.

    - `int8`: symmetric, the largest magnitude over 127 as the scale, numbers rounded to the nearest; layout S8.
    - `int4`: 16 codes from a minimum on; of several scales and minimums, each fitted to its own codes by least squares,
      the pair with the smallest squared error; layout U4.

    Raises InputError for another form, for columns that are not whole groups of 32, and for numbers that are not finite
    or too large for fp16 scales.
    """
    if form not in FORMS:
        raise InputError(f"unknown packed form {form!r}{nearest(str(form), FORMS)}; known are {', '.join(FORMS)}")
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta or weight.is_sparse:
        raise InputError(f"{form} packs matrices of numbers, not {shown(weight)}")
    if weight.dim() != 2 or weight.shape[1] % GROUP or not weight.numel():
        raise InputError(f"{form} packs matrices of rows with columns in groups of {GROUP}, not {list(weight.shape)}")
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
