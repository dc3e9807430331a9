"""The labs that train nothing: each passes, and fails when what it tests is broken."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from triptych import attention, spec
from triptych.attention import dispatch, mask_lowering, mechanisms, reference
from triptych.attention.request import AttentionRequest
from triptych.nn import positions
from triptych.ops import OPERATIONS
from triptych.page import Curve, TableSection
from triptych.spec.masks import Mask, causal, full
from triptych_lectures import labs
from triptych_lectures.labs import untrained_scores
from triptych_lectures.labs.generated_tasks import GeneratedTask, Places
from triptych_lectures.labs.heads_and_width import HeadsVsWidthLab
from triptych_lectures.labs.lab import LabResult, Setup, Size

NAMES = ("scaling", "permutation", "soft-vs-hard", "heads-vs-width", "additive-vs-dot")

pytestmark = pytest.mark.usefixtures("unchecked")  # one of them hands the dot product what its signature forbids


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadsVsWidthLab, "_read_places", lambda self, heads, task, seed: read(heads, task))


def read(heads: int, task: GeneratedTask) -> float:
    """The share of right answers that the lab's claim expects."""
    return min(1.0, (1 + heads) / (1 + len(task.places))) if isinstance(task, Places) else 1 / task.classes


SMALL: dict[str, dict[str, Size]] = {
    "additive-vs-dot": {"lengths": (32, 256)},
    "permutation": {"blocks": 2},
    "soft-vs-hard": {"steps": 60},
}


def small_run(name: str, seed: int) -> LabResult:
    return labs.run(name, Setup(seed=seed, sizes=SMALL.get(name, {})))


def failed(name: str, seed: int = 0) -> str:
    """The claims that did not hold, and the verdict says so."""
    finding = small_run(name, seed)
    assert not finding.passed
    assert finding.verdict.startswith("FAIL: ")
    return "; ".join(check.claim for check in finding.checks if not check.passed)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_passes(name: str, seed: int) -> None:
    finding = small_run(name, seed)
    assert finding.passed, finding.verdict
    assert isinstance(finding.sections[0], TableSection)
    assert any(isinstance(section, Curve) for section in finding.sections)
    for section in finding.sections:
        if isinstance(section, Curve):
            assert all(math.isfinite(y) for line in section.series.values() for _, y in line)


def test_the_same_seed_gives_the_same_result() -> None:
    first, again, other = (small_run("permutation", seed).to_dict() for seed in (2, 2, 4))
    assert first == again
    assert first["conclusion"] != other["conclusion"]


def altered(change: Callable[[AttentionRequest], AttentionRequest]) -> Callable[..., Any]:
    """`prepare`, but for what `change` makes of the request: every kernel then computes something else."""

    def prepared(*args: Any, **options: Any) -> Any:
        request, tensors, restore = attention.prepare(*args, **options)
        return change(request), tensors, restore

    return prepared


def unscaled(request: AttentionRequest) -> AttentionRequest:
    return replace(request, scale=1.0)


def test_scaling_without_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "prepare", altered(unscaled))
    claims = failed("scaling")
    assert "entropy with 1/√d, largest over smallest" in claims
    assert "median gradient with 1/√d, largest over smallest" in claims
    assert "below 0.01 at d 2048, with 1/√d" in claims
    assert "d 2048 without scale, nats" not in claims


def test_scaling_by_d_instead_of_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy alone does not notice: even weights have the entropy that it asks for."""

    def too_small(request: AttentionRequest) -> AttentionRequest:
        return request if request.scale == 1.0 else replace(request, scale=1 / request.width)

    monkeypatch.setattr(dispatch, "prepare", altered(too_small))
    claims = failed("scaling")
    assert "median gradient with 1/√d, largest over smallest" in claims
    assert "entropy" not in claims


def test_scaling_when_weights_are_even_or_both_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is left of even weights; and what no division did is not said of two divided ones."""
    with monkeypatch.context() as patch:
        patch.setattr(untrained_scores, "attend", lambda q, *rest, **scale: attention.attend(0 * q, *rest, **scale))
        assert "median gradient with 1/√d, largest over smallest" in failed("scaling")
    monkeypatch.setattr(untrained_scores, "attend", lambda *inputs, scale: attention.attend(*inputs))
    assert "median over mean gradient at a query, d 2048, without scale" in failed("scaling")
    assert "Not all do" not in small_run("scaling", 0).meaning


def test_soft_vs_hard_without_the_sharpness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "prepare", altered(unscaled))
    claims = failed("soft-vs-hard")
    assert "distance from dict[key]" in claims
    assert "at β 0, distance from the mean" in claims


def test_soft_vs_hard_with_a_gradient_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*args: Any, **options: Any) -> Any:
        request, tensors, restore = attention.prepare(*args, **options)
        half = tensors.q.detach() + 0.5 * (tensors.q - tensors.q.detach())
        return request, tensors._replace(q=half), restore

    monkeypatch.setattr(dispatch, "prepare", cut)
    assert "finite differences" in failed("soft-vs-hard")


@pytest.mark.parametrize(("mask", "claim"), [(causal(), "bidirectional"), (full(), "causal")], ids=["more", "less"])
def test_permutation_under_another_mask(mask: Mask, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_lowering, "simplify", lambda *sizes, **positions: mask)
    assert f"no positions, {claim}: error of permutation" in failed("permutation")


