"""The constants and structures of the C headers, as Python has them; the loader compares each with the built library.

A structure is a numpy record, or a ctypes one where it holds pointers that change from step to step.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int8, c_int32, c_int64, c_ssize_t, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[Any]
"""Structures of the headers."""
Integers = npt.NDArray[np.int64]

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
TILE_KEYS, QUERIES, QUERIES_BF16, RANGE = 64, 64, 192, 256
SCORES, WIDEST_BF16, FEW_TOKENS, COUNTERS = 272, 256, 16, 2048
PAGE_POSITIONS = TILE_KEYS  # of a page of a cache: those whose keys a thread has at hand are one piece of memory
PAGES_OF_CHUNK = 65536  # a page in a table is the number of its chunk, times this, and its place in the chunk
STATISTICS_PANEL = 64  # keys that stand side by side
STATISTICS_TOP = 32  # keys of one query that attention statistics may ask for
LONGEST_ROW = 512  # keys of a row of attention in a training step
NORM_TOKENS = 128  # whose part of the gradient of a norm's weight is summed by itself


# Each enumeration of the headers, whose members count up from its start.
Level = IntEnum("Level", "PORTABLE AVX2 AVX512 AMX", start=0)
"""The instructions that functions are compiled for."""
MatrixLayout = IntEnum("MatrixLayout", "F32 BF16 U4 U5 S8 S8X16", start=0)
"""How a matrix is stored."""
Op = IntEnum(
    "Op",
    "NONE EMBED ROUND LINEAR LAYER_NORM RMS_NORM ROTATE MAP MAP_MULTIPLY ADD ATTEND EXTEND CHOOSE ROUTE TAKE GIVE "
    "ROUND_BF16 LINEAR_BF16 STORED",
    start=-1,
)
"""The operation of an instruction."""
Index = IntEnum("Index", "IDS POSITIONS TOKENS NONE", start=0)
"""What names the row of a table that `EMBED` reads."""
Pairing = IntEnum("Pairing", "HALF INTERLEAVED", start=0)
"""Which numbers of a vector are rotated together."""
KeySource = IntEnum("KeySource", "SELF CROSS ROW", start=0)
"""What an `ATTEND` reads."""
Function = IntEnum(
    "Function", "NONE SILU GELU GELU_TANH RELU TANH SCALE SHIFT SOFTCAP SIGMOID ABS RECIPROCAL EXP", start=0
)
"""A function of one number."""
StoredType = IntEnum("StoredType", "F32 BF16 F16 INT8", start=0)
"""What a store keeps of a vector."""
Over = IntEnum("Over", "TOKENS CHOSEN EXPERT", start=0)
"""Which vectors an instruction runs on (`enum rows`)."""
Barrier = IntEnum("Barrier", "NONE BEFORE IF_ANY", start=0)
"""What must be finished before an instruction."""


class Operands(NamedTuple):
    """A member of the union in `struct instruction` (`OPERANDS` of step.h); all are names with a space between them.

    operations   those that have it.
    integers     its fields of int32_t, which come first, and `floats` those of float.
    tables       the fields that name a table of the plan.
    buffers      the fields that name a buffer, beside `input` and `output`.
    """

    operations: str
    integers: str
    floats: str = ""
    tables: str = ""
    buffers: str = ""


OPERANDS = {
    "embed": Operands("EMBED", "table row shift", tables="table"),
    "linear": Operands("LINEAR", "weight bias rounded", tables="weight bias", buffers="rounded"),
    "linear_bf16": Operands(
        "LINEAR_BF16", "weight bias gate more function rounds", "factor", tables="weight bias gate", buffers="more"
    ),
    "norm": Operands("LAYER_NORM RMS_NORM", "weight bias rounds", "eps offset", tables="weight bias"),
    "rotate": Operands("ROTATE", "table far_table near_length pairing", tables="table far_table"),
    "map": Operands("MAP MAP_MULTIPLY ADD", "other function", "factor", buffers="other"),
    "attend": Operands(
        "ATTEND EXTEND", "keys values store groups value_width window kind bf16 sinks bias", "scale softcap",
        tables="sinks bias", buffers="keys values",
    ),
    "route": Operands("ROUTE", "experts top normalized sum", buffers="sum"),
    "expert": Operands("TAKE GIVE", "routes experts number skip", buffers="routes"),
    "stored": Operands("STORED", "type"),
}  # fmt: skip
#: The member that each operation has.
MEMBER = {Op[operation]: name for name, member in OPERANDS.items() for operation in member.operations.split()}
HEADER = ("op", "rows", "barrier", "input", "output", "width", "heads")


def _fields(*members: tuple[Any, str]) -> list[tuple[str, Any]]:
    """The fields of a structure: for each type the names that have it, in order."""
    return [(name, kind) for kind, names in members for name in names.split()]


_RECORDS = {
    name: np.dtype(_fields((np.int32, member.integers), (np.float32, member.floats)))
    for name, member in OPERANDS.items()
}
#: `struct instruction`: the members lie over each other, behind the fields of all operations.
INSTRUCTION = np.dtype({
    "names": [*HEADER, *_RECORDS],
    "formats": [*[np.dtype(np.int32)] * len(HEADER), *_RECORDS.values()],
    "offsets": [*range(0, 4 * len(HEADER), 4), *[4 * len(HEADER)] * len(_RECORDS)],
})  # fmt: skip

#: `struct store`.
STORE = np.dtype(
    _fields((np.uintp, "chunks"), (np.int32, "page type")),
    align=True,
)

#: `struct chunk`.
CHUNK = np.dtype(_fields((np.uintp, "keys values"), (np.int64, "places")), align=True)


#: `struct draw` of sample.h.
DRAW = np.dtype(
    _fields((np.float64, "uniform top_p"), (np.float32, "temperature lowest"), (np.int32, "top_k reserved"))
)


class Matrix(Structure):
    """`struct matrix` of matmul.h."""

    _fields_ = _fields((c_int32, "layout rows columns reserved"), (c_void_p, "data"))


MATRIX = np.dtype(Matrix)


class Input(Structure):
    """`struct input` of matmul.h."""

    _fields_ = _fields(
        (c_int32, "count columns"), (POINTER(c_float), "dense"), (c_ssize_t, "stride"), (POINTER(c_int8), "rounded"),
        (POINTER(c_float), "scales sums"),
    )  # fmt: skip


class ScoreTile(Structure):
    """`struct score_tile` of statistics.h."""

    _fields_ = _fields(
        (c_int32, "heads queries keys top base"), (c_int64, "stride row"),
        (c_void_p, "scratch scores sinks q_pos k_pos delimiters q_doc k_doc entropy distance first previous "
                   "on_delimiters on_document top_weights received top_keys q k group from_ to"),
        (c_int64, "width panels"),
    )  # fmt: skip


class PlanStruct(Structure):
    """`struct plan`."""

    _fields_ = _fields((c_int32, "count alone"), (c_void_p, "instructions weights stores"))


class Call(Structure):
    """`struct batch`."""

    _fields_ = _fields(
        (c_int32, "tokens chosen_count threads scratch_floats"),
        (c_void_p, "ids position slot start end reach source source_slot pages"),
        (c_int64, "most_pages"),
        (c_void_p, "chosen arena output scratch partial reads"),
    )


class TrainVectors(Structure):
    """`struct train_vectors` of train.h."""

    _fields_ = _fields((c_void_p, "data"), (c_int64, "row head token"))


class TrainAttention(Structure):
    """`struct train_attention` of train.h."""

    _fields_ = _fields(
        (TrainVectors, "q k v out bias visible d_out d_q d_k d_v d_bias"), (c_void_p, "lse scratch"),
        (c_int64, "rows heads groups queries keys width value_width bf16 causal"), (c_double, "scale"),
    )  # fmt: skip


class TrainActivation(Structure):
    """`struct train_activation` of train.h."""

    _fields_ = _fields((c_void_p, "x gate d_y y d_x d_gate"), (c_int64, "count bf16 function"))


class TrainRotation(Structure):
    """`struct train_rotation` of train.h."""

    _fields_ = _fields((c_void_p, "x y cosines sines"), (c_int64, "tokens heads width half bf16 back"))


class TrainNorm(Structure):
    """`struct train_norm` of train.h."""

    _fields_ = _fields(
        (c_void_p, "x weight d_y y inverse d_x d_weight"), (c_int64, "tokens width"), (c_double, "eps offset")
    )


def constants() -> dict[str, int]:
    """What `constant` of step.h names, with the values that Python has."""
    enums = {"LEVEL": Level, "LAYOUT": MatrixLayout, "OP": Op, "INDEX": Index, "PAIRING": Pairing, "ROWS": Over,
             "BARRIER": Barrier, "ATTEND": KeySource, "STORED": StoredType, "FUNCTION": Function}  # fmt: skip
    numbers = ("BAND", "GROUP", "SUPERGROUP", "PAIR", "RANGE", "TILE_KEYS", "QUERIES", "QUERIES_BF16", "SCORES",
               "WIDEST_BF16", "FEW_TOKENS", "COUNTERS", "PAGES_OF_CHUNK", "STATISTICS_TOP", "STATISTICS_PANEL",
               "OUTPUT", "LONGEST_ROW", "NORM_TOKENS")  # fmt: skip
    records = {"instruction": INSTRUCTION, "chunk": CHUNK, "store": STORE, "draw": DRAW}
    sizes = {name: record.itemsize for name, record in records.items()}
    structures = {"plan": PlanStruct, "batch": Call, "matrix": Matrix, "input": Input, "score_tile": ScoreTile,
                  "train_vectors": TrainVectors, "train_attention": TrainAttention,
                  "train_activation": TrainActivation, "train_rotation": TrainRotation,
                  "train_norm": TrainNorm}  # fmt: skip
    sizes |= {name: ctypes.sizeof(structure) for name, structure in structures.items()}
    return {
        **{name: globals()[name] for name in numbers},
        **{f"{prefix}_{member.name}": int(member) for prefix, enum in enums.items() for member in enum},
        **{f"sizeof {name}": size for name, size in sizes.items()},
        " ".join(f"{name}: {_declared(member)}" for name, member in OPERANDS.items()): 0,
    }


def _declared(member: Operands) -> str:
    fields = (("int32_t", member.integers), ("float", member.floats))
    return " ".join(f"{kind} {', '.join(names.split())};" for kind, names in fields if names)
