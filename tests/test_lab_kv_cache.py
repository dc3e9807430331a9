"""`lab kv-cache` on a small new model, which counts what it runs: passes, and fails when the cache errs."""

from copy import copy
from typing import Any

import pytest
from torch import Tensor

import triptych
from lab_results import failed, passes, random_clock
from triptych.attention.cache_steps import FullStep
from triptych.attention.layer_cache import Store
from triptych.generate import Engine
from triptych.text import byte_tokenizer
from triptych_lectures.labs import kv_cache, run
from triptych_lectures.labs.lab import Setup

SHAPE = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2, "vocab_size": 260,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "max_position_embeddings": 160,
    "initializer_range": 0.3,
}  # fmt: skip

SMALL = Setup(sizes={"lengths": (64, 128)})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    model = triptych.create(SHAPE, byte_tokenizer())
    monkeypatch.setattr(kv_cache, "decoder", lambda setup: model)


def test_passes(small: None) -> None:
    passes(run("kv-cache", SMALL))


def test_fails_when_keys_are_written_one_place_late(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = FullStep.extend

    def late(self: FullStep, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        at, places = self.at, self.places
        if not self.fresh and at is None:
            self.places = copy(places)
            self.places._of_tokens = [one._replace(place=one.place + 1) for one in places._of_tokens]
        elif not self.fresh and at.stop < places.regular.room:
            self.at = slice(at.start + 1, at.stop + 1)
        try:
            return extend(self, layer, k, v)
        finally:
            self.at, self.places = at, places

    monkeypatch.setattr(FullStep, "extend", late)
    assert {"tokens that differ with the cache", "greatest difference of a logit"} <= failed(run("kv-cache", SMALL))


def test_fails_when_nothing_is_reused(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Engine.logits

    def forgetful(self: Engine) -> Tensor:
        for row in self.rows:
            self.trim(row, 0)
        return logits(self)

    monkeypatch.setattr(Engine, "logits", forgetful)
    assert failed(run("kv-cache", SMALL)) == {
        "FLOPs of one token at 128, all again over with the cache",
        "these FLOPs saved at 128 over those at 64",
        "FLOPs saved at 128 over bytes saved",
    }


def test_fails_when_the_cache_takes_more_than_it_needs(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    new_chunk = Store.new_chunk
    monkeypatch.setattr(Store, "new_chunk", lambda self, places, memory: new_chunk(self, places + 1, memory))
    assert failed(run("kv-cache", SMALL)) == {
        "bytes allocated at 128 over bytes counted",
        "bytes at 128 over those at 64",
        "bytes of Qwen3-4B's cache at 4,096 positions, fp16",
    }


def test_no_criterion_is_a_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    random_clock(monkeypatch)
    passes(run("kv-cache", SMALL))


@pytest.mark.heavy
def test_passes_on_smollm2(smollm2_gguf: Any, unchecked: None) -> None:
    passes(run("kv-cache", Setup(model=str(smollm2_gguf))))
