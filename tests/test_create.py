"""`create`: models at random, from configs, specs and the names that the lectures use."""

import pytest

import triptych
from triptych import machine
from triptych.count import count
from triptych.errors import ConfigError, InputError
from triptych.families import read_config
from triptych.families.named_configs import NAMED


def test_a_named_model_has_the_sizes_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dict(NAMED["gpt2"]) | {"n_layer": 1, "vocab_size": 50, "n_embd": 24, "n_head": 3, "n_positions": 16}
    monkeypatch.setattr("triptych.model.model.NAMED", {"gpt2": small})
    model = triptych.create("gpt2", seed=3)
    assert model.spec == read_config(small)
    assert sum(p.numel() for p in model.module.parameters()) == count(model.spec).total


@pytest.mark.parametrize(("name", "hint"), [("gpt-2", "gpt2"), ("bert", "bert-base"), ("", "load")])
def test_another_name_is_refused_with_those_there_are(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as refused:
        triptych.create(name)
    assert "\n" not in str(refused.value)


def test_a_model_larger_than_the_memory_is_refused_before_anything_is_made() -> None:
    if machine.free_memory() is None:
        pytest.skip("this system does not say how much memory is free")
    with pytest.raises(InputError, match=r"needs 69\d,\d{3},\d{3},\d{3} bytes"):
        triptych.create("gpt3-175b")
