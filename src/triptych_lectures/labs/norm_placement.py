"""Pre-norm and post-norm, trained with and without a warm-up, over depth (Xiong et al. 2020; lectures L0, L1).

Each stack has to carry the symbol it reads to its head.  An own symbol needs no attention, so that a stack fails at it
for one reason: it cannot be trained at this learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych import nn
from triptych.page import Curve, TableSection
from triptych_lectures.labs import deep_stacks
from triptych_lectures.labs.deep_stacks import LEARNED, POST, PRE, StackSizes
from triptych_lectures.labs.lab import Check, LabResult, Setup, Size, size
from triptych_lectures.labs.trained import GeneratedTask, Shuffled, TrainedRun, train

WITHOUT, WITH = "no warm-up", "warm-up"


@dataclass(frozen=True)
class NormPlacementLab(StackSizes):
    """Each placement of the norm, with and without a warm-up, at each depth; then shuffled answers."""

    name = "norm-placement"
    falsified_by = (
        "Post-norm that learns without a warm-up at every depth, or that a warm-up helps at none of them, would have"
        " shown the claim false. So would pre-norm that needs a warm-up too, for then the place of the norm is not the"
        " reason."
    )
    seeds = 5
    full: ClassVar[Mapping[str, Size]] = {
        "depths": (4, 6, 8, 10, 12, 16, 64)
    }  # how deep a stack a warm-up saves differs from seed to seed

    depths: tuple[int, ...] = size((4, 6), "layers of the stacks, in ascending order", ascending=True)
    warmup: float = size(
        0.5, "share of the steps over which the learning rate rises, where there is a warm-up; at most 1", most=1
    )

    def run(self, setup: Setup) -> LabResult:
        runs: Runs = {}
        for depth in self.depths:
            for name in (PRE, POST):
                for rise in (WITHOUT, WITH):
                    setup.progress(f"{name}, {rise}, {depth} layers: {self.steps} steps")
                    runs[name, rise, depth] = self._train(name, rise, depth, self.task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._train(PRE, WITHOUT, self.depths[0], Shuffled(self.task), setup.seed)
        return LabResult(
            "Which placement of the norm needs a warm-up?",
            self._meaning(runs),
            self._checks(runs, shuffled),
            (self._table(runs), self._curve(runs)),
        )

    def _checks(self, runs: Runs, shuffled: TrainedRun) -> tuple[Check, ...]:
        shallow, deep = self.depths[0], self.depths[-1]
        learned = {key: run.learned for key, run in runs.items()}
        gain = {
            name: [learned[name, WITH, depth] - learned[name, WITHOUT, depth] for depth in self.depths]
            for name in (PRE, POST)
        }
        worst = min(value for (name, _, _), value in learned.items() if name == PRE)
        return (
            Check("pre-norm, the worst of all depths, with and without a warm-up: learned", worst, least=LEARNED),
            Check(f"post-norm, {shallow} layers, warm-up: learned", learned[POST, WITH, shallow], least=LEARNED),
            Check(f"post-norm, {deep} layers, no warm-up: learned", learned[POST, WITHOUT, deep], most=LEARNED),
            Check(
                "post-norm: learned more with a warm-up, at the depth where it is most", max(gain[POST]), least=LEARNED
            ),
            Check(
                "control: pre-norm: learned more or less with a warm-up, at the depth where it is most",
                max(map(abs, gain[PRE])),
                most=LEARNED / 2,
            ),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
        )

    def _meaning(self, runs: Runs) -> str:
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
        return deep_stacks.stack(self, name, depth, seed, self.width**-0.5)

    def _train(self, name: str, rise: str, depth: int, task: GeneratedTask, seed: int) -> TrainedRun:
        budget = self.budget(self.warmup if rise == WITH else 0.0)
        return train(self.stack(name, depth, seed), task, budget, seed)

    def _table(self, runs: Runs) -> TableSection:
        columns = [(name, rise) for name in (PRE, POST) for rise in (WITHOUT, WITH)]
        rows = [
            [str(depth), *(f"{runs[name, rise, depth].end:.2f}" for name, rise in columns)] for depth in self.depths
        ]
        guess = runs[PRE, WITHOUT, self.depths[0]].guess
        title = f"Nats a symbol after {self.steps} steps; a guess has {guess:.2f}, the best is 0"
        return TableSection(title, ("layers", *(f"{name}, {rise}" for name, rise in columns)), rows)

    def _curve(self, runs: Runs) -> Curve:
        depth = max(self.depths, key=lambda d: runs[POST, WITH, d].learned - runs[POST, WITHOUT, d].learned)
        lines = {f"{name}, {rise}": run.losses for (name, rise, at), run in runs.items() if at == depth}
        return Curve(
            f"{depth} layers in training", "step", "nats a symbol", lines, {"guess": runs[PRE, WITH, depth].guess}
        )


Runs = dict[tuple[str, str, int], TrainedRun]
