"""Additive and dot-product scores trained side by side, over d (Vaswani et al. 2017, section 3.2.1; lecture L4).

The lab `additive-vs-dot` compares their cost and their sharpness before training.  Here one head must find the
symbol that stands some places back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from triptych.page import Curve, TableSection
from triptych.spec import AdditiveSpec, AttentionSpec, attention
from triptych_lectures.labs.lab import Check, LabResult, Setup, Size, size
from triptych_lectures.labs.trained import GeneratedTask, ReadingSizes, Shuffled, TrainedHead, attention_alone

DOT, PLAIN, ADDITIVE = "dot product, 1/√d", "dot product, no scale", "additive"
NAMES = (DOT, PLAIN, ADDITIVE)


@dataclass(frozen=True)
class TrainedScoresLab(ReadingSizes):
    """One head for each score and each d; shuffled answers."""

    name = "trained-scores"
    falsified_by = (
        "That the additive score learns no more than the dot product without the division at the largest d would have"
        " shown the claim false, and so would a difference at the smallest d. If the dot product with the division"
        " stayed behind the additive score, the division would not be what makes up for the difference."
    )
    seeds = 5
    full: ClassVar[Mapping[str, Size]] = {"widths": (16, 512, 2048), "tested": 200}

    widths: tuple[int, ...] = size(
        (16, 2048), "d, the widths of queries and keys, in ascending order", values=2, ascending=True
    )

    def run(self, setup: Setup) -> LabResult:
        heads: Heads = {}
        for d in self.widths:
            for name in NAMES:
                setup.progress(f"d {d}, {name}: {self.steps} steps")
                heads[name, d] = self._trained(name, d, self.task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._trained(ADDITIVE, self.widths[0], Shuffled(self.task), setup.seed)
        return LabResult(
            "Does the additive score learn where the dot product does not?",
            self._meaning(heads),
            self._checks(heads, shuffled),
            (self._table(heads), self._curve(heads)),
        )

    def _checks(self, heads: Heads, shuffled: TrainedHead) -> tuple[Check, ...]:
        """A head has learned if three quarters of its answers are right; a quarter of them is a difference."""
        narrow, wide = self.widths[0], self.widths[-1]
        small = abs(heads[ADDITIVE, narrow].right - heads[PLAIN, narrow].right)
        apart = [abs(heads[ADDITIVE, d].right - heads[DOT, d].right) for d in self.widths]
        return (
            Check(
                "additive: answers right, the worst over all d",
                min(heads[ADDITIVE, d].right for d in self.widths),
                0.75,
            ),
            Check(
                f"d {wide}: answers right with the additive score, less with the dot product without scale",
                heads[ADDITIVE, wide].right - heads[PLAIN, wide].right,
                least=0.25,
            ),
            Check(
                f"control: d {narrow}: difference of answers right, additive and dot product without scale",
                small,
                most=0.25,
            ),
            Check("additive and 1/√d: difference of answers right, the largest over all d", max(apart), most=0.25),
            Check("control: answers right, trained on shuffled ones", shuffled.right, most=1 / self.symbols + 0.1),
        )

    def _meaning(self, heads: Heads) -> str:
        narrow, wide = self.widths[0], self.widths[-1]
        shares = {name: f"{heads[name, wide].right:.0%}" for name in NAMES}
        return (
            f"At d {narrow} both scores learn to read the symbol {self.back} places back, and the dot product needs no"
            f" scale. At d {wide} it does: without one {shares[PLAIN]} of the answers are right after {self.steps}"
            f" steps, with it {shares[DOT]}. The additive score has no scale ({shares[ADDITIVE]} right): each hidden"
            " unit adds at most its weight, whatever the size of queries and keys, so that the first scores do not"
            " saturate softmax. At widths in between, the dot product without a scale may only learn later: AdamW gets"
            " out of a softmax that is not wholly saturated. What the additive score had ahead the division makes up"
            " for, and it costs nothing; lab `additive-vs-dot` has the price of the other. One task and one learning"
            " rate; that one score is better than the other where both learn, as comparisons in translation found, is"
            " not decided here."
        )

    def scorer(self, name: str, d: int) -> AttentionSpec:
        """One head whose queries and keys have width d and whose values that of the stream."""
        mechanism = AdditiveSpec(width=d) if name == ADDITIVE else None
        scale = None if name == DOT else 1.0
        return attention(self.width, 1, head_width=d, value_width=self.width, mechanism=mechanism, scale=scale)

    def _trained(self, name: str, d: int, task: GeneratedTask, seed: int) -> TrainedHead:
        module = attention_alone(self.scorer(name, d), self.symbols, self.length, seed)
        return self.trained(module, task, seed)

    def _table(self, heads: Heads) -> TableSection:
        header = ("d", *(f"right, {name}" for name in NAMES), *(f"nats, {name}" for name in NAMES))
        rows = [
            [str(d), *(f"{heads[name, d].right:.0%}" for name in NAMES)]
            + [f"{heads[name, d].run.end:.2f}" for name in NAMES]
            for d in self.widths
        ]
        chance = f"{1 / self.symbols:.0%} are right by chance"
        return TableSection(f"One head after {self.steps} steps; {chance}", header, rows)

    def _curve(self, heads: Heads) -> Curve:
        wide = self.widths[-1]
        lines = {name: heads[name, wide].run.losses for name in NAMES}
        guess = {"guess": heads[DOT, wide].run.guess}
        return Curve(f"In training, d {wide}", "step", "nats a token", lines, guess)


Heads = dict[tuple[str, int], TrainedHead]
