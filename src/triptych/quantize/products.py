"""The product of a packed matrix with a few vectors, by the native kernels."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from triptych.errors import InputError, shown
from triptych.native import Input, Library, Matrix, library, usable_threads, why_not
from triptych.quantize.layouts import PackedMatrix

MOST_THREADS = 1024  # OpenMP ends the process where it has no memory for its threads


def multiply(
    weight: PackedMatrix, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, threads: int | None = None
) -> Tensor:
    """`x @ weight.T + bias`, float32 `[count, rows]`, for `x [count, columns]`, float32.

    Packed layouts round x to 8 bits in groups of 32 columns.  A row of the result has the same bits for any `count` and
    any `threads` (by default those of torch; in a forked process one).  `out`, where given, receives the result.  No
    gradients.

    Raises InputError for shapes and dtypes that do not fit, for `threads` outside [1, MOST_THREADS], and where the
    native kernels are not there.
    """
    kernels = library()
    if kernels is None:
        raise InputError(why_not() or "")
    threads = torch.get_num_threads() if threads is None else threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads={shown(threads)} must be an integer from 1 to {MOST_THREADS}")
    if not isinstance(x, Tensor):
        raise InputError(f"x={shown(x)} must be a tensor [count, {weight.columns}]")
    count = len(x) if x.dim() else 0
    if out is None:
        out = torch.empty((count, weight.rows), dtype=torch.float32)
    _check("x", x, (count, weight.columns))
    _check("out", out, (count, weight.rows))
    if bias is not None:
        _check("bias", bias, (weight.rows,))
    if count and weight.rows:
        _run(kernels, weight, x, bias, out, usable_threads(threads))
    return out


def matrix_struct(weight: PackedMatrix) -> Matrix:
    """`struct matrix` of matmul.h; `weight` must live as long as it."""
    return Matrix(weight.layout.code, weight.rows, weight.columns, 0, weight.data.data_ptr())


def _run(kernels: Library, weight: PackedMatrix, x: Tensor, bias: Tensor | None, out: Tensor, threads: int) -> None:
    functions, count = kernels.functions, x.shape[0]
    vectors = Input(count, weight.columns, floats_of(x), x.stride(0))
    if not weight.layout.dense:
        memory = torch.empty(functions.place_input(vectors, None), dtype=torch.uint8)
        functions.place_input(vectors, memory.data_ptr())
    added = None if bias is None else bias.data_ptr()
    functions.multiply_parallel(matrix_struct(weight), vectors, out.data_ptr(), out.stride(0), added, threads)


def floats_of(x: Tensor) -> ctypes._Pointer[ctypes.c_float]:
    """The address of the numbers of a float32 tensor, which must live as long as it is used."""
    return ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))


def _check(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """InputError unless x is float32 on the CPU, has this shape, and its last dimension is contiguous."""
    if tuple(x.shape) != shape or x.dtype != torch.float32 or x.device.type != "cpu":
        raise InputError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; needed is float32 {list(shape)} on the CPU"
        )
    if (x.stride(-1) != 1 and x.shape[-1] > 1) or (x.dim() == 2 and x.shape[0] > 1 and x.stride(0) < x.shape[1]):
        raise InputError(f"{name} has strides {list(x.stride())}; its rows must be contiguous")
