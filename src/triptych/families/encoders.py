"""Parts that encoder families share: BERT's stack, the heads their classes are named after, the model of the two."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from triptych import spec
from triptych.mapping import ConfigKeys
from triptych.spec.parts import Activation


def post_norm(
    keys: ConfigKeys,
    *,
    attn: spec.AttentionSpec | None = None,
    offset: int = 0,
    embed_width: int | None = None,
    names: Mapping[str, str] | None = None,
    types: int = 2,
    eps: float = 1e-12,
) -> spec.StackSpec:
    """The stack of a config with BERT's keys (Devlin et al. 2019): learned positions, a norm on the embedding and after
    every sublayer, biases everywhere.

    `attn` is the attention of every block where it is another one; `offset` rows of the table of positions are skipped;
    `embed_width` is the embedding's where it is not `hidden_size`; `types` and `eps` are defaults of keys.  `names` are
    other names of the keys, of DistilBERT, which has no token types and no key for the norms' epsilon.
    """

    def key_name(key: str) -> str:
        return key if names is None else names[key]

    if names is None:
        keys.choice("position_embedding_type", {"absolute": None}, default="absolute")
    vocab, positions = keys.int("vocab_size"), keys.int("max_position_embeddings", low=offset + 1) - offset
    types = keys.int("type_vocab_size", default=types, low=0) if names is None else 0
    width, layers = keys.int(key_name("hidden_size")), keys.count(key_name("num_hidden_layers"))
    heads, hidden = keys.count(key_name("num_attention_heads")), keys.int(key_name("intermediate_size"))
    act = keys.act(key_name("hidden_act"), default="gelu")
    eps = keys.float("layer_norm_eps", default=eps) if names is None else eps
    dropout = keys.dropout(key_name("hidden_dropout_prob"), default=0.1)
    inside = keys.dropout(key_name("attention_probs_dropout_prob"), default=0.1)
    norm, inner = spec.LayerNormSpec(width=width, eps=eps), embed_width or width
    block = spec.BlockSpec(
        attn=replace(attn or spec.attention(width, heads, bias=True), dropout=inside),
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
    stack: spec.StackSpec,
    *,
    masked: Activation = "gelu",
    label: Activation = "gelu",
    masked_width: int | None = None,
    transform: spec.TransformSpec | None = None,
    pool: Literal["first", "mean"] = "first",
    masked_bias: bool = True,
    pooler: bool = False,
) -> dict[str, spec.Head]:
    """The head of each class `{name}...` a checkpoint can be saved from; a bare encoder pools.

    `masked` and `label` are the activations before the logits of masked tokens and of a row's label; `masked_width` is
    that of the vectors before the first where it is not the embedding's.  `transform` stands before all logits, in the
    place of these.  `pooler` is whether a bare encoder carries BERT's pooler.  The stack's dropout comes before labels
    unless the config has a `classifier_dropout`.
    """
    own, norm = keys.optional_float("classifier_dropout", high=1.0), stack.words.norm
    dropout, inner = stack.words.dropout if own is None else own, masked_width or stack.words.width
    dense = spec.LinearSpec(inputs=stack.width, outputs=stack.width, bias=True)
    labels, ends = replace(dense, outputs=keys.labels()), replace(dense, outputs=2)
    before_words = transform or spec.TransformSpec(
        dense=replace(dense, outputs=inner), act=masked, norm=norm and replace(norm, width=inner)
    )
    words = spec.LinearSpec(inputs=inner, outputs=stack.words.vocab, bias=masked_bias)
    before_label = transform or spec.TransformSpec(dense=dense, act=label)
    return {
        f"{name}Model": spec.PoolingSpec(dense=dense if pooler else None),
        f"{name}ForMaskedLM": spec.MaskedLMHeadSpec(transform=before_words, proj=words),
        f"{name}ForSequenceClassification": spec.ClassHeadSpec(
            pool=pool, transform=before_label, classes=labels, dropout=dropout
        ),
        f"{name}ForTokenClassification": spec.TokenHeadSpec(transform=transform, classes=labels, dropout=dropout),
        f"{name}ForQuestionAnswering": spec.SpanHeadSpec(transform=transform, ends=ends, dropout=dropout),
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
