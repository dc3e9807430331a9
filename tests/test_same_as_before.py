"""The numbers of commit 133d396: three trained models, SmolLM2 and MiniLM, beside the records in `tests/recorded`.

`recorded_runs.py` wrote the records and computes the same here.  On the processor that wrote them most values are equal
bit for bit; elsewhere kernels round differently, so values are compared within the tolerances below.  Tokens are equal
everywhere: prompts and seeds were chosen so that small changes of the weights do not change them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recorded_runs as runs
import triptych
from triptych.model import Model

RECORDED = Path(__file__).with_name("recorded")
ARRAYS, META = runs.read(RECORDED)
VALUES = 1e-5  # saved values of trained models, and vectors
LOG_PROBABILITIES = 1e-4  # in fp32
LOSSES = 1e-4
MUON_LOSSES = 2e-3  # Muon orthogonalizes in bf16
MUON_VALUES = 5e-4  # root of the mean square, beside about 4e-3 for what the steps change
heavy = pytest.mark.heavy


def furthest(name: str, value: Any) -> float:
    """The largest absolute difference from the record of that name; infinite where a shape differs or NaN appears."""
    recorded = ARRAYS[name].astype(np.float64)
    value = np.asarray(value, dtype=np.float64)
    if value.shape != recorded.shape or not np.isfinite(value).all():
        return float("inf")
    return float(np.abs(value - recorded).max())


def check_log_probabilities(prefix: str, arrays: runs.Records) -> None:
    names = [name for name in ARRAYS if name.startswith(f"{prefix}/log_probabilities/")]
    assert names
    assert sorted(names) == sorted(name for name in arrays if "/log_probabilities/" in name)
    for name in names:
        assert furthest(name, arrays[name]) <= LOG_PROBABILITIES, name


# ---------------------------------------------------------------- the three panels, trained here


class Trained:
    """A panel's model after the recorded number of steps, and what its record holds."""

    def __init__(self, panel: str, folder: Path) -> None:
        self.panel, self.folder = panel, folder
        self.model, losses = runs.train(panel, folder)
        self.arrays, self.meta = runs.trained_record(panel, self.model, losses, folder, META[panel])

    @property
    def saved(self) -> Path:
        return self.folder / f"saved-{self.panel}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("decoder", marks=heavy),
        pytest.param("encoder", marks=heavy),
        "encoder-decoder",
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp("trained"))


def test_losses_of_every_step(trained: Trained) -> None:
    name = f"{trained.panel}/losses"
    assert len(ARRAYS[name]) == runs.STEPS
    assert furthest(name, trained.arrays[name]) <= LOSSES


def test_saved_tensors(trained: Trained) -> None:
    recorded, saved = META[trained.panel]["tensors"], trained.meta["tensors"]
    assert saved.keys() == recorded.keys()
    for name, tensor in recorded.items():
        assert (saved[name]["shape"], saved[name]["dtype"]) == (tensor["shape"], tensor["dtype"]), name
        if saved[name]["sha256"] != tensor["sha256"]:
            key = f"{trained.panel}/tensors/{name}"
            assert furthest(key, trained.arrays[key]) <= VALUES, name
            norm = f"{trained.panel}/norms/{name}"
            assert trained.arrays[norm] == pytest.approx(ARRAYS[norm], rel=VALUES), name


def test_log_probabilities_and_tokens_of_a_trained_model(trained: Trained) -> None:
    check_log_probabilities(trained.panel, trained.arrays)
    recorded = META[trained.panel]
    if trained.panel == "encoder":
        assert trained.meta["filled"] == recorded["filled"]
    else:
        check_tokens(trained.meta["generations"], recorded)


def test_a_saved_model_gives_the_same_when_loaded(trained: Trained) -> None:
    model = triptych.load(trained.saved)
    if trained.panel == "encoder":
        assert model.fill(META["encoder"]["prompts"], top=1) == trained.model.fill(META["encoder"]["prompts"], top=1)
    else:
        arrays, tokens = runs.generation_records(model, trained.panel, META[trained.panel])
        check_log_probabilities(trained.panel, arrays)
        check_tokens(tokens, META[trained.panel])


