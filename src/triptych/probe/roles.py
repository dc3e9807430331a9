"""What each attention head does: its scores in a list of roles, each beside a null, and what is lost without it.

A role counts where its score is above a threshold that a head without the role passes with a probability of 1% over
all heads and roles.  A score says where a head looks; the ablation beside it says whether the model needs that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from triptych.arguments import check_ids, integer
from triptych.errors import InputError, nearest, shown
from triptych.probe.prompts import ProbedModel
from triptych.probe.role_ablation import Ablation, Effect, unit
from triptych.probe.role_scores import CROSS_ROLES, SELF_ROLES, Head, RoleScores, Stack, attentions, score_all
from triptych.probe.role_table import ROLES, HeadRole, HeadTable, RoleEffect
from triptych.probe.role_texts import CUT, LINKS, TEXTS, HeadSample, Link, linked_samples, punctuation, random_samples

TOGETHER = 8  # heads of a role, at most, that are ablated together
RARE = 0.1  # of the token types of the texts


def heads(
    model: ProbedModel,
    texts: Any = None,
    targets: Any = None,
    *,
    roles: Sequence[str] | None = None,
    links: dict[str, Sequence[Link]] | None = None,
    delimiters: Sequence[int] | None = None,
    boundaries: Sequence[int] | None = None,
    ablate: int = 3,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> HeadTable:
    """The roles of each attention head: its score in each, beside the score that chance gives (a null distribution) and
    the effect of its ablation.

    `texts` are texts or ids, by default six short ones; random tokens that are repeated are read as well.
    `targets` are what the decoder of an encoder-decoder reads; by default what it generates.  `roles` are names of
    `probe.ROLES` and of `links`.  `links` gives each name a list of (text, word that reads, word that is read), a word
    being `bank`, or `bank@2` for its second occurrence.  `delimiters` and `boundaries` are token ids, by
    default those that the tokenizer's texts show.  The `ablate` best heads of each role are ablated one by one, and its
    best eight together; 0 ablates none.

    docs/concepts/heads.md has the formula of each role.  Raises InputError for a role or a word that does not exist
    and for texts that do not fit the model, before anything runs.
    """
    model.check_words("heads")
    if model.spec.layout == "encoder-decoder" and targets is None and (texts is not None or model.tokenizer):
        if isinstance(texts, str):
            raise InputError("give a list of texts, not one string: [text]")
        texts = list(TEXTS) if texts is None else texts
        targets = [written.ids for written in model.generate(texts, max_new_tokens=24)]
    progress = on_progress or (lambda stage: None)
    pairs: dict[str, Sequence[Link]] = {**LINKS, **_checked_links(links)}
    wanted = _checked_roles(roles, pairs)
    integer("ablate", ablate, 0)
    integer("seed", seed, 0)
    samples = _samples(model, texts, targets, seed)
    for name, ids in (("delimiters", delimiters), ("boundaries", boundaries)):
        if ids is not None:
            check_ids(ids, max(model.spec.vocab, model.spec.source_vocab), name)
    own = () if links is None else tuple(links)
    linked = {role: pairs[role] for role in wanted if role in pairs}
    samples += linked_samples(linked, model.spec, model.tokenizer, strict=own)
    if not samples:
        raise InputError("there is no text to score heads on; give texts=, or use a model with a larger vocabulary")
    layers = attentions(model.spec)
    if not layers:
        raise InputError("no layer of this model has attention weights")
    types = _types(model, samples, delimiters, boundaries)
    progress("reading the patterns")
    with torch.no_grad():
        scores = score_all(model, samples, wanted, types, seed)
        progress("ablating heads")
        effects, together = _ablated(model, samples, scores, ablate, seed, progress)
    rows = [row for role in wanted if role in scores for row in _rows(scores[role], len(wanted), effects)]
    place = {(one.stack, one.layer): i for i, one in enumerate(layers)}
    rows.sort(key=lambda row: (place[row.stack, row.layer], row.head))
    missing = {role: _why_not(role, model) for role in wanted if role not in scores}
    count = {role: sum(len(sample.links.get(role, ())) for sample in samples) for role in linked}
    return HeadTable(tuple(rows), tuple(together), missing, unit(model.spec), seed, count)


def _checked_roles(roles: Sequence[str] | None, links: dict[str, Sequence[Link]]) -> list[str]:
    """The roles to score, each once.  Raises InputError for an empty list and for what is no role."""
    known = list(dict.fromkeys([*ROLES, *links]))
    if roles is None:
        return known
    if not roles:
        raise InputError(f"roles=[] names no role; they are {', '.join(known)}")
    for role in roles:
        if role not in known:
            raise InputError(f"there is no role {shown(role)}{nearest(str(role), known)}; roles are {', '.join(known)}")
    return list(dict.fromkeys(roles))


def _checked_links(links: dict[str, Sequence[Link]] | None) -> dict[str, Sequence[Link]]:
    """Raises InputError for anything but lists of (text, word that reads, word that is read) by role."""
    for role, every in (links or {}).items():
        if role in SELF_ROLES or role in CROSS_ROLES:
            raise InputError(f"links={{{role!r}: ...}}: this is another role; choose a name of your own")
        if not isinstance(every, list | tuple) or not every:
            raise InputError(f"links[{role!r}] must be a list of (text, word that reads, word that is read)")
        for one in every:
            if not isinstance(one, list | tuple) or len(one) != 3:
                raise InputError(f"links[{role!r}]: {shown(one)} is no (text, word that reads, word that is read)")
    return links or {}


def _samples(model: ProbedModel, texts: Any, targets: Any, seed: int) -> list[HeadSample]:
    """The rows to read: texts, given or built in, and random tokens."""
    if isinstance(texts, str):
        raise InputError("give a list of texts, not one string: [text]")
    both = model.spec.layout == "encoder-decoder"
    if targets is not None and not both:
        raise InputError(f"targets are for encoder-decoders; this is a {model.spec.layout}")
    rows = model.ids(texts) if texts is not None else []
    longest = model.spec.context if model.spec.encoder is None else model.spec.source_context
    for number, row in enumerate(rows):
        if longest is not None and len(row) > longest:
            raise InputError(f"text {number} has {len(row)} tokens and the model reads {longest}; shorten it")
    if texts is None and model.tokenizer is not None:
        limit = min(CUT, model.spec.context or CUT)
        rows = [row[:limit] for row in model.ids(TEXTS)]
    outputs: Sequence[list[int] | None] = [None] * len(rows)
    if both and rows:
        if targets is None or len(targets) != len(rows):
            raise InputError(f"targets= must have one text for each of the {len(rows)} texts")
        start = [] if model.spec.ids.start is None else [model.spec.ids.start]
        ids = model.ids(targets, target=True)
        outputs = [[*start, *row] if row[:1] != start else row for row in ids]
    every = [HeadSample(row, output, "text") for row, output in zip(rows, outputs, strict=True)]
    return every + random_samples(model.spec, model.tokenizer, seed)


def _types(
    model: ProbedModel, samples: list[HeadSample], delimiters: Sequence[int] | None, boundaries: Sequence[int] | None
) -> dict[Stack, dict[str, set[int]]]:
    """For each stack the token ids of the roles that read certain tokens."""
    given = {name: set(ids) for name, ids in (("delimiter", delimiters), ("boundary", boundaries)) if ids is not None}
    types: dict[Stack, dict[str, set[int]]] = {}
    stacks: tuple[Stack, ...] = ("encoder", "decoder", "cross")
    of_target = model.spec.layout == "encoder-decoder"
    for stack in stacks:
        ids = [
            token for sample in samples if sample.kind == "text"
            for token in ((sample.target or []) if of_target and stack == "decoder" else sample.ids)
        ]  # fmt: skip
        marks, stops = punctuation(model.tokenizer, ids)
        own = {"delimiter": marks, "boundary": stops} | given
        if given.get("delimiter") and boundaries is None:
            own["boundary"] = set()
        types[stack] = own | {"rare": _rarest(ids, own["delimiter"])}
    return types


def _rarest(ids: list[int], marks: set[int]) -> set[int]:
    """The types that occur least often in the texts; among those as frequent the largest ids, since vocabularies are
    sorted by frequency (Voita et al. 2019 count the least frequent tokens of a sentence)."""
    counts = Counter(token for token in ids if token not in marks)
    order = sorted(counts, key=lambda token: (counts[token], -token))
    return set(order[: max(1, round(RARE * len(order)))])


def _ablated(
    model: ProbedModel, samples: list[HeadSample], scores: dict[str, RoleScores], ablate: int, seed: int,
    progress: Callable[[str], None],
) -> tuple[dict[tuple[str, Head], Effect], list[RoleEffect]]:  # fmt: skip
    """The effects of the best heads of each role, by role and head, and of all of them together."""
    effects: dict[tuple[str, Head], Effect] = {}
    together: list[RoleEffect] = []
    for number, (role, one) in enumerate(scores.items() if ablate else ()):
        score = torch.cat(one.numbers, 1)[0]
        above = (score >= one.above(len(scores))[0]).tolist()
        best = [one.heads[i] for i in score.argsort(descending=True, stable=True).tolist() if above[i]]
        if not best:
            continue
        progress(f"ablating the heads of the role {role}")
        decodes = all(at.stack == "decoder" for at, _ in one.heads)  # these predict the token that comes next
        ablation = Ablation.of(model, samples, one.queries, role == "induction" and decodes)
        groups = [tuple(best[:TOGETHER]), *((head,) for head in best[:ablate])]
        others = [head for head, is_above in zip(one.heads, above, strict=True) if not is_above]
        whole, *single = ablation.effects(groups, others, np.random.default_rng([seed, 2, number]))
        effects |= {(role, head): effect for head, effect in zip(best, single, strict=False)}
        cut = tuple((at.stack, at.layer, head) for at, head in groups[0])
        together.append(RoleEffect(role, cut, whole.lost, whole.random))
    return effects, together


def _rows(scores: RoleScores, roles: int, effects: dict[tuple[str, Head], Effect]) -> list[HeadRole]:
    score, even, mean, _, offset = torch.cat(scores.numbers, 1).tolist()
    limit, *drawn = scores.above(roles)
    z, p = ([None] * len(score) if one is None else one.tolist() for one in drawn)
    rows = []
    for i, (at, head) in enumerate(scores.heads):
        effect = effects.get((scores.role, (at, head)))
        rows.append(
            HeadRole(
                at.stack, at.layer, head, scores.role, score[i], even[i], mean[i], float(limit[i]), z[i], p[i],
                int(offset[i]) if scores.role == "offset" else None,
                *((None, None) if effect is None else (effect.lost, effect.random_mean)),
            )
        )  # fmt: skip
    return rows


def _why_not(role: str, model: ProbedModel) -> str:
    if role == "alignment" and model.spec.layout != "encoder-decoder":
        return "it is a role of cross-attention"
    if role in ("delimiter", "boundary", "rare", *LINKS) and model.tokenizer is None:
        return "the model has no tokenizer; give texts= of ids, and delimiters=, boundaries= or links="
    if role == "next" and model.spec.layout == "decoder":
        return "a causal model sees no token that comes after"
    return "the texts have too few places for it"
