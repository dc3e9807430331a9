"""Files <-> named tensors.  Nothing here knows what a model is, and reading a header needs no torch."""

from triptych.checkpoints.locate import open_source
from triptych.checkpoints.source import Source, TensorInfo

__all__ = ["Source", "TensorInfo", "open_source"]
