"""The native kernels: plain C, built as an optional extension and loaded with ctypes.

`library()` returns the loaded library, or None where it was not built; `why_not()` then says why.  The functions and
structures are those of `matmul.h` and `statistics.c`, which are their documentation; sizes are checked by who calls
them.
"""

from triptych.native.loader import Input, Library, Matrix, ScoreTile, library, usable_threads, why_not

__all__ = ["Input", "Library", "Matrix", "ScoreTile", "library", "usable_threads", "why_not"]
