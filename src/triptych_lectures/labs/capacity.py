"""What depth, width and heads are for at equal parameters: one budget, cut in several ways, on three tasks (L2).

A table of random answers measures what is stored; a sequence that is repeated needs two layers, one to note the token
before and one to look it up (Elhage et al. 2021); several places at once need as many patterns of attention, hence
heads.  Allen-Zhu and Li 2024 find about two bits a parameter at the limit, whatever the shape; a short training stops
before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from triptych.errors import InputError, counted
from triptych.page import Curve, TableSection
from triptych.train import Example
from .generated_tasks import (
    GeneratedTask,
    LookupTable,
    Places,
    ShuffledTask,
    TrainedHead,
    TrainingBudget,
    trained_head,
    training_curve,
    with_positions,
)
from .induction import repeated
from .lab import Check, Clause, Conclusion, Ints, Lab, LabResult, Setup, size
from .small_models import block

TABLE, LOOKUP, PLACES = "table", "repetition", "four places"
BACK = (1, 2, 3, 4)  # places that the last task reads


class Shape(NamedTuple):
    """How a budget of parameters is cut: layers, width D, heads, and the width F of the MLPs."""

    layers: int
    width: int
    heads: int
    hidden: int

    @property
    def name(self) -> str:
        return f"{counted(self.layers, 'layer')}, width {self.width}, {counted(self.heads, 'head')}"


@dataclass(frozen=True)
class Repetition:
    """Sequences of distinct symbols, each repeated once."""

    symbols: int
    shortest: int
    longest: int

    @property
    def classes(self) -> int:
        return self.symbols

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        return [repeated(noise, self.symbols, self.shortest, self.longest) for _ in range(count)]


class CapacityLab(Lab):
    """One budget of parameters over depth, width and heads, on tasks that need each."""

    name = "capacity"
    falsified_by = (
        "The claim is false if one layer repeats a sequence as well as two with the same parameters, if one head reads"
        " four places as well as four do, or if some shape stores less than half of what another stores of the table."
        " The comparison is void if the parameters differ by more than a twentieth, or if a model of shuffled answers,"
        " the control, stores something."
    )

    layers: Ints = size((1, 2, 4), "numbers of layers, the first 1, at the middle width", values=2, ascending=True)
    widths: Ints = size((32, 64), "other widths, with two layers, each a multiple of 4", multiple=4)
    heads: Ints = size((1, 4, 12), "numbers of heads of one layer, the first 1", values=2, ascending=True)
    width: int = size(48, "middle width, a multiple of 4 and of the heads", multiple="heads")
    budget: int = size(55_296, "parameters of the blocks, without their norms", full=110_592)
    symbols: int = size(32, "symbols of the table, which has their square of entries", full=64, least=4)
    length: int = size(20, "tokens of a row of each task, an even number above 10", least=12, multiple=2)
    steps: int = size(300, "training steps", full=3000)
    rows: int = size(32, "rows of a training step")
    rate: float = size(5e-3, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(64, "rows that are tested")

    def __post_init__(self) -> None:
        if self.layers[0] != 1 or self.heads[0] != 1:
            raise InputError("sizes layers and heads: this lab compares with one; begin with 1")
        if any(shape.hidden < 1 for shape in (*self._deep(), *self._wide())):
            raise InputError(f"size budget: {self.budget:,} parameters leave no MLP in one of the shapes; raise it")

    def _shape(self, layers: int, width: int, heads: int) -> Shape:
        """The shape whose MLPs take what the budget leaves: 4 D² a block for attention, 2 D F for the MLP."""
        return Shape(layers, width, heads, round((self.budget / layers - 4 * width**2) / (2 * width)))

    def _deep(self) -> list[Shape]:
        return [self._shape(layers, self.width, 4) for layers in self.layers]

    def _wide(self) -> list[Shape]:
        return [self._shape(2, width, 4) for width in self.widths]

    def run(self, setup: Setup) -> LabResult:
        table = LookupTable(self.symbols, self.length, setup.seed)
        plan: dict[str, tuple[GeneratedTask, Sequence[Shape]]] = {
            TABLE: (table, [*self._deep(), *self._wide()]),
            LOOKUP: (Repetition(self.symbols, self.length // 4, self.length // 2), self._deep()),
            PLACES: (Places(5, self.length, BACK), [self._shape(1, self.width, heads) for heads in self.heads]),
        }
        runs: Runs = {}
        for name, (task, shapes) in plan.items():
            for shape in shapes:
                setup.progress(f"{name}: {shape.name}, {self.steps} steps")
                runs[name, shape] = self._trained(shape, task, setup.seed)
        setup.progress("the control: shuffled answers of the table")
        control = self._trained(self._deep()[0], ShuffledTask(table), setup.seed)
        remarks = (
            "What is stored is the share learned of the table's bits. Small version: it measures what equal training"
            " stores and not the limit, which larger tables and longer training would show."
        )
        question = "What are depth, width and heads for, at equal parameters?"
        return LabResult(question, self._conclusion(runs, control), self._sections(runs), remarks)

    def _trained(self, shape: Shape, task: GeneratedTask, seed: int) -> TrainedHead:
        blocks = [block(shape.width, shape.heads, shape.hidden)] * shape.layers
        module = with_positions(blocks, max(task.classes, self.symbols), self.length, seed)
        return trained_head(
            module, task, TrainingBudget(self.steps, self.rows, self.rate, 0.05, "linear"), self.tested, seed
        )

    def _bits(self, run: TrainedHead) -> float:
        """Bits of the table that a model has stored, by its loss: at most all of them."""
        return max(0.0, run.run.learned) * self.symbols**2 * math.log2(self.symbols)

    def _conclusion(self, runs: Runs, control: TrainedHead) -> Conclusion:
        deep = {shape.layers: run for (name, shape), run in runs.items() if name == LOOKUP}
        headed = {shape.heads: run for (name, shape), run in runs.items() if name == PLACES}
        stored = {shape: self._bits(run) for (name, shape), run in runs.items() if name == TABLE}
        counts = [
            [run.parameters for (name, _), run in runs.items() if name == task] for task in (TABLE, LOOKUP, PLACES)
        ]
        apart = max(max(of) / min(of) - 1 for of in counts)
        least, most = min(stored.values()), max(stored.values())
        per = [stored[shape] / runs[TABLE, shape].parameters for shape in stored]
        two, four = self.layers[1], min((h for h in self.heads if h >= len(BACK)), default=self.heads[-1])
        return (
            Clause(
                f"Depth composes: with the same parameters one layer repeats {deep[1].right:.0%} of a sequence"
                f" right, {counted(two, 'layer')} {deep[two].right:.0%}.",
                (
                    Check(f"repetition: right by {two} layers", deep[two].right, least=0.8),
                    Check(
                        f"repetition: right by {two} layers, less by one", deep[two].right - deep[1].right, least=0.25
                    ),
                ),
                "More layers did not repeat what one could not",
            ),
            Clause(
                f"Heads read several places: one reads four with {headed[1].right:.0%} right, {four} heads with"
                f" {headed[four].right:.0%}.",
                (
                    Check(f"four places: right by {four} heads", headed[four].right, least=0.8),
                    Check(
                        f"four places: right by {four} heads, less by one", headed[four].right - headed[1].right, 0.25
                    ),
                ),
                "More heads did not read what one could not",
            ),
            Clause(
                f"What a table stores depends less on the shape: {min(per):.3f} to {max(per):.3f} bits a parameter, of"
                f" {self.symbols**2:,} entries.",
                (Check("table: bits stored by the worst shape, over the best", least / most, least=0.5),),
                "What is stored depends on the shape",
            ),
            Clause(
                "Control: no shape has more parameters than another by a twentieth, and of shuffled answers nothing is"
                " stored.",
                (
                    Check("parameters of one task, most over least, less 1", apart, most=0.05),
                    Check(
                        "control: bits of shuffled answers, over the best shape's",
                        self._bits(control) / most,
                        most=0.05,
                    ),
                ),
                "The comparison is not fair",
            ),
        )

    def _sections(self, runs: Runs) -> tuple[TableSection, Curve, Curve]:
        rows = [
            [name, shape.name, str(shape.hidden), f"{run.parameters:,}", f"{run.right:.0%}", f"{run.run.end:.2f}",
             f"{self._bits(run) / run.parameters:.3f}" if name == TABLE else ""]
            for (name, shape), run in runs.items()
        ]  # fmt: skip
        header = ("task", "shape", "MLP width", "parameters", "right", "nats", "bits a parameter")
        curves = [
            training_curve(
                name, "nats an answer", {shape.name: run.run for (of, shape), run in runs.items() if of == name}
            )
            for name in (TABLE, LOOKUP)
        ]
        return TableSection(f"After {self.steps} steps", header, rows), curves[0], curves[1]


Runs = dict[tuple[str, Shape], TrainedHead]
