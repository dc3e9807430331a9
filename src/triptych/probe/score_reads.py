"""Reads of scores and patterns, which a fused kernel does not keep: computed beside it from the same queries and keys.

Only chosen heads and queries are computed, some queries at a time, straight into what the trace keeps.  Whole scores
and patterns of a full forward are computed when somebody looks at them, where the queries and keys that they are made
of take less memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.attention import ContentBias, FlatKeys, RowPlan, RowScores, attention_statistics
from triptych.attention.mechanisms import DOT_PRODUCT
from triptych.attention.row_scores import ScorePiece
from triptych.probe.reads_and_edits import Read, select
from triptych.probe.records import Later
from triptych.probe.reductions import Statistics
from triptych.probe.sites import MATRIX_SITES
from triptych.probe.trace import Trace


@dataclass(frozen=True, eq=False)
class Attended:
    """What one layer attends with: the arguments of `RowPlan.run`, without the values."""

    plan: RowPlan
    q: Tensor
    k: Tensor
    sinks: Tensor | None
    content: ContentBias | None

    def lasts(self, row: int) -> bool:
        """Whether the scores of a row may be computed later: from queries and keys alone, which no forward writes to
        and which take less memory than the scores."""
        plain = self.plan.mechanism is DOT_PRODUCT and self.plan.bias is None
        if not plain or self.content is not None or self.sinks is not None or not isinstance(self.plan.keys, FlatKeys):
            return False
        queries, keys = self.plan.rows.lengths[row], self.plan.keys.rows.lengths[row]
        return queries * keys > (queries + keys) * self.q.shape[-1]


@torch.no_grad()
def read_scores(layer: Attended, prefix: str, reads: dict[str, list[Read]], trace: Trace, keys: list[int]) -> None:
    """Keep in `trace` what `reads` want of the scores and pattern under `prefix`; each row under one of `keys`."""
    together: dict[str, list[Read]] = {}  # reads of one choice of heads and queries come from the same scores
    for leaf in MATRIX_SITES:
        for read in reads.get(prefix + leaf, ()):
            together.setdefault(repr((read.items, read.at, read.heads)), []).append(read)
    rows = layer.plan.rows
    for row, key in enumerate(keys):
        positions, item = range(rows.past[row], rows.ends[row]), trace.branches.item(key)
        for chosen in together.values():
            one = chosen[0]
            queries = None if one.at is None else select(one.at, positions)
            heads = None if one.heads is None else select(one.heads, range(layer.q.shape[1]))
            if not select(one.items, [item]) or queries == [] or heads == []:
                continue
            if queries is heads is None and layer.lasts(row):
                for read in [read for read in chosen if read.reduce is None]:
                    _keep_later(layer, row, read, trace, key, tuple(positions))
                chosen = [read for read in chosen if read.reduce is not None]
            parts = [queries] if chosen else []
            if key in trace.branches.guessed and any(read.adds_up for read in chosen):  # what is dropped stays apart
                parts = [[i] for i in (range(len(positions)) if queries is None else queries)]
            for part in parts:
                scores = RowScores(layer.plan, row, layer.q, layer.k, layer.sinks, layer.content, heads, part)
                at = tuple(positions if part is None else [positions[i] for i in part])
                _read_row(scores, chosen, trace, key, at)


def _keep_later(layer: Attended, row: int, read: Read, trace: Trace, key: int, positions: tuple[int, ...]) -> None:
    """What a read wants of one row's scores or pattern, all of it, when somebody looks at it."""
    q, k = layer.q.detach(), layer.k.detach()

    def room() -> _Room:
        return _Room(read, RowScores(layer.plan, row, q, k))

    @torch.no_grad()
    def make() -> Tensor:
        made = room()
        for piece in made.scores.pieces():
            made.add(piece, made.scores.weights(piece) if made.pattern else piece.scores)
        return made.out

    sized = room()
    nbytes = math.prod(sized.shape) * sized.dtype.itemsize
    trace.keep_later(read.site, key, positions, Later(make, nbytes), "queries")


def _read_row(scores: RowScores, reads: list[Read], trace: Trace, key: int, at: tuple[int, ...]) -> None:
    item = trace.branches.item(key)
    rooms = [_Room(read, scores) for read in reads if not isinstance(read.reduce, Statistics)]
    for read in reads:
        if isinstance(read.reduce, Statistics):
            labels = read.reduce.labels(item, at, scores.shape[2], scores.q.device)
            trace.keep_statistics(read.site, key, at, attention_statistics(scores, top=read.reduce.top, labels=labels))
    if not rooms:
        return
    patterns = any(room.pattern for room in rooms)
    for piece in scores.pieces():
        weights = scores.weights(piece) if patterns else None
        for room in rooms:
            room.add(piece, weights if room.pattern and weights is not None else piece.scores)
    for room in rooms:
        of_mean = room.read.reduce == "mean"
        trace.keep(
            room.read.site, key, at, room.out, "mean" if of_mean else "queries", room.read.dtype if of_mean else None
        )


class _Room:
    """What one read keeps of one row, filled piece by piece: `[h, t, S]`, with 1 in the place of what is averaged."""

    def __init__(self, read: Read, scores: RowScores) -> None:
        heads, queries, keys = scores.shape
        self.read, self.scores, self.heads, self.pattern = read, scores, heads, read.site.endswith("pattern")
        self.shape = (1 if read.reduce == "mean_heads" else heads, 1 if read.reduce == "mean" else queries, keys)
        self.dtype = read.dtype if isinstance(read.dtype, torch.dtype) and read.reduce is None else scores.precision
        self.device = scores.q.device
        self.made: Tensor | None = None

    @property
    def out(self) -> Tensor:
        made = self._made()
        keep = self.read.reduce == "mean"  # a sum, which the trace divides before it takes the dtype
        return made.to(self.read.dtype) if isinstance(self.read.dtype, torch.dtype) and not keep else made

    def _made(self) -> Tensor:
        if self.made is None:
            fill = 0.0 if self.pattern else -torch.inf
            self.made = torch.full(self.shape, fill, dtype=self.dtype, device=self.device)
        return self.made

    def add(self, piece: ScorePiece, value: Tensor) -> None:
        """[h, n, s] of one piece; a piece that is everything is kept itself."""
        if self.read.reduce is None and value.shape == self.shape and value.dtype == self.dtype:
            self.made = value
            return
        made = self._made()
        if self.read.reduce is None:
            made[piece.heads, piece.queries, piece.columns] = value
        elif self.read.reduce == "mean":
            made[piece.heads, :, piece.columns] += value.sum(1, keepdim=True)
        else:
            made[:, piece.queries, piece.columns] += value.sum(0, keepdim=True) / self.heads
