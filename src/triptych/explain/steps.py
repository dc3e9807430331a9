"""Steps that print tensors, and the check that each follows from the tensors printed before it."""

import math
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

TOLERANCE = 1e-5
ROWS, COLUMNS = 4, 4  # printed of a tensor, at most
SQUARE = 8  # of one with a row and a column for each token, and of the candidates
Cell = TypeVar("Cell")
LARGE = 1 << 22  # numbers; a larger tensor, the matrix of a vocabulary, is not converted to float64


@dataclass(frozen=True)
class Excerpt:
    """The part of a tensor that is printed: names and numbers, and how many rows and columns are not."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    more_rows: int
    more_columns: int
    focus: int | None  # which of the printed rows is the one followed
    gap: int | None  # before which of them rows are left out; None where they are the first ones
    column_gap: int | None  # before or behind which of the printed columns others are left out

    def with_gap(self, cells: Sequence[Cell], gap: Cell) -> list[Cell]:
        """The cells of a row, or the names of the columns, with `gap` where columns are left out."""
        at = self.column_gap
        return list(cells) if at is None else [*cells[:at], gap, *cells[at:]]

    @property
    def left_out(self) -> str:
        """`… 570 more columns, 3 more rows`, or nothing where everything is printed."""
        counts = ((self.more_columns, "column"), (self.more_rows, "row"))
        left_out = [f"{count:,} more {what}{'s' * (count != 1)}" for count, what in counts if count]
        return "… " + ", ".join(left_out) if left_out else ""


@dataclass(frozen=True, eq=False)
class ShownTensor:
    """A tensor as a step prints it.

    name      the site, parameter or quantity it is, once in a walk: `blocks.0.attn.q`.
    symbol    what the formula calls it: `q`.
    letters   its axes: `N D`, or `H T S` with the heads first, of which `head` is printed.
    value     all of it, on the host.
    labels, columns   names of its rows and columns, where they have any: tokens.
    focus     the row that is followed, always printed.
    whole     all rows are printed, however many.
    """

    name: str
    symbol: str
    letters: str
    value: Tensor
    labels: Sequence[str] = ()
    columns: Sequence[str] = ()
    head: int = 0
    focus: int | None = None
    whole: bool = False

    @property
    def shape(self) -> str:
        """`[N 6, D 576]`"""
        sizes = zip(self.letters.split(), self.value.shape, strict=True)
        return "[" + ", ".join(f"{letter} {size:,}" for letter, size in sizes) + "]"

    def excerpt(self, columns: int = SQUARE, fitting: int = SQUARE + 1) -> Excerpt:
        """A few rows - the followed one among them - and at most so many columns of the printed matrix; all columns
        with names where no more than `fitting`, and all rows where only one would be left out.

        One whose columns have names is read cell by cell, so more of it is printed; columns that are few enough are
        printed in any case.
        """
        matrix = self.value[self.head] if self.value.dim() == 3 else self.value
        matrix = matrix[None] if matrix.dim() < 2 else matrix
        high, wide = matrix.shape
        rows = high if self.whole else SQUARE if self.columns else ROWS
        rows += high == rows + 1
        few = fitting if self.columns else columns
        columns = wide if wide <= few else columns if self.columns else min(columns, COLUMNS)
        last = self.focus if len(self.columns) == high else wide - 1  # dimensions have no last one to follow
        down = _printed_indices(high, rows, self.focus)
        across = _printed_indices(wide, columns, last if self.columns else None)
        labels = self.labels or (("",) if high == 1 else [str(i) for i in range(high)])
        names = self.columns or [str(i) for i in range(wide)]
        return Excerpt(
            tuple(labels[i] for i in down),
            tuple(names[i] for i in across),
            tuple(tuple(float(matrix[i, j]) for j in across) for i in down),
            high - len(down),
            wide - len(across),
            down.index(self.focus) if self.focus in down else None,
            next((i for i, row in enumerate(down) if row != i), None),
            next((i for i, column in enumerate(across) if column != i), len(across)) if len(across) < wide else None,
        )

    def to_dict(self) -> dict[str, Any]:
        part = self.excerpt()
        values = [[x if math.isfinite(x) else str(x) for x in row] for row in part.values]
        head = {"head": self.head} if self.value.dim() == 3 else {}
        return {
            "name": self.name, "symbol": self.symbol, "letters": self.letters.split(), "shape": list(self.value.shape),
            **head, "rows": part.rows, "columns": part.columns, "values": values,
            "more_rows": part.more_rows, "more_columns": part.more_columns,
        }  # fmt: skip


def exact(value: Tensor) -> Tensor:
    """In float64, unless it holds integers or is as large as the matrix of a vocabulary."""
    return value if not value.is_floating_point() or value.numel() > LARGE else value.double()


class PrintedTensors(UserDict[str, Tensor]):
    """The tensors printed so far, by name, read in float64.  One that was not printed is not there: a KeyError."""

    def add(self, shown: Sequence[ShownTensor]) -> None:
        self.data |= {one.name: one.value for one in shown}

    def __getitem__(self, name: str) -> Tensor:
        return exact(self.data[name])


Again = Callable[[PrintedTensors], Tensor | Sequence[Tensor]]
"""The results of a step computed again, by the formula as it is written, from what was printed."""


@dataclass(frozen=True, eq=False)
class WalkStep:
    """One step of a forward.  `uses` are the parameters and constants it prints, `makes` what the forward computed, and
    `again` computes that once more."""

    part: str
    title: str
    formula: str
    meaning: str
    makes: Sequence[ShownTensor]
    again: Again
    uses: Sequence[ShownTensor] = ()

    def error(self, printed: PrintedTensors) -> float:
        """How far the recomputed is from the printed: the largest difference, relative to the largest number where
        that is above 1.  `printed` grows by what this step prints."""
        printed.add(self.uses)
        again = self.again(printed)
        again = [again] if isinstance(again, Tensor) else list(again)
        printed.add(self.makes)
        return max(relative_difference(one.value, other) for one, other in zip(self.makes, again, strict=True))


@dataclass(frozen=True, eq=False)
class Walk:
    """The steps from a text to the output of the model.  `token` is the id at the end, where there is one."""

    title: str
    facts: Sequence[tuple[str, str]]
    steps: Sequence[WalkStep]
    outcome: str
    token: int | None = None

    @cached_property
    def errors(self) -> tuple[float, ...]:
        """Of each step, recomputed from the tensors printed before it."""
        printed = PrintedTensors()
        return tuple(step.error(printed) for step in self.steps)

    @property
    def agrees(self) -> bool:
        return all(error <= TOLERANCE for error in self.errors)

    @property
    def verdict(self) -> str:
        """One line: whether every step was recomputed, and the largest difference."""
        if self.agrees:
            return f"{len(self.steps)} steps recomputed from what is printed; largest difference {max(self.errors):.1e}"
        bad = [step.title for step, error in zip(self.steps, self.errors, strict=True) if not error <= TOLERANCE]
        return f"NOT recomputed to {TOLERANCE:g}: {', '.join(bad)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        steps = []
        for step, error in zip(self.steps, self.errors, strict=True):
            texts = {name: getattr(step, name) for name in ("part", "title", "formula", "meaning")}
            tensors = {name: [one.to_dict() for one in getattr(step, name)] for name in ("uses", "makes")}
            steps.append(texts | tensors | {"error": error if math.isfinite(error) else str(error)})
        walk = {"title": self.title, "facts": dict(self.facts), "outcome": self.outcome, "token": self.token}
        return walk | {"agrees": self.agrees, "steps": steps}


def name_of(shown: ShownTensor) -> str:
    """The symbol, with the head that is printed where there is a choice."""
    if shown.value.dim() < 3 or len(shown.value) == 1:
        return shown.symbol
    which = "head" if shown.letters.startswith("H") else "group"
    return f"{shown.symbol} of {which} {shown.head}"


def number(x: float) -> str:
    """A number as a step prints it, to four decimals or in three figures."""
    if math.isinf(x):
        return "-∞" if x < 0 else "∞"
    if x == int(x) and abs(x) < 1e16:
        return f"{x:,.0f}"
    return f"{x:.4f}" if 1e-3 <= abs(x) < 1e4 else f"{x:.2e}"


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative where floats exceed 1; infinite for another shape, for NaN, and where only one
    side is infinite."""
    if one.shape != other.shape:
        return math.inf
    a, b = one.double(), other.double()
    difference = (a - b).abs().masked_fill(a == b, 0.0)  # also where both are -inf
    finite = a[a.isfinite()] if one.is_floating_point() else a[:0]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    worst = float(difference.max()) / scale if difference.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf


def _printed_indices(n: int, most: int, focus: int | None) -> list[int]:
    """The first of n, and the followed one in place of the last of them where it lies beyond."""
    if n <= most or focus is None or focus < most:
        return list(range(min(n, most)))
    return [*range(most - 1), focus]
