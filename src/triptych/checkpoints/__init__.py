"""Files <-> named tensors.  Nothing here knows what a model is, and reading a header needs no torch."""

from triptych.checkpoints.hub import fetch, local_path
from triptych.checkpoints.locate import open_source
from triptych.checkpoints.report import Loaded, LoadReport
from triptych.checkpoints.save import atomic_write, is_complete, recover, write_directory
from triptych.checkpoints.source import Source, TensorInfo, read_json

__all__ = [
    "LoadReport",
    "Loaded",
    "Source",
    "TensorInfo",
    "atomic_write",
    "fetch",
    "is_complete",
    "local_path",
    "open_source",
    "read_json",
    "recover",
    "write_directory",
]
