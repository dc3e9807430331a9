"""What is in a directory of shards, for people: documents, their lengths, and those that come more than once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from triptych.arguments import checked
from .shard_set import ShardSet

_AT_ONCE = 1 << 22  # hashes that are sorted in one pass
REPEATED = 3  # documents that come most often, of which the number is given


@dataclass(frozen=True)
class Contents:
    """Of the documents with a token: how many, their tokens, the shortest and the longest; `lengths` counts those of
    `[2^k, 2^(k+1))` tokens by k.  `duplicates` are those with the tokens of an earlier one, and `repeated` the number
    of the first of the commonest, and how often each comes."""

    documents: int
    tokens: int
    shortest: int
    longest: int
    lengths: dict[int, int]
    duplicates: int
    repeated: list[tuple[int, int]]

    @property
    def mean(self) -> float:
        """Tokens of a document on average."""
        return self.tokens / self.documents


@checked
def contents(shards: ShardSet) -> Contents:
    """Read the ends and the hashes of all documents, and no token.

    The memory does not grow with their number: hashes are sorted in passes, each of which takes a share of them.
    """
    shortest, longest, lengths = shards.tokens, 0, Counter[int]()
    for number in range(len(shards.manifest.shards)):
        ends = shards.arrays(number).ends.astype(np.int64)
        sizes = np.diff(ends, prepend=0)
        if len(sizes):
            shortest, longest = min(shortest, int(sizes.min())), max(longest, int(sizes.max()))
        powers, counts = np.unique(np.frexp(sizes)[1] - 1, return_counts=True)
        lengths.update(dict(zip(powers.tolist(), counts.tolist(), strict=True)))
    duplicates, commonest = _repeated(shards)
    firsts = _first_with(shards, [value for value, _ in commonest])
    repeated = [(firsts[value], count) for value, count in commonest]
    return Contents(
        shards.documents, shards.tokens, shortest, longest, dict(sorted(lengths.items())), duplicates, repeated
    )


def _repeated(shards: ShardSet) -> tuple[int, list[tuple[int, int]]]:
    """How many documents have the hash of an earlier one, and the commonest hashes with their numbers."""
    passes = -(-shards.documents // _AT_ONCE)
    duplicates, commonest = 0, list[tuple[int, int]]()
    for turn in range(passes):
        mine = []
        for number in range(len(shards.manifest.shards)):
            hashes = shards.arrays(number).hashes
            mine.append(hashes[hashes % np.uint64(passes) == turn])
        values, counts = np.unique(np.concatenate(mine), return_counts=True)
        duplicates += int((counts - 1).sum())
        top = np.argsort(-counts, kind="stable")[:REPEATED]
        found = [(int(values[i]), int(counts[i])) for i in top if counts[i] > 1]
        commonest = sorted([*commonest, *found], key=lambda pair: -pair[1])[:REPEATED]
    return duplicates, commonest


def _first_with(shards: ShardSet, values: list[int]) -> dict[int, int]:
    """The number of the first document with each hash."""
    firsts: dict[int, int] = {}
    for number in range(len(shards.manifest.shards)):
        hashes = shards.arrays(number).hashes
        before = shards.document_ends[number - 1] if number else 0
        for value in values:
            if value not in firsts and len(at := np.flatnonzero(hashes == np.uint64(value))):
                firsts[value] = before + int(at[0])
        if len(firsts) == len(values):
            break
    return firsts
