"""Answers of a busy server beside each alone: `python bench/serve_equal.py --smollm2 FILE.gguf --requests 200`.

Requests of mixed lengths, half of them with one of a few common beginnings, a third of them sampled with seeds of their
own, are sent by many clients at once, streamed or not.  Every fifth is cancelled in the middle and sent again.  Each
text has to be that of the request alone in a new engine.  Prints the numbers, and ends with 1 where one differs.  The
control sends each sampled request once more with another seed: most of these texts must differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import dataclass

from serve import free_port, ours, served  # beside this file
from serve_faults import text_of

import triptych

CLIENTS = 24
ROWS = 12


@dataclass(frozen=True)
class Wanted:
    """One request: ids of its prompt, tokens to write, and how they are drawn."""

    prompt: list[int]
    new: int
    temperature: float
    seed: int

    def sampling(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_p": 0.95} if self.temperature else {"temperature": 0}


def drawn(count: int, vocab: int) -> list[Wanted]:
    draw = random.Random(11)
    beginnings = [[draw.randrange(100, vocab) for _ in range(n)] for n in (24, 90, 400)]
    requests = []
    for number in range(count):
        prompt = [*draw.choice(beginnings)] if draw.random() < 0.5 else []
        prompt += [draw.randrange(100, vocab) for _ in range(draw.choice((1, 5, 30, 150, 700)))]
        requests.append(Wanted(prompt, draw.randint(1, 60), draw.choice((0.0, 0.0, 0.9)), number))
    return requests


async def sent(port: int, wanted: Wanted, *, stream: bool, leave: bool) -> str:
    """The text that the server answers; one that is to `leave` closes its connection after two events."""
    body = {"model": "m", "prompt": wanted.prompt, "max_tokens": wanted.new, "seed": wanted.seed, "stream": stream}
    data = json.dumps(body | wanted.sampling()).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if leave:
        for _ in range(12):
            await reader.readline()
        writer.transport.abort()
        return ""
    answer = await reader.read()
    writer.close()
    text, whole = text_of(answer.partition(b"\r\n\r\n")[2], stream=stream)
    return text if whole else f"no answer: {answer[:200]!r}"


async def all_sent(port: int, requests: list[Wanted]) -> list[str]:
    draw, texts, waiting = random.Random(3), [""] * len(requests), list(range(len(requests)))

    async def client() -> None:
        while waiting:
            number = waiting.pop()
            if number % 5 == 0:
                await sent(port, requests[number], stream=True, leave=True)
            texts[number] = await sent(port, requests[number], stream=draw.random() < 0.5, leave=False)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", required=True, metavar="FILE", help="SmolLM2-135M as a .gguf file")
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    requests, port = drawn(options.requests, 49_000), free_port()
    other = [Wanted(one.prompt, one.new, one.temperature, one.seed + 1) for one in requests if one.temperature]
    with served(ours(options.smollm2, port, ROWS), port):
        texts = asyncio.run(all_sent(port, requests))
        controls = asyncio.run(all_sent(port, other))
    model = triptych.load(options.smollm2)
    alone = [
        model.generate([one.prompt], max_new_tokens=one.new, seed=one.seed, **one.sampling())[0].text  # type: ignore[arg-type]
        for one in requests
    ]
    different = [i for i, pair in enumerate(zip(texts, alone, strict=True)) if pair[0] != pair[1]]
    of_seeds = [text for one, text in zip(requests, alone, strict=True) if one.temperature]
    changed = sum(a != b for a, b in zip(controls, of_seeds, strict=True))
    print(f"{len(requests)} requests, {len(of_seeds)} of them sampled: {len(different)} texts differ from each alone")
    print(f"control, another seed: {changed} of {len(of_seeds)} sampled texts differ")
    for i in different[:5]:
        print(f"  request {i}: {texts[i]!r} and not {alone[i]!r}")
    sys.exit(bool(different) or changed < 0.8 * len(of_seeds))


if __name__ == "__main__":
    main()
