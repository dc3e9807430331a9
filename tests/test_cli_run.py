"""generate, chat, fill and encode as a user types them: the library's numbers, on the right stream."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from cli_models import Captured, answered, checkpoint, said
from triptych.cli import main
from triptych.model import load


def stdin(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


DECODER = ["--max-new-tokens", "9"]


def test_generate_gives_what_the_library_gives(capsys: Captured) -> None:
    path = checkpoint("decoder")
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}
    typed = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    expected = load(path).generate(["Mill", "The river"], max_new_tokens=9, **options)  # type: ignore[arg-type]
    found = answered(["generate", str(path), "Mill", "The river", *DECODER, *typed], capsys)
    assert [row["ids"] for row in found["results"]] == [got.ids for got in expected]
    assert [row["text"] for row in found["results"]] == [got.text for got in expected]
    assert [row["prompt"] for row in found["results"]] == ["Mill", "The river"]
    assert found["tokens"] == sum(len(got.ids) for got in expected)


def test_a_single_prompt_is_streamed_and_its_speed_noted(capsys: Captured) -> None:
    path = checkpoint("decoder")
    (expected,) = load(path).generate(["Mill"], max_new_tokens=9)
    out, err = said(["generate", str(path), "Mill", *DECODER], capsys)
    assert out == expected.text + "\n"
    assert err.startswith("9 tokens in ")
    assert err.rstrip().endswith("tokens/s")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_prompt_from_stdin(end: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """`echo` ends what it writes with a line break, which is not meant."""
    stdin(monkeypatch, f"Müll{end}".encode())
    typed = answered(["generate", str(checkpoint("decoder")), "-", *DECODER], capsys)
    assert typed == answered(["generate", str(checkpoint("decoder")), "Müll", *DECODER], capsys) | {
        "seconds": typed["seconds"]
    }


def test_stop_ends_before_its_text(capsys: Captured) -> None:
    path = str(checkpoint("decoder"))
    whole = said(["generate", path, "Mill", *DECODER], capsys)[0]
    mark = next(c for c in whole[1:] if c.isascii() and c.isprintable())
    cut = said(["generate", path, "Mill", *DECODER, "--stop", mark], capsys)[0]
    assert cut == whole[: whole.index(mark)] + "\n"


def test_stop_id_ends_at_its_token(capsys: Captured) -> None:
    command = ["generate", str(checkpoint("decoder")), "Mill", *DECODER]
    ids = answered(command, capsys)["results"][0]["ids"]
    cut = answered([*command, "--stop-id", str(ids[2])], capsys)["results"][0]
    assert cut["ids"] == ids[: ids.index(ids[2]) + 1]


def test_beams_and_a_decoder_prefix(capsys: Captured) -> None:
    path = checkpoint("encoder-decoder")
    expected = load(path).generate(["Mill"], max_new_tokens=5, beams=3, decoder_prefix="ab")
    found = answered(
        ["generate", str(path), "Mill", "--max-new-tokens", "5", "--beams", "3", "--decoder-prefix", "ab"], capsys
    )
    assert found["results"][0]["ids"] == expected[0].ids


def test_dtype_changes_the_weights(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    seen = []
    monkeypatch.setattr("triptych.model.Model.generate", lambda self, *_, **__: seen.append(self) or [])
    main(["generate", str(checkpoint("decoder")), "a", "b", "--dtype", "bf16"])
    assert next(seen[0].module.parameters()).dtype == torch.bfloat16


# ---------------------------------------------------------------- chat


def turns(lines: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, *more: str) -> list[str]:
    """The answers to each line."""
    stdin(monkeypatch, lines.encode())
    out, _ = said(["chat", str(checkpoint("decoder")), "--max-new-tokens", "4", "--seed", "3", "--json", *more], capsys)
    told = [json.loads(line) for line in out.splitlines()]
    assert all(one["role"] == "assistant" for one in told)
    return [one["content"] for one in told]


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    model = load(checkpoint("decoder"))
    how = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 3}
    history: list[dict[str, str]] = [{"role": "system", "content": "be"}]
    expected = []
    for line in ("hi", "you"):
        history.append({"role": "user", "content": line})
        expected.append("".join(model.chat(history, **how)))
        history.append({"role": "assistant", "content": expected[-1]})
    assert turns("hi\n\nyou\n", monkeypatch, capsys, "--system", "be") == expected


def test_a_turn_computes_what_is_new(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    how = ("--max-new-tokens", "4", "--seed", "3", "--show-prompt")
    reused = []
    for more in ((), ("--draft", "ngram"), ("--draft", str(checkpoint("decoder")), "--draft-tokens", "2")):
        stdin(monkeypatch, b"hi\nyou\n")
        out, err = said(["chat", str(checkpoint("decoder")), *how, *more], capsys)
        lines = err.splitlines()
        prompts = [int(line.split()[0]) for line in lines if " ids: " in line]
        reused.append((out, [int(line.split()[0]) for line in lines if line.endswith("computed in earlier turns")]))
        assert reused[-1][1][0] == 0
        assert prompts[0] <= reused[-1][1][1] < prompts[1]
    assert reused[0] == reused[1] == reused[2]


def test_guesses_change_nothing_and_are_counted(capsys: Captured) -> None:
    path = str(checkpoint("decoder"))
    for prompts in (["Mill"], ["Mill", "a river"]):
        plain, _ = said(["generate", path, *prompts, *DECODER], capsys)
        for draft in (["ngram"], [path, "--draft-tokens", "3"]):
            out, err = said(["generate", path, *prompts, *DECODER, "--draft", *draft], capsys)
            assert out == plain
            assert "guessed tokens were right" in err.splitlines()[-1]
    found = answered(["generate", path, "the mill", "the mill", *DECODER, "--draft", path], capsys)
    assert found["drafted"] >= found["accepted"] >= 0
    assert main(["generate", path, "Mill", "--draft", str(checkpoint("encoder-decoder"))]) == 1
    assert "the draft model has a vocabulary of 259 tokens, the model 257" in capsys.readouterr().err


def test_reset_forgets_and_quit_ends(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    first, again = turns("hi\n/reset\nhi\n/quit\nhi\n", monkeypatch, capsys)
    assert first == again
    _, remembered = turns("hi\nhi\n", monkeypatch, capsys)
    assert remembered != first


def test_chat_answers_help_itself(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    stdin(monkeypatch, b"/help\n/exit\nhi\n")
    out, err = said(["chat", str(checkpoint("decoder")), "--max-new-tokens", "4"], capsys)
    assert not out
    assert all(command in err for command in ("/help", "/reset", "/exit"))


def test_an_unknown_command_of_chat_is_not_sent_to_the_model(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    stdin(monkeypatch, b"/hlep\n")
    assert main(["chat", str(checkpoint("decoder")), "--max-new-tokens", "4"]) == 1
    assert "/hlep is not a command of chat; use one of /help, /reset, /exit" in capsys.readouterr().err
    assert len(turns("/etc/hosts is a file\n", monkeypatch, capsys)) == 1  # a text, not a command


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_encoder_is_refused_with_the_commands_that_take_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    stdin(monkeypatch, b"hi\n")
    path = str(checkpoint("encoder"))
    assert main([command, path, *(["hi"] if command == "generate" else [])]) == 1
    error = f"error: {path} is an encoder, which does not generate; use triptych fill, classify or encode\n"
    assert capsys.readouterr().err.endswith(error)


def test_a_run_directory_opens_its_finished_model_or_its_newest_step(tmp_path: Path, capsys: Captured) -> None:
    argv = ["generate", str(tmp_path), "Mill", *DECODER]
    assert "config.json" in said(argv, capsys, 1)[1]
    expected = {}
    for name, seed in (("step-00000009", 1), ("step-00000010", 2), ("model", 3)):
        model = load(checkpoint("decoder"))
        torch.manual_seed(seed)
        for parameter in model.module.parameters():
            torch.nn.init.normal_(parameter)
        model.save(tmp_path / name)
        (tmp_path / "step-00000099").mkdir(exist_ok=True)  # a checkpoint without its files
        expected[name] = model.generate(["Mill"], max_new_tokens=9)[0].ids
        assert answered(argv, capsys)["results"][0]["ids"] == expected[name]
    assert len({tuple(ids) for ids in expected.values()}) == 3


def test_the_prompt_can_be_seen(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    stdin(monkeypatch, b"hi\n")
    argv = ["chat", str(checkpoint("decoder")), "--max-new-tokens", "2", "--seed", "3", "--show-prompt"]
    out, err = said(argv, capsys)
    assert "<user>hi\n<assistant>" in err
    assert " ids: 60 117 115 101 114 62 104 105 10 " in err
    assert "<user>" not in out


def test_a_drawn_seed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    stdin(monkeypatch, b"")
    assert said(["chat", str(checkpoint("decoder"))], capsys)[1].startswith("seed ")


# ---------------------------------------------------------------- fill and encode


def test_fill(capsys: Captured) -> None:
    path, text = checkpoint("encoder"), "the [MASK] mill [MASK]"
    (expected,) = load(path).fill([text], top=3)
    (found,) = answered(["fill", str(path), text, "--top", "3"], capsys)["results"]
    assert [[(one["token"], one["probability"]) for one in mask] for mask in found["masks"]] == expected
    out, _ = said(["fill", str(path), text, "--top", "3"], capsys)
    assert "mask 2 of 2" in out
    assert f"{expected[1][0][1]:.1%}" in out


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_encode_to_a_file(suffix: str, tmp_path: Path, capsys: Captured) -> None:
    path, out = checkpoint("encoder"), tmp_path / f"v{suffix}"
    texts = ["the old mill", "the river"]
    expected = load(path).encode(texts, pooling="first", normalize=True).numpy()
    argv = ["encode", str(path), *texts, "--pooling", "first", "--normalize", "--out", str(out)]
    assert answered(argv, capsys)["shape"] == [2, 24]
    found = np.load(out) if suffix == ".npy" else load_file(out)["embeddings"]
    np.testing.assert_array_equal(found, expected)
    assert [file.name for file in tmp_path.iterdir()] == [out.name]


def test_encode_lines_of_stdin_and_their_likeness(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    stdin(monkeypatch, b"the old mill\n\nthe river\n")
    out, _ = said(["encode", str(checkpoint("encoder")), "-"], capsys)
    vectors = torch.nn.functional.normalize(load(checkpoint("encoder")).encode(["the old mill", "the river"]))
    assert "cosine similarity of 2 × 24 vectors" in out
    assert out.count(f"{float(vectors[0] @ vectors[1]):.3f}") == 2
    assert out.count("1.000") == 2
