"""The lab `frozen-captions`: what stays fixed, and its verdict where the mechanism or the data is broken."""

import random
from functools import cached_property
from typing import Any

import pytest
import torch

from triptych.text import SEQ2SEQ, word_tokenizer
from triptych_lectures import labs
from triptych_lectures.data.scenes import scenes
from triptych_lectures.labs import frozen_parts
from triptych_lectures.labs.frozen_parts import FrozenParts, Gated, Queried, Sizes, Way
from triptych_lectures.labs.lab import LabResult, Setup

TINY: dict[str, Any] = {"scenes": 40, "judged": 6, "label_steps": 2, "text_steps": 2, "steps": 2, "rows": 4}


def parts() -> FrozenParts:
    drawn = scenes(40, 3)
    tokenizer = word_tokenizer([scene.caption for scene in drawn], 100, SEQ2SEQ)
    return FrozenParts(Sizes(2, 2, 4, 3), drawn, tokenizer, Setup(seed=3))


def unmet(result: LabResult) -> list[str]:
    return [check.claim for clause in result.conclusion for check in clause.checks if not check.passed]


def test_logits_are_those_of_the_text_decoder_while_gates_are_0() -> None:
    gated, held = Gated(parts()), scenes(5, 3, held_out=True)
    assert gated.distance(held) <= 1e-5
    for name, own in gated.module.named_parameters():
        if name.endswith("norm.out.weight"):
            own.data.fill_(0.1)
    assert gated.distance(held) > 1e-2


@pytest.mark.parametrize("kind", [Gated, Queried])
def test_training_a_way_leaves_the_parts_as_they_are(kind: type[Way]) -> None:
    whole = parts()
    way = kind(whole)
    before = {name: own.clone() for name, own in way.module.named_parameters()}
    text = {name: own.clone() for name, own in whole.text.named_parameters()}
    way.train([scene.caption for scene in whole.train], 3)
    changed = {name for name, own in way.module.named_parameters() if not torch.equal(own, before[name])}
    assert changed == {name for name, own in way.module.named_parameters() if own.requires_grad}
    assert way.changed() == 0
    assert all(torch.equal(own, text[name]) for name, own in whole.text.named_parameters())
    next(own for own in way.module.parameters() if not own.requires_grad).data.add_(1e-3)
    assert way.changed() == 1


def test_queries_of_a_picture_reach_its_own_text_only() -> None:
    queried, held = Queried(parts()), scenes(2, 3)
    rows = [[queried.parts.start] * 4] * 2
    one, other = (frozen_parts.pixels_of(pair) for pair in (held, [held[0], held[0]]))
    with torch.no_grad():
        first, second = queried._final(one, rows), queried._final(other, rows)
    torch.testing.assert_close(first[:4], second[:4])
    assert (first[4:] - second[4:]).abs().max() > 1e-4


def test_the_smallest_run_reports_what_it_measured() -> None:
    result = labs.run("frozen-captions", Setup(sizes=TINY | {"captioner": 2}))
    assert not result.passed
    assert "captioner: exact captions" in unmet(result)


def test_a_fixed_tensor_that_changes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gated, "changed", lambda way: 2)
    result = labs.run("frozen-captions", Setup(sizes=TINY))
    assert "fixed tensors that changed" in unmet(result)
    assert result.conclusion[0].text.startswith("What should stay fixed did not")


@pytest.mark.heavy
def test_default_sizes_pass() -> None:
    assert labs.run("frozen-captions", Setup(seed=11)).passed


@pytest.mark.heavy
def test_shuffled_captions_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Gated, Queried):
        train = kind.train
        mixed = lambda way, captions, steps, train=train: train(way, random.Random(0).sample(captions, 6000), steps)  # noqa: E731
        monkeypatch.setattr(kind, "train", mixed)
    result = labs.run("frozen-captions", Setup(seed=11))
    assert {claim for claim in unmet(result) if "right words" in claim} == {
        f"{way.name}: right words, from the text decoder alone, 0, to all, 1" for way in (Gated, Queried)
    }


@pytest.mark.heavy
def test_an_encoder_that_learned_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures are the ones of their captions, but labels told the encoder nothing about them."""
    learned = FrozenParts.encoder.func

    def untrained(own: FrozenParts) -> torch.nn.Module:
        return learned(FrozenParts(own.sizes._replace(label_steps=1), own.train, own.tokenizer, own.setup))

    broken = cached_property(untrained)
    broken.__set_name__(FrozenParts, "encoder")
    monkeypatch.setattr(FrozenParts, "encoder", broken)
    assert sum("right words" in claim for claim in unmet(labs.run("frozen-captions", Setup(seed=11)))) == 2
