"""Runs of several processes: checkpoints that any mesh resumes, errors, and a process that is lost."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cli_models
import parallel_cases
from parallel_cases import ALONE, largest_difference, tables
from parallel_processes import Mesh, Processes
from triptych import load
from triptych.train import Checkpoints
from triptych.train.checkpoints import read_progress, why_invalid
from triptych.train.new_recipe import toml

TEXT = " ".join(f"{i} times {j} is {i * j}." for i in range(12) for j in range(12))
MESHES: list[Mesh] = [(1, 2, 1), (1, 1, 2)]
WEIGHTS = 1e-3  # AdamW divides by the size of a gradient, however small: there its last digits count


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.txt"
    path.write_text(TEXT)
    return str(path)


def alone(*arguments: Any, **options: Any) -> Any:
    return parallel_cases.trained(ALONE, *arguments, **options)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_mesh_resumes_any_other(two: Processes, data: str, tmp_path: Path, mesh: Mesh, optimizer: str) -> None:
    settings = {"optimizer": {"name": optimizer}}
    expected, losses = alone(tables(data, None, (1, 1, 1), **settings))

    def recipe(name: str, of: Mesh | None) -> dict[str, Any]:
        return tables(data, str(tmp_path / name), of, **settings)

    whole, its_losses = two.run("trained", mesh, recipe=recipe("whole", mesh))
    assert largest_difference(whole, expected) < WEIGHTS
    assert max(abs(a - b) for a, b in zip(its_losses, losses, strict=True)) < 1e-5
    for name, first, second in (("a", mesh, (1, 1, 1)), ("b", (1, 1, 1), mesh), ("c", mesh, mesh), ("d", *MESHES)):
        run = alone if first == (1, 1, 1) else lambda *a, of=first, **b: two.run("trained", of, recipe=a[0], **b)
        run(recipe(name, first), until=3)
        run = alone if second == (1, 1, 1) else lambda *a, of=second, **b: two.run("trained", of, recipe=a[0], **b)
        weights, after = run(recipe(name, second), resumed=True)
        assert largest_difference(weights, expected) < WEIGHTS
        assert max(abs(a - b) for a, b in zip(after, losses, strict=True)) < 1e-5
        if name == "c":
            assert largest_difference(weights, whole) == 0.0
        assert load(tmp_path / name / "model").module.spec.vocab > 256


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_cannot_be_parallel_is_refused_in_a_line(two: Processes, data: str, mesh: Mesh) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parallel": {"replicate": 1, "shard": 3, "tensor": 1}}, "start 3"),
        ({"parallel": {"tensor": 2, "shard": 2}}, "start 4"),
    ]
    if mesh[1] > 1:
        cases.append(({"run": {"accumulate": 4}}, "raise run.rows to at least 8"))
    else:
        cases.append(({"distill": {"teacher": str(cli_models.checkpoint("decoder"))}}, "set parallel.tensor = 1"))
        cases.append(({"model": {"num_attention_heads": 3, "num_key_value_heads": 3}}, "parallel.tensor = 2"))
    for changes, says in cases:
        recipe = tables(data, None, mesh)
        for table, keys in changes.items():
            recipe[table] = recipe.get(table, {}) | keys
        errors = two.run("errors_of", mesh, recipe=recipe)
        assert all(says in error and "\n" not in error for error in errors), errors


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_reference_of_preferences_is_divided_too(two: Processes, data: str, tmp_path: Path, mesh: Mesh) -> None:
    """A model read from a directory, and a second one beside it that is not trained."""
    alone(tables(data, str(tmp_path / "base"), None))
    pairs = [{"prompt": f"{i} times 3 is ", "chosen": f"{3 * i}.", "rejected": f"{i} and {i}."} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = {
        "model": {"path": str(tmp_path / "base/model")}, "data": {"path": str(tmp_path / "pairs.jsonl")},
        "objective": {"name": "preference"}, "optimizer": {"name": "adamw", "lr": 0.01},
        "run": {"rows": 4, "length": 48, "steps": 4, "precision": "fp32"},
    }  # fmt: skip
    _, expected = alone(recipe)
    names = ("replicate", "shard", "tensor")
    _, losses = two.run("trained", mesh, recipe=recipe | {"parallel": dict(zip(names, mesh, strict=True))})
    assert abs(expected[0] - math.log(2)) < 1e-6  # nothing is gained over the reference yet
    assert abs(expected[-1] - math.log(2)) > 0.01
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1)], ids=str)
def test_a_teacher_in_several_processes(two: Processes, data: str, tmp_path: Path, mesh: Mesh) -> None:
    """It runs in each step, or its store is written by all of them and read by one."""
    teacher = {"teacher": str(cli_models.checkpoint("decoder")), "top": 9}
    for name, store in (("online", {}), ("stored", {"store": str(tmp_path / "store")})):
        recipes = [tables(data, None, of, distill=teacher | store) for of in (mesh, None)]
        weights, losses = two.run("taught", mesh, recipe=recipes[0])
        expected, alone_losses = parallel_cases.taught(ALONE, recipe=recipes[1])
        assert largest_difference(weights, expected) < WEIGHTS, name
        assert max(abs(a - b) for a, b in zip(losses, alone_losses, strict=True)) < 1e-5, name
    assert len(list((tmp_path / "store").iterdir())) > 5


# ---------------------------------------------------------------- as a user starts them


def write_recipe(path: Path, recipe: dict[str, Any]) -> None:
    lines = [f"{key} = {toml(value)}" for key, value in recipe.items() if not isinstance(value, dict)]
    for name, table in recipe.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "triptych", "train", *arguments]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(), timeout=300)


def test_processes_of_one_command(data: str, tmp_path: Path) -> None:
    """One command trains in two processes, says what one process says, and another continues alone."""
    recipe, out = tmp_path / "run.toml", tmp_path / "out"
    write_recipe(recipe, tables(data, str(out), (1, 2, 1)))
    wrong = run(str(recipe), "--processes", "3")
    assert wrong.returncode == 1
    assert wrong.stderr.strip().count("\n") == 0
    assert "= 2 processes, and 3 run" in wrong.stderr
    done = run(str(recipe), "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("held out") + done.stdout.count("held out") >= 1
    assert done.stderr.count("6 steps") == 1
    assert Checkpoints(out).newest().step == 6
    again = run(str(recipe), "--processes", "2")
    assert again.returncode == 1
    assert "already holds a run" in again.stderr
    more = run(
        str(recipe), "--resume", "--set", "run.steps=8", "--set", "parallel.shard=1", "--set", "parallel.tensor=1"
    )
    assert more.returncode == 0, more.stderr
    assert Checkpoints(out).newest().step == 8


@pytest.mark.heavy
def test_two_nodes_on_one_machine(data: str, tmp_path: Path) -> None:
    """torchrun twice, as docs/concepts/parallel.md says, on a mesh of 2 replicas and 2 parts of each layer; the losses
    are those of one process."""
    path = tmp_path / "run.toml"
    write_recipe(path, tables(data, None, None))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend",
        "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", "-m", "triptych", "train",
        str(path), "--out", str(tmp_path / "two"), "--set", "parallel.replicate=2", "--set", "parallel.tensor=2",
    ]  # fmt: skip
    nodes = [
        subprocess.Popen(node, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    try:
        errors = [one.communicate(timeout=300)[1] for one in nodes]
    finally:
        for one in nodes:
            one.kill()
    assert [one.returncode for one in nodes] == [0, 0], errors
    progress, _ = read_progress(Checkpoints(tmp_path / "two").newest().path)
    _, losses = alone(tables(data, None, (1, 1, 1)))
    assert max(abs(a.loss - b) for a, b in zip(progress.history, losses, strict=True)) < 1e-5


def children(process: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        found += [int(number) for number in (task / "children").read_text().split()]
    return found


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_lost_process_ends_the_run_with_its_name(data: str, tmp_path: Path, seed: int, background: bool) -> None:
    draw = random.Random(seed)
    recipe, out = tmp_path / "run.toml", tmp_path / "out"
    write_recipe(recipe, tables(data, str(out), (1, 2, 1), run={
        "steps": 100_000, "save_every": 0.00005, "save_in_background": background,
    }))  # fmt: skip
    training = subprocess.Popen(
        command(str(recipe), "--processes", "2"), stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        while not Checkpoints(out).exist():
            assert training.poll() is None, training.stderr and training.stderr.read()
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 3.0))
        victim = draw.choice(children(training.pid))
        os.kill(victim, signal.SIGKILL)
        _, errors = training.communicate(timeout=60)
    finally:
        training.kill()
    assert training.returncode == 1
    assert f"(process {victim}) was ended by SIGKILL" in errors
    newest = Checkpoints(out).newest()
    assert why_invalid(newest.path) is None
    assert newest.skipped == ()
