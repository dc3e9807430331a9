"""The server under load: `python bench/serve.py load --smollm2 FILE.gguf`.

    load     64 clients that stream completions of mixed lengths: total tokens a second of the engine alone, of
             `triptych serve`, and with `--peer` of llama.cpp's server (built from source with native flags) with 8,
             32 and 64 slots; the time to the first token, and the client's own CPU time.
    pace     Rows that decode, first alone, then beside prompts of 8,000 tokens: the times between their tokens.
    sampled  Steps of 8 and 32 rows, greedy and at temperature 1 with top-p 0.95, each row with a seed of its own.

Each server runs in a process of its own, one after another; the client is this process, in one thread.  All figures
are of one run: print them together with the versions and the processor that the first lines name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.request import urlopen

import torch

import triptych
from triptych import machine
from triptych.generate import Request, Sampling, Scheduler

CLIENTS = 64
LLAMA_SLOTS = (8, 32, 64)
SEED = 5


@dataclass(frozen=True)
class Job:
    """One request: ids of a prompt and how many tokens to write after it."""

    prompt: list[int]
    new: int


@dataclass
class Streamed:
    """What one client saw of one request, in seconds on one clock."""

    sent: float
    times: list[float] = field(default_factory=list)  # of the events that hold text
    tokens: int = 0

    @property
    def first(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def jobs(
    count: int, vocab: int, *, prompts: tuple[int, int] = (20, 300), new: tuple[int, int] = (40, 160)
) -> list[Job]:
    """Requests with random ids, of lengths between the bounds."""
    draw = random.Random(SEED)
    return [
        Job([draw.randrange(100, vocab) for _ in range(draw.randint(*prompts))], draw.randint(*new))
        for _ in range(count)
    ]


# -- the client -------------------------------------------------------------------------------------------------------


async def stream(port: int, job: Job, model: str) -> Streamed:
    """Send one request and read its events, over a connection of its own."""
    body = {"model": model, "prompt": job.prompt, "max_tokens": job.new, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    seen = Streamed(time.perf_counter())
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answered {status!r}: {(await reader.read())[-500:]!r}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            seen.tokens = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("text"):
            seen.times.append(time.perf_counter())
    writer.close()
    return seen


async def load(port: int, work: Sequence[Job], clients: int, model: str) -> list[Streamed]:
    """All requests, by so many clients, each of which sends its next one when the one before has ended."""
    waiting, results = list(reversed(work)), []

    async def client() -> None:
        while waiting:
            results.append(await stream(port, waiting.pop(), model))

    await asyncio.gather(*(client() for _ in range(clients)))
    return results


def timed_load(port: int, work: Sequence[Job], clients: int, model: str) -> tuple[float, float, list[Streamed]]:
    """-> tokens a second, the share of one core that this client took, and what it saw."""
    start, used = time.perf_counter(), time.process_time()
    results = asyncio.run(load(port, work, clients, model))
    seconds = time.perf_counter() - start
    return sum(one.tokens for one in results) / seconds, (time.process_time() - used) / seconds, results


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def spread(seconds: Sequence[float]) -> str:
    return f"median {1e3 * statistics.median(seconds):.1f} ms, p99 {1e3 * at(seconds, 0.99):.1f} ms"


# -- the servers ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def served(command: Sequence[str], port: int) -> Iterator[None]:
    """A server in a process of its own, once it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(port):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    """Whether a server on this port says that it is ready."""
    with contextlib.suppress(OSError):
        return urlopen(f"http://127.0.0.1:{port}/health").status == 200
    return False


def ours(path: str, port: int, rows: int) -> list[str]:
    return [sys.executable, "-m", "triptych", "serve", f"m={path}", "--port", str(port), "--max-rows", str(rows)]


def llama(binary: str, path: str, port: int, slots: int, longest: int) -> list[str]:
    threads = str(machine.threads())
    context = ["--ctx-size", str(slots * longest), "--parallel", str(slots), "--threads", threads]
    return [binary, "--model", path, "--port", str(port), "--host", "127.0.0.1", *context, "--threads-batch", threads]


def engine_alone(path: str, work: Sequence[Job], rows: int) -> float:
    """Tokens a second of the same requests in this process, without a server."""
    model = triptych.load(path)
    scheduler = Scheduler(model.engine(), max_rows=rows)
    start = time.perf_counter()
    for number, job in enumerate(work):
        scheduler.submit(Request(prompt=job.prompt, max_new_tokens=job.new, number=number))
    while scheduler.busy:
        scheduler.step()
    return sum(job.new for job in work) / (time.perf_counter() - start)


