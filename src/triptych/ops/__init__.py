"""The operations a forward is made of: functions of tensors, and the table that describes each of them."""

from triptych.ops.experts import experts
from triptych.ops.functions import (
    ACTIVATIONS,
    Rotation,
    conv1d,
    dropout,
    embedding,
    l2_normalize,
    layer_norm,
    linear,
    patches,
    record,
    rms_norm,
    rotate,
    sinusoids,
    softcap,
)
from triptych.ops.pooling import pool
from triptych.ops.table import OPERATIONS, Attributes, Dim, Operation, Shape, Shapes, operation_of, register

__all__ = [
    "ACTIVATIONS", "OPERATIONS", "Attributes", "Dim", "Operation", "Rotation", "Shape", "Shapes", "conv1d", "dropout",
    "embedding", "experts", "l2_normalize", "layer_norm", "linear", "operation_of", "patches", "pool", "record",
    "register", "rms_norm", "rotate", "sinusoids", "softcap",
]  # fmt: skip
