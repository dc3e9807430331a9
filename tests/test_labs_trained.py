"""The labs that look at gradients and train small models: PASS in small, FAIL when what they test is broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych import labs, nn
from triptych.attention import FlatKeys
from triptych.labs import bottleneck, depth, induction, mask_leak
from triptych.labs.lab import LabResult, Setup
from triptych.nn.positions import UNPOSITIONED, Alibi, Rope, T5Buckets
from triptych.page import render
from triptych.probe import Edit, zero
from triptych.spec import Mask, full


def failed(result: LabResult) -> list[str]:
    """The claim of each criterion that was not met."""
    return [check.claim for check in result.checks if not check.passed]


def every_mask(patch: pytest.MonkeyPatch, mask: Mask) -> None:
    """All attention of every model gets `mask` in place of its own."""
    plan = FlatKeys.plan
    patch.setattr(FlatKeys, "plan", lambda self, rows, own, *rest: plan(self, rows, mask, *rest))


# ---------------------------------------------------------------- depth


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "DEPTHS", (2, 8, 32))
    monkeypatch.setattr(depth, "DRAWS", 1)
    for name, value in {"LAYERS": 6, "STEPS": 90}.items():
        monkeypatch.setattr(depth, name, value)


def test_depth_passes(shallow: None) -> None:
    result = labs.run("depth", Setup(seed=3))
    assert result.passed, result.verdict
    assert [len(section.rows) for section in result.sections if section.kind == "table"] == [3, 2]


def test_depth_fails_without_the_addition(shallow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Block, "forward", depth.NoResidualBlock.forward)
    assert "pre-norm: the last block's gradient goes as depth to the power" in failed(labs.run("depth"))


def test_depth_fails_when_pre_norm_norms_the_stream(shallow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Block.forward

    def normed(block: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return forward(block, block.attn_norm.pre(x), *given)

    monkeypatch.setattr(nn.Block, "forward", normed)
    assert "pre-norm: the last block's gradient goes as depth to the power" in failed(labs.run("depth"))


@pytest.mark.parametrize(
    ("ends", "claim"),
    [
        ({"pre-norm": (0.7, 0.7), "post-norm": (0.8, 0.7)}, "post-norm, 6 layers trained: nats lost without a warm-up"),
        ({"pre-norm": (3.1, 0.7), "post-norm": (3.1, 0.7)}, "control: nats that pre-norm loses without a warm-up"),
    ],
    ids=["both learn", "both fail"],
)
def test_depth_fails_when_the_norms_do_not_differ(
    shallow: None, monkeypatch: pytest.MonkeyPatch, ends: dict[str, tuple[float, float]], claim: str
) -> None:
    monkeypatch.setattr(depth, "_train", lambda name, warmup, seed: [(0.0, ends[name][warmup > 0])])
    assert failed(labs.run("depth", Setup(seed=3))) == [claim]


# ---------------------------------------------------------------- mask-leak


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Twenty words in random order: learned in few steps, and not memorized."""
    noise = np.random.default_rng(0)
    words = ["".join(noise.choice(list("abcdefghijklmnop"), noise.integers(2, 7))) for _ in range(20)]
    file = tmp_path / "words.txt"
    file.write_text(" ".join(noise.choice(words, 6000)), encoding="utf-8")
    for name, value in {"STEPS": 220, "ROWS": 4, "HELD_OUT": 900, "WRITTEN": 12}.items():
        monkeypatch.setattr(mask_leak, name, value)
    return str(file)


def test_mask_leak_passes_and_shows_what_each_writes(text: str) -> None:
    result = labs.run("mask-leak", Setup(data=text))
    assert result.passed, result.verdict
    (samples,) = (section for section in result.sections if section.kind == "samples")
    assert [sample.label for sample in samples.items] == [
        f"trained {trained}, writing {used}" for trained in mask_leak.MASKS for used in mask_leak.MASKS
    ]
    assert "trained without" in render("labs", result.sections, subtitle="")


def test_mask_leak_fails_when_causal_hides_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_mask(monkeypatch, full())
    claims = failed(labs.run("mask-leak", Setup(data=text)))
    assert "trained without and used with it, nats above trained with it" in claims


# ---------------------------------------------------------------- induction


