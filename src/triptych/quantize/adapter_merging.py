"""Merging an adapter into the weights of a model, plain or packed."""

from collections import Counter
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.checkpoints.gguf_blocks import WRITABLE, GGUFBlockFormat, PackedBlocks, block_format
from triptych.errors import CheckpointError, InputError, shown
from triptych.nn import Transformer, assign, detach, factors_of
from triptych.nn.packed_weight import PackedWeight
from .packing import BandFormat, OrderedBandFormat, packed_weight
from .repack import repack
from .rounding import quantize

#: What becomes of a packed matrix: rounded again to its type, or plain numbers.
MergedForm = Literal["requantize", "dense"]
_FORM_OF = {"U4": "int4", "S8": "int8"}  # layout -> the form that rounds numbers to it


def merge(module: Transformer, packed: MergedForm = "requantize") -> tuple[str, ...]:
    """Take the adapter off and put it into the matrices, in fp32 and rounded once to their dtype.

    A packed matrix is rounded again to the type it came from, or becomes plain numbers with `packed="dense"`, and where
    its type cannot be written (Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, columns in another order).  Returns a line for each of the
    two that says how many.  Raises InputError where there is no adapter, and for another `packed`.
    """
    if packed not in get_args(MergedForm):
        raise InputError(f"packed={shown(packed)} is not one of {', '.join(get_args(MergedForm))}")
    merged: dict[str, Tensor] = {}
    kinds: Counter[str] = Counter()
    with torch.no_grad():
        for slot, factors in factors_of(module).items():
            weight = module.get_parameter(f"{slot}.weight")
            numbers = weight.dense() if isinstance(weight, PackedWeight) else weight
            value = factors.merged(numbers).to(numbers.device, numbers.dtype)
            if isinstance(weight, PackedWeight):
                again = _rounded(value, weight) if packed == "requantize" else None
                kinds["" if again is None else again[1]] += 1
                value = value if again is None else again[0]
            merged[slot] = value
    detach(module)
    with torch.no_grad():
        for slot, value in merged.items():
            weight = module.get_parameter(f"{slot}.weight")
            if isinstance(weight, PackedWeight):
                assign(module, f"{slot}.weight", value)
            else:
                weight.copy_(value)  # in place: what else holds the parameter follows
    dense = kinds.pop("", 0)
    notes = [f"{count} packed matrices were rounded again to {kind}" for kind, count in kinds.items()]
    dtype = str(module.dtype).removeprefix("torch.")
    return (*notes, *([f"{dense} packed matrices became plain numbers in {dtype}"] if dense else []))


def _rounded(value: Tensor, like: PackedWeight) -> tuple[PackedWeight, str] | None:
    """The numbers in the type of a packed weight, and its name; None where nothing writes that type, or the numbers do
    not fit it."""
    form = like.format
    kind, own = (form.kind, _FORM_OF.get(form.layout.name)) if isinstance(form, BandFormat) else (form.stored_as, None)
    try:
        if isinstance(form, OrderedBandFormat):
            return None
        if own is not None and kind in (None, "Q4_1"):  # int4 is Q4_1 with better scales
            return packed_weight(quantize(value, own), like.dtype, kind=kind), kind or own
        if kind not in WRITABLE:
            return None
        blocks = PackedBlocks(block_format(kind), block_format(kind).pack(value.float()))
        if isinstance(form, GGUFBlockFormat):
            return PackedWeight(blocks.raw, form, like.dtype), kind
        return packed_weight(repack(blocks), like.dtype, kind=kind), kind
    except (CheckpointError, InputError):
        return None
