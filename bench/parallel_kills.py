"""A run of several processes that is killed again and again: `python bench/parallel_kills.py --kills 30`.

A small decoder is trained once to its end, and once with `kill -9` of a random rank at a random moment, as often as
`--kills` says, each time resumed.  Each kill comes while the processes start (one of five), or up to `--seconds` after
a new checkpoint.  Printed at the end, and an exit status of 1 where one does not hold:

    broken    checkpoints under their own name that are not whole, after any kill, which must be 0
    model     kills after which `model/` was not whole, which must be 0
    losses    steps whose loss is not the very number of the run that was not killed, which must be 0
    inside    kills that left a checkpoint half-written under another name: how many came during a save
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from triptych.checkpoints import is_complete
from triptych.train import Checkpoints
from triptych.train.checkpoints import read_progress, why_invalid

TEXT = " ".join(f"{i} times {j} is {i * j}." for i in range(12) for j in range(12))
ENDED = 120  # seconds for the other processes to end after one was killed


@dataclass
class Outcome:
    """What the kills did."""

    ranks: Counter[int] = field(default_factory=Counter)
    at_start: int = 0
    inside: int = 0
    broken: list[str] = field(default_factory=list)
    model: int = 0


def recipe(options: argparse.Namespace, data: Path) -> str:
    replicate, shard, tensor = options.mesh
    return f"""tokenizer = "byte"
[model]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64
[data]
path = "{data}"
[objective]
name = "causal"
[run]
rows = 4
length = 24
steps = {options.steps}
save_every = {options.every / options.steps}
save_in_background = {str(options.background).lower()}
evaluate_every = 0.5
precision = "fp32"
[parallel]
replicate = {replicate}
shard = {shard}
tensor = {tensor}
"""


class Training:
    """The command, in so many processes."""

    def __init__(self, recipe: Path, out: Path, processes: int) -> None:
        self.out, self.processes = out, processes
        resumed = ["--resume"] if Checkpoints(out).exist() else []
        command = [sys.executable, "-m", "triptych", "train", str(recipe), "--out", str(out), *resumed]
        self.command = subprocess.Popen(
            [*command, "--processes", str(processes)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.command.poll() is None

    def rank_process(self, rank: int) -> psutil.Process | None:
        """The process of a rank, once it is there."""
        try:
            children = psutil.Process(self.command.pid).children()
            return next((one for one in children if one.environ().get("RANK") == str(rank)), None)
        except psutil.Error:
            return None

    def wait_for_checkpoint(self) -> None:
        """Until there is another newest checkpoint than now."""
        before = newest(self.out)
        while self.running and newest(self.out) == before:
            time.sleep(0.01)

    def end(self) -> str:
        """What it wrote to stderr."""
        return self.command.communicate(timeout=None)[1]


def newest(out: Path) -> str:
    return max((path.name for path in out.glob("step-*")), default="")


def killed(training: Training, draw: random.Random, seconds: float, outcome: Outcome) -> bool:
    """Whether a rank was killed before the run ended."""
    at_start, rank = draw.random() < 0.2, draw.randrange(training.processes)
    if not at_start:
        training.wait_for_checkpoint()
    time.sleep(draw.uniform(0.0, 4.0 if at_start else seconds))
    process = training.rank_process(rank)
    while process is None and training.running:
        time.sleep(0.01)
        process = training.rank_process(rank)
    if process is None or not training.running:
        return False
    process.send_signal(signal.SIGKILL)
    training.command.communicate(timeout=ENDED)
    outcome.ranks[rank] += 1
    outcome.at_start += at_start
    return True


def inspect(out: Path, outcome: Outcome) -> None:
    """Look at what a kill left."""
    outcome.inside += any(out.glob(".step-*.building"))
    outcome.broken += [problem for path in out.glob("step-*") if (problem := why_invalid(path)) is not None]
    if newest(out):
        outcome.model += not is_complete(out / "model")


def losses(out: Path) -> list[float]:
    return [record.loss for record in read_progress(Checkpoints(out).newest().path)[0].history]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--mesh", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2, 1))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--seconds", type=float, default=1.0, help="longest time from a checkpoint to a kill")
    parser.add_argument("--background", action="store_true", help="write checkpoints while training goes on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    replicate, shard, tensor = options.mesh
    processes, draw, outcome = replicate * shard * tensor, random.Random(options.seed), Outcome()
    with tempfile.TemporaryDirectory() as folder:
        data, path = Path(folder, "data.txt"), Path(folder, "run.toml")
        data.write_text(TEXT)
        path.write_text(recipe(options, data))
        whole = Training(path, Path(folder, "whole"), processes)
        problem = whole.end()
        assert whole.command.returncode == 0, problem
        out = Path(folder, "out")
        while outcome.ranks.total() < options.kills:
            if not killed(Training(path, out, processes), draw, options.seconds, outcome):
                break  # it came to its end
            inspect(out, outcome)
            print(f"kill {outcome.ranks.total()}: the newest is {newest(out) or 'none'}", file=sys.stderr, flush=True)
        if Checkpoints(out).newest().step < options.steps:
            last = Training(path, out, processes)
            problem = last.end()
            assert last.command.returncode == 0, problem
            inspect(out, outcome)
        expected, found = losses(Path(folder, "whole")), losses(out)
    different = sum(a != b for a, b in zip(expected, found, strict=False)) + abs(len(expected) - len(found))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, gloo")
    print(
        json.dumps(
            {
                "mesh": options.mesh, "background": options.background, "steps": options.steps,
                "kills": outcome.ranks.total(), "at the start": outcome.at_start, "by rank": dict(outcome.ranks),
                "inside": outcome.inside, "broken": len(outcome.broken), "model": outcome.model, "losses": different,
            }
        )
    )  # fmt: skip
    for reason in outcome.broken:
        print(reason)
    sys.exit(bool(outcome.broken or outcome.model or different or outcome.ranks.total() < options.kills))


if __name__ == "__main__":
    main()
