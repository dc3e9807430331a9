"""Training deep stacks: the placement of the norms, and the initialization of the weights.

Each stack learns to name the symbol that it reads.

`norm-placement`: pre- and post-norm, with and without a warm-up (Xiong et al. 2020).  `residual-scaling`: the
matrices that write to the residual stream, drawn in several ways (Radford et al. 2019; Zhang et al. 2019; lectures
L0, L1).  This needs no attention, so that a stack fails at it for one reason: it cannot be trained at this learning
rate.
"""

import math
from itertools import product

import torch
from torch import Tensor

from triptych import nn
from triptych.page import Curve, TableSection
from triptych.spec import LayerNormSpec, NormsSpec, SinusoidalSpec
from triptych.train import collate
from triptych.train.objectives import final
from .generated_tasks import (
    GeneratedTask,
    Places,
    ShuffledTask,
    TrainedRun,
    TrainingBudget,
    held_out_rows,
    redraw,
    train,
    training_curve,
)
from .lab import Check, Checks, Clause, Ints, Lab, LabResult, Setup, size
from .small_models import block, decoder, line_table, power

PlacementRuns = dict[tuple[str, str, int], TrainedRun]
ScalingRuns = dict[tuple[str, int], TrainedRun]
HEADS = 4
LEARNED = 0.5  # a stack was trained if its loss went at least half the way from a guess to the best one
PRE, POST = "pre-norm", "post-norm"


