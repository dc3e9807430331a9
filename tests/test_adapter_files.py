"""Adapters in PEFT's files: ours on transformers' modules, theirs on ours, gradients, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import parity
import peft_by_hand
import references
import triptych
from triptych import nn
from triptych.checkpoints.adapter_files import write_adapter
from triptych.checkpoints.adapters import base_name
from triptych.errors import CheckpointError
from triptych.model import Model
from triptych.nn.linear import Linear

# variant -> targets as transformers names them
THEIRS: dict[str, list[str]] = {
    "gpt2": ["c_attn", "mlp.c_proj"],  # Conv1D, q, k and v in one
    "gpt-neox": ["query_key_value", "dense_h_to_4h"],  # rows of q, k and v head by head
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "llama": ["q_proj", "v_proj", "down_proj", "lm_head"],
    "bert": ["query", "intermediate.dense"],
    "t5": ["q", "wi"],
    "bart": ["q_proj", "fc1"],
    "qwen3": ["k_proj"],
}
OURS: dict[str, list[str] | str] = {
    "gpt2": ["q", "v", "out"],  # two of the three, each with a `down` of its own
    "gpt-neox": ["q", "k", "v"],
    "phi3": ["k", "up"],
    "gemma2": "all-linear",
    "t5": ["decoder.blocks.1.cross.q", "up"],
    "bert-classes": ["classes", "attn.k"],
}


def filled(model: Model, seed: int = 1) -> Model:
    """The model with random numbers in its adapter."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.3, generator=random)
    return model


def worst(model: Model, reference: Any) -> float:
    """The largest difference of what the two give for the rows of `parity`."""
    rows, targets = parity.rows_of(model), parity.targets_of(model)
    ours = parity.mine(model, rows, targets)
    worst = 0.0
    for i, row in enumerate(rows):
        more = {} if targets is None else {"decoder_input_ids": torch.tensor([targets[i]])}
        with torch.no_grad():
            out = reference(**parity.given(row), **more)
        found = out.logits[0] if hasattr(out, "logits") else out.last_hidden_state[0]
        worst = max(worst, float((parity.measured(ours[i], model) - parity.measured(found, model)).abs().max()))
    return worst


@pytest.mark.parametrize("name", THEIRS)
def test_an_adapter_of_peft_gives_what_transformers_gives_with_it(name: str, tmp_path: Path) -> None:
    reference, base = references.saved(name)
    config = {"target_modules": THEIRS[name], "fan_in_fan_out": name == "gpt2"}
    made = peft_by_hand.written(reference, tmp_path, config)
    model = triptych.load(base, adapter=tmp_path)
    assert worst(model, made) < parity.WITHIN
    assert worst(triptych.load(base), made) > 100 * parity.WITHIN  # the adapter is not nothing
    model.save_adapter(tmp_path / "again")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", OURS)
def test_peft_opens_ours(name: str, tmp_path: Path) -> None:
    reference, base = references.saved(name)
    model = triptych.load(base)
    model.add_adapter(rank=2, alpha=3, targets=OURS[name])
    filled(model).save_adapter(tmp_path / "a")
    assert worst(model, peft_by_hand.opened(reference, tmp_path / "a")) < parity.WITHIN
    again = triptych.load(base, adapter=tmp_path / "a")
    ours = dict(model.module.named_parameters())
    theirs = dict(again.module.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    again.save_adapter(tmp_path / "b")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_ranks_and_scales_of_their_own(tmp_path: Path) -> None:
    reference, base = references.saved("llama")
    config = {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 5},
              "alpha_pattern": {"layers.1.mlp.up_proj": 7}}  # fmt: skip
    made = peft_by_hand.written(reference, tmp_path, config)
    model = triptych.load(base, adapter=tmp_path)
    assert worst(model, made) < parity.WITHIN
    model.save_adapter(tmp_path / "again")
    assert worst(model, peft_by_hand.opened(reference, tmp_path / "again")) < parity.WITHIN


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    reference, base = references.saved("llama")
    made = peft_by_hand.written(reference, tmp_path, {"target_modules": ["q_proj"], "r": 4, "use_rslora": True})
    assert {one.scale for one in made.modules() if isinstance(one, peft_by_hand.Adapted)} == {5 / 4**0.5}
    model = triptych.load(base, adapter=tmp_path)
    assert worst(model, made) < parity.WITHIN
    model.save_adapter(tmp_path / "again")
    assert worst(model, peft_by_hand.opened(reference, tmp_path / "again")) < parity.WITHIN


