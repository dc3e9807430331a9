"""Llama (Touvron et al. 2023; Llama 3, 2024): pre-norm decoder with RMSNorm, RoPE, grouped heads and SwiGLU.

Reference: transformers `models/llama`.  Mistral, mixtral, qwen and phi3 say where they differ from `model`.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych import spec
from triptych.families import decoder, gguf_config
from triptych.families.decoder import Windows
from triptych.families.rope_config import rope
from triptych.mapping.config_keys import ConfigKeys, Values
from triptych.mapping.weight_table import table
from triptych.spec.parts import FeedForward

hf_types = {"llama"}
ids = {"bos_token_id": 1, "eos_token_id": 2}
gguf_archs = {"llama"}
# Slices of the reference's matmuls; an old duplicate of max_position_embeddings; two keys of SmolLM's training library.
ignore = {"pretraining_tp", "max_sequence_length", "is_llama_config", "rope_interleaved"}
prefix = "model."

ROWS = """
decoder.embed.tokens.weight              model.embed_tokens.weight                    token_embd.weight
decoder.blocks.{i}.attn_norm.pre.*       model.layers.{i}.input_layernorm.*           blk.{i}.attn_norm.*
decoder.blocks.{i}.attn.<v,out>.*        model.layers.{i}.self_attn.<v,o>_proj.*      blk.{i}.attn_<v,output>.*
decoder.blocks.{i}.mlp_norm.pre.*        model.layers.{i}.post_attention_layernorm.*  blk.{i}.ffn_norm.*
decoder.blocks.{i}.mlp.<gate,up,down>.*  model.layers.{i}.mlp.<gate,up,down>_proj.*   blk.{i}.ffn_<gate,up,down>.*
decoder.final_norm.*                     model.norm.*                                 output_norm.*
head.proj.weight                         lm_head.weight                               output.weight
-  model.layers.{i}.self_attn.rotary_emb.inv_freq  -  # computed from the config
"""
weights = table(
    ROWS
    + """
decoder.blocks.{i}.attn.<q,k>.*  model.layers.{i}.self_attn.<q,k>_proj.*  blk.{i}.attn_<q,k>.*|rope_permute
"""
)


def config(keys: ConfigKeys) -> spec.ModelSpec:
    bias = keys.bool("attention_bias", default=False)
    hidden, act = keys.int("intermediate_size"), keys.act("hidden_act", default="silu")
    mlp = spec.glu(keys.int("hidden_size"), hidden, act, bias=keys.bool("mlp_bias", default=False))
    return model(keys, "Llama", mlp=mlp, bias=bias, out_bias=bias)


def model(
    keys: ConfigKeys,
    name: str,
    *,
    mlp: FeedForward | Sequence[FeedForward] | None = None,
    windows: Windows = (),
    bias: bool = False,
    out_bias: bool = False,
    head_norm: bool = False,
    share: float | None = None,
    dropout: float = 0.0,
) -> spec.ModelSpec:
    """The model of classes `{name}ForCausalLM` and `{name}Model`.

    `mlp` is that of every layer, or one a layer, SwiGLU when None; `windows` the visible keys of each, all when empty;
    `share` as for `rope`.
    """
    width, heads, layers = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    inner, eps = keys.optional_int("head_dim") or width // heads, keys.float("rms_norm_eps", default=1e-6)
    norm, each_head = (
        spec.RMSNormSpec(width=width, eps=eps),
        spec.RMSNormSpec(width=inner, eps=eps) if head_norm else None,
    )
    if mlp is None:
        mlp = spec.glu(width, keys.int("intermediate_size"), keys.act("hidden_act", default="silu"))
    mlps = mlp if isinstance(mlp, Sequence) else [mlp] * layers
    windows = windows or [None] * layers
    blocks = tuple(
        spec.BlockSpec(
            attn=spec.attention(
                width, heads, kv_heads=keys.optional_int("num_key_value_heads"), head_width=inner,
                bias=bias, out_bias=out_bias, q_norm=each_head, k_norm=each_head, kind=decoder.kind(size, windows),
                dropout=keys.dropout("attention_dropout"),
            ),
            mlp=mlp,
            attn_norm=spec.NormsSpec(pre=norm),
            mlp_norm=spec.NormsSpec(pre=norm),
            dropout=dropout,
        )
        for size, mlp in zip(windows, mlps, strict=True)
    )  # fmt: skip
    embed = spec.EmbedSpec(vocab=keys.int("vocab_size"), width=width)
    kinds = decoder.kinds(windows, rope(keys, inner, share=share))
    stack = spec.StackSpec(embed=embed, kinds=kinds, blocks=blocks, final_norm=norm)
    return decoder.model(keys, name, stack, context=keys.int("max_position_embeddings"))


def from_gguf(keys: ConfigKeys) -> Values:
    if keys.int("expert_count", default=0, low=0):
        experts, chosen = keys.count("expert_count"), keys.count("expert_used_count")
        config = from_gguf_as(keys, "Mixtral")
        return config | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": chosen}
    return from_gguf_as(keys, "Llama") | {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias", default=False),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias", default=False),
    }


def from_gguf_as(keys: ConfigKeys, name: str) -> Values:
    """The HF keys that the whole family tree shares."""
    eps = keys.float("attention.layer_norm_rms_epsilon")
    more = {"hidden_act": "silu", "rms_norm_eps": eps, "rope_parameters": gguf_config.rope(keys)}
    return gguf_config.header(keys, name) | gguf_config.head_width(keys) | more
