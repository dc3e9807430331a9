"""Sentences of labs that state a bound round it to the side on which it holds."""

import pytest

from triptych_lectures.labs.bounds import rounded_down, rounded_up


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
