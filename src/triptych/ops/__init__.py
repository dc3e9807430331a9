"""The operations a forward is made of: the table that describes them (`table.py`), and their functions of tensors."""

from .experts import experts
from .functions import (
    Rotation,
    conv1d,
    dropout,
    dtype_of,
    embedding,
    l2_normalize,
    layer_norm,
    linear,
    patches,
    pool,
    rms_norm,
    rotate,
    sinusoids,
    softcap,
)
from .native_training import ACTIVATIONS, activated, gated
from .noise import Noise, RowNoise
from .recording import RUN, NotLowerable, implements, record, recorded_call
from .table import OPERATIONS, Dim, Operation, Shape

__all__ = [
    "ACTIVATIONS", "OPERATIONS", "RUN", "Dim", "Noise", "NotLowerable", "Operation", "Rotation", "RowNoise",
    "Shape", "activated", "conv1d", "dropout", "dtype_of", "embedding", "experts", "gated", "implements",
    "l2_normalize", "layer_norm", "linear", "patches", "pool", "record", "recorded_call", "rms_norm", "rotate",
    "sinusoids", "softcap",
]  # fmt: skip
