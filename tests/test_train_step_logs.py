"""The logs of a run's steps: one line for each, also where a run was interrupted between two checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

from test_train_preference import TEXTS, recipe
from triptych.errors import CheckpointError, InputError, TriptychError
from triptych.train import Event, prepare, resume, step_logs


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def run_settings(out: Path, *logs: str) -> dict[str, Any]:
    return {"steps": 6, "save_every": 0.5, "evaluate_every": 0.5, "out": str(out), "logs": list(logs)}


def test_each_step_is_one_line(tmp_path: Path) -> None:
    events: list[Event] = []
    out = tmp_path / "run"
    job = prepare(recipe(tmp_path, TEXTS, run=run_settings(out, "jsonl")))
    job.run(events.append)
    assert [one["step"] for one in lines(out)] == [1, 2, 3, 4, 5, 6]
    for line, event in zip(lines(out), events, strict=True):
        wanted = {"loss": event.loss, "lr": event.lr, "norm": event.norm, "progress": event.progress}
        assert {name: line[name] for name in wanted} == wanted
        assert ("held_out/margin" in line) == (event.score is not None)
        if event.score is not None:
            assert line["held_out/margin"] == event.score.metrics["margin"]
    assert sum(event.score is not None for event in events) == 2


def test_a_run_that_goes_on_writes_no_step_twice(tmp_path: Path) -> None:
    out = tmp_path / "run"
    prepare(recipe(tmp_path, TEXTS, run=run_settings(out, "jsonl"))).run(until=5)  # the last checkpoint is of step 3
    whole = lines(out)
    with (out / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # cut off by a crash
    resumed = resume(out)
    assert resumed.trainer.at.step == 3
    resumed.run()
    again = lines(out)
    assert [one["step"] for one in again] == [1, 2, 3, 4, 5, 6]
    assert again[:3] == whole[:3]
    assert [one["loss"] for one in again[:5]] == [one["loss"] for one in whole]
    prepare(recipe(tmp_path, TEXTS, run=run_settings(out, "jsonl") | {"steps": 2})).run(force=True)
    assert [one["step"] for one in lines(out)] == [1, 2]  # another run begins anew
    (out / "steps.jsonl").write_text("not of a run\n")
    with pytest.raises(CheckpointError, match=r"steps\.jsonl has a line that is no step of a run"):
        resume(out, ["run.steps=4"]).run()


def test_what_cannot_be_logged_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TriptychError, match=r"run\.logs"):
        recipe(tmp_path, TEXTS, run={"logs": ["wandb"]})
    made = recipe(tmp_path, TEXTS, run=run_settings(tmp_path / "run", "tensorboard"))
    monkeypatch.setattr(step_logs, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="tensorboard is not installed; run: pip install tensorboard"):
        prepare(made)
    out = tmp_path / "other"
    prepare(recipe(tmp_path, TEXTS, run=run_settings(out, "jsonl"))).run(until=2)
    (out / "steps.jsonl").unlink()
    (out / "steps.jsonl").mkdir()
    with pytest.raises(CheckpointError, match="cannot write the logs in"):
        resume(out).run()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    prepare(recipe(tmp_path, TEXTS, run=run_settings(out, "jsonl", "tensorboard"))).run(until=5)
    resume(out).run()
    read = accumulator.EventAccumulator(str(out / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) >= {"loss", "lr", "held_out/margin"}
    for name in ("loss", "lr"):
        wanted = [(one["step"], pytest.approx(one[name], rel=1e-6)) for one in lines(out)]
        assert [(event.step, event.value) for event in read.Scalars(name)] == wanted
