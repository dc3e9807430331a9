"""The labs that look at gradients and train small models: PASS in small, FAIL when what they test is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych import labs, nn
from triptych.labs import bottleneck, depth, induction, mask_leak
from triptych.labs.lab import LabResult, Setup
from triptych.nn.positions import unbiased
from triptych.nn.stack import Kind
from triptych.page import render
from triptych.probe import taps
from triptych.spec import causal, full, window


def failed(found: LabResult) -> list[str]:
    """The claim of each criterion that was not met."""
    return [check.claim for check in found.checks if not check.passed]


def every_kind(patch: pytest.MonkeyPatch, **changed: Any) -> None:
    """All attention of every model gets `changed` in place of its own mask, rotation or bias."""
    state = Kind.state
    patch.setattr(Kind, "state", lambda *given: state(*given) | changed)


# ---------------------------------------------------------------- depth


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "DEPTHS", (2, 8, 32))
    monkeypatch.setattr(depth, "DRAWS", 1)


def test_depth_passes(shallow: None) -> None:
    found = labs.run("depth", Setup(seed=3))
    assert found.passed, found.verdict
    assert [len(section.rows) for section in found.sections if section.kind == "table"] == [3]


def test_depth_fails_without_the_addition(shallow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Block, "forward", depth.PlainBlock.forward)
    assert "pre-norm: the last block's gradient goes as depth to the power" in failed(labs.run("depth"))


def test_depth_fails_when_pre_norm_norms_the_stream(shallow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Block.forward

    def normed(block: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        return forward(block, block.attn_norm.pre(x), *given)

    monkeypatch.setattr(nn.Block, "forward", normed)
    assert "pre-norm: the last block's gradient goes as depth to the power" in failed(labs.run("depth"))


# ---------------------------------------------------------------- mask-leak


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Twenty words in any order: soon learned, and not by heart."""
    noise = np.random.default_rng(0)
    words = ["".join(noise.choice(list("abcdefghijklmnop"), noise.integers(2, 7))) for _ in range(20)]
    file = tmp_path / "words.txt"
    file.write_text(" ".join(noise.choice(words, 6000)), encoding="utf-8")
    for name, value in {"STEPS": 220, "ROWS": 4, "HELD_OUT": 900, "WRITTEN": 12}.items():
        monkeypatch.setattr(mask_leak, name, value)
    return str(file)


def test_mask_leak_passes_and_shows_what_each_writes(text: str) -> None:
    found = labs.run("mask-leak", Setup(data=text))
    assert found.passed, found.verdict
    (samples,) = (section for section in found.sections if section.kind == "samples")
    assert [sample.label for sample in samples.items] == [
        f"trained {trained}, writing {used}" for trained in mask_leak.MASKS for used in mask_leak.MASKS
    ]
    assert "trained without" in render("labs", found.sections, subtitle="")


def test_mask_leak_fails_when_causal_hides_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_kind(monkeypatch, mask=full())
    assert "trained without and used with it, nats above trained with it" in failed(
        labs.run("mask-leak", Setup(data=text))
    )


# ---------------------------------------------------------------- induction


KEPT: dict[int, Any] = {}


@pytest.fixture
def trained_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the tests that break nothing they are trained by."""
    train = induction._train

    def kept(layers: int, *given: Any) -> Any:
        if layers not in KEPT:
            KEPT[layers] = train(layers, *given)
        return KEPT[layers]

    monkeypatch.setattr(induction, "_train", kept)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SHORTEST": 8, "LONGEST": 20, "VOCAB": 28, "STEPS": 300, "ROWS": 24}.items():
        monkeypatch.setattr(induction, name, value)


def test_induction_passes(short: None, trained_once: None) -> None:
    found = labs.run("induction", Setup(seed=1))
    assert found.passed, found.verdict
    (table,) = (section for section in found.sections if section.kind == "table")
    assert len(table.rows) == 2 * induction.HEADS


def test_induction_fails_without_positions(short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    every_kind(monkeypatch, bias=unbiased)
    assert "copied right by two layers" in failed(labs.run("induction", Setup(seed=1)))


def test_induction_fails_when_the_wrong_head_is_removed(
    short: None, trained_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = taps._heads
    monkeypatch.setattr(taps, "_heads", lambda *given: [(head + 1) % induction.HEADS for head in chosen(*given)])
    assert "copied right without it" in failed(labs.run("induction", Setup(seed=1)))


def test_a_repeated_row_says_the_same_twice_and_trains_what_can_be_known() -> None:
    row = induction._repeated(np.random.default_rng(5))
    n = (len(row.ids) + 1) // 2
    assert np.flatnonzero(row.trained).tolist() == list(range(n, 2 * n - 1))
    assert (row.targets[row.trained] == row.ids[1:n]).all()


# ---------------------------------------------------------------- bottleneck


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bottleneck, "STEPS_BACK", (16, 48, 96))


def test_bottleneck_passes(near: None) -> None:
    found = labs.run("bottleneck", Setup(seed=2))
    assert found.passed, found.verdict


def test_bottleneck_fails_when_attention_cannot_look_back(near: None, monkeypatch: pytest.MonkeyPatch) -> None:
    every_kind(monkeypatch, mask=causal() & window(9))
    claims = failed(labs.run("bottleneck", Setup(seed=2)))
    assert "attention: recall, the worst over all T" in claims
    assert any("the gradient from T" in claim for claim in claims)


def test_the_gradient_is_that_of_the_first_tokens_embedding() -> None:
    module, rows = bottleneck._made("GRU", 0), [bottleneck._row(symbol, 5) for symbol in range(bottleneck.SYMBOLS)]
    tokens = module.decoder.embed.tokens.weight
    norms = []
    for row in rows:
        x = tokens[torch.from_numpy(row.ids).long()].detach().requires_grad_()
        states, _ = module.decoder.blocks[0].gru(x[None])
        answer = module.head.proj(module.decoder.final_norm(states[0, -1]))[row.targets[-1]]
        norms.append(torch.autograd.grad(answer, x)[0][0].norm().item())
    assert bottleneck._gradient(module, rows) == pytest.approx(np.mean(norms), rel=1e-4)


# ---------------------------------------------------------------- at full size


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["depth", "induction", "bottleneck"])
@pytest.mark.parametrize("seed", range(5))
def test_at_full_size_with_any_seed(name: str, seed: int, unchecked: None) -> None:
    found = labs.run(name, Setup(seed=seed))
    assert found.passed, found.verdict


@pytest.mark.heavy
@pytest.mark.weights
@pytest.mark.parametrize("seed", range(5))
def test_mask_leak_on_shakespeare_with_any_seed(seed: int, unchecked: None) -> None:
    found = labs.run("mask-leak", Setup(seed=seed))
    assert found.passed, found.verdict
