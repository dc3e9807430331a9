"""The constants and structures of the C headers, as Python has them; the loader compares each with the built library.

A structure is a numpy record, or a ctypes one where it holds pointers that change from step to step.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int8, c_int32, c_int64, c_ssize_t, c_void_p
from enum import IntEnum
from typing import NamedTuple, get_type_hints

import numpy as np

OUTPUT = -2  # the buffer of the step's result; those at OUTPUT - 1 - n are n numbers per token into `reads`
NONE = -1
LAYOUT_TILES = -1  # of a matrix for products in bf16 (matmul_bf16.h)
BAND = 16  # rows of a matrix that are stored together
GROUP = 32  # numbers of a vector that are rounded with one scale
SUPERGROUP = 256  # columns that share a scale of LAYOUT_S8X16
PAIR = 32  # vectors rounded to bf16 are padded to a multiple of so many numbers
# Of attention: positions of which a thread has keys or values at hand, queries of a unit of work, those where products
# are in bf16, positions that one softmax is over, numbers that the scores of one query take, the widest keys and values
# where products are in bf16, tokens of a step up to which threads share a row, counters of what is done.
TILE_KEYS, QUERIES, QUERIES_BF16, RANGE, SCORES, WIDEST_BF16, FEW_TOKENS, COUNTERS = (
    64,
    64,
    192,
    256,
    272,
    256,
    16,
    2048,
)
STATISTICS_PANEL = 64  # keys that stand side by side
STATISTICS_TOP = 32  # keys of one query that attention statistics may ask for


class Level(IntEnum):
    """The instructions that functions are compiled for."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3


class MatrixLayout(IntEnum):
    """How a matrix is stored."""

    F32 = 0
    BF16 = 1
    U4 = 2
    U5 = 3
    S8 = 4
    S8X16 = 5


class Op(IntEnum):
    """The operation of an instruction."""

    NONE = -1
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
    """What names the row of a table that `EMBED` reads."""

    IDS = 0
    POSITIONS = 1
    TOKENS = 2
    NONE = 3


class Pairing(IntEnum):
    """Which numbers of a vector are rotated together."""

    HALF = 0
    INTERLEAVED = 1


class AttentionKind(IntEnum):
    """What an `ATTEND` reads."""

    SELF = 0
    CROSS = 1
    ROW = 2


class Function(IntEnum):
    """A function of one number."""

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
    """What must be finished before an instruction."""

    NONE = 0
    BEFORE = 1
    IF_ANY = 2


class EmbedOperands(NamedTuple):
    table: int
    row: int
    shift: int


class LinearOperands(NamedTuple):
    weight: int
    bias: int
    rounded: int


class LinearBf16Operands(NamedTuple):
    weight: int
    bias: int
    gate: int
    more: int
    function: int
    rounds: int
    factor: float


class NormOperands(NamedTuple):
    weight: int
    bias: int
    rounds: int
    eps: float
    offset: float


class RotateOperands(NamedTuple):
    table: int
    far_table: int
    near_length: int
    pairing: int


class MapOperands(NamedTuple):
    other: int
    function: int
    factor: float


class AttendOperands(NamedTuple):
    keys: int
    values: int
    store: int
    groups: int
    value_width: int
    window: int
    kind: int
    bf16: int
    sinks: int
    bias: int
    scale: float
    softcap: float


class RouteOperands(NamedTuple):
    experts: int
    top: int
    normalized: int
    sum: int


class ExpertOperands(NamedTuple):
    routes: int
    experts: int
    number: int
    skip: int


class StoredOperands(NamedTuple):
    type: int


