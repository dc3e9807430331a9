"""Gemma 2 (2024) and the text model of Gemma 3 (2025): Gemma with norms on the output of each sublayer and
alternating windows.  Gemma 2 caps scores and logits; Gemma 3 has norms on each head's q and k, and a RoPE base of its
own for layers with a window.

References: transformers `models/gemma2`, `models/gemma3`.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder, gemma, gguf_config
from .rope_config import rope_by_layer_type

hf_types = {"gemma2", "gemma3_text"}
ids = gemma.ids
gguf_archs = {"gemma2", "gemma3"}
gguf_names = {"gemma3_text": "gemma3"}
ignore = names_in("""
_sliding_window_pattern  # written beside layer_types, which decides
cache_implementation  # how the reference generates
hidden_act sliding_window_size  # old duplicates of hidden_activation and sliding_window
""")
prefix = gemma.prefix
_BASES = {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0}  # of layers that see everything, and of the others

weights = table(
    gemma.ROWS
    + """
decoder.blocks.{i}.attn.<q,k>_norm.*  model.layers.{i}.self_attn.<q,k>_norm.*        blk.{i}.attn_<q,k>_norm.*|plus_one
decoder.blocks.{i}.attn_norm.out.*  model.layers.{i}.post_attention_layernorm.*  blk.{i}.post_attention_norm.*|plus_one
decoder.blocks.{i}.mlp_norm.pre.*     model.layers.{i}.pre_feedforward_layernorm.*   blk.{i}.ffn_norm.*|plus_one
decoder.blocks.{i}.mlp_norm.out.*     model.layers.{i}.post_feedforward_layernorm.*  blk.{i}.post_ffw_norm.*|plus_one
"""
)


def config(keys: ConfigKeys) -> spec.ModelSpec:
    third = keys.str("model_type") == "gemma3_text"
    pattern = keys.count("sliding_window_pattern", default=6) if third else 2
    cap, final_cap = (
        keys.optional_float(name, default=None if third else default, low=1e-6)
        for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    )
    stack = gemma.stack(
        keys,
        keys.act("hidden_activation", default="gelu_pytorch_tanh"),
        norm_outputs=True,
        head_norm=third,
        windows=decoder.windows(keys, keys.int("sliding_window", default=4096), lambda i: (i + 1) % pattern != 0),
        positions=rope_by_layer_type(keys, keys.int("head_dim", default=256), _BASES) if third else None,
        scale=keys.float("query_pre_attn_scalar", default=256.0, low=1e-6) ** -0.5,
        softcap=None if third else cap,  # Gemma 3's reference has the key and never caps
    )
    name = {"Gemma3ForCausalLM": True, "Gemma3TextModel": False} if third else "Gemma2"
    return decoder.model(keys, name, stack, tied=True, softcap=final_cap)


def from_gguf(keys: ConfigKeys) -> Values:
    third = keys.str("model_type") == "gemma3"
    config = gemma.from_gguf_as(keys, "Gemma3" if third else "Gemma2")
    # No key holds the scale of scores: it is D/H in the largest model of each generation, known by its depth.
    largest = config["num_hidden_layers"] == (62 if third else 46)
    share = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = share if largest else config["head_dim"]
    config["sliding_window"] = keys.int("attention.sliding_window")
    config["final_logit_softcapping"] = keys.optional_float("final_logit_softcapping", None if third else 30.0)
    if not third:
        cap = keys.optional_float("attn_logit_softcapping", 50.0)
        return config | {"attn_logit_softcapping": cap}
    config["sliding_window_pattern"] = keys.count("attention.sliding_window_pattern", default=6)
    sliding = {"rope_type": "default", "rope_theta": keys.float("rope.freq_base_swa", default=10_000.0)}
    ropes = {"full_attention": gguf_config.rope(keys, 1e6), "sliding_attention": sliding}
    return config | {"model_type": "gemma3_text", "rope_parameters": ropes}


def to_gguf(model: spec.ModelSpec) -> Values:
    if model.family == "gemma2":
        return {"rope.freq_base_swa": None}  # it has only one base
    kinds = [block.attn.kind for block in model.stacks["decoder"].blocks]
    period = kinds.index("self") + 1 if "window" in kinds else 6
    return {"attention.sliding_window_pattern": period} if period != 6 else {}
