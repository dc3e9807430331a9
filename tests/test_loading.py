"""What `load` refuses before it computes: types, devices, and files that are not what they should be."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import triptych
from triptych.checkpoints import open_source, read_json
from triptych.checkpoints.header import BESIDE, read_header
from triptych.errors import CheckpointError, ConfigError, InputError, TriptychError

LLAMA = {
    "model_type": "llama", "vocab_size": 43, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    triptych.create(LLAMA).save(tmp_path / "m")
    return tmp_path / "m"


# ---------------------------------------------------------------- side files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def link_loop(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


ODD = {
    fifo: "is not a regular file", directory: "is a directory, not a file", link_loop: "cannot be read",
    endless: "is not a regular file", dangling: "is a link to a file that does not exist",
    sparse: "is 10,737,418,240 bytes long; no config or tokenizer is longer",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BESIDE, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "tokenizer.json", "modules.json"])  # fmt: skip
@pytest.mark.parametrize("odd", ODD)
def test_a_side_file_that_cannot_be_read_is_not_absent(saved: Path, name: str, odd: Any) -> None:
    assert read_header(saved).spec.vocab == 43
    odd(saved / name)
    with pytest.raises(CheckpointError, match=rf"{name}: {ODD[odd]}"):
        triptych.load(saved)


@pytest.mark.parametrize("odd", ODD)
def test_nor_is_the_config(saved: Path, odd: Any) -> None:
    (saved / "config.json").unlink()
    odd(saved / "config.json")
    with pytest.raises(CheckpointError, match=f"config.json: {ODD[odd]}"):
        triptych.load(saved)
    with pytest.raises(CheckpointError, match=ODD[odd]):
        read_json(saved / "config.json")


def test_a_shard_with_a_name_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "x" * 5_000 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not the name of a shard in the same directory"):
        open_source(tmp_path)


@pytest.mark.parametrize(("path", "message"), [("x" * 5_000, "cannot be opened"), ("a\0b", "is a directory, a .gguf")])
def test_a_path_that_cannot_exist_is_refused_in_one_line(path: str, message: str) -> None:
    with pytest.raises(TriptychError, match=re.escape(message)):
        triptych.load(path)


# ---------------------------------------------------------------- types and devices


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_a_weight_that_is_not_floating_point_is_refused(saved: Path, dtype: torch.dtype) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is stored as \w+, and weights are floating-point numbers"):
        triptych.load(saved)


def test_a_dtype_that_nothing_computes_in_needs_another(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e5m2)}, saved / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is stored as F8_E5M2.*load with dtype='bfloat16'"):
        triptych.load(saved)
    assert triptych.load(saved, dtype="bfloat16").logits([[3, 4]])[0].shape == (2, 43)


@pytest.mark.parametrize("name", ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_named(saved: Path, name: Any) -> None:
    model = triptych.load(saved, dtype=name)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16} == {model.module.dtype}


@pytest.mark.parametrize(
    ("dtype", "problem"),
    [
        (torch.float8_e4m3fn, "dtype 'float8_e4m3fn' is not one of float32, bfloat16, float16, float64"),
        (torch.int8, "dtype 'int8' is not one of"),
        ("bfloat", r"dtype 'bfloat' is not one of .*did you mean 'bfloat16'"),
        ("q4_0", "dtype 'q4_0' is not one of"),
    ],
)
def test_other_dtypes_are_refused(saved: Path, dtype: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        triptych.load(saved, dtype=dtype)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", [None, "", Path(""), b"m", 3], ids=repr)
def test_what_is_no_name_of_a_model_is_refused(model: Any, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    if model == Path(""):  # the same as ".", which is a directory like another
        assert triptych.load(model).spec.vocab == 43
        return
    with pytest.raises(InputError, match=r"a model is a directory, a .gguf file or hub:org/name, not "):
        triptych.load(model)


def test_a_directory_without_a_config_says_what_may_have_been_meant(saved: Path, tmp_path: Path) -> None:
    """The one model below it or the one GGUF file in it, else one of them; and what a model directory holds."""
    empty = tmp_path / "empty"
    empty.mkdir()
    holds = "holds no config.json; a model directory holds config.json and model.safetensors"
    with pytest.raises(CheckpointError, match=f"empty: {holds}$"):
        triptych.load(empty)
    with pytest.raises(CheckpointError, match=rf"{holds}; did you mean {saved}\?$"):
        triptych.load(tmp_path)
    (empty / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=rf"{holds}; did you mean {empty / 'a.gguf'}\?$"):
        triptych.load(empty)
    (empty / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=rf"{holds}; give one of those in it, {empty / 'a.gguf'}$"):
        triptych.load(empty)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 16}, "needs the key 'intermediate_size'$"),  # hidden_size is another key, and right
        ({"vocab_sizes": 43, "vocab_size": None}, "needs the key 'vocab_size'; is 'vocab_sizes' a misspelling of it"),
        ({"type_vocab_size": 43, "vocab_size": None}, "needs the key 'vocab_size'$"),
    ],
    ids=str,
)
def test_a_missing_key_is_not_guessed_from_keys_that_are_right(config: dict[str, Any], message: str) -> None:
    keys = {"model_type": "llama", **(LLAMA if "vocab_size" in config else {}), **config}
    with pytest.raises(ConfigError, match=message):
        triptych.create({key: value for key, value in keys.items() if value is not None})


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ("x", "device 'x' is not known to torch; use 'cpu', or 'cuda' for a GPU"),
        ("", "is not known to torch"),
        ("meta", "device 'meta' holds no numbers"),
        ("cuda:99", r"device 'cuda:99' cannot be used here \(.*\); use device='cpu'"),
    ],
)
def test_a_device_that_is_not_here_is_refused(saved: Path, device: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        triptych.load(saved, device=device)


def test_cuda_without_a_gpu_is_refused_in_one_line(saved: Path) -> None:
    if torch.cuda.is_available():
        assert triptych.load(saved, device="cuda").module.device.type == "cuda"
    else:
        with pytest.raises(InputError, match=r"device 'cuda' cannot be used here \(.*\); use device='cpu'"):
            triptych.load(saved, device="cuda")


@pytest.mark.parametrize("act", ["swiglu", "geglu", "silu2"])
def test_an_unknown_activation_of_a_config_is_refused(act: str) -> None:
    with pytest.raises(ConfigError, match=f"hidden_act '{act}' is not one of"):
        triptych.create(LLAMA | {"hidden_act": act})


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_weights_are_the_same_kind_of_tensor_in_inference_mode(saved: Path, quantize: str | None) -> None:
    """So that changes of theirs are counted, and they can be trained."""
    with torch.inference_mode():
        models = (
            triptych.load(saved, quantize=quantize),
            triptych.create(LLAMA),
            triptych.create(triptych.create(LLAMA).spec),
        )
    for model in models:
        tensors = [*model.module.parameters(), *model.module.buffers()]
        assert not any(tensor.is_inference() for tensor in tensors)
        assert tensors[0]._version >= 0
