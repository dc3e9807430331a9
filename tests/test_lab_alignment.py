"""`lab alignment`: passes on a smaller task, fails when values stand beside other keys."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

import tiny
from triptych.attention import EncoderOutput
from triptych.attention.cross_cache import Project
from triptych.errors import InputError
from triptych.labs import alignment, run
from triptych.labs.alignment import cheapest
from triptych.labs.lab import Setup
from triptych.model import Model
from triptych.text import character_tokenizer

HITS = "letters whose strongest attention is on a true partner"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter words of fewer letters, for a narrower model."""
    width = {"d_model": 64, "d_ff": 64, "d_kv": 32, "num_heads": 2, "num_layers": 1}
    for name, value in {
        "LETTERS": "abcdefghiklm",
        "WORD": (3, 6),
        "DOUBLED": 0.5,
        "TRAINED": 4_000,
        "HELD": 60,
        "MODEL": alignment.MODEL | width,
        "OPTIMIZER": alignment.OptimizerSettings(name="muon", lr=5e-3, muon_lr=1e-2),
        "STEPS": 220,
        "ROWS": 48,
    }.items():
        monkeypatch.setattr(alignment, name, value)


def test_passes(small: None) -> None:
    result = run("alignment")
    assert result.passed, result.verdict


def test_fails_when_values_stand_beside_other_keys(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder finds its letters all the same, but what it attends to is no longer where they are."""
    keys = EncoderOutput.keys

    def shifted(self: EncoderOutput, layer: int, project: Project) -> tuple[Tensor, Tensor]:
        k, v = keys(self, layer, project)
        return k, v.roll(2, 0)

    monkeypatch.setattr(EncoderOutput, "keys", shifted)
    result = run("alignment")
    assert HITS in {check.claim for check in result.checks if not check.passed}, result.verdict


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_passes_at_full_size(seed: int) -> None:
    result = run("alignment", Setup(seed=seed))
    assert result.passed, result.verdict


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
    model = Model(tiny.decoder(), character_tokenizer(alignment.LETTERS))
    monkeypatch.setattr(alignment, "_model", lambda setup, train: (model, []))
    with pytest.raises(InputError, match="needs an encoder-decoder whose tokens are letters"):
        run("alignment")
