"""Does linear attention write with a state of constant size?  (Lecture L4 12.9; Katharopoulos et al. 2020)

The same decoder with linear attention and with softmax, each on the engine: the cache of the first holds two sums a
layer, that of the second the keys and values of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triptych import nn
from triptych.count import count
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.page import Curve, TableSection
from triptych.spec import LinearKernelSpec, ModelSpec, RopeSpec
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import block, decoder, power

VOCAB, HEADS, LAYERS = 59, 4, 2
LINEAR, SOFTMAX = "linear attention", "softmax attention"


class LinearStateLab(Lab):
    """Bytes and differences of both caches over the length."""

    name = "linear-state"
    falsified_by = (
        "The claim would be false if the bytes of the cache of linear attention changed with the length, or if a token"
        " or, beyond rounding, a log-probability differed from those of a forward over the whole text. It would say"
        " nothing if the same measurement did not show the cache of softmax attention growing with the length."
    )
    seeds = 5

    lengths: tuple[int, ...] = size(
        (64, 128, 256, 512),
        "tokens of the text, prompt and new ones, ascending",
        values=2,
        ascending=True,
        full=(64, 256, 1024, 4096),
    )
    width: int = size(48, f"width of the decoder, a multiple of {2 * HEADS}", multiple=2 * HEADS, full=96)
    new: int = size(24, "tokens written at each length, fewer than the shortest has", full=48)

    def __post_init__(self) -> None:
        if self.lengths[0] <= self.new:
            raise InputError(f"sizes lengths and new: each length must be above the {self.new} new tokens")

    def run(self, setup: Setup) -> LabResult:
        points: dict[str, dict[int, MeasuredLength]] = {}
        for name, spec in self.specs().items():
            setup.progress(f"{name}: {', '.join(f'{n:,}' for n in self.lengths)} tokens")
            model = Model(nn.new(spec, setup.seed))
            points[name] = {n: measure(model, n, self.new, setup.seed) for n in self.lengths}
        first, last = self.lengths[0], self.lengths[-1]
        linear, softmax = points[LINEAR], points[SOFTMAX]
        counted = count(self.specs()[LINEAR]).cache_bytes(last, dtype="fp32")
        checks = (
            Check(f"{LINEAR}: bytes of a row at {last:,} tokens over those at {first:,}", _ratio(linear), 1.0, 1.0),
            Check(f"{SOFTMAX}: bytes of a row grow as T to the power", _power(softmax), 0.95, 1.05),
            Check(f"{LINEAR}: bytes over those that `count` gives", linear[last].nbytes / counted, 1.0, 1.0),
            Check(
                f"{LINEAR}: FLOPs of one more token by `count`, last over first",
                linear[last].flops / linear[first].flops,
                1.0,
                1.0,
            ),
            Check("tokens that differ from those without a cache", sum(p.tokens for p in _all(points)), most=0),
            Check("largest difference of a log-probability", max(p.difference for p in _all(points)), most=1e-4),
        )
        meaning = (
            "A weight of linear attention is a product of features, so the sums over all tokens so far are all that the"
            " next one needs of them: K times Kv + 1 numbers for each group of heads, after ten tokens as after ten"
            " thousand. Softmax attention needs each key for itself, and its cache and the work of one more token grow"
            " with the text. The state is kept in fp32 whatever else a cache keeps. A sum cannot forget a token: the"
            " engine takes it back only whole, or by the guesses of one step. What is computed is another function than"
            " softmax attention."
        )
        sections = (self._table(points), _curve(points))
        return LabResult("Does linear attention write with a state of constant size?", meaning, checks, sections)

    def specs(self) -> dict[str, ModelSpec]:
        """The same decoder with both kinds of attention."""
        plain = block(self.width, HEADS, 2 * self.width)
        linear = replace(plain, attn=replace(plain.attn, mechanism=LinearKernelSpec()))
        inside = RopeSpec(width=self.width // HEADS)
        blocks = {LINEAR: linear, SOFTMAX: plain}
        return {name: decoder(VOCAB, [kind] * LAYERS, inside=inside) for name, kind in blocks.items()}

    def _table(self, points: dict[str, dict[int, MeasuredLength]]) -> TableSection:
        rows = [
            [f"{n:,}", name, f"{point.nbytes:,} bytes", f"{point.flops:,}", f"{point.difference:.1e}"]
            for n in self.lengths
            for name, point in ((name, of_length[n]) for name, of_length in points.items())
        ]
        header = ("T", "", "cache of a row", "FLOPs of one more token", "largest difference, nats")
        return TableSection("The cache over the length", header, rows)


@dataclass(frozen=True)
class MeasuredLength:
    """At one length: bytes of a row in the cache, FLOPs of one more token, and the largest difference of a
    log-probability (nats) from that of a forward over the whole text; `tokens` of those differ."""

    nbytes: int
    flops: int
    difference: float
    tokens: int


def measure(model: Model, length: int, new: int, seed: int) -> MeasuredLength:
    """Write the last `new` of `length` tokens, the prompt read in two pieces."""
    noise = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (length - new,), generator=noise).tolist()
    engine = Engine(model.module, chunk=-(-len(prompt) // 2))
    engine.cache.longest = length
    (row,) = engine.add(Request(prompt=prompt, max_new_tokens=new, all_logits=True, keep_slot=True))
    seen: list[Tensor] = []
    while engine.rows:
        seen += [output.logits for output in engine.step() if output.logits is not None]
    written = torch.cat(seen)[len(prompt) - 1 :].log_softmax(-1)
    whole = model.logits([row.ids[:-1]])[0][len(prompt) - 1 :].log_softmax(-1)
    differing = int((whole.argmax(-1) != torch.tensor(row.new)).sum())
    flops = count(model.spec).decode_flops(length)
    return MeasuredLength(engine.cache.nbytes, flops, float((written - whole).abs().max()), differing)


def _all(points: dict[str, dict[int, MeasuredLength]]) -> list[MeasuredLength]:
    return [point for of_length in points.values() for point in of_length.values()]


def _ratio(points: dict[int, MeasuredLength]) -> float:
    return points[max(points)].nbytes / points[min(points)].nbytes


def _power(points: dict[int, MeasuredLength]) -> float:
    return power(list(points), [point.nbytes for point in points.values()])


def _curve(points: dict[str, dict[int, MeasuredLength]]) -> Curve:
    lines = {name: [(float(n), float(p.nbytes)) for n, p in of_length.items()] for name, of_length in points.items()}
    return Curve("Bytes of a row in the cache", "T", "bytes", lines, {}, "xy")
