"""The run-time layouts of a model's packed weights, made once for each weight."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from triptych.checkpoints.gguf_blocks import GGUFBlockFormat, PackedBlocks
from triptych.errors import CheckpointError
from triptych.nn.weights import PackedWeight
from triptych.quantize.layouts import PackedMatrix
from triptych.quantize.repack import LAYOUT_OF, repack

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # blocks -> PackedMatrix, as long as the blocks live


def run_time_matrix(weight: PackedWeight) -> tuple[int, Tensor] | None:
    """The layout of a weight, by its number in matmul.h, and its bytes; None where the kernels have none for it."""
    blocks, form = weight.blocks, weight.format
    if not isinstance(form, GGUFBlockFormat) or form.type.name not in LAYOUT_OF:
        return None
    if blocks not in _made:
        try:
            _made[blocks] = repack(PackedBlocks(form, blocks))
        except CheckpointError:  # its scales do not fit the layout
            _made[blocks] = None
    made: PackedMatrix | None = _made[blocks]
    return None if made is None else (made.layout.code, made.data)
