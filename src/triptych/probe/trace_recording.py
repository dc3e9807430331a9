"""Records the values that pass the sites a plan reads, and fills the trace with them when it is asked for.

A site with one read that takes everything as it is (`Plan.kept_as_passed`) is only noted, since no forward writes to
a tensor that passed a site; other reads choose and reduce at once, as what they leave out need not stay in memory.

Scores and patterns, which a fused kernel does not keep, are computed beside it from the same queries and keys: only
chosen heads and queries, some queries at a time, straight into what the trace keeps.  Whole ones of a full forward are
computed when somebody looks at them, where the queries and keys that they are made of take less memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from triptych.attention import (
    ContentBias,
    FlatKeys,
    RowPlan,
    Rows,
    RowScores,
    attention_statistics,
    pattern_statistics,
)
from triptych.attention.mechanisms import DOT_PRODUCT
from triptych.attention.row_scores import ScorePiece
from triptych.native.huge_pages import HugePages
from triptych.program.native_reads import StepReads
from .reads_and_edits import Edit, Plan, Read, select
from .sites import MATRIX_SITES, matrix
from .trace import Trace
from .trace_values import Computation, Computations, DeferredPiece, How, Statistics, reduced

HELD = 1 << 22  # numbers that native steps leave before they are taken, where not all of them stay: 16 MiB


@dataclass(eq=False, slots=True)
class Notes:
    """What passed one site, in order: values or how to compute them, the rows of their batch, and what these are kept
    under.  A generation notes so many values that a tuple for each would keep Python's garbage collector busy."""

    values: list[Tensor | Computation] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    keys: list[Sequence[int] | None] = field(default_factory=list)

    def add(self, value: Tensor | Computation, rows: Rows, keys: Sequence[int] | None) -> None:
        self.values.append(value)
        self.rows.append(rows)
        self.keys.append(keys)

    def take(self) -> list[tuple[Tensor | Computation, Rows, Sequence[int] | None]]:
        """All of it, once."""
        taken = [*zip(self.values, self.rows, self.keys, strict=True)]
        for kept in (self.values, self.rows, self.keys):
            kept.clear()
        return taken