@pytest.mark.parametrize("trained", [pytest.param("decoder", marks=heavy)], indirect=True)
def test_control_a_rotary_base_one_percent_off_is_noticed(trained: Trained, tmp_path: Path) -> None:
    changed = shutil.copytree(trained.saved, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    base = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    config.pop("rope_parameters", None)
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": base * 1.01}))
    model = triptych.load(changed)
    arrays, _ = runs.generation_records(model, "decoder", META["decoder"])
    with pytest.raises(AssertionError, match="log_probabilities"):
        check_log_probabilities("decoder", arrays)


@pytest.mark.parametrize("panel", runs.PANELS)
def test_control_changed_weights_are_noticed(panel: str) -> None:
    """The comparison of values notices a change of 2e-5 in every weight."""
    values = {name: value + 2e-5 for name, value in ARRAYS.items() if name.startswith(f"{panel}/tensors/")}
    assert values
    assert min(furthest(name, value) for name, value in values.items()) > VALUES


@pytest.mark.parametrize(
    "panel", [pytest.param("decoder", marks=heavy), pytest.param("encoder", marks=heavy), "encoder-decoder"]
)
def test_first_steps_of_the_recipe_as_shipped(panel: str, tmp_path: Path) -> None:
    found = runs.muon_record(panel, tmp_path)
    assert furthest(f"{panel}/muon/losses", found.pop(f"{panel}/muon/losses")) <= MUON_LOSSES
    distance = np.concatenate([(value - ARRAYS[name]).ravel() for name, value in found.items()])
    assert np.sqrt(np.square(distance).mean()) <= MUON_VALUES


# ---------------------------------------------------------------- real weights


def check_tokens(tokens: dict[str, list[list[int]]], recorded: dict[str, Any]) -> None:
    assert min(recorded["margins"]) > runs.MARGIN
    assert tokens["greedy"] == recorded["greedy"]
    assert tokens == recorded["generations"]


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Model:
    return triptych.load(smollm2_gguf, dequantize=True)


@heavy
def test_smollm2(smollm2: Model) -> None:
    arrays, result = runs.smollm2_record(smollm2, META["smollm2"])
    check_log_probabilities("smollm2", arrays)
    check_tokens(result["generations"], META["smollm2"])


def test_smollm2_along_one_prompt(smollm2: Model) -> None:
    """The short form of the test above: greedy ids and log-probabilities of one prompt."""
    recorded = META["smollm2"]
    prompt, ids = recorded["prompts"][0], recorded["greedy"][0]
    assert smollm2.generate([prompt], max_new_tokens=6)[0].ids == ids[:6]
    value = runs.log_probabilities(runs.forced(smollm2, prompt, ids))
    assert furthest("smollm2/log_probabilities/0", value) <= LOG_PROBABILITIES


@heavy
def test_smollm2_is_saved_with_the_same_tensors(smollm2: Model, tmp_path: Path) -> None:
    assert runs.described(runs.saved_tensors(smollm2, tmp_path / "out")) == META["smollm2"]["tensors"]


def test_minilm_encodes_the_same_vectors(minilm_dir: Path, tmp_path: Path) -> None:
    model = triptych.load(minilm_dir)
    assert furthest("minilm/vectors", runs.minilm_record(model)["minilm/vectors"]) <= VALUES
    assert runs.described(runs.saved_tensors(model, tmp_path / "out")) == META["minilm"]["tensors"]


def test_control_another_epsilon_is_noticed(minilm_dir: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(minilm_dir, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-4}))
    vectors = runs.minilm_record(triptych.load(changed))["minilm/vectors"]
    assert furthest("minilm/vectors", vectors) > VALUES
