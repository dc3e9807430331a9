"""In-context learning of a function that differs from row to row (Brown et al. 2020; Garg et al. 2022; lecture L4).

A row is x f(x) x f(x) ..., where f is a lookup from inputs to answers.  Nothing but the row says which f it is, and the
weights do not change while it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych import nn
from triptych.errors import InputError, counted
from triptych.page import TableSection
from triptych.train import Example, collate
from .generated_tasks import TrainedRun, TrainingBudget, held_out_rows, logits, train
from .lab import Check, Clauses, Ints, Lab, LabResult, Sections, Setup, clause, number, size
from .small_models import attention_layers, curve, examples, halves


class InContextLab(Lab):
    name = "in-context"

    symbols: int = size(5, "different inputs, and as many different answers, two or more", least=2)
    examples: int = size(16, "examples of a row, two or more", least=2)
    pools: Ints = size((1,), "how many functions the other models are trained on; the first is 1", full=(1, 16, 256))
    width: int = size(48, "width of the residual stream, a multiple of the heads", multiple="heads")
    heads: int = size(3, "heads of each of the two layers")
    steps: int = size(600, "training steps", full=800)
    rows: int = size(32, "rows of a step")
    rate: float = size(3e-3, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(1000, "rows of each test")

    def __post_init__(self) -> None:
        if self.pools[0] != 1:
            raise InputError(f"size pools: the first model is the control, trained on 1 function; got {self.pools[0]}")

    def run(self, setup: Setup) -> LabResult:
        every = Lookups(self.symbols, self.examples)
        new = replace(every, functions="new")
        models, runs = dict[str, nn.Transformer](), dict[str, TrainedRun]()
        tasks = {_name(pool): replace(every, pool=pool, seed=setup.seed) for pool in (*self.pools, None)}
        for name, task in tasks.items():
            setup.progress(f"trained on {name}: {self.steps} steps")
            models[name], runs[name] = self._train(task, setup.seed)
        on_new = {name: answered(model, new, self.tested, setup.seed) for name, model in models.items()}
        own = answered(models[_name(1)], tasks[_name(1)], self.tested, setup.seed)
        unrelated = answered(models[_name(None)], replace(new, random_answers=True), self.tested, setup.seed)
        return self.result(self._conclusion(on_new, own, unrelated), self._sections(on_new, unrelated, runs))

    def best_errors(self) -> NDArray[np.float64]:
        """[examples]: the least expected error: that of a guess where the input was not shown, and 0 elsewhere."""
        return (1 - 1 / self.symbols) ** np.arange(1.0, self.examples + 1)

    def _conclusion(self, on_new: dict[str, TaskAnswers], own: TaskAnswers, unrelated: TaskAnswers) -> Clauses:
        """Half of what examples can give is a use of them; a tenth is none."""
        first, second = halves(self.best_errors())
        possible, begin = first - second, float(own.right[:, 0].mean())
        every, single, errors = on_new[_name(None)], on_new[_name(1)], on_new[_name(None)].errors
        fall, new = "fall of the error", "functions never trained"
        of, used = "over the largest expected", every.fall / possible
        shown, hidden = (every.share(shown=shown) for shown in (True, False))
        yield clause(
            f"On functions that were never trained the error falls from {errors[0]:.0%} at the first example of a"
            f" row to {errors[-1]:.0%} at the last; {self.best_errors()[-1]:.0%} is expected of the best rule.",
            Check(f"{new}: {fall} from the first half of the row to the second, {of}", used, 0.5, 1.25),
            instead="The examples of a row were not used as far as they can be",
        )
        yield clause(
            f"What was learned is to look a function up in the row: {shown:.0%} are right where the input was shown"
            f" before, {hidden:.0%} where it was not, which is chance. Control: where the answers of a row are"
            " random, the error does not fall.",
            Check(f"{new}: right where the input was shown before", shown, least=0.9),
            Check(f"control: {new}: right where the input was not shown", hidden, most=1 / self.symbols + 0.1),
            Check(f"control: answers in the row random: {fall}, {of}", unrelated.fall / possible, -0.1, 0.1),
            instead="It was not a lookup in the row",
        )
        yield clause(
            "Only training that makes it necessary teaches it: a model trained on one function knows that"
            f" one before any example ({begin:.0%} right) and is wrong on {single.errors[-1]:.0%} of others at"
            " the last one.",
            Check("trained on 1 function: right on it at the first example", begin, least=0.9),
            Check(f"control: trained on 1 function, others tested: {fall}, {of}", single.fall / possible, -0.1, 0.1),
            instead="A model trained on one function used the examples, or did not learn it",
        )

    def _train(self, task: Lookups, seed: int) -> tuple[nn.Transformer, TrainedRun]:
        """Two layers of attention, which is what a lookup in the row takes (lab `induction`)."""
        module = attention_layers(2, 2 * self.symbols, self.width, self.heads, seed)
        return module, train(module, task, TrainingBudget(self.steps, self.rows, self.rate, shape="linear"), seed)

    def _sections(
        self, on_new: dict[str, TaskAnswers], unrelated: TaskAnswers, runs: dict[str, TrainedRun]
    ) -> Sections:
        lines = {f"trained on {name}": answers.errors for name, answers in on_new.items()}
        lines |= {"answers in the row random": unrelated.errors, "least expected": self.best_errors()}
        chance = 1 / self.symbols
        rows = [
            [name, number(runs[name].end), f"{answers.errors[0]:.0%}", f"{answers.errors[-1]:.0%}"]
            + [f"{answers.share(shown=shown):.0%}" for shown in (True, False)]
            for name, answers in on_new.items()
        ]
        header = ("trained on", "nats at the end", "wrong at the first example", "wrong at the last")
        title, places = "Functions that were never trained", range(1, self.examples + 1)
        tested = f"Tested on functions never trained; {chance:.0%} are right by chance"
        yield curve(title, "example of the row", "share wrong", places, lines, {"guess": 1 - chance})
        yield TableSection(tested, (*header, "right, input shown before", "right, input not shown"), rows)


@dataclass(frozen=True)
class Lookups:
    """Rows of inputs and answers under a function that is drawn for each row.

    `functions`: `trained` draws those whose answers do not sum to a multiple of `symbols`, `new` the others, so that no
    function is in both; with `pool`, `trained` draws among so many that `seed` chooses.  `random_answers`: each answer
    is drawn anew, and the input says nothing about it.  The ids of answers follow those of inputs.
    """

    symbols: int
    examples: int
    functions: Literal["trained", "new"] = "trained"
    pool: int | None = None
    seed: int = 0
    random_answers: bool = False

    @property
    def classes(self) -> int:
        return self.symbols

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        tables = self.tables(noise, count)
        inputs = noise.integers(self.symbols, size=(count, self.examples))
        answers = np.take_along_axis(tables, inputs, axis=1)
        if self.random_answers:
            answers = noise.integers(self.symbols, size=answers.shape)
        rows = np.stack([inputs, self.symbols + answers], axis=-1).reshape(count, -1).astype(np.int32)
        return examples(rows[:, :-1], rows[:, 1:], np.arange(2 * self.examples - 1) % 2 == 0)

    def tables(self, noise: np.random.Generator, count: int) -> NDArray[np.int64]:
        """[count, symbols]: the answer to each input, one function a row."""
        if self.pool is None or self.functions == "new":
            return self._drawn(noise, count)
        pool = self._drawn(np.random.default_rng(self.seed), self.pool)
        return pool[noise.integers(self.pool, size=count)]

    def _drawn(self, noise: np.random.Generator, count: int) -> NDArray[np.int64]:
        tables = noise.integers(self.symbols, size=(count, self.symbols))
        sums = (tables.sum(-1) - tables[:, 0]) % self.symbols  # of all answers but the first
        other = noise.integers(1, self.symbols, size=count) if self.functions == "trained" else 0
        tables[:, 0] = (other - sums) % self.symbols
        return tables


class TaskAnswers(NamedTuple):
    """What a model answered: `right` [rows, examples], and `shown` of the same shape, whether the row had the input
    before."""

    right: NDArray[np.bool_]
    shown: NDArray[np.bool_]

    @property
    def errors(self) -> NDArray[np.float64]:
        """The share of wrong answers at each example of a row."""
        return np.asarray((~self.right).mean(0))

    @property
    def fall(self) -> float:
        """By how much the error falls from the first half of a row's examples to its second half."""
        first, second = halves(self.errors)
        return first - second

    def share(self, *, shown: bool) -> float:
        """Of the right answers among those whose input the row had shown before, or had not."""
        return float(self.right[self.shown == shown].mean())


def _name(pool: int | None) -> str:
    return "a new function in each row" if pool is None else counted(pool, "function")


def answered(module: nn.Transformer, task: Lookups, count: int, seed: int) -> TaskAnswers:
    """The answers of `module` to `count` rows that it was not trained on."""
    rows = held_out_rows(task, count, seed)
    answers = logits(module, rows).argmax(-1)
    inputs = np.stack([row.ids[row.trained] for row in rows])
    earlier = np.tril(np.ones((task.examples, task.examples), dtype=bool), -1)
    shown = ((inputs[:, :, None] == inputs[:, None, :]) & earlier).any(-1)
    return TaskAnswers((answers == collate(rows).targets).numpy().reshape(inputs.shape), shown)
