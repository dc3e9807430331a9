"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with q, k, v and gate, up in one matrix each, RoPE on a part of each head
in some, LongRoPE in those for long texts.

Reference: transformers `models/phi3`.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder, gguf_config, llama

hf_types = {"phi3"}
ids = {"bos_token_id": 1, "eos_token_id": 32_000, "pad_token_id": 32_000}
gguf_archs = {"phi3"}
ignore = names_in("""
embd_pdrop  # the reference never drops out there
attention_bias lm_head_bias mlp_bias  # nor has it biases; a file that has some is refused for them
full_attn_mod interpolate_factor  # of the code Phi-4-mini was trained with
""")
prefix = "model."

weights = table("""
decoder.embed.tokens.weight          model.embed_tokens.weight                    token_embd.weight
decoder.blocks.{i}.attn_norm.pre.*   model.layers.{i}.input_layernorm.*           blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.(q,k,v).*    model.layers.{i}.self_attn.qkv_proj.*        blk.{i}.attn_qkv.*
decoder.blocks.{i}.attn.q.*          -                                            blk.{i}.attn_q.*  # other files
decoder.blocks.{i}.attn.<k,v,out>.*  <-,-,model.layers.{i}.self_attn.o_proj.*>    blk.{i}.attn_<k,v,output>.*
decoder.blocks.{i}.mlp_norm.pre.*    model.layers.{i}.post_attention_layernorm.*  blk.{i}.ffn_norm.*
decoder.blocks.{i}.mlp.(gate,up).*   model.layers.{i}.mlp.gate_up_proj.*          blk.{i}.ffn_up.*
decoder.blocks.{i}.mlp.down.*        model.layers.{i}.mlp.down_proj.*             blk.{i}.ffn_down.*
decoder.final_norm.*                 model.norm.*                                 output_norm.*
head.proj.weight                     lm_head.weight                               output.weight
-  model.layers.{i}.self_attn.rotary_emb.inv_freq  -  # computed from the config
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    keys.assume(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
    window, dropout = keys.optional_int("sliding_window"), keys.dropout("resid_pdrop")
    stack = llama.stack(keys, windows=window, share=1.0, dropout=dropout)
    return decoder.model(keys, "Phi3", stack)


def from_gguf(keys: ConfigKeys) -> Values:
    config = gguf_config.header(keys, "Phi3", partial=True)
    length = config["rope_parameters"].get("original_max_position_embeddings")
    return {
        **config,
        "hidden_act": "silu",
        "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon"),
        "sliding_window": keys.int("attention.sliding_window", default=0, low=0) or None,
        **({} if length is None else {"original_max_position_embeddings": length}),
    }
