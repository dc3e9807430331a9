"""Random adapters on random models of every family: what PEFT writes opens here with its outputs and gradients, what is
written here opens in PEFT, and merging changes nothing."""

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import triptych
from adapter_cases import FAMILIES, Case, apart, draw, inner, peft_model
from triptych.checkpoints import adapter_files
from triptych.checkpoints.adapter_files import write_adapter
from triptych.model import Model
from triptych.nn import LoraFactors, LoraLinear, factors_of
from triptych.spec import LinearSpec

peft = pytest.importorskip("peft")

OUTPUTS, MERGED = 1e-4, 1e-5  # of another implementation in fp32; of the same one
GRADIENTS = 1e-3  # of the largest
SEEDS = 3
WEIGHTS = "adapter_model.safetensors"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of PEFT's own calls into transformers
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, quiet_transformers: None) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # PEFT looks for the config of the base that a file names


def weighed(outputs: list[Tensor], seed: int) -> Tensor:
    """A sum of the outputs with random weights, the same for the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([(one * torch.randn(one.shape, generator=generator)).sum() for one in outputs]).sum()


def their_gradients(case: Case, made: Any, folder: Path) -> dict[str, Tensor]:
    """By the names in PEFT's file."""
    weighed(case.theirs(inner(made)), 1).backward()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    made.save_pretrained(folder, save_embedding_layers=False)
    return load_file(folder / WEIGHTS)


def own_gradients(case: Case, model: Model, folder: Path) -> dict[str, Tensor] | None:
    """The same; None where what is asked keeps no graph."""
    outputs = case.ours(model)
    if not outputs[0].requires_grad:
        return None
    weighed(outputs, 1).backward()
    of: dict[int, Tensor] = {}
    factors = {}
    for slot, one in factors_of(model.module).items():
        down = of.setdefault(id(one.down), torch.zeros_like(one.down) if one.down.grad is None else one.down.grad)
        up = torch.zeros_like(one.up) if one.up.grad is None else one.up.grad
        factors[slot] = LoraFactors(down, up, one.alpha)
    write_adapter(folder, model.spec, factors)
    return load_file(folder / WEIGHTS)


def gradient_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Relative to the largest; what is here alone of both, or zero there, is not of the model's outputs."""
    shared = [name for name in theirs if name in ours]
    assert all(not theirs[name].any() for name in theirs.keys() - ours.keys())
    assert ours.keys() <= theirs.keys()
    largest = max(float(theirs[name].abs().max()) for name in shared)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in shared) / largest


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_peft_opens_here(family: str, seed: int, tmp_path: Path) -> None:
    case = draw(family, seed, tmp_path)
    made = peft_model(case, seed)
    made.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    with torch.no_grad():
        expected, plain = case.theirs(inner(made)), case.theirs(case.reference)
    model = triptych.load(case.base, dtype="float32", adapter=tmp_path / "theirs")
    found = [one.detach() for one in case.ours(model)]
    assert apart(found, expected, model) < OUTPUTS
    assert apart(found, plain, model) > OUTPUTS
    ours = own_gradients(case, model, tmp_path / "own-gradients")
    if ours is not None:
        assert gradient_gap(ours, their_gradients(case, made, tmp_path / "gradients")) < GRADIENTS
    model.merge_adapter()
    assert apart(case.ours(model), found, model) < MERGED


def own_adapter(case: Case, seed: int) -> Model:
    """The model with a random adapter on drawn slots of its blocks."""
    r = random.Random(f"own {seed} {case.base}")
    model = triptych.load(case.base, dtype="float32")
    linear = [name for name, part in model.spec.walk() if isinstance(part, LinearSpec) and ".blocks." in name]
    slots = [name for name in linear if ".experts." not in name and not name.endswith(".router")]
    if "moe" in model.spec.family:  # PEFT takes maps of its dense blocks for those of its experts
        slots = [name for name in slots if ".attn." in name]
    leaves = sorted({name.rpartition(".")[2] for name in slots})
    every: str | list[str] = "all-linear" if "moe" not in model.spec.family else leaves
    targets = r.choice([every, r.sample(leaves, r.randint(1, len(leaves))), r.sample(slots, min(3, len(slots)))])
    model.add_adapter(rank=r.randint(1, 2), alpha=r.choice([1, 2.5, 7]), targets=targets)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_opens_what_is_written_here(family: str, seed: int, tmp_path: Path) -> None:
    case = draw(family, seed, tmp_path)
    model = own_adapter(case, seed)
    model.save_adapter(tmp_path / "ours")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = peft.PeftModel.from_pretrained(copy.deepcopy(case.reference), tmp_path / "ours").eval()
    assert not [str(one.message) for one in caught if "missing" in str(one.message).lower()]
    with torch.no_grad():
        assert apart(case.ours(model), case.theirs(inner(opened)), model) < OUTPUTS


def test_each_family_is_drawn_with_factors_that_change_its_output() -> None:
    assert len(set(FAMILIES)) == len(FAMILIES) > 25
    assert {"gpt2", "phi3", "gpt_neox", "vit", "whisper", "vision"} <= set(FAMILIES)


@pytest.mark.parametrize("broken", ["scale", "shared factor"])
def test_a_wrong_product_is_noticed(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of alpha alone; an `up` whose rows are those of another of the fused maps."""
    case = draw("gpt2", 0, tmp_path)
    case.config.update(target_modules=["c_attn"], r=3, rank_pattern={}, alpha_pattern={}, use_rslora=False)
    made = peft_model(case, 0)
    made.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    if broken == "scale":
        monkeypatch.setattr(LoraFactors, "scale", property(lambda self: self.alpha))
        right = LoraLinear.__init__

        def wrong(self: LoraLinear, *arguments: Any) -> None:
            right(self, *arguments)
            self.scale = self.alpha

        monkeypatch.setattr(LoraLinear, "__init__", wrong)
    else:
        split = adapter_files._split

        def rolled(load: Any, factors: LoraFactors, separate: Any) -> dict[str, LoraFactors]:
            moved = LoraFactors(factors.down, factors.up.roll(1, 0), factors.alpha)
            return split(load, moved, separate)

        monkeypatch.setattr(adapter_files, "_split", rolled)
    model = triptych.load(case.base, dtype="float32", adapter=tmp_path / "theirs")
    with torch.no_grad():
        assert apart(case.ours(model), case.theirs(inner(made)), model) > 10 * OUTPUTS


def test_names_of_vit_as_transformers_4_had_them(tmp_path: Path) -> None:
    """Files of PEFT from before transformers 5 renamed the modules."""
    from safetensors.torch import save_file

    case = draw("vit", 0, tmp_path)
    case.config.update(target_modules=["q_proj", "fc2"], rank_pattern={}, alpha_pattern={})
    made = peft_model(case, 0)
    made.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    old = {".layers.": ".encoder.layer.", "attention.q_proj": "attention.attention.query", "mlp.fc2": "output.dense"}
    tensors = load_file(tmp_path / "theirs" / WEIGHTS)
    for new, before in old.items():
        tensors = {name.replace(new, before): value for name, value in tensors.items()}
    assert any("encoder.layer.0.attention.attention.query" in name for name in tensors)
    save_file(tensors, tmp_path / "theirs" / WEIGHTS, {"format": "pt"})
    model = triptych.load(case.base, dtype="float32", adapter=tmp_path / "theirs")
    with torch.no_grad():
        assert apart(case.ours(model), case.theirs(inner(made)), model) < OUTPUTS
