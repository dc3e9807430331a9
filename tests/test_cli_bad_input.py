"""Bad input, each a line on stderr and exit 1: what was wrong, where, what to do; nothing half-written."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import malformed
from cli_models import CONTEXT, Captured, checkpoint, refused, said
from triptych.cli import main
from triptych.model import load


def copied(layout: str, tmp_path: Path, **config: Any) -> Path:
    """A copy of a checkpoint with keys of its config changed; None removes one."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint(layout), path)
    keys = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps({name: value for name, value in keys.items() if value is not None}))
    return path


CHANGED: dict[str, tuple[dict[str, Any], str]] = {  # keys of the config, and what the error says
    "unknown-key": ({"head_dim": None, "head_dimm": 10}, "did you mean 'head_dim'?"),
    "unknown-family": ({"model_type": "lama"}, "did you mean 'llama'?"),
    "missing-tensor": ({"num_hidden_layers": 4}, "missing"),
    "extra-tensor": ({"num_hidden_layers": 2}, "unexpected tensors"),
    "other-shape": ({"intermediate_size": 38}, "[37, 24]"),
}
CONFIG = (checkpoint("decoder") / "config.json").read_bytes()
FILES: dict[str, tuple[dict[str, bytes], str, str]] = {  # what a directory holds, what is opened, what the error says
    "missing": ({}, "nothing", "no such file"),
    "empty-directory": ({}, "", "config.json"),
    "pickle-directory": ({"pytorch_model.bin": b"\x80\x04", "config.json": CONFIG}, "", "pickle"),
    "pickle-file": ({"weights.pt": b"\x80\x04"}, "weights.pt", "save it as safetensors"),
    "not-a-checkpoint": ({"notes.txt": b"hello"}, "notes.txt", "notes.txt"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_models_that_cannot_be_loaded(name: str, tmp_path: Path, capsys: Captured) -> None:
    config, says = CHANGED[name]
    assert says in refused(["generate", str(copied("decoder", tmp_path, **config)), "Mill"], capsys)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_model(name: str, tmp_path: Path, capsys: Captured) -> None:
    files, opened, says = FILES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    assert says in refused(["generate", str(tmp_path / opened), "Mill"], capsys)


def test_a_config_that_cannot_be_read(tmp_path: Path, capsys: Captured) -> None:
    path = copied("decoder", tmp_path)
    (path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert "config.json" in refused(["generate", str(path), "Mill"], capsys)
    (path / "config.json").unlink()
    assert "config.json" in refused(["generate", str(path), "Mill"], capsys)
    assert "hub:org/name" in refused(["generate", "hub:no-slash", "Mill"], capsys)


@pytest.mark.parametrize("command", ["generate", "chat", "fill", "inspect", "check", "count", "convert", "explain"])
def test_an_empty_name_is_no_model(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(checkpoint("decoder"))  # which the empty path would name
    text = ["text"] if command in ("generate", "fill", "convert", "explain") else []
    assert "a model is a directory, a .gguf file or hub:org/name, not ''" in refused([command, "", *text], capsys)


@pytest.mark.parametrize("command", ["chat", "fill", "encode", "classify", "inspect", "check", "count"])
def test_every_command_refuses_what_is_not_there(command: str, capsys: Captured) -> None:
    text = ["text"] if command in ("fill", "encode", "classify") else []
    assert "/nowhere/model" in refused([command, "/nowhere/model", *text], capsys)


@pytest.mark.parametrize("case", malformed.CASES, ids=str)
def test_malformed_files(case: malformed.Case, tmp_path: Path, capsys: Captured) -> None:
    path = case.write(tmp_path)
    if path.suffix != ".gguf":
        (tmp_path / "config.json").write_text((checkpoint("decoder") / "config.json").read_text())
        path = tmp_path if (tmp_path / "model.safetensors").exists() else path
    refused(["inspect", str(path)], capsys)


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize(
    ("layout", "argv", "says"),
    [
        ("decoder", ["generate", "{m}", "a" * CONTEXT], f"the model has {CONTEXT}"),
        ("decoder", ["generate", "{m}", ""], "the text is empty"),
        ("decoder", ["generate", "{m}", "a", "--top-p", "0"], "--top-p 0"),
        ("decoder", ["generate", "{m}", "a", "--beams", "30000"], "--beams 30000 is more than the 257 tokens"),
        ("encoder-decoder", ["translate", "{m}", "a", "--beams", "30000"], "--beams 30000 is more than the 259 tokens"),
        ("decoder", ["generate", "{m}", "a", "--max-new-tokens", "1000000000"], "or lower --max-new-tokens"),
        ("encoder-decoder", ["generate", "{m}", "a", "--max-new-tokens", "1000000000"], "or lower --max-new-tokens"),
        ("decoder", ["bench", "{m}", "--requests", "1000000000"], "--requests 1000000000 is more than 4,096"),
        ("decoder", ["bench", "{m}", "--prompt-tokens", "0"], "--prompt-tokens must be at least 1"),
        ("decoder", ["bench", "{m}", "--context", "0"], "--context must be at least 1"),
        ("decoder", ["lens", "{m}", "Mill", "--top", "900"], "--top 900 must be from 1 to 257"),
        ("decoder", ["patch", "{m}", "--clean", "Mill", "--corrupt", "Milk", "--at", "-1"], "--at -1: the row has"),
        ("decoder", ["ablate", "{m}", "Mill", "--position", "-1"], "--position -1: the row has positions 0 to 3"),
        ("decoder", ["lens", "{m}", "Mill", "--position", "-1"], "--position -1"),
        ("decoder", ["lens", "{m}", "Mill", "--attribution", "--position", "-9"], "--position -9"),
        ("decoder", ["generate", "{m}", "a", "--decoder-prefix", "b"], "encoder-decoders"),
        ("decoder", ["generate", "{m}", "a", "--device", "warp"], "cpu, cuda"),
        ("decoder", ["fill", "{m}", "a"], "mask"),
        ("decoder", ["generate", "{m}", "a\udcff"], "UTF-8"),
        ("decoder", ["generate", "{m}", "a", "--beams", "2", "--seed", "0"], "beams and seed do not go together"),
        ("decoder", ["generate", "{m}", "a", "--beams", "2", "--seed", "3"], "beams and seed do not go together"),
        ("decoder", ["convert", "{m}", "q.xyz"], "q.xyz: .xyz is the ending of no format; write q.gguf"),
        ("decoder", ["convert", "{m}", ""], "the name to write to is that of a directory or a .gguf file"),
        ("decoder", ["generate", "{m}/config.json", "a"], "is a config alone; give the directory that holds it"),
        ("decoder", ["convert", "{m}", "q.safetensors"], "an HF checkpoint is a directory"),
        ("encoder", ["generate", "{m}", "a"], "encoder"),
        ("encoder", ["chat", "{m}"], "is an encoder, which does not generate"),
        ("encoder", ["fill", "{m}", "no mask here"], "write [MASK] for a word"),
        ("encoder", ["classify", "{m}", "a"], "no head over classes"),
        ("encoder", ["encode", "{m}", "the " * CONTEXT], f"{CONTEXT}"),
        ("encoder", ["encode", "{m}", "a", "--pooling", "middle"], "must be 'mean', 'first'"),
        ("decoder", ["inspect", "{m}", "Mill", "--site", "blocks.0.atn.pattern"], "mean 'blocks.0.attn.pattern'?"),
        ("decoder", ["inspect", "{m}", "Mill", "--layer", "3"], "layers are 0 to 2"),
        ("decoder", ["inspect", "{m}", "Mill", "--head", "6"], "heads 0..5"),
        ("decoder", ["inspect", "{m}", "Mill", "--target", "x"], "encoder-decoders"),
        ("decoder", ["inspect", "{m}", "Mill", "--site", "final", "--save", "x.html"], ".pattern"),
        ("encoder-decoder", ["inspect", "{m}", "Mill", "--site", "blocks.*.attn.z"], "no site"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(part[:12] for part in value),
)  # fmt: skip
def test_texts_and_options_that_cannot_be_used(
    layout: str, argv: list[str], says: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert says in refused([part.replace("{m}", str(checkpoint(layout))) for part in argv], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["generate", "encode", "chat"])
def test_stdin_that_is_not_utf8(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    layout = "encoder" if command == "encode" else "decoder"
    argv = [command, str(checkpoint(layout)), *([] if command == "chat" else ["-"])]
    if command == "chat":
        argv += ["--seed", "1"]
        assert "error: stdin is not UTF-8 (byte 3)" in said(argv, capsys, 1)[1]
    else:
        assert "stdin is not UTF-8 (byte 3)" in refused(argv, capsys)


def test_what_is_measured_in_a_model_with_nan_is_refused(tmp_path: Path, capsys: Captured) -> None:
    model = load(checkpoint("decoder"))
    model.module.get_parameter("decoder.blocks.1.attn.q.weight").detach()[0, 0] = float("nan")
    model.save(tmp_path / "diverged")
    path = str(tmp_path / "diverged")
    for argv in (["heads", path], ["lens", path, "a b"], ["ablate", path, "a b"], ["explain", path, "a b"],
                 ["patch", path, "--clean", "a b", "--corrupt", "a c"], ["inspect", path, "a b"]):  # fmt: skip
        assert "decoder.blocks.1.attn.q.weight holds numbers that are NaN or infinite" in refused(argv, capsys)


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: Captured) -> None:
    there = tmp_path / "file"
    there.write_text("")
    argv = ["encode", str(checkpoint("encoder")), "the mill", "--out", str(there / "v.npy")]
    assert "v.npy" in refused(argv, capsys)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 - closing it fails too
    monkeypatch.setattr(sys, "stdout", full)
    assert main(["count", str(checkpoint("encoder"))]) == 1
    monkeypatch.undo()
    assert "no space left" in capsys.readouterr().err
    with pytest.raises(OSError, match="No space"):
        full.close()
