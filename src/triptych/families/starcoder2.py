"""StarCoder2 (Lozhkov et al. 2024): pre-norm decoder with LayerNorm, RoPE, grouped heads and a plain MLP, biases
throughout, a tied head; layers may see a sliding window.

Reference: transformers `models/starcoder2`.  GGUF keeps the rows of q and k as they are.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder, gguf_config, llama

hf_types = {"starcoder2"}
ids = {"bos_token_id": 50_256, "eos_token_id": 50_256}
gguf_archs = {"starcoder2"}
prefix = "model."
ignore = names_in("""
activation_function layer_norm_epsilon  # old duplicates of hidden_act and norm_epsilon, which hold
attention_softmax_in_fp32 scale_attention_softmax_in_fp32  # softmax is in fp32 anyway
mlp_type norm_type scale_attn_weights  # left over from StarCoder; the reference reads none
""")

weights = table("""
decoder.embed.tokens.weight            model.embed_tokens.weight                    token_embd.weight
decoder.blocks.{i}.attn_norm.pre.*     model.layers.{i}.input_layernorm.*           blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.<q,k,v,out>.*  model.layers.{i}.self_attn.<q,k,v,o>_proj.*  blk.{i}.attn_<q,k,v,output>.*
decoder.blocks.{i}.mlp_norm.pre.*      model.layers.{i}.post_attention_layernorm.*  blk.{i}.ffn_norm.*
decoder.blocks.{i}.mlp.<up,down>.*     model.layers.{i}.mlp.c_<fc,proj>.*           blk.{i}.ffn_<up,down>.*
decoder.final_norm.*                   model.norm.*                                 output_norm.*
head.proj.weight                       lm_head.weight                               output.weight
-  model.layers.{i}.self_attn.rotary_emb.inv_freq  -  # computed from the config
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, bias = keys.int("hidden_size"), keys.bool("use_bias", default=True)
    act = keys.act("hidden_act", default="gelu_pytorch_tanh")
    stack = llama.stack(
        keys,
        norm=spec.LayerNormSpec(width=width, eps=keys.float("norm_epsilon", default=1e-5)),
        mlp=spec.mlp(width, keys.int("intermediate_size"), act, bias=bias),
        windows=keys.optional_int("sliding_window"),
        kv_heads=keys.count("num_key_value_heads", default=2),
        bias=bias,
        embed_dropout=keys.dropout("embedding_dropout"),
        dropout=keys.dropout("residual_dropout"),
    )
    return decoder.model(keys, "Starcoder2", stack, tied=True)


def from_gguf(keys: ConfigKeys) -> Values:
    return gguf_config.header(keys, "Starcoder2") | {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": keys.float("attention.layer_norm_epsilon"),
        "use_bias": keys.has_tensor("blk.0.attn_q.bias", default=True),
    }
