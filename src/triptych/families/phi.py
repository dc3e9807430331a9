"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023, Li et al. 2023): attention and MLP in parallel behind one LayerNorm, RoPE
on a part of each head, biases everywhere.

Reference: transformers `models/phi`.
"""

from __future__ import annotations

from triptych import spec
from triptych.families import decoder, gguf_config
from triptych.families.rope_config import rope
from triptych.mapping.config_keys import ConfigKeys, Values
from triptych.mapping.weight_table import table

hf_types = {"phi"}
ids = {"bos_token_id": 1, "eos_token_id": 2}
gguf_archs = {"phi2"}
gguf_names = {"phi": "phi2"}
prefix = "model."

weights = table("""
decoder.embed.tokens.weight           model.embed_tokens.weight                  token_embd.weight
decoder.blocks.{i}.norm.*             model.layers.{i}.input_layernorm.*         blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.<q,k,v>.*     model.layers.{i}.self_attn.<q,k,v>_proj.*  blk.{i}.attn_<q,k,v>.*
decoder.blocks.{i}.attn.(q,k,v).*     -                                          blk.{i}.attn_qkv.*  # older files
decoder.blocks.{i}.attn.<q,k>_norm.*  model.layers.{i}.self_attn.<q,k>_layernorm.*  -
decoder.blocks.{i}.attn.out.*         model.layers.{i}.self_attn.dense.*         blk.{i}.attn_output.*
decoder.blocks.{i}.mlp.<up,down>.*    model.layers.{i}.mlp.<fc1,fc2>.*           blk.{i}.ffn_<up,down>.*
decoder.final_norm.*                  model.final_layernorm.*                    output_norm.*
head.proj.*                           lm_head.*                                  output.*
-  model.layers.{i}.self_attn.rotary_emb.inv_freq  -  # computed from the config
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, heads, eps = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.float("layer_norm_eps", 1e-5)
    inner = keys.optional_int("head_dim") or width // heads
    norm = spec.LayerNormSpec(width=width, eps=eps)
    each_head = spec.LayerNormSpec(width=inner, eps=eps) if keys.bool("qk_layernorm", default=False) else None
    act = keys.act("hidden_act", default="gelu_new")
    block = spec.ParallelBlockSpec(
        norm=norm,
        attn=spec.attention(
            width, heads, kv_heads=keys.optional_int("num_key_value_heads"), head_width=inner, bias=True,
            q_norm=each_head, k_norm=each_head, dropout=keys.dropout("attention_dropout"),
        ),
        mlp=spec.mlp(width, keys.int("intermediate_size"), act, bias=True),
        dropout=keys.dropout("resid_pdrop"),
    )  # fmt: skip
    stack = spec.StackSpec(
        embed=spec.EmbedSpec(vocab=keys.int("vocab_size"), width=width, dropout=keys.dropout("embd_pdrop")),
        kinds={"self": spec.KindSpec(mask=spec.causal(), position=rope(keys, inner, share=0.5))},
        blocks=(block,) * keys.count("num_hidden_layers"),
        final_norm=norm,
    )
    return decoder.model(keys, "Phi", stack, bias=True)


def from_gguf(keys: ConfigKeys) -> Values:
    return gguf_config.header(keys, "Phi", partial=True) | {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": keys.float("attention.layer_norm_epsilon"),
    }
