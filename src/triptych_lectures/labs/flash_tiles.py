"""What do FlashAttention's tiles save?  (Lecture L4 12.9; Dao et al. 2022)

`triptych_lectures.scratch.numpy_flash` computes attention tile by tile and counts, as it runs, each number that it
moves between a slow and a fast memory.  Beside it the steps of attention with its scores in slow memory are counted in
the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from triptych.attention import attend
from triptych.page import MatrixSection, TableSection
from triptych.spec import causal
from triptych_lectures.scratch import numpy_flash
from triptych_lectures.scratch.numpy_flash import Memory
from triptych_lectures.scratch.numpy_transformer import Array
from .lab import Check, Findings, Ints, Lab, Sections, Setup, clause, size
from .small_models import curve, power

RAGGED = (((45, 45), (16, 8)), ((30, 53), (8, 16)), ((53, 30), (64, 64)))  # T and S, queries and keys of a tile
DRAWN = 8  # tiles in each direction of the drawing
EVERYTHING = slice(None)
WAYS = ("forward", "backward")


class FlashTilesLab(Lab):
    name = "flash-tiles"

    lengths: Ints = size(
        (128, 256, 512, 1024),
        "tokens, queries and keys alike, ascending",
        values=2,
        ascending=True,
        full=(256, 512, 1024, 2048, 4096),
    )
    width: int = size(32, "d, the width of the head", full=64)
    memories: Ints = size(
        (1024, 2048, 4096, 8192, 16384),
        "numbers that the fast memory is for, ascending",
        values=2,
        ascending=True,
        full=(4096, 8192, 16384, 32768, 65536),
    )

    def findings(self, setup: Setup) -> Findings:
        random, longest, largest = np.random.default_rng(setup.seed), self.lengths[-1], self.memories[-1]
        setup.progress("comparing results and gradients with the library's")
        values, gradients = differences(random)
        plain: dict[int, TrafficCounts] = {}
        tiles: dict[int, TrafficCounts] = {}
        for length in self.lengths:
            setup.progress(f"{length:,} tokens, a fast memory of {largest:,} numbers")
            arrays = _arrays(random, length, length, self.width)
            plain[length], tiles[length] = in_full(arrays), in_tiles(arrays, largest)
        setup.progress(f"{longest:,} tokens, fast memories of {', '.join(f'{m:,}' for m in self.memories)} numbers")
        by_memory = {memory: in_tiles(arrays, memory) for memory in self.memories}
        small, whole = in_tiles(arrays, self.width**2), plain[longest].forward
        once = in_tiles(arrays, 4 * self.width * longest)  # one tile has everything: each array is moved once
        powers = {
            way: power(self.memories, [getattr(moved, way) - getattr(once, way) for moved in by_memory.values()])
            for way in WAYS
        }
        fast_over_size = max(moved.fast / memory for memory, moved in by_memory.items())
        grows = "slow memory beside the arrays grows as T to the power"
        fewer = "plain over tiles, numbers moved forward"
        yield clause(
            "Softmax can be taken over the keys in pieces: tile by tile, the result and the gradients are those"
            " of plain attention, to rounding.",
            Check("largest difference of a result from attend()", values, most=1e-10),
            Check("largest difference of a gradient from autograd", gradients, most=1e-10),
            instead="The tiles compute something else",
        )
        yield clause(
            "Beside its arrays the tiled way keeps a number or two a query in slow memory; plain attention writes"
            " T² scores and weights there and reads them again.",
            Check(f"tiles: {grows}", _grown(tiles), 0.99, 1.01),
            Check(f"plain: {grows}", _grown(plain), 1.99, 2.01),
            instead="The slow memory does not grow so",
        )
        yield clause(
            "Tiles add one product, the scores of the backward; what falls is what is moved. A fast memory of twice"
            " the size has tiles of twice as many queries, and keys and values are read half as often. With"
            f" {largest:,} numbers they move {whole / tiles[longest].forward:.1f} times fewer than plain attention.",
            *(
                Check(f"{way}: numbers moved again grow as the fast memory to the power", grown, -1.1, -0.9)
                for way, grown in powers.items()
            ),
            Check("most numbers held in fast memory over its size", fast_over_size, most=1.5),
            Check(f"{fewer}, fast memory {largest:,}", whole / tiles[longest].forward, least=2.0),
            instead="The tiles do not hold and move what they should",
        )
        yield clause(
            "Control: with a fast memory of only d² numbers the tiles are so small that they move"
            f" {small.forward / whole:.1f} times as many.",
            Check(f"{fewer}, a fast memory of d² numbers", whole / small.forward, most=1.0),
            instead="Even the smallest tiles move fewer",
        )
        yield from self._sections({"plain": plain, "tiles": tiles}, by_memory)
        yield drawing()

    def _sections(self, ways: dict[str, dict[int, TrafficCounts]], by_memory: dict[int, TrafficCounts]) -> Sections:
        rows = [
            [f"{length:,}", way, *(f"{number:,}" for number in moved[length][:3])]
            for length in self.lengths
            for way, moved in ways.items()
        ]
        header = ("T", "", "moved forward", "moved backward", "slow memory beside the arrays")
        over_t = {
            f"{what}, {name}": [getattr(one, number) for one in moved.values()]
            for what, number in (("moved", "forward"), ("slow memory beside", "extra"))
            for name, moved in ways.items()
        }
        over_memory = {way: [getattr(one, way) for one in by_memory.values()] for way in WAYS}
        longest, plain = self.lengths[-1], {"plain, forward": ways["plain"][self.lengths[-1]].forward}
        at_longest = f"Numbers moved at T {longest:,}"
        yield TableSection(f"Numbers, d {self.width}, a fast memory of {self.memories[-1]:,}", header, rows)
        yield curve("Numbers over the length", "T", "numbers", self.lengths, over_t, log="xy")
        yield curve(at_longest, "fast memory", "numbers", by_memory, over_memory, plain, "xy")


class TrafficCounts(NamedTuple):
    """Numbers that one way moved, forward and backward, what it allocated in slow memory beside its arrays, and the
    most numbers that its forward held in fast memory."""

    forward: int
    backward: int
    extra: int
    fast: int

    @staticmethod
    def by(there: Memory, back: Memory) -> TrafficCounts:
        """What the memories of a forward and a backward counted."""
        return TrafficCounts(there.reads + there.writes, back.reads + back.writes, there.extra + back.extra, there.fast)


def tiles_for(memory: int, width: int) -> tuple[int, int]:
    """(long, short) sides of a tile for a fast memory of so many numbers, as Dao et al. 2022 choose them: a quarter of
    it for each of four arrays of width d, and no more than d on the short side."""
    long = max(memory // (4 * width), 1)
    return long, min(long, width)


def in_tiles(arrays: Sequence[Array], memory: int) -> TrafficCounts:
    """What `numpy_flash` moves.  The side over which the outer loop runs is the long one: queries forward, keys
    backward."""
    q, k, v, dout = arrays
    long, short = tiles_for(memory, q.shape[1])
    there, back = Memory(), Memory()
    out, lse = numpy_flash.forward(q, k, v, (long, short), False, there)
    numpy_flash.backward(q, k, v, out, lse, dout, (short, long), False, back)
    return TrafficCounts.by(there, back)


def in_full(arrays: Sequence[Array]) -> TrafficCounts:
    """What plain attention moves, whose every step reads its operands and writes its result whole (algorithms 0 and 3
    of Dao et al. 2022).  An array stands for the gradient of its shape as well."""
    q, k, v, out = arrays
    there, back = Memory(), Memory()
    s, p, ds, dp = (memory.allocate(len(q), len(k)) for memory in (there, there, back, back))
    forward = ((s, q, k), (p, s), (out, p, v))
    backward = ((v, p, out), (dp, out, v), (ds, p, dp), (q, ds, k), (k, ds, q))
    for memory, steps in ((there, forward), (back, backward)):
        for result, *operands in steps:
            memory.read(EVERYTHING, *operands)
            memory.write(EVERYTHING, result, result)
    return TrafficCounts.by(there, back)


def differences(random: np.random.Generator) -> tuple[float, float]:
    """The largest difference of a result, and of a gradient, from the library's in float64, causal and not, where the
    last tiles are not full."""
    values, gradients = [], []
    for (queries, keys), tiles in RAGGED:
        q, k, v, dout = _arrays(random, queries, keys, 6)
        inputs = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
        for masked in (False, True):
            out, lse = numpy_flash.forward(q, k, v, tiles, masked, Memory())
            tiled = numpy_flash.backward(q, k, v, out, lse, dout, tiles, masked, Memory())
            expected = attend(*inputs, mask=causal() if masked else None, q_pos=torch.arange(keys - queries, keys))
            exact = torch.autograd.grad(expected, inputs, torch.tensor(dout))
            values.append(np.abs(out - expected.detach().numpy()).max())
            gradients += [np.abs(dx - x.numpy()).max() for dx, x in zip(tiled, exact, strict=True)]
    return float(max(values)), float(max(gradients))


def _arrays(random: np.random.Generator, queries: int, keys: int, width: int) -> list[Array]:
    """q, k, v and dL/dout."""
    return [random.normal(size=(length, width)) for length in (queries, keys, keys, queries)]


def _grown(moved: dict[int, TrafficCounts]) -> float:
    """The power of the length with which the slow memory beside the arrays grows."""
    return power(list(moved), [one.extra for one in moved.values()])


def drawing() -> MatrixSection:
    """The order in which a forward takes its tiles; those in the future of all their queries are left out."""
    memory, side = Memory(), 4
    q, k, v, _ = _arrays(np.random.default_rng(0), DRAWN * side, DRAWN * side, 6)
    numpy_flash.forward(q, k, v, (side, side), True, memory)
    places = np.zeros((DRAWN, DRAWN), dtype=int)  # 0 is a tile that is never read
    for number, tile in enumerate(memory.order, 1):
        places[tile] = number
    queries, keys = ([f"{of} {i * side}-{i * side + side - 1}" for i in range(DRAWN)] for of in ("queries", "keys"))
    return MatrixSection(
        "The order of the tiles",
        "Each cell is a tile of scores, with its place in the order of a causal forward. A row of tiles keeps its"
        " queries and sums in fast memory and reads keys and values tile by tile; an empty tile is never read.",
        queries,
        keys,
        [[str(n or "") for n in row] for row in places.tolist()],
        (places / len(memory.order)).tolist(),
    )
