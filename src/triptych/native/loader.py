"""Finds the library of native kernels, checks that it is of this version, and chooses the level that it computes at."""

import ctypes
import os
import sys
import sysconfig
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from functools import cache
from pathlib import Path

from triptych.errors import ConfigError, nearest
from .step import (
    Call,
    Input,
    Level,
    Matrix,
    PlanStruct,
    ScoreTile,
    TrainActivation,
    TrainAttention,
    TrainNorm,
    TrainRotation,
    constants,
)

LEVELS = tuple(level.name.lower() for level in Level)
VARIABLE = "TRIPTYCH_KERNELS"  # of the environment: the highest level, or "none"
_PROCESS = os.getpid()


def highest_level() -> str:
    """The level that TRIPTYCH_KERNELS allows at most, the highest one where it is not set, or "none".

    Raises ConfigError for another value.
    """
    name = os.environ.get(VARIABLE) or LEVELS[-1]
    if name not in ("none", *LEVELS):
        known = ("none", *LEVELS)
        raise ConfigError(f"{VARIABLE}={name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return name


class Library:
    """The loaded library.  `functions` are those of the headers, under their names there.

    level   what they are compiled for that are in use: of `LEVELS`.
    bf16    "amx-bf16" where products in bf16 can be had, else None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = _typed(ctypes.CDLL(str(path)))
        _compare(self.functions)
        self.use(LEVELS[-1])

    def use(self, at_most: str) -> str:
        """Compute at the best level up to `at_most` that TRIPTYCH_KERNELS allows and this processor has, and return it.

        Acts on the whole process.  `select_level` in levels.c knows which instructions a level needs.  Raises
        ValueError for an unknown name.
        """
        allowed = min(LEVELS.index(at_most), LEVELS.index(highest_level()))
        level: str = LEVELS[self.functions.select_level(allowed)]
        self.level, self.bf16 = level, "amx-bf16" if level == "amx" else None
        return level

    @property
    def wide(self) -> bool:
        """Whether a register holds 16 numbers."""
        return LEVELS.index(self.level) >= LEVELS.index("avx512")


def library() -> Library | None:
    """The library, loaded at the first call; None where it cannot be (see `why_not`) or TRIPTYCH_KERNELS is "none".

    Raises ConfigError for an unknown value of TRIPTYCH_KERNELS.
    """
    return _load()[0]


def why_not() -> str | None:
    """The reason why `library()` is None, in one line; None where it is loaded."""
    return _load()[1]


def levels() -> dict[str, str]:
    """The level of each group of functions, as the library has them in use; "none" where torch computes instead."""
    kernels = library()
    table, bf16 = "none", "none"
    if kernels is not None:
        in_use = c_void_p.in_dll(kernels.functions, "kernels_in_use").value
        table = LEVELS[c_int32.from_address(in_use or 0).value]  # the first field of `struct kernels`
        bf16 = "none" if kernels.bf16 is None else "amx"
    groups = ("products", "attention", "norms, rotations and activations", "caches", "attention statistics", "sampling")
    repacking = "none" if kernels is None else "portable"  # which no level computes faster
    return dict.fromkeys(groups, table) | {"products in bf16": bf16, "repacking": repacking}


def describe() -> str:
    """One line: which groups of functions run at which level, and why not at a higher one where the user chose that."""
    wanted = os.environ.get(VARIABLE)
    kernels = library()
    if kernels is None:
        return f"none, torch computes: {why_not()}"
    by_level: dict[str, list[str]] = {}
    for group, level in levels().items():
        by_level.setdefault(level, []).append(group)
    line = "; ".join(f"{level}: {', '.join(groups)}" for level, groups in by_level.items())
    if not wanted:
        return line
    lacks = "" if kernels.level == wanted else f", which this processor lacks; the best below it is {kernels.level}"
    return f"{line} ({VARIABLE}={wanted}{lacks})"


def usable_threads(count: int) -> int:
    """The number of OpenMP threads, of `count`, that this process may use.

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
    if highest_level() == "none":
        return None, f"{VARIABLE}=none switches the native kernels off"
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
    except OSError as error:
        return None, f"the native kernels in {path.name} cannot be loaded: {error}"
    except AttributeError as error:
        build = "install triptych again, or run `python setup.py build_ext --inplace` in its sources"
        return None, f"the native kernels in {path.name} are of another version ({error}): build them again ({build})"


def _typed(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Give the functions of the headers their types.  AttributeError where one is missing, as in another version."""
    output = (c_void_p, c_ssize_t, c_void_p)  # y, y_stride, bias
    attention, activation = POINTER(TrainAttention), POINTER(TrainActivation)
    matrix, vectors, plan, call = POINTER(Matrix), POINTER(Input), POINTER(PlanStruct), POINTER(Call)
    types: dict[str, tuple[object, tuple[object, ...]]] = {
        "matrix_bytes": (c_size_t, (c_int32, c_int32, c_int32)),
        "place_input": (c_size_t, (vectors, c_void_p)),
        "round_groups": (None, (vectors, c_int32, c_int32, c_int32)),
        "multiply": (None, (matrix, vectors, *output, c_int32, c_int32)),
        "multiply_parallel": (None, (matrix, vectors, *output, c_int32)),
        "unpack_row": (None, (matrix, c_int64, c_void_p)),
        "unpack_tiles": (None, (matrix, c_int32, c_int32, c_int32, c_void_p)),
        "repack_blocks": (c_int, (c_int, c_void_p, matrix, c_int32)),
        "select_level": (c_int, (c_int,)),
        "largest_of": (None, (c_void_p, c_int32, c_int32, c_void_p, c_void_p)),
        "draw_tokens": (None, (c_void_p, c_int32, c_int32, *(c_void_p,) * 3, c_int32, c_void_p, c_int32, c_void_p)),
        "mask_scores": (None, (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p)),
        "score_statistics": (None, (POINTER(ScoreTile), c_int32)),
        "scratch_floats": (c_int64, (POINTER(ScoreTile),)),
        "run_step": (None, (plan, call)),
        "run_steps": (None, (plan, call, c_int32, c_int32, c_int64)),
        "attention_scratch": (c_int64, (attention,)),
        "attention_forward": (None, (attention, c_int32)),
        "attention_backward": (None, (attention, c_int32)),
        "activation_forward": (None, (activation, c_int32)),
        "activation_backward": (None, (activation, c_int32)),
        "rotation": (None, (POINTER(TrainRotation), c_int32)),
        "norm_forward": (None, (POINTER(TrainNorm), c_int32)),
        "norm_backward": (None, (POINTER(TrainNorm), c_int32)),
        "constant": (c_char_p, (c_int, POINTER(c_int64))),
    }
    for name, (result, arguments) in types.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


def _compare(functions: ctypes.CDLL) -> None:
    """AttributeError unless the constants and structures of the library are those of `triptych.native.step`."""
    built, value = dict[str, int](), c_int64()
    while (name := functions.constant(len(built), ctypes.byref(value))) is not None:
        built[" ".join(name.decode().split())] = value.value
    ours = constants()
    other = sorted(name for name in {*built, *ours} if built.get(name) != ours.get(name))
    if other:
        name = other[0] if ":" not in other[0] else "the fields of an instruction"
        raise AttributeError(f"{name}: {built.get(other[0])} there, {ours.get(other[0])} here")
