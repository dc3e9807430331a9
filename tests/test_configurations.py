"""Configurations nobody wrote down beforehand: drawn at random for every decoder-only family, and as real repositories
on the Hub carry them.  Each is the reference's model - whole pass, cached, saved - or one line that says why not.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import configurations
import tiny
import triptych
import wild
from configurations import FAMILIES, draw
from parity import ROWS, WITHIN
from triptych import families
from triptych.errors import CheckpointError, InputError, TriptychError

SHORT, LONG = 2, 30  # seeds a family
SEEDS = [*range(SHORT), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(SHORT, LONG))]


def scores(model: Any, row: list[int]) -> Tensor:
    """[T, V] log-probabilities of the reference, uncached and alone."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0], -1)


def apart(a: Tensor, b: Tensor) -> float:
    """max |Δ|, NaN where either has one."""
    return float((a.float().log_softmax(-1) - b).abs().max())


def checkpoint(config: dict[str, Any], seed: int, path: Path) -> Any:
    """The reference's model of `config`, written to `path`."""
    model = configurations.reference(config, seed)
    configurations.write(model, config, path, random.Random(f"{config} {seed}"))
    return model


def compare(config: dict[str, Any], seed: int, path: Path) -> None:
    """A ragged batch, chunked prefill and cached steps, and a directory written back, against the reference."""
    reference = checkpoint(config, seed, path / "in")
    model = triptych.load(path / "in", dtype=torch.float32)
    expected = [scores(reference, row) for row in ROWS]
    assert max(map(apart, model.logits(ROWS), expected)) <= WITHIN

    engine = tiny.engine(model.module, [row[:5] for row in ROWS], chunk=3)
    for step in range(4):
        found = engine.logits()
        if step in (0, 3):
            gaps = [apart(x, scores(reference, live.ids)[-1]) for x, live in zip(found, engine.rows, strict=True)]
            assert max(gaps) <= WITHIN
        for live, x in zip(engine.rows, found, strict=True):
            live.ids.append(int(x.argmax()))

    model.save(path / "out")
    mixture = {"experts_implementation": "eager"} if "num_experts_per_tok" in config else {}
    again = type(reference).from_pretrained(path / "out", **mixture).eval()
    assert all(torch.equal(scores(again, row), x) for row, x in zip(ROWS, expected, strict=True))


pytestmark = pytest.mark.usefixtures("quiet_transformers")

# ---------------------------------------------------------------- drawn


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_configuration_is_the_reference_s_model(family: str, seed: int, tmp_path: Path) -> None:
    compare(draw(family, seed), seed, tmp_path)


# family -> a change that must show
WRONG: dict[str, dict[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": 0.5},
    "gptj": {"rotary_dim": 2},
    "gpt_neox": {"use_parallel_residual": False},
    "phi": {"layer_norm_eps": 0.5},
    "starcoder2": {"norm_epsilon": 0.5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_says_something_else_is_told_apart(family: str, tmp_path: Path) -> None:
    """The control: the comparison above sees one number of the config."""
    config = draw(family, 0) | {"rotary_dim": 4, "use_parallel_residual": True}
    config = {key: value for key, value in config.items() if key in draw(family, 0)}
    reference = checkpoint(config, 0, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | WRONG.get(family, {"rms_norm_eps": 0.5})))
    model = triptych.load(tmp_path / "in", dtype=torch.float32)
    assert max(map(apart, model.logits(ROWS), [scores(reference, row) for row in ROWS])) > 10 * WITHIN


# ---------------------------------------------------------------- as the Hub carries them


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in wild.CONFIGS if name not in wild.UNREAD_THERE])
def test_a_config_of_the_hub_is_the_reference_s_model(name: str, tmp_path: Path) -> None:
    compare(wild.CONFIGS[name], 0, tmp_path)


def test_the_first_name_of_longrope() -> None:
    """The reference no longer reads it."""
    assert {name: wild.CONFIGS[name]["rope_scaling"]["type"] for name in wild.UNREAD_THERE} == {"Phi-3-mini-128k": "su"}
    assert families.read_config(wild.CONFIGS["Phi-3-mini-128k"]) == families.read_config(wild.CONFIGS["Phi-3.5-mini"])


