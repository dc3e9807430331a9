"""Gemma (2024): Llama with norms of (1 + weight), embeddings times sqrt(D), GeGLU and a tied head.

Reference: transformers `models/gemma`.  GGUF stores 1 + weight.
"""

from __future__ import annotations

from triptych import spec
from triptych.families import decoder, gguf_config
from triptych.families.rope_config import rope
from triptych.mapping.config_keys import ConfigKeys, Values
from triptych.mapping.weight_table import table

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
    width, heads, inner = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.int("head_dim", default=256)
    norm = spec.RMSNormSpec(width=width, eps=keys.float("rms_norm_eps", default=1e-6), offset=1.0)
    act = keys.act("hidden_act", default="gelu_pytorch_tanh")
    block = spec.BlockSpec(
        attn=spec.attention(
            width, heads, kv_heads=keys.count("num_key_value_heads"), head_width=inner,
            bias=keys.bool("attention_bias", default=False), dropout=keys.dropout("attention_dropout"),
        ),
        # The first configs have gelu where the tanh form is meant.
        mlp=spec.glu(width, keys.int("intermediate_size"), "gelu_tanh" if act == "gelu" else act),
        attn_norm=spec.NormsSpec(pre=norm),
        mlp_norm=spec.NormsSpec(pre=norm),
    )  # fmt: skip
    stack = spec.StackSpec(
        embed=spec.EmbedSpec(vocab=keys.int("vocab_size"), width=width, scale=width**0.5),
        kinds={"self": spec.KindSpec(mask=spec.causal(), position=rope(keys, inner))},
        blocks=(block,) * keys.count("num_hidden_layers"),
        final_norm=norm,
    )
    return decoder.model(keys, "Gemma", stack, context=keys.int("max_position_embeddings"), tied=True)


def from_gguf(keys: ConfigKeys) -> Values:
    return from_gguf_as(keys, "Gemma") | {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": gguf_config.rope(keys)}


def from_gguf_as(keys: ConfigKeys, name: str) -> Values:
    """The HF keys that all Gemmas share."""
    bias = keys.has_tensor("blk.0.attn_q.bias", default=False)
    more = {"rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon"), "attention_bias": bias}
    return gguf_config.header(keys, name) | gguf_config.head_width(keys) | more
