"""Gemma (2024): Llama with norms of (1 + weight), embeddings times sqrt(D), GeGLU and a tied head.

Reference: transformers `models/gemma`.  GGUF stores 1 + weight.
"""

from typing import Any

from triptych import spec
from triptych.mapping import ConfigKeys, Values, table
from triptych.spec.parts import Activation
from . import decoder, gguf_config, llama

hf_types = {"gemma"}
ids = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
gguf_archs = {"gemma"}
ignore = {"hidden_activation"}  # in some configs beside hidden_act, which the reference reads
prefix = "model."

ROWS = """
decoder.embed.tokens.weight              model.embed_tokens.weight                    token_embd.weight
decoder.blocks.{i}.attn_norm.pre.*       model.layers.{i}.input_layernorm.*           blk.{i}.attn_norm.*|plus_one
decoder.blocks.{i}.attn.<q,k,v,out>.*    model.layers.{i}.self_attn.<q,k,v,o>_proj.*  blk.{i}.attn_<q,k,v,output>.*
decoder.blocks.{i}.mlp.<gate,up,down>.*  model.layers.{i}.mlp.<gate,up,down>_proj.*   blk.{i}.ffn_<gate,up,down>.*
decoder.final_norm.*                     model.norm.*                                 output_norm.*|plus_one
head.proj.weight                         lm_head.weight                               output.weight
-  model.layers.{i}.self_attn.rotary_emb.inv_freq  -  # computed from the config
"""
weights = table(
    ROWS
    + """
decoder.blocks.{i}.mlp_norm.pre.*   model.layers.{i}.post_attention_layernorm.*  blk.{i}.ffn_norm.*|plus_one
"""
)


def config(keys: ConfigKeys) -> spec.ModelSpec:
    act = keys.act("hidden_act", default="gelu_pytorch_tanh")
    act = "gelu_tanh" if act == "gelu" else act  # the first configs have gelu where the tanh form is meant
    return decoder.model(keys, "Gemma", stack(keys, act), tied=True)


def stack(keys: ConfigKeys, act: Activation, **options: Any) -> spec.StackSpec:
    """The stack of all Gemmas; `options` are those of `llama.stack`."""
    width = keys.int("hidden_size")
    norm = spec.RMSNormSpec(width=width, eps=keys.float("rms_norm_eps", default=1e-6), offset=1.0)
    return llama.stack(
        keys,
        norm=norm,
        out=norm if options.pop("norm_outputs", False) else None,
        mlp=spec.glu(width, keys.int("intermediate_size"), act),
        embed_scale=width**0.5,
        kv_heads=keys.count("num_key_value_heads"),
        head_width=keys.int("head_dim", default=256),
        bias=keys.flag("attention_bias"),
        **options,
    )


def from_gguf(keys: ConfigKeys) -> Values:
    return from_gguf_as(keys, "Gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def from_gguf_as(keys: ConfigKeys, name: str) -> Values:
    """The HF keys that all Gemmas share."""
    bias = keys.has_tensor("blk.0.attn_q.bias")
    more = {"rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon"), "attention_bias": bias}
    return gguf_config.header(keys, name) | more
