"""Variants of the lectures' exercises: computed answers, other numbers for each seed, checked answers, sheets.

`test_exercise_solvers.py` holds every answer against a solver written apart.
"""

import json
import tomllib
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from cli_models import Captured, said
from triptych.cli import main
from triptych.errors import InputError
from triptych_lectures import exercises
from triptych_lectures.exercises.exercise import ExerciseQuestion, number
from triptych_lectures.exercises.sheet import sheet

SEEDS = (0, 1, 2, 3, 11)
LISTED = tomllib.loads((Path(__file__).parents[1] / "docs" / "lectures.toml").read_text("utf-8"))["exercise"]


def test_every_exercise_of_the_lectures_has_variants() -> None:
    assert list(exercises.NAMES) == list(LISTED)


@pytest.mark.parametrize("name", exercises.NAMES)
def test_a_seed_gives_one_variant_and_another_seed_another(name: str) -> None:
    variants = [exercises.variant(name, seed) for seed in SEEDS]
    assert variants == [exercises.variant(name.lower(), seed) for seed in SEEDS]
    assert len({(one.statement, one.questions) for one in variants}) > 2
    for one in variants:
        assert one.name == name
        assert len(one.questions) > 1
        for question in one.questions:
            assert question.is_right(question.answer_text)
            assert not question.is_right("no idea")
            assert question.solution.endswith((".", ":"))
            assert "nan" not in question.answer_text


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        (256, "256", True),
        (256, "257", False),
        (256, "256 times", True),
        (1_048_576, "1,048,576", True),
        (1_048_576, "1048576", True),
        (1_048_576, "1048576.4", True),
        (1_048_576, "1058576", False),
        ((8, 100, 64), "(8, 100, 64)", True),
        ((8, 100, 64), "8,100,64", True),
        ((8, 100, 64), "8x100x64", True),
        ((8, 100, 64), "8 64 100", False),
        ((8, 100, 64), "8, 100", False),
        ((1024, 64), "1,024, 64", True),
        (0.3303, "0.33", True),
        (0.3303, "0.34", False),
        (0.3303, "\u22120.33", False),
        (3e-6, "0", False),
        (3e-6, "3e-6", True),
        ((0.98, 0.0198, 0.0002), ".98 .0198 0", True),
        ((0.98, 0.0198, 0.0002), ".98 .03 0", False),
        ("uniform", " Uniform. ", True),
        ("uniform", "first", False),
        (0.5, "nan", False),
        (0.5, "", False),
        (0.5, "1/2", True),
        (0.5, "1/0", False),
        ((0.5, 0.25), "1/2, 1/4", True),
    ],
)
def test_what_counts_as_right(answer: exercises.Answer, given: str, right: bool) -> None:
    assert ExerciseQuestion("?", answer, "So.").is_right(given) is right


def test_what_is_no_number_is_said() -> None:
    number, word = ExerciseQuestion("?", 6, "So."), ExerciseQuestion("?", "uniform", "So.")
    for given in ("abc", "", "nan", "5 apples", "sqrt(36)"):
        assert number.verdict(given) == "not a number: write it as 0.25 or 1/4"
    assert [number.verdict(given) for given in ("6 apples", "6", "1/4", "\u22126", "5x5")] == ["right"] * 2 + [
        "wrong"
    ] * 3
    assert word.verdict("abc") == "wrong"


def test_no_weights_are_even_in_the_exercise_by_hand() -> None:
    """Seeds 0 and 1 once had a query of zeros, and keys all alike."""
    for seed in range(60):
        weights = exercises.variant("L0.1", seed).questions[1].answer
        assert isinstance(weights, tuple)
        assert max(weights) - min(weights) > 1e-6


def test_unknown_names_seeds_and_answers_are_refused(unchecked: None) -> None:
    with pytest.raises(InputError, match=r"no exercise 'L4\.71'.*L4\.7"):
        exercises.variant("L4.71")
    for seed in (-1, 1.5, True, "3"):
        with pytest.raises(InputError, match="seed="):
            exercises.variant("L4.7", seed)
    with pytest.raises(InputError, match="name=7"):
        exercises.variant(7)
    one = exercises.variant("L4.9", 1)
    with pytest.raises(InputError, match="3 questions"):
        exercises.check(one, [])
    for wrong in ("256", [256]):
        with pytest.raises(InputError, match="list of strings"):
            exercises.check(one, wrong)
    with pytest.raises(InputError, match="not 4"):
        exercises.check(one, ["1"] * 4)


