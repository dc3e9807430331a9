"""The weights that a deep stack begins with, trained (Radford et al. 2019; Zhang et al. 2019; lectures L0, L1).

Pre-norm stacks of the lab `norm-placement`, with the matrices that write to the residual stream drawn in several ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych import nn
from triptych.page import Curve, TableSection
from triptych.train import collate
from triptych.train.objectives import final
from triptych_lectures.labs import deep_stacks
from triptych_lectures.labs.deep_stacks import LEARNED, PRE, StackSizes
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.small import power
from triptych_lectures.labs.trained import GeneratedTask, Shuffled, TrainedRun, held_out_rows, train

SCALED, PLAIN, FIXED, LARGE, ZERO = "scaled by 1/√(2L)", "not scaled", "all 0.02", "all 4 times larger", "0"


@dataclass(frozen=True)
class ResidualScalingLab(StackSizes):
    """The stream of untrained stacks over depth; then each way of drawing, trained at each depth; shuffled answers."""

    name = "residual-scaling"
    falsified_by = (
        "A stream that does not grow with depth where nothing is scaled, or that grows where it is, would have shown"
        " the claim false. So would a deep stack that learns no later unscaled than scaled, or the same delay at two"
        " layers, where there is little to scale."
    )
    seeds = 5

    depths: tuple[int, ...] = size(
        (2, 16), "layers of the trained stacks, in ascending order, at least two of them", values=2, ascending=True
    )
    untrained: tuple[int, ...] = size(
        (4, 16, 64), "layers of the stacks whose stream is measured before training", values=2, ascending=True
    )
    steps: int = size(80, "training steps")

    def run(self, setup: Setup) -> LabResult:
        task = self.task
        growth = {
            way: [self._growth(way, depth, task, setup.seed) for depth in self.untrained] for way in (SCALED, PLAIN)
        }
        runs: Runs = {}
        for depth in self.depths:
            for way in WAYS:
                setup.progress(f"{depth} layers, {way}: {self.steps} steps")
                runs[way, depth] = self._train(way, depth, task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._train(ZERO, self.depths[0], Shuffled(task), setup.seed)
        return LabResult(
            "How should the weights that write to the residual stream begin?",
            self._meaning(runs, growth),
            self._checks(runs, growth, shuffled),
            (self._growth_table(growth), self._table(runs), self._curve(runs)),
        )

    def _checks(self, runs: Runs, growth: dict[str, list[float]], shuffled: TrainedRun) -> tuple[Check, ...]:
        """The variances of L independent sublayers add up: unscaled they grow as L, scaled they do not.  A delay counts
        from the first step."""
        shallow, deep = self.depths[0], self.depths[-1]
        delay = {depth: _half(runs, PLAIN, depth) - _half(runs, SCALED, depth) for depth in (shallow, deep)}
        ratio = delay[shallow] / delay[deep] if delay[deep] else math.nan
        powers = {way: power(self.untrained, ratios) for way, ratios in growth.items()}
        return (
            Check(
                "not scaled: the stream's variance before training grows as depth to the power",
                powers[PLAIN],
                least=0.5,
            ),
            Check(
                "scaled: the stream's variance before training grows as depth to the power, either way",
                abs(powers[SCALED]),
                most=0.25,
            ),
            Check(f"scaled, {deep} layers: learned", runs[SCALED, deep].learned, least=LEARNED),
            Check(f"not scaled, {deep} layers: steps later than scaled to learn half", delay[deep], least=1.0),
            Check(f"control: delay of not scaled at {shallow} layers over that at {deep}", ratio, most=0.5),
            Check(
                f"outputs that begin at 0, {deep} layers: steps earlier than scaled to learn half",
                _half(runs, SCALED, deep) - _half(runs, ZERO, deep),
                least=0.0,
            ),
            Check(f"all 0.02, {deep} layers: learned", runs[FIXED, deep].learned, least=LEARNED),
            Check(f"all 4 times larger, {deep} layers: learned", runs[LARGE, deep].learned, most=LEARNED),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
        )

    def _meaning(self, runs: Runs, growth: dict[str, list[float]]) -> str:
        deep, most = self.depths[-1], self.untrained[-1]
        half = {way: f"{_half(runs, way, deep):.0f}" for way in WAYS}
        return (
            "Every sublayer adds to the stream, and the variances of independent sums add up. With matrices that keep"
            f" the size of their input, a new stack of {most} layers ends with {growth[PLAIN][-1]:.0f} times the"
            f" variance that its embedding had, with those that write divided by √(2L) with {growth[SCALED][-1]:.1f}"
            " times, at any depth. What is added is noise at first, which hides the symbol that the head has to name:"
            f" {deep} layers learn half of the task after {half[SCALED]} steps scaled and {half[PLAIN]} unscaled, and"
            f" soonest where the layers begin by adding nothing, after {half[ZERO]}. At this width 0.02 is nearly"
            f" nothing too ({half[FIXED]}); it is not a rule for every width. Matrices 4 times too large make attention"
            " choose single keys, and steps of one size change them too little. Pre-norm hides the growth from the"
            " layers themselves, so that unscaled stacks are slow here and do not fail. Where a number of steps is"
            f" {self.steps + 1}, half was not reached. Learned is the share of the way from the loss of a guess, 0, to"
            " the best one, 1."
        )

    def stack(self, way: str, depth: int, seed: int) -> nn.Transformer:
        """A pre-norm decoder of `depth` blocks whose matrices are drawn as `way` says."""
        unit = self.width**-0.5
        stds = {
            SCALED: (unit, unit / (2 * depth) ** 0.5),
            PLAIN: (unit, unit),
            FIXED: (0.02, 0.02),
            LARGE: (4 * unit, 4 * unit),
            ZERO: (unit, 0.0),
        }
        std, written = stds[way]
        return deep_stacks.stack(self, PRE, depth, seed, std, written=written)

    def _train(self, way: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
        return train(self.stack(way, depth, seed), task, self.budget(), seed)

    @torch.no_grad()
    def _growth(self, way: str, depth: int, task: GeneratedTask, seed: int) -> float:
        """The variance of the stream after the last block of a new stack, over that before the first."""
        module = self.stack(way, depth, seed)
        assert module.decoder is not None
        streams: list[Tensor] = []
        module.decoder.blocks[0].register_forward_hook(lambda _, inputs, __: streams.append(inputs[0]))
        module.decoder.blocks[-1].register_forward_hook(lambda _, __, output: streams.append(output))
        final(module, collate(held_out_rows(task, self.rows, seed)))
        first, last = streams
        return float(last.var() / first.var())

    def _growth_table(self, growth: dict[str, list[float]]) -> TableSection:
        rows = [[str(depth), *(f"{growth[way][i]:.3g}" for way in growth)] for i, depth in enumerate(self.untrained)]
        return TableSection(
            "Variance of the stream after the last block over before the first", ("layers", *growth), rows
        )

    def _table(self, runs: Runs) -> TableSection:
        rows = [
            [way, *(f"{_half(runs, way, depth):.0f}" for depth in self.depths)]
            + [f"{runs[way, depth].end:.2f}" for depth in self.depths]
            for way in WAYS
        ]
        header = ("what writes to the stream", *(f"steps to half, {depth} layers" for depth in self.depths))
        nats = (f"nats, {depth} layers" for depth in self.depths)
        guess = runs[SCALED, self.depths[0]].guess
        return TableSection(f"{self.steps} steps; a guess has {guess:.2f} nats, the best is 0", (*header, *nats), rows)

    def _curve(self, runs: Runs) -> Curve:
        deep = self.depths[-1]
        lines = {way: runs[way, deep].losses for way in WAYS}
        return Curve(f"{deep} layers in training", "step", "nats a symbol", lines, {"guess": runs[SCALED, deep].guess})


WAYS = (SCALED, PLAIN, FIXED, LARGE, ZERO)
Runs = dict[tuple[str, int], TrainedRun]


def _half(runs: Runs, way: str, depth: int) -> float:
    """The step at which the loss was half the way from a guess to the best; one past the last where it never was."""
    run = runs[way, depth]
    return min(run.steps_to(LEARNED), len(run.losses) + 1.0)
