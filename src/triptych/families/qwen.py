"""Qwen2 and Qwen2.5 (Yang et al. 2024: Llama with biases on q, k and v) and Qwen3 (2025: without them, with an RMSNorm
on each head's q and k).  Some layers may see a sliding window.

References: transformers `models/qwen2`, `models/qwen3`.  GGUF keeps the rows of q and k as they are.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, table
from . import decoder, llama
from .decoder import Windows

hf_types = {"qwen2", "qwen3"}
gguf_archs = {"qwen2", "qwen3"}
ignore = {"dual_chunk_attention_config"}  # how another engine splits texts; the reference never does
prefix = llama.prefix

weights = table(
    llama.ROWS
    + """
decoder.blocks.{i}.attn.<q,k>.*       model.layers.{i}.self_attn.<q,k>_proj.*  blk.{i}.attn_<q,k>.*
decoder.blocks.{i}.attn.<q,k>_norm.*  model.layers.{i}.self_attn.<q,k>_norm.*  blk.{i}.attn_<q,k>_norm.*
"""
)


def config(keys: ConfigKeys) -> spec.ModelSpec:
    keys.assume(num_key_value_heads=32)
    if keys.str("model_type") == "qwen2":
        stack = llama.stack(keys, bias=True, out_bias=False, windows=_windows(keys))
        return decoder.model(keys, "Qwen2", stack)
    keys.assume(head_dim=128)
    bias = keys.flag("attention_bias")
    stack = llama.stack(keys, bias=bias, head_norm=True, windows=_windows(keys))
    return decoder.model(keys, "Qwen3", stack)


def _windows(keys: ConfigKeys) -> Windows:
    """Without `layer_types`, layers from `max_window_layers` on have one."""
    used = keys.flag("use_sliding_window")
    size = keys.optional_int("sliding_window", default=4096)
    first = keys.int("max_window_layers", default=28, low=0)
    return decoder.windows(keys, size if used else None, lambda i: i >= first)


def from_gguf(keys: ConfigKeys) -> Values:
    return llama.from_gguf_as(keys, keys.str("model_type").capitalize())
