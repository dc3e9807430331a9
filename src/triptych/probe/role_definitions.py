"""The definition of each role of a head: the keys that its queries read, and random keys for its null distribution.

A role's score is linear in a head's pattern: the mean, over the queries that the role has, of the weight on its keys.
So a role is a sparse row over the places (sample, query, key), and its null distribution are more such rows, in which
other keys stand in place of the role's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .role_texts import HeadSample

DRAWS = 1600  # random rows a role: with 16 roles, 1% of them all
FARTHEST = 8  # offset that is searched
NEAR, FAR = 4, 16  # places: `local` is at most the one, `long-range` at least the other
QUERIES = 160  # of a role whose null is drawn; more are thinned
DISTANT = 64  # the same of `local` and `long-range`, which have many keys a query
HALF = 0.5  # of the weight that even attention leaves, where chance is coarse: of few places, or of near ones
MOST = 0.75  # the same where random weights come far: one token of few types, and far places with learned positions
ENOUGH = 1600  # sets of other types that a null must choose from

Ints = NDArray[np.int64]
Entry = tuple[Ints | int, Ints, float]  # rows of a matrix (or one for all), places, and the weight of each


@dataclass(frozen=True, eq=False)
class View:
    """What the heads of one kind read: for each sample its queries, its keys, and which of them each query sees."""

    stack: Literal["encoder", "decoder", "cross"]
    samples: list[HeadSample]
    queries: list[list[int]]
    keys: list[list[int]]
    visible: list[NDArray[np.bool_]]

    @cached_property
    def widths(self) -> Ints:
        return np.array([len(keys) for keys in self.keys])

    @cached_property
    def starts(self) -> Ints:
        """Where the pattern of each sample, `[T, S]` row by row, begins among the places."""
        return np.cumsum([0, *self.widths * [len(queries) for queries in self.queries]])

    @cached_property
    def even(self) -> Tensor:
        """`[places]`: the weights of a head that reads all visible keys alike."""
        every = [(mask / np.maximum(mask.sum(1, keepdims=True), 1)).ravel() for mask in self.visible]
        return torch.from_numpy(np.concatenate(every).astype(np.float32))

    def places(self, sample: Ints | int, t: Ints | int, s: Ints | int) -> Ints:
        """Where the weights of these samples, queries and keys stand."""
        return np.asarray(self.starts[sample] + t * self.widths[sample] + s, dtype=np.int64)

    def of_kind(self, *kinds: str) -> list[int]:
        return [i for i, sample in enumerate(self.samples) if sample.kind in kinds]


@dataclass(frozen=True, eq=False)
class Labels:
    """One role over the places of a view.

    matrix       sparse `[(1 + DRAWS) * K, places]`: the role, then the draws; each with its K alternatives.
    offsets      of each alternative, for the role that searches the best one.
    floor        of the weight that even attention leaves, the share that the role must reach at least.
    queries      for some samples the positions of the role's queries: where an ablation is measured.
    """

    role: str
    matrix: Tensor
    offsets: tuple[int, ...]
    queries: dict[int, list[int]]
    floor: float

    def scores(self, patterns: Tensor) -> Tensor:
        """`patterns` `[places, H]` -> `[1 + DRAWS, K, H]`."""
        return (self.matrix @ patterns).view(1 + DRAWS, len(self.offsets), -1)


def label(role: str, view: View, types: dict[str, set[int]], noise: np.random.Generator) -> Labels | None:
    """The labels of a role, or None where the rows have too few queries for it.

    `types` are the token ids of the roles that read certain tokens (delimiter, boundary, rare).
    """
    if role in types:
        return _types(role, view, types[role], noise)
    of_role = {
        "first": _first, **dict.fromkeys(("previous", "next", "offset"), _offsets),
        **dict.fromkeys(("duplicate", "induction"), _repeated), **dict.fromkeys(("local", "long-range"), _distance),
    }  # fmt: skip
    return of_role.get(role, _links)(role, view, noise)


def _labels(
    role: str, view: View, at: Ints, entries: Sequence[Entry], offsets: tuple[int, ...] = (0,), floor: float = 0.0
) -> Labels:
    """A role with queries `at` `[n, 2]`, samples and positions; entries of one row and place are added."""
    sizes = [len(places) for _, places, _ in entries]
    rows = np.concatenate([np.full(size, row) for size, (row, _, _) in zip(sizes, entries, strict=True)])
    index = torch.from_numpy(np.stack([rows, np.concatenate([places for _, places, _ in entries])]))
    weights = torch.from_numpy(np.repeat(np.array([weight for _, _, weight in entries], np.float32), sizes))
    shape = (1 + DRAWS) * len(offsets), view.starts[-1]
    with (
        warnings.catch_warnings()
    ):  # that compressed rows, several times as fast, are new, and that torch 2.11 checks none
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_coo_tensor(index, weights, shape, check_invariants=False).coalesce().to_sparse_csr()
    queries = {int(r): sorted({int(t) for t in at[at[:, 0] == r, 1]}) for r in np.unique(at[:, 0])}
    return Labels(role, matrix, offsets, queries, floor)


def _of_queries(
    role: str, view: View, at: Ints, keys: Sequence[Ints], offsets: tuple[int, ...], draw: Callable[[Ints], Ints]
) -> Labels:
    """A role with one key a query: for each alternative `[n]` places or -1; `draw` gives random ones for queries."""
    entries: list[Entry] = []
    for i, own in enumerate(keys):
        used = np.flatnonzero(own >= 0)
        entries.append((i, view.places(at[used, 0], at[used, 1], own[used]), 1 / len(used)))
        rows = np.repeat((np.arange(DRAWS) + 1) * len(offsets) + i, len(used))
        entries.append((rows, draw(np.tile(used, DRAWS)), 1 / len(used)))
    return _labels(role, view, at, entries, offsets)


def _thin(at: Ints, limit: int, noise: np.random.Generator) -> Ints:
    return at if len(at) <= limit else at[np.sort(noise.choice(len(at), limit, replace=False))]


def _offsets(role: str, view: View, noise: np.random.Generator) -> Labels | None:
    """One key at a fixed offset; the null reads a random visible key of each query."""
    near = range(2, min(FARTHEST, max(map(len, view.queries)) // 3) + 1)
    steps = {"previous": [-1], "next": [1]}.get(role, [-d for d in near] + [*near])
    at = _queries(view, view.of_kind("text", "control"), least=3)
    at = _thin(at, QUERIES if len(steps) == 1 else 64, noise)
    keys = {}
    for step in steps:
        s = at[:, 1] + step
        seen = [0 < k < len(view.keys[r]) and bool(view.visible[r][t, k]) for (r, t), k in zip(at, s, strict=True)]
        if sum(seen) >= 3:
            keys[step] = np.where(seen, s, -1)
    if not keys:
        return None
    return _of_queries(role, view, at, [*keys.values()], tuple(keys), _any_key(view, at, noise))


def _queries(view: View, samples: Sequence[int], least: int) -> Ints:
    """`[n, 2]` samples and queries that see at least so many keys."""
    pairs = [(r, t) for r in samples for t in np.flatnonzero(view.visible[r].sum(1) >= least)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _any_key(view: View, at: Ints, noise: np.random.Generator) -> Callable[[Ints], Ints]:
    """Places of random visible keys of queries."""
    visible_keys = [np.flatnonzero(view.visible[r][t]) for r, t in at]
    counts = np.array([len(keys) for keys in visible_keys])
    every, begins = np.concatenate(visible_keys), np.cumsum(counts) - counts

    def draw(which: Ints) -> Ints:
        chosen = every[begins[which] + (noise.random(len(which)) * counts[which]).astype(np.int64)]
        return view.places(at[which, 0], at[which, 1], chosen)

    return draw


def _first(role: str, view: View, noise: np.random.Generator) -> Labels | None:
    """All queries of a sample on its first key; the null on one other place, the same in all samples: with learned
    positions a head may like any place, in all rows.  Samples weigh the same.

    Where a special token stands before every text, only the samples without it count: in the others the place of a key
    and what it says are the same for all samples, and a head that happens to like that token would stand out.
    """
    kinds = ("bare",) if view.of_kind("bare") else ("text", "control", "repeated")
    samples = [r for r in view.of_kind(*kinds) if len(view.keys[r]) >= 8]
    per: list[list[Ints]] = []  # for each sample and key, its places with the queries after it
    for r in samples:
        of_key = []
        for s in range(len(view.keys[r]) // 2):
            after = view.visible[r][:, s] & (np.arange(len(view.queries[r])) > (s if view.stack != "cross" else -1))
            t = np.flatnonzero(after)[:: max(1, int(after.sum()) // 16)]
            of_key.append(view.places(r, t, s))
        if len(of_key[0]) >= 3 and len(of_key) > 2:
            per.append(of_key)
    if not per:
        return None
    usable = [s for s in range(1, min(map(len, per))) if all(len(of_key[s]) for of_key in per)] or [0]
    drawn = np.array(usable)[noise.integers(len(usable), size=DRAWS)]
    entries = [
        (draw, of_key[s], 1 / len(of_key[s]) / len(per))
        for of_key in per for draw, s in enumerate([0, *drawn.tolist()])
    ]  # fmt: skip
    return _labels(role, view, _queries(view, samples[:4], least=4), entries, floor=HALF)


def _types(role: str, view: View, wanted: set[int], noise: np.random.Generator) -> Labels | None:
    """Keys of certain token types, the first key of a row excepted; the null are as many other types, drawn from all
    of them, so that a head that happens to like one token does not stand out."""
    samples = view.of_kind("text")
    every = sorted({token for r in samples for token in view.keys[r][1:]})
    own = [token for token in every if token in wanted]
    if not own or len(every) < 3 * len(own):
        return None
    at = []
    for r in samples:
        marked = np.isin(view.keys[r], own)
        marked[0] = False
        at += [(r, t) for t in np.flatnonzero((view.visible[r] & marked).any(1)) if view.visible[r][t].sum() >= 4]
    if len(at) < 4:
        return None
    chosen = _thin(np.array(at, dtype=np.int64), QUERIES, noise)
    visible_keys = [(r, t, s) for r, t in chosen.tolist() for s in np.flatnonzero(view.visible[r][t]).tolist() if s]
    tokens, where = np.array([(view.keys[r][s], view.places(r, t, s)) for r, t, s in visible_keys]).T
    places = [where[tokens == token] for token in every]  # of each type, over all chosen queries
    real = {i for i, token in enumerate(every) if token in wanted}
    shared = (len(real) + 1) // 2 if len(real) > 1 else 0  # of the role's types, the most that a draw may contain
    entries = []
    for draw in range(1 + DRAWS):
        types = real
        while draw and len(real & types) > shared:
            types = set(noise.choice(len(every), len(real), replace=False).tolist())
        entries += [(draw, places[one], 1 / len(chosen)) for one in sorted(types)]
    floor = MOST if math.comb(len(every), len(real)) < ENOUGH else 0.0
    return _labels(role, view, chosen, entries, floor=floor)


def _repeated(role: str, view: View, noise: np.random.Generator) -> Labels | None:
    """From the second occurrence of a token to the first (duplicate) or to the token after that (induction); the null
    at the same places of rows in which nothing is repeated."""
    side = 0 if view.stack == "encoder" or view.samples[0].target is None else 1
    ahead = 1 if role == "induction" else 0
    found = []
    for r in view.of_kind("repeated"):
        half, start = view.samples[r].half, view.samples[r].start[side]
        for t in range(start + half + 1, start + 2 * half - 1):  # not the ends, where the other role's key is missing
            s = t - half + ahead
            if view.visible[r][t, s] and view.samples[r + 1].kind == "control":
                found.append((r, t, s, int(view.places(r + 1, t, s))))
    if len(found) < 8:
        return None
    every = np.array(found)

    def draw(which: Ints) -> Ints:
        return np.asarray(every[noise.integers(len(every), size=len(which)), 3])

    return _of_queries(role, view, every[:, :2], [every[:, 2]], (0,), draw)


def _distance(role: str, view: View, noise: np.random.Generator) -> Labels | None:
    """Keys at most `NEAR` places away, or at least `FAR` but for the first key of a row.  The null reads as many
    visible keys that stand at random places, the same for all queries: a head that reads one place from everywhere is
    often far from it."""
    at = []
    for r in view.of_kind("text", "control"):
        inside = _inside(role, view, r)
        few = (inside.sum(1) >= 4) & ((view.visible[r] & ~inside).sum(1) >= 4)
        at += [(r, t) for t in np.flatnonzero(few).tolist()]
    if len(at) < 8:
        return None
    chosen = _thin(np.array(at, dtype=np.int64), DISTANT, noise)
    order = noise.random((DRAWS, max(map(len, view.keys)))).astype(np.float32)
    entries: list[Entry] = []
    for r, t in chosen.tolist():
        keys = np.flatnonzero(_inside(role, view, r)[t])
        among = np.flatnonzero(view.visible[r][t])
        among = among[among > 0] if role == "long-range" else among
        drawn = among[order[:, among].argpartition(len(keys) - 1, axis=1)[:, : len(keys)]]
        places = view.places(r, t, np.concatenate([keys, drawn.ravel()]))
        entries.append((np.repeat(np.arange(1 + DRAWS), len(keys)), places, 1 / len(chosen)))
    return _labels(role, view, chosen, entries, floor=HALF if role == "local" else MOST)


def _inside(role: str, view: View, r: int) -> NDArray[np.bool_]:
    """`[T, S]`: the keys of `local` or `long-range` that the queries of a sample see."""
    apart = np.abs(np.arange(len(view.queries[r]))[:, None] - np.arange(len(view.keys[r])))
    inside: NDArray[np.bool_] = view.visible[r] & (apart <= NEAR if role == "local" else apart >= FAR)
    if role == "long-range":
        inside[:, 0] = False
    return inside


def _links(role: str, view: View, noise: np.random.Generator) -> Labels | None:
    """From one word to another: the weight on all tokens of the one, mean over those of the other (Clark et al. 2019).
    Half of the null are the same distances at other places of the texts, the other half the same places of texts
    without such pairs, which a head reads alike that likes a place."""
    pairs = [(r, *pair) for r, sample in enumerate(view.samples) for pair in sample.links.get(role, ())]
    pairs = [one for one in pairs if all(view.visible[one[0]][t, s] for t in one[1] for s in one[2])]
    if not pairs:
        return None
    elsewhere = view.of_kind("text", "linked")
    entries: list[Entry] = []
    for r, query, key in pairs:
        low, high = min(query + key), max(query + key)
        other = [  # the key is never the first of its row, which many heads read for no reason of the text
            (o, shift) for o in elsewhere for shift in range(1 - low, len(view.keys[o]) - high)
            if (o, shift) != (r, 0) and view.visible[o][query[0] + shift, key[0] + shift]
        ]  # fmt: skip
        if len(other) < 8:
            return None
        same = [(o, shift) for o, shift in other if shift == 0 and view.samples[o].kind == "text"]
        drawn = np.array([(r, 0), *other])[[0, *(1 + noise.integers(len(other), size=DRAWS))]]
        if len(same) >= 4:
            drawn[2::2] = np.array(same)[noise.integers(len(same), size=len(drawn[2::2]))]
        samples, shifts = drawn.T
        entries += [
            (np.arange(1 + DRAWS), view.places(samples, t + shifts, s + shifts), 1 / len(query) / len(pairs))
            for t in query for s in key
        ]  # fmt: skip
    at = np.array([(r, t) for r, query, _ in pairs for t in query])
    return _labels(role, view, at, entries)