TRAINED: dict[int, Any] = {}


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the tests that break nothing they are trained by."""
    train = induction._train

    def once(layers: int, *given: Any) -> Any:
        if layers not in TRAINED:
            TRAINED[layers] = train(layers, *given)
        return TRAINED[layers]

    monkeypatch.setattr(induction, "_train", once)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SHORTEST": 8, "LONGEST": 20, "VOCAB": 28, "STEPS": 300, "ROWS": 24}.items():
        monkeypatch.setattr(induction, name, value)


def test_induction_passes(short: None, trained_once: None) -> None:
    result = labs.run("induction", Setup(seed=1))
    assert result.passed, result.verdict
    (table,) = (section for section in result.sections if section.kind == "table")
    assert len(table.rows) == 2 * induction.HEADS


def test_induction_fails_without_positions(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Alibi, Rope, T5Buckets):
        monkeypatch.setattr(part, "prepare", lambda self, *given: UNPOSITIONED)
    assert "copied right by two layers" in failed(labs.run("induction", Setup(seed=1)))


def test_induction_fails_when_the_wrong_head_is_removed(
    short: None, trained_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(site: str, heads: list[int]) -> Edit:
        return zero(site, heads=[(head + 1) % induction.HEADS for head in heads])

    monkeypatch.setattr(induction, "zero", another)
    assert "copied right without it" in failed(labs.run("induction", Setup(seed=1)))


def test_induction_fails_when_the_head_below_reads_another_place(
    short: None, trained_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its previous-token score decides, and not its removal alone."""
    heads = induction._heads

    def shifted(*inputs: Any) -> list[induction.Head]:
        return [replace(head, most=3, previous=0.1) if head.layer == 0 else head for head in heads(*inputs)]

    monkeypatch.setattr(induction, "_heads", shifted)
    claims = failed(labs.run("induction", Setup(seed=1)))
    assert [claim for claim in claims if "places back" in claim or "token before" in claim] == claims
    assert len(claims) == 2


def test_a_repeated_row_is_one_sequence_twice_and_trains_what_is_determined() -> None:
    row = induction._repeated(np.random.default_rng(5))
    n = (len(row.ids) + 1) // 2
    assert np.flatnonzero(row.trained).tolist() == list(range(n, 2 * n - 1))
    assert (row.targets[row.trained] == row.ids[1:n]).all()


# ---------------------------------------------------------------- bottleneck


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter sources, so that fewer steps suffice."""
    small = {"LENGTHS": (1, 4, 10), "STEPS": 220, "ROWS": 48, "TESTED": 64, "BACK": (16, 32, 64, 128), "DRAWS": 4}
    for name, value in small.items():
        monkeypatch.setattr(bottleneck, name, value)


def test_bottleneck_passes(brief: None) -> None:
    result = labs.run("bottleneck", Setup(seed=2))
    assert result.passed, result.verdict


def test_bottleneck_fails_when_attention_reads_nothing(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its narrow vector is all it has, and both its copies and its gradients go."""
    monkeypatch.setattr(bottleneck, "attend", lambda q, k, v: torch.zeros_like(q))
    monkeypatch.setattr(bottleneck, "_gradient", lambda name, back, seed: 0.6**back)
    claims = failed(labs.run("bottleneck", Setup(seed=2)))
    assert "attention: symbols right, the worst over all lengths" in claims
    assert any("the gradient from T" in claim for claim in claims)


def test_bottleneck_fails_when_a_wider_vector_holds_no_more(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottleneck, "STEPS", 20)
    narrow = bottleneck.ArchitectureKind(bottleneck.NARROW, attention=False)
    monkeypatch.setitem(bottleneck.KINDS, f"vector of {bottleneck.WIDE}", narrow)
    claims = failed(labs.run("bottleneck", Setup(seed=2)))
    assert f"vector of {bottleneck.WIDE}: symbols right at length 4, less of {bottleneck.NARROW}" in claims


def test_sources_are_distinct_symbols() -> None:
    source = bottleneck._sources(12, 30, torch.Generator().manual_seed(0))
    assert source.shape == (30, 12)
    assert all(len(set(row)) == 12 and max(row) < bottleneck.SYMBOLS for row in source.tolist())


def test_the_copier_sees_the_source_through_its_code_alone() -> None:
    """Without attention a change of the source that leaves the code as it was changes no logit of the first symbol."""
    model = bottleneck.Copier(bottleneck.ArchitectureKind(3, attention=False))
    torch.nn.init.zeros_(model.code.weight)
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    assert torch.equal(model(a)[:, 0], model(b)[:, 0])


# ---------------------------------------------------------------- at full size


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.parametrize("name", ["depth", "induction", "bottleneck"])
@pytest.mark.parametrize("seed", range(5))
def test_at_full_size_with_any_seed(name: str, seed: int, unchecked: None) -> None:
    result = labs.run(name, Setup(seed=seed))
    assert result.passed, result.verdict


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.weights
@pytest.mark.parametrize("seed", range(5))
def test_mask_leak_on_shakespeare_with_any_seed(seed: int, unchecked: None) -> None:
    result = labs.run("mask-leak", Setup(seed=seed))
    assert result.passed, result.verdict