@pytest.mark.parametrize(
    ("part", "door", "closed"),
    [
        (positions.Sinusoidal, "embed", lambda self, places: torch.zeros(1, self.spec.width)),
        (positions.Rope, "prepare", positions.Position.prepare),
        (positions.Alibi, "prepare", positions.Position.prepare),
        (positions.T5Buckets, "prepare", positions.Position.prepare),
    ],
)
def test_permutation_with_a_position_part_that_does_nothing(
    part: type, door: str, closed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, door, closed)
    assert "smallest error with a position part" in failed("permutation")


def test_heads_vs_width_with_heads_of_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    full_width = partial(spec.attention, head_width=HeadsVsWidthLab().width)
    monkeypatch.setattr(spec, "attention", lambda width, heads, head_width: full_width(width, heads))
    assert "parameters and matmul FLOPs of H heads over one" in failed("heads-vs-width")


def test_heads_vs_width_with_a_miscount(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = replace(OPERATIONS["attend"], flops=lambda shapes, out, how: 2 * out[0] * shapes["k"][0] * out[1])
    monkeypatch.setitem(OPERATIONS, "attend", attend)
    assert failed("heads-vs-width") == "counted from the spec less measured, largest difference"


def test_rows_that_keep_a_gradient_are_counted_not_called_few() -> None:
    """The column of the table at the largest d, and its complement in the sentence."""
    result = small_run("scaling", 5)
    claim = "share of queries with a gradient below 0.01 at d 2048, without scale"
    (starved,) = [check.measured for check in result.checks if check.claim == claim]
    assert f"the other {1 - starved:.0%}, whose best two scores are close" in result.meaning
    assert 1 - starved > 0.2


def test_additive_vs_dot_holds_two_tensors_of_its_pairs() -> None:
    """At 256 tokens, 64 numbers of 4 bytes for each pair are 16 MiB, and there are two of them."""
    result = small_run("additive-vs-dot", 0)
    (over,) = [check.measured for check in result.checks if check.claim.startswith("numbers held for each pair")]
    (table,) = [section for section in result.sections if isinstance(section, TableSection)]
    assert float(table.rows[-1][4].removesuffix(" MiB")) == pytest.approx(16 * over, rel=1e-3)
    assert over == pytest.approx(2, abs=0.1)
    assert "64 numbers for each pair before tanh and as many after it" in result.meaning


def test_additive_vs_dot_without_the_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(
        self: Any, request: AttentionRequest, hook: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any
    ) -> torch.Tensor:
        return reference.finish(request, (q[:, :, :, None] + k[:, :, None]) @ self.weight, v, sinks)

    monkeypatch.setattr(mechanisms.AdditiveOver, "_run", flat)
    claims = failed("additive-vs-dot")
    assert "distance from its formula" in claims
    assert "over its limit" in claims
    assert "over that at 64, additive" in claims


def test_additive_vs_dot_with_a_vector_that_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = untrained_scores.AdditiveVsDotLab._weights

    def light(self: Any, *sizes: Any, **options: Any) -> untrained_scores.Weights:
        w_q, w_k, w = drawn(self, *sizes, **options)
        return w_q, w_k, 0.05 * w

    monkeypatch.setattr(untrained_scores.AdditiveVsDotLab, "_weights", light)
    claims = failed("additive-vs-dot")
    assert "largest weight of keys built for it, additive" in claims
    assert "entropy at size 64, additive, over that of even weights" in claims


def test_additive_vs_dot_with_one_score_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def dot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        return attention.attend(q @ weights["w_q"].mT, k @ weights["w_k"].mT, v)

    monkeypatch.setattr(untrained_scores, "additive", dot)
    claims = failed("additive-vs-dot")
    assert "memory at 256 tokens, additive over dot product" in claims
    assert "entropy at size 64, additive, over that of even weights" in claims


def test_one_head_cannot_read_four_places_and_can_read_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    read, four = HeadsVsWidthLab()._read_places, Places(4, 12, (1, 2, 3, 4))
    assert read(1, Places(4, 12, (3,)), 0) > 0.9
    assert read(4, four, 0) > read(1, four, 0) + 0.1


def test_heads_vs_width_when_one_head_reads_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_well(self: Any, heads: int, task: GeneratedTask, seed: int) -> float:
        return max(read(heads, task), float(isinstance(task, Places)))

    monkeypatch.setattr(HeadsVsWidthLab, "_read_places", as_well)
    assert failed("heads-vs-width") == "four places read right by four heads, less by one"
    assert "That several heads read what one cannot was not seen" in small_run("heads-vs-width", 0).meaning
    monkeypatch.setattr(
        HeadsVsWidthLab, "_read_places", lambda self, heads, task, seed: 0.3 if heads == 1 else read(heads, task)
    )
    assert failed("heads-vs-width") == "control: one place read right by one head"


def test_heads_vs_width_when_shuffled_answers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadsVsWidthLab, "_read_places", lambda self, heads, task, seed: read(heads, task) + 0.2)
    assert "control: one place, shuffled answers: right" in failed("heads-vs-width")
