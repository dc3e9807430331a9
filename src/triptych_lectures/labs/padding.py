"""Padding tokens that no mask hides (lectures L0, L1, L2 example 3): models trained with them and without.

An encoder names the most frequent symbol of a row.  Rows of different lengths stand in one batch only when the short
ones are filled up with padding tokens.  Nothing marks these as padding unless a mask hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from triptych import nn
from triptych.page import Curve, TableSection
from triptych.spec import full, keys
from triptych.train import Example, collate
from .bounds import rounded_up
from .generated_tasks import GeneratedTask, ShuffledTask, TrainedRun, TrainingBudget, held_out_rows, logits, train
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .small_models import encoder, with_mask

HEADS = 4
MASKED, UNMASKED = "without padding", "with padding, unmasked"


class PaddingLab(Lab):
    name = "padding"

    symbols: int = size(4, "different symbols, 2 to 16", least=2, most=16)
    shortest: int = size(5, "fewest symbols of a row", most="longest")
    longest: int = size(20, "most symbols of a row, two or more, to which rows are padded in training", least=2)
    padded: Ints = size((20, 40, 80, 160), "lengths to which rows are padded in tests, ascending", ascending=True)
    width: int = size(32, f"width of the residual stream, a multiple of {HEADS}", multiple=HEADS)
    layers: int = size(2, "blocks of the encoder")
    steps: int = size(250, "training steps")
    rows: int = size(32, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(200, "rows that the share of right answers is taken from")

    def findings(self, setup: Setup) -> Findings:
        """An answer that changes by a nat has its odds changed by a factor of e; rounding is a millionth of one."""
        task = MajorityTask(self.symbols, self.shortest, self.longest)
        rows = held_out_rows(task, self.tested, setup.seed)
        runs, answers = dict[str, TrainedRun](), dict[str, dict[str, PaddedAnswers]]()
        for name, own in {MASKED: task, UNMASKED: replace(task, padded=self.longest)}.items():
            setup.progress(f"trained {name}: {self.steps} steps")
            module, runs[name] = self._train(own, setup.seed)
            answers[name] = self._answered(module, rows)
        setup.progress("shuffled answers")
        _, shuffled = self._train(ShuffledTask(task), setup.seed)
        (never, trained), least, most = answers.values(), f"padded to {self.padded[0]}", f"padded to {self.padded[-1]}"
        lost, moved = never["alone"].right - never[most].right, trained[most].moved
        fails, bears = (fmean(of[f"padded to {n}"].right for n in self.padded) for of in (never, trained))
        hidden = [one.moved for of in answers.values() for padding, one in of.items() if padding.endswith("masked")]
        yield clause(
            "Softmax gives a weight to each token it sees, and a padding token is one. A model trained without"
            f" padding is right on {never['alone'].right:.0%} of rows alone, and on {never[most].right:.0%} of the"
            f" same rows {most} symbols and not masked.",
            Check("trained without padding, rows alone: right", never["alone"].right, least=0.9),
            Check(f"trained without padding, {most} and not masked: right less", lost, least=0.25),
            instead="The model did not learn, or padding did not change its answers",
        )
        yield clause(
            "Training with unmasked padding teaches a model to bear some of it: on rows"
            f" {least} it is right on {trained[least].right:.0%}, and on the mean of all lengths on {bears:.0%},"
            f" the other on {fails:.0%}. Its answers still depend on how much there is: {most}, a log-probability"
            f" moves by up to {rounded_up(moved, '.1f')} nats.",
            Check(f"trained with padding to {self.longest}, {least} as then: right", trained[least].right, 0.75),
            Check("right more than the one trained without, mean of the lengths", bears - fails, least=0.1),
            Check(f"trained with padding, {most}: largest change of a log-probability, nats", moved, least=1.0),
            instead="Training beside unmasked padding went otherwise",
        )
        yield clause(
            "With a mask a padded row gives what the row alone gives: the largest change of a log-probability is"
            f" {max(hidden):.1g} nats.",
            Check("control: padded and masked: largest change of a log-probability, nats", max(hidden), most=1e-3),
            instead="The mask does not hide the padding",
        )
        yield clause(
            f"Control: from shuffled answers a model learns {max(0.0, shuffled.learned):.0%} of the task.",
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
            instead="The task can be learned from shuffled answers",
        )
        pairs = {padding: [of[padding] for of in answers.values()] for padding in never}
        table = [
            [padding, *(f"{of.right:.0%}" for of in both), *(f"{of.moved:.2g}" for of in both)]
            for padding, both in pairs.items()
        ]
        columns = (*(f"right, trained {name}" for name in answers), *(f"moved by, nats, {name}" for name in answers))
        lines = {f"trained {name}": run.losses for name, run in runs.items()}
        yield TableSection(f"Rows of {self.shortest} to {self.longest} symbols", ("rows of the test", *columns), table)
        yield Curve("In training", "step", "nats a row", lines, {"guess": runs[MASKED].guess})

    def _train(self, task: GeneratedTask, seed: int) -> tuple[nn.Transformer, TrainedRun]:
        """Blocks in which tokens see each other, without positions; two ids follow the symbols: padding, marker."""
        module = encoder(self.symbols + 2, self.width, HEADS, self.layers, seed)
        return module, train(module, task, TrainingBudget(self.steps, self.rows, self.rate, shape="linear"), seed)

    def _answered(self, module: nn.Transformer, rows: Sequence[Example]) -> dict[str, PaddedAnswers]:
        """Every way to answer `rows`, by name: alone, padded to each length, and that with a mask."""
        ways = {"alone": (module, rows)}
        lengths = [len(row.ids) for row in rows]
        for length in self.padded:
            beside = [padded(row, length, self.symbols) for row in rows]
            ways[f"padded to {length}"] = module, beside
            ways[f"padded to {length}, masked"] = with_mask(module, full() & keys(lengths)), beside
        log_p = {way: logits(*model_and_rows).double().log_softmax(-1) for way, model_and_rows in ways.items()}
        alone, wanted = log_p["alone"], collate(rows).targets
        return {
            way: PaddedAnswers(float((own.argmax(-1) == wanted).double().mean()), float((own - alone).abs().max()))
            for way, own in log_p.items()
        }


@dataclass(frozen=True)
class MajorityTask:
    """A marker, then random symbols of which one is the most frequent by at least 2; the answer, at the marker, is
    that one.  With `padded`, padding tokens follow up to so many symbols."""

    symbols: int
    shortest: int
    longest: int
    padded: int = 0

    @property
    def classes(self) -> int:
        return self.symbols

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        return [padded(self._row(noise), self.padded, self.symbols) for _ in range(count)]

    def _row(self, noise: np.random.Generator) -> Example:
        while True:
            symbols = noise.integers(self.symbols, size=noise.integers(self.shortest, self.longest + 1))
            counts = np.bincount(symbols, minlength=self.symbols)
            second, first = np.sort(counts)[-2:]
            if first >= second + 2:
                break
        ids = np.concatenate([[self.symbols + 1], symbols]).astype(np.int32)
        targets = np.full_like(ids, counts.argmax())
        return Example(ids, targets, np.arange(len(ids)) == 0)


def padded(row: Example, symbols: int, pad: int) -> Example:
    """`row` with tokens `pad` after it until it has so many symbols beside its marker; they are not trained."""
    more = max(0, symbols + 1 - len(row.ids))
    ids, targets = (np.pad(one, (0, more), constant_values=pad) for one in (row.ids, row.targets))
    return Example(ids, targets, np.pad(row.trained, (0, more)))


class PaddedAnswers(NamedTuple):
    """One way to answer: the share right, and the largest difference of a log-probability from the row alone."""

    right: float
    moved: float
