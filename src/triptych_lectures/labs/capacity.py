"""What depth, width and heads buy at equal parameters, each on a task that theory says needs it (lecture L2).

A sequence that is repeated takes two layers: one notes the token before, the next one looks it up (Elhage et al. 2021;
Olsson et al. 2022).  A table of what follows which symbol takes width: logits of width D have at most rank D,
whatever stands before (Yang et al. 2018).  Places read at once take a pattern of attention each.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from triptych import nn
from triptych.page import TableSection
from triptych.train import Example
from . import generated_tasks
from .generated_tasks import GeneratedTask, Places, ShuffledTask, TrainingBudget
from .heads_and_width import FOUR, ONE
from .induction import repeated
from .lab import Check, Clause, Findings, Lab, Setup, clause, size
from .small_models import attention_layers, block, examples, parameters

REPETITION, TABLE, SHUFFLED, READING = "repetition", "table", "control: table, shuffled answers", "four places"
HEADS = len(FOUR)  # of a layer, where it is not one: one for each place


class Shape(NamedTuple):
    """How parameters are cut: layers of attention, width D of the residual stream, heads of each layer."""

    layers: int
    width: int
    heads: int = HEADS


# Of each task and shape: the parameters, and after training the share right of the repetition, else what is learned.
Runs = dict[str, dict[Shape, tuple[int, float]]]


@dataclass(frozen=True)
class Repetition:
    """Sequences of distinct symbols, each repeated once."""

    classes: int
    shortest: int
    longest: int

    @property
    def guess(self) -> float:
        """The share right of the best guess that looks nothing up: any symbol of the row that was not repeated yet."""
        shares = [1 / (n - k) for n in range(self.shortest, self.longest + 1) for k in range(1, n)]
        return sum(shares) / len(shares)

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        return [repeated(noise, self.classes, self.shortest, self.longest) for _ in range(count)]


@dataclass(frozen=True)
class FollowerTable:
    """Random symbols; the answer at each is drawn with the probabilities that a table [classes, classes] has for it,
    whose logits are normal numbers that `seed` draws.  Nothing that stands before tells more."""

    classes: int
    length: int
    seed: int

    @cached_property
    def logits(self) -> NDArray[np.float64]:
        return np.random.default_rng(self.seed).standard_normal((self.classes, self.classes))

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        ids = noise.integers(self.classes, size=(count, self.length)).astype(np.int32)
        drawn = self.logits[ids] + noise.gumbel(size=(*ids.shape, self.classes))  # the largest is drawn by the softmax
        return examples(ids, drawn.argmax(-1).astype(np.int32), np.ones(self.length, bool))

    def learned(self, answers: NDArray[np.float64], ids: NDArray[np.int32]) -> float:
        """How far the cross-entropy of the logits `answers` [N, classes] to the symbols `ids` [N] goes from that of a
        uniform guess, 0, to the entropy of the table, 1."""
        table, own = (torch.log_softmax(torch.from_numpy(of), -1) for of in (self.logits[ids], answers))
        entropy, nats = (float(-(table.exp() * of).sum(-1).mean()) for of in (table, own))
        return 1 - (nats - entropy) / (math.log(self.classes) - entropy)

    def of_rank(self, rank: int) -> float:
        """The same of the nearest table of this rank (Eckart & Young 1936), without any training."""
        left, sizes, back = np.linalg.svd(self.logits - self.logits.mean(-1, keepdims=True))
        return self.learned((left[:, :rank] * sizes[:rank]) @ back[:rank], np.arange(self.classes, dtype=np.int32))


class CapacityLab(Lab):
    """Attention alone, the same number of parameters cut in several ways, on a task for each."""

    name = "capacity"
    wide: int = size(64, "width of one layer", multiple=HEADS, below="symbols")
    middle: int = size(48, "width of two layers, with as many parameters in the repetition", multiple=HEADS)
    narrow: int = size(
        36, "width of four layers, with as many parameters in the other tasks", multiple=HEADS, below="wide"
    )
    vocab: int = size(48, "symbols of the repetition, at least `longest`")
    shortest: int = size(8, "symbols of the shortest sequence that is repeated, two or more", least=2, most="longest")
    longest: int = size(16, "symbols of the longest one", most="vocab")
    symbols: int = size(81, "symbols of the table, as many as four places have answers")
    length: int = size(12, "symbols of a row of the other tasks, more than 4", least=HEADS + 1)
    steps: int = size(400, "training steps")
    rows: int = size(32, "rows of a training step")
    tested: int = size(64, "rows that are tested")

    def findings(self, setup: Setup) -> Findings:
        repetition = Repetition(self.vocab, self.shortest, self.longest)
        table = FollowerTable(self.symbols, self.length, setup.seed)
        wide, narrow, deep = Shape(1, self.wide), Shape(1, self.narrow), Shape(4, self.narrow)
        plan: dict[str, tuple[GeneratedTask, tuple[Shape, ...]]] = {
            REPETITION: (repetition, (wide, Shape(2, self.middle))),
            TABLE: (table, (wide, deep, narrow)),
            SHUFFLED: (ShuffledTask(table), (wide,)),
            READING: (Places(3, self.length, FOUR), (wide, Shape(1, self.wide, 1), Shape(4, self.narrow, 1))),
            ONE: (Places(3, self.length, (3,)), (Shape(1, self.wide, 1),)),
        }
        runs: Runs = {}
        for name, (task, shapes) in plan.items():
            setup.progress(name)
            runs[name] = {shape: self._trained(task, shape, setup.seed) for shape in shapes}
        rows = [
            [name, *map(str, shape), f"{count:,}", f"{share:.0%}"]
            for name, of in runs.items() for shape, (count, share) in of.items()
        ]  # fmt: skip
        header = ("task", "layers", "width", "heads", "parameters", "right, or learned")
        table_section = TableSection("After training", header, rows)
        yield self._depth(runs, repetition.guess)
        yield self._width(runs, table)
        yield self._heads(runs)
        yield table_section

    def _trained(self, task: GeneratedTask, shape: Shape, seed: int) -> tuple[int, float]:
        """One model after training; where answers were shuffled, it is asked for the right ones."""
        source = task.task if isinstance(task, ShuffledTask) else task
        module = _module(source, shape, self.length, seed)
        # by AdamW two layers leave the repetition's plateau after 190 steps or never, by Muon after 180 to 250
        budget = TrainingBudget(self.steps, self.rows, 1e-2, 0.05, "linear", "muon")
        learned = generated_tasks.train(module, task, budget, seed).learned
        tests = generated_tasks.held_out_rows(source, self.tested, seed)
        if isinstance(source, FollowerTable):
            answers = generated_tasks.logits(module, tests).double().numpy()
            learned = source.learned(answers, np.concatenate([row.ids for row in tests]))
        elif isinstance(source, Repetition):
            learned = generated_tasks.right(module, tests)
        return parameters(module), learned

    def _depth(self, runs: Runs, guess: float) -> Clause:
        one, two = (share for _, share in runs[REPETITION].values())
        return clause(
            f"Depth composes: one layer of width {self.wide} and {HEADS} heads repeats {one:.0%} of a sequence right,"
            f" two of width {self.middle} {two:.0%}. A guess among the symbols still to come has {guess:.0%}.",
            Check("repetition: right by one wide layer, less a guess", one - guess, most=0.1),
            Check("repetition: right by two layers, from a guess, 0, to all, 1", (two - guess) / (1 - guess), 0.5),
            _apart(REPETITION, runs),
            instead="That two layers repeat what one cannot, at equal parameters, was not seen",
        )

    def _width(self, runs: Runs, table: FollowerTable) -> Clause:
        of_wide, of_narrow = table.of_rank(self.wide), table.of_rank(self.narrow)
        wide, deep, narrow = (share for _, share in runs[TABLE].values())
        ((_, shuffled),) = runs[SHUFFLED].values()
        return clause(
            f"Width stores, depth does not: of a random table one layer of width {self.wide} learns {wide:.0%}, four of"
            f" width {self.narrow} {deep:.0%}, one of these {narrow:.0%}. Logits of width D have at most rank D; cut to"
            f" these ranks the table keeps {of_wide:.0%} and {of_narrow:.0%}. From shuffled answers: {shuffled:.0%}.",
            Check("table: wide less deep, over that of the ranks", (wide - deep) / (of_wide - of_narrow), 0.5),
            Check("table: deep less one layer, likewise", (deep - narrow) / (of_wide - of_narrow), -0.5, 0.5),
            Check("control: table: learned from shuffled answers", shuffled, most=0.1),
            _apart(TABLE, runs, 2),
            instead="That width stores a table and depth does not, at equal parameters, was not seen",
        )

    def _heads(self, runs: Runs) -> Clause:
        ((_, single),) = runs[ONE].values()
        four, one, stacked = (share for _, share in runs[READING].values())
        return clause(
            f"Heads read several places: of the symbols at four places one head learns {one:.0%} in {self.steps} steps,"
            f" {HEADS} heads of that layer {four:.0%}; of a single place one head learns {single:.0%}. Here depth"
            f" replaces heads: four layers of width {self.narrow}, one head each, learn {stacked:.0%}.",
            Check("four places: learned by four heads, less by one", four - one, least=0.1),
            Check("four places: learned by four layers of one head, less by four heads", stacked - four, -0.1, 0.1),
            Check("control: one place: learned by one head", single, least=0.95),
            _apart(READING, runs),
            instead="That each place takes a head, in one layer or in several, was not seen",
        )


def _module(task: GeneratedTask, shape: Shape, length: int, seed: int) -> nn.Transformer:
    """Positions are learned where fixed places are read; else they are ALiBi's, which tell near from far."""
    if isinstance(task, Places):
        blocks = [block(shape.width, shape.heads, hidden=None)] * shape.layers
        return generated_tasks.with_positions(blocks, task.classes, length, seed)
    # unless it is scaled, a symbol of the table is small beside what several new layers add
    scale = math.sqrt(shape.width) if isinstance(task, FollowerTable) else None
    return attention_layers(shape.layers, task.classes, shape.width, shape.heads, seed, scale=scale)


def _apart(task: str, runs: Runs, first: int | None = None) -> Check:
    counts = [count for count, _ in runs[task].values()][:first]
    return Check(f"{task}: parameters, most over least", max(counts) / min(counts), most=1.05)
