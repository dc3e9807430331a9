"""Texts tokenized into shards: what is read of each kind of file, runs that were killed, and damage that is named."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

import triptych
from shard_texts import documents, json_lines, made, read_back, shards_of
from triptych.errors import ConfigError, InputError, TextError
from triptych.run_lock import RunLock
from triptych.shards import ShardSet, contents, tokenize, tokenize_worker, tokenizing
from triptych.shards.inputs import InputPart, list_inputs, parts
from triptych.shards.manifest import ShardManifest, differences, fingerprint
from triptych.shards.tokenizer_choice import choose_tokenizer
from triptych.text import ENCODER, bpe_tokenizer, byte_tokenizer

BYTES = byte_tokenizer()


def text_file(path: Path, texts: list[str]) -> Path:
    path.write_text("<end>".join(texts), encoding="utf-8")
    return path


def csv_file(path: Path, texts: list[str]) -> Path:
    """Line breaks, quotes and separators within fields."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["number", "text"])
        rows.writerows(enumerate(texts))
    return path


def parquet_file(path: Path, texts: list[str]) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"n": list(range(len(texts))), "text": texts}), path, row_group_size=7)
    return path


KINDS: dict[str, Callable[[Path, list[str]], Path]] = {
    "a.jsonl": json_lines, "a.csv": csv_file, "a.tsv": csv_file, "a.parquet": parquet_file, "a.txt": text_file,
}  # fmt: skip


@pytest.mark.parametrize("shard_bytes", [100, 3000, 10**9])
@pytest.mark.parametrize("name", KINDS)
def test_every_document_comes_once_and_in_order(name: str, shard_bytes: int, tmp_path: Path) -> None:
    texts = [f'{text}\nsays "{i}", and,\n\ntwo' for i, text in enumerate(documents(50))]
    path = KINDS[name](tmp_path / name, texts)
    if name == "a.tsv":
        path.write_text(path.read_text("utf-8").replace("number,text", "number\ttext").replace(',"', '\t"'), "utf-8")
    separator = "<end>" if name == "a.txt" else None
    summary = tokenize([path], tmp_path / "out", BYTES, separator=separator, processes=2, shard_bytes=shard_bytes)
    assert read_back(tmp_path / "out") == texts
    assert (len(summary.manifest.shards) == 1) == (shard_bytes == 10**9)
    assert summary.manifest.text_bytes == sum(len(text.encode()) for text in texts)


def test_several_inputs_and_a_folder(tmp_path: Path) -> None:
    """Files of a folder in the order of their names; what is hidden or no text is skipped, blank texts are counted."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("second\r\nline")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    (folder / ".hidden").write_text("never")
    (folder / "c.png").write_bytes(b"\x89PNG\0")
    (folder / "blank.txt").write_text(" \n")
    json_lines(folder / "sub" / "z.jsonl", ["third", "", "fourth"])
    last = json_lines(tmp_path / "last.jsonl", ["fifth"])
    summary = tokenize([folder, last], tmp_path / "out", BYTES, processes=1)
    assert read_back(tmp_path / "out") == ["first", "second\nline", "third", "fourth", "fifth"]
    assert summary.notes == (f"{folder}: 1 file skipped, which are no UTF-8 text",)
    assert sum(one.empty for one in summary.manifest.shards) == 2


def test_a_long_text_is_cut_at_ends_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {i} ☃\n" for i in range(500)), encoding="utf-8")
    made(path, tmp_path / "out", 1000)
    pieces = read_back(tmp_path / "out")
    assert "".join(pieces) == path.read_text("utf-8")
    assert len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces)
    assert all(len(piece.encode()) < 1100 for piece in pieces)


def test_a_text_without_lines_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.shards.inputs._LINE", 50)
    path = tmp_path / "long.txt"
    path.write_text("☃" * 400, encoding="utf-8")
    plan = ShardManifest(tokenizer="", vocab_size=1, tokenizer_from="", field="text", separator=None, shard_bytes=100,
                    inputs=list_inputs([path])[0])  # fmt: skip
    cuts = [piece for part in parts(plan, lambda *_: iter(())) for piece in part.pieces]
    raw = path.read_bytes()
    assert "".join(raw[one.start : one.stop].decode() for one in cuts) == "☃" * 400
    assert len(cuts) > 5


def test_the_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Also of a document of more characters than are encoded at once, and with more ids than 16 bits hold."""
    texts = [*documents(20), "".join(f"{text}\n" for text in documents(1500, seed=3))]
    assert len(texts[-1]) > 1 << 17
    words = bpe_tokenizer(texts, 600)
    shards = ShardSet(shards_of(tmp_path, texts, tokenizer=words))
    for i, text in enumerate(texts):
        assert shards.document(i).tolist() == words.encode(text, special=False)
    big = bpe_tokenizer(texts, 400)
    big.backend.add_tokens([f"token{i}" for i in range(70_000)])
    out = tmp_path / "big"
    made(json_lines(tmp_path / "one.jsonl", ["token69999 the"]), out, tokenizer=big)
    assert load_file(out / "shard-000000.safetensors")["tokens"].dtype == np.uint32
    assert ShardSet(out).document(0).tolist() == big.encode("token69999 the", special=False)
    assert max(ShardSet(out).document(0)) > 1 << 16


