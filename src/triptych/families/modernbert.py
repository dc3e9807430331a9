"""ModernBERT (Warner et al. 2024): pre-norm encoder with RoPE, GeGLU and, in two layers of three, a local window with a
base of its own.  The embedding's norm replaces that of the first layer.

Reference: transformers `models/modernbert`, which keeps q, k and v in one matrix, gate and up in another.
"""

from dataclasses import replace
from typing import Literal

from triptych import spec
from triptych.mapping import ConfigKeys, names_in, table
from . import decoder, encoders, llama
from .rope_config import rope_by_layer_type

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
    if keys.flag("is_causal") or keys.flag("causal_mask"):
        raise keys.error("is_causal or causal_mask is set, which no ModernBERT is")
    width, heads = keys.int("hidden_size"), keys.count("num_attention_heads")
    if width % heads:
        raise keys.error(f"hidden_size {width} does not divide into {heads} heads")
    norm = spec.LayerNormSpec(width=width, eps=keys.float("norm_eps", default=1e-5), bias=keys.flag("norm_bias"))
    mlp = spec.glu(
        width, keys.int("intermediate_size"), keys.act("hidden_activation", default="gelu"),
        bias=keys.flag("mlp_bias"), dropout=keys.dropout("mlp_dropout"),
    )  # fmt: skip
    near = keys.int("local_attention", default=128) // 2  # on either side
    every = keys.count("global_attn_every_n_layers", default=3)
    bases = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    stack = llama.stack(
        keys,
        norm=norm,
        mlp=mlp,
        windows=decoder.windows(keys, near, lambda i: i % every != 0),
        positions=rope_by_layer_type(keys, width // heads, bases),
        both_ways=True,
        kv_heads=heads,
        head_width=width // heads,
        bias=keys.flag("attention_bias"),
        embed_dropout=keys.dropout("embedding_dropout"),
    )
    first, *others = stack.blocks
    blocks = (replace(first, attn_norm=spec.NormsSpec()), *others)
    stack = replace(stack, embed=replace(stack.words, norm=norm), blocks=blocks)
    dense = spec.LinearSpec(inputs=width, outputs=width, bias=keys.flag("classifier_bias"))
    transform = spec.TransformSpec(dense=dense, act=keys.act("classifier_activation", default="gelu"), norm=norm)
    keys.assume(classifier_dropout=0.0)
    known = encoders.heads(
        keys, "ModernBert", stack, transform=transform,
        masked_bias=keys.bool("decoder_bias", default=True),
        pool=keys.choice("classifier_pooling", _POOLS, default="cls"),
    )  # fmt: skip
    return encoders.model(keys, stack, keys.architecture(known, default="ModernBertModel"))
