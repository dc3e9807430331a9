"""From the blocks of a GGUF file to the layouts that the kernels read.

Codes are kept as they are.  Scales are too, except those of `Q4_K` and `Q5_K`, products of an fp16 number and a whole
number of six bits, which are rounded to fp16, by 1 part in 2048 at most.  Small ones lose nothing: every fp16 number is
a multiple of 2^-24, so the products are too, and fp16 holds all of those below 2^-13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.checkpoints.gguf_blocks import BlockParts, PackedBlocks
from triptych.errors import CheckpointError
from triptych.quantize.layouts import BAND, LAYOUTS, Codes, PackedMatrix, chunks

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
_LOWEST = {"Q4_0": -8, "Q5_0": -16}  # the lowest code of the types whose codes are signed and become unsigned


def repack(blocks: PackedBlocks) -> PackedMatrix:
    """The matrix `[rows, columns]` that `blocks` hold, in the layout for their type.

    Raises CheckpointError where a scale or a minimum is too large for fp16; such a matrix can be used as dense numbers.
    """
    kind = blocks.format.type.name
    if len(blocks.shape) != 2:
        raise CheckpointError(f"a matrix has two dimensions, not {list(blocks.shape)}")
    rows, columns = blocks.shape
    layout = LAYOUT_OF[kind]
    data = torch.empty(layout.nbytes(rows, columns), dtype=torch.uint8)
    for start, stop in chunks(rows, columns):
        parts = blocks.format.parts(blocks.raw[start:stop].reshape(-1, blocks.format.nbytes))
        numbers = _whole_bands(parts, stop - start, _LOWEST.get(kind, 0))
        for halves in (numbers.scales, numbers.minimums):
            if halves is not None and not bool(halves.half().isfinite().all()):
                problem = "a scale or a minimum in it is not finite or too large for fp16"
                raise CheckpointError(f"use the {kind} matrix {[rows, columns]} as dense numbers: {problem}")
        first, packed = layout.nbytes(start, columns), layout.pack(numbers)
        data[first : first + len(packed)] = packed
    return PackedMatrix(layout, rows, columns, data)


def _whole_bands(parts: BlockParts, rows: int, lowest: int) -> Codes:
    """The parts of all blocks of `rows` rows, codes counted from `lowest` on, with zeros up to whole bands."""

    def whole(numbers: Tensor) -> Tensor:
        return torch.nn.functional.pad(numbers.reshape(rows, -1), (0, 0, 0, -rows % BAND))

    codes, scales, minimums = parts.codes, parts.scales, parts.minimums
    if lowest:
        codes, minimums = (codes - lowest).view(torch.uint8), scales * lowest
    return Codes(
        whole(codes),
        whole(scales),
        None if minimums is None else whole(minimums),
        None if parts.factors is None else whole(parts.factors),
    )
