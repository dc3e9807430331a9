"""GPT-NeoX (Black et al. 2022; Pythia): attention and MLP in parallel, each behind a LayerNorm of its own, RoPE on a
quarter of each head, biases.

Reference: transformers `models/gpt_neox`; q, k and v are one matrix whose rows go head by head.
"""

from triptych import spec
from triptych.mapping import ConfigKeys, Values, names_in, table
from . import decoder, gguf_config
from .rope_config import rope

hf_types = {"gpt_neox"}
ids = {"bos_token_id": 0, "eos_token_id": 2}
gguf_archs = {"gptneox"}
gguf_names = {"gpt_neox": "gptneox"}
ignore = names_in("""
attention_probs_dropout_prob hidden_dropout_prob  # names of the 20B's config that nothing reads
classifier_dropout
rope_theta partial_rotary_factor  # duplicates of rotary_emb_base and rotary_pct, which decide
""")
prefix = "gpt_neox."

weights = table("""
decoder.embed.tokens.weight         gpt_neox.embed_in.weight                                 token_embd.weight
decoder.blocks.{i}.attn_norm.pre.*  gpt_neox.layers.{i}.input_layernorm.*                    blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.(q,k,v).*   gpt_neox.layers.{i}.attention.query_key_value.*|by_head  blk.{i}.attn_qkv.*
decoder.blocks.{i}.attn.out.*       gpt_neox.layers.{i}.attention.dense.*                    blk.{i}.attn_output.*
decoder.blocks.{i}.mlp_norm.pre.*   gpt_neox.layers.{i}.post_attention_layernorm.*           blk.{i}.ffn_norm.*
decoder.blocks.{i}.mlp.<up,down>.*  gpt_neox.layers.{i}.mlp.dense_<h_to_4h,4h_to_h>.*        blk.{i}.ffn_<up,down>.*
decoder.final_norm.*                gpt_neox.final_layer_norm.*                              output_norm.*
head.proj.weight                    embed_out.weight                                         output.weight
-  gpt_neox.layers.{i}.attention.<bias,masked_bias>  -  # old exports store the causal mask, and its -1e9
-  gpt_neox.layers.{i}.attention.rotary_emb.inv_freq  -  # computed from the config
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, heads, layers = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    norm = spec.LayerNormSpec(width=width, eps=keys.float("layer_norm_eps", default=1e-5))
    bias, dropout = keys.bool("attention_bias", default=True), keys.dropout("attention_dropout")
    act = keys.act("hidden_act", default="gelu")
    kind = spec.ParallelBlockSpec if keys.bool("use_parallel_residual", default=True) else spec.BlockSpec
    block = kind(
        attn=spec.attention(width, heads, bias=bias, dropout=dropout),
        mlp=spec.mlp(width, keys.int("intermediate_size"), act, bias=True),
        attn_norm=spec.NormsSpec(pre=norm),
        mlp_norm=spec.NormsSpec(pre=norm),
        dropout=keys.dropout("hidden_dropout"),
    )
    position = rope(keys, width // heads, share=0.25, base="rotary_emb_base", part="rotary_pct")
    stack = decoder.stack(keys, [block] * layers, norm, position, dropout=block.dropout)
    return decoder.model(keys, "GPTNeoX", stack)


def from_gguf(keys: ConfigKeys) -> Values:
    config = gguf_config.header(keys, "GPTNeoX", partial=True)
    width, heads, share = (config.pop(key) for key in ("head_dim", "num_key_value_heads", "partial_rotary_factor"))
    if (width * heads, heads) != (config["hidden_size"], config["num_attention_heads"]):
        raise keys.error("heads do not share the width evenly, as those of every GPT-NeoX do")
    return config | {
        "model_type": "gpt_neox",
        "rotary_pct": share,
        "hidden_act": "gelu",
        "layer_norm_eps": keys.float("attention.layer_norm_epsilon"),
        "use_parallel_residual": keys.bool("use_parallel_residual", default=True),
        "attention_bias": keys.has_tensor("blk.0.attn_qkv.bias", default=True),
    }


def to_gguf(model: spec.ModelSpec) -> Values:
    return {"use_parallel_residual": any(isinstance(part, spec.ParallelBlockSpec) for _, part in model.walk())}
