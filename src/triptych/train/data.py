"""Which rows a step trains on: a pure function of (seed, epoch, step), so that stopping and batching change nothing.

A *draw* gives the rows of one optimizer step.  Micro-batches are slices of it, so accumulating 8 of 1 row sees what 1
of 8 rows sees.  Random numbers come from Philox, a counter-based generator, keyed by the seed, what they are for, and
a counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from triptych.errors import InputError
from triptych.train.objectives import Example, Hide, Ids, causal, seq2seq


class Use(IntEnum):
    """What random numbers are for, so that no two uses share a stream."""

    OFFSETS = 1
    ORDER = 2
    HIDING = 3
    DROPOUT = 4
    HELD_OUT = 5
    PIECES = 6


def stream(seed: int, use: Use, counter: int) -> np.random.Generator:
    """The random numbers of one use at one point of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, use], dtype=np.uint64), counter=[0, 0, 0, counter]))


@runtime_checkable
class Data(Protocol):
    """Rows to train or to evaluate on."""

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        """The rows of step `step`, counted from 0: the same for the same arguments, whatever was drawn before."""
        ...

    def held(self) -> Iterator[Example]:
        """Every token once, in order, the same rows every time."""
        ...

    def targets(self) -> Ids:
        """Every token that can be trained, for preflight checks and baselines."""
        ...


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents end to end in parallel arrays (ids, and what is predicted from each), and where each document ends.

    A piece of a document is a row of its own, so no token ever sees another document: a flat batch packs for nothing.
    """

    arrays: tuple[Ids, ...]
    ends: Ids  # [documents], cumulative

    @staticmethod
    def of(documents: Sequence[tuple[Ids, ...]]) -> Stream:
        """From documents given as equally many parallel arrays each."""
        ends = np.cumsum([len(document[0]) for document in documents]).astype(np.int32)
        return Stream(tuple(np.concatenate(column) for column in zip(*documents, strict=True)), ends)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def cut(self, start: int, length: int) -> list[tuple[Ids, ...]]:
        """The pieces of `[start, start + length)`, divided where a document ends."""
        stop = min(start + length, len(self))
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        edges = [start, *self.ends[first:last].tolist(), stop]
        return [tuple(a[i:j] for a in self.arrays) for i, j in pairwise(edges)]

    def draw(self, seed: int, step: int, rows: int, length: int) -> list[list[tuple[Ids, ...]]]:
        """`rows` windows of `length` tokens (all there are, if fewer) from random places."""
        places = max(1, len(self) - length + 1)
        starts = stream(seed, Use.OFFSETS, step).integers(places, size=rows)
        return [self.cut(int(start), length) for start in starts]

    def windows(self, length: int) -> Iterator[tuple[Ids, ...]]:
        """The whole stream once, in pieces of at most `length`."""
        for start in range(0, len(self), length):
            yield from self.cut(start, length)


@dataclass(frozen=True, eq=False)
class CausalText:
    """Windows of `length` tokens from documents, each token predicted from those before it in its window."""

    shifted: Stream
    length: int

    @staticmethod
    def of(documents: Sequence[Sequence[int] | Ids], length: int) -> CausalText:
        """Documents as token ids, begin and end tokens included."""
        examples = [causal(document) for document in documents]
        return CausalText(Stream.of([(e.ids, e.targets) for e in examples]), length)

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        windows = self.shifted.draw(seed, step, rows, self.length)
        return [_all_trained(*piece) for window in windows for piece in window]

    def held(self) -> Iterator[Example]:
        return (_all_trained(*piece) for piece in self.shifted.windows(self.length))

    def targets(self) -> Ids:
        return self.shifted.arrays[1]


@dataclass(frozen=True, eq=False)
class MaskedText:
    """Windows of documents, framed by `before` and `after` to at most `length` tokens, some of them hidden.

    In training each visit of a window hides other tokens; in `held` they are always the same ones, all masked.
    """

    plain: Stream
    length: int
    hide: Hide
    before: Ids
    after: Ids

    @staticmethod
    def of(
        documents: Sequence[Sequence[int] | Ids], length: int, hide: Hide, before: Sequence[int], after: Sequence[int]
    ) -> MaskedText:
        """Documents as token ids without any frame."""
        plain = Stream.of([(np.asarray(document, dtype=np.int32),) for document in documents])
        frame = (np.asarray(side, dtype=np.int32) for side in (before, after))
        return MaskedText(plain, length, hide, *frame)

    @property
    def inner(self) -> int:
        return self.length - len(self.before) - len(self.after)

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        random = stream(seed, Use.HIDING, step)
        windows = self.plain.draw(seed, step, rows, self.inner)
        return [self.hide(self._framed(piece), random) for window in windows for (piece,) in window]

    def held(self) -> Iterator[Example]:
        random, hide = stream(0, Use.HELD_OUT, 0), self.hide.all_masked()
        return (hide(self._framed(piece), random) for (piece,) in self.plain.windows(self.inner))

    def targets(self) -> Ids:
        tokens = self.plain.arrays[0]
        return tokens[~np.isin(tokens, np.array(sorted(self.hide.special), dtype=np.int32))]

    def _framed(self, piece: Ids) -> Ids:
        return np.concatenate([self.before, piece, self.after])


@dataclass(frozen=True, eq=False)
class Pairs:
    """Source and target rows, every pair once an epoch in an order of the epoch's own."""

    examples: tuple[Example, ...]

    @staticmethod
    def of(pairs: Sequence[tuple[Sequence[int] | Ids, Sequence[int] | Ids]], start: int, length: int) -> Pairs:
        """Pairs as token ids, ends included.  Raises InputError if a side is longer than `length`: cutting it would
        cut off its EOS."""
        longest = max((max(len(source), len(target)) for source, target in pairs), default=0)
        if longest > length:
            over = sum(max(len(source), len(target)) > length for source, target in pairs)
            raise InputError(
                f"{over} of {len(pairs)} pairs are longer than run.length = {length} tokens, one has {longest}; "
                "raise run.length, or leave them out with data.drop_longer = true"
            )
        return Pairs(tuple(seq2seq(source, target, start) for source, target in pairs))

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        count, at = len(self.examples), step * rows
        found: list[Example] = []
        while len(found) < rows:
            epoch, place = divmod(at + len(found), count)
            order = stream(seed, Use.ORDER, epoch).permutation(count)
            found += [self.examples[i] for i in order[place : place + rows - len(found)]]
        return found

    def held(self) -> Iterator[Example]:
        return iter(self.examples)

    def targets(self) -> Ids:
        return np.concatenate([example.targets for example in self.examples])


def micro_batches(examples: Sequence[Example], parts: int) -> list[Sequence[Example]]:
    """The rows of a step in `parts` slices of nearly equal numbers of rows."""
    edges = [round(i * len(examples) / parts) for i in range(parts + 1)]
    return [examples[i:j] for i, j in pairwise(edges) if j > i]


def check(data: Data, end: int | None, ends: bool) -> None:
    """Refuse data from which the objective cannot learn, before the first step.

    Raises InputError when no token is trained, or when rows have an end (`ends`) and its id is never trained, so that
    generation would never stop.
    """
    targets = data.targets()
    if not len(targets):
        raise InputError("the data has no token to train on; check the path and the objective")
    if ends and end is None:
        raise InputError("the tokenizer has no EOS token, so nothing trained on these rows could end a text")
    if ends and not (targets == end).any():
        raise InputError(f"EOS (id {end}) is never trained, so generation would never stop; end each row with it")


def _all_trained(ids: Ids, targets: Ids) -> Example:
    return Example(ids, targets, np.ones(len(ids), dtype=bool))
