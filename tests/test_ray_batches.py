"""Commands on a cluster of Ray on this machine: each record once and the same text, also when processes are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data", reason="needs the extra ray")
pytest.importorskip("starlette", reason="needs the extra serve")

import psutil

from cli_models import checkpoint
from test_records import RECORDS, read, written
from test_serve_worker import letters
from triptych.batches.journal import part_directory

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]  # each starts a cluster
PATIENCE = 300.0  # seconds; machines may be slow and shared


def command(argv: list[str]) -> "subprocess.Popen[str]":
    """The command in a process of its own: a process has one cluster."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "triptych", *argv]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def said(argv: list[str], code: int = 0) -> tuple[str, str]:
    process = command(argv)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    return out, err


def requests(path: Path, count: int, tokens: int = 6) -> Path:
    def one(i: int) -> dict[str, Any]:
        body = {"prompt": "abcdefghij"[i % 7 :][:3], "max_tokens": tokens, "temperature": 0.8, "seed": i}
        return {"custom_id": f"number {i}", "method": "POST", "url": "/v1/completions", "body": body}

    return written(path, [*map(one, range(count)), "no request"])


def texts(path: Path) -> list[Any]:
    """What each record says; a random id and the time are no part of it."""
    return [(one["custom_id"], one["error"] or one["response"]["body"]["choices"]) for one in read(path)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "letters"
    letters().save(path)
    return path


def test_a_batch_is_the_same_as_alone_when_a_writer_and_the_driver_are_killed(model: Path, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 900, 40)
    argv = ["--model", f"letters={model}", "--json"]
    said(["batch", str(file), str(tmp_path / "alone.jsonl"), *argv])
    out = tmp_path / "out.jsonl"
    argv = ["batch", str(file), str(out), *argv, "--ray", "local", "--actors", "2"]
    process = command(argv)
    began, checked, killed = time.monotonic(), False, 0
    while len(list(part_directory(out).glob("checkpoint/*.parquet"))) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began < PATIENCE
        below = psutil.Process(process.pid).children(recursive=True)
        names = {one: name_of(one) for one in below}
        if not checked and any(name.startswith("ray::MapWorker") for name in names.values()):
            assert_on_loopback(below)
            checked = True
        for one, name in names.items():
            if not killed and name.startswith("ray::Write"):
                one.kill()
                killed += 1
        time.sleep(0.01)
    assert checked
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    printed, _ = said(argv)
    assert json.loads(printed)["resumed"] > 0
    assert texts(out) == texts(tmp_path / "alone.jsonl")
    assert not part_directory(out).exists()


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def assert_on_loopback(processes: list[psutil.Process]) -> None:
    """No process of the cluster listens on an address that another machine reaches."""
    listening = set()
    for one in processes:
        try:
            listening |= {c.laddr.ip for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening


def test_vectors_and_an_error_are_as_alone(tmp_path: Path) -> None:
    records = [*RECORDS, {"id": "long", "text": "mill " * 500}]
    file, found = written(tmp_path / "in.parquet", records), []
    for name, more in (("alone", []), ("cluster", ["--ray", "local"])):
        out = tmp_path / f"{name}.parquet"
        said(["encode", str(checkpoint("encoder")), "--records", str(file), "--out", str(out), *more])
        found.append(read(out))
    for ours, theirs in zip(*found, strict=True):
        assert (ours["id"], ours["error"]) == (theirs["id"], theirs["error"])
        assert ours["vector"] == (None if theirs["vector"] is None else pytest.approx(theirs["vector"], abs=1e-5))


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    file, out = written(tmp_path / "in.jsonl", RECORDS), tmp_path / "out.jsonl"
    argv = ["encode", str(tmp_path / "nothing"), "--records", str(file), "--out", str(out), "--ray", "local"]
    _, err = said(argv, 1)
    assert err.splitlines()[-1].startswith("error: ")
    assert "nothing" in err.splitlines()[-1]
    assert not out.exists()


def test_a_search_finds_the_same_and_keeps_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for i, one in enumerate(RECORDS):
        (folder / f"{i}.txt").write_text(str(one["text"]))
    found = []
    for name, more in (("alone", []), ("cluster", ["--ray", "local"])):
        index = tmp_path / f"{name}.safetensors"
        argv = ["search", str(folder), "river", "--model", str(checkpoint("encoder")), "--index", str(index), "--json"]
        found.append(json.loads(said([*argv, *more])[0]))
        assert json.loads(said(argv)[0])["embedded"] == 0
    alone, cluster = found
    assert cluster["embedded"] == alone["embedded"] == len(RECORDS)
    for ours, theirs in zip(alone["results"], cluster["results"], strict=True):
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)


def test_shards_are_byte_for_byte_those_of_one_machine(tmp_path: Path) -> None:
    inputs = [str(written(tmp_path / f"{i}.txt", [one["text"]] * 9000)) for i, one in enumerate(RECORDS[:8])]
    argv = ["data", "tokenize", *inputs, "--tokenizer", "byte", "--shard-mb", "1", "--json"]
    said([*argv, "--out", str(tmp_path / "alone")])
    said([*argv, "--out", str(tmp_path / "cluster"), "--ray", "local"])
    alone, cluster = ({one.name: one for one in (tmp_path / name).glob("shard-*")} for name in ("alone", "cluster"))
    assert len(alone) > 1
    assert {name: one.read_bytes() for name, one in alone.items()} == {
        name: one.read_bytes() for name, one in cluster.items()
    }
    assert not list((tmp_path / "cluster").glob(".shards*"))