class PassedValues:
    """The notes of one run.  `steps` is where native steps leave the values of their sites."""

    def __init__(self, plan: Plan) -> None:
        pages = HugePages(reused=True)  # a step that writes to new pages of the usual size takes 8% longer
        self.plan, self.steps = plan, StepReads(plan.of_steps, lambda n: pages.take(4 * n).view(torch.float32))
        self.all_plain = set(plan.of_steps) <= plan.kept_as_passed
        self.noted: dict[str, Notes] = {}
        self.noted_last = False  # whether modules ran since native steps did
        self.computations = Computations()
        self.shared: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor of a forward -> the parts of it that are kept

    def notes_of(self, name: str, trace: Trace) -> Notes:
        """The notes of the values of a site."""
        trace.reserve(name)
        return self.noted.setdefault(name, Notes())

    def note(self, notes: Notes, value: Tensor, rows: Rows) -> None:
        """Note a value as it passes in one full forward: how it is computed where all that this takes is noted."""
        notes.add(value if value.is_inference() else self.computations.kept_as(value, rows), rows, None)

    def begin_step(self, slots: Sequence[int], keys: Sequence[int], trace: Trace) -> StepReads | None:
        """Where the next native step leaves what is read of rows, kept under `keys`; None where it is nothing."""
        if not self.steps.sites:
            return None
        all_stays = self.all_plain and self.steps.in_stored_dtype  # the trace keeps all that is left, where it is
        if self.noted_last or (self.steps.unread_numbers > HELD and not all_stays):
            self.fill(trace)
        if not self.steps.calls:
            for name in self.steps.sites:
                trace.reserve(name)
        self.steps.begin(slots, keys)
        return self.steps

    def begin_forward(self, trace: Trace) -> None:
        """Modules run next."""
        if self.steps.calls:
            self.fill(trace)
        self.noted_last = True

    def fired(self, trace: Trace) -> set[str]:
        """The sites at which something was read."""
        if not self.all_plain:
            self.fill(trace)
        kept = {name.partition(":")[0] for name in trace.filled()}
        left = self.steps.sites if self.steps.calls else ()
        return {*kept, *left, *(name for name, notes in self.noted.items() if notes.values)}

    def fill(self, trace: Trace, only: Collection[int] | None = None) -> None:
        """Records of everything that was noted, in the order in which it passed, or of what these keys had alone."""
        self.noted_last = False
        for name, notes in self.noted.items():
            for value, rows, keys in notes.take():
                if isinstance(value, Computation):
                    for row in range(len(rows)):
                        at = tuple(positions_of(rows, row, rows.lengths[row]))
                        trace.keep_later(name, row, at, value.row(row, rows))
                    continue
                for row, part in enumerate(split(value.detach(), rows)):
                    key = row if keys is None else keys[row]
                    if only is None or key in only:
                        trace.keep(name, key, tuple(positions_of(rows, row, len(part))), part)
        for left in self.steps.take(only):
            if left.site in self.plan.kept_as_passed:
                value = left.value if self.all_plain else left.value.clone()
                trace.keep(left.site, left.key, left.positions, value)
                continue
            for read in self.plan.reads[left.site]:
                self.record(trace, left.site, read, left.value, left.key, left.positions, None)

    def record(
        self, trace: Trace, name: str, read: Read, value: Tensor, key: int, positions: Sequence[int],
        source: Tensor | None, *, more: bool = False,
    ) -> None:  # fmt: skip
        """Keep what a read chooses of one row's value under `key`; the value is part of `source` or of something that
        does not last.  `more` is that of `Trace.keep`."""
        item = trace.branches.item(key)
        index = index_of(name, read, value, item, positions)
        if index is None:
            return
        if len(index[0]) > 1 and read.adds_up and key in trace.branches.guessed:  # what is dropped again stays apart
            for n, i in enumerate(index[0]):
                one = value.narrow(1 if matrix(name) else 0, i, 1)
                self.record(trace, name, read, one, key, positions[i : i + 1], None, more=n > 0)
            return
        at = tuple(positions[i] for i in index[0])
        if isinstance(read.reduce, Statistics):  # of a pattern that is there, since it was edited
            part = value[index[1]].detach()
            labels = read.reduce.labels(item, at, part.shape[2], part.device)
            where = torch.tensor(at, device=part.device)
            trace.keep_statistics(name, key, at, pattern_statistics(part, where, top=read.reduce.top, labels=labels))
            return
        how: How = "mean" if read.reduce == "mean" else "queries" if matrix(name) else "tokens"
        known: dict[str, Tensor] = {}
        if source is not None and how != "mean":
            known = self.shared.setdefault(source, known)
        kept_as = repr((key, read.items, read.at, read.heads, read.dtype, read.reduce))
        if kept_as not in known:
            known[kept_as] = _part(name, read, value, index[1], source)
        trace.keep(name, key, at, known[kept_as], how, read.dtype if how == "mean" else None, more=more)


def _part(name: str, read: Read, value: Tensor, places: tuple[Tensor | slice, ...], source: Tensor | None) -> Tensor:
    """The part of a value that is kept: a view of its source where all of that is, and a copy otherwise."""
    part = value[places].detach()
    if isinstance(read.reduce, str):
        part = reduced(part, read.reduce, name)
    if isinstance(read.dtype, torch.dtype) and read.reduce != "mean":
        part = part.to(read.dtype)
    view = part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return part.clone() if view and (source is None or read.items is not None) else part


def split(value: Tensor, rows: Rows) -> Sequence[Tensor]:
    """Rows of the flat batch; a head that gives one vector a row (classes, pooling) has one position each."""
    if value.shape[0] != rows.total:
        parts: Sequence[Tensor] = value.split(1)
        return parts
    if len(rows) == 1:
        return (value,)
    return rows.split(value)


def positions_of(rows: Rows, row: int, length: int) -> range:
    past = rows.past[row]
    return range(past, past + length)