#: `OPERANDS` of step.h: the members of the union in `struct instruction`.
OPERANDS: dict[str, type[object]] = {
    "embed": EmbedOperands, "linear": LinearOperands, "linear_bf16": LinearBf16Operands, "norm": NormOperands,
    "rotate": RotateOperands, "map": MapOperands, "attend": AttendOperands, "route": RouteOperands,
    "expert": ExpertOperands, "stored": StoredOperands,
}  # fmt: skip
#: The member that each operation has.
MEMBER = {
    Op.EMBED: "embed", Op.LINEAR: "linear", Op.LINEAR_BF16: "linear_bf16", Op.LAYER_NORM: "norm", Op.RMS_NORM: "norm",
    Op.ROTATE: "rotate", Op.MAP: "map", Op.MAP_MULTIPLY: "map", Op.ADD: "map", Op.ATTEND: "attend",
    Op.EXTEND: "attend", Op.ROUTE: "route", Op.TAKE: "expert", Op.GIVE: "expert", Op.STORED: "stored",
}  # fmt: skip
#: The fields that name a table of the plan, and the members that have them.
TABLES = {"embed": ("table",), "linear": ("weight", "bias"), "linear_bf16": ("weight", "bias", "gate"),
          "norm": ("weight", "bias"), "rotate": ("table", "far_table"), "attend": ("sinks", "bias")}  # fmt: skip
#: The fields that name a buffer, beside `input` and `output`.
BUFFERS = {"linear": ("rounded",), "linear_bf16": ("more",), "map": ("other",), "attend": ("keys", "values"),
           "route": ("sum",), "expert": ("routes",)}  # fmt: skip
HEADER = ("op", "rows", "barrier", "input", "output", "width", "heads")


def _record(member: type[object]) -> np.dtype[np.void]:
    hints = get_type_hints(member)
    return np.dtype([(name, np.float32 if hints[name] is float else np.int32) for name in hints])


_RECORDS = {name: _record(member) for name, member in OPERANDS.items()}
#: `struct instruction`: the members lie over each other, behind the fields of all operations.
INSTRUCTION = np.dtype({
    "names": [*HEADER, *_RECORDS],
    "formats": [*[np.dtype(np.int32)] * len(HEADER), *_RECORDS.values()],
    "offsets": [*range(0, 4 * len(HEADER), 4), *[4 * len(HEADER)] * len(_RECORDS)],
})  # fmt: skip

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
    """`struct score_tile` of statistics.h."""

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


def constants() -> dict[str, int]:
    """What `constant` of step.h names, with the values that Python has."""
    enums = {"LEVEL": Level, "LAYOUT": MatrixLayout, "OP": Op, "INDEX": Index, "PAIRING": Pairing, "ROWS": Over,
             "BARRIER": Barrier, "ATTEND": AttentionKind, "STORED": StoredType, "FUNCTION": Function}  # fmt: skip
    numbers = ("BAND", "GROUP", "SUPERGROUP", "PAIR", "RANGE", "TILE_KEYS", "QUERIES", "QUERIES_BF16", "SCORES",
               "WIDEST_BF16", "FEW_TOKENS", "COUNTERS", "STATISTICS_TOP", "STATISTICS_PANEL", "OUTPUT")  # fmt: skip
    sizes = {"instruction": INSTRUCTION.itemsize, "store": STORE.itemsize}
    structures = {"plan": PlanRecord, "batch": Call, "matrix": Matrix, "input": Input, "score_tile": ScoreTile}
    sizes |= {name: ctypes.sizeof(structure) for name, structure in structures.items()}
    return {
        **{name: globals()[name] for name in numbers},
        **{f"{prefix}_{member.name}": int(member) for prefix, enum in enums.items() for member in enum},
        **{f"sizeof {name}": size for name, size in sizes.items()},
        " ".join(f"{name}: {_declared(member)}" for name, member in OPERANDS.items()): 0,
    }


def _declared(member: type[object]) -> str:
    hints, parts = get_type_hints(member), []
    for kind, written in ((int, "int32_t"), (float, "float")):
        names = [name for name, hint in hints.items() if hint is kind]
        if names:
            parts.append(f"{written} {', '.join(names)};")
    return " ".join(parts)
