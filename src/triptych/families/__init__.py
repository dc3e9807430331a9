"""Model families, one file each, with the files that several share and those that find and apply them.

A family file defines names of `registry.Family`; `hf_types`, `config` and `weights` are required.  Beside the family
files stand what several of them share (`decoder`, `encoders`, `seq2seq`, `disentangled`, `rope_config`,
`gguf_config`, `t5_gguf`), the configs of known models (`named_configs`), and the entries: `registry` finds the
family of a `model_type`, `configs` reads and writes configs, `tensor_names` applies a family's table of names to a
spec, and `multimodal_text` takes the text model out of one of images and text.  Nothing here imports torch.
"""

from .configs import read_config, read_gguf, write_gguf
from .multimodal_text import text_config
from .registry import Family, all_families, find, find_gguf
from .tensor_names import plan, save_plan
from .triptych import to_config

__all__ = [
    "Family",
    "all_families",
    "find",
    "find_gguf",
    "plan",
    "read_config",
    "read_gguf",
    "save_plan",
    "text_config",
    "to_config",
    "write_gguf",
]
