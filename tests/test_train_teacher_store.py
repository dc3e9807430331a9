"""The store of a teacher's logits: what it holds, that it goes on after a kill, and which one is refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import cli_models
import triptych
from test_train_distill import losses, recipe
from triptych.errors import CheckpointError, ConfigError, TriptychError
from triptych.train import prepare
from triptych.train.distill import TeacherSource
from triptych.train.objectives import MAX_LOGITS, collate


@pytest.mark.parametrize("objective", ["causal", "seq2seq", "chat"])
def test_the_store_is_the_teacher_and_it_runs_once(
    tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    distill = {"store": str(store), "temperature": 0.7, "weight": 1.0}
    made = recipe(tmp_path, objective, distill=distill)
    notes: list[str] = []
    first = losses(made, on_note=notes.append)
    assert sum("once" in note for note in notes) == 1
    monkeypatch.setattr(TeacherSource, "read", lambda *_: pytest.fail("the teacher runs again"))
    assert losses(made) == first  # the same rows
    assert losses(recipe(tmp_path, objective, distill=distill, run={"seed": 3, "rows": 2})) != first
    monkeypatch.undo()
    job = prepare(made)
    rows, (file,) = job.trainer.data.draw(0, 0, 4), list(store.iterdir())
    stored = collate(rows).nats(job.trainer.module, MAX_LOGITS, None).item()
    online = prepare(recipe(tmp_path, objective, distill=distill | {"store": None, "top": 64}))
    running = online.trainer.data.draw(0, 0, 1)[0].distillation  # type: ignore[attr-defined]
    apart = collate([running.row(one) for one in rows]).nats(job.trainer.module, MAX_LOGITS, None).item()
    assert abs(stored - apart) < 3e-4 * apart  # of fp16
    tensors = load_file(file)
    for name in tensors:  # the control: another token's distribution
        tensors[name] = tensors[name].roll(1, 0)
    job.store._parts[0] = tensors["log_probabilities"], tensors["ids"]  # type: ignore[union-attr]
    assert abs(collate(rows).nats(job.trainer.module, MAX_LOGITS, None).item() - apart) > 3e-3 * apart


def test_any_row_is_read_from_any_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.train.teacher_store.PART", 100)
    made = recipe(tmp_path, distill={"store": str(tmp_path / "store"), "top": 3})
    job = prepare(made)
    module, rows = job.trainer.module, job.trainer.data.examples
    assert job.store.count > 5
    job.store.complete(job.trainer.ranks, lambda _: None)
    monkeypatch.undo()
    whole = prepare(recipe(tmp_path, distill={"store": str(tmp_path / "whole"), "top": 3}))
    assert whole.store.count == 1
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    for some in (order[:5], order[5:9], order[::7]):
        read, wanted = (
            collate([one.trainer.data.examples[i] for i in some]).nats(module, MAX_LOGITS, None) for one in (job, whole)
        )
        assert abs((read - wanted).item()) < 1e-3 * wanted.item()


KILLED = """
import os, signal, sys
from triptych.train import check_recipe, prepare, teacher_store
write, done = teacher_store.write_safetensors, []
def killed(file, tensors, metadata):
    if len(done) == 2:
        file.write(b"half of a part")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(write(file, tensors, metadata))
