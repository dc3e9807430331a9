"""`triptych batch --ray` while processes are killed, beside the same command on one machine.

    python bench/ray_batches.py [--records 10000] [--actors 3] [--kills 2]    counts, with a control
    python bench/ray_batches.py --pace [--records 3000]                       seconds with one actor, and alone

Of 10,000 requests to a small random decoder: two actors are killed, and two processes that write, each after its data
is there and before the checkpoint is; then the command itself, once.  The same command goes on.  The control is the
same without a checkpoint of Ray Data.  A kill counts only where the checkpoint was seen to be pending after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as parquet
import torch

from triptych.model import create
from triptych.text import DECODER, byte_tokenizer

PATIENCE = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pace", action="store_true")
    parser.add_argument("--driver", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.driver:
        drive(*options.driver)
    import ray

    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, ray {ray.__version__}, Python {platform.python_version()}"
    )
    folder = Path(tempfile.mkdtemp())
    try:
        inputs(folder, options.records, options.tokens, options.width)
        (pace if options.pace else kills)(folder, options)
    finally:
        shutil.rmtree(folder)


def inputs(folder: Path, records: int, tokens: int, width: int) -> None:
    """A model of random weights, and requests with a seed each."""
    tokenizer = byte_tokenizer(DECODER)
    config = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2,
              "intermediate_size": 2 * width, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512,
              "initializer_range": 0.3}  # fmt: skip
    create(config, tokenizer).save(folder / "model")
    with (folder / "in.jsonl").open("w") as file:
        for i in range(records):
            body = {"prompt": f"record {i}", "max_tokens": tokens, "temperature": 1.0, "seed": i}
            one = {"custom_id": f"number {i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(one) + "\n")


def drive(checkpoint: str, *argv: str) -> None:
    """The command, in this process.  Its directory is kept, so that what Ray Data wrote can be counted; with
    `checkpoint` "off" Ray Data has none, and OUT is not written."""
    from triptych.batches import ray_data
    from triptych.cli import main as command

    ray_data._clear = lambda *_: None
    if checkpoint == "off":
        import ray.data.checkpoint

        ray.data.checkpoint.CheckpointConfig = lambda *_, **__: None
    sys.exit(command(list(argv)))


def start(folder: Path, out: str, *more: str, checkpoint: str = "on") -> subprocess.Popen[bytes]:
    argv = ["batch", str(folder / "in.jsonl"), str(folder / out), "--model", f"model={folder / 'model'}", *more]
    # Ray is not imported before the command sets what it listens on.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    program = [sys.executable, __file__, "--driver", checkpoint, *argv]
    with (folder / f"{out}.log").open("ab") as log:
        return subprocess.Popen(program, stdout=log, stderr=log)


def finished(process: subprocess.Popen[bytes], folder: Path, out: str, code: int = 0) -> None:
    if process.wait(PATIENCE) != code:
        sys.exit((folder / f"{out}.log").read_text()[-3000:])


def kills(folder: Path, options: argparse.Namespace) -> None:
    finished(start(folder, "alone.jsonl"), folder, "alone.jsonl")
    alone = answers(folder / "alone.jsonl")
    for name, checkpoint in (("with the checkpoint", "on"), ("control, without one", "off")):
        out = f"{checkpoint}.jsonl"
        part = folder / f"{out}.part"
        more = ("--ray", "local", "--actors", str(options.actors))
        process = start(folder, out, *more, checkpoint=checkpoint)
        actors, writers = disturb(process, part, options, pending=checkpoint == "on")
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = len(rows(part))
        finished(start(folder, out, *more, checkpoint=checkpoint), folder, out, 0 if checkpoint == "on" else 1)
        counts = Counter(rows(part))
        print(f"{name}: killed {actors} actors, {writers} processes between data and checkpoint, and the command once")
        print(f"  rows in the files of data: {before:,} when the command was killed, {counts.total():,} at the end")
        print(f"  records there once {sum(n == 1 for n in counts.values()):,}, more than once "
              f"{sum(n > 1 for n in counts.values()):,}, not there {options.records - len(counts):,}")  # fmt: skip
        if (folder / out).exists():
            found = answers(folder / out)
            same = sum(ours == theirs for ours, theirs in zip(found, alone, strict=True))
            print(f"  OUT: {len(found):,} records, {same:,} in the same place with the same text as alone")
        else:
            print("  OUT: not written, because no checkpoint has its records")


def disturb(
    process: subprocess.Popen[bytes], part: Path, options: argparse.Namespace, *, pending: bool
) -> tuple[int, int]:
    """Kill actors at random times, and writers whose data is there but whose checkpoint is not, until there were
    enough and a third of the data is there.  -> how many of each."""
    dice, actors, writers, tried = random.Random(0), 0, 0, set[str]()
    groups, next_kill = -(-options.records // 128), time.monotonic() + 20
    while actors < options.kills or (pending and writers < options.kills) or len(data(part)) < groups // 3:
        if process.poll() is not None:
            sys.exit(f"the command ended before {options.kills} kills\n{part.with_suffix('.log')}")
        below = {one: title(one) for one in psutil.Process(process.pid).children(recursive=True)}
        working = [one for one, name in below.items() if name.startswith("ray::MapWorker")]
        if actors < options.kills and len(working) == options.actors and time.monotonic() > next_kill and data(part):
            dice.choice(working).kill()
            actors, next_kill = actors + 1, time.monotonic() + dice.uniform(2, 6)
        if pending and writers < options.kills:
            others = [one for one, name in below.items() if name.startswith("ray::") and one not in working]
            writers += kill_writer(part, others, tried)
        time.sleep(0.001)
    return actors, writers


def kill_writer(part: Path, workers: list[psutil.Process], tried: set[str]) -> int:
    """Watch for half a second; stop the workers where a data file stands beside a pending checkpoint, and kill those
    that write if it is still pending -> 1 where that was so."""
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for path in (part / "checkpoint").glob("*.pending.parquet"):
            name = path.name.removesuffix(".pending.parquet")
            if name in tried or not any(one.stat().st_size for one in (part / "data").glob(f"{name}-*")):
                continue
            tried.add(name)
            for one in workers:
                with suppress(psutil.Error):
                    one.suspend()
            writing = [one for one in workers if path.exists() and title(one).startswith("ray::Write")]
            for one in workers:
                with suppress(psutil.Error):
                    one.kill() if one in writing else one.resume()
            return int(bool(writing))
    return 0


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def data(part: Path) -> list[Path]:
    return sorted((part / "data").glob("*.parquet"))


def rows(part: Path) -> list[int]:
    """The numbers of the records in the files of data that can be read."""
    found: list[int] = []
    for path in data(part):
        try:
            found += parquet.read_table(path, columns=["number"])["number"].to_pylist()
        except (OSError, ValueError):  # a writer was killed
            print(f"  {path.name} is not whole")
    return found


def answers(path: Path) -> list[tuple[str, str]]:
    with path.open("rb") as lines:  # not at U+2028
        records = [*map(json.loads, lines)]
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in records]


def pace(folder: Path, options: argparse.Namespace) -> None:
    """Records a second, each between the first group of 128 records that is done and the last."""
    process, journal = start(folder, "alone.jsonl"), folder / "alone.jsonl.part" / "records.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 129:
        time.sleep(0.05)
    began = time.monotonic()
    finished(process, folder, "alone.jsonl")
    alone = (options.records - 128) / (time.monotonic() - began)
    process = start(folder, "cluster.jsonl", "--ray", "local", "--actors", "1")
    finished(process, folder, "cluster.jsonl")
    times = sorted(path.stat().st_mtime for path in data(folder / "cluster.jsonl.part"))
    cluster = (options.records - options.records / len(times)) / (times[-1] - times[0])
    print(f"{options.records:,} records of {options.tokens} tokens: alone {alone:.1f} records a second")
    print(f"one actor: {cluster:.1f} records a second over {times[-1] - times[0]:.0f} s, {cluster / alone - 1:+.1%}")


if __name__ == "__main__":
    main()
