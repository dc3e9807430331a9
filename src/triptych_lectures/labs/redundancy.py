"""How many heads can be taken out before the loss rises?  (Lecture L0 on heads: redundancy across heads; Michel et al.
2019, "Are Sixteen Heads Really Better than One?")

Heads of a pretrained decoder are taken out one after another, in the order of a score that other texts give them, in
the reverse order, and in random ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import InputError
from triptych.model import Model
from triptych.page import TableSection
from triptych.probe import Read, put
from triptych.probe.role_texts import TEXTS
from .lab import Check, Clauses, Findings, Lab, Setup, clause, size
from .pretrained import decoder
from .small_models import curve

SITES = "blocks.*.attn.z"
BY_SCORE, REVERSE = "least important first", "most important first"
Head = tuple[str, int]  # the site of its output, and its number there
Floats = tuple[float, ...]


class RedundancyLab(Lab):
    name = "redundancy"

    text: str = size(" | ".join(TEXTS[:3]), "texts on which heads are scored, separated by |")
    held_out: str = size(" | ".join(TEXTS[3:]), "texts on which the loss is measured, separated by |")
    shares: Floats = size(
        (0.025, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.6),
        "shares of the heads that are out when the loss is measured, ascending, below 1",
        full=(0.01, 0.025, 0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        most=0.999,
        ascending=True,
    )
    orders: int = size(2, "random orders, two or more", full=10, least=2)
    rise: float = size(0.1, "share of itself by which the loss may rise", most=1)

    def findings(self, setup: Setup) -> Findings:
        """Raises InputError for anything but a decoder with a tokenizer, and for a text without two tokens."""
        model = decoder(setup)
        if model.spec.layout != "decoder" or model.tokenizer is None:
            raise InputError("this lab takes out heads of a decoder with a tokenizer")
        scored, held_out = (_rows(model, name, getattr(self, name)) for name in ("text", "held_out"))
        setup.progress("scoring every head")
        heads = ScoredHeads(model, scored)
        counts = sorted({max(1, round(share * len(heads.order))) for share in self.shares})
        noise = np.random.default_rng(setup.seed)
        orders = {BY_SCORE: heads.order, REVERSE: heads.order[::-1]}
        for i in range(self.orders):
            orders[f"random order {i + 1}"] = [heads.order[j] for j in noise.permutation(len(heads.order))]
        whole, none = heads.loss(held_out, []), heads.loss(held_out, heads.order)
        losses = {}
        for name, order in orders.items():
            setup.progress(f"taking out heads, {name}")
            losses[name] = [whole, *(heads.loss(held_out, order[:count]) for count in counts), none]
        out = Removal((0, *counts, len(heads.order)), losses, self.rise)
        yield out.table()
        yield curve("Loss with heads taken out", "heads that are out", "nats a token", out.counts, losses)
        yield from self._conclusion(out)

    def _conclusion(self, out: Removal) -> Clauses:
        total, spared, last = out.counts[-1], out.spared(BY_SCORE), out.spared(REVERSE)
        random = [name for name in out.losses if name not in (BY_SCORE, REVERSE)]
        at_random = sorted(map(out.spared, random))
        rises = sorted(map(out.mean_rise, random))
        best, worst, without = out.mean_rise(BY_SCORE), out.mean_rise(REVERSE), out.risen(BY_SCORE, total)
        control = fmean(rises) or math.nan
        yield clause(
            f"Many heads are redundant: with the least important first, {spared} of {total} can go before the loss"
            f" on held-out text rises by more than {self.rise:.0%}.",
            Check(f"share of the heads that can go, {BY_SCORE}", spared / total, least=0.2),
            instead="Few heads can go",
        )
        yield clause(
            f"Some are needed: with the most important first, {last} can go, and without any head the loss rises by"
            f" {without:.0%}.",
            Check(f"share of the heads that can go, {REVERSE}", last / total, most=0.05),
            Check("rise of the loss without any head, as a share of it", without, least=0.5),
            instead="The heads with the highest score are not needed",
        )
        yield clause(
            f"It matters which ones go: with some out, not all, the loss rises by {best:.0%} on average, and by"
            f" {worst:.0%} in the reverse order. Control: in {len(random)} random orders, in which {_range(at_random)}"
            f" can go, it rises by {rises[0]:.0%} to {rises[-1]:.0%}.",
            Check("mean rise of the loss, by score over random", best / control, most=0.75),
            Check("mean rise of the loss, in the reverse order over random", worst / control, least=1.33),
            instead="A random order does about as well as the score, or as badly as its reverse",
        )


def _range(counts: Sequence[int]) -> str:
    """Ascending counts in words."""
    return f"{counts[0]} to {counts[-1]}" if counts[0] < counts[-1] else str(counts[0])


class Removal(NamedTuple):
    """The loss, in nats a token, with `counts` heads out in each order, and the share by which it may rise."""

    counts: Sequence[int]
    losses: dict[str, list[float]]
    rise: float

    def risen(self, order: str, count: int) -> float:
        """By what share of itself the loss has risen with so many heads out."""
        loss = self.losses[order]
        return loss[self.counts.index(count)] / loss[0] - 1

    def mean_rise(self, order: str) -> float:
        """The mean over all counts but none and all."""
        return fmean(self.risen(order, count) for count in self.counts[1:-1])

    def spared(self, order: str) -> int:
        """The largest count up to which the loss was measured to have risen by no more than it may."""
        spared = 0
        for count in self.counts[1:]:
            if not self.risen(order, count) <= self.rise:
                break
            spared = count
        return spared

    def table(self) -> TableSection:
        rows = [
            [
                str(count),
                *(f"{of[i]:.2f} ({round(self.risen(name, count), 2) + 0:+.0%})" for name, of in self.losses.items()),
            ]
            for i, count in enumerate(self.counts)
        ]
        return TableSection("Loss on held-out text, nats a token", ("heads out", *self.losses), rows)


class ScoredHeads:
    """The heads of a model: their mean outputs over some texts, and their `order` by a score, the lowest first."""

    def __init__(self, model: Model, rows: list[list[int]]) -> None:
        self.model = model
        trace = model.trace(rows, read=[Read(SITES, grad=True), Read("logits", grad=True)])
        names = [name for name in trace if name != "logits"]
        outputs = {name: list(trace[name]) for name in names}  # of each row [T, H, K]
        flat = [output for name in names for output in outputs[name]]
        slopes = iter(torch.autograd.grad(_nats(trace["logits"], rows), flat))
        self.means = {name: torch.cat(outputs[name]).detach().mean(0) for name in names}  # [H, K]
        scores: dict[Head, float] = {}
        for name in names:
            moved = [((self.means[name] - z.detach()) * next(slopes)).sum((0, 2)).abs() for z in outputs[name]]
            scores |= {(name, head): float(score) for head, score in enumerate(torch.stack(moved).mean(0))}
        self.order = sorted(scores, key=lambda head: scores[head])

    def loss(self, rows: list[list[int]], out: Sequence[Head]) -> float:
        """Nats a token of these rows without the heads `out`."""
        by_site: dict[str, list[int]] = {}
        for site, head in out:
            by_site.setdefault(site, []).append(head)
        edits = [put(site, self.means[site][heads], heads=heads) for site, heads in by_site.items()]
        return float(_nats(self.model.trace(rows, edit=edits).logits, rows))


def _nats(logits: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """The mean loss of all tokens but the first of each row."""
    following = torch.tensor([token for ids in rows for token in ids[1:]])
    return F.cross_entropy(torch.cat([of[:-1] for of in logits]), following)


def _rows(model: Model, name: str, texts: str) -> list[list[int]]:
    """The tokens of the texts that are the size `name`."""
    split = [text.strip() for text in texts.split("|")]
    rows = model.ids(split)
    for text, ids in zip(split, rows, strict=True):
        if len(ids) < 2:
            raise InputError(f"size {name}: {text!r} has {len(ids)} tokens; each text needs two or more")
    return rows
