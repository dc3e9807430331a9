"""Granite 3 (IBM 2024): Llama with a factor in four places: on embeddings, on scores in place of 1/sqrt(K), on what
each sublayer adds, and under the logits.

Reference: transformers `models/granite`.
"""

from __future__ import annotations

from typing import Any

from triptych import spec
from triptych.families import decoder, llama
from triptych.families.rope_config import rope
from triptych.mapping.config_keys import ConfigKeys, Values

hf_types = {"granite"}
gguf_archs = {"granite"}
ids, prefix, weights = llama.ids, llama.prefix, llama.weights


def config(keys: ConfigKeys) -> spec.ModelSpec:
    width, heads, layers = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    inner, bias = keys.optional_int("head_dim") or width // heads, keys.bool("attention_bias", default=False)
    norm = spec.RMSNormSpec(width=width, eps=keys.float("rms_norm_eps", default=1e-6))
    norms = spec.NormsSpec(pre=norm, out=spec.ScaleSpec(factor=keys.float("residual_multiplier", default=1.0)))
    hidden, act = keys.int("intermediate_size"), keys.act("hidden_act", default="silu")
    block = spec.BlockSpec(
        attn=spec.attention(
            width, heads, kv_heads=keys.optional_int("num_key_value_heads"), head_width=inner, bias=bias,
            scale=keys.float("attention_multiplier", default=1.0), dropout=keys.dropout("attention_dropout"),
        ),
        mlp=spec.glu(width, hidden, act, bias=keys.bool("mlp_bias", default=False)),
        attn_norm=norms,
        mlp_norm=norms,
    )  # fmt: skip
    stack = spec.StackSpec(
        embed=spec.EmbedSpec(
            vocab=keys.int("vocab_size"), width=width, scale=keys.float("embedding_multiplier", default=1.0)
        ),
        kinds={"self": spec.KindSpec(mask=spec.causal(), position=rope(keys, inner))},
        blocks=(block,) * layers,
        final_norm=norm,
    )
    scale = 1 / keys.float("logits_scaling", default=1.0, low=1e-6)
    return decoder.model(keys, "Granite", stack, context=keys.int("max_position_embeddings"), scale=scale)


def from_gguf(keys: ConfigKeys) -> Values:
    names = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {
        **llama.from_gguf_as(keys, "Granite"),
        **{ours: keys.float(theirs) for ours, theirs in names.items()},
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias", default=False),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias", default=False),
    }


def to_gguf(model: spec.ModelSpec) -> Values:
    parts: dict[type, Any] = {type(part): part for _, part in model.walk()}
    head = parts.get(spec.LMHeadSpec)
    return {
        "embedding_scale": parts[spec.EmbedSpec].scale,
        "attention.scale": parts[spec.AttentionSpec].scale,
        "residual_scale": parts[spec.ScaleSpec].factor,
        "logit_scale": 1 / head.scale if head else 1.0,
    }
