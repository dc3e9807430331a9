"""A run directory: odd names, one process at a time, forged states, and signals."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych import quickstart
from triptych.cli import main
from triptych.errors import CheckpointError, ConfigError
from triptych.run_lock import RunLock
from triptych.train import Checkpoints, Event, Interrupted, Recipe, check_recipe, prepare, read_recipe, resume
from triptych.train.new_recipe import toml

TABLES: dict[str, Any] = {
    "tokenizer": "byte",
    "model": {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 24,
    },
    "objective": {"name": "causal"},
    "run": {"rows": 2, "length": 12, "steps": 4, "evaluate_every": 0.0},
}  # fmt: skip
ODD = [
    "back\\slash",
    'quo"te',
    "apos'trophe",
    "n\\n",
    "{brace}",
    "emoji \N{SLIGHTLY SMILING FACE}",
    " space ",
]


def recipe(text: Path, out: Path | None = None, **run: Any) -> Recipe:
    return check_recipe(
        {**TABLES, "data": {"path": str(text)}, "run": TABLES["run"] | run}, values={"run.out": out and str(out)}
    )


def written(path: Path, text: Path) -> None:
    """The same as a file."""
    tables = {**TABLES, "data": {"path": str(text)}, "run": TABLES["run"] | {"sample_every": 0.0}}
    path.write_text("\n".join(f"{name} = {toml(value)}" for name, value in tables.items()))


def steps(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("step-*"))


# ---------------------------------------------------------------- odd names


@pytest.mark.parametrize("name", ODD)
def test_a_run_may_have_any_name(name: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (Path("relative") / name, tmp_path / "absolute" / name):
        prepare(recipe(text, out)).run(until=1)
        resume(out).run()
        assert steps(out)[-1] == "step-00000004"
        assert [path.name for path in out.parent.iterdir()] == [name]
    assert {path.name for path in tmp_path.iterdir()} == {"relative", "absolute", "text.txt"}


@pytest.mark.parametrize("name", ODD)
def test_the_command_line_takes_any_name(name: str, text: Path, tmp_path: Path) -> None:
    written(tmp_path / "tiny.toml", text)
    out = tmp_path / "runs" / name
    argv = ["train", str(tmp_path / "tiny.toml"), "--out", str(out)]
    assert main([*argv, "--set", "run.steps=2"]) == 0
    assert steps(out)[-1] == "step-00000002"
    assert main([*argv, "--resume", "--set", "run.steps=3"]) == 0
    assert steps(out)[-1] == "step-00000003"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [name]


def test_values_are_not_parsed(text: Path) -> None:
    values = {"run.out": "1", "data.path": "true", "schedule.shape": "linear"}
    changed = read_recipe("decoder", ["run.seconds=3"], values)
    assert (changed.run.out, changed.data.path, changed.schedule.shape, changed.run.seconds) == (
        "1",
        "true",
        "linear",
        3,
    )
    with pytest.raises(ConfigError, match=r"run\.outt is not a key of a recipe \(did you mean 'out'\?\)"):
        read_recipe("decoder", values={"run.outt": "x"})


# ---------------------------------------------------------------- one process at a time

TRAIN = """
import sys, time
from triptych.train import resume
job = resume(sys.argv[1], ["run.steps=1000000"])
def pause(event):
    print("step", flush=True)
    sys.stdin.readline()
job.run(on_step=pause)
"""


@pytest.fixture
def other(text: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has resumed the run `tmp_path / "run"` and stands after a step; a line on its stdin is a step."""
    prepare(recipe(text, tmp_path / "run")).run(until=1)
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "step\n"
        yield process
        process.kill()


