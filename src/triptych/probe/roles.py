"""What each attention head does: its scores in a list of roles, each beside a null, and what is lost without it.

A role counts where its score is above a threshold that a head without the role passes with a probability of 1% over
all heads and roles.  A score says where a head looks; the ablation beside it says whether the model needs that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from triptych.arguments import check_ids, checked, integer
from triptych.errors import InputError, nearest, shown
from .display import Displayed, plain
from .prompts import ProbedModel
from .role_ablation import Ablation, Effect, unit
from .role_definitions import FAR, FARTHEST, NEAR
from .role_scores import (
    CROSS_ROLES,
    FAMILY,
    SELF_ROLES,
    AttentionStack,
    HeadIndex,
    RoleScores,
    attentions,
    score_all,
)
from .role_texts import CUT, LINKS, TEXTS, HeadSample, Link, linked_samples, punctuation, random_samples

TOGETHER = 8  # heads of a role, at most, that are ablated together
RARE = 0.1  # of the token types of the texts
ROLES = {
    "induction": "the token after the first occurrence of the present one (A B ... A reads B)",
    "duplicate": "the first occurrence of the present token",
    "alignment": "the source from left to right, as the target is written",
    "subject-verb": "from a verb its subject, in ten sentences",
    "coreference": "from a pronoun the person it stands for, in ten sentences",
    "delimiter": "punctuation",
    "boundary": "the marks that end a sentence",
    "rare": "the rarest tokens of the text",
    "previous": "the token before",
    "next": "the token after",
    "offset": f"the token 2 to {FARTHEST} places away, always as many",
    "first": "the first token",
    "local": f"tokens at most {NEAR} places away",
    "long-range": f"tokens at least {FAR} places away, the first one excepted",
    "diffuse": "many keys alike",
}
GENERAL = ("local", "long-range", "diffuse")  # what a head does is named by these only where nothing else is above


@dataclass(frozen=True)
class HeadRole:
    """One head in one role.

    score      0 to 1: the mean weight of the role's queries on its keys; of `diffuse`, the effective number of keys as
               a share of those visible.
    even       what even weights score; `null` the mean of the null distribution; `threshold` what counts.
    z, p       the distance from `null` in its standard deviations, and the probability that any head in any role comes
               as far by chance; None where the null is not drawn.
    offset     places from the query to the key, for `offset`.
    effect     what is lost without the head (`HeadTable.unit`), and without random ones of its layer, on average; None
               where it was not measured.
    """

    stack: AttentionStack
    layer: int
    head: int
    role: str
    score: float
    even: float
    null: float
    threshold: float
    z: float | None
    p: float | None
    offset: int | None = None
    effect: float | None = None
    random_effect: float | None = None

    @property
    def above(self) -> bool:
        """Whether the score is above its threshold: the head has the role."""
        return self.score >= self.threshold

    @property
    def name(self) -> str:
        """`decoder 3.5`: stack, layer and head."""
        return f"{self.stack} {self.layer}.{self.head}"


@dataclass(frozen=True)
class RoleEffect:
    """What is lost without the best `heads` of a role together (`effect`), and without as many `random` heads, of the
    same layers where there are enough, one value for each of several different sets of them; in `HeadTable.unit`.  A
    small model may have one other set or none, with which nothing can be compared."""

    role: str
    heads: tuple[tuple[AttentionStack, int, int], ...]
    effect: float
    random: tuple[float, ...]

    @property
    def random_mean(self) -> float:
        return sum(self.random) / len(self.random) if self.random else math.nan

    @property
    def beyond_random(self) -> bool:
        """Whether more is lost without these heads than without every set of random ones, of which there are two."""
        return len(self.random) > 1 and self.effect > max(self.random)


@dataclass(frozen=True, eq=False)
class HeadTable(Displayed):
    """Every head of a model in every role.

    rows           all heads in all roles that were measured, in the order of the model.
    together       for each role with heads above their threshold, what is lost without its best.
    not_measured   roles that the texts or the model cannot show, with the reason.
    unit           of the effects: nats, or cosine distance for a model that predicts no tokens.
    """

    rows: tuple[HeadRole, ...]
    together: tuple[RoleEffect, ...]
    not_measured: dict[str, str]
    unit: str
    seed: int
    links: dict[str, int] = field(default_factory=dict)  #: pairs of words a role of links was measured on

    @property
    def roles(self) -> dict[str, list[HeadRole]]:
        """The heads above their threshold, by role, the highest score first."""
        found = {role: self.find(role) for role in dict.fromkeys(row.role for row in self.rows)}
        return {role: heads for role, heads in found.items() if heads}

    @checked
    def find(self, role: str) -> list[HeadRole]:
        """The heads that have a role, the highest score first.  Raises InputError for one that was not measured."""
        measured = dict.fromkeys(row.role for row in self.rows)
        if role not in measured:
            reason = self.not_measured.get(role, f"there is no such role{nearest(role, measured)}")
            raise InputError(f"the role {role!r} was not measured: {reason}")
        return sorted((row for row in self.rows if row.role == role and row.above), key=lambda row: -row.score)

    def of(self, stack: AttentionStack, layer: int, head: int) -> list[HeadRole]:
        """One head in all roles.  Raises InputError for a head that the model does not have."""
        if not (found := [row for row in self.rows if (row.stack, row.layer, row.head) == (stack, layer, head)]):
            raise InputError(f"no head {shown((stack, layer, head))}; {self.rows[0].name!r} is the first of the table")
        return found

    def main(self) -> dict[tuple[AttentionStack, int, int], HeadRole | None]:
        """For each head the role that names it: of those above their threshold the one with the highest score, local,
        long-range and diffuse only where there is no other; None where there is none."""
        mains: dict[tuple[AttentionStack, int, int], HeadRole | None] = {}
        for row in self.rows:
            at = (row.stack, row.layer, row.head)
            best = mains.setdefault(at, None)
            if row.above and (best is None or _names(row) > _names(best)):
                mains[at] = row
        return mains

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [asdict(row) | {"above": row.above} for row in self.rows]
        together = [asdict(one) | {"beyond_random": one.beyond_random} for one in self.together]
        return {
            "seed": self.seed, "unit": self.unit, "family_wise": FAMILY, "not_measured": self.not_measured,
            "together": plain(together), "heads": rows,
        }  # fmt: skip

    def __iter__(self) -> Iterator[HeadRole]:
        return iter(self.rows)

    def __repr__(self) -> str:
        heads = {(row.stack, row.layer, row.head) for row in self.rows}
        lines = [f"HeadTable of {len(heads)} heads; effects in {self.unit}, of random heads in brackets"]
        for role, best in self.roles.items():
            lines.append(f"  {role}: {len(best)} head{'s' * (len(best) != 1)}")
            lines += [f"    {_line(row)}" for row in best[:5]]
        if len(lines) == 1:
            lines.append("  no head is above its threshold in any role")
        return "\n".join(lines)


def _names(row: HeadRole) -> tuple[bool, float, int]:
    """The larger, the better the role names the head: equal scores go to the role that says more."""
    known = list(ROLES).index(row.role) if row.role in ROLES else -1
    return row.role not in GENERAL, round(row.score, 2), -known


def _line(row: HeadRole) -> str:
    where = f" at {row.offset:+d}" if row.offset else ""
    text = f"{row.name}{where}: {row.score:.2f}, threshold {row.threshold:.2f}"
    if row.effect is None:
        return text
    beside = "" if row.random_effect is None else f" ({row.random_effect:.3g})"
    return f"{text}, without it {row.effect:.3g}{beside}"


@checked
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
    progress = on_progress or (lambda stage: None)
    pairs: dict[str, Sequence[Link]] = {**LINKS, **_checked_links(links)}
    wanted = _checked_roles(roles, pairs)
    integer("ablate", ablate, 0)
    integer("seed", seed, 0)
    for name, ids in (("delimiters", delimiters), ("boundaries", boundaries)):
        if ids is not None:
            check_ids(ids, max(model.spec.vocab, model.spec.source_vocab), name)
    layers = attentions(model.spec)
    if not layers:
        raise InputError("no layer of this model has attention weights")
    if isinstance(texts, str):
        raise InputError("give a list of texts, not one string: [text]")
    if model.spec.layout == "encoder-decoder" and targets is None and (texts is not None or model.tokenizer):
        texts = list(TEXTS) if texts is None else texts
        targets = [written.ids for written in model.generate(texts, max_new_tokens=24)]
    samples = _samples(model, texts, targets, seed)
    own = () if links is None else tuple(links)
    linked = {role: pairs[role] for role in wanted if role in pairs}
    samples += linked_samples(linked, model.spec, model.tokenizer, strict=own)
    if not samples:
        raise InputError("there is no text to score heads on; give texts=, or use a model with a larger vocabulary")
    types = _types(model, samples, delimiters, boundaries)
    progress("reading the patterns")
    with torch.no_grad():
        scores = score_all(model, samples, wanted, types, seed)
        progress("ablating heads")
        effects, together = _ablated(model, samples, scores, len(wanted), ablate, seed, progress)
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
    for role, role_links in (links or {}).items():
        if role in SELF_ROLES or role in CROSS_ROLES:
            raise InputError(f"links={{{role!r}: ...}}: this is another role; choose a name of your own")
        if not isinstance(role_links, list | tuple) or not role_links:
            raise InputError(f"links[{role!r}] must be a list of (text, word that reads, word that is read)")
        for link in role_links:
            if not isinstance(link, list | tuple) or len(link) != 3:
                raise InputError(f"links[{role!r}]: {shown(link)} is no (text, word that reads, word that is read)")
    return links or {}


def _samples(model: ProbedModel, texts: Any, targets: Any, seed: int) -> list[HeadSample]:
    """The rows to read: texts, given or built in, and random tokens."""
    both = model.spec.layout == "encoder-decoder"
    if targets is not None and not both:
        raise InputError(f"targets are for encoder-decoders; this is a {model.spec.layout}")
    rows = model.ids(texts) if texts is not None else []
    longest = model.spec.longest_row if model.spec.encoder is None else model.spec.source_context
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
) -> dict[AttentionStack, dict[str, set[int]]]:
    """For each stack the token ids of the roles that read certain tokens."""
    given = {name: set(ids) for name, ids in (("delimiter", delimiters), ("boundary", boundaries)) if ids is not None}
    types: dict[AttentionStack, dict[str, set[int]]] = {}
    stacks: tuple[AttentionStack, ...] = ("encoder", "decoder", "cross")
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
    model: ProbedModel, samples: list[HeadSample], scores: dict[str, RoleScores], roles: int, ablate: int, seed: int,
    progress: Callable[[str], None],
) -> tuple[dict[tuple[str, HeadIndex], Effect], list[RoleEffect]]:  # fmt: skip
    """The effects of the best heads of each role, by role and head, and of all of them together.  Heads are above the
    threshold for as many roles as were requested, as the table shows it."""
    effects: dict[tuple[str, HeadIndex], Effect] = {}
    together: list[RoleEffect] = []
    for number, (role, role_scores) in enumerate(scores.items() if ablate else ()):
        score = torch.cat(role_scores.numbers, 1)[0]
        above = (score >= role_scores.above(roles)[0]).tolist()
        best = [role_scores.heads[i] for i in score.argsort(descending=True, stable=True).tolist() if above[i]]
        if not best:
            continue
        progress(f"ablating the heads of the role {role}")
        decodes = all(at.stack == "decoder" for at, _ in role_scores.heads)  # these predict the token that comes next
        ablation = Ablation.of(model, samples, role_scores.queries, role == "induction" and decodes)
        groups = [tuple(best[:TOGETHER]), *((head,) for head in best[:ablate])]
        others = [head for head, is_above in zip(role_scores.heads, above, strict=True) if not is_above]
        whole, *single = ablation.effects(groups, others, np.random.default_rng([seed, 2, number]))
        effects |= {(role, head): effect for head, effect in zip(best, single, strict=False)}
        cut = tuple((at.stack, at.layer, head) for at, head in groups[0])
        together.append(RoleEffect(role, cut, whole.lost, whole.random))
    return effects, together


def _rows(scores: RoleScores, roles: int, effects: dict[tuple[str, HeadIndex], Effect]) -> list[HeadRole]:
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
