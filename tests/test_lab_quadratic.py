"""`lab quadratic`: passes, and fails when a path saves nothing; what it counts is counted right."""

from dataclasses import replace

import pytest
import torch

from lab_results import passes, random_clock
from triptych.attention import dispatch, linear
from triptych.spec import causal, window
from triptych_lectures.labs import quadratic, run
from triptych_lectures.labs.counting import peak_bytes, products, shortest_seconds
from triptych_lectures.labs.lab import Setup

SMALL = Setup(
    sizes={
        "lengths": (32, 64, 512, 1024), "short": (32, 64), "long": (512, 1024), "layer": 128, "repeats": 1,
        "resident": 4096,
    }
)  # fmt: skip


def failed() -> set[str]:
    return {check.claim for check in run("quadratic", SMALL).checks if not check.passed}


def test_passes() -> None:
    passes(run("quadratic", SMALL))


def _refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    broken = replace(dispatch.KERNELS[name], cannot=lambda request: ["broken"])
    monkeypatch.setitem(dispatch.KERNELS, name, broken)


@pytest.mark.parametrize(("path", "way"), [("window", "window of 128"), ("block", "block-sparse")])
def test_fails_when_a_sparse_path_is_not_taken(monkeypatch: pytest.MonkeyPatch, path: str, way: str) -> None:
    _refuse(monkeypatch, path)
    assert f"{way}: FLOPs grow as T to the power" in failed()


def test_fails_when_the_fused_kernel_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.kernel_dense, "flash_cannot", lambda request: ["broken"])
    assert "fused: bytes grow as T to the power" in failed()


def test_fails_when_full_attention_leaves_pairs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = quadratic.QuadraticLab().mechanisms()
    broken = ways["full"]._replace(call=ways["window of 128"].call)
    monkeypatch.setattr(quadratic.QuadraticLab, "mechanisms", lambda self: {**ways, "full": broken})
    assert {"full: FLOPs grow as T to the power", "full: bytes grow as T to the power"} <= failed()


def test_fails_when_the_layer_attends_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = quadratic.decoder
    monkeypatch.setattr(quadratic, "decoder", lambda *parts: windowed(*parts, mask=causal() & window(8)))
    assert "the layer, products of queries, keys and values: FLOPs grow as T to the power" in failed()


def test_fails_when_heads_that_share_keys_attend_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = quadratic.QuadraticLab().mechanisms()
    one = ways[quadratic.ONE_GROUP]
    twice = one._replace(call=lambda *inputs: one.call(*inputs) + one.call(*inputs))
    monkeypatch.setattr(quadratic.QuadraticLab, "mechanisms", lambda self: {**ways, quadratic.ONE_GROUP: twice})
    assert "one key/value head: FLOPs over those of fused" in failed()


def test_fails_when_no_keys_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = quadratic.QuadraticLab().mechanisms()
    monkeypatch.setattr(quadratic.QuadraticLab, "mechanisms", lambda self: {**ways, quadratic.ONE_GROUP: ways["fused"]})
    assert failed() == {"one key/value head: bytes of k and v over those of fused"}


def test_fails_when_the_fast_paths_forget_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = dispatch.run
    monkeypatch.setattr(
        dispatch, "run", lambda request, tensors, path="auto": forget(replace(request, scale=1.0), tensors, path)
    )
    assert "largest difference from the definition under the same mask" in failed()


def test_no_criterion_is_a_time_or_the_memory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock and the system say, the verdict is the same."""
    random_clock(monkeypatch)
    monkeypatch.setattr(quadratic.QuadraticLab, "_resident", lambda self, ways, noise: {"full": 0, "fused": 1 << 40})
    assert run("quadratic", SMALL).passed
    assert shortest_seconds(lambda: None, calls=1) != shortest_seconds(lambda: None, calls=1)


def test_products_are_counted_where_they_run() -> None:
    x, weight, head = torch.randn(7, 3), torch.randn(5, 3), torch.randn(2, 7, 4)
    found = products(lambda: (x @ weight.T, head @ head.mT, torch.addmm(torch.zeros(5), x, weight.T), x * x))
    assert found.flops == {"mm": 2 * 7 * 3 * 5, "bmm": 2 * 2 * 7 * 4 * 7, "addmm": 2 * 7 * 3 * 5}
    assert found.weights == 2 * (2 * 7 * 3 * 5)
    assert found.read == 4 * (2 * (21 + 15) + 5 + 2 * 56)  # a bias is read too, and no result
    with torch.inference_mode():  # which takes the fused kernel
        q, k, v = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4)
        fused = products(torch.nn.functional.scaled_dot_product_attention, (q, k, v))
    assert fused.total == 2 * 2 * 8 * 9 * 8
    assert fused.weights == 0
    assert fused.read == 4 * (64 + 72 + 72)


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
