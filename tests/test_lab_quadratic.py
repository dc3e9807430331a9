"""`lab quadratic`, with FLOPs in place of seconds: passes, and fails when a path saves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych.attention import dispatch, linear
from triptych.spec import causal, window
from triptych_lectures.labs import quadratic, run
from triptych_lectures.labs.lab import Setup
from triptych_lectures.labs.memory import peak_bytes


def _flops(call: Callable[..., Any], inputs: Any) -> float:
    """Of the matrix products alone, the fused kernel's for all pairs."""

    def fused(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
        return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: fused}) as counted:
        call(*inputs)
    return counted.get_total_flops()


SMALL = Setup(
    sizes={
        "lengths": (32, 64, 512, 1024), "short": (32, 64), "long": (512, 1024), "layer": 128, "repeats": 1,
        "resident": 4096,
    }
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratic, "_seconds", _flops)


def failed() -> set[str]:
    return {check.claim for check in run("quadratic", SMALL).checks if not check.passed}


def test_passes(small: None) -> None:
    result = run("quadratic", SMALL)
    assert result.passed, result.verdict


def _refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    broken = replace(dispatch.KERNELS[name], cannot=lambda request: ["broken"])
    monkeypatch.setitem(dispatch.KERNELS, name, broken)


@pytest.mark.parametrize(("path", "way"), [("window", "window of 128"), ("block", "block-sparse")])
def test_fails_when_a_sparse_path_is_not_taken(
    small: None, monkeypatch: pytest.MonkeyPatch, path: str, way: str
) -> None:
    _refuse(monkeypatch, path)
    assert f"{way}: seconds grow as T to the power" in failed()


def test_fails_when_the_fused_kernel_is_not(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.kernel_flash, "cannot", lambda request: ["broken"])
    claims = failed()
    if Path("/proc/self/clear_refs").exists():
        assert "fused: memory of the process at 4,096 tokens, over one score matrix" in claims


def test_fails_when_full_attention_leaves_pairs_out(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = quadratic.mechanisms(quadratic.Sizes())
    broken = replace(ways["full"], call=ways["window of 128"].call)
    monkeypatch.setattr(quadratic, "mechanisms", lambda sizes: {**ways, "full": broken})
    assert {"full: seconds grow as T to the power", "full: bytes grow as T to the power"} <= failed()


def test_fails_when_the_layer_attends_within_a_window(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = quadratic.decoder
    monkeypatch.setattr(quadratic, "decoder", lambda *parts: windowed(*parts, mask=causal() & window(8)))
    assert (
        "the layer less its matmuls and all that grows as T, 512 to 1,024 tokens: seconds grow as T to the power"
        in failed()
    )


def test_fails_when_the_fast_paths_forget_the_scale(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forget = dispatch.run
    monkeypatch.setattr(
        dispatch, "run", lambda request, tensors, path="auto": forget(replace(request, scale=1.0), tensors, path)
    )
    assert "largest difference between mechanisms that are exact" in failed()


def test_linear_attention_never_holds_a_matrix_of_pairs() -> None:
    """Not even of booleans: narrow heads, so that one would show."""
    sizes = []
    for length in (1024, 2048):
        inputs = tuple(torch.randn(1, 1, length, 4) for _ in range(3))
        sizes.append(peak_bytes(lambda q, k, v: linear(q, k, v, mask=causal()), inputs))
    assert sizes[1] <= 2.05 * sizes[0]


def test_peak_is_of_what_lives_at_one_time() -> None:
    inputs = (torch.ones(1, 1, 250, 1),) * 3

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        a = q + 1  # 1,000 bytes
        b = a.expand(1, 1, 250, 3) * 2  # 3,000 more
        del a
        return b[:1].sum() + k[:, :, :1]  # a view is nothing, two scalars after a is gone

    assert peak_bytes(call, inputs) == 4000


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_passes_at_full_size(seed: int, unchecked: None) -> None:
    result = run("quadratic", Setup(seed=seed, full=True))
    assert result.passed, result.verdict
