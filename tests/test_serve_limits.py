"""Clients that send too much, too slowly or without the key, that leave, and that do not read."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from serving import ask, running
from test_serve_worker import letters
from triptych.serve.app import Server
from triptych.serve.limits import Limited, ServerLimits
from triptych.serve.worker import ModelWorker

LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
KEY = "a key of ours"


def serve(limits: ServerLimits, key: str | None = None) -> Server:
    return Server({"letters": ModelWorker(letters(), "letters", max_rows=4)}, limits=limits, key=key)


@pytest.fixture
def small() -> Iterator[tuple[int, Server]]:
    server = serve(ServerLimits(body_bytes=1000, body_seconds=0.5, send_seconds=0.5, requests=2))
    with running(server) as port:
        yield port, server


def sent(port: int, data: bytes) -> bytes:
    """What the server answers to these bytes, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        one.sendall(data)
        answer = b""
        while piece := one.recv(65536):
            answer += piece
        return answer


def post(body: bytes, *headers: str, route: str = "/v1/completions") -> bytes:
    lines = [
        f"POST {route} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it did not come about within a minute")


def test_a_body_is_refused_by_its_length_before_it_is_read(small: tuple[int, Server]) -> None:
    port, _ = small
    assert b"413" in sent(port, post(b"", f"Content-Length: {1 << 30}")).split(b"\r\n")[0]
    pieces = b"".join(b"100\r\n" + b" " * 256 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n"
    assert b"413" in sent(port, post(pieces, "Transfer-Encoding: chunked")).split(b"\r\n")[0]
    assert ask(port, "/v1/completions", LONG | {"max_tokens": 2})[0] == 200


def test_half_a_body_is_answered_in_time(small: tuple[int, Server]) -> None:
    port, _ = small
    answer = sent(port, post(b'{"prompt": ', "Content-Length: 100"))
    assert b"408" in answer.split(b"\r\n")[0]
    assert b"did not arrive within 0.5 seconds" in answer


@pytest.mark.parametrize("stream", [True, False])
def test_the_row_of_a_client_that_left_ends(stream: bool) -> None:
    server = serve(ServerLimits())
    worker = server.workers["letters"]
    entered, leave = threading.Event(), threading.Event()
    step = worker.scheduler.step  # type: ignore[union-attr]

    def held_step() -> object:
        entered.set()
        leave.wait(60)
        return step()

    with running(server) as port:
        worker.scheduler.step = held_step  # type: ignore[union-attr,assignment]
        body = json.dumps(LONG | {"stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(post(body, f"Content-Length: {len(body)}"))
            assert entered.wait(60)
            (row,) = worker.rows
        until(lambda: worker.rows[row].cancelled)  # within the step: the client is gone before the row has a token
        leave.set()
        until(lambda: not worker.rows)
        assert row.reason == "cancelled"
        assert len(row.new) <= 1, "the slot is free at the end of the step that ran"
        assert not worker.scheduler.engine.rows  # type: ignore[union-attr]


@pytest.fixture
def middlewares(monkeypatch: pytest.MonkeyPatch) -> list[Limited]:
    """Those of the applications that a test makes."""
    made_here: list[Limited] = []
    made = Limited.__init__
    monkeypatch.setattr(
        Limited, "__init__", lambda self, *args, **how: (made(self, *args, **how), made_here.append(self))[0]
    )
    return made_here


def test_requests_beyond_the_limit_are_refused_and_health_is_not(middlewares: list[Limited]) -> None:
    server = serve(ServerLimits(requests=2))
    worker = server.workers["letters"]
    leave = threading.Event()
    step = worker.scheduler.step  # type: ignore[union-attr]
    with running(server) as port:
        worker.scheduler.step = lambda: (leave.wait(60), step())[1]  # type: ignore[union-attr,assignment]
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(port, "/v1/completions", LONG)[0])) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: middlewares[0].running == 2)
        status, error = ask(port, "/v1/completions", LONG)
        assert (status, error["error"]["type"]) == (503, "server_error")
        assert ask(port, "/health")[0] == 200
        leave.set()
        for thread in threads:
            thread.join(60)
        assert answers == [200, 200]
        assert ask(port, "/v1/completions", LONG | {"max_tokens": 1})[0] == 200


