"""Packed weights at run time: the layouts that the native kernels read, repacking from files, rounding of weights.

A `PackedMatrix` comes from the blocks of a GGUF file (`repack`), from numbers (`quantize`) or from a dense tensor
(`PackedMatrix.of`); `multiply` is its product with a few vectors.
"""

from triptych.quantize.layouts import LAYOUTS, Layout, PackedMatrix
from triptych.quantize.products import multiply
from triptych.quantize.repack import LAYOUT_OF, repack
from triptych.quantize.rounding import FORMS, quantize
from triptych.quantize.weights import BandFormat, Packer, kernel_matrix, packed_weight, packer_for

__all__ = [
    "FORMS",
    "LAYOUTS",
    "LAYOUT_OF",
    "BandFormat",
    "Layout",
    "PackedMatrix",
    "Packer",
    "kernel_matrix",
    "multiply",
    "packed_weight",
    "packer_for",
    "quantize",
    "repack",
]
