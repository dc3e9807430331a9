"""`triptych data` as it is typed."""

import json
from pathlib import Path

import pytest

from cli_models import Captured, refused, said
from shard_texts import documents, json_lines


def test_texts_become_shards_and_are_shown(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command again finds them made; the tokens of a document are its text."""
    monkeypatch.chdir(tmp_path)
    texts = [*documents(50), "warm", "warm"]
    json_lines(tmp_path / "texts.jsonl", texts)
    command = ["data", "tokenize", "texts.jsonl", "--out", "tokens", "--tokenizer", "bpe:300", "--processes", "2"]
    out, _ = said(command, capsys)
    assert "52 documents" in out
    assert "in a recipe: data.shards = 'tokens'" in out
    made = json.loads(said([*command, "--json"], capsys)[0])
    assert (made["documents"], made["shards"], made["resumed"], made["empty"]) == (52, 1, 1, 0)
    out, err = said(["data", "inspect", "tokens", "--check", "--document", "50"], capsys)
    assert "document 50: " in out
    assert "warm" in out.replace("|", "")
    assert "1 with the tokens of an earlier document (1.9%)" in out
    assert "all bytes as they were written" in out
    assert "document 50 comes 2 times" in err
    shown = json.loads(said(["data", "inspect", "tokens", "--document", "51", "--json"], capsys)[0])
    assert "".join(shown["document"]["tokens"]) == "warm"
    assert sum(one["documents"] for one in shown["lengths"]) == 52
    assert shown["repeated"] == [{"document": 50, "times": 2}]
    path = tmp_path / "tokens" / "shard-000000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-200] ^= 1
    path.write_bytes(raw)
    assert "its bytes have changed" in refused(["data", "inspect", "tokens", "--check"], capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["data", "tokenize", "texts.jsonl", "--out", "t", "--tokenizer", "nothing"], "no tokenizer 'nothing'"),
        (
            ["data", "tokenize", "texts.jsonl", "--out", "t", "--tokenizer", "byte", "--field", "body"],
            "no field 'body'",
        ),
        (["data", "tokenize", "none.txt", "--out", "t", "--tokenizer", "byte"], "no file or folder 'none.txt'"),
        (["data", "tokenize", "texts.jsonl", "--out", "~/t", "--tokenizer", "byte"], "~ is not expanded"),
        (["data", "tokenize", "texts.jsonl", "--out", "texts.jsonl", "--tokenizer", "byte"], "cannot write"),
        (["data", "inspect", "."], "holds no shards"),
        (["data", "inspect", "nowhere"], "there is no directory"),
    ],
)
def test_one_line_for_what_cannot_be_done(
    argv: list[str], says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    json_lines(tmp_path / "texts.jsonl", ["a", "b"])
    assert says in refused(argv, capsys)
