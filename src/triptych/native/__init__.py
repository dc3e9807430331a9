"""The native kernels: plain C, built as an optional extension and loaded with ctypes.

`library()` returns the loaded library, or None where it was not built or TRIPTYCH_KERNELS is "none"; `why_not()` then
says why, and `describe()` what runs.  The functions and structures are those of `matmul.h`, `step.h`,
`statistics.h` and `sample.h`, which are their documentation; callers check the sizes.
"""

from .loader import Library, describe, levels, library, usable_threads, why_not
from .step import DRAW, Input, Matrix, ScoreTile, TrainActivation, TrainAttention, TrainRotation, TrainVectors

__all__ = [
    "DRAW",
    "Input",
    "Library",
    "Matrix",
    "ScoreTile",
    "TrainActivation",
    "TrainAttention",
    "TrainRotation",
    "TrainVectors",
    "describe",
    "levels",
    "library",
    "usable_threads",
    "why_not",
]
