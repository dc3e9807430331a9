"""Round the numbers of a matrix to our own packed forms, `int8` and `int4`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from triptych.errors import InputError, nearest
from triptych.quantize.layouts import BAND, GROUP, LAYOUTS, Codes, PackedMatrix, chunks

_STRETCHES = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)  # added to the 15 steps between the least and the largest number


def quantize(weight: Tensor, form: str) -> PackedMatrix:
    """`weight [rows, columns]`, of any floating dtype, in a packed form, with scales for every 32 columns of a row.

    - `int8`: symmetric, the largest magnitude over 127 as the scale, numbers rounded to the nearest; layout S8.
    - `int4`: 16 steps from a minimum on; of several steps and minimums, each fitted to its own codes by least squares,
      the pair with the smallest squared error; layout U4.

    Raises InputError for another form, for columns that are not whole groups of 32, and for numbers that are not finite
    or too large for fp16 scales.
    """
    if form not in FORMS:
        raise InputError(f"unknown packed form {form!r}{nearest(form, FORMS)}; known are {', '.join(FORMS)}")
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise InputError(f"{form} packs matrices with columns in groups of {GROUP}, not {list(weight.shape)}")
    name, rounded = FORMS[form]
    layout, (rows, columns) = LAYOUTS[name], weight.shape
    data = torch.empty(layout.nbytes(rows, columns), dtype=torch.uint8)
    for start, stop in chunks(rows, 8 * columns):  # the search needs several times the memory of the numbers
        part = weight[start:stop].detach().float()
        codes, scales, minimums = rounded(part.reshape(-1, GROUP))
        if not bool(scales.isfinite().all() and (minimums is None or minimums.isfinite().all())):
            raise InputError(f"the matrix {[rows, columns]} has numbers that are not finite or too large for {form}")
        least = None if minimums is None else _whole(minimums, stop - start)
        packed = layout.pack(Codes(_whole(codes, stop - start), _whole(scales, stop - start), least))
        first = layout.nbytes(start, columns)
        data[first : first + len(packed)] = packed
    return PackedMatrix(layout, rows, columns, data)


def _whole(numbers: Tensor, rows: int) -> Tensor:
    """The numbers of so many rows as `[rows, n]`, with rows of zeros up to a whole band."""
    return torch.nn.functional.pad(numbers.view(rows, -1), (0, 0, 0, -rows % BAND))


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """`x / y`, and 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y)


def _int8(x: Tensor) -> tuple[Tensor, Tensor, None]:
    """`[groups, 32]` -> codes, fp16 scales `[groups, 1]`."""
    scale = (x.abs().amax(dim=1, keepdim=True) / 127).half()
    return _quotient(x, scale.float()).round().clamp(-127, 127).to(torch.int8), scale, None


def _int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[groups, 32]` -> codes, fp16 scales and minimums `[groups, 1]`."""
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    best = _coded(x, (high - low) / 15, low)
    for stretch in _STRETCHES:
        start = _quotient(high - low, torch.full_like(high, 15 + stretch))
        codes = _quotient(x - low, start).round().clamp(0, 15)
        for _ in range(2):
            candidate = _coded(x, *_fit(x, codes))
            better = candidate[3] < best[3]
            codes, scale, minimum, error = (
                torch.where(better, new, old) for new, old in zip(candidate, best, strict=True)
            )
            best, codes = (codes, scale, minimum, error), candidate[0]
    return best[0].to(torch.uint8), best[1], best[2]


def _coded(x: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes for a scale and a minimum, these in fp16, and the squared error of each group."""
    scale, minimum = scale.half(), minimum.half()
    codes = _quotient(x - minimum.float(), scale.float()).round().clamp(0, 15)
    error = (codes * scale.float() + minimum.float() - x).square().sum(dim=1, keepdim=True)
    return codes, scale, minimum, error


def _fit(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum with the least squared error for these codes."""
    mean, mean_code = x.mean(dim=1, keepdim=True), codes.mean(dim=1, keepdim=True)
    centered = codes - mean_code
    scale = _quotient((centered * x).sum(dim=1, keepdim=True), centered.square().sum(dim=1, keepdim=True))
    return scale, mean - scale * mean_code


FORMS: dict[str, tuple[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]]] = {
    "int8": ("S8", _int8),
    "int4": ("U4", _int4),
}
