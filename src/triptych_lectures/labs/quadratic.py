"""What do T tokens of attention cost?  (Lectures L4 12.9 and exercises 9 and 19)

The claim is T squared for whatever compares all pairs and T for whatever does not.  FLOPs and bytes are counted from
the operations that each call runs; processor time is shown beside them and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import attend, attend_reference, linear
from triptych.count import count
from triptych.errors import InputError
from triptych.families import read_config
from triptych.machine import process_status
from triptych.measure.process import forget_peak
from triptych.model import Model
from triptych.page import Facts, TableSection
from triptych.spec import block_sparse, causal, window
from .counting import peak_bytes, products, shortest_seconds
from .lab import Check, Clause, Findings, Ints, Lab, LabResult, Setup, clause, size
from .small_models import block, curve, decoder, power

SAME = 512  # tokens at which results that should be equal are compared
LINEAR, SQUARE = (0.9, 1.1), (1.9, 2.1)
LAYER_VOCAB = 64
ONE_GROUP = "one key/value head"
WHOLE, WEIGHTS, PAIRS = "all matrix products", "products with weights", "products of queries, keys and values"


class QuadraticLab(Lab):
    name = "quadratic"

    lengths: Ints = size(
        (128, 256, 512, 1024, 2048, 4096, 8192), "tokens T, ascending; those of short and long too", ascending=True
    )
    short: Ints = size((128, 512), "first and last T where a layer's exponent is fitted while small")
    long: Ints = size((2048, 8192), "first and last T where the other exponents are fitted")
    heads: int = size(2, "heads")
    width: int = size(64, "head width")
    window: int = size(128, "keys that a window sees")
    block: int = size(64, "tokens of a block of the block pattern")
    layer: int = size(
        512, "model width of the whole layer that is counted, a multiple of the head width", multiple="width"
    )
    resident: int = size(8192, "tokens at which the memory of the process is shown")
    repeats: int = size(1, "times that each is timed; the shortest is shown", full=2)

    def __post_init__(self) -> None:
        for name, ends in (("short", self.short), ("long", self.long)):
            if len(ends) != 2 or ends[0] >= ends[1] or not {*ends} <= {*self.lengths}:
                raise InputError(f"size {name}: give the first and the last T of a fit, both of them in lengths")
        if len([length for length in self.lengths[1:] if self.long[0] <= length <= self.long[1]]) < 2:
            raise InputError("sizes lengths and long: long must have two lengths, each with a shorter one before it")

    @torch.inference_mode()
    def run(self, setup: Setup) -> LabResult:
        return super().run(setup)

    def findings(self, setup: Setup) -> Findings:
        ways = self.mechanisms()
        noise = torch.Generator().manual_seed(setup.seed)
        flops, nbytes, seconds = self._measured(ways, noise, setup)
        setup.progress(f"counting a layer of width {self.layer}")
        layer = self._layer(setup.seed)
        yield self._pairs_clause(flops, nbytes, max(self._differences(ways, noise)))
        yield self._linear_clause(ways, flops, nbytes)
        yield self._groups_clause(ways, flops, noise)
        yield self._layer_clause(layer)
        share = {n: grown / (4 * self.heads * self.resident**2) for n, grown in self._resident(ways, noise).items()}
        yield from self._tables(flops, nbytes, seconds, layer)
        yield self._facts(share)
        yield from (
            curve(title, "T", unit, self.lengths, {name: of.values() for name, of in lines.items()}, log="xy")
            for title, unit, lines in (
                ("FLOPs of attention", "FLOPs", flops),
                ("Memory of tensors beside q, k and v", "bytes", nbytes),
                (f"FLOPs of a layer of width {self.layer}", "FLOPs", layer),
            )
        )

    def _grow(self, what: str, name: str, measured: Measured, bounds: tuple[float, float], at: Ints = ()) -> Check:
        return Check(f"{name}: {what} grow as T to the power", _power(measured[name], at or self.long), *bounds)

    def _pairs_clause(self, flops: Measured, nbytes: Measured, difference: float) -> Clause:
        last = self.lengths[-1]
        saved = nbytes["full"][last] / nbytes["fused"][last]
        return clause(
            "Every token is compared with every other, so the work grows as T squared, and with the scores written"
            " out the memory does too. The fused kernel computes the same numbers tile by tile: T squared work, and"
            f" no operation hands on a score matrix, {saved:.0f} times fewer bytes at {last:,} tokens.",
            self._grow("FLOPs", "full", flops, SQUARE),
            self._grow("bytes", "full", nbytes, SQUARE),
            self._grow("FLOPs", "fused", flops, SQUARE),
            self._grow("bytes", "fused", nbytes, LINEAR),
            Check("largest difference from the definition under the same mask", difference, most=1e-4),
            instead="Full and fused attention do not cost this, or not for the same result",
        )

    def _linear_clause(self, ways: Mapping[str, MechanismCost], flops: Measured, nbytes: Measured) -> Clause:
        names = [name for name, way in ways.items() if way.flops == LINEAR]
        return clause(
            "Only what leaves pairs out, a window or a block pattern, or does not compare pairs, linear attention,"
            " grows as T in both.",
            *(self._grow("FLOPs", name, flops, LINEAR) for name in names),
            *(self._grow("bytes", name, nbytes, LINEAR) for name in names),
            instead="What leaves pairs out does not grow as T",
        )

    def _groups_clause(self, ways: Mapping[str, MechanismCost], flops: Measured, noise: torch.Generator) -> Clause:
        last = self.lengths[-1]
        shared, own = (self._inputs(SAME, ways[name].groups, noise)[1:] for name in (ONE_GROUP, "fused"))
        kept = sum(x.nbytes for x in shared) / sum(x.nbytes for x in own)
        return clause(
            f"Heads that share keys and values have {1 / kept:.0f} times fewer of them to keep, and the same work.",
            self._grow("FLOPs", ONE_GROUP, flops, SQUARE),
            Check(f"{ONE_GROUP}: FLOPs over those of fused", flops[ONE_GROUP][last] / flops["fused"][last], 1.0, 1.0),
            Check(f"{ONE_GROUP}: bytes of k and v over those of fused", kept, 1 / self.heads, 1 / self.heads),
            instead="Sharing keys and values does not save them, or changes the work",
        )

    def _layer_clause(self, layer: Measured) -> Clause:
        short, last, grows = self.short, self.lengths[-1], _power(layer[WHOLE], self.short)
        counted = self._counted(last) * self.layer / (self.heads * self.width)
        return clause(
            "In a whole layer the products with weights, linear in T, hide the square while T is small: from"
            f" {short[0]} to {short[1]} tokens its FLOPs grow as T to the power {grows:.2f}.",
            self._grow("FLOPs", f"the layer, {WEIGHTS}", {f"the layer, {WEIGHTS}": layer[WEIGHTS]}, LINEAR),
            self._grow("FLOPs", f"the layer, {PAIRS}", {f"the layer, {PAIRS}": layer[PAIRS]}, SQUARE),
            Check(f"the layer, {short[0]} to {short[1]} tokens: FLOPs grow as T to the power", grows, 0.9, 1.5),
            Check(f"the layer, {PAIRS} at T {last:,}: run over `count`'s", layer[PAIRS][last] / counted, 1.0, 1.0),
            instead="The layer does not cost this",
        )

    def mechanisms(self) -> dict[str, MechanismCost]:
        """All that are measured, by name."""
        every, fast = (partial(kernel, mask=causal()) for kernel in (attend_reference, attend))
        band = causal() & window(self.window)
        blocks = causal() & block_sparse(self.block, local=2, first=1)
        heads = self.heads
        return {
            "full": MechanismCost(every, SQUARE, heads),
            "fused": MechanismCost(fast, SQUARE, heads, exact=every),
            ONE_GROUP: MechanismCost(fast, SQUARE, 1, exact=every),
            f"window of {self.window}": MechanismCost(
                partial(attend, mask=band), LINEAR, heads, exact=partial(attend_reference, mask=band)
            ),
            "block-sparse": MechanismCost(
                partial(attend, mask=blocks), LINEAR, heads, exact=partial(attend_reference, mask=blocks)
            ),
            "linear": MechanismCost(partial(linear, mask=causal()), LINEAR, heads),
        }

    def _measured(
        self, ways: Mapping[str, MechanismCost], noise: torch.Generator, setup: Setup
    ) -> tuple[Measured, Measured, Measured]:
        """(FLOPs, bytes, seconds of processor time) of one call of each mechanism at each length."""
        flops, nbytes, seconds = ({name: dict[int, float]() for name in ways} for _ in range(3))
        setup.progress(f"{len(ways)} mechanisms, {self.lengths[0]} to {self.lengths[-1]:,} tokens")
        for length in self.lengths:
            for name, way in ways.items():
                inputs = self._inputs(length, way.groups, noise)
                flops[name][length] = products(way.call, inputs).total
                nbytes[name][length] = peak_bytes(way.call, inputs)
                seconds[name][length] = shortest_seconds(way.call, inputs, calls=self.repeats)
        return flops, nbytes, seconds

    def _inputs(self, length: int, groups: int, noise: torch.Generator) -> Tensors:
        q, k, v = (torch.randn(1, heads, length, self.width, generator=noise) for heads in (self.heads, groups, groups))
        return q, k, v

    def _layer(self, seed: int) -> Measured:
        """FLOPs of a decoder of one layer over T: of its products with weights, of those of attention, and of both."""
        model = Model(nn.new(decoder(LAYER_VOCAB, [block(self.layer, self.layer // self.width, 4 * self.layer)]), seed))
        counts = {n: products(partial(model.logits, [[i % LAYER_VOCAB for i in range(n)]])) for n in self.lengths}
        return {
            WHOLE: {n: counted.total for n, counted in counts.items()},
            WEIGHTS: {n: counted.weights for n, counted in counts.items()},
            PAIRS: {n: counted.total - counted.weights for n, counted in counts.items()},
        }

    def _resident(self, ways: Mapping[str, MechanismCost], noise: torch.Generator) -> dict[str, int]:
        """By how many bytes one call raises the largest resident memory of this process, for full and fused attention;
        empty where the system cannot reset that figure (it is Linux that can)."""
        grown: dict[str, int] = {}
        for name in ("fused", "full"):
            inputs = self._inputs(self.resident, self.heads, noise)
            ways[name].call(*(x[:, :, :SAME] for x in inputs))  # loads what the first call loads
            before = forget_peak()
            ways[name].call(*inputs)
            peak = process_status("VmHWM")
            if before is None or peak is None:
                return {}
            grown[name] = peak - before
        return grown

    def _differences(self, ways: Mapping[str, MechanismCost], noise: torch.Generator) -> list[float]:
        """The largest difference of each exact mechanism from the definition."""
        differences = []
        for way in ways.values():
            if way.exact is not None:
                inputs = self._inputs(SAME, way.groups, noise)
                differences.append(float((way.call(*inputs) - way.exact(*inputs)).abs().max()))
        return differences

    def _counted(self, length: int) -> int:
        """By the arithmetic of `triptych count`, for a llama of one layer."""
        config = {
            "model_type": "llama", "hidden_size": self.heads * self.width, "num_attention_heads": self.heads,
            "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 32_768,
        }  # fmt: skip
        return count(read_config(config)).flops(length)["scores"]

    def _tables(
        self, flops: Measured, nbytes: Measured, seconds: Measured, layer: Measured
    ) -> tuple[TableSection, ...]:
        shown = self.lengths[::2]
        header = ("", *(f"T {n:,}" for n in shown), "power of T")

        def table(title: str, measured: Measured, form: Callable[[float], str]) -> TableSection:
            rows = [
                [name, *(form(values[n]) for n in shown), f"{_power(values, self.long):.2f}"]
                for name, values in measured.items()
            ]
            return TableSection(title, header, rows)

        heads = f"{self.heads} heads of width {self.width}"
        scores = [f"{4 * self.heads * n * n / 2**20:,.1f} MiB" for n in shown]
        memory = table("Memory of tensors beside q, k and v", nbytes, lambda x: f"{x / 2**20:,.1f} MiB")
        return (
            table(f"FLOPs of matrix products, {heads}", flops, lambda x: f"{x / 1e6:,.1f} M"),
            replace(memory, rows=[["one score matrix, counted", *scores, "2.00"], *memory.rows]),
            table(f"FLOPs of a decoder of one layer of width {self.layer}", layer, lambda x: f"{x / 1e6:,.1f} M"),
            table(f"Processor time, {heads}; it decides nothing", seconds, lambda x: f"{x * 1e3:,.1f} ms"),
        )

    def _facts(self, share: Mapping[str, float]) -> Facts:
        longest = self.lengths[-1]
        nbytes = {g: 8 * g * self.width * longest for g in (self.heads, 1)}
        keys = [(f"k and v, {g} key/value heads", f"{x / 2**20:.1f} MiB") for g, x in nbytes.items()]
        process = [(f"memory of the process, {name}", f"{x:.2f} score matrices") for name, x in share.items()]
        return Facts(f"At {longest:,} tokens", keys + process)


Tensors = tuple[Tensor, Tensor, Tensor]
Call = Callable[..., Tensor]  # of q, k and v
Measured = dict[str, dict[int, float]]  # by mechanism, by tokens


class MechanismCost(NamedTuple):
    """One way to attend causally, with `groups` key/value heads, and the bounds of the exponent of its FLOPs.  `exact`
    is what it must agree with, None where it computes something else."""

    call: Call
    flops: tuple[float, float]
    groups: int
    exact: Call | None = None


def _power(measured: Mapping[int, float], fitted: Sequence[int]) -> float:
    """The power of T that the measurements grow as, from `fitted[0]` to `fitted[1]` tokens."""
    lengths = [n for n in measured if fitted[0] <= n <= fitted[1]]
    return power(lengths, [measured[n] for n in lengths])
