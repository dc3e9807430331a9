"""Parts that the DeBERTa families share: BERT's blocks with disentangled attention, and their heads."""

from dataclasses import replace
from typing import get_args

from triptych import spec
from triptych.mapping import ConfigKeys
from triptych.spec.positions import Term
from . import encoders


def terms(keys: ConfigKeys) -> tuple[Term, ...]:
    """The terms of the scores beside content against content: a list, or names separated by bars."""
    value = keys.get("pos_att_type", None)
    names = value.lower().split("|") if isinstance(value, str) else keys.strings("pos_att_type", ()) if value else ()
    known = tuple(term for term in get_args(Term) if term in (name.strip() for name in names))
    if len(known) != len(names) or (keys.flag("relative_attention") and not known):
        raise keys.error(f"pos_att_type must name c2p, p2c or both, not {value!r}")
    return known


def max_distance_of(keys: ConfigKeys) -> int:
    """The largest distance that differs from longer ones."""
    most = keys.int("max_relative_positions", default=-1, low=-1)
    return most if most > 0 else keys.int("max_position_embeddings")


def model(
    keys: ConfigKeys,
    name: str,
    attn: spec.AttentionSpec,
    *,
    span: int,
    max_distance: int | None = None,
    norm_distances: bool = False,
    branch: spec.BranchSpec | None = None,
) -> spec.ModelSpec:
    """The model of `name`'s classes.  `attn` is that of a layer with all its maps, of which it keeps those its terms
    need; `span` and `max_distance` are `Disentangled`'s, and `branch` is beside the first block."""
    used, relative = terms(keys), keys.flag("relative_attention")
    attn = replace(
        attn,
        pos_q=attn.pos_q if relative and "p2c" in used else None,
        pos_k=attn.pos_k if relative and "c2p" in used else None,
        scale=(attn.head_width * (1 + len(used))) ** -0.5,
    )
    stack = encoders.post_norm(keys, attn=attn, types=0, eps=1e-7)
    words, width, inner = stack.words, stack.width, keys.int("embedding_size", default=stack.width)
    assert isinstance(words.norm, spec.LayerNormSpec)
    learned = spec.LearnedSpec(length=keys.int("max_position_embeddings"), width=inner)
    embed = replace(
        words,
        width=inner,
        position=learned if keys.bool("position_biased_input", default=True) else None,
        widen=spec.LinearSpec(inputs=inner, outputs=width) if inner != width else None,
    )
    distances = spec.DisentangledSpec(
        width=width, span=span, max_distance=max_distance, terms=used, norm=words.norm if norm_distances else None,
        dropout=words.dropout,
    ) if relative else None  # fmt: skip
    first, *others = stack.blocks
    assert isinstance(first, spec.BlockSpec)
    stack = spec.StackSpec(
        embed=embed,
        kinds={"self": spec.KindSpec(mask=spec.full(), position=distances)},
        blocks=(replace(first, branch=branch), *others),
    )
    return _headed(keys, name, stack)


def _headed(keys: ConfigKeys, name: str, stack: spec.StackSpec) -> spec.ModelSpec:
    """The model with its head.  `legacy` is the masked head of the first transformers release.  The other is that of
    the authors: always tied, and stored in published checkpoints, where its tensors show it without the key."""
    width = stack.width
    theirs = not keys.bool("legacy", default=not keys.has_tensor("lm_predictions.lm_head.bias"))
    if keys.int("pooler_hidden_size", default=width) != width:
        raise keys.error(f"pooler_hidden_size must be hidden_size ({width}), the input width of every classifier")
    heads = encoders.heads(
        keys, name, stack,
        masked=keys.act("hidden_act", default="gelu"),
        label=keys.act("pooler_hidden_act", default="gelu"),
        masked_width=width if theirs else None,
    )  # fmt: skip
    head = keys.architecture(heads, default=f"{name}Model")
    if isinstance(head, spec.ClassHeadSpec):
        own = keys.optional_float("cls_dropout", high=1.0)
        head = replace(head, dropout=stack.words.dropout if own is None else own)
    model = encoders.model(keys, stack, head)
    if not (theirs and isinstance(head, spec.MaskedLMHeadSpec)):
        return model
    return replace(model, ties={"head.proj.weight": "encoder.embed.tokens.weight"}, naming="lm_predictions")
