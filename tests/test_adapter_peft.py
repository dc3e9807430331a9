"""Adapters beside PEFT itself: it opens ours, and we open its."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from triptych import nn
from triptych.checkpoints.adapter_files import write_adapter
from triptych.model import Model, create, load

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of PEFT's own calls into transformers
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]

SHARED = {"vocab_size": 50, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": SIZES,
    "phi3": SIZES | {"num_key_value_heads": 2, "original_max_position_embeddings": 64},
}
IDS = [1, 20, 3, 40, 5, 6]


@pytest.fixture(params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    create(SHARED | {"model_type": request.param} | CONFIGS[request.param]).save(tmp_path / "base")
    return tmp_path / "base"


def in_transformers(base: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    if isinstance(model, Model):
        return model.logits([IDS])[0]
    result: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return result


def test_peft_opens_ours(base: Path, tmp_path: Path) -> None:
    model = load(base, dtype="float32")
    model.add_adapter(rank=4, alpha=8)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_adapter(tmp_path / "adapter")
    plain = logits(in_transformers(base))
    theirs = logits(peft.PeftModel.from_pretrained(in_transformers(base), tmp_path / "adapter").eval())
    assert float((theirs - logits(model)).abs().max()) <= 1e-4
    assert float((theirs - plain).abs().max()) > 0.1  # the adapter says something


OPTIONS: list[dict[str, bool]] = [{}, {"use_rslora": True}, {"use_dora": True}, {"use_dora": True, "use_rslora": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_ours_opens_what_peft_writes(options: dict[str, bool], base: Path, tmp_path: Path) -> None:
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    theirs = peft.get_peft_model(in_transformers(base), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = load(base, dtype="float32", adapter=tmp_path / "adapter")
    assert float((logits(theirs) - logits(model)).abs().max()) <= 1e-4
    assert float((logits(load(base, dtype="float32")) - logits(model)).abs().max()) > 0.1


def gradients_of(loss: torch.Tensor, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_outputs_and_gradients_are_those_of_peft(options: dict[str, bool], base: Path, tmp_path: Path) -> None:
    """The gradients by PEFT's names: those of ours are put into factors and written like these."""
    own = {"use_dora": "dora", "use_rslora": "rank_stabilized"}
    model = load(base, dtype="float32")
    model.add_adapter(rank=3, alpha=6, **{own[key]: True for key in options})
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter)).add_(torch.randn_like(parameter) * 0.1)
    model.save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {key for key in own if config[key]} == set(options)
    assert config["lora_alpha"] == 6
    theirs = peft.PeftModel.from_pretrained(in_transformers(base), tmp_path / "adapter", is_trainable=True)
    weights = torch.randn(len(IDS), 50, generator=torch.Generator().manual_seed(2))
    ids, rows = nn.flat([IDS], torch.device("cpu"))
    out, right = model.module.logits(nn.Batch(inputs=ids, rows=rows)), theirs(torch.tensor([IDS])).logits[0]
    assert bool((out - right).abs().max() <= 1e-5 * right.abs().max())
    trained = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    wanted = {
        name.replace("magnitude_vector.weight", "magnitude_vector"): value
        for name, value in gradients_of((right * weights).sum(), trained).items()
    }
    ours = gradients_of(
        (out * weights).sum(), {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    )
    shared: dict[int, torch.Tensor] = {}
    factors = {}
    for slot, one in nn.factors_of(model.module).items():
        down = shared.setdefault(id(one.down), ours.get(f"{slot}.down", one.down))
        factors[slot] = replace(one, down=down, up=ours[f"{slot}.up"], magnitude=ours.get(f"{slot}.magnitude"))
    write_adapter(tmp_path / "gradients", model.spec, factors)
    named = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert named.keys() == wanted.keys()
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        assert float((named[name] - value).abs().max()) <= 1e-5 * largest, name
    model.merge_adapter()
    assert float((logits(model) - right.detach()).abs().max()) <= 1e-4
    merged = theirs.merge_and_unload()
    assert float((logits(merged) - logits(model)).abs().max()) <= 1e-4
