"""Sentences of labs that state a bound round it to the side on which it holds."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import triptych_lectures.labs
from triptych_lectures.labs.bounds import rounded_down, rounded_up

BEFORE = re.compile(r"(at most|at least|(more|less|lower|higher|later|fewer) than|up to|within) $")
AFTER = re.compile(r"^( \w+){0,3}( at most\b| at least\b| and more\b| or more\b)")


@pytest.mark.parametrize(
    ("x", "form", "up", "down"),
    [
        (4.387e-05, ".1g", "0.00005", "0.00004"),
        (5.496e-15, ".1g", "6e-15", "5e-15"),
        (0.9074, ".0%", "91%", "90%"),
        (0.9487, ".2f", "0.95", "0.94"),
        (-0.014, ".2f", "-0.01", "-0.02"),
        (0.05, ".0%", "5%", "5%"),
        (0.0, ".1g", "0.0", "0.0"),
        (float("inf"), ".1f", "Infinity", "Infinity"),
        (float("nan"), ".1f", "NaN", "NaN"),
    ],
)
def test_a_bound_holds_for_the_number_it_is_of(x: float, form: str, up: str, down: str) -> None:
    assert (rounded_up(x, form), rounded_down(x, form)) == (up, down)


def test_a_format_alone_rounds_past_the_number() -> None:
    assert float(f"{4.387e-05:.1g}") < 4.387e-05 <= float(rounded_up(4.387e-05, ".1g"))
    assert float(f"{0.9487:.2f}") > 0.9487 >= float(rounded_down(0.9487, ".2f"))


def test_no_sentence_rounds_a_bound_past_what_was_measured() -> None:
    found = [(path.name, text) for path in sources() for text in unguarded(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("sentence", "text"),
    [
        ('f"no logit differs by" f" more than {largest:.1g}."', "largest"),
        ('f"the control, {min(others):.0%} and more."', "min(others)"),
        ('f"it is {writing:.2f} nats and more"', "writing"),
        ('f"it learns {learned:.0%} of the way or more"', "learned"),
        ('f"learned {best:.2f} at most with"', "best"),
    ],
)
def test_such_a_sentence_is_found(sentence: str, text: str) -> None:
    assert list(unguarded(sentence)) == [text]


@pytest.mark.parametrize("sentence", ['f"{share:.0%} are right"', 'f"more than {self.rise:.0%}"', 'f"at most {most}"'])
def test_other_sentences_are_not(sentence: str) -> None:
    assert list(unguarded(sentence)) == []


def sources() -> list[Path]:
    return sorted(Path(triptych_lectures.labs.__path__[0]).glob("*.py"))


def unguarded(source: str) -> Iterator[str]:
    """The rounded numbers beside the words of a bound, without the sizes of a lab and constants, which are exact."""
    for node in ast.walk(ast.parse(source)):
        values = node.values if isinstance(node, ast.JoinedStr) else []
        texts = ["", *(value.value if isinstance(value, ast.Constant) else "" for value in values), ""]
        for before, value, after in zip(texts, values, texts[2:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not _rounds(value):
                continue
            if BEFORE.search(str(before)) or AFTER.search(str(after)):
                yield ast.unparse(value.value)


def _rounds(value: ast.FormattedValue) -> bool:
    exact = re.match(r"self\.\w+$|[A-Z_]+$", ast.unparse(value.value))
    return value.format_spec is not None and "." in ast.unparse(value.format_spec) and not exact
