"""FlashAttention's tiles in NumPy (Dao et al. 2022), forward and backward, for one head.

    python -m triptych_lectures.scratch.numpy_flash        counts the numbers that it moves, beside plain attention

A fast memory holds a few tiles; only a slow one could hold all T x S pairs.  Softmax is taken tile by tile: `m` is the
largest score of each query so far and `total` the sum of its exponents; where a later tile has a larger score, what was
added up is multiplied by exp(old m - new m).  The backward computes the scores again instead of keeping them.  The
forward's order of loops is that of Dao 2023, which writes each row of the result once.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from triptych_lectures.scratch.numpy_transformer import Array

LOWEST = -1e300  # below every score, and finite: the difference of two infinities would not be a number


@dataclass
class Memory:
    """Counts numbers that move between slow and fast memory: `reads` and `writes`; `extra`, those of slow memory beside
    inputs and results; `fast`, the most that one step held in fast memory; `order`, its (query tile, key tile)s."""

    reads: int = 0
    writes: int = 0
    extra: int = 0
    fast: int = 0
    order: list[tuple[int, int]] = field(default_factory=list)

    def read(self, rows: slice, *arrays: Array) -> list[Array]:
        self.reads += sum(array[rows].size for array in arrays)
        return [array[rows].copy() for array in arrays]

    def write(self, rows: slice, array: Array, tile: Array) -> None:
        array[rows] = tile
        self.writes += tile.size

    def allocate(self, *shape: int) -> Array:
        self.extra += math.prod(shape)
        return np.zeros(shape)

    def step(self, i: int, j: int, *tiles: Array) -> None:
        self.fast = max(self.fast, sum(tile.size for tile in tiles))
        self.order.append((i, j))


def cut(length: int, size: int) -> list[slice]:
    """Tiles of `size` places; the last one has what is left."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def scores(q: Array, k: Array, visible: int, causal: bool) -> Array:
    """[r, c] of queries [r, K] and keys [c, K]; where causal, query i sees `visible + i` keys."""
    s = np.asarray(q @ k.T / math.sqrt(q.shape[1]))
    return np.where(np.arange(len(k)) < visible + np.arange(len(q))[:, None], s, -np.inf) if causal else s


def forward(q: Array, k: Array, v: Array, tiles: tuple[int, int], causal: bool, memory: Memory) -> tuple[Array, Array]:
    """Queries [T, K], keys [S, K], values [S, V] and tiles of so many (queries, keys) -> the result [T, V] and each
    query's log-sum-exp [T], which is all that the backward needs.  Causal queries are the last T of S positions."""
    first, out, lse = len(k) - len(q) + 1, np.zeros((len(q), v.shape[1])), memory.allocate(len(q))
    for i, rows in enumerate(cut(len(q), tiles[0])):
        (qi,) = memory.read(rows, q)
        o, m, total = np.zeros((len(qi), v.shape[1])), np.full((len(qi), 1), LOWEST), np.zeros((len(qi), 1))
        for j, keys in enumerate(cut(len(k), tiles[1])):
            if causal and keys.start >= first + rows.stop - 1:
                break  # this tile and later ones are in the future of all these queries: they are not read
            kj, vj = memory.read(keys, k, v)
            s = scores(qi, kj, first + rows.start - keys.start, causal)
            larger = np.maximum(m, s.max(1, keepdims=True))
            shrink, p = np.exp(m - larger), np.exp(s - larger)  # p takes the place of s
            o, total, m = o * shrink + p @ vj, total * shrink + p.sum(1, keepdims=True), larger
            memory.step(i, j, qi, kj, vj, o, p, m, total, shrink)
        total = np.where(total > 0, total, 1.0)  # a query that sees nothing gets 0
        memory.write(rows, out, o / total)
        memory.write(rows, lse, (m + np.log(total))[:, 0])
    return out, lse


def backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, tiles: tuple[int, int], causal: bool,
    memory: Memory,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """dL/dq, dL/dk and dL/dv from what `forward` took and gave, and dL/dout [T, V]."""
    first, (dq, dk, dv), dot = len(k) - len(q) + 1, map(np.zeros_like, (q, k, v)), memory.allocate(len(q))
    for rows in cut(len(q), tiles[0]):  # the sum of p * dL/dp over a query's keys is dout · out
        memory.write(rows, dot, np.multiply(*memory.read(rows, dout, out)).sum(1))
    for j, keys in enumerate(cut(len(k), tiles[1])):
        kj, vj = memory.read(keys, k, v)
        dkj, dvj = np.zeros_like(kj), np.zeros_like(vj)
        for i, rows in enumerate(cut(len(q), tiles[0])):
            if not causal or keys.start < first + rows.stop - 1:
                qi, doi, dqi, lsei, doti = memory.read(rows, q, dout, dq, lse, dot)
                p = np.exp(scores(qi, kj, first + rows.start - keys.start, causal) - lsei[:, None])
                ds = p * (doi @ vj.T - doti[:, None]) / math.sqrt(q.shape[1])
                dvj, dkj = dvj + p.T @ doi, dkj + ds.T @ qi
                memory.write(rows, dq, dqi + ds @ kj)
                memory.step(i, j, qi, kj, vj, doi, dqi, lsei, doti, dkj, dvj, p, ds)
        memory.write(keys, dk, dkj)
        memory.write(keys, dv, dvj)
    return dq, dk, dv


if __name__ == "__main__":
    print("   T   forward  backward  beside the arrays  one score matrix   (K 64, causal, tiles of 64 x 64)")
    for length in (128, 256, 512, 1024):
        q, k, v, dout = np.random.default_rng(0).normal(size=(4, length, 64))
        there, back = Memory(), Memory()
        backward(q, k, v, *forward(q, k, v, (64, 64), True, there), dout, (64, 64), True, back)
        moved = f"{there.reads + there.writes:9,} {back.reads + back.writes:9,}"
        print(f"{length:4} {moved} {there.extra + back.extra:18,} {length**2:17,}")
