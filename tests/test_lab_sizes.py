"""Sizes of every lab: what their texts say is what they refuse, and each refusal is one line that names the size."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.errors import InputError
from triptych_lectures import labs
from triptych_lectures.labs import LABS
from triptych_lectures.labs.alignment import HeldOutPairs
from triptych_lectures.labs.generated_tasks import Places
from triptych_lectures.labs.lab import Limits, Setup, SizeRow, size_rows
from triptych_lectures.labs.small_models import geometric_mean
from triptych_lectures.labs.translators import END_ID, SMOOTHED, Ids, TrainedTranslator, Translator

Value = int | float | str

ROWS = [(name, row) for name in LABS for row in size_rows(labs.lab_class(name), Setup())]
NUMBERS = [(name, row) for name, row in ROWS if not isinstance(row.default, str)]


def refusal(lab: str, size: str, value: Value) -> str:
    """The message with which a lab refuses a value, which must be one line that names the size."""
    with pytest.raises(InputError) as refused:
        size_rows(labs.lab_class(lab), Setup(sizes={size: value}))
    message = str(refused.value)
    assert "\n" not in message
    assert re.search(rf"\b{size}\b", message), message
    return message


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "", "many", "1,,2"])
def test_what_is_no_number_above_0_is_refused_for_every_size(value: str) -> None:
    for lab, row in NUMBERS:
        refusal(lab, row.name, value)


def test_sizes_that_a_lab_declares_are_within_their_limits() -> None:
    for name in LABS:
        for sizes in (labs.lab_class(name).sized(Setup(full=full)) for full in (False, True)):
            for field in fields(sizes):  # type: ignore[arg-type]
                field.metadata["limits"].check(field.name, getattr(sizes, field.name), vars(sizes))


def said(pattern: str) -> list[tuple[str, SizeRow, re.Match[str]]]:
    """The sizes whose text matches."""
    return [(lab, row, match) for lab, row in NUMBERS if (match := re.search(pattern, row.about))]


def test_a_text_that_names_a_multiple_is_true() -> None:
    named = said(r"a multiple of (\d+)")
    assert len(named) >= 10
    for lab, row, match in named:
        refusal(lab, row.name, int(match[1]) + 1)


def test_a_text_that_names_two_or_more_is_true() -> None:
    named = [(lab, row) for lab, row, _ in said("two or more") if not isinstance(row.default, tuple)]
    assert len(named) >= 10
    for lab, row in named:
        refusal(lab, row.name, 1)


def test_a_text_that_names_an_order_is_true() -> None:
    named = [(lab, row) for lab, row, _ in said("ascending") if row.name != "noises"]
    assert len(named) >= 10
    for lab, row in named:
        assert isinstance(row.full, tuple)
        assert all(a < b for a, b in pairwise(row.full))
        message = refusal(lab, row.name, ",".join(map(str, reversed(row.full)))) if len(row.full) > 1 else "order"
        assert "order" in message


@pytest.mark.parametrize(
    ("limits", "value", "message"),
    [
        (Limits(least=2), 1, "size n: 1 must be 2 or more"),
        (Limits(most=0.5), 0.75, r"size n: 0\.75 must be at most 0\.5"),
        (Limits(multiple=4), 7, "size n: 7 must be a multiple of 4"),
        (Limits(values=2), (3,), "size n: 3 is too few; give 2 values or more"),
        (Limits(ascending=True), (1, 1), "size n: 1,1 must be in ascending order, and all different"),
        (Limits(multiple=4), (4, 6), "size n: 6 must be a multiple of 4"),
    ],
)
def test_limits(limits: Limits, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        limits.check("n", value, {})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(most="m"), "size n: 7 must be at most m, 6"),
        (Limits(below="m"), "size n: 6 must be below m, 6"),
        (Limits(multiple="m"), "size n: 7 must be a multiple of m, 6"),
    ],
)
def test_limits_that_are_another_size(limits: Limits, message: str) -> None:
    taken = 5 if limits.below else 6
    limits.check("n", taken, {"m": 6})
    with pytest.raises(InputError, match=message):
        limits.check("n", (taken, 6 if limits.below else 7), {"m": (12, 6) if limits.most == "m" else 6})


def test_values_at_their_limits_are_taken() -> None:
    Limits(2, 8, 2).check("n", 2, {})
    Limits(2, 8, 2).check("n", (8, 2, 2), {})
    Limits(values=2, ascending=True).check("n", (1, 2), {})
    Limits(least=2).check("n", "text", {})


# Each of these ended in a traceback, or ran on without an end.
CONTRADICTIONS = {
    "scaling": {"tokens": 1},
    "speculation": {"new": 1},
    "linear-state": {"width": 7},
    "additive-vs-dot": {"tokens": 1},
    "bottleneck": {"narrow": 64},
    "recurrence": {"held": 3},
    "panels": {"width": 7},
    "word-alignment": {"cross_heads": 3},
    "captions": {"patch": 7},
    "image-labels": {"width": 7},
    "padding": {"shortest": 1, "longest": 1},
    "not-explanation": {"kinds": 17},
    "trained-scale": {"back": 32},
    "trained-scores": {"length": 3},
    "cosine-scores": {"symbols": 1},
    "trained-heads": {"symbols": 17},
    "heads-vs-width": {"symbols": 17},
    "capacity": {"narrow": 64},
    "norm-placement": {"moderate": 5},
    "activations": {"without": 3, "draws": 2},
    "dropout-places": {"dropped": 1.5},
    "embedding-scale": {"width": 7},
    "residual-scaling": {"untrained": "4,4"},
    "quadratic": {"lengths": "2048,8192", "short": "2048,8192"},
}


@pytest.mark.parametrize("lab", CONTRADICTIONS)
def test_sizes_that_contradict_each_other_are_refused_in_one_line(lab: str) -> None:
    with pytest.raises(InputError) as refused:
        labs.run(lab, Setup(sizes=CONTRADICTIONS[lab]))
    assert "\n" not in str(refused.value)


def test_places_must_lie_in_the_row_and_have_answers() -> None:
    assert Places(4, 5, (4,)).classes == 4
    with pytest.raises(InputError, match="a row of 5 symbols has none 5 places back"):
        Places(4, 5, (1, 5))
    with pytest.raises(InputError, match="1 symbols at 1 places are 1 answers"):
        Places(1, 5, (1,))
    with pytest.raises(InputError, match="83,521 answers"):
        Places(17, 5, (1, 2, 3, 4))


class Silent(Translator):
    """A translator that ends at once."""

    def next_tokens(self, sources: Sequence[Ids], written: Sequence[Ids]) -> Tensor:
        return torch.full((len(sources),), END_ID)

    def sequential_steps(self, source: int, target: int) -> int:
        return 1


def test_a_loss_is_reached_only_in_a_whole_mean() -> None:
    """Of fewer steps than the mean is taken over, nothing is said."""
    assert TrainedTranslator(Silent(), [(1.0, 0.0)] * SMOOTHED, 1.0).reached(1.0) == SMOOTHED
    assert TrainedTranslator(Silent(), [(1.0, 0.0)] * (SMOOTHED - 1), 1.0).reached(1.0) is None


def test_the_loss_at_the_end_is_reached() -> None:
    """Two ways to compute the mean differ in the last bit, and then it never was."""
    for seed in range(20):
        losses = [(float(step), 3.0 / (step + 1) + noise) for step, noise in enumerate(random_losses(seed))]
        trained = TrainedTranslator(Silent(), losses, 1.0)
        assert trained.reached(trained.last) is not None


def random_losses(seed: int) -> list[float]:
    return (0.01 * np.random.default_rng(seed).random(40)).tolist()


def test_a_gradient_that_vanishes_in_one_draw_has_no_geometric_mean_above_0() -> None:
    assert geometric_mean([4.0, 9.0]) == pytest.approx(6.0)
    assert geometric_mean([4.0, 0.0]) == 0.0
    assert not math.isnan(geometric_mean([0.0]))


def test_the_share_of_letters_is_no_number_where_none_has_a_partner() -> None:
    subject = HeldOutPairs.__new__(HeldOutPairs)
    subject.partnered, subject.straight = np.zeros(2, bool), np.zeros(2, bool)
    assert math.isnan(subject.share(np.ones(2, bool)))
    subject.partnered = np.ones(2, bool)
    assert subject.share(np.array([True, False])) == 0.5
