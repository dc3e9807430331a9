"""Find, load and type the library of native kernels."""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from ctypes import POINTER, Structure, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from functools import cache
from pathlib import Path

#: The kernels by their number in `matmul.h`.
ISAS = ("portable", "avx2", "avx512")
#: Those of products in bf16, by their number in `matmul_bf16.h`.
BF16_ISAS = (None, "amx-bf16")
_PROCESS = os.getpid()


class Matrix(Structure):
    """`struct matrix` of matmul.h."""

    _fields_ = (
        ("layout", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
    )


class Input(Structure):
    """`struct input` of matmul.h."""

    _fields_ = (
        ("count", c_int32),
        ("columns", c_int32),
        ("dense", POINTER(c_float)),
        ("stride", c_ssize_t),
        ("rounded", POINTER(c_int8)),
        ("scales", POINTER(c_float)),
        ("sums", POINTER(c_float)),
    )


class ScoreTile(Structure):
    """`struct score_tile` of statistics.c."""

    _fields_ = (
        *((name, c_int32) for name in ("heads", "queries", "keys", "top", "base")),
        *((name, c_int64) for name in ("stride", "row")),
        *((name, c_void_p) for name in ("scratch", "scores", "sinks", "q_pos", "k_pos", "delimiters", "q_doc")),
        *((name, c_void_p) for name in ("k_doc", "entropy", "distance", "first", "previous", "on_delimiters")),
        *(
            (name, c_void_p)
            for name in ("on_document", "top_weights", "received", "top_keys", "q", "k", "group", "from_", "to")
        ),
        *((name, c_int64) for name in ("width", "panels")),
    )


class Library:
    """The loaded library.  `functions` are those of matmul.h, under their names there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = _typed(ctypes.CDLL(str(path)))
        self.isa = self.use(ISAS[-1])
        self.bf16 = self.use_bf16(BF16_ISAS[-1])

    def use(self, at_most: str) -> str:
        """Compute with the best kernels up to `at_most` that this processor has, and return their name in `ISAS`.

        Acts on the whole process; the best of all are in use from the start.  `select_kernels` in
        matmul.c knows which instructions each of them needs.  Raises ValueError for an unknown name.
        """
        self.isa = ISAS[self.functions.select_kernels(ISAS.index(at_most))]
        return self.isa

    def use_bf16(self, at_most: str | None) -> str | None:
        """The same for products in bf16, with the names of `BF16_ISAS`; None where this processor has none."""
        self.bf16 = BF16_ISAS[self.functions.select_bf16(BF16_ISAS.index(at_most))]
        return self.bf16


def library() -> Library | None:
    """The library, loaded at the first call; None where it cannot be (see `why_not`)."""
    return _load()[0]


def why_not() -> str | None:
    """Why `library()` is None, in one line; None where it is loaded."""
    return _load()[1]


def usable_threads(count: int) -> int:
    """How many of `count` threads of OpenMP this process may use.

    In a process that was forked after this module was imported it is one: the threads of OpenMP's team do not survive a
    fork, and a child that used more would wait for them for ever.
    """
    return max(count, 1) if os.getpid() == _PROCESS else 1


def _one_thread() -> None:
    """Torch computes with one thread too, until it is told otherwise: its products use the same team of OpenMP."""
    use = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if use is not None:
        use(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread)


@cache
def _load() -> tuple[Library | None, str | None]:
    # torch ships the OpenMP runtime that it uses.  Loaded first, it serves the kernels too: a process with two
    # runtimes would start two sets of threads.
    import torch  # noqa: F401

    return load(Path(__file__).with_name("_kernels" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")))


def load(path: Path) -> tuple[Library | None, str | None]:
    """The library in the file `path`, or None and why it cannot be loaded."""
    if not path.exists():
        return None, f"the native kernels were not built: {path.name} is missing; installing with a compiler builds it"
    try:
        return Library(path), None
    except (OSError, AttributeError) as error:
        return None, f"the native kernels in {path.name} cannot be loaded: {error}"


def _typed(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Give the functions of matmul.h their types.  AttributeError where one is missing, as in an older build."""
    output = (c_void_p, c_ssize_t, c_void_p)  # y, y_stride, bias
    matrix, vectors = POINTER(Matrix), POINTER(Input)
    types: dict[str, tuple[object, tuple[object, ...]]] = {
        "matrix_bytes": (c_size_t, (c_int32, c_int32, c_int32)),
        "input_bytes": (c_size_t, (c_int32, c_int32)),
        "place_input": (c_size_t, (vectors, c_void_p)),
        "round_groups": (None, (vectors, c_int32, c_int32, c_int32)),
        "multiply": (None, (matrix, vectors, *output, c_int32, c_int32)),
        "multiply_parallel": (None, (matrix, vectors, *output, c_int32)),
        "unpack_row": (None, (matrix, c_int64, c_void_p)),
        "unpack_tiles": (None, (matrix, c_int32, c_int32, c_int32, c_void_p)),
        "repack_blocks": (c_int, (c_int, c_void_p, matrix, c_int32)),
        "select_kernels": (c_int, (c_int,)),
        "select_bf16": (c_int, (c_int,)),
        "largest_of": (None, (c_void_p, c_int32, c_int32, c_void_p, c_void_p)),
        "score_statistics": (c_int, (POINTER(ScoreTile), c_int32)),
        "scratch_floats": (c_int64, (POINTER(ScoreTile),)),
    }
    for name, (result, arguments) in types.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions
