"""Cosine scores beside dot products, trained (Henry et al. 2020; Dehghani et al. 2023).

With a norm on queries and keys the score is the cosine of their angle times √d and the norms' learned weights.  The
size of what comes in is lost, and how sharp attention can be is a parameter of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from triptych import nn
from triptych.model import Model
from triptych.page import Curve, TableSection
from triptych.spec import RMSNormSpec, attention
from triptych_lectures.labs.lab import Check, LabResult, Setup, size
from triptych_lectures.labs.trained import (
    GeneratedTask,
    ReadingSizes,
    Shuffled,
    TrainedHead,
    attention_alone,
    held_out_rows,
    multiply_queries_and_keys,
)

DOT, COSINE = "dot product", "cosine"
DRAWN, LARGER = "as drawn", "drawn larger"


@dataclass(frozen=True)
class CosineScoresLab(ReadingSizes):
    """A head with each score, from weights as they are drawn and from larger ones; shuffled answers."""

    name = "cosine-scores"
    falsified_by = (
        "The claim is false if the head with dot products learns as well from weights drawn so much larger, or if the"
        " one with cosine scores does not. A score of a new head with cosine scores above √d would show that they are"
        " not bounded."
    )
    seeds = 5

    d: int = size(64, "width of queries and keys")
    factor: float = size(8.0, "how much larger the other weights of queries and keys are drawn")
    length: int = size(16, "symbols of a row, more than `back`", least=2)

    def run(self, setup: Setup) -> LabResult:
        heads: Heads = {}
        for name in (DOT, COSINE):
            for begin in (DRAWN, LARGER):
                setup.progress(f"{name}, weights {begin}: {self.steps} steps")
                heads[name, begin] = self._trained(name, begin, self.task, setup.seed)
        setup.progress("shuffled answers")
        shuffled = self._trained(COSINE, DRAWN, Shuffled(self.task), setup.seed)
        return LabResult(
            "What do cosine scores change in training?",
            self._meaning(heads),
            self._checks(heads, shuffled),
            (self._table(heads), _curve(heads)),
        )

    def _checks(self, heads: Heads, shuffled: TrainedCosine) -> tuple[Check, ...]:
        """A head has learned if three quarters of its answers are right; a quarter of them is a difference."""
        cosine = [heads[COSINE, begin] for begin in (DRAWN, LARGER)]
        larger = f"weights {self.factor:g} times as large"
        fewer = heads[DOT, DRAWN].right - heads[DOT, LARGER].right
        return (
            Check("cosine: answers right, the worse of both beginnings", min(one.right for one in cosine), least=0.75),
            Check("dot product: answers right, weights as drawn", heads[DOT, DRAWN].right, least=0.75),
            Check(f"dot product: answers right less with {larger}", fewer, least=0.25),
            Check("cosine: largest score before training, over √d", max(one.before for one in cosine), most=1.001),
            Check(
                f"control: dot product, {larger}: largest score before training, over √d",
                heads[DOT, LARGER].before,
                least=1.001,
            ),
            Check("control: answers right, trained on shuffled ones", shuffled.right, most=1 / self.symbols + 0.1),
        )

    def _meaning(self, heads: Heads) -> str:
        plain, cosine = heads[DOT, LARGER], heads[COSINE, LARGER]
        return (
            "A dot product grows with the length of query and key, a cosine does not. From weights of queries and keys"
            f" that are {self.factor:g} times as large, the first scores of the dot product reach {plain.before:.0f}"
            f" times √d, softmax is saturated, and {plain.right:.0%} of the answers are right after {self.steps} steps."
            " With norms on queries and keys no score of a new head is above √d, whatever the weights, and"
            f" {cosine.right:.0%} are right. How sharp the head becomes is set by the norms' weights, which are"
            f" trained: after training its largest score is {cosine.after:.1f} times √d. From weights as they are drawn"
            " both learn; that cosine scores are better there is not claimed."
        )

    def head(self, name: str, begin: str, seed: int) -> nn.Transformer:
        """One layer of attention with one head; the norms of queries and keys begin with weights of 1."""
        norm = RMSNormSpec(width=self.d) if name == COSINE else None
        attn = attention(self.width, 1, head_width=self.d, value_width=self.width, q_norm=norm, k_norm=norm)
        module = attention_alone(attn, self.symbols, self.length, seed)
        if begin == LARGER:
            multiply_queries_and_keys(module, self.factor)
        return module

    def _trained(self, name: str, begin: str, task: GeneratedTask, seed: int) -> TrainedCosine:
        module = self.head(name, begin, seed)
        before = self._largest(module, task, seed)
        trained = self.trained(module, task, seed)
        return TrainedCosine(
            trained.run, trained.right, trained.parameters, before, after=self._largest(module, task, seed)
        )

    def _largest(self, module: nn.Transformer, task: GeneratedTask, seed: int) -> float:
        """The largest score of a query with a key that it sees, without its sign, over √d."""
        rows = [row.ids.tolist() for row in held_out_rows(task, 8, seed)]
        scores = Model(module).trace(rows, read=["blocks.0.attn.scores"])["blocks.0.attn.scores"]
        largest = max(float(torch.tril(own).abs().max()) for own in scores)
        return largest / math.sqrt(self.d)

    def _table(self, heads: Heads) -> TableSection:
        rows = [
            [name, begin, f"{one.right:.0%}", f"{one.run.end:.2f}", f"{one.before:.2f}", f"{one.after:.2f}"]
            for (name, begin), one in heads.items()
        ]
        header = ("score", "weights", "right", "nats at the end", "largest score / √d before", "after")
        return TableSection(f"One head after {self.steps} steps; d {self.d}", header, rows)


@dataclass(frozen=True)
class TrainedCosine(TrainedHead):
    """One head after training, and its largest score over √d before training and after it."""

    before: float
    after: float


Heads = dict[tuple[str, str], TrainedCosine]


def _curve(heads: Heads) -> Curve:
    lines = {f"{name}, weights {begin}": one.run.losses for (name, begin), one in heads.items()}
    return Curve("In training", "step", "nats a token", lines, {"guess": heads[DOT, DRAWN].run.guess})