# -- the measurements -------------------------------------------------------------------------------------------------


def measure_load(path: str, rows: int, count: int, peer: str | None) -> None:
    work = jobs(count, 49_000)
    longest = max(len(job.prompt) + job.new for job in work) + 8
    alone = engine_alone(path, work, rows)
    print(f"engine alone, {rows} rows: {alone:.0f} tokens/s")
    port = free_port()
    with served(ours(path, port, rows), port):
        timed_load(port, work[:8], 8, "m")
        rate, client, seen = timed_load(port, work, CLIENTS, "m")
    report("triptych serve", rate, client, seen)
    print(f"  {rate / alone:.2f} of the engine alone")
    best = 0.0
    for slots in LLAMA_SLOTS if peer else ():
        port = free_port()
        with served(llama(peer, path, port, slots, longest), port):
            timed_load(port, work[:8], 8, "m")
            other, client, seen = timed_load(port, work, CLIENTS, "m")
        report(f"llama.cpp's server, {slots} slots", other, client, seen)
        best = max(best, other)
    if best:
        print(f"triptych serve: {rate / best:.2f} times llama.cpp's best")


def report(name: str, rate: float, client: float, seen: Sequence[Streamed]) -> None:
    first, gaps = [one.first for one in seen if one.times], [gap for one in seen for gap in one.gaps]
    print(
        f"{name}: {rate:.0f} tokens/s; first token {spread(first)}; between tokens {spread(gaps)}; the client took "
        f"{client:.0%} of a core"
    )


def measure_pace(path: str, rows: int) -> None:
    """`rows` clients decode 400 tokens each; then the same beside two clients that send prompts of 8,000 tokens."""
    short = jobs(rows, 49_000, prompts=(20, 40), new=(400, 400))
    long = jobs(4, 49_000, prompts=(8000, 8000), new=(8, 8))
    port = free_port()
    with served(ours(path, port, rows + 2), port):
        timed_load(port, short[:2], 2, "m")
        _, _, before = timed_load(port, short, rows, "m")
        alone = [gap for one in before for gap in one.gaps]

        async def both() -> tuple[list[Streamed], list[Streamed]]:
            decoding = asyncio.create_task(load(port, short, rows, "m"))
            await asyncio.sleep(1.0)
            reading = asyncio.create_task(load(port, long, 2, "m"))
            return await decoding, await reading

        seen, prompts = asyncio.run(both())
    gaps = [gap for one in seen for gap in one.gaps]
    print(
        f"{rows} rows: between tokens alone {spread(alone)}; beside prompts of 8,000 tokens {spread(gaps)}, the p99 "
        f"{at(gaps, 0.99) / statistics.median(alone):.2f} times the median alone; first tokens of the prompts after "
        f"{', '.join(f'{one.first:.1f}' for one in prompts)} s"
    )


def measure_sampled(path: str, rows: int) -> None:
    """Greedy steps and sampled ones in turns, in one engine."""
    model = triptych.load(path)
    engine = model.engine()
    work = jobs(rows, 49_000, prompts=(32, 32))
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(8):
        greedy = turn % 2 == 0
        for number, job in enumerate(work):
            sampling = Sampling() if greedy else Sampling(temperature=1.0, top_p=0.95, seed=number)
            engine.add(Request(prompt=job.prompt, max_new_tokens=64, number=number, sampling=sampling))
        while any(len(row.ids) - row.cached > 1 for row in engine.rows):
            engine.step()
        start, steps = time.perf_counter(), 0
        while engine.rows:
            engine.step()
            steps += 1
        rates[greedy].append(rows * steps / (time.perf_counter() - start))
    greedy, sampled = statistics.median(rates[True]), statistics.median(rates[False])
    print(f"{rows} rows: {greedy:.0f} tokens/s greedy, {sampled:.0f} sampled with top-p, {sampled / greedy:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the server under load.")
    parser.add_argument("what", choices=("load", "pace", "sampled"))
    parser.add_argument("--smollm2", required=True, metavar="FILE", help="SmolLM2-135M as a .gguf file")
    parser.add_argument("--rows", type=int, default=32, help="rows that run at once")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--peer", metavar="FILE", help="llama.cpp's llama-server, built with -DGGML_NATIVE=ON")
    options = parser.parse_args()
    print(f"{machine.threads()} threads of {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}")
    if options.what == "load":
        measure_load(options.smollm2, options.rows, options.requests, options.peer)
    elif options.what == "pace":
        for rows in (8, 32):
            measure_pace(options.smollm2, rows)
    else:
        for rows in (8, 32):
            measure_sampled(options.smollm2, rows)


if __name__ == "__main__":
    main()
