"""Text models inside models of images and text, against the whole model of transformers given text alone."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import references
from cli_models import Captured
from parity import WITHIN
from triptych import families
from triptych.checkpoints.convert import convert
from triptych.checkpoints.header import read_header
from triptych.cli import main
from triptych.errors import CheckpointError, ConfigError
from triptych.families.multimodal_text import INSIDE
from triptych.model import load

IDS = [3, 7, 1, 22, 9, 30, 5, 11, 17, 40, 2, 8]
IMAGES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 20, "patch_size": 10}  # fmt: skip
#: wrapper -> (its class, of the text's config and of the images', a variant of the text model, more keys)
WRAPPERS: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", "Gemma3TextConfig", "SiglipVisionConfig", "gemma3", {}),
    "llava": ("Llava", "LlamaConfig", "CLIPVisionConfig", "llama", {"image_token_index": 6}),
    "mistral3": ("Mistral3", "MistralConfig", "PixtralVisionConfig", "mistral", {"image_token_index": 6}),
}  # fmt: skip
NEW = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
       "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}  # fmt: skip


@cache
def saved(kind: str) -> tuple[Any, Path]:
    """The reference, tiny and random, and the directory `save_pretrained` wrote it to, with the old names."""
    name, text, images, variant, more = WRAPPERS[kind]
    keys = getattr(transformers, text)(**references.VARIANTS[variant][2]).to_dict()
    made = {"text_config": keys, "vision_config": getattr(transformers, images)(**IMAGES).to_dict()}
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**made, **more)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    path = references.saved(variant)[1].parent / f"wrapped-{kind}"
    model.save_pretrained(path)
    return model, path


def names(path: Path) -> set[str]:
    return set(load_file(path / "model.safetensors"))


def renamed(source: Path, path: Path) -> Path:
    """The same with the names that transformers has in memory since version 4.52."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    for old, new in NEW.items():
        tensors = {(new + key.removeprefix(old)) if key.startswith(old) else key: x for key, x in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def apart(kind: str, path: Path) -> float:
    with torch.no_grad():
        expected = saved(kind)[0](input_ids=torch.tensor([IDS])).logits[0].log_softmax(-1)
    return float((load(path).logits([IDS])[0].log_softmax(-1) - expected).abs().max())


def test_every_wrapper_is_tried() -> None:
    assert WRAPPERS.keys() == INSIDE.keys()


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_model_computes_what_the_whole_one_does(kind: str, tmp_path: Path) -> None:
    _, path = saved(kind)
    assert any(name.startswith("language_model.model.") for name in names(path))
    assert apart(kind, path) <= WITHIN
    new = renamed(path, tmp_path / "new")
    assert any(name.startswith("model.language_model.") for name in names(new))
    assert apart(kind, new) <= WITHIN
    tensors = load_file(new / "model.safetensors")  # negative control: one of the text's tensors changed
    key = next(key for key in tensors if key.endswith("layers.1.mlp.up_proj.weight"))
    save_file(tensors | {key: tensors[key].flip(0)}, new / "model.safetensors")
    assert apart(kind, new) > 100 * WITHIN


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_left_out_is_named_with_a_reason(kind: str, capsys: Captured) -> None:
    _, path = saved(kind)
    model = load(path)
    beside = {name for name in names(path) if name.startswith(("vision_tower.", "multi_modal_projector."))}
    assert model.report.ignored.keys() == beside
    assert len(beside) > 4
    assert all("only the text model is built" in why for why in model.report.ignored.values())
    others = len([name for name in beside if "vision" in name]) - 1
    assert f" and {others} more: part of the image encoder" in str(model.report)
    assert main(["inspect", str(path)]) == 0
    assert "more: part of the image encoder; only the text model is built" in " ".join(capsys.readouterr().out.split())
    stray = [*names(path), "vision_towel.weight"]
    with pytest.raises(CheckpointError, match=r"unexpected tensors: 'vision_towel.weight'"):
        families.plan(model.spec, "hf", stray)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_it_is_saved_as_the_text_model(kind: str, tmp_path: Path) -> None:
    _, path = saved(kind)
    model, inside = load(path), INSIDE[kind]
    assert model.spec.family == inside
    model.save(tmp_path / "saved")
    convert(path, tmp_path / "converted")
    for out in (tmp_path / "saved", tmp_path / "converted"):
        assert json.loads((out / "config.json").read_text())["model_type"] == inside
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert type(theirs).config_class.model_type == inside
        with torch.no_grad():
            found = theirs(torch.tensor([IDS])).logits[0]
        assert (found - model.logits([IDS])[0]).abs().max() <= WITHIN
        assert not [name for name in names(out) if "vision" in name or "language_model" in name]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_absent_size_is_the_reference_s(kind: str) -> None:
    """The published gemma-3-4b says six keys of its text model, llava-1.5 five."""
    few = {"text_config": {"num_hidden_layers": 3}, "model_type": kind}
    theirs = getattr(transformers, WRAPPERS[kind][1])(num_hidden_layers=3)
    expected = families.read_config(json.loads(theirs.to_json_string(use_diff=False)))
    assert families.read_config(few) == expected
    more = families.read_config(few | {"eos_token_id": [1, 106], "tie_word_embeddings": True})
    assert (more.ids.eos, list(more.ties)) == ((1, 106), ["head.proj.weight"])


def test_refusals() -> None:
    for hf, message in (
        ({"model_type": "gemma3"}, "text_config is missing"),
        ({"model_type": "gemma3", "text_config": []}, "text_config must be a table"),
        ({"model_type": "gemma3", "text_config": {"x": 1}}, "'x' .* is not understood"),
        ({"model_type": "llava", "text_config": {"model_type": "x"}}, "model_type 'x' is not one of"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 3}, "boi_tokens": 2}, "'boi_tokens' .* is not"),
    ):
        with pytest.raises(ConfigError, match=message):
            families.read_config(hf)
    assert families.read_config({"model_type": "gemma3", "text_config": {"num_hidden_layers": 3}, "x": 2}, ignore=["x"])


def test_a_wrapper_is_written_as_gguf(tmp_path: Path) -> None:
    _, path = saved("llava")
    convert(path, tmp_path / "x.gguf")
    assert read_header(tmp_path / "x.gguf").spec.family == "llama"
    assert torch.equal(load(tmp_path / "x.gguf").logits([IDS])[0], load(path).logits([IDS])[0])
