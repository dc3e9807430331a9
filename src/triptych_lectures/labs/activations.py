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
from .generated_tasks import (
    GeneratedTask,
    LookupTable,
    Places,
    ShuffledTask,
    TrainedRun,
    TrainingBudget,
    train,
    training_curve,
    with_positions,
)
from .lab import Check, Checks, Clause, Lab, LabResult, Setup, size
from .small_models import block, parameters

NONE, RELU, GELU, SWIGLU = "no MLP", "ReLU", "GELU", "SwiGLU"
KINDS = (NONE, RELU, GELU, SWIGLU)
EQUAL = 0.05  # shares of the way from a guess to the best loss that are nearer than this count as equal


class ActivationsLab(Lab):
    """Each kind of MLP on the same tables, and on copying the token before; then shuffled answers."""

    name = "activations"
    falsified_by = (
        "A gated MLP that learns less than ReLU at equal parameters, or GELU that learns clearly less, would have shown"
        " the claim false. A difference at a task that needs no MLP, or a table learned as well without one, would mean"
        " that something else than the activation was compared."
    )

    symbols: int = size(16, "different symbols, two or more; the table has their number squared of entries", least=2)
    length: int = size(12, "symbols of a row, two or more", least=2)
    width: int = size(16, "width of the residual stream")
    hidden: int = size(24, "F of the MLP with ReLU or GELU, a multiple of 3; SwiGLU has 2/3 of it", multiple=3)
    draws: int = size(2, "tables, each with weights drawn anew, over which the mean is taken")
    steps: int = size(250, "training steps")
    rows: int = size(32, "rows of a step")
    rate: float = size(1e-2, "learning rate of AdamW, which falls linearly to 0")

    def run(self, setup: Setup) -> LabResult:
        copy = Places(self.symbols, self.length, (1,))
        trained: dict[str, TrainedActivation] = {}
        for name in KINDS:
            runs = []
            for draw in range(self.draws):
                setup.progress(f"{name}, table {draw + 1} of {self.draws}: {self.steps} steps")
                own = setup.seed * self.draws + draw
                runs.append(self._train(name, LookupTable(self.symbols, self.length, own), own))
            copied, size = self._train(name, copy, setup.seed), parameters(self.model(name, 0))
            trained[name] = TrainedActivation(tuple(runs), copied, size)
        setup.progress("shuffled answers")
        shuffled = self._train(SWIGLU, ShuffledTask(LookupTable(self.symbols, self.length, setup.seed)), setup.seed)
        first = {name: kind.tables[0] for name, kind in trained.items()}
        return LabResult(
            "Which activation learns most at equal parameters?",
            (Clause(self._meaning(trained), _checks(trained, shuffled)),),
            (self._table(trained), training_curve("The first table in training", "nats an answer", first)),
        )

    def _meaning(self, trained: dict[str, TrainedActivation]) -> str:
        shares = ", ".join(f"{name} {trained[name].learned:.0%}" for name in KINDS)
        return (
            f"A random table of {self.symbols} times {self.symbols} entries has no rule, so a small block can learn"
            f" only as much of it as its weights hold in {self.steps} steps. Learned, as a share of the way from the"
            f" loss of a guess to the best one: {shares}. The three have {trained[RELU].parameters:,} parameters each."
            " The product of two linear maps in a gated MLP is of use to a table with two inputs, which is a task that"
            " suits it: on text the published differences are a percent or two of the loss, and this lab does not"
            " measure them. Attention alone learns a part of the table, since what softmax does is not linear either."
            " Where a task needs no MLP the activation makes no difference."
        )

    def model(self, name: str, seed: int) -> nn.Transformer:
        """One block with one head and an MLP of this kind."""
        layer = block(self.width, 1, None if name == NONE else self.hidden)  # with ReLU
        if name == GELU:
            layer = replace(layer, mlp=mlp(self.width, self.hidden, "gelu"))
        if name == SWIGLU:
            layer = replace(layer, mlp=glu(self.width, 2 * self.hidden // 3, "silu"))
        return with_positions([layer], self.symbols, self.length, seed)

    def _train(self, name: str, task: GeneratedTask, seed: int) -> TrainedRun:
        budget = TrainingBudget(self.steps, self.rows, self.rate, shape="linear")
        return train(self.model(name, seed), task, budget, seed)

    def _table(self, trained: dict[str, TrainedActivation]) -> TableSection:
        rows = []
        for name, kind in trained.items():
            ends = [run.end for run in kind.tables]
            more = min(own.learned - relu.learned for own, relu in zip(kind.tables, trained[RELU].tables, strict=True))
            own = [f"{fmean(ends):.2f}", f"{min(ends):.2f} to {max(ends):.2f}", f"{more:.3f}", f"{kind.copy.end:.3f}"]
            rows.append([name, f"{kind.parameters:,}", *own])
        guess = trained[RELU].copy.guess
        title = f"{self.draws} tables, nats an answer after {self.steps} steps; a guess has {guess:.2f}, the best is 0"
        header = ("MLP", "parameters", "mean", "over the tables", "learned more than ReLU, least", "copying")
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


def _checks(trained: dict[str, TrainedActivation], shuffled: TrainedRun) -> Checks:
    none, relu, gelu, swiglu = (trained[name].learned for name in KINDS)
    counts = [trained[name].parameters for name in KINDS[1:]]
    copies = [kind.copy.learned for kind in trained.values()]
    return (
        Check("parameters of ReLU, GELU and SwiGLU, most less fewest", float(max(counts) - min(counts)), most=0.0),
        Check("control: learned less without an MLP than with the worst", min(relu, gelu, swiglu) - none, least=EQUAL),
        Check("SwiGLU learned more than ReLU, mean of the tables", swiglu - relu, least=0.0),
        Check("GELU learned more than ReLU, mean of the tables", gelu - relu, least=-EQUAL),
        Check("control: copying needs no MLP: most learned less least", max(copies) - min(copies), most=EQUAL),
        Check("control: learned from shuffled answers", shuffled.learned, most=0.1),
    )
