"""The heads that link two words of a text: every head ranked by its weight from the one to the other, beside a null."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.arguments import checked
from triptych.errors import InputError
from .prompts import ProbedModel, name_tokens
from .reads_and_edits import Read
from .role_ablation import Ablation, unit
from .role_scores import (
    FAMILY,
    FLOOR,
    AttentionStack,
    HeadIndex,
    HeadLayer,
    attentions,
    by_chance,
    mean_weight,
    trace_samples,
)
from .role_texts import TEXTS, HeadSample, Word, ordinary_ids, place, words_of

DRAWS = 120  # texts with another word in the place of each of the two: one of them is below 1%
TOKENS = 1024  # of rows that are read at once
LONGEST = 256  # tokens of the text
SPREAD = 0.2  # least standard deviation of a null: else heads that read neither word stand far out by a few percent
ABLATED, TOGETHER = 6, 12  # best heads whose link is cut, one by one and together
UNPROVEN = 4  # heads whose link is cut where none is above its threshold


@dataclass(frozen=True)
class LinkScore:
    """The link in one head.

    weight     on all tokens of the word that is read, mean over those of the word that reads (Clark et al. 2019).
    null       the mean weight between the same places with another word in either: the larger of the two.
    z, p       the smaller distance from those in their standard deviations, and the probability that any head comes as
               far by chance.
    effect     what is lost at the word that reads when this head cannot see the other; `random_effect`, when random
               heads of its layer cannot.  None where it was not measured.
    """

    stack: AttentionStack
    layer: int
    head: int
    weight: float
    null: float
    threshold: float
    z: float
    p: float
    effect: float | None = None
    random_effect: float | None = None

    @property
    def above(self) -> bool:
        """Whether this head links the two words, and not just their places or one of them with any word."""
        return self.weight >= self.threshold and self.p <= FAMILY

    @property
    def name(self) -> str:
        return f"{self.stack} {self.layer}.{self.head}"


@dataclass(frozen=True, eq=False)
class LinkTable:
    """All heads by how far their weight between two words is above the null, the farthest first.

    `effect` is what is lost when the best heads together cannot see the link, `random` in draws of as many random heads
    of the same layers.  The best are those above their threshold, or the first four where there are none.
    """

    query: str
    key: str
    tokens: tuple[str, ...]  #: of the row that is read, with `places` of both words
    places: tuple[tuple[int, ...], tuple[int, ...]]
    rows: tuple[LinkScore, ...]
    effect: float
    random: tuple[float, ...]
    unit: str
    draws: int

    @property
    def above(self) -> list[LinkScore]:
        """The heads that link the words."""
        return [row for row in self.rows if row.above]

    @property
    def beyond_random(self) -> bool:
        """Whether more is lost without the link in these heads than in every set of random ones, of which there are
        two."""
        return len(self.random) > 1 and self.effect > max(self.random)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [asdict(row) | {"above": row.above} for row in self.rows]
        return {
            "query": self.query, "key": self.key, "tokens": list(self.tokens),
            "places": [list(places) for places in self.places], "draws": self.draws, "family_wise": FAMILY,
            "unit": self.unit, "effect": self.effect, "random": list(self.random), "heads": rows,
        }  # fmt: skip

    def __repr__(self) -> str:
        lines = [f"LinkTable from {self.query!r} to {self.key!r}: {len(self.above)} of {len(self.rows)} heads"]
        lines += [f"  {row.name}: {row.weight:.2f}, null {row.null:.2f}, z {row.z:.1f}" for row in self.rows[:8]]
        return "\n".join(lines)


@checked
def link(
    model: ProbedModel,
    text: str | Sequence[int],
    query: Word,
    key: Word,
    target: str | Sequence[int] | None = None,
    *,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> LinkTable:
    """All heads ranked by the weight that the word `query` gives the word `key` in `text`.

    A weight is compared with those in the same text with other words in the place of `key`, and in that of `query` (two
    null distributions): a head links the words where it is above both.  With a `target`, for encoder-decoders, `query`
    is a word of the target and cross-attention is ranked.  A word that occurs more than once is written `bank@2`.

    Raises InputError for a word that the text does not contain, or contains several times and without `@`, and for a
    key that the query cannot see.
    """
    model.check_words("link")
    progress = on_progress or (lambda stage: None)
    both = model.spec.layout == "encoder-decoder"
    if target is not None and not both:
        raise InputError(f"a target is for encoder-decoders; this is a {model.spec.layout}")
    sample, places = _located(model, text, query, key, target)
    stack: AttentionStack = (
        "cross" if target is not None else "encoder" if model.spec.layout != "decoder" else "decoder"
    )
    layers = [one for one in attentions(model.spec) if one.stack == stack]
    if not layers:
        raise InputError("no layer that links these words has attention weights")
    every: list[HeadIndex] = [(one, head) for one in layers for head in range(one.heads)]
    noise = np.random.default_rng([seed, 3])
    progress(f"reading the text with {2 * DRAWS} other words")
    with torch.no_grad():
        whole = _weights(model, layers, [sample], places)
        null = []
        for at, in_target in ((places[1], False), (places[0], target is not None)):
            others = _others(model, sample, at, in_target, noise)
            null.append(_weights(model, layers, others, places))
        progress("cutting the link")
        rows, best = _scored(every, whole[0], null)
        measured = [0] if both and target is None else places[0]  # the decoder's start, where the link is the encoder's
        ablation = Ablation(model, [sample], [measured], copied=False, hidden=places[1], at=places[0])
        groups = [tuple(every[i] for i in best[:TOGETHER]), *((every[i],) for i in best[:ABLATED])]
        others_of = [head for i, head in enumerate(every) if i not in best]
        together, *single = ablation.effects(groups, others_of, np.random.default_rng([seed, 4]))
    for i, one in zip(best, single, strict=False):
        rows[i] = replace(rows[i], effect=one.lost, random_effect=one.random_mean)
    rows.sort(key=lambda row: (not row.above, -row.z))
    names = name_tokens(model, _row(sample, target is not None))
    return LinkTable(
        str(query), str(key), tuple(names), (tuple(places[0]), tuple(places[1])), tuple(rows),
        together.lost, together.random, unit(model.spec), DRAWS,
    )  # fmt: skip


def _located(
    model: ProbedModel, text: str | Sequence[int], query: Word, key: Word, target: str | Sequence[int] | None
) -> tuple[HeadSample, tuple[list[int], list[int]]]:
    """The row, and the token places of both words; the one that reads stands in the target where there is one."""
    ids, words = words_of(text, model.tokenizer)
    model.ids([ids])  # checks them
    start = [model.spec.ids.start or 0]
    output = None if model.spec.layout != "encoder-decoder" else start
    query_words = words
    if target is not None:
        row, query_words = words_of(target, model.tokenizer)
        output = [*start, *row]
        query_words = [(word, [at + 1 for at in places]) for word, places in query_words]
    places = place(query, query_words), place(key, words)
    if target is None and places[0] == places[1]:
        raise InputError(f"{query!r} and {key!r} are the same place of the text; give two words")
    if model.spec.layout == "decoder":
        if min(places[0]) <= max(places[1]):
            raise InputError(
                f"{query!r} does not stand after {key!r}, and a decoder reads only what came before; the word that "
                f"reads comes first, so write {key}:{query}"
            )
        ids = ids[: max(places[0]) + 1]  # what follows is not seen by either
    if max(len(ids), len(output or ())) > LONGEST:
        raise InputError(f"the text has {len(ids)} tokens and a link is measured in at most {LONGEST}; give a sentence")
    return HeadSample(ids, output, "text"), places


def _row(sample: HeadSample, in_target: bool) -> list[int]:
    return (sample.target or []) if in_target else sample.ids


def _others(
    model: ProbedModel, sample: HeadSample, at: list[int], in_target: bool, noise: np.random.Generator
) -> list[HeadSample]:
    """The row with words that it does not have in one place: of the built-in texts; without a tokenizer any ids."""
    n, present = len(at), {*sample.ids, *(sample.target or ())}
    pool: list[list[int]] = []
    if model.tokenizer is not None:
        for text in TEXTS:
            ids, words = words_of(text, model.tokenizer)
            pool += [[ids[i] for i in tokens] for word, tokens in words if word.isalpha() and len(tokens) == n]
    distinct = sorted({tuple(word) for word in pool if not present & set(word)})
    if len(distinct) < 24:
        ordinary = [i for i in ordinary_ids(model.spec, model.tokenizer) if i not in present]
        drawn = [noise.choice(ordinary, n).tolist() for _ in range(DRAWS)]
    else:
        drawn = [distinct[i] for i in noise.integers(len(distinct), size=DRAWS)]
    samples = []
    for word in drawn:
        row = list(_row(sample, in_target))
        for i, token in zip(at, word, strict=True):
            row[i] = token
        samples.append(replace(sample, target=row) if in_target else replace(sample, ids=row))
    return samples


def _weights(
    model: ProbedModel, layers: list[HeadLayer], samples: list[HeadSample], places: tuple[list[int], list[int]]
) -> Tensor:
    """`[samples, heads of all layers]`: the weight between the places."""
    every = []
    at_once = max(1, TOKENS // len(samples[0].ids))
    read = [Read(f"{one.name}.pattern", at=places[0]) for one in layers]
    for start in range(0, len(samples), at_once):
        trace = trace_samples(model, samples[start : start + at_once], read)
        columns = []
        for one in read:
            patterns = trace[one.site]  # all of one shape
            reads = torch.zeros(patterns[0].shape[1:], dtype=torch.bool, device=patterns[0].device)
            reads[:, places[1]] = True
            columns.append(torch.stack([mean_weight(pattern, reads) for pattern in patterns]).float().cpu())
        every.append(torch.cat(columns, 1))
    return torch.cat(every)


def _scored(heads: list[HeadIndex], weight: Tensor, null: list[Tensor]) -> tuple[list[LinkScore], list[int]]:
    """Each head's link, and the numbers of the heads whose link is cut, the farthest from the null first."""
    found = []
    for draws in null:
        mean, spread = draws.mean(0), draws.std(0).clamp_min(SPREAD)
        z = (weight - mean) / spread
        p, bound = by_chance(((draws - mean) / spread).amax(1), z)
        found.append((mean, torch.maximum(mean + bound * spread, mean + FLOOR * (1 - mean)), p, -z))
    mean, limit, p, near = (torch.maximum(*both) for both in zip(*found, strict=True))
    numbers = torch.stack([weight, mean, limit, -near, p]).T.tolist()
    rows = [LinkScore(at.stack, at.layer, head, *own) for (at, head), own in zip(heads, numbers, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: -rows[i].z)
    return rows, [i for i in order if rows[i].above] or order[:UNPROVEN]
