"""Do sparse patterns cost O(T √T) and O(T log T)?  (Lecture L4 12.9; Child et al. 2019, Li et al. 2019)

Pairs of queries and keys are counted where they are computed: from the shapes that torch's matrix products and its
fused kernel are called with, whatever a mask hides of them.  Processor time is printed beside them and decides nothing.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from triptych.attention import attend, attend_reference
from triptych.page import MatrixSection, TableSection
from triptych.spec import Mask, block_sparse, causal, dense
from triptych.spec.masks import Points
from .counting import products, shortest_seconds
from .lab import Check, Findings, Ints, Lab, LabResult, Setup, clause, size
from .small_models import curve, power
from .statements import gap

STRIDED, POWERS, ALL, ARRAY = "strided, O(T √T)", "powers of two, O(T log T)", "all pairs", "strided, as an array"
REACH = 1024  # positions whose paths through layers are counted: blocks enough to tell powers of two from neighbors
DRAWN = 32
REPEATS = 3  # the smallest time counts


class SparsePatternsLab(Lab):
    name = "sparse-patterns"

    lengths: Ints = size(
        (512, 1024, 2048, 4096, 8192),
        "tokens, ascending",
        values=2,
        ascending=True,
        full=(256, 512, 1024, 2048, 4096, 8192),
    )
    width: int = size(16, "the width of the head", full=64)
    block: int = size(8, "positions of a block of the strided pattern")
    powers_block: int = size(16, "positions of a block of the pattern of powers of two")
    same: int = size(512, "tokens at which results are compared with the definition")

    @torch.inference_mode()
    def run(self, setup: Setup) -> LabResult:
        return super().run(setup)

    def findings(self, setup: Setup) -> Findings:
        noise = torch.Generator().manual_seed(setup.seed)
        computed: dict[str, dict[int, float]] = {}
        seconds: dict[str, dict[int, float]] = {}
        for way in (ALL, ARRAY, STRIDED, POWERS):
            setup.progress(f"{way}: {', '.join(f'{n:,}' for n in self.lengths)} tokens")
            computed[way], seconds[way] = {}, {}
            for n in self.lengths:
                mask, inputs = self.mask(way, n), _inputs(n, self.width, noise)
                computed[way][n] = pairs(mask, inputs)
                seconds[way][n] = shortest_seconds(partial(attend, mask=mask), inputs, calls=REPEATS)
        setup.progress("comparing with the definition, and following paths through layers")
        hops = {way: layers_to_reach_all(self.mask(way, REACH)) for way in (STRIDED, POWERS)}
        # blocks that the last query sees under powers of two: its own and one for each power below their number
        seen = {n: 1 + (-(-n // self.powers_block) - 1).bit_length() for n in self.lengths}
        per_log = [count / (n * seen[n]) for n, count in computed[POWERS].items()]
        spread, last = max(per_log) / min(per_log), self.lengths[-1]
        digits = max((-(-REACH // self.powers_block) - 1).bit_length(), 1)  # of the largest distance in blocks
        until, more = (
            "layers until each position has reached all before it",
            computed[ARRAY][last] / computed[STRIDED][last],
        )
        yield clause(
            f"Under the strided pattern the pairs computed grow as T to the power {_power(computed[STRIDED]):.2f},"
            f" where T √T is 1.5, and all pairs as T to the power {_power(computed[ALL]):.2f}.",
            Check(f"{STRIDED}: pairs computed grow as T to the power", _power(computed[STRIDED]), 1.4, 1.6),
            Check(f"{ALL}: pairs computed grow as T to the power", _power(computed[ALL]), 1.95, 2.05),
            instead="The strided pattern and all pairs do not cost O(T √T) and O(T²)",
        )
        yield clause(
            "Under powers of two they grow as T log T: as T times the blocks that the last query sees, its own and"
            " one for each power below their number.",
            Check(f"{POWERS}: largest over smallest of pairs / (T · blocks seen)", spread, most=1.1),
            Check(f"{POWERS}: pairs computed grow as T to the power", _power(computed[POWERS]), 1.0, 1.3),
            instead="Powers of two do not cost O(T log T)",
        )
        yield clause(
            "What saves is that the mask is symbolic: the kernel lists the blocks of keys that a block of queries"
            " may see. Control: the same strided pattern written out as an array is opaque, and all pairs are"
            " computed. The results are those of the definition.",
            Check(f"{ARRAY}: pairs computed grow as T to the power", _power(computed[ARRAY]), 1.95, 2.05),
            Check(f"pairs computed at T {last:,}, {ARRAY}, over those of the mask itself", more, least=2.0),
            Check("largest difference from the definition", self.difference(noise), most=1e-5),
            instead="The kernel does not use the pattern as it should",
        )
        yield clause(
            "Information still reaches every later position: in two layers under the strided pattern, under"
            f" powers of two in {hops[POWERS]}, at most as many as a distance in blocks has binary digits.",
            Check(f"{STRIDED}: {until}", hops[STRIDED], 2, 2),
            Check(f"{POWERS}: {until}", hops[POWERS], min(2, digits), digits),
            instead="Positions are not connected in so few layers",
        )
        yield self._table(computed, seconds)
        yield from (
            curve(title, "T", unit, self.lengths, {way: of.values() for way, of in lines.items()}, log="xy")
            for title, unit, lines in (("Pairs computed", "pairs", computed), ("Processor time", "s", seconds))
        )
        yield drawing(STRIDED)
        yield drawing(POWERS)

    def mask(self, way: str, length: int) -> Mask:
        """Of one way to attend over so many tokens; `ARRAY` is the strided one written out as `[T, T]` booleans."""
        if way == ALL:
            return causal()
        if way == POWERS:
            return powers(length, self.powers_block)
        mask = strided(length, self.block)
        return dense(written_out(mask, length)) if way == ARRAY else mask

    def difference(self, noise: torch.Generator) -> float:
        """The largest of a pattern's result from that of the definition over written-out booleans."""
        inputs, masks = _inputs(self.same, self.width, noise), [self.mask(way, self.same) for way in (STRIDED, POWERS)]
        by_definition = [attend_reference(*inputs, mask=dense(written_out(mask, self.same))) for mask in masks]
        return max(gap(attend(*inputs, mask=mask), out) for mask, out in zip(masks, by_definition, strict=True))

    def _table(self, computed: dict[str, dict[int, float]], seconds: dict[str, dict[int, float]]) -> TableSection:
        shown = [self.lengths[0], self.lengths[len(self.lengths) // 2], self.lengths[-1]]
        last, rows = self.lengths[-1], []
        for way, measured in computed.items():
            visible = written_out(self.mask(way, shown[0]), shown[0]).sum()
            hidden = "–" if way == ARRAY else f"{measured[shown[0]] / float(visible):.2f}"
            # between the two largest lengths, where what does not depend on T weighs least
            (a, x), (b, y) = sorted(seconds[way].items())[-2:]
            settled = math.log(max(y, 1e-9) / max(x, 1e-9)) / math.log(b / a)
            times = f"{seconds[way][last] * 1e3:,.1f} ms", f"{settled:.2f}"
            rows.append([way, *(f"{measured[n]:,.0f}" for n in shown), f"{_power(measured):.3f}", hidden, *times])
        header = ("", *(f"pairs, T {n:,}" for n in shown), "power of T", f"computed over visible, T {shown[0]:,}")
        return TableSection("Pairs computed", (*header, f"processor time, T {last:,}", "power of T, last step"), rows)


def strided(length: int, block: int) -> Mask:
    """Child et al. 2019: the last l positions, and the last `block` positions of each stretch of l.  With
    l = √(block T) the two are equally many, 2 √(block T) together."""
    stride = max(round(math.sqrt(length / block)), 1)
    return causal() & block_sparse(block, local=stride, every=stride)


def powers(length: int, block: int) -> Mask:
    """Li et al. 2019: the own block of positions, and those 1, 2, 4, 8 ... blocks before it."""
    return causal() & block_sparse(block, powers=True)


def pairs(mask: Mask, inputs: Sequence[Tensor]) -> float:
    """Query-key pairs that one call of `attend` computes, hidden or not."""
    q, _, v = inputs
    flops = products(partial(attend, mask=mask), inputs).total
    return flops / (2 * (q.shape[-1] + v.shape[-1]))


def _inputs(length: int, width: int, noise: torch.Generator) -> list[Tensor]:
    return [torch.randn(1, 1, length, width, generator=noise) for _ in range(3)]


def _power(measured: dict[int, float]) -> float:
    return power(list(measured), list(measured.values()))


def written_out(mask: Mask, length: int) -> Tensor:
    """`[T, T]`, true where visible."""
    place = torch.arange(length)
    visible: Tensor = mask.visible(Points(place[:, None]), Points(place[None, :]))
    return visible


def layers_to_reach_all(mask: Mask) -> int:
    """Layers under `mask` after which each of REACH positions has something of every position before it; REACH where
    no number of layers is enough."""
    one_layer, every = written_out(mask, REACH).float(), torch.ones(REACH, REACH).tril()
    reached = one_layer
    for layers in range(1, REACH):
        if reached.equal(every):
            return layers
        before, reached = reached, ((reached @ one_layer) > 0).float()
        if reached.equal(before):
            break
    return REACH


def drawing(way: str) -> MatrixSection:
    """Which of DRAWN positions see which, with blocks of one position."""
    mask = strided(DRAWN, 1) if way == STRIDED else powers(DRAWN, 1)
    visible = written_out(mask, DRAWN).tolist()
    names = [str(i) for i in range(DRAWN)]
    return MatrixSection(
        way, "Queries in rows, keys in columns; a marked key is visible. Blocks of one position.", names, names,
        [["■" if seen else "" for seen in row] for row in visible],
        [[0.8 if seen else 0.0 for seen in row] for row in visible],
    )  # fmt: skip