teacher_store.PART, teacher_store.write_safetensors = 100, killed
prepare(check_recipe(eval(sys.argv[1]))).run()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process")
def test_a_store_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, whole = tmp_path / "store", tmp_path / "whole"
    made = recipe(tmp_path, distill={"store": str(store), "top": 3})
    tables = made.model_dump(exclude_none=True, exclude_defaults=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", KILLED, repr(tables)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    written = {path: path.stat().st_mtime_ns for path in store.iterdir() if path.suffix == ".safetensors"}
    assert len(written) == 2
    assert len(list(store.iterdir())) == 3  # and what the killed process began
    monkeypatch.setattr("triptych.train.teacher_store.PART", 100)
    monkeypatch.setattr("triptych.train.teacher_store.replacing", stopped_once(2))
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C
        prepare(made).run()
    assert len(list(store.iterdir())) == 4
    after = losses(made)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    again = losses(recipe(tmp_path, distill={"store": str(whole), "top": 3}))
    assert np.abs(np.subtract(after, again)).max() < 1e-3
    assert [path.name for path in sorted(store.iterdir())] == [path.name for path in sorted(whole.iterdir())]


def stopped_once(after: int) -> Callable[[Path], Any]:
    """`replacing`, which Ctrl-C stops once, after so many files."""
    from triptych.checkpoints.save import replacing

    calls: list[Path] = []

    def stopping(path: Path) -> Any:
        calls.append(path)
        if len(calls) == after + 1:
            raise KeyboardInterrupt
        return replacing(path)

    return stopping


# ---------------------------------------------------------------- what is refused


def another_teacher(folder: Path) -> dict[str, Any]:
    model = triptych.load(cli_models.checkpoint("decoder"))
    triptych.create(model.hf, model.tokenizer, seed=4).save(folder / "other")
    return {"distill": {"teacher": str(folder / "other")}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (another_teacher, "has the logits of another teacher; name another distill.store, or delete this one"),
        (lambda folder: {"run": {"length": 20}}, "has the logits of other rows: the data, run.length"),
        (lambda folder: {"distill": {"top": 4}}, r"has distill\.top = '3', and not 4"),
        (lambda folder: {"distill": {"temperature": 3.0}}, r"has distill\.temperature = '1\.0', and not 3\.0"),
    ],
    ids=["teacher", "rows", "top", "temperature"],
)
def test_a_store_of_something_else(tmp_path: Path, changes: Callable[[Path], dict[str, Any]], message: str) -> None:
    store = {"store": str(tmp_path / "store"), "top": 3}
    before = losses(recipe(tmp_path, distill=store))
    other = changes(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(recipe(tmp_path, **other | {"distill": store | other.get("distill", {})}))
    assert "\n" not in str(caught.value)
    assert losses(recipe(tmp_path, distill=store)) == before  # nothing of it has changed
    (file,) = (tmp_path / "store").iterdir()
    metadata = read_metadata(file)
    save_file(load_file(file), file, metadata | {"tokenizer": "0" * 64})
    with pytest.raises(ConfigError, match="has the logits of a teacher with another tokenizer"):
        prepare(recipe(tmp_path, distill=store))


def read_metadata(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def test_a_damaged_store_is_one_line(tmp_path: Path) -> None:
    store = tmp_path / "store"
    made = recipe(tmp_path, distill={"store": str(store), "top": 3})
    losses(made)
    (file,) = store.iterdir()
    content, tensors, metadata = file.read_bytes(), load_file(file), read_metadata(file)

    def refused(message: str) -> None:
        with pytest.raises(TriptychError, match=message) as caught:
            losses(made)
        assert "\n" not in str(caught.value)
        assert str(store) in str(caught.value)

    for length in (0, 4, 200, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        refused("safetensors|bytes|header|empty")
    for name, value in (("log_probabilities", float("nan")), ("log_probabilities", 2.0), ("ids", 257), ("ids", -1)):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name][:] = value
        save_file(changed, file, metadata)
        refused("holds numbers that no teacher wrote; delete it")
    save_file({key: tensor[1:].clone() for key, tensor in tensors.items()}, file, metadata)
    refused("has not the [0-9,]+ x 3 logits of this part")
    save_file({"ids": tensors["ids"]}, file, metadata)
    refused("has not the [0-9,]+ x 3 logits of this part")
    save_file(tensors, file)
    refused("is not a part of a teacher's logits")
    file.unlink()
    losses(made)
    (store / "notes.txt").write_text("mine")
    refused("holds 'notes.txt', which no teacher wrote; name a new directory")


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        prepare(recipe(tmp_path, distill={"store": str(tmp_path / "file")}))
    with pytest.raises(ConfigError, match="which no teacher wrote; name a new directory"):
        prepare(recipe(tmp_path, distill={"store": str(cli_models.checkpoint("decoder"))}))
    for objective, changes in (("masked", {}), ("corruption", {}), ("seq2seq", {"hidden": 0.5})):
        given: dict[str, Any] = {"distill": {"store": str(tmp_path / objective)}}
        made = recipe(tmp_path, objective, **given)
        made = made.model_copy(update={"objective": made.objective.model_copy(update=changes)})
        with pytest.raises(ConfigError, match=f"those of objective {objective} with these data are drawn anew"):
            prepare(made)


def test_a_full_disk_leaves_the_parts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.train.teacher_store.PART", 100)
    made, written = recipe(tmp_path, distill={"store": str(tmp_path / "store"), "top": 3}), list[int]()

    def full(file: Any, *_: Any) -> None:
        written.append(1)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        file.write(b"")
        right(file, *_)

    from triptych.train import teacher_store

    right = teacher_store.write_safetensors
    monkeypatch.setattr(teacher_store, "write_safetensors", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device"):
        losses(made)
    assert len(list((tmp_path / "store").iterdir())) == 2
    monkeypatch.setattr(teacher_store, "write_safetensors", right)
    losses(made)


def test_two_runs_write_one_store(tmp_path: Path) -> None:
    """Both write the same parts, each whole."""
    code = "import sys; from triptych.train import check_recipe, prepare, teacher_store; teacher_store.PART = 50;"
    code += "prepare(check_recipe(eval(sys.argv[1]))).run()"
    made = recipe(tmp_path, distill={"store": str(tmp_path / "store"), "top": 3}, run={"steps": 1})
    tables = repr(made.model_dump(exclude_none=True, exclude_defaults=True))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([sys.executable, "-c", code, tables], env=environment) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    assert all(path.suffix == ".safetensors" for path in (tmp_path / "store").iterdir())
