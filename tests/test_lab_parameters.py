"""The lab `parameters`: it passes on a real checkpoint, and fails when a shape or a count is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import triptych
from lab_results import passes
from triptych import families, spec
from triptych.errors import InputError
from triptych.page import TableSection
from triptych_lectures import labs
from triptych_lectures.labs import parameters as lab
from triptych_lectures.labs.lab import LabResult, Setup

CONFIG = Path(__file__).parents[1] / "docs" / "examples" / "qwen3-4b" / "config.json"
TINY = {
    "model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10,
    "num_key_value_heads": 3, "intermediate_size": 37, "vocab_size": 41, "max_position_embeddings": 64,
}  # fmt: skip
SHAPES, LOADED, TOTAL, SUM, EXERCISE, GAP, ATTENTION = (
    "tensors of Qwen3-4B predicted otherwise",
    "otherwise than loaded",
    "beside the published",
    "by the predicted shapes",
    "beside the exercise's",
    "gap less MLPs and norms",
    "parameters of attention",
)


@pytest.fixture
def tiny(tmp_path: Path) -> Setup:
    triptych.create(TINY).save(tmp_path / "tiny")
    return Setup(model=str(tmp_path / "tiny"))


def failed(result: LabResult) -> set[str]:
    """The criteria above that are not met."""
    claims = [check.claim for check in result.checks if not check.passed]
    return {name for name in (SHAPES, LOADED, TOTAL, SUM, EXERCISE, GAP, ATTENTION) if any(name in c for c in claims)}


def test_it_passes_on_smollm2(smollm2_gguf: Path) -> None:
    result = passes(labs.run("parameters", Setup(model=str(smollm2_gguf))))
    first, keys, parts, _ = result.sections
    assert isinstance(keys, TableSection)
    assert ["rope_theta", "base of RoPE's frequencies", "1,000,000"] in [list(row) for row in keys.rows]
    assert isinstance(first, TableSection)
    assert isinstance(parts, TableSection)
    assert list(first.rows[0]) == ["attn.q", "H·K, D", "4096 × 2560", "576 × 576"]
    assert [list(row) for row in parts.rows[-2:]] == [
        ["total", "4,022,468,096", "3,243,896,960", "134,515,008"],
        ["total without norms", "4,022,272,000", "3,243,704,320", "134,479,872"],
    ]


def test_its_config_is_the_published_one() -> None:
    published = json.loads(CONFIG.read_text(encoding="utf-8"))
    assert {key: published[key] for key in lab.QWEN3_4B} == lab.QWEN3_4B


def test_predicted_shapes() -> None:
    shapes = lab.predict(lab.QWEN3_4B)
    block = {name.removeprefix("decoder.blocks.0."): shape for name, shape in shapes.items() if ".blocks.0." in name}
    assert block["attn.q.weight"] == (4096, 2560)
    assert block["attn.k.weight"] == block["attn.v.weight"] == (1024, 2560)
    assert block["attn.out.weight"] == (2560, 4096)
    assert block["attn.q_norm.weight"] == block["attn.k_norm.weight"] == (128,)
    assert block["mlp.gate.weight"] == block["mlp.up.weight"] == (9728, 2560)
    assert "head.proj.weight" not in shapes
    assert lab.predict(TINY)["head.proj.weight"] == (41, 24)


def test_it_passes_on_any_llama(tiny: Setup) -> None:
    assert labs.run("parameters", tiny).passed


def test_it_fails_when_groups_are_forgotten(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    right = spec.attention

    def ungrouped(width: int, heads: int, **options: Any) -> spec.AttentionSpec:
        return right(width, heads, **options | {"kv_heads": heads})

    monkeypatch.setattr(spec, "attention", ungrouped)
    with pytest.raises(
        triptych.CheckpointError, match=r"the config asks for \[60, 24\]"
    ):  # the loader refuses such a checkpoint
        labs.run("parameters", tiny)
    monkeypatch.setattr(lab, "decoder", lambda setup: triptych.create(TINY))
    assert failed(labs.run("parameters", tiny)) == {SHAPES, TOTAL, SUM, LOADED, ATTENTION}


def test_it_fails_when_a_tied_head_is_counted(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    right = families.read_config
    monkeypatch.setattr(families, "read_config", lambda hf, **options: replace(right(hf, **options), ties={}))
    assert failed(labs.run("parameters", tiny)) >= {TOTAL, EXERCISE}


def test_it_fails_when_a_tensor_has_another_shape(tiny: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    model = triptych.create(TINY)
    model.hf = TINY | {"intermediate_size": 38}
    monkeypatch.setattr(lab, "decoder", lambda setup: model)
    result = labs.run("parameters", tiny)
    assert failed(result) == {LOADED}
    [loaded] = [check for check in result.checks if LOADED in check.claim]
    assert loaded.measured == 2 * 3  # gate, up and down of each block


def test_another_architecture_is_refused() -> None:
    with pytest.raises(InputError, match="not for 'gpt2'"):
        lab.predict({"model_type": "gpt2"})
