"""`lab quadratic`, with arithmetic in place of seconds: passes, and fails when a path saves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych.attention import dispatch, linear
from triptych.labs import quadratic, run
from triptych.spec import causal


def _flops(call: Callable[..., Any], given: Any) -> float:
    """Of the matrix products alone, the fused kernel's of all pairs."""

    def fused(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
        return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: fused}) as counted:
        call(*given)
    return counted.get_total_flops()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratic, "_seconds", _flops)
    monkeypatch.setattr(quadratic, "REPEATS", 1)
    monkeypatch.setattr(quadratic, "LENGTHS", (512, 1024))
    ways = {name: replace(way, fitted=(512, 1024)) for name, way in quadratic.WAYS.items()}
    monkeypatch.setattr(quadratic, "WAYS", ways)


def failed() -> set[str]:
    return {check.claim for check in run("quadratic").checks if not check.passed}


def test_passes(small: None) -> None:
    found = run("quadratic")
    assert found.passed, found.verdict


def _refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    broken = replace(dispatch.PATHS[name], cannot=lambda request: ["broken"])
    monkeypatch.setitem(dispatch.PATHS, name, broken)


@pytest.mark.parametrize(("path", "way"), [("window", "window of 128"), ("block", "block-sparse")])
def test_fails_when_a_sparse_path_is_not_taken(
    small: None, monkeypatch: pytest.MonkeyPatch, path: str, way: str
) -> None:
    _refuse(monkeypatch, path)
    assert f"{way}: seconds grow as T to the power" in failed()


def test_fails_when_the_fused_kernel_is_not(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.flash, "cannot", lambda request: ["broken"])
    assert "fused: bytes grow as T to the power" in failed()


def test_fails_when_the_fast_paths_forget_the_scale(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forget = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda request, path="auto": forget(replace(request, scale=1.0), path))
    assert "greatest difference between ways that are exact" in failed()


def test_linear_attention_never_holds_a_matrix_of_pairs() -> None:
    """Not even of booleans: narrow heads, so that one would show."""
    sizes = []
    for length in (1024, 2048):
        given = tuple(torch.randn(1, 1, length, 4) for _ in range(3))
        sizes.append(quadratic.peak(lambda q, k, v: linear(q, k, v, mask=causal()), given))
    assert sizes[1] <= 2.05 * sizes[0]


def test_peak_is_of_what_lives_at_one_time() -> None:
    given = (torch.ones(1, 1, 250, 1),) * 3

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        a = q + 1  # 1,000 bytes
        b = a.expand(1, 1, 250, 3) * 2  # 3,000 more
        del a
        return b[:1].sum() + k[:, :, :1]  # a view is nothing, two scalars after a is gone

    assert quadratic.peak(call, given) == 4000


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(5))
def test_passes_at_full_size(seed: int, unchecked: None) -> None:
    from triptych.labs.lab import Setup

    found = run("quadratic", Setup(seed=seed))
    assert found.passed, found.verdict
