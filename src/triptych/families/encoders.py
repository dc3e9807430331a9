"""What encoder families share: BERT's stack, the heads their classes are named after, the model of the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from triptych import spec
from triptych.mapping.config_keys import ConfigKeys


def post_norm(
    keys: ConfigKeys, *, offset: int = 0, embed_width: int | None = None, names: Mapping[str, str] | None = None
) -> spec.StackSpec:
    """The stack of a config with BERT's keys (Devlin et al. 2019): learned positions, a norm on the embedding and after
    every sublayer, biases everywhere.

    `offset` rows of the table of positions are skipped; `embed_width` is the embedding's where it is not `hidden_size`.
    `names` are other names of the keys, of DistilBERT, which has no token types and no key for the norms' epsilon.
    """

    def named(key: str) -> str:
        return key if names is None else names[key]

    if names is None:
        keys.choice("position_embedding_type", {"absolute": None}, default="absolute")
    vocab, positions = keys.int("vocab_size"), keys.int("max_position_embeddings", low=offset + 1) - offset
    types = keys.int("type_vocab_size", default=2, low=0) if names is None else 0
    width, layers = keys.int(named("hidden_size")), keys.count(named("num_hidden_layers"))
    heads, hidden = keys.count(named("num_attention_heads")), keys.int(named("intermediate_size"))
    act = keys.act(named("hidden_act"), default="gelu")
    eps = keys.float("layer_norm_eps", default=1e-12) if names is None else 1e-12
    dropout = keys.dropout(named("hidden_dropout_prob"), default=0.1)
    inside = keys.dropout(named("attention_probs_dropout_prob"), default=0.1)
    norm, inner = spec.LayerNormSpec(width=width, eps=eps), embed_width or width
    block = spec.BlockSpec(
        attn=spec.attention(width, heads, bias=True, dropout=inside),
        mlp=spec.mlp(width, hidden, act, bias=True),
        attn_norm=spec.NormsSpec(post=norm),
        mlp_norm=spec.NormsSpec(post=norm),
        dropout=dropout,
    )
    embed = spec.EmbedSpec(
        vocab=vocab,
        width=inner,
        position=spec.LearnedSpec(length=positions, width=inner, offset=offset),
        token_types=types,
        norm=spec.LayerNormSpec(width=inner, eps=eps),
        project=spec.LinearSpec(inputs=inner, outputs=width, bias=True) if inner != width else None,
        dropout=dropout,
    )
    return spec.StackSpec(embed=embed, kinds={"self": spec.KindSpec(mask=spec.full())}, blocks=(block,) * layers)


def heads(
    keys: ConfigKeys,
    name: str,
    width: int,
    *,
    masked: spec.TransformSpec,
    label: spec.TransformSpec,
    each: spec.TransformSpec | None = None,
    pool: Literal["first", "mean"] = "first",
    masked_bias: bool = True,
    pooler: bool = False,
    dropout: float,
) -> dict[str, spec.Head]:
    """The head of each class `{name}...` a checkpoint can be saved from; a bare encoder pools.

    `masked`, `label` and `each` come before the logits of masked tokens, of a row's label, and of each token's label;
    `pooler` is whether a bare encoder carries BERT's pooler; `dropout` comes before labels unless the config has a
    `classifier_dropout`.
    """
    own = keys.optional_float("classifier_dropout", high=1.0)
    dropout = dropout if own is None else own
    labels = spec.LinearSpec(inputs=width, outputs=keys.labels(), bias=True)
    ends = spec.LinearSpec(inputs=width, outputs=2, bias=True)
    words = spec.LinearSpec(inputs=masked.dense.outputs, outputs=keys.int("vocab_size"), bias=masked_bias)
    return {
        f"{name}Model": spec.PoolingSpec(
            dense=spec.LinearSpec(inputs=width, outputs=width, bias=True) if pooler else None
        ),
        f"{name}ForMaskedLM": spec.MaskedLMHeadSpec(transform=masked, proj=words),
        f"{name}ForSequenceClassification": spec.ClassHeadSpec(
            pool=pool, transform=label, classes=labels, dropout=dropout
        ),
        f"{name}ForTokenClassification": spec.TokenHeadSpec(transform=each, classes=labels, dropout=dropout),
        f"{name}ForQuestionAnswering": spec.SpanHeadSpec(transform=each, ends=ends, dropout=dropout),
    }


def model(keys: ConfigKeys, encoder: spec.StackSpec, head: spec.Head) -> spec.ModelSpec:
    """The encoder with its head; a masked-language-model head shares the embedding."""
    position = encoder.embed.position
    tied = keys.bool("tie_word_embeddings", default=True) and isinstance(head, spec.MaskedLMHeadSpec)
    return spec.ModelSpec(
        family=keys.str("model_type"),
        encoder=encoder,
        head=head,
        ties={"head.proj.weight": "encoder.embed.tokens.weight"} if tied else {},
        ids=keys.special_ids(encoder.words.vocab),
        context=position.length if isinstance(position, spec.LearnedSpec) else keys.int("max_position_embeddings"),
        init_std=keys.float("initializer_range", default=0.02),
    )


def pooling(keys: ConfigKeys, head: spec.PoolingSpec) -> spec.PoolingSpec:
    """How a bare encoder pools.  HF configs have no key for it and preserve unknown ones, so ours is stored there."""
    table = keys.table("triptych_pooling")
    if table is None:
        return head
    modes: dict[str, Literal["mean", "first", "dense"]] = {"mean": "mean", "first": "first", "dense": "dense"}
    mode = table.choice("mode", modes, default="mean")
    if mode == "dense" and head.dense is None:
        raise table.error("mode 'dense' needs the pooler, which this checkpoint lacks")
    normalize = table.bool("normalize", default=False)
    table.finish()
    return replace(head, mode=mode, normalize=normalize)
