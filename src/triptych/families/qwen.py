"""Qwen2 and Qwen2.5 (Yang et al. 2024: Llama with biases on q, k and v) and Qwen3 (2025: without them, with an RMSNorm
on each head's q and k).  Some layers may see a sliding window.

References: transformers `models/qwen2`, `models/qwen3`.  GGUF keeps the rows of q and k as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triptych import spec
from triptych.families import llama
from triptych.families.keys import Keys
from triptych.families.weights import table

hf_types = frozenset({"qwen2", "qwen3"})
gguf_archs = frozenset({"qwen2", "qwen3"})
prefix = llama.prefix

weights = table(
    llama.ROWS
    + """
decoder.blocks.{i}.attn.q.*           model.layers.{i}.self_attn.q_proj.*              blk.{i}.attn_q.*
decoder.blocks.{i}.attn.k.*           model.layers.{i}.self_attn.k_proj.*              blk.{i}.attn_k.*
decoder.blocks.{i}.attn.q_norm.*      model.layers.{i}.self_attn.q_norm.*              blk.{i}.attn_q_norm.*
decoder.blocks.{i}.attn.k_norm.*      model.layers.{i}.self_attn.k_norm.*              blk.{i}.attn_k_norm.*
"""
)


def config(keys: Keys) -> spec.Model:
    if keys.str("model_type") == "qwen2":
        return llama.decoder(keys, "Qwen2", bias=True, windows=_windows(keys))
    bias = keys.bool("attention_bias", default=False)
    return llama.decoder(keys, "Qwen3", bias=bias, out_bias=bias, head_norm=True, windows=_windows(keys))


def _windows(keys: Keys) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` says which have one, or all from `max_window_layers` on."""
    layers, used = keys.count("num_hidden_layers"), keys.bool("use_sliding_window", default=False)
    given = keys.optional_int("sliding_window") if "sliding_window" in keys.data else 4096
    size, first = given if used else None, keys.int("max_window_layers", default=28, low=0)
    if keys.get("layer_types", None) is None:
        return tuple(size if i >= first else None for i in range(layers))
    types = keys.strings("layer_types")
    known = {"full_attention": None, "sliding_attention": size}
    if len(types) != layers or not set(types) <= known.keys() or ("sliding_attention" in types and size is None):
        raise keys.error(
            f"layer_types must name full_attention or, with a sliding_window, sliding_attention {layers} times"
        )
    return tuple(known[name] for name in types)


def from_gguf(keys: Keys) -> Mapping[str, Any]:
    arch = keys.str("model_type")
    return llama.from_gguf_decoder(keys, arch.capitalize())
