"""What an exercise is: a text with numbers drawn from a seed, and questions whose answers are computed from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.arguments import checked
from triptych.attention import attention_pattern
from triptych.files import tables_of
from triptych.spec import Mask

Answer = int | float | str | tuple[int | float, ...]
"""A number, several in order (a shape, the numbers of a matrix row by row), or one word of those the question lists."""
Matrix = NDArray[np.float64]
TOLERANCE = 0.01  # relative, of a fraction: an answer given to three digits is right
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class ExerciseQuestion:
    """`text` asks, `answer` is right, and `solution` says how it is worked out."""

    text: str
    answer: Answer
    solution: str

    @property
    def answer_text(self) -> str:
        """The answer as a person would write it."""
        if isinstance(self.answer, str):
            return self.answer
        if isinstance(self.answer, tuple):
            return f"({', '.join(map(number, self.answer))})"
        return number(self.answer)

    def verdict(self, answer: str) -> str:
        """Whether an answer is right, or that it is no number where one was asked for."""
        if self.is_right(answer):
            return "right"
        rest, found = re.subn(rf"{_NUMBER.pattern}|\d+/\d+", "", _plain(answer), flags=re.IGNORECASE)
        if isinstance(self.answer, str) or (found and not rest.strip(" ,;/%()[]")):
            return "wrong"
        return "not a number: write it as 0.25 or 1/4"

    @checked
    def is_right(self, answer: str) -> bool:
        """Whether the text `answer` says the answer: all its numbers in order, whole ones exactly and fractions within
        1%; or its word, whatever the case of its letters."""
        if isinstance(self.answer, str):
            return answer.strip().strip(".").lower() == self.answer.lower()
        expected = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return any(_agree(numbers, expected) for numbers in _readings(answer))


@dataclass(frozen=True)
class Exercise:
    """One variant: `name` and `title` are those of the lectures' exercise, `statement` what all questions are about."""

    name: str
    title: str
    seed: int
    statement: str
    questions: tuple[ExerciseQuestion, ...]


TEXTS = tables_of(__file__)
"""By the name of an exercise, its title, what is given, and its questions, each with its solution."""
Draft = tuple[Mapping[str, Any], Sequence[Any]]
"""What the texts of an exercise are filled with, by name, and the answers to its questions."""
Random = np.random.Generator
Maker = Callable[[Random], Draft]
MAKERS: dict[str, Maker] = {}


def exercise(name: str) -> Callable[[Maker], Maker]:
    """Enter the decorated function as what makes the variants of the lectures' exercise `name`."""

    def enter(maker: Maker) -> Maker:
        MAKERS[name] = maker
        return maker

    return enter


def make(name: str, seed: int) -> Exercise:
    """The variant of exercise `name` that belongs to `seed`: the same for the same two, on every machine."""
    lecture, _, place = name[1:].partition(".")
    drawn, answers = MAKERS[name](np.random.default_rng([seed, int(lecture), int(place)]))
    texts, fill = TEXTS[name], _Texts()
    asked = tuple(
        ExerciseQuestion(fill.vformat(question, (), drawn), _answer(answer), fill.vformat(solution, (), drawn))
        for (question, solution), answer in zip(texts["questions"], answers, strict=True)
    )
    return Exercise(name, texts["title"], seed, fill.vformat(texts["given"], (), drawn), asked)


class _Texts(Formatter):
    """Fills texts: fractions with four digits, vectors and each row of a matrix in brackets; `{x:matrix W}` is `x` as
    the matrix W, in columns."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("matrix "):
            return matrix(format_spec.removeprefix("matrix "), value)
        if format_spec or isinstance(value, str | int):
            return format(value, format_spec)
        if isinstance(value, float):
            return number(value)
        return ", ".join(map(listed, np.atleast_2d(value)))


def _answer(x: Any) -> Answer:
    """Numbers of NumPy and torch as plain ones, an array row by row."""
    if not isinstance(x, np.ndarray | np.generic | torch.Tensor):
        return cast(Answer, x)
    return row(x) if x.ndim else cast(Answer, x.item())


# ---------------------------------------------------------------- what the makers share


def pick(random: Random, *choices: Any) -> Any:
    """One of the choices."""
    return choices[int(random.integers(len(choices)))]


def small(random: Random, *shape: int, low: int = -2, high: int = 3) -> Matrix:
    """Whole numbers of at least `low` and below `high`."""
    return random.integers(low, high, shape).astype(np.float64)


def tensor(x: Matrix) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def weights_of(scores: Matrix, scale: float = 1.0, mask: Mask | None = None) -> torch.Tensor:
    """The weights of keys whose products with each query are `scores`, [T, S]."""
    return attention_pattern(tensor(scores), tensor(np.eye(scores.shape[-1])), scale=scale, mask=mask)


def row(x: Any) -> tuple[float, ...]:
    """The numbers of an array or tensor, row by row."""
    return tuple(float(one) for one in np.asarray(x, dtype=np.float64).reshape(-1))


def number(x: float) -> str:
    """A whole number with separators, any other with four significant digits."""
    if float(x).is_integer() and abs(x) < 1e15:
        return f"{int(x):,}"
    return f"{x:.4g}"


def matrix(name: str, x: Matrix, rows: Sequence[str] = ()) -> str:
    """`name = ` and the rows of a matrix one below the other, in columns."""
    cells = [[number(one) for one in line] for line in np.atleast_2d(x)]
    width = max(len(cell) for line in cells for cell in line)
    lines = ["  ".join(cell.rjust(width) for cell in line) for line in cells]
    before = max((len(one) for one in rows), default=0)
    lines = [f"{label.ljust(before)}  {line}" for label, line in zip(rows, lines, strict=True)] if rows else lines
    return "\n".join(f"  {line}" for line in (f"{name} =", *(f"  {line}" for line in lines)))


def listed(x: Sequence[float] | Matrix) -> str:
    """`[1, 2.5, 3]`"""
    return f"[{', '.join(number(float(one)) for one in x)}]"


def _readings(text: str) -> Iterator[list[float]]:
    """The numbers of a text, commas read as what stands between them, and again as separators of thousands; and with
    a / b as a fraction."""
    text = _plain(text)
    for plain in (text.replace(",", " "), re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).replace(",", " ")):
        yield [float(one) for one in _NUMBER.findall(plain)]
    fractions = re.sub(r"(\d+)\s*/\s*0*([1-9]\d*)", lambda of: repr(int(of[1]) / int(of[2])), text)
    yield [float(one) for one in _NUMBER.findall(fractions.replace(",", " "))]


def _plain(text: str) -> str:
    """A text with the minus of a keyboard, and blanks for the signs between the numbers of a shape."""
    return re.sub(r"(?<=\d)\s*[x\u00d7]\s*(?=\d)", " ", text).replace("\u2212", "-").replace("_", "")


def _agree(numbers: Sequence[float], expected: Sequence[float]) -> bool:
    """Whole numbers exactly, but large ones to six digits; fractions within 1%, or within 0.05% of the largest."""
    if len(numbers) != len(expected):
        return False
    small = 5e-4 * max(map(abs, expected)) if len(expected) > 1 else 0.0
    return all(
        math.isclose(one, right, rel_tol=1e-6 if abs(right) >= 1e6 else 0.0)
        if float(right).is_integer()
        else math.isclose(one, right, rel_tol=TOLERANCE, abs_tol=small)
        for one, right in zip(numbers, expected, strict=True)
    )
