"""T5 (Raffel et al. 2020) and v1.1 / mT5 (Shazeer 2020's gated GELU): encoder-decoder with RMSNorm, no biases, learned
bucketed distances added to unscaled scores, one embedding for both sides.

Reference: transformers `models/t5`, which keeps each stack's distance table in its first block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from triptych import spec
from triptych.families.keys import COUNT, Keys
from triptych.families.weights import table

hf_types = frozenset({"t5", "mt5"})
ignore = frozenset(
    {
        "dense_act_fn", "is_gated_act",  # doubles of feed_forward_proj
        "n_positions",  # of the training data; the distances have no end
        "classifier_dropout",  # of a head these classes do not have
        "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim",  # doubles of num_layers, d_model, ...
    }
)  # fmt: skip

weights = table("""
encoder.embed.tokens.weight          shared.weight
encoder.embed.tokens.weight          encoder.embed_tokens.weight
encoder.kinds.self.position.weight   encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight
encoder.blocks.{i}.attn_norm.pre.*   encoder.block.{i}.layer.0.layer_norm.*
encoder.blocks.{i}.attn.q.*          encoder.block.{i}.layer.0.SelfAttention.q.*
encoder.blocks.{i}.attn.k.*          encoder.block.{i}.layer.0.SelfAttention.k.*
encoder.blocks.{i}.attn.v.*          encoder.block.{i}.layer.0.SelfAttention.v.*
encoder.blocks.{i}.attn.out.*        encoder.block.{i}.layer.0.SelfAttention.o.*
encoder.blocks.{i}.mlp_norm.pre.*    encoder.block.{i}.layer.1.layer_norm.*
encoder.blocks.{i}.mlp.down.*        encoder.block.{i}.layer.1.DenseReluDense.wo.*
encoder.final_norm.*                 encoder.final_layer_norm.*
decoder.embed.tokens.weight          decoder.embed_tokens.weight
decoder.kinds.self.position.weight   decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight
decoder.blocks.{i}.attn_norm.pre.*   decoder.block.{i}.layer.0.layer_norm.*
decoder.blocks.{i}.attn.q.*          decoder.block.{i}.layer.0.SelfAttention.q.*
decoder.blocks.{i}.attn.k.*          decoder.block.{i}.layer.0.SelfAttention.k.*
decoder.blocks.{i}.attn.v.*          decoder.block.{i}.layer.0.SelfAttention.v.*
decoder.blocks.{i}.attn.out.*        decoder.block.{i}.layer.0.SelfAttention.o.*
decoder.blocks.{i}.cross_norm.pre.*  decoder.block.{i}.layer.1.layer_norm.*
decoder.blocks.{i}.cross.q.*         decoder.block.{i}.layer.1.EncDecAttention.q.*
decoder.blocks.{i}.cross.k.*         decoder.block.{i}.layer.1.EncDecAttention.k.*
decoder.blocks.{i}.cross.v.*         decoder.block.{i}.layer.1.EncDecAttention.v.*
decoder.blocks.{i}.cross.out.*       decoder.block.{i}.layer.1.EncDecAttention.o.*
decoder.blocks.{i}.mlp_norm.pre.*    decoder.block.{i}.layer.2.layer_norm.*
decoder.blocks.{i}.mlp.down.*        decoder.block.{i}.layer.2.DenseReluDense.wo.*
decoder.final_norm.*                 decoder.final_layer_norm.*
head.proj.weight                     lm_head.weight
# No reference reads the next one: cross-attention has no distances.
-                                    decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight
[MLP]
encoder.blocks.{i}.mlp.up.*          encoder.block.{i}.layer.1.DenseReluDense.wi.*
decoder.blocks.{i}.mlp.up.*          decoder.block.{i}.layer.2.DenseReluDense.wi.*
[GLU]
encoder.blocks.{i}.mlp.gate.*        encoder.block.{i}.layer.1.DenseReluDense.wi_0.*
encoder.blocks.{i}.mlp.up.*          encoder.block.{i}.layer.1.DenseReluDense.wi_1.*
decoder.blocks.{i}.mlp.gate.*        decoder.block.{i}.layer.2.DenseReluDense.wi_0.*
decoder.blocks.{i}.mlp.up.*          decoder.block.{i}.layer.2.DenseReluDense.wi_1.*
""")


def config(keys: Keys) -> spec.Model:
    width, vocab = keys.int("d_model"), keys.int("vocab_size")
    layers = keys.count("num_layers")
    later = keys.optional_int("num_decoder_layers", high=COUNT) or layers
    part = keys.architecture(
        {
            f"{name}{kind}": kind
            for name in ("T5", "MT5")
            for kind in ("ForConditionalGeneration", "WithLMHeadModel", "Model", "EncoderModel")
        },
        default="T5ForConditionalGeneration",
    )
    alone = part == "EncoderModel"
    keys.bool("is_encoder_decoder", default=True)
    encoder = _stack(keys, layers, "encoder")
    decoder = None if alone else _stack(keys, later, "decoder")
    pad = keys.int("pad_token_id", default=0, low=0)
    tied, scaled = _head(keys)
    ties = {} if alone else {"decoder.embed.tokens.weight": "encoder.embed.tokens.weight"}
    head: spec.LMHead | spec.Pooling | None = spec.Pooling() if alone else None
    if part in ("ForConditionalGeneration", "WithLMHeadModel"):
        head = spec.LMHead(proj=spec.Linear(inputs=width, outputs=vocab), scale=width**-0.5 if scaled else None)
        ties |= {"head.proj.weight": "encoder.embed.tokens.weight"} if tied else {}
    return spec.Model(
        family=keys.str("model_type"),
        encoder=encoder,
        decoder=decoder,
        head=head,
        ties=ties,
        ids=keys.special_ids(vocab, start=pad),
        init_std=0.02 * keys.float("initializer_factor", default=1.0),
    )


def _head(keys: Keys) -> tuple[bool, bool]:
    """Whether the head shares the embedding, and whether its input is scaled by 1/sqrt(D).

    Until transformers 5 `tie_word_embeddings` said both; now it is always true and `scale_decoder_outputs` says the
    second, so that only a stored `lm_head` tells an untied head.
    """
    tied = keys.bool("tie_word_embeddings", default=True)
    scaled = keys.bool("scale_decoder_outputs", default=tied)
    return tied and (scaled or not keys.has_tensor("lm_head.weight", default=False)), scaled


def _stack(keys: Keys, layers: int, side: Literal["encoder", "decoder"]) -> spec.Stack:
    """One side: its blocks share kinds whose one table of distances all its layers add."""
    width, heads, hidden = keys.int("d_model"), keys.count("num_heads"), keys.int("d_ff")
    dropout = keys.dropout("dropout_rate", default=0.1)
    norm = spec.RMSNorm(width=width, eps=keys.float("layer_norm_epsilon", default=1e-6))
    attn = spec.attention(width, heads, head_width=keys.int("d_kv"), scale=1.0, dropout=dropout)
    kinds: dict[str, spec.MLP | spec.GLU] = {
        "relu": spec.mlp(width, hidden, "relu", dropout=dropout),
        "gated-gelu": spec.glu(width, hidden, "gelu_tanh", dropout=dropout),
        "gated-silu": spec.glu(width, hidden, "silu", dropout=dropout),
    }
    decodes = side == "decoder"
    block = spec.Block(
        attn=attn,
        cross=replace(attn, kind="cross") if decodes else None,
        mlp=keys.choice("feed_forward_proj", kinds, default="relu"),
        attn_norm=spec.Norms(pre=norm),
        cross_norm=spec.Norms(pre=norm) if decodes else None,
        mlp_norm=spec.Norms(pre=norm),
        dropout=dropout,
    )
    distances = spec.T5Buckets(
        heads=heads,
        buckets=keys.count("relative_attention_num_buckets", default=32),
        max_distance=keys.int("relative_attention_max_distance", default=128),
        bidirectional=not decodes,
    )
    return spec.Stack(
        embed=spec.Embed(vocab=keys.int("vocab_size"), width=width, dropout=dropout),
        kinds={"self": spec.Kind(mask=spec.causal() if decodes else spec.full(), position=distances)},
        blocks=(block,) * layers,
        final_norm=norm,
        dropout=dropout,
    )
