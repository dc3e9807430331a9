"""The rows that a step trains on: a pure function of (seed, epoch, step), so that stopping and batching change nothing.

A *draw* gives the rows of one optimizer step.  Micro-batches are slices of it, so that 8 micro-batches of 1 row train
on what 1 batch of 8 rows trains on.  Random numbers come from Philox, a counter-based generator, keyed by the seed,
their use, and a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from triptych.arguments import integer
from triptych.errors import InputError
from .objectives import Example, Ids, Integers, TokenIds, TokenMasking, causal, seq2seq

T = TypeVar("T")
Piece = tuple[Ids, ...]  # parallel arrays, such as tokens and their targets


class RandomUse(IntEnum):
    """The uses of random numbers: each use has a sequence of its own."""

    OFFSETS = 1
    ORDER = 2
    HIDING = 3
    DROPOUT = 4
    HELD_OUT = 5
    PIECES = 6
    SPLIT = 7
    CORRUPTION = 8


def random_numbers(seed: int, use: RandomUse, counter: int) -> np.random.Generator:
    """The generator for one use at one point (`counter`) of a run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, use], dtype=np.uint64), counter=[0, 0, 0, counter]))


@runtime_checkable
class Data(Protocol):
    """Rows for training or evaluation."""

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        """The rows of step `step`, counted from 0.  The same arguments give the same rows, in any order of calls."""
        ...

    def held_out_rows(self) -> Iterator[Example]:
        """Every token once, in order, as evaluation takes them; the same rows in every call."""
        ...

    def targets(self) -> Ids:
        """Every token that can be a target, for checks before the run and for baselines."""
        ...


@runtime_checkable
class RowsByNumber(Protocol):
    """Data of which a step can draw some rows without the others."""

    def draw_some(self, seed: int, first: int, stop: int) -> list[Example]:
        """The rows numbered `[first, stop)`, counted from 0 over all steps."""
        ...


