"""Reading, writing and converting checkpoints: files, named tensors, models, and adapters of models.

Files, without torch until a tensor is read: `source` is the interface of every weights file; `safetensors`,
`packed_safetensors` and `gguf_reader` implement it; `locate` opens the right one, `hub` downloads one; `save` and
`gguf_writer` write.  Models: `header` turns a config or GGUF metadata into a spec, `load_weights` fills a module and
writes one back, `convert` changes a checkpoint's format, `describe` lists what is in one.
"""

from .hub import fetch, local_path
from .locate import open_source
from .save import atomic_write, is_complete, recover, write_directory
from .source import LoadedTensor, LoadReport, Source, read_json

__all__ = [
    "LoadReport",
    "LoadedTensor",
    "Source",
    "atomic_write",
    "fetch",
    "is_complete",
    "local_path",
    "open_source",
    "read_json",
    "recover",
    "write_directory",
]
