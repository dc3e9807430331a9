"""Every exercise against a solver written apart (`exercise_solvers.py`): answers, quoted figures and sentences."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest

from exercise_solvers import SOLVERS, figures
from triptych_lectures import exercises
from triptych_lectures.exercises import Exercise

FEW, MANY = 20, 300


def differences(drawn: Exercise) -> Iterator[str]:
    """What of an exercise its solver contradicts."""
    texts = [question.text for question in drawn.questions]
    try:
        solved = SOLVERS[drawn.name](drawn.statement, texts)
    except AssertionError as error:
        yield f"{drawn.name} seed {drawn.seed}: {error}"
        return
    if len(solved) != len(texts):
        yield f"{drawn.name} has {len(texts)} questions, {len(solved)} of them solved"
    for question, (answer, also) in zip(drawn.questions, solved, strict=False):
        where = f"{drawn.name} seed {drawn.seed}, {question.text!r}"
        if not agrees(question.answer, answer):
            yield f"{where}: {question.answer} and not {answer}"
        known = [x for one in (*also, *([] if isinstance(answer, str) else [answer])) for x in flat(one)]
        known += [*figures(drawn.statement), *figures(question.text)]
        for figure in figures(question.solution):
            if not any(is_printed(figure, one) for one in known):
                yield f"{where}: its solution says {figure}: {question.solution}"


def flat(x: object) -> list[float]:
    return [float(one) for one in np.asarray(x, dtype=np.float64).reshape(-1)]


def agrees(answer: exercises.Answer, other: object) -> bool:
    if isinstance(answer, str) or isinstance(other, str):
        return answer == other
    ours, theirs = flat(answer), flat(other)
    return len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=1e-7, atol=1e-9)


def is_printed(figure: float, exact: float) -> bool:
    """Whether `figure` is `exact` to four significant digits, or an integer exactly."""
    return math.isclose(figure, exact, rel_tol=6e-4, abs_tol=1e-12) and (
        not float(figure).is_integer() or abs(figure) < 1000 or figure == exact or not float(exact).is_integer()
    )


def check(name: str, seeds: int) -> None:
    wrong = [one for seed in range(seeds) for one in differences(exercises.variant(name, seed))]
    assert not wrong, f"{len(wrong)} in {seeds} seeds; the first: {wrong[0]}"


def test_every_exercise_has_a_solver() -> None:
    assert [*SOLVERS] == [*exercises.NAMES]


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_solver_written_apart_agrees(name: str) -> None:
    check(name, FEW)


@pytest.mark.heavy
@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_solver_written_apart_agrees_at_many_seeds(name: str) -> None:
    check(name, MANY)


# ---------------------------------------------------------------- and a broken exercise is noticed


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_wrong_answer_is_noticed(name: str) -> None:
    """The answer to each question changed a little, or to another word."""
    drawn = exercises.variant(name, 5)
    assert not list(differences(drawn))
    for place, question in enumerate(drawn.questions):
        one = question.answer
        wrong: exercises.Answer
        if isinstance(one, str):
            wrong = f"not {one}"
        else:
            first, *rest = one if isinstance(one, tuple) else (one,)
            wrong = (first * 1.001 + 1e-8, *rest)
        changed = list(drawn.questions)
        changed[place] = dataclasses.replace(question, answer=wrong)
        assert list(differences(dataclasses.replace(drawn, questions=tuple(changed)))), question.text


def test_l0_5_asks_for_one_head_where_several_exceed_their_habit() -> None:
    question = exercises.variant("L0.5", 0).questions[1]
    ratios = [float(one) for one in re.findall(r"\[(.*?)\]", question.solution)[0].split(", ")]
    assert sum(ratio > 1 for ratio in ratios) > 1
    assert "by the largest factor" in question.text


@pytest.mark.parametrize("name", ["L0.5", "L2.1", "L4.3", "L4.11", "L4.17", "L4.20"])
def test_a_wrong_figure_in_a_solution_is_noticed(name: str) -> None:
    drawn = exercises.variant(name, 5)
    place, question = next((i, one) for i, one in enumerate(drawn.questions) if "[" in one.solution)
    changed = list(drawn.questions)
    changed[place] = dataclasses.replace(question, solution=question.solution.replace("[", "[77.31, "))
    assert any("77.31" in one for one in differences(dataclasses.replace(drawn, questions=tuple(changed))))
