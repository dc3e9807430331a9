"""Variants of the lectures' 31 exercises: other numbers for each seed, with their answers and how to work them out.

The answers are computed from the drawn numbers with the library's own functions, so that an exercise cannot ask for
something that the software would not say.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.arguments import checked, integer
from triptych.errors import InputError, nearest
# Importing these files enters their exercises.
from . import fundamentals, textbook, textbook_code
from .exercise import MAKERS, Answer, Exercise, ExerciseQuestion, make

_FILES = (fundamentals, textbook, textbook_code)
NAMES = {name: MAKERS[name][0] for name in sorted(MAKERS, key=lambda name: (name[:2], int(name[3:])))}
"""The exercises and their titles, in the order of the lectures."""


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


__all__ = ["NAMES", "Answer", "Exercise", "ExerciseQuestion", "check", "variant"]
