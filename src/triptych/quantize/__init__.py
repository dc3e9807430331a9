"""Packed weights at run time: the layouts that the native kernels read, repacking from files, rounding of weights.

A `PackedMatrix` comes from the blocks of a GGUF file (`repack`), from AWQ and GPTQ (`repack_groups`), from numbers
(`quantize`) or from a dense tensor (`PackedMatrix.of`); `multiply` is its product with a few vectors.
"""

from .kernel_layouts import LAYOUTS, PackedMatrix, multiply
from .packing import (
    BandFormat,
    OrderedBandFormat,
    Packer,
    kernel_matrix,
    packed_weight,
    packer_for,
    packing_arguments,
    packing_for,
)
from .repack import INVERTIBLE, LAYOUT_OF, blocks_of, repack, repack_groups
from .rounding import FORMS, quantize

__all__ = [
    "FORMS",
    "INVERTIBLE",
    "LAYOUTS",
    "LAYOUT_OF",
    "BandFormat",
    "OrderedBandFormat",
    "PackedMatrix",
    "Packer",
    "blocks_of",
    "kernel_matrix",
    "multiply",
    "packed_weight",
    "packer_for",
    "packing_arguments",
    "packing_for",
    "quantize",
    "repack",
    "repack_groups",
]
