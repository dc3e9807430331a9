"""Training deep stacks: the placement of the norms, and the initialization of the weights.

Each stack learns to name the symbol that it reads, which needs no attention: it fails only where it cannot be trained
at this learning rate.  `norm-placement` (Xiong et al. 2020), `residual-scaling` (Radford et al. 2019; Zhang et al.
2019; lectures L0, L1).
"""

from collections.abc import Sequence
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.page import TableSection
from triptych.spec import LayerNormSpec, NormsSpec, SinusoidalSpec
from triptych.train import collate
from triptych.train.objectives import final
from . import generated_tasks as tasks
from .bounds import rounded_down, rounded_up
from .generated_tasks import LAST, GeneratedTask, Places, ShuffledTask, TrainedRun, TrainingBudget
from .lab import Check, Clauses, Ints, Lab, LabResult, Sections, Setup, clause, size
from .small_models import block, decoder, geometric_mean, line_table, power

PlacementRuns = dict[tuple[str, str, int], list[TrainedRun]]
ScalingRuns = dict[tuple[str, int], list[TrainedRun]]
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
        return tasks.train(module, task, TrainingBudget(self.steps, self.rows, self.rate, warmup), seed)

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
        tasks.redraw(module, seed, std, written=written)
        return module


WITHOUT, WITH = "no warm-up", "warm-up"
COLUMNS = tuple(product((PRE, POST), (WITHOUT, WITH)))


