"""The server among bad clients: `python bench/serve_faults.py --smollm2 FILE.gguf --minutes 60`.

Twice as many clients as the server has slots send completions whose text is known from the model alone.  Beside them
others leave in the middle of a stream, read slowly, send half a body, announce a gigabyte, send a million tokens or
nothing at all.  Printed at the end, and an exit status of 1 where one does not hold:

    lost     requests of good clients that ended in anything but an answer, which must be 0
    mixed    answers that are not the text of the model alone, which must be 0
    memory   of the server's process, at the end beside after the first tenth of the time: within 2%
    slots    rows that run or wait in the server 100 ms after the last client has gone, which must be 0
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from serve import free_port, ours  # beside this file

import triptych

ROWS = 8
TEXTS = ["The capital of France is", "Once upon a time", "A transformer is", "Water boils at", "To be or not to be",
         "The first rule is", "In the beginning", "My favourite colour is"]  # fmt: skip


@dataclass
class Seen:
    """What happened so far: how often each kind of client ran, and the answers of good ones that were wrong."""

    runs: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """Sends requests to a port, as good and as bad clients do; `answers` has the text of each prompt and limit."""

    port: int
    answers: dict[tuple[str, int], str]
    seen: Seen
    draw: random.Random

    def body(self, **more: object) -> tuple[tuple[str, int], bytes]:
        key = self.draw.choice([*self.answers])
        fields = {"model": "m", "prompt": key[0], "max_tokens": key[1], "temperature": 0}
        return key, json.dumps(fields | more).encode()

    async def send(self, body: bytes, length: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
        return reader, writer

    async def good(self) -> None:
        """A whole answer or a stream, whose text has to be the model's own."""
        stream = self.draw.random() < 0.5
        key, body = self.body(stream=stream)
        reader, writer = await self.send(body)
        answer = await reader.read()
        writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        if b" 503 " in head.split(b"\r\n")[0]:
            self.seen.runs["good, told to come later"] += 1
            return
        text, ended = text_of(rest, stream=stream)
        if not ended:
            self.seen.lost.append(f"{key}: {answer[:200]!r}")
        elif text != self.answers[key]:
            self.seen.mixed.append(f"{key}: {text!r} and not {self.answers[key]!r}")

    async def leaves(self) -> None:
        """Closes the connection somewhere in the stream, or before it begins."""
        _, body = self.body(stream=self.draw.random() < 0.8, max_tokens=400)
        reader, writer = await self.send(body)
        for _ in range(self.draw.randrange(6)):
            await reader.readline()
        writer.transport.abort()

    async def reads_slowly(self) -> None:
        _, body = self.body(stream=True)
        reader, writer = await self.send(body)
        for _ in range(20):
            if not await reader.read(64):
                break
            await asyncio.sleep(0.3)
        writer.close()

    async def half_a_body(self) -> None:
        _, body = self.body()
        _, writer = await self.send(body[: len(body) // 2], len(body))
        await asyncio.sleep(self.draw.random() * 3)
        writer.transport.abort()

    async def a_gigabyte(self) -> None:
        reader, writer = await self.send(b" " * 65536, 1 << 30)
        assert b" 413 " in await reader.readline()
        writer.transport.abort()

    async def a_million_tokens(self) -> None:
        _, body = self.body(prompt=[5] * 1_000_000)
        reader, writer = await self.send(body)
        assert b" 400 " in await reader.readline()
        writer.close()

    async def nothing(self) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.sleep(self.draw.random() * 3)
        writer.transport.abort()


def text_of(body: bytes, *, stream: bool) -> tuple[str, bool]:
    """The text of an answer, and whether it is whole."""
    if not stream:
        try:
            (choice,) = json.loads(body)["choices"]
        except (ValueError, KeyError):
            return "", False
        return choice["text"], choice["finish_reason"] is not None
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    choices = [one for event in events if event.startswith(b"{") for one in json.loads(event).get("choices", [])]
    whole = bool(events) and events[-1].startswith(b"[DONE]")
    return "".join(one["text"] for one in choices), whole


async def run(client: Client, until: float) -> None:
    """Good clients, twice as many as there are slots, and one of each bad kind at a time."""

    async def again(one: Callable[[], Coroutine[None, None, None]]) -> None:
        while time.monotonic() < until:
            client.seen.runs[one.__name__] += 1
            with contextlib.suppress(ConnectionError):
                await one()

    bad = (client.leaves, client.leaves, client.reads_slowly, client.half_a_body, client.a_gigabyte, client.nothing)
    everyone = [again(client.good) for _ in range(2 * ROWS)] + [again(one) for one in bad]

    async def now_and_then() -> None:
        while time.monotonic() < until:
            client.seen.runs["a_million_tokens"] += 1
            await client.a_million_tokens()
            await asyncio.sleep(5)

    await asyncio.gather(*everyone, now_and_then())


def running_rows(port: int) -> int:
    """Rows that run or wait, from /metrics."""
    from urllib.request import urlopen

    lines = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines()
    names = ("triptych_rows_running", "triptych_rows_waiting")
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(names)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the server among bad clients.")
    parser.add_argument("--smollm2", required=True, metavar="FILE", help="SmolLM2-135M as a .gguf file")
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    model = triptych.load(options.smollm2)
    answers = {
        (text, new): model.generate([text], max_new_tokens=new, temperature=0)[0].text
        for text in TEXTS for new in (8, 40)
    }  # fmt: skip
    del model
    port = free_port()
    with Path("runs/serve_faults.log").open("wb") as log:
        process = subprocess.Popen(ours(options.smollm2, port, ROWS), stdout=log, stderr=log)
    seen, memory, left_rows = Seen(), list[int](), 0
    client = Client(port, answers, seen, random.Random(3))
    try:
        wait_for(port, process)
        minutes = options.minutes
        for _ in range(10):
            asyncio.run(run(client, time.monotonic() + 6 * minutes))
            time.sleep(0.1)
            rows = running_rows(port)
            memory.append(psutil.Process(process.pid).memory_info().rss)
            print(f"{memory[-1] / 1e6:.0f} MB, {rows} rows left, {seen.runs.total():,} clients", flush=True)
            left_rows += rows
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    print(", ".join(f"{name} {count:,}" for name, count in seen.runs.items()))
    print(f"lost {len(seen.lost)}, mixed {len(seen.mixed)}, rows left {left_rows}")
    before, after = memory[0], memory[-1]
    print(f"memory {before / 1e6:.0f} MB, then {after / 1e6:.0f} MB: {after / before - 1:+.1%}")
    print("\n".join([*seen.lost[:5], *seen.mixed[:5]]))
    sys.exit(bool(seen.lost or seen.mixed or left_rows or abs(after / before - 1) > 0.02))


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    import socket

    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}; runs/serve_faults.log says why")
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)


if __name__ == "__main__":
    main()