def index_of(
    name: str, chosen: Read | Edit, value: Tensor, item: int, positions: Sequence[int]
) -> tuple[list[int], tuple[Tensor | slice, ...]] | None:
    """Which of `positions` a read or an edit selects, and the index of these and its heads in `[t, H, ...]` or
    `[H, t, S]`: slices, and so views, where it selects all.  None where it selects nothing of this row."""
    if not select(chosen.items, [item]):
        return None
    places, heads = select(chosen.at, positions), [0]
    if chosen.heads is not None:
        heads = select(chosen.heads, range(value.shape[0 if matrix(name) else 1]))
    if not places or not heads:
        return None
    if chosen.at is None and chosen.heads is None:
        return places, (slice(None),)
    t = torch.tensor(places, device=value.device)
    if chosen.heads is None:
        return places, (slice(None), t) if matrix(name) else (t,)
    h = torch.tensor(heads, device=value.device)
    return places, (h[:, None], t[None, :]) if matrix(name) else (t[:, None], h[None, :])


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
            selection = chosen[0]
            queries = None if selection.at is None else select(selection.at, positions)
            heads = None if selection.heads is None else select(selection.heads, range(layer.q.shape[1]))
            if not select(selection.items, [item]) or queries == [] or heads == []:
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

    @torch.no_grad()
    def make() -> Tensor:
        (buffer,) = _filled(RowScores(layer.plan, row, q, k), [read])
        return buffer.out

    sized = _RowBuffer(read, RowScores(layer.plan, row, q, k))
    later = DeferredPiece(make, math.prod(sized.shape) * sized.dtype.itemsize)
    trace.keep_later(read.site, key, positions, later, "queries")


def _read_row(scores: RowScores, reads: list[Read], trace: Trace, key: int, at: tuple[int, ...]) -> None:
    for read in reads:
        if isinstance(read.reduce, Statistics):
            labels = read.reduce.labels(trace.branches.item(key), at, scores.shape[2], scores.q.device)
            trace.keep_statistics(read.site, key, at, attention_statistics(scores, top=read.reduce.top, labels=labels))
    for buffer in _filled(scores, [read for read in reads if not isinstance(read.reduce, Statistics)]):
        read, mean = buffer.read, buffer.read.reduce == "mean"
        trace.keep(read.site, key, at, buffer.out, "mean" if mean else "queries", read.dtype if mean else None)


class _RowBuffer:
    """What one read keeps of one row, filled piece by piece: `[h, t, S]`, with 1 in the place of what is averaged."""

    def __init__(self, read: Read, scores: RowScores) -> None:
        heads, queries, keys = scores.shape
        self.read, self.heads, self.pattern = read, heads, read.site.endswith("pattern")
        self.shape = (1 if read.reduce == "mean_heads" else heads, 1 if read.reduce == "mean" else queries, keys)
        self.dtype = read.dtype if isinstance(read.dtype, torch.dtype) and read.reduce is None else scores.precision
        self.tensor: Tensor | None = None

    @property
    def out(self) -> Tensor:
        assert self.tensor is not None
        summed = self.read.reduce == "mean"  # which the trace divides before it takes the dtype
        return (
            self.tensor if summed or not isinstance(self.read.dtype, torch.dtype) else self.tensor.to(self.read.dtype)
        )

    def add(self, piece: ScorePiece, value: Tensor) -> None:
        """[h, n, s] of one piece; a piece that is everything is kept itself."""
        if self.read.reduce is None and value.shape == self.shape and value.dtype == self.dtype:
            self.tensor = value
            return
        if self.tensor is None:
            self.tensor = value.new_full(self.shape, 0.0 if self.pattern else -torch.inf, dtype=self.dtype)
        if self.read.reduce is None:
            self.tensor[piece.heads, piece.queries, piece.columns] = value
        elif self.read.reduce == "mean":
            self.tensor[piece.heads, :, piece.columns] += value.sum(1, keepdim=True)
        else:
            self.tensor[:, piece.queries, piece.columns] += value.sum(0, keepdim=True) / self.heads


def _filled(scores: RowScores, reads: list[Read]) -> list[_RowBuffer]:
    """What some reads keep of one row."""
    buffers = [_RowBuffer(read, scores) for read in reads]
    patterns = any(buffer.pattern for buffer in buffers)
    for piece in scores.pieces() if buffers else ():
        weights = piece.weights() if patterns else piece.scores
        for buffer in buffers:
            buffer.add(piece, weights if buffer.pattern else piece.scores)
    return buffers
