"""Model families: one file each, found by what it says it reads.  Nothing here imports torch.

Beside them stand what several families share (`decoder`, `encoders`, `seq2seq`, `rope`, `gguf`) and the ways in:
`catalogue` finds the family, `configs` reads and writes its configs, `names` lays its table of names over a spec, and
`wrapped` finds the text model inside a model of images and text.
A family file gives

    hf_types, gguf_archs        the `model_type`s and GGUF architectures it answers to
    config(keys) -> Model       an HF config as a spec; every key it reads is recorded
    weights                     the reversible table of names (`triptych.mapping.weight_table`)
    prefix                      the base model's prefix in HF names, which a file may have or lack
    unprefixed                  heads beside which HF names have no prefix
    ignore                      HF keys it need not read, each with a reason beside it
    renames                     old endings of tensor names
    from_gguf(keys) -> dict     GGUF metadata as an HF config
    overflows_fp16              True where real checkpoints leave the range of fp16
    ids                         special tokens that the configuration class means by an absent key
    gguf_names                  GGUF architecture of a `model_type` that has another name there
    gguf_arch(model) -> str     the same, where it is not the `model_type` that decides
    to_gguf(model) -> dict      GGUF keys that say more than, or other than, `triptych.mapping.write_gguf_metadata`

of which only `hf_types`, `config` and `weights` are needed.
"""

from triptych.families.configs import read_config, read_gguf, write_gguf
from triptych.families.registry import find, find_gguf, modules
from triptych.families.tensor_names import plan, save_plan
from triptych.families.triptych import to_config
from triptych.families.wrapped import text_config

__all__ = [
    "find",
    "find_gguf",
    "modules",
    "plan",
    "read_config",
    "read_gguf",
    "save_plan",
    "text_config",
    "to_config",
    "write_gguf",
]
