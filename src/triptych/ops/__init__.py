"""The operations a forward is made of: functions of tensors, and the table that describes each of them."""

from triptych.ops.functions import (
    ACTIVATIONS,
    Rotation,
    conv1d,
    dropout,
    embedding,
    experts,
    l2_normalize,
    layer_norm,
    linear,
    patches,
    pool,
    record,
    rms_norm,
    rotate,
    sinusoids,
    softcap,
)

__all__ = [
    "ACTIVATIONS", "Rotation", "conv1d", "dropout", "embedding", "experts",
    "l2_normalize", "layer_norm", "linear", "patches", "pool", "record", "rms_norm", "rotate",
    "sinusoids", "softcap",
]  # fmt: skip
