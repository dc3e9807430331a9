"""What the DeBERTa families share: BERT's blocks with disentangled attention, and their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from triptych import spec
from triptych.families import encoders
from triptych.mapping.config_keys import ConfigKeys
from triptych.spec.parts import Activation
from triptych.spec.positions import Term


def terms(keys: ConfigKeys) -> tuple[Term, ...]:
    """The terms of the scores beside content against content: a list, or names separated by bars."""
    value = keys.get("pos_att_type", None)
    names = value.lower().split("|") if isinstance(value, str) else keys.strings("pos_att_type", ()) if value else ()
    known = tuple(term for term in get_args(Term) if term in (name.strip() for name in names))
    if len(known) != len(names) or (keys.bool("relative_attention", default=False) and not known):
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
    used, relative = terms(keys), keys.bool("relative_attention", default=False)
    width, inner = keys.int("hidden_size"), keys.int("embedding_size", default=keys.int("hidden_size"))
    act, dropout = keys.act("hidden_act", default="gelu"), keys.dropout("hidden_dropout_prob", default=0.1)
    norm = spec.LayerNormSpec(width=width, eps=keys.float("layer_norm_eps", default=1e-7))
    position = None
    if relative:
        position = spec.DisentangledSpec(
            width=width, span=span, max_distance=max_distance, terms=used, norm=norm if norm_distances else None,
            dropout=dropout,
        )  # fmt: skip
    attn = replace(
        attn,
        pos_q=attn.pos_q if relative and "p2c" in used else None,
        pos_k=attn.pos_k if relative and "c2p" in used else None,
        scale=(attn.head_width * (1 + len(used))) ** -0.5,
        dropout=keys.dropout("attention_probs_dropout_prob", default=0.1),
    )
    block = spec.BlockSpec(
        attn=attn,
        mlp=spec.mlp(width, keys.int("intermediate_size"), act, bias=True),
        attn_norm=spec.NormsSpec(post=norm),
        mlp_norm=spec.NormsSpec(post=norm),
        dropout=dropout,
    )
    learned = spec.LearnedSpec(length=keys.int("max_position_embeddings"), width=inner)
    embed = spec.EmbedSpec(
        vocab=keys.int("vocab_size"),
        width=inner,
        position=learned if keys.bool("position_biased_input", default=True) else None,
        token_types=keys.int("type_vocab_size", default=0, low=0),
        widen=spec.LinearSpec(inputs=inner, outputs=width) if inner != width else None,
        norm=norm,
        dropout=dropout,
    )
    stack = spec.StackSpec(
        embed=embed,
        kinds={"self": spec.KindSpec(mask=spec.full(), position=position)},
        blocks=(replace(block, branch=branch), *(block,) * (keys.count("num_hidden_layers") - 1)),
    )
    return _headed(keys, name, stack, act)


def _headed(keys: ConfigKeys, name: str, stack: spec.StackSpec, act: Activation) -> spec.ModelSpec:
    """The model with its head.  `legacy` is the masked head of the first transformers release.  The other is that of
    the authors: always tied, and stored in published checkpoints, where its tensors show it without the key."""
    width, norm, dropout = stack.width, stack.words.norm, stack.words.dropout
    theirs = not keys.bool("legacy", default=not keys.has_tensor("lm_predictions.lm_head.bias", default=False))
    if keys.int("pooler_hidden_size", default=width) != width:
        raise keys.error(f"pooler_hidden_size must be hidden_size ({width}), the input width of every classifier")
    inner = width if theirs else stack.words.width
    pooler = spec.LinearSpec(inputs=width, outputs=width, bias=True)
    heads = encoders.heads(
        keys, name, width,
        masked=spec.TransformSpec(
            dense=replace(pooler, outputs=inner), act=act, norm=norm and replace(norm, width=inner)
        ),
        label=spec.TransformSpec(dense=pooler, act=keys.act("pooler_hidden_act", default="gelu")),
        dropout=dropout,
    )  # fmt: skip
    head = keys.architecture(heads, default=f"{name}Model")
    if isinstance(head, spec.ClassHeadSpec):
        own = keys.optional_float("cls_dropout", high=1.0)
        head = replace(head, dropout=dropout if own is None else own)
    model = encoders.model(keys, stack, head)
    if not (theirs and isinstance(head, spec.MaskedLMHeadSpec)):
        return model
    return replace(model, ties={"head.proj.weight": "encoder.embed.tokens.weight"}, naming="lm_predictions")
