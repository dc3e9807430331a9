"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023, Li et al. 2023): attention and MLP in parallel behind one LayerNorm, RoPE
on a part of each head, biases everywhere.

Reference: transformers `models/phi`.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, table
from . import decoder, gguf_config, llama

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
    width, act = keys.int("hidden_size"), keys.act("hidden_act", default="gelu_new")
    stack = llama.stack(
        keys,
        norm=spec.LayerNormSpec(width=width, eps=keys.float("layer_norm_eps", default=1e-5)),
        mlp=spec.mlp(width, keys.int("intermediate_size"), act, bias=True),
        share=0.5,
        head_norm=keys.flag("qk_layernorm"),
        parallel=True,
        bias=True,
        embed_dropout=keys.dropout("embd_pdrop"),
        dropout=keys.dropout("resid_pdrop"),
    )
    return decoder.model(keys, "Phi", stack, bias=True)


def from_gguf(keys: ConfigKeys) -> Values:
    return gguf_config.header(keys, "Phi", partial=True) | {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": keys.float("attention.layer_norm_epsilon"),
    }
