"""Attention trained with and without 1/√d, over d (Vaswani et al. 2017, section 3.2.1; lectures L0 4.1, L4).

The lab `scaling` shows before training that large d saturates softmax.  This one asks what that does to learning: one
head must find the symbol that stands some places back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych import nn
from triptych.page import Curve, TableSection
from triptych.spec import attention
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.trained import (
    ReadingSizes,
    Shuffled,
    TrainedHead,
    attention_alone,
    multiply_queries_and_keys,
)

SCALED, PLAIN, SMALLER = "1/√d", "no scale", "no scale, smaller weights"


@dataclass(frozen=True)
class TrainedScaleLab(ReadingSizes):
    """One head for each d with and without the scale, and at the largest d with smaller weights; shuffled answers."""

    name = "trained-scale"
    falsified_by = (
        "That the head of the largest d learns without the division as it does with it would have shown the claim"
        " false, and so would a smallest d at which it matters too. If weights drawn smaller by that factor did not"
        " help, large scores at the beginning would not be the reason."
    )
    seeds = 5

    widths: tuple[int, ...] = size(
        (4, 64, 1024), "d, the widths of the head's queries and keys, in ascending order", values=2, ascending=True
    )
    length: int = size(32, "symbols of a row, more than `back`", least=2)

    def run(self, setup: Setup) -> LabResult:
        heads: Heads = {}
        for d in self.widths:
            for name in (SCALED, PLAIN, SMALLER)[: 3 if d == self.widths[-1] else 2]:
                setup.progress(f"d {d}, {name}: {self.steps} steps")
                heads[name, d] = self.trained(self.head(name, d, setup.seed), self.task, setup.seed)
        setup.progress("shuffled answers")
        narrow = self.head(SCALED, self.widths[0], setup.seed)
        shuffled = self.trained(narrow, Shuffled(self.task), setup.seed)
        return LabResult(
            "Does a head learn without the division by √d?",
            self._meaning(heads),
            self._checks(heads, shuffled),
            (self._table(heads), self._curve(heads)),
        )

    def _checks(self, heads: Heads, shuffled: TrainedHead) -> tuple[Check, ...]:
        """A head has learned if three quarters of its answers are right; a quarter of them is a difference."""
        narrow, wide = self.widths[0], self.widths[-1]
        chance = 1 / self.symbols
        worst = min(heads[SCALED, d].right for d in self.widths)
        apart = heads[SCALED, narrow].right - heads[PLAIN, narrow].right
        return (
            Check("1/√d: answers right, the worst over all d", worst, least=0.75),
            Check(
                f"d {wide}: answers right with 1/√d, less without",
                heads[SCALED, wide].right - heads[PLAIN, wide].right,
                least=0.25,
            ),
            Check(f"control: d {narrow}: difference of answers right with 1/√d and without", abs(apart), most=0.25),
            Check(
                f"control: d {wide}, no scale, queries and keys drawn smaller: answers right",
                heads[SMALLER, wide].right,
                least=0.75,
            ),
            Check("control: answers right, trained on shuffled ones", shuffled.right, most=chance + 0.1),
        )

    def _meaning(self, heads: Heads) -> str:
        narrow, wide = self.widths[0], self.widths[-1]
        small, large = heads[PLAIN, narrow], heads[PLAIN, wide]
        return (
            f"With 1/√d the head learns to read the symbol {self.back} places back at every d. Without it the scores of"
            f" a new head have a standard deviation of √d. At d {narrow} that is {math.sqrt(narrow):.0f} and it learns"
            f" all the same ({small.right:.0%} right); at d {wide} it is {math.sqrt(wide):.0f}, each query sees one"
            f" key, the gradient hardly reaches the scores, and {large.right:.0%} are right after {self.steps} steps."
            " The same head without the division learns when its weights are drawn smaller, so that its first scores"
            f" are those of the scaled one ({heads[SMALLER, wide].right:.0%}): what the division protects is the"
            " beginning of training."
        )

    def head(self, name: str, d: int, seed: int) -> nn.Transformer:
        """One layer of attention with one head, whose queries and keys have width d, its values that of the stream."""
        scale = None if name == SCALED else 1.0
        attn = attention(self.width, 1, head_width=d, value_width=self.width, scale=scale)
        module = attention_alone(attn, self.symbols, self.length, seed)
        if name == SMALLER:
            multiply_queries_and_keys(module, d**-0.25)
        return module

    def _table(self, heads: Heads) -> TableSection:
        names = (SCALED, PLAIN, SMALLER)
        header = ("d", *(f"right, {name}" for name in names), *(f"nats, {name}" for name in names))
        rows = [
            [
                str(d),
                *(f"{heads[name, d].right:.0%}" if (name, d) in heads else "" for name in names),
                *(f"{heads[name, d].run.end:.2f}" if (name, d) in heads else "" for name in names),
            ]
            for d in self.widths
        ]
        return TableSection(
            f"One head after {self.steps} steps; {1 / self.symbols:.0%} are right by chance", header, rows
        )

    def _curve(self, heads: Heads) -> Curve:
        wide = self.widths[-1]
        lines = {name: heads[name, wide].run.losses for name in (SCALED, PLAIN, SMALLER)}
        return Curve(f"d {wide} in training", "step", "nats a symbol", lines, {"guess": heads[SCALED, wide].run.guess})


Heads = dict[tuple[str, int], TrainedHead]