class StackLab(Lab):
    """What a run of a lab can change: the stacks, their task and their training."""

    width: int = size(32, f"width of the residual stream, a multiple of {HEADS}", multiple=HEADS)
    symbols: int = size(16, "different symbols, two or more", least=2)
    length: int = size(16, "symbols of a row")
    steps: int = size(140, "training steps")
    rows: int = size(8, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW")

    @property
    def task(self) -> Places:
        """To name the symbol at hand, which needs no attention."""
        return Places(self.symbols, self.length, (0,))

    def trained(self, module: nn.Transformer, task: GeneratedTask, seed: int, warmup: float = 0.0) -> TrainedRun:
        return train(module, task, TrainingBudget(self.steps, self.rows, self.rate, warmup), seed)

    def drawn(
        self, placement: str, depth: int, seed: int, std: float, *, written: float | None = None
    ) -> nn.Transformer:
        """A decoder of `depth` blocks with norms placed as `placement` says.

        Its matrices are normal with standard deviation `std`, those that write to the residual stream with `written`,
        where it is given.
        """
        norm = LayerNormSpec(width=self.width)
        norms = NormsSpec(pre=norm) if placement == PRE else NormsSpec(post=norm)
        blocks = [block(self.width, HEADS, 2 * self.width, norms=norms)] * depth
        positions = SinusoidalSpec(width=self.width)
        module = nn.new(decoder(self.symbols, blocks, embedded=positions, final_norm=norms.pre), seed)
        redraw(module, seed, std, written=written)
        return module


WITHOUT, WITH = "no warm-up", "warm-up"
COLUMNS = tuple(product((PRE, POST), (WITHOUT, WITH)))


class NormPlacementLab(StackLab):
    """Each placement of the norm, with and without a warm-up, at each depth; then shuffled answers."""

    name = "norm-placement"
    falsified_by = (
        "Post-norm that learns without a warm-up at every depth, or that a warm-up helps at none of them, would have"
        " shown the claim false. So would pre-norm that needs a warm-up too, for then the place of the norm is not the"
        " reason."
    )

    depths: Ints = size(
        (4, 6), "layers of the stacks, in ascending order", ascending=True, full=(4, 6, 8, 10, 12, 16, 64)
    )
    warmup: float = size(
        0.5, "share of the steps over which the learning rate rises, where there is a warm-up; at most 1", most=1
    )

    def run(self, setup: Setup) -> LabResult:
        runs: PlacementRuns = {}
        for depth, (name, rise) in product(self.depths, COLUMNS):
            setup.progress(f"{name}, {rise}, {depth} layers: {self.steps} steps")
            runs[name, rise, depth] = self._train(name, rise, depth, self.task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._train(PRE, WITHOUT, self.depths[0], ShuffledTask(self.task), setup.seed)
        return LabResult(
            "Which placement of the norm needs a warm-up?",
            (Clause(self._meaning(runs), self._checks(runs, shuffled)),),
            self._sections(runs),
        )

    def _checks(self, runs: PlacementRuns, shuffled: TrainedRun) -> Checks:
        shallow, deep = self.depths[0], self.depths[-1]
        learned = {key: run.learned for key, run in runs.items()}
        pre, post = (
            [learned[name, WITH, depth] - learned[name, WITHOUT, depth] for depth in self.depths]
            for name in (PRE, POST)
        )
        worst = min(value for (name, _, _), value in learned.items() if name == PRE)
        at_most = "with a warm-up, at the depth where it is most"
        return (
            Check("pre-norm, the worst of all depths, with and without a warm-up: learned", worst, least=LEARNED),
            Check(f"post-norm, {shallow} layers, warm-up: learned", learned[POST, WITH, shallow], least=LEARNED),
            Check(f"post-norm, {deep} layers, no warm-up: learned", learned[POST, WITHOUT, deep], most=LEARNED),
            Check(f"post-norm: learned more {at_most}", max(post), least=LEARNED),
            Check(f"control: pre-norm: learned more or less {at_most}", max(map(abs, pre)), most=LEARNED / 2),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
        )

    def _meaning(self, runs: PlacementRuns) -> str:
        lost = [depth for depth in self.depths if runs[POST, WITH, depth].learned < LEARNED]
        most = (
            f"At {', '.join(map(str, lost))} layers a warm-up of {self.warmup:.0%} of {self.steps} steps is not enough:"
            " what the claim says of moderate depth is not true of every depth"
            if lost
            else "With it, post-norm learns at each of these depths"
        )
        return (
            "Under post-norm every sublayer's sum is normalized, and before training the gradients of the last layers"
            f" are large at any depth; full-sized steps of {self.rate:g} from the beginning then move the stack to"
            " where it gives nearly the same for every input, and it stays there. A learning rate that rises slowly"
            f" avoids this at a moderate depth. {most}. Pre-norm leaves the residual stream alone and learns at every"
            " depth either way; a warm-up only delays it. Learned is the share of the way from the loss of a guess, 0,"
            " to the best one, 1. One learning rate, one optimizer and an easy task: the depths at which post-norm"
            " fails are theirs."
        )

    def stack(self, name: str, depth: int, seed: int) -> nn.Transformer:
        """A decoder of `depth` blocks with norms placed as `name` says; what writes to the stream is not scaled."""
        return self.drawn(name, depth, seed, self.width**-0.5)

    def _train(self, name: str, rise: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
        return self.trained(self.stack(name, depth, seed), task, seed, self.warmup if rise == WITH else 0.0)

    def _sections(self, runs: PlacementRuns) -> tuple[TableSection, Curve]:
        ends = {f"{name}, {rise}": [runs[name, rise, depth].end for depth in self.depths] for name, rise in COLUMNS}
        guess = runs[PRE, WITHOUT, self.depths[0]].guess
        title = f"Nats a symbol after {self.steps} steps; a guess has {guess:.2f}, the best is 0"
        shown = max(self.depths, key=lambda d: runs[POST, WITH, d].learned - runs[POST, WITHOUT, d].learned)
        at_depth = {f"{name}, {rise}": runs[name, rise, shown] for name, rise in COLUMNS}
        return (
            line_table(title, "layers", self.depths, ends, ".2f"),
            training_curve(f"{shown} layers in training", "nats a symbol", at_depth),
        )


SCALED, PLAIN, FIXED, LARGE, ZERO = "scaled by 1/√(2L)", "not scaled", "all 0.02", "all 4 times larger", "0"


class ResidualScalingLab(StackLab):
    """The stream of untrained stacks over depth; then each way of drawing, trained at each depth; shuffled answers."""

    name = "residual-scaling"
    falsified_by = (
        "A stream that does not grow with depth where nothing is scaled, or that grows where it is, would have shown"
        " the claim false. So would a deep stack that learns no later unscaled than scaled, or the same delay at two"
        " layers, where there is little to scale."
    )

    depths: Ints = size(
        (2, 16), "layers of the trained stacks, in ascending order, at least two of them", values=2, ascending=True
    )
    untrained: Ints = size(
        (4, 16, 64), "layers of the stacks whose stream is measured before training", values=2, ascending=True
    )
    steps: int = size(80, "training steps")

    def run(self, setup: Setup) -> LabResult:
        task = self.task
        growth = {
            way: [self._growth(way, depth, task, setup.seed) for depth in self.untrained] for way in (SCALED, PLAIN)
        }
        runs: ScalingRuns = {}
        for depth, way in product(self.depths, WAYS):
            setup.progress(f"{depth} layers, {way}: {self.steps} steps")
            runs[way, depth] = self._train(way, depth, task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._train(ZERO, self.depths[0], ShuffledTask(task), setup.seed)
        title = "Variance of the stream after the last block over before the first"
        return LabResult(
            "How should the weights that write to the residual stream begin?",
            (Clause(self._meaning(runs, growth), self._checks(runs, growth, shuffled)),),
            (line_table(title, "layers", self.untrained, growth, ".3g"), *self._sections(runs)),
        )

    def _checks(self, runs: ScalingRuns, growth: dict[str, list[float]], shuffled: TrainedRun) -> Checks:
        """The variances of L independent sublayers add up: unscaled they grow as L, scaled they do not.  A delay counts
        from the first step."""
        shallow, deep = self.depths[0], self.depths[-1]
        early, late = (_half(runs, PLAIN, depth) - _half(runs, SCALED, depth) for depth in (shallow, deep))
        scaled, plain = (power(self.untrained, growth[way]) for way in (SCALED, PLAIN))
        grows, half = "the stream's variance before training grows as depth to the power", "scaled to learn half"
        return (
            Check(f"not scaled: {grows}", plain, least=0.5),
            Check(f"scaled: {grows}, either way", abs(scaled), most=0.25),
            Check(f"scaled, {deep} layers: learned", runs[SCALED, deep].learned, least=LEARNED),
            Check(f"not scaled, {deep} layers: steps later than {half}", late, least=1.0),
            Check(
                f"control: delay of not scaled at {shallow} layers over that at {deep}",
                early / late if late else math.nan,
                most=0.5,
            ),
            Check(
                f"outputs that begin at 0, {deep} layers: steps earlier than {half}",
                _half(runs, SCALED, deep) - _half(runs, ZERO, deep),
                least=0.0,
            ),
            Check(f"all 0.02, {deep} layers: learned", runs[FIXED, deep].learned, least=LEARNED),
            Check(f"all 4 times larger, {deep} layers: learned", runs[LARGE, deep].learned, most=LEARNED),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
        )

    def _meaning(self, runs: ScalingRuns, growth: dict[str, list[float]]) -> str:
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
        return self.drawn(PRE, depth, seed, std, written=written)

    def _train(self, way: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
        return self.trained(self.stack(way, depth, seed), task, seed)

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

    def _sections(self, runs: ScalingRuns) -> tuple[TableSection, Curve]:
        deep, depths = self.depths[-1], self.depths
        rows = [
            [
                way,
                *(f"{_half(runs, way, depth):.0f}" for depth in depths),
                *(f"{runs[way, depth].end:.2f}" for depth in depths),
            ]
            for way in WAYS
        ]
        columns = [f"{what}, {depth} layers" for what in ("steps to half", "nats") for depth in depths]
        title = f"{self.steps} steps; a guess has {runs[SCALED, deep].guess:.2f} nats, the best is 0"
        return (
            TableSection(title, ("what writes to the stream", *columns), rows),
            training_curve(f"{deep} layers in training", "nats a symbol", {way: runs[way, deep] for way in WAYS}),
        )


WAYS = (SCALED, PLAIN, FIXED, LARGE, ZERO)


def _half(runs: ScalingRuns, way: str, depth: int) -> float:
    """The step at which the loss was half the way from a guess to the best; one past the last where it never was."""
    run = runs[way, depth]
    return min(run.steps_to(LEARNED), len(run.losses) + 1.0)
