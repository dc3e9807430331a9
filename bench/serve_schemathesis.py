"""schemathesis against a running server: `python bench/serve_schemathesis.py NAME=MODEL ... --cases 10000`.

Needs the command `schemathesis` 4 (`--command` says where).  All checks run on every route of /openapi.json, with valid
and with invalid bodies; `HOOKS` draws what no schema can say: recordings, expressions, grammars, schemas.  Prints what
schemathesis prints, how many requests were answered with each status by the server's own figures, and the share of 2xx.
No status may be 500, and no fewer requests than `--cases` are enough.
"""

import argparse
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import torch
import uvicorn

from triptych.serve.app import Server
from triptych.serve.loading import Loader

HOOKS = r"""
import io
import json
import wave

import schemathesis
from hypothesis import strategies

WORDS = strategies.text("abcxyz 09", min_size=1, max_size=6)
SCHEMAS = strategies.recursive(
    strategies.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 1, None]}]),
    lambda inner: strategies.one_of(
        strategies.builds(lambda one: {"type": "array", "items": one}, inner),
        strategies.builds(
            lambda parts: {"type": "object", "properties": parts, "required": sorted(parts)},
            strategies.dictionaries(WORDS, inner, max_size=3),
        ),
        strategies.builds(lambda some: {"anyOf": some}, strategies.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)
EXPRESSIONS = strategies.recursive(
    strategies.sampled_from(["a", "[0-9]", r"\d", "(?:yes|no)", r"[^\n]"]),
    lambda inner: strategies.one_of(
        strategies.builds("({}){}".format, inner, strategies.sampled_from(["*", "+", "{1,3}"])),
        strategies.builds("{}{}".format, inner, inner),
        strategies.builds("({}|{})".format, inner, inner),
    ),
    max_leaves=5,
)
GRAMMARS = strategies.builds(
    lambda words, mark: "start: (" + " | ".join(map(json.dumps, words)) + ")" + mark,
    strategies.lists(WORDS, min_size=1, max_size=4),
    strategies.sampled_from(["", "?", "*", "+"]),
)
OBJECTS = strategies.dictionaries(WORDS, strategies.one_of(strategies.none(), strategies.integers(), WORDS), max_size=3)


@strategies.composite
def recordings(draw):
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(draw(strategies.binary(min_size=2, max_size=2)) * draw(strategies.integers(1, 4000)))
    return content.getvalue()


schemathesis.openapi.format("binary", recordings())
schemathesis.openapi.format("json-schema", SCHEMAS.map(json.dumps))
schemathesis.openapi.format("json-object", OBJECTS.map(json.dumps))
schemathesis.openapi.format("regular-expression", EXPRESSIONS)
schemathesis.openapi.format("lark", GRAMMARS)
"""
ROUTES = 25  # about as many as there are; half of the cases are drawn at random, others are of values at bounds
STATUS = re.compile(r'triptych_requests_total{.*status="(\d+)"} (\S+)')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--command", default="schemathesis")
    parser.add_argument("--report", help="a file for what was sent and answered, as lines of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loader = Loader(max_rows=16)
    pairs = [one.split("=", 1) for one in options.models]
    server = Server({name: loader.worker(name, path) for name, path in pairs})
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error"))
    thread = threading.Thread(target=lambda: running.run([listening]))
    thread.start()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hooks_of_bench.py").write_text(HOOKS, "utf-8")
        command = [
            options.command, "run", f"{address}/openapi.json", "--checks", "all", "--suppress-health-check", "all",
            "--max-examples", str(max(options.cases // ROUTES // 2, 1)), "--seed", str(options.seed), "--no-color",
            "--continue-on-failure", "--no-shrink", "--request-timeout", "120", "--max-response-time", "60",
            "--warnings", "off",
        ]  # fmt: skip
        command += ["--report", "ndjson", "--report-ndjson-path", options.report] if options.report else []
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"SCHEMATHESIS_HOOKS": "hooks_of_bench", "PYTHONPATH": folder}
        subprocess.run(command, env=environment, cwd=folder, check=False)
    with urllib.request.urlopen(f"{address}/metrics") as response:
        text = response.read().decode()
    running.should_exit = True
    thread.join()
    statuses: Counter[str] = Counter()
    for status, count in STATUS.findall(text):
        statuses[status] += int(float(count))
    good, every = sum(count for status, count in statuses.items() if status[0] == "2"), statuses.total()
    print(f"{every} requests in {time.perf_counter() - start:.0f} s: {dict(sorted(statuses.items()))}, "
          f"{100 * good / every:.1f}% answered 2xx")  # fmt: skip
    assert not statuses["500"]
    assert every >= options.cases, f"{every:,} requests are fewer than {options.cases:,}"


if __name__ == "__main__":
    main()
