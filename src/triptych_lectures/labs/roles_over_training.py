"""When the head of induction appears in training, and what the loss does then (Olsson et al. 2022; lecture L0 2.3).

A row is a walk over tokens, of which each has a few that may follow it, and then the same walk again.  Which tokens may
follow is one table for all rows, which the weights can hold; which one did follow, only the row itself tells.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from triptych import nn
from triptych.errors import counted
from triptych.model import Model
from triptych.page import TableSection
from triptych.train import Example, OptimizerSettings, Pairs, Schedule
from triptych.train.objectives import Ids
from .bounds import rounded_down
from .generated_tasks import with_positions
from .induction import pattern_scores
from .lab import Check, Clauses, Lab, LabResult, Sections, Setup, clause, size
from .small_models import block, curve, fit

LOOKS = 40  # times that a model is measured in training
SOON = 0.25  # share of the training; two steps drawn at random are in a given order and so near in 1 of 5 cases
NEXT = 1 / LOOKS  # share of the training between two looks
LAST = 4  # looks whose mean is what is saved at the end
APPEARED = 0.4  # weight on the token to copy, from which a head is one of induction, as in the lab of that name


@dataclass
class History:
    """What was measured in one training run, a number a look: its steps, the losses in nats a token of the first
    reading and of the repetition, and of each look the scores of all heads by layer, [L, H]."""

    steps: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    induction: list[list[list[float]]] = field(default_factory=list)
    previous: list[list[list[float]]] = field(default_factory=list)

    @property
    def saved(self) -> list[float]:
        """Nats a token that having read the sequence saves: the in-context learning score of Olsson et al."""
        return [first - again for first, again in zip(self.first, self.again, strict=True)]

    def of_best(self, scores: list[list[list[float]]], layer: int) -> list[float]:
        """The score over training of the head of a layer that ends with the highest."""
        head = int(np.argmax(scores[-1][layer]))
        return [look[layer][head] for look in scores]


class Measures(NamedTuple):
    """What is judged of one initialization, of one layer (`shallow`) and of two: the looks at which the loss of the
    first reading, what a repetition saves and the scores of the two heads are midway; scores at the end; nats saved."""

    midway_first: float
    midway_saved: float
    midway_induction: float
    midway_previous: float
    learned: float
    induction: float
    previous: float
    saved: float
    shallow_induction: float
    shallow_previous: float
    shallow_saved: float

    @staticmethod
    def of(shallow: History, deep: History, guess: float, table: float) -> "Measures":
        """The loss of a guess and of the table are in nats a token."""
        score, previous = deep.of_best(deep.induction, 1), deep.of_best(deep.previous, 0)
        learned = min((guess - one.first[LOOKS // 3]) / (guess - table) for one in (shallow, deep))
        first, fall, rise, before = map(_midway, (deep.first, deep.saved, score, previous))
        return Measures(
            first, fall, rise, before, learned, score[-1], previous[-1], fmean(deep.saved[-LAST:]),
            max(max(look[0]) for look in shallow.induction), max(shallow.previous[-1][0]),
            fmean(shallow.saved[-LAST:]),
        )  # fmt: skip


class RolesOverTrainingLab(Lab):
    name = "roles-over-training"

    width: int = size(48, "model width D, a multiple of the heads", multiple="heads")
    heads: int = size(4, "heads of each layer")
    vocab: int = size(40, "tokens that there are, at least `longest`")
    follow: int = size(16, "tokens that may follow each, less than `vocab`", below="vocab")
    shortest: int = size(8, "tokens of the shortest walk, 8 or more", least=8, most="longest")
    longest: int = size(20, "tokens of the longest one", most="vocab")
    draws: int = size(3, "initializations of each model; of each measure the median is judged")
    steps: int = size(400, "training steps, a multiple of 40", multiple=LOOKS)
    rows: int = size(32, "rows of a training step")
    tested: int = size(32, "rows that are measured")

    def run(self, setup: Setup) -> LabResult:
        noise = np.random.default_rng(setup.seed)
        follow = [noise.choice(self.vocab, self.follow, replace=False) for _ in range(self.vocab)]
        table: Ids = np.stack(follow).astype(np.int32)
        data = Pairs(tuple(self._walk(table, noise) for _ in range(self.steps * self.rows)))
        tests = [self._walk(table, noise) for _ in range(self.tested)]
        histories = []
        for draw in range(self.draws):
            setup.progress(f"initialization {draw + 1} of {self.draws}: one layer and two, {self.steps} steps")
            seed = setup.seed + 1000 * draw
            histories.append({layers: self._trained(layers, data, tests, seed) for layers in (1, 2)})
        return self.result(self._conclusion(histories), self._sections(histories[0]))

    def _walk(self, table: Ids, noise: np.random.Generator) -> Example:
        """A walk of distinct tokens twice over, trained at every token: each step is to a token that `table` lists,
        unless all of these were visited."""
        once = [int(noise.integers(self.vocab))]
        for _ in range(int(noise.integers(self.shortest, self.longest + 1)) - 1):
            allowed = np.setdiff1d(table[once[-1]], once)
            once.append(int(noise.choice(allowed if len(allowed) else np.setdiff1d(np.arange(self.vocab), once))))
        twice = np.tile(np.array(once, dtype=np.int32), 2)
        return Example(twice[:-1], twice[1:], np.ones(len(twice) - 1, dtype=bool))

    def _trained(self, layers: int, data: Pairs, tests: Sequence[Example], seed: int) -> History:
        blocks = [block(self.width, self.heads, hidden=None)] * layers
        module = with_positions(blocks, self.vocab, 2 * self.longest, seed)
        history = History()
        fit(
            module, data, rows=self.rows, length=2 * self.longest, steps=self.steps, seed=seed,
            optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.0), schedule=Schedule(shape="constant", warmup=0.05),
            after_step=partial(_look, history, module, tests, self.steps // LOOKS),
        )  # fmt: skip
        return history

    def _conclusion(self, histories: Sequence[dict[int, History]]) -> Clauses:
        guess, table = math.log(self.vocab), math.log(self.follow)
        every = [Measures.of(one[1], one[2], guess, table) for one in histories]
        m = Measures(*map(median, zip(*every, strict=True)))
        at, share = histories[0][2].steps, "share of the training"
        midway = {name: at[int(getattr(m, f"midway_{name}"))] for name in ("saved", "induction", "previous")}
        later, after = (m.midway_saved - m.midway_first) / LOOKS, (m.midway_induction - m.midway_saved) / LOOKS
        before, saves = (m.midway_previous - m.midway_induction) / LOOKS, "what a repetition saves"
        more_previous, less_induction = m.previous / m.shallow_previous, m.shallow_induction / m.induction
        yield clause(
            "Both models first learn the table of what may follow what, which needs no attention:"
            f" {rounded_down(m.learned, '.0%')} of the way or more after a third of the training.",
            Check("learned of the table after a third of the training, the less of the two", m.learned, 0.5, 1.1),
            instead="The table alone was not learned first",
        )
        yield clause(
            f"Then the loss of what is read again falls: what a repetition saves has come half its way by step"
            f" {midway['saved']}. The score of a head of the second layer, which looks for what followed a token"
            f" before, does so later, by step {midway['induction']}, and ends at {m.induction:.2f}.",
            Check(f"induction score midway, after {saves}, {share}", after, NEXT, SOON),
            Check(f"{saves} midway, after the loss of the first reading, {share}", later, least=SOON),
            Check("induction score at the end", m.induction, least=APPEARED),
            Check("nats that a repetition saves at the end", m.saved, least=1.0),
            instead="The loss and the head did not change in this order",
        )
        yield clause(
            f"The head of the first layer that it reads from does so before it, by step {midway['previous']}, and"
            f" ends with {m.previous:.2f} of its weight on the token before; in one layer the highest is"
            f" {m.shallow_previous:.2f}.",
            Check("previous-token score midway, after that of induction", before, most=-NEXT),
            Check("previous-token score in the first of two layers, over that of one layer", more_previous, least=2.0),
            instead="That a head of two layers comes to read the token before, and none of one, was not seen",
        )
        yield clause(
            "Control: in one layer, trained alike, no head of induction appears at any step. It saves"
            f" {m.shallow_saved:.1f} nats, two layers {m.saved:.1f}.",
            Check("one layer: highest score at any step, over two layers' at the end", less_induction, most=0.5),
            Check(f"one layer: {saves} at the end, over two layers'", m.shallow_saved / m.saved, most=0.5),
            instead="One layer is not clearly behind two",
        )

    def _sections(self, histories: dict[int, History]) -> Sections:
        shallow, deep = histories[1], histories[2]
        losses = {}
        for layers, one in histories.items():
            losses[f"{counted(layers, 'layer')}, first reading"] = one.first
            losses[f"{counted(layers, 'layer')}, repetition"] = one.again
        scores = {
            "induction, layer 1 of two": deep.of_best(deep.induction, 1),
            "previous token, layer 0 of two": deep.of_best(deep.previous, 0),
            "induction, one layer": [max(look[0]) for look in shallow.induction],
            "previous token, one layer": [max(look[0]) for look in shallow.previous],
        }
        guides = {"guess": math.log(self.vocab), "the table": math.log(self.follow)}
        rows = [
            [str(step), *(f"{line[i]:.2f}" for line in (*losses.values(), *scores.values()))]
            for i, step in enumerate(deep.steps)
            if i % 5 == 0
        ]
        yield curve("Loss over training", "step", "nats per token", deep.steps, losses, guides)
        yield curve("Scores of heads over training", "step", "weight", deep.steps, scores)
        yield TableSection("Over training", ("step", *losses, *scores), rows)


@torch.no_grad()
def _look(history: History, module: nn.Transformer, tests: Sequence[Example], every: int, step: int) -> None:
    """Measure once in `every` steps, and after the first, and add it to the history."""
    if step != 1 and step % every:
        return
    trace = Model(module).trace([test.ids.tolist() for test in tests], read=["blocks.*.attn.pattern"])
    first, again = [], []
    for logits, test in zip(trace.logits, tests, strict=True):
        nats = F.cross_entropy(logits.float(), torch.from_numpy(test.targets).long(), reduction="none")
        once = (len(test.ids) + 1) // 2
        first.append(nats[: once - 1])
        again.append(nats[once:])
    scores = [pattern_scores(trace[site]) for site in trace]
    history.steps.append(step)
    history.first.append(float(torch.cat(first).mean()))
    history.again.append(float(torch.cat(again).mean()))
    history.induction.append([copying for copying, _ in scores])
    history.previous.append([back[1] for _, back in scores])


def _midway(values: Sequence[float]) -> int:
    """The look at which the value has come half the way from its first to its last."""
    first, way = values[0], fmean(values[-LAST:]) - values[0]
    return next((i for i, value in enumerate(values) if (value - first) * way >= way * way / 2), LOOKS)