class NormPlacementLab(StackLab):
    name = "norm-placement"

    depths: Ints = size((4, 7), "layers of the stacks, ascending", ascending=True, full=(4, 7, 8, 10, 12, 16, 64, 128))
    moderate: int = size(7, "the one of these depths at which post-norm is trained from several initializations")
    draws: int = size(5, "how many initializations")
    warmup: float = size(0.5, "share of the steps in which the learning rate rises, with a warm-up; at most 1", most=1)

    def __post_init__(self) -> None:
        if self.moderate not in self.depths:
            raise InputError(f"sizes moderate {self.moderate} and depths: it must be one of the depths")

    def run(self, setup: Setup) -> LabResult:
        runs: PlacementRuns = {}
        for depth, (name, rise) in product(self.depths, COLUMNS):
            setup.progress(f"{name}, {rise}, {depth} layers: {self.steps} steps")
            draws = self.draws if (name, depth) == (POST, self.moderate) else 1
            seeds = range(setup.seed * self.draws, setup.seed * self.draws + draws)
            runs[name, rise, depth] = [self._train(name, rise, depth, self.task, seed) for seed in seeds]
        setup.progress("shuffled answers")
        shuffled = self._train(PRE, WITHOUT, self.depths[0], ShuffledTask(self.task), setup.seed)
        return self.result(self._conclusion(runs, shuffled), self._sections(runs))

    def _conclusion(self, runs: PlacementRuns, shuffled: TrainedRun) -> Clauses:
        learned = {key: [run.learned for run in own] for key, own in runs.items()}
        worst = min(min(own) for (name, _, _), own in learned.items() if name == PRE)
        apart = [learned[PRE, WITH, depth][0] - learned[PRE, WITHOUT, depth][0] for depth in self.depths]
        without, with_ = (learned[POST, rise, self.moderate] for rise in (WITHOUT, WITH))
        counts = [sum(own >= LEARNED for own in some) for some in (without, with_)]
        ended = [f"{count} of {self.draws}" for count in counts]
        post, pre = f"post-norm, {self.moderate} layers", "control: pre-norm: learned more or less with a warm-up"
        yield clause(
            f"Post-norm of {self.moderate} layers learns at least half of the task from {ended[0]} initializations"
            f" without a warm-up, and from {ended[1]} with one of {self.warmup:.0%} of the steps: on the mean"
            f" {fmean(without):z.2f} and {fmean(with_):z.2f} of it.",
            Check(f"{post}: learned more with a warm-up, mean", fmean(with_) - fmean(without), least=LEARNED / 2),
            Check(f"{post}, warm-up: learned, mean", fmean(with_), least=LEARNED),
            Check(f"{post}: initializations that learned, more with a warm-up", counts[1] - counts[0], least=1),
            instead="That a warm-up decides whether post-norm learns was not seen",
        )
        yield clause(
            f"Pre-norm learns at every depth either way ({worst:.1%} of it at the worst). Control: shuffled answers"
            " are not learned.",
            Check("pre-norm, the worst of all depths, with and without a warm-up: learned", worst, least=LEARNED),
            Check(f"{pre}, at the depth where it is most", max(map(abs, apart)), most=LEARNED / 2),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
            instead="Pre-norm needed a warm-up or did not learn, or shuffled answers were learned",
        )
        if (deep := self.depths[-1]) > self.moderate:
            best = max(learned[POST, rise, deep][0] for rise in (WITHOUT, WITH))
            most = min(learned[PRE, rise, deep][0] for rise in (WITHOUT, WITH))
            yield clause(
                f"In {deep} layers this warm-up is not enough: post-norm learned {rounded_up(best, '.2f')} at most"
                f" with and without it, pre-norm {rounded_down(most, '.2f')} at least.",
                Check(f"post-norm, {deep} layers: learned, the better of both", best, most=LEARNED),
                Check(f"pre-norm, {deep} layers: learned, the worse of both", most, least=LEARNED),
                instead="The deepest stacks did not go as claimed",
            )

    def stack(self, name: str, depth: int, seed: int) -> nn.Transformer:
        """A decoder of `depth` blocks with norms placed as `name` says; what writes to the stream is not scaled."""
        return self.drawn(name, depth, seed, self.width**-0.5)

    def _train(self, name: str, rise: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
        return self.trained(self.stack(name, depth, seed), task, seed, self.warmup if rise == WITH else 0.0)

    def _sections(self, runs: PlacementRuns) -> Sections:
        ends, shown = dict[str, list[float]](), dict[str, TrainedRun]()
        for name, rise in COLUMNS:
            ends[f"{name}, {rise}"] = [fmean(run.end for run in runs[name, rise, depth]) for depth in self.depths]
            shown[f"{name}, {rise}"] = runs[name, rise, self.moderate][0]
        guess = shown[f"{PRE}, {WITHOUT}"].guess
        title = f"Nats a symbol after {self.steps} steps; a guess has {guess:.2f}, the best is 0"
        yield line_table(title, "layers", self.depths, ends, ".2f")
        yield tasks.training_curve(f"{self.moderate} layers in training", "nats a symbol", shown)


SCALED, PLAIN, FIXED, LARGE, ZERO = "scaled by 1/√(2L)", "not scaled", "all 0.02", "all 4 times larger", "0"
WAYS = (SCALED, PLAIN, FIXED, LARGE, ZERO)


class ResidualScalingLab(StackLab):
    name = "residual-scaling"

    depths: Ints = size((2, 16), "layers of the trained stacks, two or more, ascending", values=2, ascending=True)
    untrained: Ints = size((4, 16, 64), "layers of the stacks measured before training", values=2, ascending=True)
    draws: int = size(2, "stacks drawn in each way, over which the mean is taken")
    steps: int = size(80, "training steps")

    def run(self, setup: Setup) -> LabResult:
        task = self.task
        seeds = range(setup.seed * self.draws, (setup.seed + 1) * self.draws)
        growth = {
            way: [geometric_mean([self._growth(way, depth, task, seed) for seed in seeds]) for depth in self.untrained]
            for way in (SCALED, PLAIN)
        }
        runs: ScalingRuns = {}
        for depth, way in product(self.depths, WAYS):
            setup.progress(f"{depth} layers, {way}: {self.steps} steps")
            own = seeds[:1] if way == LARGE else seeds
            runs[way, depth] = [self._train(way, depth, task, seed) for seed in own]
        setup.progress("shuffled answers")
        shuffled = self._train(ZERO, self.depths[0], ShuffledTask(task), setup.seed)
        title = "Variance of the stream after the last block over before the first"
        return self.result(
            self._conclusion(runs, growth, shuffled),
            (line_table(title, "layers", self.untrained, growth, ".3g"), *self._sections(runs)),
            f"A number of steps of {self.steps + 1} means that half was not reached. Pre-norm hides the growth from the"
            " layers themselves, so unscaled stacks are slow here and do not fail. One width, one learning rate.",
        )

    def _conclusion(self, runs: ScalingRuns, growth: dict[str, list[float]], shuffled: TrainedRun) -> Clauses:
        """The variances of L independent sublayers add up: unscaled they grow as L, scaled they do not.  A delay counts
        from the first step."""
        shallow, deep, most = self.depths[0], self.depths[-1], self.untrained[-1]
        halves = {way: self._half(runs[way, deep]) for way in WAYS}
        late = {way: halves[way] - halves[SCALED] for way in WAYS}
        early = self._half(runs[PLAIN, shallow]) - self._half(runs[SCALED, shallow])
        scaled, plain = (power(self.untrained, growth[way]) for way in (SCALED, PLAIN))
        half, soonest = {way: f"{steps:.4g}" for way, steps in halves.items()}, min(WAYS, key=lambda way: halves[way])
        ends = {way: fmean(run.learned for run in runs[way, deep]) for way in WAYS}
        grows, later = "the stream's variance before training grows as depth to the power", "steps later than scaled"
        yield clause(
            "The variances of what the sublayers add sum up: a new stack of"
            f" {most} layers ends with {growth[PLAIN][-1]:.0f} times the variance of its embedding, and with"
            f" {growth[SCALED][-1]:.1f} times where the matrices that write are divided by √(2L).",
            Check(f"not scaled: {grows}", plain, least=0.5, most=1.5),
            Check(f"scaled: {grows}", scaled, least=-0.25, most=0.25),
            instead="The stream of new stacks did not grow as claimed",
        )
        yield clause(
            f"Trained, {deep} layers learn half of the task after {half[SCALED]} steps scaled and {half[PLAIN]}"
            f" unscaled; in {shallow} layers, where there is little to scale, the delay is {early:.4g} steps.",
            Check(f"scaled, {deep} layers: learned", ends[SCALED], least=LEARNED),
            Check(f"not scaled, {deep} layers: {later} to learn half", late[PLAIN], least=LAST / 2),
            Check(f"control: delay at {deep} layers less that at {shallow}, steps", late[PLAIN] - early, least=1.0),
            instead="That scaling makes deep stacks learn sooner was not seen",
        )
        yield clause(
            f"Neither is later than scaled: layers that begin by adding nothing ({half[ZERO]} steps), and at this"
            f" width all matrices with 0.02 ({half[FIXED]}). Soonest of all is: {soonest}. Matrices 4 times too"
            f" large learn {ends[LARGE]:.0%} of the task.",
            Check(f"outputs that begin at 0, {deep} layers: {later}", late[ZERO], most=0.0),
            Check(f"all 0.02, {deep} layers: {later}", late[FIXED], most=0.0),
            Check(f"these two, {deep} layers: learned, the least", min(ends[ZERO], ends[FIXED]), least=LEARNED),
            Check(f"all 4 times larger, {deep} layers: learned", ends[LARGE], most=LEARNED),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
            instead="The other ways to begin did not go as claimed",
        )

    def stack(self, way: str, depth: int, seed: int) -> nn.Transformer:
        """A pre-norm decoder of `depth` blocks whose matrices are drawn as `way` says."""
        unit = self.width**-0.5
        std = {FIXED: 0.02, LARGE: 4 * unit}.get(way, unit)
        written = {SCALED: unit / (2 * depth) ** 0.5, ZERO: 0.0}.get(way, std)
        return self.drawn(PRE, depth, seed, std, written=written)

    def _train(self, way: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
        return self.trained(self.stack(way, depth, seed), task, seed)

    def _half(self, runs: Sequence[TrainedRun]) -> float:
        return tasks.mean_steps(runs, LEARNED, self.steps)

    @torch.no_grad()
    def _growth(self, way: str, depth: int, task: GeneratedTask, seed: int) -> float:
        """The variance of the stream after the last block of a new stack, over that before the first."""
        module = self.stack(way, depth, seed)
        assert module.decoder is not None
        streams: list[Tensor] = []
        module.decoder.blocks[0].register_forward_hook(lambda _, inputs, __: streams.append(inputs[0]))
        module.decoder.blocks[-1].register_forward_hook(lambda _, __, output: streams.append(output))
        final(module, collate(tasks.held_out_rows(task, self.rows, seed)))
        first, last = streams
        return float(last.var() / first.var())

    def _sections(self, runs: ScalingRuns) -> Sections:
        deep, depths = self.depths[-1], self.depths
        rows = [
            [way, *(f"{self._half(runs[way, depth]):.4g}" for depth in depths)]
            + [f"{fmean(run.end for run in runs[way, depth]):.2f}" for depth in depths]
            for way in WAYS
        ]
        columns = [f"{what}, {depth} layers" for what in ("steps to half", "nats") for depth in depths]
        title = f"{self.steps} steps; a guess has {runs[SCALED, deep][0].guess:.2f} nats, the best is 0"
        yield TableSection(title, ("what writes to the stream", *columns), rows)
        first = {way: runs[way, deep][0] for way in WAYS}
        yield tasks.training_curve(f"{deep} layers in training", "nats a symbol", first)
