"""`triptych serve` as a process: signals and what runs then, ports that are in use, and models that are not there."""

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from cli_models import Captured, refused
from test_serve_worker import letters

PATIENCE = 120.0  # seconds; machines may be slow and shared
LONG = {
    "prompt": ["a", "b", "c", "d"],
    "n": 16,
    "max_tokens": 250,
    "temperature": 0.9,
    "stream": True,
    "logit_bias": {"0": -100, "1": -100},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "letters"
    letters().save(path)
    return path


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def serving(model: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command once it listens; it is killed where it still runs at the end."""
    port = free_port()
    command = [sys.executable, "-m", "triptych", "serve", str(model), "--port", str(port), "--max-rows", "1", *more]
    command.append("--json")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, env=environment)
    try:
        assert process.stderr is not None
        assert process.stdout is not None
        assert select.select([process.stderr], [], [], PATIENCE)[0]
        line = process.stderr.readline()
        announced = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        at = f"http://127.0.0.1:{port}"
        assert announced == {"url": f"{at}/v1", "page": f"{at}/", "models": ["letters"]}
        assert (
            line.strip()
            == f"serving letters on http://127.0.0.1:{port}/v1, with a chat page at http://127.0.0.1:{port}/"
        )
        yield process, port
    finally:
        process.kill()
        process.communicate()


@contextmanager
def begun(port: int) -> Iterator[http.client.HTTPResponse]:
    """The response to a long request, of which the first event has been read."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(LONG), {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            yield response


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end(model: Path, number: int) -> None:
    with serving(model, "--grace", "100") as (process, port), begun(port) as response:
        process.send_signal(number)
        events = response.read().decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        ended = [json.loads(one[6:])["choices"][0] for one in events[:-1] if one.startswith("data: {")]
        assert sum(one["finish_reason"] is not None for one in ended) == 64
        _, notes = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "requests run, and have 100 s" in notes
        assert notes.strip().endswith("stopped; every request has ended")


@pytest.mark.heavy
def test_what_does_not_end_in_time_is_cut_and_says_so(model: Path) -> None:
    with serving(model, "--grace", "0") as (process, port), begun(port) as response:
        process.send_signal(signal.SIGTERM)
        text = response.read().decode()
        assert "[DONE]" not in text
        assert "the server is stopping" in text.strip().split("\n\n")[-1]
        _, notes = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "did not end within 0 s and were cut" in notes


def test_a_port_in_use_a_bad_address_and_a_model_that_is_not_there_are_one_line(model: Path, capsys: Captured) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        start = time.monotonic()
        assert f"port {port} of 127.0.0.1 is in use" in refused(["serve", str(model), "--port", port], capsys)
        assert time.monotonic() - start < PATIENCE
    port = str(free_port())
    assert "no such file" in refused(["serve", str(model / "nothing"), "--port", port], capsys)
    assert "host.invalid" in refused(["serve", str(model), "--host", "host.invalid", "--key", "a"], capsys)
    assert "not in the range" in refused(["serve", str(model), "--port", "80000"], capsys, 2)
    assert "give --key" in refused(["serve", str(model), "--host", "0.0.0.0"], capsys, 2)
    # What was refused has not kept the port.
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", int(port)))