def test_a_wrong_answer_is_found_in_a_row_of_right_ones() -> None:
    one = exercises.variant("L4.14", 5)
    right = [question.answer_text for question in one.questions]
    assert exercises.check(one, right) == [True] * 4
    assert exercises.check(one, [right[0], right[2], right[2]]) == [True, False, True]


@pytest.mark.parametrize("seed", range(60))
def test_equal_tokens_agree_by_the_rule_of_the_solution(seed: int) -> None:
    """Under a causal mask two places of one word agree where what they see, themselves included, is in one proportion;
    by the words before them alone, "the mill mill the mill the" would have six outputs and not five."""
    one = exercises.variant("L4.12", seed)
    words = one.statement.split(": ")[1].split()
    seen = [Counter(words[: i + 1]) for i in range(len(words))]
    rule = {
        (word, *(Fraction(at[x], at.total()) for x in sorted(set(words)))) for word, at in zip(words, seen, strict=True)
    }
    assert one.questions[1].answer_text == str(len(rule))
    assert "their own word included" in one.questions[1].solution


# ---------------------------------------------------------------- the command


def test_the_command_shows_checks_and_saves(tmp_path: Path, capsys: Captured) -> None:
    one = exercises.variant("L4.9", 4)
    shown = said(["exercise", "L4.9", "--seed", "4"], capsys)[0]
    assert one.questions[0].text in shown
    assert one.questions[0].solution not in shown
    assert one.questions[0].solution in said(["exercise", "L4.9", "--seed", "4", "--solutions"], capsys)[0]
    assert main(["exercise", "L4.9", "--seed", "4", "--answer", one.questions[0].answer_text]) == 0
    left = f"2. {one.questions[1].text} 3. {one.questions[2].text}"
    assert f"2 questions not answered: {left}" in " ".join(capsys.readouterr().err.split())
    every = [word for question in one.questions for word in ("--answer", question.answer_text)]
    assert "not answered" not in said(["exercise", "L4.9", "--seed", "4", *every], capsys)[1]
    result = json.loads(said(["exercise", "L4.9", "--seed", "4", "--answer", "3", "--json"], capsys, 1)[0])
    assert result["answers"] == [{"answer": "3", "right": False}]
    assert result["not_answered"] == len(one.questions) - 1
    assert main(["exercise", "all", "--save", str(tmp_path / "sheet.html")]) == 0
    page = (tmp_path / "sheet.html").read_text("utf-8")
    assert page.count("<details>") == sum(len(exercises.variant(name).questions) for name in exercises.NAMES)
    listed = said(["exercise"], capsys)[0]
    assert all(title in listed for title in exercises.NAMES.values())


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["L9.1"], 1, "no exercise 'L9.1'"),
        (["L4.7", "L4.8", "--answer", "1"], 2, "for one exercise"),
        (["all", "--answer", "1"], 2, "give one NAME"),
        (["L4.7", "--answer", "1", "--solutions"], 2, "leave --solutions out"),
        (["L4.7", "--save", "sheet.pdf"], 2, "--save"),
        (["--answer", "1"], 2, "--answer needs the NAME"),
        (["L4.7", "--seed", "-1"], 2, "--seed"),
        (["L4.7", *["--answer", "1"] * 9], 1, "3 questions"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], code: int, problem: str, capsys: Captured) -> None:
    error = said(["exercise", *arguments], capsys, code)[1]
    assert error.count("\n") == 1
    assert problem in error


def test_a_sheet_folds_its_answers_or_opens_them() -> None:
    drawn = [exercises.variant(name, 2) for name in ("L2.3", "L4.5")]
    folded, opened = sheet(drawn), sheet(drawn, solutions=True)
    assert folded.count("<details>") == 6
    assert folded.count("<details open>") == 0
    assert opened.count("<details open>") == 6
    assert "−∞" in folded


def test_numbers_are_written_as_a_person_would() -> None:
    assert [number(x) for x in (3, 0.25, 1_048_576, -2.0, 1 / 3)] == ["3", "0.25", "1,048,576", "-2", "0.3333"]
