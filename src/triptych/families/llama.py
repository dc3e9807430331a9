"""Llama (Touvron et al. 2023; Llama 3, 2024): pre-norm decoder with RMSNorm, RoPE, grouped heads and SwiGLU.

Reference: transformers `models/llama`.  Mistral, mixtral, qwen, phi3 and others say where they differ from `stack`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triptych import spec
from triptych.mapping import ConfigKeys, Values, table
from triptych.spec.norms import Norm
from triptych.spec.parts import FeedForward
from triptych.spec.positions import PositionSpec
from . import decoder, gguf_config
from .decoder import Windows
from .rope_config import rope

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
    bias = keys.flag("attention_bias")
    hidden, act = keys.int("intermediate_size"), keys.act("hidden_act", default="silu")
    mlp = spec.glu(keys.int("hidden_size"), hidden, act, bias=keys.flag("mlp_bias"))
    return decoder.model(keys, "Llama", stack(keys, mlp=mlp, bias=bias))


def stack(
    keys: ConfigKeys,
    *,
    norm: Norm | None = None,
    out: Norm | spec.ScaleSpec | None = None,
    mlp: FeedForward | Sequence[FeedForward] | None = None,
    windows: Windows | int | None = None,
    positions: tuple[PositionSpec, PositionSpec] | None = None,
    share: float | None = None,
    head_norm: bool = False,
    parallel: bool = False,
    both_ways: bool = False,
    embed_scale: float | None = None,
    embed_dropout: float = 0.0,
    dropout: float = 0.0,
    **attention: Any,
) -> spec.StackSpec:
    """Blocks with a norm before each sublayer, grouped heads and RoPE.

    `norm` is RMSNorm when None; `out` stands after each sublayer; with `head_norm` each head's q and k have a norm;
    `parallel` sublayers stand behind one norm; `both_ways` tokens see later ones too, as far as earlier ones.
    `mlp` is that of every layer, or one a layer, SwiGLU when None; `windows` the visible keys of each, all when None.
    `positions`, of layers without and with a window, or `share`, as for `rope`; `attention` as for `spec.attention`.
    """
    width, heads, layers = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    inner = attention.pop("head_width", None) or keys.optional_int("head_dim") or width // heads
    if "kv_heads" not in attention:
        attention["kv_heads"] = keys.optional_int("num_key_value_heads")
    norm = norm or spec.RMSNormSpec(width=width, eps=keys.float("rms_norm_eps", default=1e-6))
    if head_norm:
        attention["q_norm"] = attention["k_norm"] = replace(norm, width=inner)
    if mlp is None:
        mlp = spec.glu(width, keys.int("intermediate_size"), keys.act("hidden_act", default="silu"))
    windows = windows if isinstance(windows, Sequence) else [windows] * layers
    norms = spec.NormsSpec(pre=norm, out=out)
    far, near = positions or [rope(keys, inner, share=share)] * 2
    attention["dropout"] = keys.dropout("attention_dropout")
    kinds, blocks = dict[str, spec.KindSpec](), list[spec.BlockSpec | spec.ParallelBlockSpec]()
    for size, one in zip(windows, mlp if isinstance(mlp, Sequence) else [mlp] * layers, strict=True):
        kind, mask = decoder.kind(size, windows), spec.full() if both_ways else spec.causal()
        if size is not None:
            mask = mask & (spec.window(size + 1, ahead=size) if both_ways else spec.window(size))
        kinds[kind] = spec.KindSpec(mask=mask, position=far if size is None else near)
        attn = spec.attention(width, heads, head_width=inner, kind=kind, **attention)
        blocks.append(
            spec.ParallelBlockSpec(attn=attn, mlp=one, norm=norm, dropout=dropout)
            if parallel
            else spec.BlockSpec(attn=attn, mlp=one, attn_norm=norms, mlp_norm=norms, dropout=dropout)
        )
    return decoder.stack(keys, blocks, norm, kinds=kinds, scale=embed_scale, dropout=embed_dropout)


def from_gguf(keys: ConfigKeys) -> Values:
    if keys.int("expert_count", default=0, low=0):
        experts, chosen = keys.count("expert_count"), keys.count("expert_used_count")
        config = from_gguf_as(keys, "Mixtral")
        return config | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": chosen}
    return from_gguf_as(keys, "Llama") | {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
    }


def from_gguf_as(keys: ConfigKeys, name: str) -> Values:
    """The HF keys that the whole family tree shares."""
    more = {"hidden_act": "silu", "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon")}
    return gguf_config.header(keys, name) | more
