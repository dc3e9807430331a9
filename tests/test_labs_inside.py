"""`lab bank` and `lab not-explanation` on SmolLM2: each passes, and fails when attention, or an edit of it, does
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tiny
import triptych
from triptych.attention import reference
from triptych.errors import InputError
from triptych.labs import bank, not_explanation, run
from triptych.labs.lab import LabResult, Setup
from triptych.model import Model
from triptych.nn import attention
from triptych.text import byte_tokenizer


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Model:
    return triptych.load(smollm2_gguf)


@pytest.fixture
def loaded(smollm2: Model, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    """One copy for all, and a search of a few long steps."""
    for lab in (bank, not_explanation):
        monkeypatch.setattr(lab, "decoder", lambda setup: smollm2)
    monkeypatch.setattr(not_explanation, "STEPS", 8)
    monkeypatch.setattr(not_explanation, "SHUFFLES", 1)


def failed(found: LabResult) -> set[str]:
    return {check.claim for check in found.checks if not check.passed}


def deafen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an edit makes of scores and patterns is looked at and not used."""
    finish = reference.finish

    def deaf(scores: Tensor, request: Any, hook: Any = None) -> Tensor:
        if hook is not None:
            hook("pattern", reference.pattern_of(hook("scores", scores)))
        return finish(scores, request)

    monkeypatch.setattr(reference, "finish", deaf)


def test_bank_passes(loaded: None) -> None:
    found = run("bank")
    assert found.passed, found.verdict


def test_bank_fails_when_attention_adds_nothing(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = attention.Attention.forward
    monkeypatch.setattr(attention.Attention, "forward", lambda self, x, view, taps: 0 * forward(self, x, view, taps))
    assert "lowest cosine in a later layer" in failed(run("bank"))


def test_bank_fails_when_edits_are_not_heard(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    deafen(monkeypatch)
    gone = {
        "share of the parting left when 'bank' cannot see 'river' or 'money'",
        "parting left if the sentences differ in no other word",
        "share left without 12 other heads, less that without the readers",
    }
    assert failed(run("bank")) == gone


def test_not_explanation_passes(loaded: None) -> None:
    found = run("not-explanation")
    assert found.passed, found.verdict


def test_not_explanation_fails_when_edits_are_not_heard(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    other = not_explanation.Other  # a search finds no gradient where nothing is heard
    monkeypatch.setattr(
        not_explanation, "_search", lambda subject, layer, _: other(layer, subject.patterns[layer], 0.7, 0.0, [])
    )
    deafen(monkeypatch)
    assert "output change under uniform attention in every layer" in failed(run("not-explanation"))


@pytest.mark.parametrize("name", ["bank", "not-explanation"])
def test_an_encoder_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for lab in (bank, not_explanation):
        monkeypatch.setattr(lab, "decoder", lambda setup: Model(tiny.encoder(), byte_tokenizer()))
    with pytest.raises(InputError, match="decoder"):
        run(name)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["bank", "not-explanation"])
def test_passes_at_full_size(name: str, seed: int, smollm2_gguf: Path, unchecked: None) -> None:
    found = run(name, Setup(seed=seed, model=str(smollm2_gguf)))
    assert found.passed, found.verdict
