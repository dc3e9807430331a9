"""The structures of `step.h`, and the loaded `run_step`.

A structure is given as a numpy record, or a ctypes one where it holds pointers that change from step to step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any

import numpy as np

from triptych.native.loader import Matrix, library, why_not

OUTPUT = -2  # the buffer of the step's result; those at OUTPUT - 1 - n are n numbers per token into `reads`
NONE = -1


class Op(IntEnum):
    EMBED = 0
    ROUND = 1
    LINEAR = 2
    LAYER_NORM = 3
    RMS_NORM = 4
    ROTATE = 5
    MAP = 6
    MAP_MULTIPLY = 7
    ADD = 8
    ATTEND = 9
    EXTEND = 10
    CHOOSE = 11
    ROUTE = 12
    TAKE = 13
    GIVE = 14
    ROUND_BF16 = 15
    LINEAR_BF16 = 16
    STORED = 17


class Index(IntEnum):
    IDS = 0
    POSITIONS = 1
    TOKENS = 2
    NONE = 3


class AttentionKind(IntEnum):
    """What an `ATTEND` reads (`enum attention`)."""

    SELF = 0
    CROSS = 1
    ROW = 2


class Function(IntEnum):
    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    TANH = 5
    SCALE = 6
    SHIFT = 7
    SOFTCAP = 8


class StoredType(IntEnum):
    """What a store keeps of a vector."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3


class Over(IntEnum):
    """Which vectors an instruction runs on (`enum rows`)."""

    TOKENS = 0
    CHOSEN = 1
    EXPERT = 2


class Barrier(IntEnum):
    NONE = 0
    BEFORE = 1
    IF_ANY = 2


#: `struct instruction`.
INSTRUCTION = np.dtype(
    [(name, np.int32) for name in (
        "op", "rows", "barrier", "kind", "input", "second", "third", "output", "width", "heads", "groups",
        "value_width", "weight", "bias", "store", "window", "skip", "number", "top", "gate",
    )] + [("first", np.float32), ("other", np.float32)]
)  # fmt: skip

#: `struct matrix`.
MATRIX = np.dtype(
    [("layout", np.int32), ("rows", np.int32), ("columns", np.int32), ("reserved", np.int32), ("data", np.uintp)],
    align=True,
)

#: `struct store`.
STORE = np.dtype(
    [("keys", np.uintp), ("values", np.uintp), ("slots", np.int64), ("capacity", np.int64), ("groups", np.int32),
     ("width", np.int32), ("value_width", np.int32), ("type", np.int32)],
    align=True,
)  # fmt: skip


class PlanRecord(Structure):
    """`struct plan`."""

    _fields_ = (
        ("count", c_int32),
        ("alone", c_int32),
        ("instructions", c_void_p),
        ("weights", c_void_p),
        ("stores", c_void_p),
    )


class Call(Structure):
    """`struct batch`."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "chosen_count", "threads", "scratch_floats")),
        *(
            (name, c_void_p)
            for name in ("ids", "position", "slot", "start", "end", "reach", "source", "source_slot", "chosen")
        ),
        *((name, c_void_p) for name in ("arena", "output", "scratch", "partial", "reads")),
    )


RunStep = Callable[[Any, Any], None]
RunSteps = Callable[[Any, Any, int, int, int], None]


def run_step() -> RunStep | str:
    """The function `run_step(plan, call)`, or why there is none."""
    loaded = library()
    if loaded is None:
        return why_not() or "the native kernels are not loaded"
    try:
        function, sizeof = loaded.functions.run_step, loaded.functions.step_sizeof
    except AttributeError as error:
        return f"the native kernels are of an older build: {error}"
    function.restype, function.argtypes = None, (POINTER(PlanRecord), POINTER(Call))
    ours = (INSTRUCTION.itemsize, STORE.itemsize, *map(ctypes.sizeof, (PlanRecord, Call, Matrix)))
    if ours != tuple(sizeof(i) for i in range(len(ours))) or ctypes.sizeof(Matrix) != MATRIX.itemsize:
        return "the native kernels are of an older build: their structures have other sizes"
    found: RunStep = function
    return found


def run_steps() -> RunSteps:
    """The function `run_steps(plans, calls, count, threads, arena floats)`, where there is a `run_step`."""
    loaded = library()
    assert loaded is not None
    function = loaded.functions.run_steps
    function.restype, function.argtypes = None, (POINTER(PlanRecord), POINTER(Call), c_int32, c_int32, c_int64)
    found: RunSteps = function
    return found