def rows_of_rank(data: Data, seed: int, step: int, rows: int, rank: int, ranks: int) -> list[Example]:
    """The rows of step `step` for process `rank` of `ranks`: those of all ranks, one after the other, are
    `data.draw(seed, step, rows)` for any number of ranks.  Some may have none.

    Rows from shards are read by their own rank alone; of data in memory each rank draws all and takes its own.
    """
    ranks, rank = integer("ranks", ranks, 1), integer("rank", rank, 0)
    if rank >= ranks:
        raise InputError(f"rank={rank} must be below ranks={ranks}")
    if isinstance(data, RowsByNumber):
        first, stop = (step * rows + i * rows // ranks for i in (rank, rank + 1))
        return data.draw_some(seed, first, stop)
    every = data.draw(seed, step, rows)
    return every[rank * len(every) // ranks : (rank + 1) * len(every) // ranks]


@dataclass(frozen=True, eq=False)
class DocumentStream:
    """Documents end to end in parallel arrays (token ids, say, and their targets), and where each document ends.

    A window is cut where a document ends, and each piece is a row of its own, so that attention never crosses
    documents; a flat batch needs no padding for such rows.
    """

    arrays: Piece
    ends: Integers  # [documents], cumulative

    @staticmethod
    def of(documents: Sequence[Piece]) -> DocumentStream:
        """From documents, each a tuple of equally many parallel arrays."""
        ends = np.cumsum([len(document[0]) for document in documents], dtype=np.int64)
        return DocumentStream(tuple(np.concatenate(column) for column in zip(*documents, strict=True)), ends)

    def __len__(self) -> int:
        return len(self.arrays[0])

    def cut(self, start: int, length: int) -> list[Piece]:
        """The pieces of `[start, start + length)`, cut where a document ends."""
        stop = min(start + length, len(self))
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        edges = [start, *self.ends[first:last].tolist(), stop]
        return [tuple(a[i:j] for a in self.arrays) for i, j in pairwise(edges)]

    def draw(self, seed: int, step: int, rows: int, length: int) -> list[Piece]:
        """The pieces of `rows` windows of `length` tokens (the whole stream, if it is shorter) at random offsets."""
        offsets = max(1, len(self) - length + 1)
        starts = random_numbers(seed, RandomUse.OFFSETS, step).integers(offsets, size=rows)
        return [piece for start in starts for piece in self.cut(int(start), length)]

    def windows(self, length: int) -> Iterator[Piece]:
        """The whole stream once, in pieces of at most `length`."""
        for start in range(0, len(self), length):
            yield from self.cut(start, length)


@dataclass(frozen=True, eq=False)
class Windows:
    """Rows of `length` tokens from documents that follow one another, special tokens not counted; where the documents
    have fewer in all, a row is all of them.  Pieces of fewer than `shortest` tokens make no row."""

    stream: DocumentStream
    length: int
    use: ClassVar[RandomUse] = RandomUse.HIDING
    shortest: ClassVar[int] = 1

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        pieces = self.stream.draw(seed, step, rows, self.length)
        return list(self.rows_of(pieces, random_numbers(seed, self.use, step)))

    def held_out_rows(self) -> Iterator[Example]:
        return self.rows_of(self.stream.windows(self.length), random_numbers(0, RandomUse.HELD_OUT, 0))

    def rows_of(self, pieces: Iterable[Piece], random: np.random.Generator) -> Iterator[Example]:
        """The rows of pieces of documents, for which `random` draws what is hidden."""
        return (self.row(piece, random) for piece in pieces if len(piece[0]) >= self.shortest)

    def row(self, piece: Piece, random: np.random.Generator) -> Example:
        """The row of a piece of each array; `random` are the numbers of the step."""
        raise NotImplementedError

    def targets(self) -> Ids:
        return self.stream.arrays[-1]


@dataclass(frozen=True, eq=False)
class CausalText(Windows):
    """Windows of documents, each token predicted from those before it in its window."""

    @staticmethod
    def of(documents: Sequence[TokenIds], length: int) -> CausalText:
        """From documents as token ids, begin and end tokens included."""
        examples = [causal(document) for document in documents if len(document) > 1] or [causal(documents[0])]
        return CausalText(DocumentStream.of([(e.ids, e.targets) for e in examples]), length)

    def row(self, piece: Piece, random: np.random.Generator) -> Example:
        ids, targets = piece
        return Example(ids, targets, np.ones(len(ids), dtype=bool))


@dataclass(frozen=True, eq=False)
class MaskedText(Windows):
    """Windows of documents between the tokens `before` and `after`, some hidden.

    In training other tokens are hidden each time a window is drawn; in `held_out_rows` always the same, by the mask.
    """

    masking: TokenMasking
    before: Ids
    after: Ids

    @staticmethod
    def of(
        documents: Sequence[TokenIds],
        length: int,
        masking: TokenMasking,
        before: Sequence[int],
        after: Sequence[int],
    ) -> MaskedText:
        """From documents as token ids without begin and end tokens; a row has at most `length` tokens in all."""
        stream = DocumentStream.of([(np.asarray(document, dtype=np.int32),) for document in documents])
        frame = [np.asarray(side, dtype=np.int32) for side in (before, after)]
        return MaskedText(stream, length - len(before) - len(after), masking, *frame)

    def held_out_rows(self) -> Iterator[Example]:
        return super(MaskedText, replace(self, masking=self.masking.all_masked())).held_out_rows()

    def row(self, piece: Piece, random: np.random.Generator) -> Example:
        return self.masking(np.concatenate([self.before, *piece, self.after]), random)

    def targets(self) -> Ids:
        tokens = self.stream.arrays[0]
        return tokens[~np.isin(tokens, np.array(sorted(self.masking.special), dtype=np.int32))]


@dataclass(frozen=True, eq=False)
class EpochRows:
    """Rows of any kind, every one once an epoch, in a new order each epoch."""

    examples: tuple[Example, ...]

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return in_epochs(self.examples, seed, step, rows)

    def held_out_rows(self) -> Iterator[Example]:
        return iter(self.examples)

    def targets(self) -> Ids:
        return np.concatenate([example.targets for example in self.examples])


@dataclass(frozen=True, eq=False)
class HiddenWords(EpochRows):
    """Rows whose decoder reads the token `hidden` in place of a share `rate` of the tokens before each target, its
    start token never, others each time a row is drawn (Bowman et al. 2016).  Targets and `held_out_rows` stay.

    A decoder that is sure of the words so far learns what follows them before it learns to use its encoder.
    """

    hidden: int
    rate: float

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        random = random_numbers(seed, RandomUse.HIDING, step)

        def with_hidden(example: Example) -> Example:
            hide = random.random(len(example.ids)) < self.rate
            hide[0] = False
            return replace(example, ids=np.where(hide, self.hidden, example.ids).astype(np.int32))

        return list(map(with_hidden, super().draw(seed, step, rows)))


def with_hidden_words(data: EpochRows, rate: float, unknown: int | None) -> EpochRows:
    """The rows, in training with a share `rate` of what the decoder reads replaced by the token `unknown`.

    Raises InputError where there is no such token.
    """
    if not rate:
        return data
    if unknown is None:
        raise InputError(
            "objective.hidden puts the unknown token in place of words, and the tokenizer has none; leave it out"
        )
    return HiddenWords(data.examples, unknown, rate)


class Pairs(EpochRows):
    """Source and target rows, every pair once an epoch, in a new order each epoch."""

    @staticmethod
    def of(pairs: Sequence[tuple[TokenIds, TokenIds]], start: int, length: int) -> Pairs:
        """From pairs as token ids, EOS included.  Raises InputError if a side is longer than `length`, for cutting it
        would remove its EOS."""
        if over := [longest for pair in pairs if (longest := max(map(len, pair))) > length]:
            raise InputError(
                f"{len(over)} of {len(pairs)} pairs are longer than run.length = {length} tokens, the longest "
                f"{max(over)}; raise run.length, or leave them out with data.drop_longer = true"
            )
        return Pairs(tuple(seq2seq(source, target, start) for source, target in pairs))


def in_epochs(items: Sequence[T], seed: int, step: int, rows: int) -> list[T]:
    """The items of step `step`: each item once an epoch, in a new order each epoch."""
    count, first = len(items), step * rows
    drawn: list[T] = []
    while len(drawn) < rows:
        epoch, index = divmod(first + len(drawn), count)
        order = _order(seed, epoch, count)
        drawn += [items[i] for i in order[index : index + rows - len(drawn)]]
    return drawn


@lru_cache(maxsize=2)  # every step of an epoch needs it, and two epochs meet in one step
def _order(seed: int, epoch: int, count: int) -> Integers:
    """The numbers of `count` items in the order of an epoch."""
    order = random_numbers(seed, RandomUse.ORDER, epoch).permutation(count)
    order.flags.writeable = False
    return order


def groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in order, `size` in each group but the last."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def micro_batches(examples: Sequence[T], parts: int) -> list[Sequence[T]]:
    """The rows of a step in `parts` slices of nearly equal numbers of rows, at most one for each row."""
    parts = min(parts, max(1, len(examples)))
    edges = [round(i * len(examples) / parts) for i in range(parts + 1)]
    return [examples[i:j] for i, j in pairwise(edges) if j > i]


def check(data: Data, end: int | None, ends: bool) -> None:
    """Refuse, before the first step, data from which the objective cannot learn.

    Raises InputError when no token is trained, or when rows end with the id `end` (`ends`) and it is never trained, so
    that generation would never stop.
    """
    targets = data.targets()
    if not len(targets):
        raise InputError("the data has no token to train on; check the path and the objective")
    if ends and end is None:
        raise InputError("the tokenizer has no EOS token, so nothing trained on these rows could end a text")
    if ends and not (targets == end).any():
        raise InputError(f"EOS (id {end}) is never trained, so generation would never stop; end each row with it")