def digest(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*"))}


START = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from triptych.shards import tokenize
from triptych.text import byte_tokenizer
tokenize([Path({source!r})], Path({out!r}), byte_tokenizer(), processes=2, shard_bytes=2000)
"""


def begun(source: Path, out: Path) -> subprocess.Popen[bytes]:
    """A process that tokenizes."""
    paths = [str(Path(triptych.__file__).parents[1])]
    code = START.format(paths=paths, source=str(source), out=str(out))
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(number: signal.Signals, tmp_path: Path) -> None:
    """Killed after each few shards; what is written in the end is the same, byte for byte."""
    source = json_lines(tmp_path / "texts.jsonl", documents(400))
    made(source, tmp_path / "whole", 2000)
    whole, out = digest(tmp_path / "whole"), tmp_path / "out"
    kills = 0
    while not (out / "manifest.json").exists():
        before = len(digest(out))
        process = begun(source, out)
        wait_for(lambda: len(list(out.glob("shard-*"))) >= before + 3 or process.poll() is not None)  # noqa: B023
        kills += process.poll() is None
        process.send_signal(number)
        process.wait()
        assert all(whole[name] == content for name, content in digest(out).items())
    assert kills >= 5
    assert len(whole) > 20
    made(source, out, 2000)
    assert digest(out) == whole
    assert (out / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()
    assert not list(out.glob(".shard-*"))


def test_a_run_goes_on_with_the_shards_that_are_missing(tmp_path: Path) -> None:
    """The control: another number of shards would be made where the plan were another."""
    source = json_lines(tmp_path / "texts.jsonl", documents(80))
    out = tmp_path / "out"
    made(source, out, 2000)
    whole = digest(out)
    plan = ShardManifest.model_validate_json((out / "manifest.json").read_text()).model_copy(update={"shards": []})
    plan.write(out / "plan.json")
    (out / "manifest.json").unlink()
    names = sorted(whole)
    (out / names[0]).unlink()
    (out / names[2]).unlink()
    (out / ".shard-000002.77.tmp").write_bytes(b"half")
    summary = made(source, out, 2000)
    assert summary.resumed == len(whole) - 2
    assert digest(out) == whole
    assert made(source, out, 2000).resumed == len(whole)  # nothing is left to do
    for other, says in [
        (lambda: made(source, out, 3000), "shard_bytes is 3000, and it was 2000"),
        (lambda: made(source, out, 2000, byte_tokenizer(ENCODER)), "tokenizer has the hash"),
        (lambda: made(json_lines(tmp_path / "b.jsonl", ["a"]), out, 2000), "the inputs are others"),
    ]:
        with pytest.raises(ConfigError, match=says):
            other()
    os.utime(source, (1, 1))
    with pytest.raises(ConfigError, match=r"texts\.jsonl has changed since"):
        made(source, out, 2000)


def test_an_error_in_a_part_names_the_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in documents(60)]
    lines[47] = '{"text": 5}'
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(lines))
    with pytest.raises(TextError, match=r"a\.jsonl, line 48: text is 5, not a text"):
        made(source, tmp_path / "out", 1000)
    lines[47] = "{"
    source.write_text("\n".join(lines))
    with pytest.raises(TextError, match=r"a\.jsonl, line 48 is not JSON"):
        made(source, tmp_path / "out2", 1000)
    lines[47] = '{"txet": "a"}'
    source.write_text("\n".join(lines))
    with pytest.raises(TextError, match=r"line 48: there is no field 'text' \(did you mean 'txet'\?\)"):
        made(source, tmp_path / "out3", 1000)
    path = tmp_path / "b.txt"
    path.write_bytes(b"ab\ncd\n" * 100 + b"\xff\n")
    with pytest.raises(TextError, match=r"b\.txt is not UTF-8 at byte 600 \(0xff\)"):
        made(path, tmp_path / "out4", 100)
    table = csv_file(tmp_path / "c.csv", documents(60))
    table.write_text(table.read_text("utf-8") + "1,2,3\n", "utf-8")
    with pytest.raises(TextError, match=r"c\.csv, line 62 has 3 fields"):
        made(table, tmp_path / "out5", 1000)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (["nowhere"], "no file or folder 'nowhere'"),
        (["empty/"], "holds no text"),
        (["blank.txt"], "the inputs have no text"),
        (["a.jsonl", "a.jsonl"], "named twice"),
        (["pipe"], "a pipe or a device"),
        ([], "nothing to tokenize"),
    ],
)
def test_inputs_that_cannot_be_used(
    inputs: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n")
    os.mkfifo(tmp_path / "pipe")
    json_lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises((TextError, InputError), match=says) as caught:
        tokenize(inputs, tmp_path / "out", BYTES, processes=1)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_in_use_or_of_something_else(tmp_path: Path) -> None:
    source, out = json_lines(tmp_path / "a.jsonl", ["a"]), tmp_path / "out"
    out.mkdir()
    with RunLock(out), pytest.raises(ConfigError, match="in use by another run of this process"):
        made(source, out)
    (out / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"holds 'letter.txt' and no shards"):
        made(source, out)
    with pytest.raises(ConfigError, match="holds no shards"):
        ShardSet(out)
    with pytest.raises(ConfigError, match="there is no directory"):
        ShardSet(tmp_path / "nowhere")


def test_two_threads_into_one_directory(tmp_path: Path) -> None:
    """One makes the shards, and the other is refused or finds them made."""
    source, out, raised = json_lines(tmp_path / "a.jsonl", documents(60)), tmp_path / "out", list[BaseException]()

    def run() -> None:
        try:
            made(source, out, 1000)
        except ConfigError as error:
            raised.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) <= 1
    assert all("in use" in str(error) for error in raised)
    assert read_back(out) == documents(60)


def test_a_worker_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(TextError, match="ended by signal 9, perhaps for lack of memory"):
        made(json_lines(tmp_path / "a.jsonl", ["a"]), tmp_path / "out")


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its input ends when that process does, however it ends."""
    worker = tokenizing._TokenizerProcess(tmp_path, ShardManifest(
        tokenizer="", vocab_size=1, tokenizer_from="", field="text", separator=None, shard_bytes=1, inputs=[],
    ))  # fmt: skip
    BYTES.save(tmp_path / "tokenizer")
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(60) == 0
    worker.close()


def flipped(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_damage_is_named(tmp_path: Path) -> None:
    out = shards_of(tmp_path, documents(60))
    second = out / "shard-000001.safetensors"
    whole = second.read_bytes()
    assert not list(ShardSet(out).check())
    flipped(second, len(whole) - 1)
    assert list(ShardSet(out).check()) == [
        f"{second}: its bytes have changed since it was written (SHA-256); tokenize again"
    ]
    second.write_bytes(whole[:-1])
    with pytest.raises(TextError, match=re.escape(str(second))):
        ShardSet(out)
    second.write_bytes(b"")
    with pytest.raises(TextError, match=r"shard-000001\.safetensors: is empty"):
        ShardSet(out)
    second.unlink()
    with pytest.raises(TextError, match=r"shard-000001\.safetensors: the shard is missing"):
        ShardSet(out)
    second.write_bytes((out / "shard-000000.safetensors").read_bytes())
    with pytest.raises(TextError, match=r"shard-000001\.safetensors: is a shard from another run"):
        ShardSet(out)
    (tmp_path / "other").mkdir()
    other = shards_of(tmp_path / "other", documents(60, seed=1))
    second.write_bytes((other / second.name).read_bytes())
    with pytest.raises(TextError, match=r"shard-000001\.safetensors: is a shard from another run"):
        ShardSet(out)
    (tmp_path / "words").mkdir()
    other = shards_of(tmp_path / "words", documents(60), tokenizer=byte_tokenizer(ENCODER))
    second.write_bytes((other / second.name).read_bytes())
    with pytest.raises(TextError, match=rf"another tokenizer, of the hash {fingerprint(byte_tokenizer(ENCODER))[:12]}"):
        ShardSet(out)
    second.write_bytes(whole)
    assert not list(ShardSet(out).check())
    (out / "tokenizer" / "tokenizer.json").write_bytes((other / "tokenizer" / "tokenizer.json").read_bytes())
    with pytest.raises(TextError, match=r"tokenizer has the hash .* put back the tokenizer"):
        ShardSet(out).tokenizer()
    (out / "manifest.json").write_text("{")
    with pytest.raises(TextError, match=r"manifest\.json"):
        ShardSet(out)


def test_every_truncation_and_flipped_bit_of_a_header_ends_in_one_error_type(tmp_path: Path) -> None:
    """Or the shard is as it was: a space for a space between two keys."""
    out = shards_of(tmp_path, documents(3), shard_bytes=10**6)
    path = out / "shard-000000.safetensors"
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(TextError):
            ShardSet(out)
    for at in range(data):
        path.write_bytes(whole)
        flipped(path, at)
        try:
            shards = ShardSet(out)
        except TextError:
            continue
        assert [*shards.check()] or [shards.document(i).tolist() for i in range(3)]


def test_an_id_that_the_tokenizer_does_not_have_is_named_when_it_is_read(tmp_path: Path) -> None:
    out = shards_of(tmp_path, documents(3), shard_bytes=10**6)
    path = out / "shard-000000.safetensors"
    flipped(path, path.stat().st_size - 1)  # the high byte of the last id
    with pytest.raises(TextError, match=r"shard-000000\.safetensors: has the id \d+ of a vocabulary of 257"):
        ShardSet(out).document(2)


def test_a_data_set_of_the_hub_is_read_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(60)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"run: pip install 'datasets>=4'"):
        tokenize(["hub:some/texts"], tmp_path / "out", BYTES, processes=1)

    def load(name: str, subset: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, object]]:
        assert (name, subset, split, streaming) == ("some/texts", None, "train", True)
        return ({"text": text, "n": i} for i, text in enumerate(texts))

    library = ModuleType("datasets")
    library.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    out = tmp_path / "out2"
    summary = tokenize(["hub:some/texts"], out, BYTES, processes=2, shard_bytes=1000)
    assert read_back(out) == texts
    plan = summary.manifest.model_copy(update={"shards": []})
    (out / "manifest.json").rename(out / "plan.json")
    plan.write(out / "plan.json")
    (out / "shard-000001.safetensors").unlink()
    assert (
        tokenize(["hub:some/texts"], out, BYTES, processes=2, shard_bytes=1000).resumed
        == len(summary.manifest.shards) - 1
    )
    assert read_back(out) == texts
    plan.write(out / "plan.json")
    (out / "manifest.json").unlink()
    texts[0] = "another text"
    with pytest.raises(ConfigError, match="made from other texts than the data set has now"):
        tokenize(["hub:some/texts"], out, BYTES, processes=2, shard_bytes=1000)