def test_a_second_process_is_refused(other: subprocess.Popen[str], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for attempt in (lambda: resume(out), prepare(recipe(text, out)).run, lambda: RunLock(out).acquire()):
        with pytest.raises(ConfigError, match=rf"run is in use by process {other.pid}; wait until") as error:
            attempt()
        assert "\n" not in str(error.value)


def test_a_killed_process_leaves_no_lock(other: subprocess.Popen[str], tmp_path: Path) -> None:
    other.kill()
    other.wait()
    job = resume(tmp_path / "run")
    job.run()
    assert job.trainer.at.step == 4


def test_a_forked_child_does_not_hold_the_lock(text: Path, tmp_path: Path) -> None:
    """Otherwise a worker that outlives its parent would."""
    prepare(recipe(text, tmp_path / "run")).run(until=1)
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # lives until the pipe is closed
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        lock.release()
        RunLock(tmp_path / "run").acquire()
    finally:
        os.close(read)
        os.close(write)
        os.waitpid(child, 0)


def test_two_jobs_of_one_process_exclude_each_other(text: Path, tmp_path: Path) -> None:
    prepare(recipe(text, tmp_path / "run")).run(until=1)
    first = resume(tmp_path / "run")
    with pytest.raises(ConfigError, match="is in use by another run of this process"):
        resume(tmp_path / "run")
    first.run(until=2)  # releases it
    second = resume(tmp_path / "run")
    second.run()
    with pytest.raises(ConfigError, match=r"has a checkpoint of step 4, this run is at step 2; resume it again"):
        first.run()


def test_a_job_that_is_dropped_or_fails_releases_the_lock(text: Path, tmp_path: Path) -> None:
    prepare(recipe(text, tmp_path / "run")).run(until=1)
    with pytest.raises(ConfigError, match=r"run\.stepps"):
        resume(tmp_path / "run", ["run.stepps=3"])
    job = resume(tmp_path / "run")
    del job
    resume(tmp_path / "run").run()


def test_a_lock_file_that_is_a_link_is_not_written_through(text: Path, tmp_path: Path) -> None:
    prepare(recipe(text, tmp_path / "run")).run(until=1)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run/.lock").unlink()
    (tmp_path / "run/.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match=r"cannot write .*\.lock"):
        resume(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "precious"


def test_resuming_what_does_not_exist_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no run directory .*nowhere"):
        resume(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_two_quickstarts_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"), pytest.raises(ConfigError, match="is in use by another run of this process"):
        quickstart.run(out=tmp_path / "run")


# ---------------------------------------------------------------- forged states


def forge(path: Path, **changes: Any) -> None:
    """Change keys of `state.json` (None removes one), with a manifest that fits."""
    state = json.loads((path / "train_state/state.json").read_text()) | changes
    content = json.dumps({key: value for key, value in state.items() if value is not None})
    (path / "train_state/state.json").write_text(content)
    manifest = json.loads((path / "train_state/manifest.json").read_text())
    manifest["files"]["train_state/state.json"] = [len(content), sha256(content.encode()).hexdigest()]
    (path / "train_state/manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": -5}, r"'step': input should be greater than or equal to 0"),
        ({"step": "1"}, r"'step': input should be a valid integer"),
        ({"step": 3}, r"is of step 3"),
        ({"elapsed": -1e9}, r"'elapsed': input should be greater than or equal to 0"),
        ({"elapsed": 10**400}, r"'elapsed': "),
        ({"tokens": -1}, r"'tokens': "),
        ({"extra": 1}, r"'extra': extra inputs are not permitted"),
        ({"recipe": None}, r"'recipe': field required"),
        ({"recipe": [1]}, r"'recipe': "),
        ({"history": [{"step": 1}]}, r"'history\.0\.loss': field required"),
        ({"version": 2}, r"'version': input should be 1"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
def test_a_forged_state_is_one_line(changes: dict[str, Any], reason: str, text: Path, tmp_path: Path) -> None:
    prepare(recipe(text, tmp_path / "run", save_every=0.0)).run(until=0)
    forge(tmp_path / "run/step-00000000")  # the control: an unchanged state is accepted
    resume(tmp_path / "run")
    forge(tmp_path / "run/step-00000000", **changes)
    with pytest.raises(CheckpointError, match=rf"no checkpoint to resume from in .*state\.json.*{reason}") as error:
        resume(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_a_forged_state_is_skipped_for_an_older_checkpoint(text: Path, tmp_path: Path) -> None:
    prepare(recipe(text, tmp_path / "run", save_every=0.5)).run()
    forge(tmp_path / "run/step-00000004", step=-5)
    job = resume(tmp_path / "run")
    assert job.trainer.at.step == 2
    assert "'step'" in job.skipped[0]


def test_a_manifest_lists_no_file_outside(text: Path, tmp_path: Path) -> None:
    prepare(recipe(text, tmp_path / "run", save_every=0.0)).run(until=0)
    path = tmp_path / "run/step-00000000/train_state/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][str(text)] = [text.stat().st_size, sha256(text.read_bytes()).hexdigest()]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"text\.txt' is missing"):
        resume(tmp_path / "run")


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_it_interrupts(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    whole = prepare(recipe(text, steps=6))
    whole.run()
    before, notes = signal.getsignal(number), list[str]()

    def interrupt(event: Event) -> None:
        if event.step == 3:
            signal.raise_signal(number)

    job = prepare(recipe(text, tmp_path / "run", steps=6, save_every=0.0))
    with pytest.raises(Interrupted, match=rf"stopped by {number.name} after step 3; saved in .*run") as stop:
        job.run(on_step=interrupt, on_note=notes.append)
    assert sum("the run stops after this step" in note for note in notes) == 1
    assert (stop.value.number, stop.value.step, signal.getsignal(number)) == (number, 3, before)
    assert isinstance(stop.value, KeyboardInterrupt)
    again = resume(tmp_path / "run")
    assert again.trainer.at.step == 3
    again.run()
    for parameter, expected in zip(again.trainer.module.parameters(), whole.trainer.module.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_a_second_signal_ends_the_run_at_once(text: Path, tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as stop:
        prepare(recipe(text, tmp_path / "run", save_every=0.0)).run(on_step=interrupt)
    assert not isinstance(stop.value, Interrupted)
    assert steps(tmp_path / "run") == ["step-00000000"]


def test_without_a_directory_a_signal_acts_as_usual(text: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as stop:
        prepare(recipe(text)).run(on_step=lambda _: signal.raise_signal(signal.SIGINT))
    assert not isinstance(stop.value, Interrupted)


def test_a_run_outside_the_main_thread_leaves_signals_alone(text: Path, tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            prepare(recipe(text, tmp_path / "run")).run()
        except BaseException as error:  # a thread has nobody else to report it
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert not errors
    assert Checkpoints(tmp_path / "run").newest().step == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_on_the_command_line(number: int, code: int, text: Path, tmp_path: Path) -> None:
    written(tmp_path / "tiny.toml", text)
    out = tmp_path / "run"
    command = [sys.executable, "-c", "import sys; from triptych.cli import main; sys.exit(main())"]
    argv = [*command, "train", str(tmp_path / "tiny.toml"), "--out", str(out), "--data", str(text)]
    argv += ["--set", "run.steps=1000000", "--set", "run.save_every=0.0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not steps(out):  # the first checkpoint is written before step 1
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "error: interrupted" not in err
    at = Checkpoints(out).newest().step
    (line,) = [line for line in err.splitlines() if "continue with: " in line]
    program, *rest = shlex.split(line.partition("continue with: ")[2])
    assert program == "triptych"
    assert main([*rest, "--set", f"run.steps={at + 1}", "--set", "run.save_every=1.0"]) == 0
    assert Checkpoints(out).newest().step == at + 1


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_each_row_is_all_of_a_text_shorter_than_a_row(objective: str, text: Path) -> None:
    text.write_text("To be, or not to be, that is the question:\n" * 3)
    tables = {**TABLES, "data": {"path": str(text), "held_out": 0.4}, "run": TABLES["run"] | {"length": 200}}
    tables["model"] = TABLES["model"] | {"max_position_embeddings": 200}
    if objective == "masked":
        tables["tokenizer"] = "words:60"
        tables["objective"] = {"name": "masked"}
        tables["model"] |= {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    job = prepare(check_recipe(tables))
    (note,) = job.notes
    assert re.fullmatch(
        r"the training text has \d+ tokens, fewer than a row may have, so that each row is all .*", note
    )
    said: list[str] = []
    job.run(until=1, on_note=said.append)
    assert note in said
    tables["run"] = tables["run"] | {"length": 10}
    assert not prepare(check_recipe(tables)).notes
