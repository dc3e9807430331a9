"""Granite 3 (IBM 2024): Llama with a factor in four places: on embeddings, on scores in place of 1/sqrt(K), on what
each sublayer adds, and under the logits.

Reference: transformers `models/granite`.
"""

from typing import Any

from triptych import spec
from triptych.mapping import ConfigKeys, Values
from . import decoder, llama

hf_types = {"granite"}
gguf_archs = {"granite"}
ids, prefix, weights = llama.ids, llama.prefix, llama.weights


def config(keys: ConfigKeys) -> spec.ModelSpec:
    hidden, act = keys.int("intermediate_size"), keys.act("hidden_act", default="silu")
    stack = llama.stack(
        keys,
        out=spec.ScaleSpec(factor=keys.float("residual_multiplier", default=1.0)),
        mlp=spec.glu(keys.int("hidden_size"), hidden, act, bias=keys.flag("mlp_bias")),
        embed_scale=keys.float("embedding_multiplier", default=1.0),
        bias=keys.flag("attention_bias"),
        scale=keys.float("attention_multiplier", default=1.0),
    )
    return decoder.model(keys, "Granite", stack, scale=1 / keys.float("logits_scaling", default=1.0, low=1e-6))


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
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
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
