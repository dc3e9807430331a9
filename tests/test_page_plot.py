"""The loss curve as a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triptych.errors import InputError
from triptych.page import Curve
from triptych.page.plot import loss_png

CURVE = Curve(
    "loss of a $5 run",
    "step",
    "nats per character",
    {"training": [(step, 4 / (1 + step)) for step in range(60)], "held $out": [(0, 4.1), (59, float("nan"))]},
    {"guessing": 3.3},
)


def test_a_curve_becomes_a_picture_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # a backend for the whole process is not ours to choose
    loss_png(tmp_path / "loss.png", CURVE)
    loss_png(tmp_path / "empty.png", Curve("t", "x", "y", {}, {}))
    drawn, empty = imread(tmp_path / "loss.png"), imread(tmp_path / "empty.png")
    assert drawn.shape[:2] == empty.shape[:2] == (675, 1200)
    assert (drawn != empty).any()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'triptych\[plot\]'"):
        loss_png(tmp_path / "loss.png", CURVE)
    assert not (tmp_path / "loss.png").exists()