def test_new_tokenizers_are_made_from_the_beginning_once(tmp_path: Path) -> None:
    source, out = json_lines(tmp_path / "a.jsonl", documents(60)), tmp_path / "out"
    words = choose_tokenizer("bpe:300", [source], out)
    assert fingerprint(words) == fingerprint(bpe_tokenizer(documents(60), 300))
    tokenize([source], out, words, tokenizer_from="bpe:300", processes=1)
    source.write_text("")  # what is in the directory is used, and the texts are not read again
    assert fingerprint(choose_tokenizer("bpe:300", [source], out)) == fingerprint(words)
    assert fingerprint(choose_tokenizer(str(out / "tokenizer"), [source], out)) == fingerprint(words)
    with pytest.raises(TextError, match=r"no tokenizer 'bpe:many'"):
        choose_tokenizer("bpe:many", [json_lines(source, ["a"])], tmp_path / "new")
    with pytest.raises(TextError, match=r"no tokenizer 'nowhere'"):
        choose_tokenizer("nowhere", [source], tmp_path / "new")


def test_lengths_and_duplicates_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*documents(40), "again", "again", "once more", "again", "once more", "x" * 64, "x" * 63]
    shards = ShardSet(shards_of(tmp_path, texts))
    for at_once in (1 << 22, 5):  # in one pass, and in ten
        monkeypatch.setattr("triptych.shards.inspection._AT_ONCE", at_once)
        found = contents(shards)
        sizes = [len(text.encode()) for text in texts]
        assert (found.documents, found.tokens, found.mean) == (len(texts), sum(sizes), sum(sizes) / len(texts))
        assert (found.shortest, found.longest) == (min(sizes), max(sizes))
        powers = [size.bit_length() - 1 for size in sizes]
        assert found.lengths == {power: powers.count(power) for power in sorted(set(powers))}
        assert found.duplicates == len(texts) - len(set(texts))
        assert found.repeated == [(texts.index("again"), 3), (texts.index("once more"), 2)]


def test_differences_are_in_words() -> None:
    plan = ShardManifest(
        tokenizer="a", vocab_size=1, tokenizer_from="", field="text", separator=None, shard_bytes=1,
        inputs=[{"path": "x"}, {"path": "y"}],
    )  # fmt: skip
    other = plan.model_copy(update={"field": "body", "inputs": plan.inputs[::-1]})
    assert differences(plan, other) == ["field is 'body', and it was 'text'"]
    assert differences(plan, other.model_copy(update={"field": "text"})) == ["the inputs have another order"]


def test_a_part_survives_its_way_to_a_worker() -> None:
    part = InputPart(texts=("ein ☃", ""), digest="d")
    assert InputPart.from_json(json.loads(json.dumps(part.to_json()))) == part
    assert tokenize_worker.ShardWork.__dataclass_params__.frozen  # type: ignore[attr-defined]
