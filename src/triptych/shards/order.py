"""Which rows a training step has: a function of (seed, number of the row), without a stored order.

The documents of a set follow one another as P positions, at each of which one token is read.  Rows have L positions,
and `pack` neighbouring rows are a group: G = P // (pack L) groups, whose place in the circle of all positions is
shifted by a random number in each epoch.  The documents in a group are packed into its rows by best fit
(`packing.pack`), so that few are cut, and what stands in a row follows from the group alone.

Row number i is in epoch i // (G pack).  An epoch has `pack` passes; each goes through all groups in an order of its own
and takes one row of each, so that rows of a step come from places far apart, and every row comes once an epoch.  The
order is a permutation of [0, G) by a Feistel network with cycle walking (Black & Rogaway 2002), computed and not
stored.  So a row takes a few binary searches and the ends of the documents of its group, at any number of tokens.
P mod (pack L) positions, fewer than one group, are left out of an epoch, others in each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from triptych.arguments import integer, number
from triptych.errors import ConfigError, shown
from .packing import Cut, pack
from .shard_set import Ids, ShardSet

_MASK = (1 << 64) - 1
_ROUNDS = 4
_KEPT = 64  # packed groups, for data that have few
BLOCK = 4096  # rows in which every part of a mixture has its share exactly


def _scrambled(value: int) -> int:
    """64 bits, each of which depends on all of `value` (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mixed(*numbers: int) -> int:
    """64 bits that follow from the numbers, each of which changes all of them."""
    state = 0
    for value in numbers:
        state = _scrambled((state + value + 0x9E3779B97F4A7C15) & _MASK)
    return state


@lru_cache(256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mixed(key, turn) for turn in range(_ROUNDS))


def permuted(index: int, size: int, key: int) -> int:
    """The place of `index` in a permutation of `[0, size)` that `key` chooses."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low, keys = (1 << half) - 1, _round_keys(key)
    while True:
        left, right = index >> half, index & low
        for of_round in keys:
            left, right = right, left ^ (_scrambled((right + of_round) & _MASK) & low)
        index = left << half | right
        if index < size:  # the network permutes [0, 4^half), of which at least a quarter is below `size`
            return index


@dataclass(frozen=True)
class Frame:
    """What stands around each document, and whether each token is read to predict the next one, so that the last of a
    document is not read."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    shifted: bool = False

    @property
    def extra(self) -> int:
        """Positions of a document beyond its tokens."""
        return len(self.before) + len(self.after) - int(self.shifted)


class DocumentCut(NamedTuple):
    """Positions `[first, last)` of a document in its frame."""

    shard: int
    document: int  # of the shard
    first: int
    last: int


class Positions:
    """The positions of all documents of a set, each in its `frame`."""

    def __init__(self, shards: ShardSet, frame: Frame) -> None:
        self.shards, self.frame = shards, frame
        entries = shards.manifest.shards
        self._ends = list(accumulate(one.tokens + frame.extra * one.documents for one in entries))

    def __len__(self) -> int:
        return self._ends[-1]

    def cut(self, start: int, stop: int) -> list[DocumentCut]:
        """`[start, stop)`, cut where documents end."""
        return [DocumentCut(*one) for one in self._cut(start, stop)]

    def _cut(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """The same as plain tuples, which are made faster."""
        cuts: list[tuple[int, int, int, int]] = []
        extra = self.frame.extra
        while start < stop:
            shard = bisect_right(self._ends, start)
            base = self._ends[shard - 1] if shard else 0
            ends = self.shards.arrays(shard).ends
            at, until = start - base, min(stop, self._ends[shard]) - base

            def end_of(document: int) -> int:
                return int(ends[document]) + extra * (document + 1)  # noqa: B023 - called in this turn only

            first = bisect_right(range(len(ends)), at, key=end_of)
            last = bisect_left(range(first, len(ends)), until, key=end_of) + first
            begin = end_of(first - 1) if first else 0
            for document, end in enumerate(ends[first : last + 1].tolist(), first):
                end += extra * (document + 1)
                if end > begin:  # a single token without others has no position
                    cuts.append((shard, document, at - begin if at > begin else 0, min(until, end) - begin))
                begin = end
            start = base + until
        return cuts

    def read(self, cut: DocumentCut) -> tuple[Ids, ...]:
        """The ids at the positions, and where the frame is shifted those that follow them."""
        before, after = self.frame.before, self.frame.after
        first, last, shift = cut.first, cut.last + int(self.frame.shifted), len(before)
        body = self.shards.document_of(cut.shard, cut.document, first - shift, last - shift)
        head, tail = before[first:last], self._tail(cut, first, last) if after else ()
        ids = np.concatenate([np.array(head, np.int32), body, np.array(tail, np.int32)]) if head or tail else body
        return (ids[:-1], ids[1:]) if self.frame.shifted else (ids,)

    def _tail(self, cut: DocumentCut, first: int, last: int) -> tuple[int, ...]:
        """What of `frame.after` stands at `[first, last)` of a document in its frame."""
        ends = self.shards.arrays(cut.shard).ends
        begin = int(ends[cut.document - 1]) if cut.document else 0
        over = len(self.frame.before) + int(ends[cut.document]) - begin
        return self.frame.after[max(0, first - over) : max(0, last - over)]


class RowOrder:
    """The order of the rows of `length` of the first `stop` positions (all of them when None), of which `pack`
    neighbouring ones are packed together."""

    def __init__(self, positions: Positions, length: int, pack: int, stop: int | None = None) -> None:
        self.positions = positions
        self.stop = min(len(positions), integer("stop", len(positions) if stop is None else stop, 1))
        self.length = min(integer("length", length, 1), self.stop)
        self.pack = max(1, min(integer("pack", pack, 1), self.stop // self.length))
        self.groups = self.stop // (self.pack * self.length)
        self._packed = lru_cache(_KEPT)(self._pack)

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self.groups * self.pack

    def row(self, seed: int, number: int) -> list[DocumentCut]:
        """What stands in the row `number`, counted from 0 over all epochs."""
        epoch, place = divmod(integer("number", number, 0), self.rows)
        turn, place = divmod(place, self.groups)
        group = permuted(place, self.groups, mixed(seed, 1, epoch, turn))
        shift = mixed(seed, 2, epoch) % self.stop
        of_group = (turn + mixed(seed, 3, epoch, group)) % self.pack
        cuts, packed = self._packed((shift + group * self.pack * self.length) % self.stop)
        row = []
        for item, start, stop in packed[of_group]:
            shard, document, first, _ = cuts[item]
            row.append(DocumentCut(shard, document, first + start, first + stop))
        return row

    def _pack(self, start: int) -> tuple[list[tuple[int, int, int, int]], list[list[Cut]]]:
        """The documents in the group that begins at `start`, and its rows of pieces of them."""
        stop = start + self.pack * self.length
        cuts = self.positions._cut(start, min(stop, self.stop)) + self.positions._cut(0, stop - self.stop)
        return cuts, pack([last - first for _, _, first, last in cuts], self.pack, self.length)


class Mixture:
    """Rows of several orders, of which each has its share of `weights` in every `BLOCK` rows, rounded to one of them.

    Raises ConfigError for a weight of so small a share that it would never come.
    """

    def __init__(self, orders: Mapping[str, RowOrder], weights: Mapping[str, float]) -> None:
        if not 0 < len(orders) <= BLOCK:
            raise ConfigError(f"a mixture has {len(orders):,} parts; give 1 to {BLOCK:,}")
        self.orders = list(orders.values())
        for name in orders:
            number(f"weight of {shown(name)}", weights.get(name), 0.0, math.inf, "of at least 0")
        total = sum(weights[name] for name in orders)
        if not total:
            raise ConfigError("the weights of a mixture are all 0; give one that is more")
        exact = [BLOCK * weights[name] / total for name in orders]
        counts = [int(share) for share in exact]
        for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: BLOCK - sum(counts)]:
            counts[i] += 1
        for name, count in zip(orders, counts, strict=True):
            if not count:
                raise ConfigError(
                    f"the weight of {shown(name)} is less than 1/{BLOCK:,} of all; leave it out or raise it"
                )
        self.counts: Sequence[int] = counts
        self._schedule = lru_cache(4)(self._draw)

    def row(self, seed: int, number: int) -> tuple[int, list[DocumentCut]]:
        """Which of the orders the row `number` is of, and what stands in it."""
        if len(self.orders) == 1:
            return 0, self.orders[0].row(seed, number)
        block, place = divmod(number, BLOCK)
        of, before = self._schedule(seed, block)
        which = int(of[place])
        return which, self.orders[which].row(mixed(seed, 4, which), block * self.counts[which] + int(before[place]))

    def _draw(self, seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each row of a block, which order it is of, and how many rows of that order precede it in the block."""
        of = np.repeat(np.arange(len(self.counts)), self.counts)
        random = np.random.Generator(np.random.Philox(key=np.array([mixed(seed, 5), block], dtype=np.uint64)))
        of = random.permutation(of)
        before = np.zeros(BLOCK, dtype=np.int64)
        for which, count in enumerate(self.counts):
            before[of == which] = np.arange(count)
        return of, before
