"""ModernBERT (Warner et al. 2024): pre-norm encoder with RoPE, GeGLU and, in two layers of three, a local window with a
base of its own.  The embedding's norm replaces that of the first layer.

Reference: transformers `models/modernbert`, which keeps q, k and v in one matrix, gate and up in another.
"""

from __future__ import annotations

from typing import Literal

from triptych import spec
from triptych.families import decoder, encoders
from triptych.families.rope_config import rope_by_layer_type
from triptych.mapping import ConfigKeys, names_in, table

hf_types = {"modernbert"}
ids = {"bos_token_id": 50_281, "eos_token_id": 50_282, "pad_token_id": 50_283}
prefix = "model."
ignore = names_in("""
cls_token_id
deterministic_flash_attn reference_compile repad_logits_with_grad  # how the reference runs
initializer_cutoff_factor sparse_pred_ignore_index sparse_prediction  # training
layer_norm_eps position_embedding_type  # from BERT's config; norm_eps and RoPE are used
""")

_POOLS: dict[str, Literal["first", "mean"]] = {"cls": "first", "mean": "mean"}

weights = table("""
encoder.embed.tokens.weight         model.embeddings.tok_embeddings.weight
encoder.embed.norm.*                model.embeddings.norm.*
encoder.blocks.{i}.attn_norm.pre.*  model.layers.{i}.attn_norm.*
encoder.blocks.{i}.attn.(q,k,v).*   model.layers.{i}.attn.Wqkv.*
encoder.blocks.{i}.attn.out.*       model.layers.{i}.attn.Wo.*
encoder.blocks.{i}.mlp_norm.pre.*   model.layers.{i}.mlp_norm.*
encoder.blocks.{i}.mlp.(gate,up).*  model.layers.{i}.mlp.Wi.*
encoder.blocks.{i}.mlp.down.*       model.layers.{i}.mlp.Wo.*
encoder.final_norm.*                model.final_norm.*
head.transform.<dense,norm>.*       head.<dense,norm>.*
head.<proj,classes,ends>.*          <decoder,classifier,classifier>.*
""")


def config(keys: ConfigKeys) -> spec.ModelSpec:
    if keys.bool("is_causal", default=False) or keys.bool("causal_mask", default=False):
        raise keys.error("is_causal or causal_mask is set, which no ModernBERT is")
    width, heads, vocab = keys.int("hidden_size"), keys.count("num_attention_heads"), keys.int("vocab_size")
    norm = spec.LayerNormSpec(
        width=width, eps=keys.float("norm_eps", default=1e-5), bias=keys.bool("norm_bias", default=False)
    )
    attn_bias, attn_dropout = keys.bool("attention_bias", default=False), keys.dropout("attention_dropout")
    mlp = spec.glu(
        width, keys.int("intermediate_size"), keys.act("hidden_activation", default="gelu"),
        bias=keys.bool("mlp_bias", default=False), dropout=keys.dropout("mlp_dropout"),
    )  # fmt: skip
    near = keys.int("local_attention", default=128) // 2  # on either side
    every = keys.count("global_attn_every_n_layers", default=3)
    windows = decoder.windows(keys, near, lambda i: i % every != 0)
    blocks = tuple(
        spec.BlockSpec(
            attn=spec.attention(width, heads, bias=attn_bias, kind=kind, dropout=attn_dropout),
            mlp=mlp,
            attn_norm=spec.NormsSpec(pre=norm if i else None),
            mlp_norm=spec.NormsSpec(pre=norm),
        )
        for i, kind in enumerate("self" if size is None else "window" for size in windows)
    )
    bases = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    far, close = rope_by_layer_type(keys, width // heads, bases)
    kinds = {
        "self": spec.KindSpec(mask=spec.full(), position=far),
        "window": spec.KindSpec(mask=spec.window(near + 1, ahead=near), position=close),
    }
    stack = spec.StackSpec(
        embed=spec.EmbedSpec(vocab=vocab, width=width, norm=norm, dropout=keys.dropout("embedding_dropout")),
        kinds={name: kind for name, kind in kinds.items() if any(block.attn.kind == name for block in blocks)},
        blocks=blocks,
        final_norm=norm,
    )
    dense = spec.LinearSpec(inputs=width, outputs=width, bias=keys.bool("classifier_bias", default=False))
    transform = spec.TransformSpec(dense=dense, act=keys.act("classifier_activation", default="gelu"), norm=norm)
    keys.assume(classifier_dropout=0.0)
    known = encoders.heads(
        keys, "ModernBert", stack, transform=transform,
        masked_bias=keys.bool("decoder_bias", default=True),
        pool=keys.choice("classifier_pooling", _POOLS, default="cls"),
    )  # fmt: skip
    return encoders.model(keys, stack, keys.architecture(known, default="ModernBertModel"))