@pytest.mark.parametrize("wrong", ["scale", "factors"])
def test_a_wrong_scale_or_swapped_factors_show(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, base = references.saved("llama")
    made = peft_by_hand.written(reference, tmp_path, {"target_modules": ["q_proj"], "r": 3})
    if wrong == "scale":

        def change(part: nn.LoraLinear, x: torch.Tensor) -> torch.Tensor:
            return Linear.forward(part, x) + F.linear(F.linear(x, part.down), part.up)

        monkeypatch.setattr(nn.LoraLinear, "forward", change)
    else:
        stored = load_file(tmp_path / "adapter_model.safetensors")
        first, second = (f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight" for i in (0, 1))
        stored[first], stored[second] = stored[second], stored[first]
        save_file(stored, tmp_path / "adapter_model.safetensors")
    assert worst(triptych.load(base, adapter=tmp_path), made) > 10 * parity.WITHIN


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "phi3", "llama"])
def test_gradients_are_those_of_transformers_with_lora(name: str, tmp_path: Path) -> None:
    reference, base = references.saved(name)
    config = {"target_modules": THEIRS[name], "fan_in_fan_out": name == "gpt2"}
    made = peft_by_hand.written(reference, tmp_path, config)
    model = triptych.load(base, adapter=tmp_path)
    rows = parity.token_rows(model)
    inputs, where = nn.flat(rows, model.device)
    logits = where.split(model.module.logits(nn.Batch(inputs=inputs, rows=where)))
    sum(F.cross_entropy(x[:-1], torch.tensor(row[1:])) for x, row in zip(logits, rows, strict=True)).backward()
    sum(
        F.cross_entropy(made(input_ids=torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:])) for row in rows
    ).backward()
    parts = {slot: model.module.get_submodule(slot) for slot in model.adapter.slots}
    shared = {id(part.down): part.down.grad for part in parts.values()}  # the gradients as an adapter
    gradients = {s: nn.LoraFactors(shared[id(part.down)], part.up.grad, part.alpha) for s, part in parts.items()}
    write_adapter(tmp_path / "gradients", model.spec, gradients)
    theirs = {n: p.grad for n, p in made.named_parameters() if p.requires_grad}
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert {key.removeprefix("base_model.model.") for key in ours} == theirs.keys()
    for key, value in ours.items():
        expected = theirs[key.removeprefix("base_model.model.")]
        assert float((value - expected).abs().max()) < 1e-4 * float(expected.abs().max()), key
    assert all(p.grad is None for p in model.module.parameters() if not p.requires_grad)


# ---------------------------------------------------------------- what is refused


