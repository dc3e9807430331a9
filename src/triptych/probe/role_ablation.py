"""The loss of a model's output without certain heads, beside as many random heads of the same layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych.spec import LMHeadSpec, MaskedLMHeadSpec, ModelSpec
from .prompts import ProbedModel
from .reads_and_edits import Edit, Where, zero
from .role_scores import HeadIndex, HeadLayer, trace_samples
from .role_texts import HeadSample

TOKENS = 640  # of all rows that run at once
RANDOM = 4  # draws of random heads for several heads together, and half of that for one head
ROWS = 2  # samples on which an ablation is measured; of links, of which each has a query or two, five times as many


class Effect(NamedTuple):
    """What was lost without some heads, and without each of several other sets of as many, of the same layers where
    there are enough: fewer sets where there are no more."""

    lost: float
    random: tuple[float, ...]

    @property
    def random_mean(self) -> float | None:
        return sum(self.random) / len(self.random) if self.random else None


def unit(spec: ModelSpec) -> str:
    """What an effect is measured in: see `Ablation`."""
    return "nats" if isinstance(spec.head, LMHeadSpec | MaskedLMHeadSpec) else "cosine distance"


@dataclass(frozen=True, eq=False)
class Ablation:
    """Ablations measured at the queries of one role.

    A model that predicts tokens loses KL(whole || ablated) in nats, mean over the queries; at `copied` queries, after
    which the text says a token again, what the logarithm of that token's probability loses.  Another model loses
    1 - cosine of its last vectors.  In an encoder beside a decoder, all outputs of the decoder count.

    With `hidden` keys a head is not removed: only the positions `at` cannot see these keys.
    """

    model: ProbedModel
    samples: list[HeadSample]
    queries: list[list[int]]
    copied: bool
    hidden: list[int] | None = None
    at: list[int] | None = None

    @staticmethod
    def of(
        model: ProbedModel, samples: list[HeadSample], queries: dict[str, dict[int, list[int]]], copied: bool
    ) -> Ablation:
        by_row: dict[int, set[int]] = {}
        for stack, rows in queries.items():
            for r, positions in rows.items():
                whole = stack == "encoder" and model.spec.layout == "encoder-decoder"
                by_row.setdefault(r, set()).update(range(len(samples[r].target or ())) if whole else positions)
        limit = ROWS * 5 if by_row and all(samples[r].kind == "linked" for r in by_row) else ROWS
        chosen = sorted(by_row)[:limit]
        return Ablation(model, [samples[r] for r in chosen], [sorted(by_row[r]) for r in chosen], copied)

    def effects(
        self, groups: Sequence[tuple[HeadIndex, ...]], others: Sequence[HeadIndex], noise: np.random.Generator
    ) -> list[Effect]:
        """Each group beside draws of as many `others`, of the same layers where there are enough."""
        sets = [_distinct_sets(group, [one for one in others if one not in group], noise) for group in groups]
        head_sets = [one for group, drawn in zip(groups, sets, strict=True) for one in (group, *drawn)]
        variants = list(dict.fromkeys([(), *head_sets]))  # the first is the whole model
        lost = dict(zip(variants, self._lost(variants), strict=True))
        return [Effect(lost[group], tuple(lost[one] for one in own)) for group, own in zip(groups, sets, strict=True)]

    def _lost(self, variants: list[tuple[HeadIndex, ...]]) -> list[float]:
        """For each variant what is lost without its heads; the first is the whole model."""
        whole: list[Tensor] = []
        every: list[float] = []
        size = sum(len(sample.ids) + len(sample.target or ()) for sample in self.samples)
        at_once = max(1, TOKENS // size)
        for start in range(0, len(variants), at_once):
            for outputs in self._outputs(variants[start : start + at_once]):
                whole = whole or outputs
                losses = [self._loss(*row) for row in zip(self.samples, self.queries, whole, outputs, strict=True)]
                every.append(float(torch.cat(losses).mean()))
        return every

    def _outputs(self, variants: Sequence[tuple[HeadIndex, ...]]) -> list[list[Tensor]]:
        """For each variant the output of each sample at its queries: log-probabilities or vectors."""
        n = len(self.samples)
        edits = [
            self._edit(attention, list(range(i * n, (i + 1) * n)), [head for at, head in heads if at == attention])
            for i, heads in enumerate(variants) for attention in dict.fromkeys(attention for attention, _ in heads)
        ]  # fmt: skip
        predicts = unit(self.model.spec) == "nats"
        last = "final" if self.samples[0].target is None else "decoder.final"
        trace = trace_samples(self.model, self.samples * len(variants), [] if predicts else [last], edits)
        values = trace.logits if predicts else trace[last]
        every = [value[self.queries[i % n]].float() for i, value in enumerate(values)]
        every = [value.log_softmax(-1) for value in every] if predicts else every
        return [every[i : i + n] for i in range(0, len(every), n)]

    def _edit(self, attention: HeadLayer, items: list[int], heads: list[int]) -> Edit:
        """Without the heads, or with the hidden keys out of their sight, in these rows."""
        if self.hidden is None:
            return zero(f"{attention.name}.z", items=items, heads=heads)
        keys = torch.tensor(self.hidden)

        def hide(scores: Tensor, where: Where) -> Tensor:
            return scores.index_fill(-1, keys.to(scores.device), -torch.inf)

        return Edit(f"{attention.name}.scores", hide, items=items, at=self.at, heads=heads)

    def _loss(self, sample: HeadSample, queries: list[int], whole: Tensor, ablated: Tensor) -> Tensor:
        """`[t]`: what is lost at each query."""
        if unit(self.model.spec) != "nats":
            return 1 - torch.cosine_similarity(whole, ablated, dim=-1)
        if self.copied:
            follows = torch.tensor([sample.decoded[t + 1] for t in queries], device=whole.device)[:, None]
            return (whole - ablated).gather(1, follows)[:, 0]
        return (whole.exp() * (whole - ablated)).sum(-1)


def _distinct_sets(
    group: tuple[HeadIndex, ...], others: Sequence[HeadIndex], noise: np.random.Generator
) -> list[tuple[HeadIndex, ...]]:
    """Different sets of as many of the `others` as `group` has: `RANDOM` for several heads, half of that for one, and
    fewer where so many are not found."""
    count = RANDOM if len(group) > 1 else RANDOM // 2
    drawn = [_matched(group, others, noise) for _ in range(count)]
    more = np.random.default_rng(0)  # further draws leave those of the next group as they are
    while len(set(drawn)) < count and len(drawn) < 8 * count:
        drawn.append(_matched(group, others, more))
    return [one for one in dict.fromkeys(drawn) if len(one) == len(group)]


def _matched(
    group: Sequence[HeadIndex], others: Sequence[HeadIndex], noise: np.random.Generator
) -> tuple[HeadIndex, ...]:
    """As many random heads as `group` has in each layer; from the nearest layers where a layer has too few."""
    drawn: list[HeadIndex] = []
    for attention, _ in group:
        free = [one for one in others if one not in drawn and one[0].stack == attention.stack]
        if not free:
            break
        nearest = min(abs(one[0].layer - attention.layer) for one in free)
        near = [one for one in free if abs(one[0].layer - attention.layer) == nearest]
        drawn.append(near[int(noise.integers(len(near)))])
    return tuple(sorted(drawn, key=lambda head: (head[0].name, head[1])))
