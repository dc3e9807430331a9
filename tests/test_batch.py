"""`triptych batch`: the routes' own answers, in the order of the requests, each exactly once however runs end."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from cli_models import Captured, refused, said
from test_serve_worker import letters
from triptych.batches import requests as runs
from triptych.batches.journal import Journal, encoded
from triptych.cli import main
from triptych.run_lock import RunLock

PATIENCE = 120.0  # seconds; machines may be slow and shared


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "letters"
    letters().save(path)
    return path


def request(number: int, **body: Any) -> dict[str, Any]:
    prompt = "abcdefghijklmnopqrstuvwxyz"[number % 20 :][: 2 + number % 5]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0} | body
    return {"custom_id": f"number {number}", "method": "POST", "url": "/v1/completions", "body": body}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines), "utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def text_of(record: dict[str, Any]) -> str:
    return record["response"]["body"]["choices"][0]["text"]


BAD = [  # a line, and what its record says of it
    ("{", "no JSON"),
    ("[1]", "no JSON object"),
    ('"' + "a" * 100, "no JSON"),
    (json.dumps(request(1) | {"custom_id": "get", "method": "GET"}), "method must be POST"),
    (json.dumps(request(1, stream=True) | {"custom_id": "stream"}), "has stream"),
    (json.dumps(request(1) | {"custom_id": "more", "bdoy": 1}), "'bdoy' is no field of a request (did you mean 'body'"),
    (json.dumps(request(1) | {"custom_id": ""}), "no custom_id"),
    (json.dumps(request(1) | {"custom_id": "url", "url": "v1"}), "url must be a route"),
    (json.dumps(request(1) | {"custom_id": "list", "body": [1]}), "body must be a JSON object"),
]


def test_answers_are_the_routes_own_in_the_order_of_the_requests(model: Path, tmp_path: Path, capsys: Captured) -> None:
    good = [request(0, max_tokens=60), *(request(i) for i in range(1, 9))]
    refusals = [request(20, temprature=1), request(21) | {"url": "/v1/nowhere"}, request(22) | {"url": "/"}]
    refusals += [request(23, model="other")]
    lines = [*good[:4], "", *(line for line, _ in BAD), *refusals, *good[4:]]
    out = tmp_path / "out.jsonl"
    printed, _ = said(batch(written(tmp_path / "in.jsonl", *lines), out, model, "--json"), capsys)
    records = read(out)
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in records)
    assert len({one["id"] for one in records}) == len(records) == 9 + len(BAD) + 4
    ours = letters()
    for record, line in zip(records[:4] + records[-5:], good, strict=True):
        assert (record["custom_id"], record["error"]) == (line["custom_id"], None)
        assert record["response"]["status_code"] == 200
        body = line["body"]
        assert text_of(record) == ours.generate([body["prompt"]], max_new_tokens=body["max_tokens"])[0].text
    for record, (line, said_of_it) in zip(records[4:], BAD, strict=False):
        assert record["response"] is None
        assert said_of_it in record["error"]["message"], line
    assert [one["custom_id"] for one in records[7:9]] == ["get", "stream"]
    for record, line in zip(records[-9:-5], refusals, strict=True):
        assert record["custom_id"] == line["custom_id"]
        assert record["response"]["status_code"] in (400, 404, 405)
        assert record["error"] is None
        assert record["response"]["body"]["error"]["message"]
    summary = json.loads(printed)
    assert (summary["answered"], summary["refused"], summary["bad_lines"]) == (9, 4, len(BAD))
    assert not (tmp_path / "out.jsonl.part").exists()


def batch(requests: Path, out: Path, model: Path, *more: str) -> list[str]:
    return ["batch", str(requests), str(out), "--model", f"letters={model}", *more]


# ---------------------------------------------------------------- runs that end early


def journal_of(out: Path) -> Path:
    return out.with_name(out.name + ".part") / "records.jsonl"


def finished(out: Path) -> list[bytes]:
    """The whole lines of a journal behind its head."""
    try:
        data = journal_of(out).read_bytes()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)[1:]


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_early_goes_on_and_keeps_what_was_done(
    model: Path, tmp_path: Path, capsys: Captured, number: int
) -> None:
    lines = [request(i, max_tokens=200, temperature=1.0, seed=i, logit_bias={"0": -100, "1": -100}) for i in range(300)]
    out, file = tmp_path / "out.jsonl", written(tmp_path / "in.jsonl", *lines)
    argv = batch(file, out, model, "--max-rows", "2")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    kept: list[bytes] = []
    for _ in range(2):
        # A handler of its own: in a run that a shell started in the background, children would ignore SIGINT.
        program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        program += "from triptych.cli import main; sys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen([sys.executable, "-c", program, *argv], stderr=subprocess.PIPE, env=environment)
        began = time.monotonic()
        while len(finished(out)) < len(kept) + 3:  # what this run has done itself, so that it has begun
            assert process.poll() is None
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.005)
        process.send_signal(number)
        _, notes = process.communicate(timeout=PATIENCE)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
        assert not out.exists()
        if number == signal.SIGINT:
            assert b"the same command goes on from there" in notes
        done = finished(out)
        assert done[: len(kept)] == kept
        kept = done
    assert 6 <= len(kept) < len(lines)
    printed, notes = said([*argv, "--json"], capsys)
    assert json.loads(printed)["resumed"] == len(kept)
    records = read(out)
    assert [one["custom_id"] for one in records] == [one["custom_id"] for one in lines]
    before = {entry["line"]: entry["record"] for entry in map(json.loads, kept)}
    assert all(records[i] == record for i, record in before.items())  # their ids too: nothing was answered again


def test_a_line_that_was_cut_off_is_answered_again(model: Path, tmp_path: Path, capsys: Captured) -> None:
    lines = [request(i) for i in range(5)]
    out, file = tmp_path / "out.jsonl", written(tmp_path / "in.jsonl", *lines)
    said(batch(file, out, model), capsys)
    whole = out.read_bytes()
    out.unlink()
    entries = []
    for i, record in enumerate(map(json.loads, whole.splitlines())):
        entries.append(encoded({"line": i, "status": 200, "record": record}))
    with runs.BatchInput(file) as requests:
        head = {"requests": 5, "digest": requests.digest, "models": {"letters": str(model)}}
    journal_of(out).parent.mkdir()
    journal_of(out).write_bytes(encoded(head) + entries[3] + entries[0] + entries[4][:-7])
    printed, _ = said(batch(file, out, model, "--json"), capsys)
    assert json.loads(printed)["resumed"] == 2
    again = read(out)
    assert [one["custom_id"] for one in again] == [one["custom_id"] for one in lines]
    first = [json.loads(line) for line in whole.splitlines()]
    assert [text_of(one) for one in again] == [text_of(one) for one in first]
    assert [again[i]["id"] == first[i]["id"] for i in range(5)] == [True, False, False, True, False]

    # Killed between the file and the removal of the journal: the file is written again, and nothing is computed.
    journal_of(out).parent.mkdir()
    journal_of(out).write_bytes(encoded(head) + b"".join(entries))
    nowhere = json.loads(said(batch(file, out, model, "--json"), capsys)[0])
    assert (nowhere["resumed"], out.read_bytes()) == (5, whole)

    # Damaged in the middle, which no run does.
    out.unlink()
    journal_of(out).parent.mkdir()
    journal_of(out).write_bytes(encoded(head) + b"{}\n" + entries[0])
    assert "is damaged" in refused(batch(file, out, model), capsys)


def test_a_full_disk_is_one_line_and_loses_nothing(
    model: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = written(tmp_path / "in.jsonl", *(request(i) for i in range(6))), tmp_path / "out.jsonl"
    append, calls = Journal._append, []

    def full(self: Journal, entry: Any) -> None:
        calls.append(entry)
        if len(calls) > 3:  # the head and two records are there; of the next a half
            self.file.seek(self.end)
            self.file.write(encoded(entry)[:20])
            raise OSError(errno.ENOSPC, "no space")
        append(self, entry)

    monkeypatch.setattr(Journal, "_append", full)
    _, err = said(batch(file, out, model), capsys, 1)
    assert "no space left on the disk" in err.splitlines()[-1]
    monkeypatch.setattr(Journal, "_append", append)
    assert json.loads(said(batch(file, out, model, "--json"), capsys)[0])["resumed"] == 2
    assert [one["custom_id"] for one in read(out)] == [f"number {i}" for i in range(6)]


# ---------------------------------------------------------------- misuse


def test_misuse_is_one_line_and_changes_nothing(model: Path, tmp_path: Path, capsys: Captured) -> None:
    file, out = written(tmp_path / "in.jsonl", request(1), request(2)), tmp_path / "out.jsonl"

    def problem(requests: Path, answers: Path) -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        line = refused(batch(requests, answers, model), capsys)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return line

    assert "give another OUT" in problem(file, file)
    link = tmp_path / "link.jsonl"
    link.symlink_to(file)
    assert "is the file of the requests" in problem(file, link)
    assert "is a directory" in problem(file, tmp_path)
    assert "is no file" in problem(tmp_path, out)
    assert "no such file" in problem(tmp_path / "nothing", out)
    assert "cannot be written" in problem(file, tmp_path / "nowhere" / "out.jsonl")
    assert "it is empty" in problem(written(tmp_path / "empty.jsonl"), out)
    assert "has no request (line 2: it is no JSON)" in problem(written(tmp_path / "text.jsonl", "{}", "hello"), out)
    twice = written(tmp_path / "twice.jsonl", request(1), request(2), request(1))
    assert "lines 1 and 3 have the custom_id 'number 1'" in problem(twice, out)
    out.write_text("mine")
    assert "exists already" in problem(file, out)
    out.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "LONGEST_LINE", 400)
        long = written(tmp_path / "long.jsonl", request(1), request(2, user="a" * 1000), request(3))
        said(batch(long, out, model), capsys)
    errors = [one["error"] and one["error"]["message"] for one in read(out)]
    assert errors == [None, "the line is no request: it has more than 400 bytes", None]


def test_one_process_and_one_set_of_requests_at_a_time(model: Path, tmp_path: Path, capsys: Captured) -> None:
    file, out = written(tmp_path / "in.jsonl", request(1)), tmp_path / "out.jsonl"
    folder = journal_of(out).parent
    folder.mkdir()
    with RunLock(folder):
        assert "is in use by another run of this process" in refused(batch(file, out, model), capsys)
    journal_of(out).write_bytes(encoded({"requests": 1, "digest": "0", "models": {}}))
    assert "is of other requests or models" in refused(batch(file, out, model), capsys)
    assert journal_of(out).exists()
    journal_of(out).unlink()
    assert main(batch(file, out, model)) == 0
