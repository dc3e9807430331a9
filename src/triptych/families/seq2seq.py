"""Parts that encoder-decoder families share: the spec of one side, heads, and tables of names for both sides."""

from dataclasses import replace
from typing import Literal

from triptych import spec
from triptych.mapping import ConfigKeys
from triptych.mapping import weight_table as tables
from triptych.spec.positions import PositionSpec

Side = Literal["encoder", "decoder"]

HEADS = tables.table("""
head.proj.weight          lm_head.weight                        output.weight
head.ends.*               qa_outputs.*
[ClassHead]
head.transform.dense.*    classification_head.dense.*
head.classes.*            classification_head.out_proj.*
""")


def stack(
    side: Side,
    embed: spec.Input,
    *,
    attn: spec.AttentionSpec,
    mlp: spec.MLPSpec | spec.GLUSpec,
    norms: spec.NormsSpec,
    layers: int,
    position: PositionSpec | None = None,
    final_norm: spec.LayerNormSpec | spec.RMSNormSpec | None = None,
) -> spec.StackSpec:
    """Equal blocks.  A decoder's look back only, and read the encoder through a cross-attention shaped like `attn`."""
    decodes = side == "decoder"
    block = spec.BlockSpec(
        attn=attn,
        cross=replace(attn, kind="cross") if decodes else None,
        mlp=mlp,
        attn_norm=norms,
        cross_norm=norms if decodes else None,
        mlp_norm=norms,
        dropout=embed.dropout,
    )
    kind = spec.KindSpec(mask=spec.causal() if decodes else spec.full(), position=position)
    return spec.StackSpec(embed=embed, kinds={"self": kind}, blocks=(block,) * layers, final_norm=final_norm)


def as_built(keys: ConfigKeys, **facts: bool) -> None:
    """Old configs of BART, mBART and Marian have keys for how the three differ.  Raises ConfigError forother values."""
    for name, fact in {"is_encoder_decoder": True, **facts}.items():
        if keys.bool(name, default=fact) is not fact:
            raise keys.error(f"{name} is {str(not fact).lower()}, which no {keys.str('model_type')} is")


def lm_head(keys: ConfigKeys, width: int, vocab: int) -> spec.LMHeadSpec:
    """BART's, with a bias of its own beside a shared matrix; a file without it means zero."""
    bias = keys.has_tensor("final_logits_bias", default=True)
    return spec.LMHeadSpec(proj=spec.LinearSpec(inputs=width, outputs=vocab, bias=bias))


def heads(
    keys: ConfigKeys, name: str, width: int, lm: spec.LMHeadSpec, *, labels: int = 2
) -> dict[str, spec.Head | None]:
    """The head of each class `{name}...`: none, language model, class labels of a row (read at its last token), and the
    span of an answer.  `labels` is the default number of labels in old configs."""
    dropout = keys.dropout("classifier_dropout")
    dense = spec.LinearSpec(inputs=width, outputs=width, bias=True)
    classes = spec.LinearSpec(inputs=width, outputs=keys.labels(default=labels), bias=True)
    ends = spec.LinearSpec(inputs=width, outputs=2, bias=True)
    return {
        f"{name}Model": None,
        f"{name}ForConditionalGeneration": lm,
        f"{name}ForSequenceClassification": spec.ClassHeadSpec(
            pool="last", transform=spec.TransformSpec(dense=dense, act="tanh"), classes=classes, dropout=dropout
        ),
        f"{name}ForQuestionAnswering": spec.SpanHeadSpec(ends=ends),
    }


def encoder_heads(keys: ConfigKeys, name: str, width: int) -> dict[str, spec.Head]:
    """The head of each class that keeps the encoder alone: one that pools, one over the labels of each token."""
    classes = spec.LinearSpec(inputs=width, outputs=keys.labels(), bias=True)
    return {
        f"{name}EncoderModel": spec.PoolingSpec(),
        f"{name}ForTokenClassification": spec.TokenHeadSpec(
            classes=classes, dropout=keys.dropout("classifier_dropout")
        ),
    }


def table(text: str, **words: tuple[str, str]) -> tables.WeightTable:
    """A table for both sides: `SIDE`, and each name in `words`, becomes the encoder's word, then the decoder's."""
    both = [text, text]
    for word, choices in {"SIDE": ("encoder", "decoder"), **words}.items():
        both = [one.replace(word, choice) for one, choice in zip(both, choices, strict=True)]
    return tables.table(both[0]) + tables.table(both[1])
