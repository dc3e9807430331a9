"""`triptych chat --url` with our own server, and with servers that answer as they should not."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli_models import Captured, checkpoint, refused, said
from triptych import load

PATIENCE = 120.0  # seconds; machines may be slow and shared


def typed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


class Script(BaseHTTPRequestHandler):
    """Answers with what the test wrote: `script[path]` is a status, a type and pieces, and keeps what it was asked."""

    script: dict[str, tuple[int, str, list[bytes]]]
    asked: list[tuple[str, dict[str, str], object]]
    left: threading.Event

    def do_GET(self) -> None:
        self.respond(None)

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def respond(self, body: object) -> None:
        self.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        status, kind, pieces = self.script[self.path]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
        try:
            for piece in pieces:
                while piece == b"for ever":
                    self.wfile.write(chunk("more "))
                    time.sleep(0.01)
                self.wfile.write(piece)
        except OSError:
            self.left.set()

    def log_message(self, *_: object) -> None:
        pass


def chunk(text: str | None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


MODELS = (200, "application/json", [b'{"data": [{"id": "one"}]}'])
STREAM = "text/event-stream; charset=utf-8"


@contextmanager
def server(**script: tuple[int, str, list[bytes]]) -> Iterator[tuple[str, type[Script]]]:
    paths = {"/v1/models": MODELS} | {f"/v1/{name.replace('_', '/')}": value for name, value in script.items()}
    handler = type("Handler", (Script,), {"script": paths, "asked": [], "left": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/v1", handler
        finally:
            running.shutdown()
            thread.join()


def test_our_own_server_answers_as_the_model_does(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
    from triptych.serve.app import Server
    from triptych.serve.worker import ModelWorker

    worker = ModelWorker(load(checkpoint("decoder")), "decoder", max_rows=2)
    running = uvicorn.Server(uvicorn.Config(Server({"decoder": worker}, key="a").app(), port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
    url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    how = ["--max-new-tokens", "4", "--seed", "3", "--system", "be", "--top-k", "5", "--stop", "zz", "--json"]
    try:
        answers = []
        for more in (["--url", url, "--key", "a"], ["--url", f"{url}/v1/", "--model", "decoder", "--key", "a"]):
            typed("hi\n\nyou\n", monkeypatch)
            answers.append(said(["chat", *more, *how], capsys))
        typed("hi\n\nyou\n", monkeypatch)
        answers.append(said(["chat", str(checkpoint("decoder")), *how], capsys))
        assert answers[0] == answers[1] == answers[2]
        assert "answered 401" in refused(["chat", "--url", url], capsys)
        typed("hi\n", monkeypatch)
        _, line = said(["chat", "--url", url, "--key", "a", "--model", "other"], capsys, 1)
        assert "answered 404: there is no model 'other'" in line
    finally:
        running.should_exit = True
        thread.join(60)
        worker.thread.join(60)


def test_what_is_sent_and_read(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    events = [b": a comment\n\n", chunk(None), chunk("Hel"), b"event: x\ndata:" + chunk("lo")[6:], b"data: [DONE]\n\n"]
    with server(chat_completions=(200, STREAM, events)) as (url, handler):
        typed("a\nb\n", monkeypatch)
        out, _ = said(["chat", "--url", url, "--seed", "1", "--key", "sesame"], capsys)
    assert out == "Hello\nHello\n"
    (_, headers, _), (_, _, first), (_, _, second) = handler.asked
    assert headers["authorization"] == "Bearer sesame"
    assert second["messages"] == [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "b"},
    ]  # fmt: skip
    assert set(first) == {"model", "messages", "stream", "max_tokens", "temperature", "top_p", "seed"}
    assert first["model"] == "one"
    whole = json.dumps({"choices": [{"message": {"role": "assistant", "content": "whole"}}]}).encode()
    with server(chat_completions=(200, "application/json", [whole])) as (url, _):
        typed("a\n", monkeypatch)
        assert said(["chat", "--url", url], capsys)[0] == "whole\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, STREAM, [chunk("a")]), "ended the answer early"),
        ((200, STREAM, [chunk("a"), b'data: {"error": {"message": "out of memory"}}\n\n']), "out of memory"),
        ((200, STREAM, [b"data: what\n\n"]), "not of OpenAI's API"),
        ((200, "text/html", [b"<p>hello</p>"]), "not of OpenAI's API"),
        ((400, "application/json", [b'{"error": {"message": "no seed here"}}']), "answered 400: no seed here"),
        ((502, "text/html", [b"<p>bad\ngateway"]), "answered 502: Bad Gateway"),
        ((302, "text/html", [b""]), "answered 302"),
    ],
)  # fmt: skip
def test_answers_that_are_none_are_one_line(
    answer: tuple[int, str, list[bytes]], words: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with server(chat_completions=answer) as (url, _):
        typed("a\n", monkeypatch)
        _, err = said(["chat", "--url", url], capsys, 1)
    *_, line = err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert "bug in triptych" not in line


def test_misuse(capsys: Captured) -> None:
    for url in ("ftp://x", "http://", "http://[", "http://a:b", "127.0.0.1:80", "http://a?b"):
        assert "must be an address" in refused(["chat", "--url", url], capsys, 2)
    assert "does not answer" in refused(["chat", "--url", "http://127.0.0.1:1"], capsys)
    assert "give a MODEL" in refused(["chat"], capsys, 2)
    assert "not both" in refused(["chat", "m", "--url", "http://a"], capsys, 2)
    assert "--show-prompt is for a MODEL" in refused(["chat", "--show-prompt", "--url", "http://a"], capsys, 2)
    assert "--device is for a MODEL" in refused(["chat", "--device", "cuda", "--url", "http://a"], capsys, 2)
    assert "give --url too" in refused(["chat", str(checkpoint("decoder")), "--key", "a"], capsys, 2)
    several = (200, "application/json", [b'{"data": [{"id": "one"}, {"id": "two"}]}'])
    with server(models=several) as (url, _):
        assert "has the models one, two; name one with --model" in refused(["chat", "--url", url], capsys)


@pytest.mark.heavy
def test_control_c_stops_the_answer_and_not_the_program() -> None:
    with server(chat_completions=(200, STREAM, [b"for ever"])) as (url, handler):
        ours, theirs = pty.openpty()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}
        program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        program += "from triptych.cli import main; sys.exit(main(sys.argv[1:]))"
        process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", "--url", url], stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        seen = b""

        def until(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                piece = os.read(ours, 4096)
                assert piece
                seen += piece
            seen = seen.partition(text)[2]

        try:
            until(b"> ")
            os.write(ours, b"hello\n")
            until(b"more more")
            process.send_signal(signal.SIGINT)
            assert handler.left.wait(PATIENCE)  # the server sees that nobody reads
            until(b"> ")
            handler.script["/v1/chat/completions"] = (200, STREAM, [chunk("fine"), b"data: [DONE]\n\n"])
            os.write(ours, b"again\n")
            until(b"fine")
            until(b"> ")
            os.write(ours, b"/exit\n")
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    *_, (_, _, last) = handler.asked
    assert [one["content"] for one in last["messages"]] == ["again"]  # what was stopped is not part of it