def as_the_reference_says(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as the reference would write it today, every default in it."""
    import transformers

    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    return dict(json.loads(read.to_json_string(use_diff=False)))


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 13}
# Two words for one thing, or one word that is not read: the reference's choice is ours.
TOLD_TWICE: dict[str, tuple[str, dict[str, Any]]] = {
    "theta inside and beside": ("Llama-2-7b", {"rope_theta": 55.0, "rope_parameters": {"rope_theta": 77.0}}),
    "two tables": ("Llama-2-7b", {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}),
    "two kinds": ("Qwen2-0.5B", {"rope_scaling": YARN | {"type": "linear"}}),
    "a length beside another": ("Llama-2-7b", {"rope_scaling": YARN, "original_max_position_embeddings": 26}),
    "a length linear has no use for": (
        "Llama-2-7b",
        {"rope_scaling": LINEAR | {"original_max_position_embeddings": 9}},
    ),
    "no factor": ("Llama-2-7b", {"rope_scaling": YARN | {"factor": None}}),
    "theta under two names": ("pythia-70m", {"rope_theta": 55.0}),
    "theta under the wrong name": ("pythia-70m", {"rope_theta": 55.0, "rotary_emb_base": None}),
    "a share under two names": ("pythia-70m", {"partial_rotary_factor": 0.5}),
    "a share inside": ("pythia-70m", {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}}),
    "a share of phi inside": ("phi-2", {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.2}}),
    "no share of phi": ("phi-2", {"partial_rotary_factor": None, "hidden_size": 32}),
    "no length of phi3": ("Phi-3.5-mini", {"original_max_position_embeddings": None}),
    "no window of a mixture": ("Qwen3-30B-A3B", {"sliding_window": None, "use_sliding_window": True}),
    "a pattern of gemma 3": ("gemma-3-1b", {"sliding_window_pattern": None, "_sliding_window_pattern": 2}),
}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("what", TOLD_TWICE)
def test_where_a_config_contradicts_itself_the_reference_decides(what: str) -> None:
    """A change to None takes the key away."""
    name, changes = TOLD_TWICE[what]
    config = {key: value for key, value in (wild.CONFIGS[name] | changes).items() if changes.get(key, 0) is not None}
    assert families.read_config(config) == families.read_config(as_the_reference_says(config))


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_writes_a_config_down_as_the_same_model(family: str) -> None:
    for seed in range(12):
        config = draw(family, seed)
        written = as_the_reference_says(config)
        ids = families.read_config(written).ids  # it writes down defaults of those too
        assert replace(families.read_config(config), ids=ids) == families.read_config(written), seed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_out_of_a_gguf_file_is_the_same_model_there(family: str) -> None:
    """Where GGUF has the words; the config read out of its keys goes into directories the reference opens."""
    told = 0
    for seed in range(12):
        model = families.read_config(draw(family, seed) | PLAIN.get(family, {}))
        try:
            metadata, tensors = families.write_gguf(model)
        except CheckpointError:
            continue
        shapes = {load.source: load.source_shape for load in families.save_plan(model, "gguf")}
        shapes |= {name: (len(values),) for name, values in tensors.items()}
        config, back = families.read_gguf(metadata, shapes, read=tensors.__getitem__)
        there = families.read_config(as_the_reference_says(config), stored=shapes)
        assert replace(there, ids=back.ids, init_std=back.init_std) == back, seed
        told += 1
    assert told


# What GGUF has no word for and always means.
PLAIN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1, "hidden_act": "silu", "use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 6, "hidden_activation": "gelu_pytorch_tanh", "layer_types": None},
    "gemma3_text": {"query_pre_attn_scalar": 6, "hidden_activation": "gelu_pytorch_tanh", "layer_types": None},
}


def test_a_mixture_of_which_no_layer_is_one_has_no_words_in_gguf() -> None:
    dense = wild.CONFIGS["Qwen3-30B-A3B"] | {"mlp_only_layers": [0, 1, 2]}
    with pytest.raises(CheckpointError, match="cannot represent this model"):
        families.write_gguf(families.read_config(dense))


def test_dynamic_rope_reads_no_further_than_the_base_stays(tmp_path: Path) -> None:
    """Over there the base grows with a longer row, and keys cached before are turned by the old one."""
    config = wild.CONFIGS["dynamic-ntk"]
    reference = checkpoint(config, 0, tmp_path / "in")
    model, row = triptych.load(tmp_path / "in", dtype=torch.float32), [*range(3, 35), *range(3, 35)]
    assert apart(model.logits([row])[0], scores(reference, row)) <= WITHIN
    with pytest.raises(InputError, match="needs 65 positions and the model has 64"):
        model.logits([[*row, 7]])


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("Phi-3-mini-4k", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}, "auto_map is set"),
    ("Llama-2-7b", {"partial_rotary_factor": 0.5}, "rotates whole heads"),
    ("Llama-2-7b", {"model_type": "llama4"}, r"'llama4' is not one of .*did you mean 'llama'"),
    ("Llama-2-7b", {"model_type": ["llama"]}, "model_type must be a string"),
    ("Llama-2-7b", {"model_type": ""}, "is not one of"),
    ("Llama-2-7b", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("Llama-2-7b", {"architectures": "LlamaForCausalLM"}, "must be a list"),
    ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number"),
    ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": -2}}, "factor must be"),
    ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": float("nan")}}, "holds NaN"),
    ("Llama-2-7b", {"rope_scaling": [1, 2]}, "must be a table"),
    ("Llama-2-7b", {"rope_scaling": {"type": {"type": "linear"}}}, "must be a string"),
    ("Llama-2-7b", {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fasst": 2}}, "did you mean 'beta_fast'"),
    ("Llama-2-7b", {"rope_theta": float("inf")}, "holds Infinity"),
    ("Llama-2-7b", {"rope_theta": 1, "rope_scaling": YARN}, "rope_theta must be"),
    ("Llama-2-7b", {"rope_scaling": YARN | {"original_max_position_embeddings": 1}}, "above 1"),
    ("Llama-2-7b", {"rope_scaling": YARN | {"beta_fast": 1e308}}, "beta_fast must be"),
    ("Llama-3.1-8B", {"rope_scaling": wild.LLAMA_31 | {"low_freq_factor": 4.0}}, "must be below high_freq_factor"),
    ("Llama-2-7b", {"num_attention_heads": True}, "must be an integer"),
    ("Llama-2-7b", {"num_attention_heads": 5}, "divide"),
    ("Llama-2-7b", {"num_hidden_layers": 10**9}, "between 1 and 4096"),
    ("Llama-2-7b", {"hidden_size": -24}, "between 1 and"),
    ("Llama-2-7b", {"vocab_size": 10**30}, "between 1 and"),
    ("Llama-2-7b", {"rms_norm_eps": True}, "must be a number"),
    ("Llama-2-7b", {"tie_word_embeddings": "false"}, "must be true or false"),
    ("Llama-2-7b", {"quantization_config": {"quant_method": "magic"}}, "magic"),
    ("Llama-3.1-8B", {"head_dim": 7}, "must be even"),
    (
        "Phi-3.5-mini",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 3}},
        "1 short and 3 long",
    ),
    ("Phi-3.5-mini", {"rope_scaling": {"type": "longrope", "short_factor": "x", "long_factor": [1.0]}}, "list"),
    ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "9 of 8 experts"),
    ("Qwen2-0.5B", {"use_mrope": True}, "three axes"),
    ("Qwen2-0.5B", {"layer_types": ["full_attention"]}, "layer_types"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
    ("Qwen3-30B-A3B", {"mlp_only_layers": [0.5]}, "mlp_only_layers"),
    ("gemma-2-2b", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    ("gemma-2-2b", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ("gemma-3-1b", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_type"),
    ("gemma-3-1b", {"use_bidirectional_attention": True}, "attend to later ones"),
    ("gpt2", {"n_head": 5}, "divide"),
    ("gpt2", {"activation_function": "gelu_neww"}, "did you mean 'gelu_new'"),
    ("gpt-j-6b", {"rotary_dim": 7}, "even"),
    ("granite-3.0-2b", {"logits_scaling": 0}, "logits_scaling"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSALS)
def test_a_refusal_is_one_line_and_names_the_file(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()  # without weights: nothing is read of them before the config is understood
    (tmp_path / "in" / "config.json").write_text(json.dumps(wild.CONFIGS[name] | changes))
    with pytest.raises(TriptychError, match=message) as caught:
        triptych.load(tmp_path / "in")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "in") in str(caught.value)
