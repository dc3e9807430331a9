"""ReLU, GELU and SwiGLU trained at equal parameters (Hendrycks & Gimpel 2016; Shazeer 2020; lectures L0, L1).

A block has to learn a table by heart: the answer at a token is the table's entry for it and the token before.  The
entries are random, so that what counts is how much the MLP can hold and how soon.  F of the gated MLP is 2/3 of that of
the others, which makes three matrices as large as two.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from triptych import nn
from triptych.page import TableSection
from triptych.spec import glu, mlp
from . import generated_tasks as tasks
from .generated_tasks import GeneratedTask, LookupTable, Places, ShuffledTask, TrainedRun, TrainingBudget
from .lab import Check, Clauses, Lab, LabResult, Setup, clause, mean_interval, rate_interval, size
from .small_models import block, parameters

NONE, RELU, GELU, SWIGLU = "no MLP", "ReLU", "GELU", "SwiGLU"
KINDS = (NONE, RELU, GELU, SWIGLU)
EQUAL = 0.05  # shares of the way from a guess to the best loss that are nearer than this count as equal


class ActivationsLab(Lab):
    name = "activations"

    symbols: int = size(16, "different symbols, two or more; the table has their number squared of entries", least=2)
    length: int = size(12, "symbols of a row, two or more", least=2)
    width: int = size(16, "width of the residual stream")
    hidden: int = size(24, "F of the MLP with ReLU or GELU, a multiple of 3; SwiGLU has 2/3 of it", multiple=3)
    draws: int = size(10, "tables, each with weights drawn anew, over which the mean is taken, two or more", least=2)
    without: int = size(2, "tables of the control without an MLP, at most as many as `draws`", most="draws")
    steps: int = size(250, "training steps")
    rows: int = size(32, "rows of a step")
    rate: float = size(1e-2, "learning rate of AdamW, which falls linearly to 0")

    def run(self, setup: Setup) -> LabResult:
        copy = Places(self.symbols, self.length, (1,))
        trained: dict[str, TrainedActivation] = {}
        for name in KINDS:
            runs = []
            draws = self.without if name == NONE else self.draws
            for draw in range(draws):
                setup.progress(f"{name}, table {draw + 1} of {draws}: {self.steps} steps")
                own = setup.seed * self.draws + draw
                runs.append(self._train(name, LookupTable(self.symbols, self.length, own), own))
            copied, size = self._train(name, copy, setup.seed), parameters(self.model(name, 0))
            trained[name] = TrainedActivation(tuple(runs), copied, size)
        setup.progress("shuffled answers")
        shuffled = self._train(SWIGLU, ShuffledTask(LookupTable(self.symbols, self.length, setup.seed)), setup.seed)
        first = {name: kind.tables[0] for name, kind in trained.items()}
        return self.result(
            self._conclusion(trained, shuffled),
            (self._table(trained), tasks.training_curve("The first table in training", "nats an answer", first)),
        )

    def _conclusion(self, trained: dict[str, TrainedActivation], shuffled: TrainedRun) -> Clauses:
        relu, none = trained[RELU], trained[NONE]
        gated, smooth = (_more(trained[name], relu) for name in (SWIGLU, GELU))
        (low, high), (gelu_low, gelu_high) = map(mean_interval, (gated, smooth))
        first, last = rate_interval(more := sum(own > 0 for own in gated), self.draws)
        worst = min(fmean(_more(trained[name], none)) for name in KINDS[1:])
        copies = [kind.copy.learned for kind in trained.values()]
        yield clause(
            f"SwiGLU learned more than ReLU of a random table of {self.symbols} times {self.symbols} entries in"
            f" {more} of {self.draws} tables (95% interval of the rate: {first:.2f} to {last:.2f}), by"
            f" {fmean(gated):.3f} on the mean (95% interval {low:.3f} to {high:.3f}), with {relu.parameters:,}"
            f" parameters each: {trained[SWIGLU].learned:.0%} against {relu.learned:.0%}.",
            Check("SwiGLU learned more than ReLU, the low end of the mean's 95% interval", low, least=0.0),
            Check("parameters, SwiGLU over ReLU", trained[SWIGLU].parameters / relu.parameters, most=1.0),
            instead="SwiGLU was not seen to learn more than ReLU at equal parameters",
        )
        yield clause(
            f"GELU and ReLU learn the same to within {EQUAL:g}: GELU learned {fmean(smooth):+.3f} more on the mean"
            f" (95% interval {gelu_low:.3f} to {gelu_high:.3f}).",
            Check("GELU learned more than ReLU, mean of the tables", fmean(smooth), -EQUAL, EQUAL),
            Check("tables of which the two learned different shares", sum(own != 0 for own in smooth), least=1),
            instead="That GELU and ReLU, as two activations, learn the same was not seen",
        )
        yield clause(
            f"Controls: without an MLP a block learns {worst:.2f} less than with the worst; copying the symbol"
            " before, which needs no MLP, is learned alike by all; shuffled answers are not learned.",
            Check("control: learned less without an MLP than with the worst", worst, least=EQUAL),
            Check("control: copying: learned, the least", min(copies), least=0.9),
            Check("control: copying: most learned less least", max(copies) - min(copies), most=EQUAL),
            Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
            instead="A control did not hold",
        )

    def model(self, name: str, seed: int) -> nn.Transformer:
        """One block with one head and an MLP of this kind."""
        layer = block(self.width, 1, None if name == NONE else self.hidden)  # with ReLU
        if name == GELU:
            layer = replace(layer, mlp=mlp(self.width, self.hidden, "gelu"))
        if name == SWIGLU:
            layer = replace(layer, mlp=glu(self.width, 2 * self.hidden // 3, "silu"))
        return tasks.with_positions([layer], self.symbols, self.length, seed)

    def _train(self, name: str, task: GeneratedTask, seed: int) -> TrainedRun:
        budget = TrainingBudget(self.steps, self.rows, self.rate, shape="linear")
        return tasks.train(self.model(name, seed), task, budget, seed)

    def _table(self, trained: dict[str, TrainedActivation]) -> TableSection:
        rows = []
        for name, kind in trained.items():
            ends = [run.end for run in kind.tables]
            over = (
                f"{fmean(ends):.2f}",
                f"{min(ends):.2f} to {max(ends):.2f}",
                f"{fmean(_more(kind, trained[RELU])):+.3f}",
            )
            rows.append([name, f"{kind.parameters:,}", *over, f"{kind.copy.end:.3f}"])
        guess = trained[RELU].copy.guess
        title = f"{self.draws} tables, nats an answer after {self.steps} steps; a guess has {guess:.2f}, the best is 0"
        header = ("MLP", "parameters", "mean", "over the tables", "learned more than ReLU", "copying")
        return TableSection(title, header, rows)


class TrainedActivation(NamedTuple):
    """One kind of MLP: its runs on the tables, its run on the task that needs none, and its parameters."""

    tables: tuple[TrainedRun, ...]
    copy: TrainedRun
    parameters: int

    @property
    def learned(self) -> float:
        """Mean share of the way from a guess to the best loss, over the tables."""
        return fmean(run.learned for run in self.tables)


def _more(kind: TrainedActivation, other: TrainedActivation) -> list[float]:
    """How much more `kind` learned than `other`, of each table that both were trained on."""
    return [own.learned - its.learned for own, its in zip(kind.tables, other.tables, strict=False)]
