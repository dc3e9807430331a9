"""Adapters beside PEFT itself: it opens ours, and we open its."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_ours_opens_what_peft_writes(options: dict[str, bool], base: Path, tmp_path: Path) -> None:
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    theirs = peft.get_peft_model(in_transformers(base), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = load(base, dtype="float32", adapter=tmp_path / "adapter")
    assert float((logits(theirs) - logits(model)).abs().max()) <= 1e-4
    assert float((logits(load(base, dtype="float32")) - logits(model)).abs().max()) > 0.1
