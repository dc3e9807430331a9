"""The lab `gradients`: it passes, and fails when either side is wrong."""

from typing import Any

import pytest
import torch

from lab_results import passes
from triptych import ops
from triptych.nn import feedforward, linear
from triptych.train import Optimizer
from triptych_lectures import labs
from triptych_lectures.labs.lab import LabResult, Setup
from triptych_lectures.scratch import numpy_transformer as by_hand
from triptych_lectures.scratch.numpy_transformer import Array, Weights


def failed(result: LabResult) -> set[str]:
    """The first words of the criteria that were not met."""
    return {check.claim.split()[0] for check in result.checks if not check.passed}


@pytest.mark.parametrize("seed", [0, 3])
def test_it_passes(seed: int) -> None:
    result = passes(labs.run("gradients", Setup(seed=seed)))
    parts = result.sections[0].data()["rows"]
    assert [row[0] for row in parts] == ["embed", "attention", "SwiGLU", "RMSNorm", "head"]
    assert all(float(row[3]) < 1e-12 for row in parts)


def test_it_fails_on_a_wrong_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that forgets that its divisor depends on x: autograd and finite differences both differ."""

    def careless(dy: Array, n: Array, r: Array, w: Array) -> tuple[Array, Array]:
        return dy * w / r, (dy * n).reshape(-1, len(w)).sum(0)

    monkeypatch.setattr(by_hand, "rmsnorm_backward", careless)
    assert failed(labs.run("gradients")) >= {"gradients", "finite", "losses"}


def test_it_fails_where_one_weight_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one gradient, by a millionth of the largest."""
    right = by_hand.backward

    def nearly(*given: Any) -> Weights:
        dw = right(*given)
        dw["blocks.1.attn.k"][2, 3] += 1e-6 * abs(dw["blocks.1.attn.k"]).max()
        return dw

    monkeypatch.setattr(by_hand, "backward", nearly)
    assert "gradients" in failed(labs.run("gradients"))


def test_it_fails_when_the_library_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = linear.RMSNorm.forward
    monkeypatch.setattr(linear.RMSNorm, "forward", lambda self, x: forward(self, x - x.mean(-1, keepdim=True)))
    assert failed(labs.run("gradients")) >= {"logits", "gradients", "losses"}


def test_it_fails_when_the_library_updates_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Optimizer.step

    def stretched(self: Optimizer, factor: float) -> None:
        step(self, factor * 1.001)

    monkeypatch.setattr(Optimizer, "step", stretched)
    assert failed(labs.run("gradients")) == {"losses"}


def test_autograd_is_the_library_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient cut inside the library is seen: the lab does not compare a thing with itself."""

    def cut(self: feedforward.GLU, x: torch.Tensor, rows: object, taps: object) -> torch.Tensor:
        act = ops.ACTIVATIONS["silu"](self.gate(x))
        return self.down((act + act.detach()) / 2 * self.up(x))

    monkeypatch.setattr(feedforward.GLU, "forward", cut)
    assert "gradients" in failed(labs.run("gradients"))