def edited(directory: Path, config: dict[str, Any] | None = None, **tensors: Any) -> None:
    """Change the files of an adapter: keys of the config, and tensors by the end of their names (None removes one)."""
    if config:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if tensors:
        file = directory / "adapter_model.safetensors"
        stored = load_file(file) | {name.replace("__", "."): value for name, value in tensors.items()}
        save_file({name: value for name, value in stored.items() if value is not None}, file)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not LORA"),
        ({"use_dora": True}, {}, r"lora_magnitude_vector of model\.layers\.\S+ is missing; file and config do not fit"),
        ({"bias": "all"}, {}, "bias = 'all' trained biases too"),
        ({"modules_to_save": ["lm_head"]}, {}, "'modules_to_save' = .* is not supported"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa' changes the base"),
        ({"something_new": 3}, {}, "'something_new' = 3 is not supported"),
        ({"rank_pattern": {".*q.*": 3}}, {}, "is a regular expression; write names of modules"),
        ({"lora_alpha": "NaN"}, {}, "lora_alpha 'NaN' is not a finite number"),
        ({"lora_dropout": 1.5}, {}, "lora_dropout 1.5 is not a number from 0 to 1"),
        ({"r": 4}, {}, "has rank 3 in adapter_model.safetensors, and the config says 4"),
        ({}, {KEY.format("A"): torch.zeros(3, 25)}, r"lora_A is \[3, 25\], and this llama model takes \[rank, 24\]"),
        ({}, {KEY.format("B"): torch.zeros(7, 3)}, r"lora_B is \[7, 3\], and this llama model takes \[60, rank\]"),
        ({}, {KEY.format("B"): None}, "lora_B of .*q_proj is missing; file and config do not fit"),
        ({}, {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(3, 24)},
         "layers.9.self_attn.q_proj is no linear map of this llama model"),
        ({}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.zeros(3)}, "use_dora"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 4)}, "changes an embedding"),
    ],
)  # fmt: skip
def test_what_is_no_plain_lora_for_this_model_is_one_line(
    config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reference, base = references.saved("llama")
    peft_by_hand.written(reference, tmp_path, {"target_modules": ["q_proj"]})
    edited(tmp_path, config, **tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        triptych.load(base, adapter=tmp_path)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_and_none_at_all(tmp_path: Path) -> None:
    reference, _ = references.saved("llama")
    peft_by_hand.written(reference, tmp_path / "a", {"target_modules": ["q_proj"]})
    with pytest.raises(CheckpointError, match="is no linear map of this gpt2 model"):
        triptych.load(references.saved("gpt2")[1], adapter=tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"lora_A is \[3, 24\].*takes \[rank, 30\]"):
        triptych.load(references.saved("phi")[1], adapter=tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json"):
        triptych.load(references.saved("llama")[1], adapter=tmp_path / "b")
    with pytest.raises(
        CheckpointError, match=r"its base 'org/name' is not there; give it, for example as hub:org/name"
    ):
        triptych.load(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        triptych.load(references.saved("llama")[1], adapter=tmp_path / "a")


def test_a_base_that_has_changed_or_moved(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    triptych.load(references.saved("llama")[1]).save(base)
    model = triptych.load(base)
    model.add_adapter(rank=2, targets=["q"])
    expected = filled(model).logits(parity.ROWS)
    model.save_adapter(adapter)
    assert all(map(torch.equal, triptych.load(adapter).logits(parity.ROWS), expected))  # by its base's name
    triptych.load(references.saved("llama")[1], adapter=adapter)  # another file of the same shapes, on demand
    other = triptych.load(base)
    other.module.get_parameter("decoder.blocks.0.mlp.up.weight").detach().mul_(1.5)
    other.save(base)
    with pytest.raises(CheckpointError, match="has changed since the adapter was trained"):
        triptych.load(adapter)
    base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"its base .* is not there"):
        triptych.load(adapter)
    assert len(triptych.load(tmp_path / "moved", adapter=adapter).adapter.slots) == references.L


def test_an_adapter_saved_beside_its_base_leaves_the_base(tmp_path: Path) -> None:
    triptych.load(references.saved("llama")[1]).save(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = triptych.load(tmp_path)
    model.add_adapter(rank=2)
    expected = filled(model).logits(parity.ROWS)
    model.save_adapter(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert triptych.load(tmp_path).adapter is None  # a directory with both is the model
    assert all(map(torch.equal, triptych.load(tmp_path, adapter=tmp_path).logits(parity.ROWS), expected))


@pytest.mark.parametrize("separate", [3, "q", {"a": 1}, ["decoder.blocks.0.attn.q", "decoder.blocks.0.attn.k"]])
def test_metadata_that_nobody_wrote(separate: Any, tmp_path: Path) -> None:
    reference, base = references.saved("gpt2")
    peft_by_hand.written(reference, tmp_path, {"target_modules": ["c_attn"], "fan_in_fan_out": True})
    stored = load_file(tmp_path / "adapter_model.safetensors")
    save_file(stored, tmp_path / "adapter_model.safetensors", {"triptych": json.dumps({"separate": separate})})
    with pytest.raises(CheckpointError, match=r"where a list of slots belongs|does not divide into its slots"):
        triptych.load(base, adapter=tmp_path)


def test_an_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    reference, base = references.saved("mixtral")
    made = peft_by_hand.written(reference, tmp_path, {"target_modules": ["q_proj"]})
    assert worst(triptych.load(base, adapter=tmp_path), made) < parity.WITHIN
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1.lora_{}.weight"
    edited(tmp_path, **{name.format("A"): torch.zeros(3, 24), name.format("B"): torch.zeros(37, 3)})
    with pytest.raises(CheckpointError, match=r"experts\.1\.w1 is no linear map of this mixtral model"):
        triptych.load(base, adapter=tmp_path)


def test_a_base_on_the_hub_is_not_downloaded_because_a_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    model = triptych.load(references.saved("llama")[1])
    model.add_adapter(rank=2, targets=["q"])
    write_adapter(tmp_path / "a", model.spec, nn.factors_of(model.module), base="hub:org/name@main")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/name"
    with pytest.raises(CheckpointError, match=r"its base hub:org/name@main has not been downloaded; give it"):
        triptych.load(tmp_path / "a")


def test_what_lies_in_the_cache_of_the_hub_is_named_by_its_name_there() -> None:
    assert base_name(Path("/cache/models--org--name/snapshots/abc123")) == "hub:org/name@abc123"
    assert base_name(Path("/cache/models--org--name/snapshots/abc123/x.gguf")) == "hub:org/name@abc123:x.gguf"
    assert base_name(Path("/models/name")) == "/models/name"
