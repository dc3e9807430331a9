"""Checkpoints that are written while training goes on are those of their step, one after another, or end the run."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import parallel_cases
from parallel_cases import ALONE, largest_difference, tables
from parallel_processes import Mesh, Processes
from triptych.errors import CheckpointError
from triptych.train import Checkpoints, Job, Trainer, check_recipe, prepare
from triptych.train.checkpoint_content import CheckpointContent
from triptych.train.checkpoints import why_invalid
from triptych.train.ranks import Messages

TEXT = " ".join(f"{i} times {j} is {i * j}." for i in range(12) for j in range(12))
NUMBERS = ("model.safetensors", "train_state/optimizer.safetensors")


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.txt"
    path.write_text(TEXT)
    return str(path)


def job(data: str, out: Path, **run: Any) -> Job:
    return prepare(check_recipe(tables(data, str(out), None, run={"steps": 6, "save_every": 0.34} | run)))


def digests(out: Path, step: int) -> list[str]:
    """Those of weights and optimizer state in the checkpoint of a step."""
    path = out / f"step-{step:08}"
    assert why_invalid(path) is None
    listed = json.loads((path / "train_state/manifest.json").read_text())["files"]
    return [listed[name][1] for name in NUMBERS]


class HeldUp:
    """`Checkpoints.write` that waits, in the checkpoint of step 5, until the step after it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next_made, self.waited = threading.Event(), list[bool]()
        write = Checkpoints.write

        def late(checkpoints: Checkpoints, content: CheckpointContent, messages: Messages | None = None) -> Path:
            if content.step == 5:
                self.waited.append(self.next_made.wait(60))
            return write(checkpoints, content, messages)

        monkeypatch.setattr(Checkpoints, "write", late)

    def on_step(self, event: Any) -> None:
        if event.step == 6:
            self.next_made.set()


@pytest.mark.parametrize("broken", [False, True])
def test_a_checkpoint_is_that_of_its_step(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """The control writes the state itself, not a copy."""
    job(data, tmp_path / "plain").run()
    held_up = HeldUp(monkeypatch)
    if broken:
        of = CheckpointContent.of
        monkeypatch.setattr(CheckpointContent, "of", lambda *a, copied: of(*a, copied=False))
    job(data, tmp_path / "out", save_in_background=True).run(held_up.on_step)
    assert held_up.waited == [True]
    assert digests(tmp_path / "out", 6) == digests(tmp_path / "plain", 6)
    assert (digests(tmp_path / "out", 5) == digests(tmp_path / "plain", 5)) != broken


def test_each_waits_for_the_one_before(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, steps = [0], [0], list[int]()
    write = Checkpoints.write

    def counted(checkpoints: Checkpoints, content: CheckpointContent, messages: Messages | None = None) -> Path:
        running[0] += 1
        most[0] = max(most[0], running[0])
        steps.append(content.step)
        path = write(checkpoints, content, messages)
        running[0] -= 1
        return path

    monkeypatch.setattr(Checkpoints, "write", counted)
    job(data, tmp_path / "out", save_in_background=True, save_every=0.1).run()
    assert steps == list(range(7))
    assert most == [1]
    assert Checkpoints(tmp_path / "out").newest().step == 6


def full_disk(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointContent.write

    def refused(content: CheckpointContent, build: Path, messages: Messages) -> None:
        write(content, build, messages)
        if content.step == at:
            raise CheckpointError("cannot write it: no space left")

    monkeypatch.setattr(CheckpointContent, "write", refused)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_an_error_ends_the_run(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    full_disk(at, monkeypatch)
    training = job(data, tmp_path / "out", save_in_background=True)
    with pytest.raises(CheckpointError, match="no space left"):
        training.run()
    if at:
        before = Checkpoints(tmp_path / "out").newest()
        assert before.step == {3: 0, 6: 5}[at]
        assert before.skipped == ()
    assert training.lock is not None
    monkeypatch.undo()
    training.lock.acquire()  # it was released
    training.lock.release()


def test_an_interrupted_run_is_saved_before_it_ends(data: str, tmp_path: Path) -> None:
    training = job(data, tmp_path / "out", save_in_background=True)
    training.run(until=4)
    assert Checkpoints(tmp_path / "out").newest().step == 3
    assert why_invalid(tmp_path / "out" / "step-00000003") is None


def test_factors_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych import nn
    from triptych.checkpoints.adapters import AdapterSettings, add_adapter

    module = parallel_cases.module_of("llama")
    add_adapter(module, AdapterSettings(rank=2))
    trainer: Trainer = parallel_cases.trainer_of(ALONE, module, parallel_cases.rows_of("llama", [5, 7]))
    recipe = {"model": {"path": "base"}}
    content, live = (CheckpointContent.of(trainer, None, None, recipe, {}, copied=c) for c in (True, False))
    before = {slot: replace(one, up=one.up.detach().clone()) for slot, one in nn.factors_of(module).items()}
    trainer.step()
    assert content.factors is not None
    assert live.factors is not None
    assert all((content.factors[slot].up == one.up).all() for slot, one in before.items())
    assert any((live.factors[slot].up != one.up).any() for slot, one in before.items())


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2)], ids=str)
def test_several_processes(two: Processes, data: str, tmp_path: Path, mesh: Mesh) -> None:
    """The same weights and losses as without, and a run that goes on from what was written."""
    in_background = {"save_in_background": True, "save_every": 0.1}
    plain, losses = two.run("trained", mesh, recipe=tables(data, None, mesh))
    recipe = tables(data, str(tmp_path / "out"), mesh, run=in_background)
    weights, own_losses = two.run("trained", mesh, recipe=recipe)
    assert largest_difference(weights, plain) == 0.0
    assert own_losses == losses
    two.run("stopped", mesh, recipe=tables(data, str(tmp_path / "b"), mesh, run=in_background), until=3)
    assert Checkpoints(tmp_path / "b").newest().step == 3
    again, after = two.run("trained", mesh, recipe=tables(data, str(tmp_path / "b"), mesh), resumed=True)
    assert largest_difference(again, plain) == 0.0
    assert after == losses


def test_an_error_of_one_process_is_that_of_all(two: Processes, data: str, tmp_path: Path) -> None:
    recipe = tables(data, str(tmp_path / "out"), (1, 2, 1), run={"save_in_background": True, "save_every": 0.34})
    errors = two.run("errors_of_full_disk", (1, 2, 1), recipe=recipe, at=3)
    assert all("no space left" in error for error in errors), errors
    assert Checkpoints(tmp_path / "out").newest().step == 0