def test_a_client_that_does_not_read_is_left(middlewares: list[Limited], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.serve.completions.event", lambda data: b"data: " + b" " * (1 << 18) + b"\n\n")
    body = json.dumps(LONG | {"stream": True}).encode()
    with running(serve(ServerLimits(send_seconds=0.5))) as port:
        assert ask(port, "/health")[0] == 200
        with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
            one.sendall(post(body, f"Content-Length: {len(body)}"))
            until(lambda: middlewares[0].running == 1)
            until(lambda: middlewares[0].running == 0)  # without a byte read: 50 MB do not fit into the socket
            answer = b""
            with suppress(ConnectionResetError):
                while piece := one.recv(1 << 20):
                    answer += piece
        assert b"[DONE]" not in answer
        assert ask(port, "/v1/completions", LONG | {"max_tokens": 2})[0] == 200


def test_the_key_covers_every_route_but_the_page() -> None:
    server = serve(ServerLimits(), KEY)
    with running(server) as port:
        for route in ("/health", "/v1/models", "/v1/completions", "//", "/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": KEY[:-1]}, {"x-api-key": "\xe9"}):
                status, error = ask(port, route, headers=headers)
                assert (status, error["error"]["type"]) == (401, "invalid_request_error")
                assert KEY not in json.dumps(error)
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert ask(port, "/v1/models", headers=headers)[0] == 200
            assert ask(port, "/nothing", headers=headers)[0] == 404


def test_without_a_key_only_names_of_this_machine_are_answered(small: tuple[int, Server]) -> None:
    """A page whose own name leads to 127.0.0.1 (DNS rebinding) sends that name."""
    port, _ = small
    for host in ("localhost", f"127.0.0.1:{port}", "[::1]:8080", "LOCALHOST:1"):
        assert ask(port, "/health", headers={"host": host})[0] == 200
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "[::1].evil.example",
        "[fe80::1]",
    ):
        status, error = ask(port, "/health", headers={"host": host})
        assert (status, "Host" in error["error"]["message"]) == (403, True), host


def test_a_deadline_counts_from_the_request_and_rows_of_one_request_are_bounded() -> None:
    server = serve(ServerLimits())
    worker = server.workers["letters"]
    step = worker.scheduler.step  # type: ignore[union-attr]
    entered, leave = threading.Event(), threading.Event()
    with running(server) as port:
        many = LONG | {"prompt": ["abc"] * 200, "n": 16}
        for body in (many, many | {"n": 1, "best_of": 16}):
            status, error = ask(port, "/v1/completions", body)
            assert (status, "3,200 rows, and 2,048 are the limit" in error["error"]["message"]) == (400, True)

        def held_step() -> object:
            entered.set()
            leave.wait(60)
            return step()

        worker.scheduler.step = held_step  # type: ignore[union-attr,assignment]
        answers: list[Any] = []
        bodies = (LONG, LONG | {"timeout": 0.2}, LONG | {"timeout": 3000.0})
        threads = [
            threading.Thread(target=lambda body=body: answers.append((body, ask(port, "/v1/completions", body)[1])))
            for body in bodies
        ]
        threads[0].start()
        assert entered.wait(60)
        for thread in threads[1:]:  # they wait in the queue until the step of the first one ends
            thread.start()
        until(lambda: worker.commands.qsize() == 2)
        time.sleep(0.3)
        leave.set()
        for thread in threads:
            thread.join(60)
    written = {body.get("timeout"): answer["usage"]["completion_tokens"] for body, answer in answers}
    assert written == {None: 200, 0.2: 0, 3000.0: 200}, "the wait is a part of the time; the control has more of it"
