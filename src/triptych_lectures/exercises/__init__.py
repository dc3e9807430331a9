"""Variants of the lectures' 31 exercises: other numbers for each seed, with their answers and how to work them out.

The answers are computed from the drawn numbers with the library's own functions, so that an exercise cannot ask for
something that the software would not say.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.arguments import checked, integer
from triptych.errors import InputError, nearest
from . import fundamentals, textbook  # importing them enters their exercises
from .exercise import TEXTS, Answer, Exercise, ExerciseQuestion, make

_FILES = (fundamentals, textbook)
NAMES = {name: str(texts["title"]) for name, texts in TEXTS.items()}
"""The exercises and their titles, in the order of the lectures."""
LECTURES = {
    "L0": tuple(name for name in NAMES if name.startswith("L0.")),
    "L1": ("L4.2", "L4.3", "L4.5", "L4.6", "L4.10", "L4.15"),
    "L2": tuple(name for name in NAMES if name.startswith("L2.")),
    "L3": ("L4.13", "L4.14"),
    "L4": tuple(name for name in NAMES if name.startswith("L4.")),
}
"""The exercises of each lecture; L1 and L3 have none of their own, and these are those of the path to them."""


@checked
def of_lectures(names: Sequence[str]) -> list[str]:
    """The names of exercises, each once, for names of exercises, of lectures (`L2`) and `all`."""
    groups = {name.lower(): own for name, own in LECTURES.items()} | {"all": tuple(NAMES)}
    return list(dict.fromkeys(one for name in names for one in groups.get(name.lower(), (name,))))


@checked
def variant(name: str, seed: int = 0) -> Exercise:
    """The variant of the lectures' exercise `name`, such as "L4.7", that belongs to `seed`.

    Raises InputError for an exercise that there is not, with the nearest names, and for a seed that is no whole number
    of at least 0.
    """
    known = {one.lower(): one for one in NAMES}
    if name.lower() not in known:
        raise InputError(f"no exercise {name!r}{nearest(name, NAMES)}; `triptych exercise` lists them")
    return make(known[name.lower()], integer("seed", seed, 0))


@checked
def check(exercise: Exercise, answers: Sequence[str]) -> list[bool]:
    """Whether each of `answers`, in the order of the questions, is right; see `ExerciseQuestion.is_right`.

    Raises InputError for more answers than questions, for none, and for anything but a list of texts.
    """
    if not 1 <= len(answers) <= len(exercise.questions):
        raise InputError(
            f"{exercise.name} has {len(exercise.questions)} questions, so give 1 to {len(exercise.questions)} answers "
            f"in their order, not {len(answers)}"
        )
    return [question.is_right(answer) for question, answer in zip(exercise.questions, answers, strict=False)]


__all__ = ["LECTURES", "NAMES", "Answer", "Exercise", "ExerciseQuestion", "check", "of_lectures", "variant"]
