"""LoRA on transformers' own modules, in the files of PEFT: what PEFT does, written again from its documentation."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D


class Adapted(torch.nn.Module):
    """`base(x) + scale * lora_B(lora_A(x))`."""

    def __init__(self, base: Any, rank: int, scale: float) -> None:
        super().__init__()
        inputs, outputs = base.weight.shape if isinstance(base, Conv1D) else base.weight.shape[::-1]
        self.base, self.scale = base, scale
        self.lora_A = torch.nn.Linear(inputs, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


def wrapped(model: Any, config: dict[str, Any]) -> Any:
    """A copy of a transformers model whose modules that `target_modules` names are adapted; the rest is frozen."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    named = {
        name: module
        for name, module in model.named_modules()
        if any(_ends(name, target) for target in config["target_modules"])
    }
    assert named
    for name, module in named.items():
        assert isinstance(module, torch.nn.Linear | Conv1D), name
        assert config["fan_in_fan_out"] == isinstance(module, Conv1D) or not isinstance(module, Conv1D)
        rank = _pattern(config["rank_pattern"], name, config["r"])
        alpha = _pattern(config["alpha_pattern"], name, config["lora_alpha"])
        path, _, leaf = name.rpartition(".")
        setattr(
            model.get_submodule(path),
            leaf,
            Adapted(module, rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)),
        )
    return model


def opened(model: Any, directory: Path) -> Any:
    """The model with the adapter in `directory`; every tensor has its place, and every place a tensor."""
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["bias"] == "none"
    made = wrapped(model, config)
    stored = load_file(directory / "adapter_model.safetensors")
    assert {name for name, _ in made.named_parameters() if ".lora_" in name} == {_plain(key) for key in stored}
    with torch.no_grad():
        for key, value in stored.items():
            made.get_parameter(_plain(key)).copy_(value)
    return made


def written(model: Any, directory: Path, config: dict[str, Any], seed: int = 0) -> Any:
    """A model with a random adapter, which is written to `directory` as PEFT does."""
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "rank_pattern": {}, "alpha_pattern": {},
              "fan_in_fan_out": False, "bias": "none", "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
              "base_model_name_or_path": "org/name", "use_dora": False, **config}  # fmt: skip
    made = wrapped(model, config)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in made.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.3, generator=random)
            tensors[f"base_model.model.{name}"] = parameter.detach().clone()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return made


def _plain(key: str) -> str:
    assert key.startswith("base_model.model.")
    return key.removeprefix("base_model.model.")


def _pattern(patterns: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for end, value in patterns.items() if _ends(name, end)), default)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
