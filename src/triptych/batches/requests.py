"""Requests of a file in OpenAI's batch format, run through the routes of a server without a network.

`Journal` keeps what is done while it runs: a run that was killed goes on from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from triptych.errors import InputError, nearest, shown
from triptych.files import exists
from triptych.serve.limits import ServerLimits
from .journal import Journal, Summary

LONGEST_LINE = ServerLimits.body_bytes  # a body that is longer is refused by the routes too
FIELDS = ("custom_id", "method", "url", "body")
log = logging.getLogger(__name__)


class BadLine(Exception):
    """A line that is no request; the message says why."""


class BatchInput:
    """The lines of the file `path` that are not blank, by their places in it; to be used in a `with`.

    Raises InputError for a file that cannot be read or that has no request, and for a `custom_id` that two lines have.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            problem = "is no file" if exists(path) else "there is no such file"
            raise InputError(f"{path}: {problem}; give a file of requests, one a line")
        self.path, self.places = path, list[tuple[int, int]]()  # first byte, bytes
        digest = hashlib.sha256()
        try:
            self.file = path.open("rb")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        try:
            self._read(digest.update)
        except BaseException:
            self.file.close()
            raise
        self.digest = digest.hexdigest()

    def __enter__(self) -> BatchInput:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _read(self, digest: Callable[[bytes], object]) -> None:
        first_with: dict[str, int] = {}
        number, wrong = 0, "it is empty"
        while line := self.file.readline(LONGEST_LINE + 1):
            number += 1
            digest(line)
            at, size = self.file.tell() - len(line), len(line)
            rest = line
            while len(rest) > LONGEST_LINE and not rest.endswith(
                b"\n"
            ):  # of a line that is too long, which is not kept
                rest = self.file.readline(LONGEST_LINE + 1)
                digest(rest)
            if not line.strip():
                continue
            self.places.append((at, size))
            try:
                custom_id = request_of(line)["custom_id"]
            except BadLine as problem:
                wrong = f"line {number}: {problem}"
                continue
            if first_with.setdefault(custom_id, number) != number:
                both = f"lines {first_with[custom_id]} and {number}"
                raise InputError(f"{self.path}: {both} have the custom_id {shown(custom_id)}; change one")
        if not first_with:
            raise InputError(
                f"{self.path}: has no request ({wrong}); write a JSON object with {', '.join(FIELDS)} a line"
            )

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.line, range(len(self)))

    def line(self, index: int) -> bytes:
        at, size = self.places[index]
        self.file.seek(at)
        return self.file.read(size)


def request_of(line: bytes) -> dict[str, Any]:
    """The request of a line.  Raises BadLine for anything that is none."""
    if len(line) > LONGEST_LINE:
        raise BadLine(f"it has more than {LONGEST_LINE:,} bytes")
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLine("it is no JSON") from None
    if not isinstance(request, dict):
        raise BadLine("it is no JSON object")
    for name in request:
        if name not in FIELDS:
            raise BadLine(f"{shown(name)} is no field of a request{nearest(name, FIELDS)}")
    if not isinstance(request.get("custom_id"), str) or not request["custom_id"]:
        raise BadLine("it has no custom_id, which is a text")
    if request.get("method") != "POST":
        raise BadLine("its method must be POST")
    if not isinstance(request.get("url"), str) or not request["url"].startswith("/"):
        raise BadLine("its url must be a route, such as /v1/chat/completions")
    if not isinstance(request.get("body"), dict):
        raise BadLine("its body must be a JSON object")
    if request["body"].get("stream"):
        raise BadLine("its body has stream, which a batch has no use for; leave it out")
    return request


async def respond(app: ASGIApp, url: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of the application's response to a POST of JSON."""
    unread, status, answer = True, 500, b""

    async def receive() -> Message:
        nonlocal unread
        if not unread:
            await asyncio.Event().wait()  # for a client that never leaves
        unread = False
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    path, _, query = url.partition("?")
    size = str(len(body)).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", size)],
        "client": None, "server": None, "state": {},
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception as error:  # its response has been sent
        log.exception("a request of a batch failed", exc_info=error)
    return status, answer


async def record_of(app: ASGIApp, line: bytes) -> tuple[int, dict[str, Any]]:
    """The status of a line's response, 0 where it is no request, and its record in OpenAI's form."""
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        request = request_of(line)
    except BadLine as problem:
        with suppress(ValueError, TypeError, KeyError):
            custom_id = json.loads(line)["custom_id"]
            record["custom_id"] = custom_id if isinstance(custom_id, str) else None
        record["error"] = {"code": "invalid_line", "message": f"the line is no request: {problem}"}
        return 0, record
    status, answer = await respond(app, request["url"], json.dumps(request["body"]).encode())
    try:
        body = json.loads(answer)
    except ValueError:
        body = None
    record |= {
        "custom_id": request["custom_id"],
        "response": {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body},
    }
    if body is None:
        record["error"] = {"code": "no_json", "message": f"{request['url']} answers no JSON, which a batch cannot hold"}
    return status, record


async def run(
    app: ASGIApp, requests: BatchInput, journal: Journal, *, at_once: int, progress: Callable[[int], None]
) -> Summary:
    """Run what the journal does not have yet, `at_once` requests at a time, and write its file.  `progress` is called
    with the number of lines that are done."""
    journal.begin()
    waiting = iter([i for i in range(len(requests.places)) if i not in journal.done])
    progress(len(journal.done))

    async def work() -> None:
        for index in waiting:
            status, record = await record_of(app, requests.line(index))
            journal.add(index, status, record)
            progress(len(journal.done))

    tasks = [asyncio.create_task(work()) for _ in range(at_once)]
    syncing = asyncio.create_task(journal.sync())
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, syncing):
            task.cancel()
        await asyncio.gather(*tasks, syncing, return_exceptions=True)
    journal.finish()
    return journal.summary()
