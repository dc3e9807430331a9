"""`lab alignment`: passes on a smaller task, fails when values stand beside other keys."""

import numpy as np
import pytest

import tiny
from lab_results import change_values, failed, passes
from triptych.errors import InputError
from triptych.model import Model
from triptych.text import character_tokenizer
from triptych_lectures.labs import alignment, run
from triptych_lectures.labs.alignment import cheapest
from triptych_lectures.labs.lab import Setup

HITS = "letters whose strongest attention is on a true partner"

SMALL = Setup(sizes={"held": 60})


def test_passes() -> None:
    passes(run("alignment", SMALL))


def test_fails_when_values_stand_beside_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder finds its letters all the same, but what it attends to is no longer where they are."""
    change_values(monkeypatch, lambda values: values.roll(2, 0))
    assert HITS in failed(run("alignment", SMALL))


@pytest.mark.parametrize(
    ("source", "target", "true"),
    [
        ("loue", "love", {(0, 0), (1, 1), (2, 2), (3, 3)}),
        ("been", "ben", {(0, 0), (1, 1), (1, 2), (2, 3)}),  # either e may go
        ("pesant", "peasant", {(0, 0), (1, 1), (3, 2), (4, 3), (5, 4), (6, 5)}),
        ("ab", "b", {(0, 1)}),
    ],
)
def test_the_cheapest_alignments(source: str, target: str, true: set[tuple[int, int]]) -> None:
    result = cheapest(source, target)
    assert result.shape == (len(target), len(source))
    assert {(int(t), int(s)) for t, s in zip(*np.nonzero(result), strict=True)} == true


def test_a_decoder_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tiny.decoder(), character_tokenizer(alignment.AlignmentLab().letters))
    monkeypatch.setattr(alignment.AlignmentLab, "_model", lambda self, setup, train: (model, []))
    with pytest.raises(InputError, match="needs an encoder-decoder whose tokens are letters"):
        run("alignment")
