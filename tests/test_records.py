"""Files of records on one machine: each once, in order, however runs end; and what `--ray` refuses."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs pyarrow, of the extra data")

import pyarrow
from pyarrow import parquet

from cli_models import Captured, checkpoint, refused, said
from triptych.batches import ray_data
from triptych.batches.journal import Journal, part_directory
from triptych.batches.ray_data import Cluster
from triptych.batches.records import RecordInput, Work, each_record, run_here
from triptych.errors import CheckpointError, ConfigError, InputError, TextError
from triptych.model import load

TEXT = "the old mill stands where the river bends and the ship came in on the evening tide"
RECORDS = [{"id": f"record {i}", "text": TEXT[4 * i : 4 * i + 25]} for i in range(11)]


def written(path: Path, rows: Sequence[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows), "utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(parquet.read_table(path).to_pylist())
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_vectors_of_records_are_those_of_their_texts(suffix: str, tmp_path: Path, capsys: Captured) -> None:
    file, out = written(tmp_path / f"in{suffix}", RECORDS), tmp_path / f"out{suffix}"
    argv = ["encode", str(checkpoint("encoder")), "--records", str(file), "--out", str(out)]
    printed, _ = said([*argv, "--json"], capsys)
    assert json.loads(printed)["answered"] == len(RECORDS)
    found = read(out)
    assert [one["id"] for one in found] == [one["id"] for one in RECORDS]
    expected = load(checkpoint("encoder")).encode([one["text"] for one in RECORDS]).numpy()
    np.testing.assert_allclose(np.array([one["vector"] for one in found]), expected, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3  # so that a vector of another record is refused
    assert not part_directory(out).exists()
    assert "exists already" in refused(argv, capsys)


def test_a_record_that_is_refused_has_the_reason_and_stops_no_other(tmp_path: Path, capsys: Captured) -> None:
    records = [*RECORDS[:2], {"id": "long", "text": "mill " * 500}, *RECORDS[2:4]]
    out = tmp_path / "out.jsonl"
    file = written(tmp_path / "in.jsonl", records)
    argv = ["encode", str(checkpoint("encoder")), "--records", str(file), "--out", str(out), "--json"]
    printed, _ = said(argv, capsys)
    assert [json.loads(printed)[name] for name in ("answered", "refused")] == [4, 1]
    found = read(out)
    assert [one["id"] for one in found] == [one["id"] for one in records]
    assert ["error" in one for one in found] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"id": "a", "text": "x"}, {"id": "b", "text": "y"}, {"id": "a", "text": "z"}], "has the id 'a' of"),
        ([{"id": 1, "text": "x"}, {"id": "1", "text": "y"}], "some ids are texts and some are numbers"),
        ([{"text": "x"}], "its id is None"),
        ([{"id": "", "text": "x"}], "its id is ''"),
        ([{"id": True, "text": "x"}], "its id is True"),
        ([{"id": 1.5, "text": "x"}], "its id is 1.5"),
        ([{"id": "a", "text": None}], "its text is None"),
        ([{"id": "a"}], "its text is None"),
        (["{"], "is not JSON"),
        ([], "has no record"),
    ],
)
def test_records_without_an_id_of_their_own_are_refused(rows: list[Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, TextError), match=problem):
        RecordInput(written(tmp_path / "in.jsonl", rows), "text")


def test_files_that_hold_no_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"id": "a", "text": "\xff"}\n')
    (tmp_path / "text.parquet").write_text("no Parquet")
    cases = {"in.csv": "is not .jsonl or .parquet", "no.jsonl": "no such file", "no.parquet": "no file"}
    for name, problem in (cases | {"bytes.jsonl": "is not UTF-8", "text.parquet": "is not Parquet"}).items():
        with pytest.raises((InputError, TextError), match=problem):
            RecordInput(tmp_path / name, "text")


CALLS: list[int] = []


def counting(fail_after: int = 0) -> Any:
    def double(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if fail_after and len(CALLS) >= fail_after:
            raise KeyboardInterrupt
        CALLS.extend(len(row["text"]) for row in rows)
        return [{"length": len(row["text"]), "entities": []} for row in rows]

    return each_record(double)


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    CALLS.clear()
    lines = RecordInput(written(tmp_path / "in.parquet", RECORDS), "text")
    out = tmp_path / "out.parquet"
    work = Work(counting, {}, at_once=3)
    with (
        pytest.raises(KeyboardInterrupt),
        Journal(out, work.head(lines)) as journal,
    ):
        run_here(Work(counting, {"fail_after": 6}, at_once=3), lines, journal, lambda done: None)
    assert not out.exists()
    assert len(CALLS) == 6
    with Journal(out, work.head(lines)) as journal:
        summary = run_here(work, lines, journal, lambda done: None)
    assert (summary.resumed, summary.answered, len(CALLS)) == (6, len(RECORDS), len(RECORDS))
    assert [(one["id"], one["length"]) for one in read(out)] == [(one["id"], len(one["text"])) for one in RECORDS]
    other = RecordInput(written(tmp_path / "in.parquet", RECORDS[:4]), "text")
    assert other.digest != lines.digest


def test_columns_of_parquet_are_the_fields_of_all_records(tmp_path: Path) -> None:
    from triptych.batches.journal import encoded, write_results

    rows: list[dict[str, Any]] = [{"id": i, "named": []} for i in range(1100)]
    rows += [{"id": 1100, "named": [{"text": "mill", "p": 0.5}]}, {"id": 1101, "error": "too long"}]
    write_results(tmp_path / "out.parquet", lambda: map(encoded, rows), tmp_path)
    found = read(tmp_path / "out.parquet")
    assert [one["id"] for one in found] == [*range(1102)]
    assert found[1100]["named"] == [{"text": "mill", "p": 0.5}]
    assert (found[1101]["error"], found[0]["error"]) == ("too long", None)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: Captured) -> None:
    model, file = str(checkpoint("encoder")), str(written(tmp_path / "in.jsonl", RECORDS))
    out = str(tmp_path / "out.jsonl")
    for argv, problem in [
        (["encode", model, "--records", file], "needs --out FILE"),
        (["encode", model, "a text", "--records", file, "--out", out], "leave out 'a text'"),
        (["encode", model, "a text", "--ray", "local"], "--ray needs --records FILE"),
        (["tag", model, "a text", "--out", out], "--out needs --records FILE"),
        (["transcribe", model], "no file given"),
        (["encode", model, "--records", file, "--out", out, "--actors", "2"], "--actors is for --ray"),
        (["encode", model, "--records", file, "--out", str(tmp_path / "out.npy")], "--out"),
    ]:
        assert problem in refused(argv, capsys, 2)
    assert "is the file of the requests" in refused(["encode", model, "--records", file, "--out", file], capsys)


def test_without_ray_one_line_says_what_to_install(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_data, "find_spec", lambda name: None)
    model, file = str(checkpoint("encoder")), str(written(tmp_path / "in.jsonl", RECORDS))
    texts = written(tmp_path / "text.txt", ["the old mill"])
    out = tmp_path / "out.jsonl"
    ray = ["--ray", "local"]
    for argv in (
        ["encode", model, "--records", file, "--out", str(out), *ray],
        ["tag", model, "--records", file, "--out", str(out), *ray],
        ["transcribe", model, "--records", file, "--out", str(out), *ray],
        ["batch", file, str(out), "--model", model, *ray],
        ["search", str(tmp_path), "mill", "--model", model, "--index", str(tmp_path / "index"), *ray],
        ["data", "tokenize", str(texts), "--out", str(tmp_path / "tokens"), "--tokenizer", "byte", *ray],
    ):
        assert "pip install -e '.[ray]'" in refused(argv, capsys), argv
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "text.txt"]


@pytest.mark.parametrize("address", ["", "ray://head:10001", "head", "head:port", "a b:1", "auto:", "http://head:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="is no address"):
        Cluster(address)
    assert [Cluster(one).address for one in ("local", "auto", "10.0.0.1:6379", "[::1]:6379")]


def test_actors_share_the_cores_of_a_cluster() -> None:
    def nodes(*cores: int) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": float(one)} if one else {}} for one in cores]

    def share(*cores: int, actors: int | None = None) -> tuple[int, int, int]:
        found = ray_data._share_of_cluster(nodes(*cores), actors, gpu=False)
        return found.actors, found.cores, found.threads

    assert share(8, 8, 0) == (2, 7, 8)
    assert share(8, 4, actors=4) == (4, 1, 2)
    assert share(2, actors=1) == (1, 1, 2)
    with pytest.raises(InputError, match="has 1 core, and --actors 1 needs one more"):
        share(1)
    with pytest.raises(InputError, match="--actors 4 needs one more"):
        share(2, 2, actors=4)


def test_the_error_of_a_model_is_taken_out_of_those_of_ray() -> None:
    text = "ray::MapWorker failed\n  File x, line 3\ntriptych.errors.ConfigError: the model is wrong\n\nmore of Ray"
    ours = ray_data._of_ours(RuntimeError(text))
    assert (type(ours), str(ours)) == (ConfigError, "the model is wrong")
    other = ray_data._of_ours(RuntimeError("no node\ntriptych.errors.counted: no error"))
    assert (type(other), str(other)) == (CheckpointError, "no error")
    assert str(ray_data._of_ours(RuntimeError("no node\nmore"))).startswith(
        "the cluster failed: RuntimeError: no node;"
    )


def test_a_run_with_ray_and_one_without_do_not_mix(tmp_path: Path) -> None:
    lines = RecordInput(written(tmp_path / "in.jsonl", RECORDS), "text")
    work, out = Work(counting, {}, at_once=3), tmp_path / "out.jsonl"
    directory = part_directory(out)
    directory.mkdir()
    (directory / "records.jsonl").write_text("")
    with pytest.raises(InputError, match="of a run without --ray"):
        ray_data._prepare(directory, work.head(lines), lines, 3)
    (directory / "records.jsonl").unlink()
    ray_data._prepare(directory, work.head(lines), lines, 3)
    assert len(list((directory / "input").iterdir())) == 4
    ray_data._prepare(directory, work.head(lines), lines, 3)  # the same run goes on
    with pytest.raises(InputError, match="of other records, models or options"):
        ray_data._prepare(directory, Work(counting, {"fail_after": 1}, 3).head(lines), lines, 3)
    with pytest.raises(InputError, match="of a run with --ray"), Journal(out, work.head(lines)):
        pass
    assert (directory / "run.json").exists()
