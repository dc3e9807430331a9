"""The rows of one request while they run, and the responses that are made of them: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from torch import Tensor

from triptych.errors import TriptychError
from triptych.generate import Request
from triptych.generate.request import TokenLogprobs
from .fields import ApiError, Fields
from .replies import Change, Reply
from .requests import refused, stop_of
from .worker import STOPPING, ModelWorker, RowPiece

log = logging.getLogger(__name__)
ADVICE = "x-triptych-without-effect"  # names the fields of a request that have none
REASONS = {"end": "stop", "stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop"}


@dataclass(eq=False)
class Generated:
    """One choice of a response while it is written: its text so far, its ids, their log-probabilities and those of the
    prompt where they were requested, why it ended, and by which stop string; `reply` has its texts and calls of
    tools."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop: str | None = None
    reply: Reply = field(default_factory=Reply)

    @property
    def finish_reason(self) -> str | None:
        """The reason by OpenAI's words."""
        reason = REASONS.get(self.reason or "")
        return "tool_calls" if reason == "stop" and self.reply.called else reason


class ServedRequest:
    """The rows of one request, which begin at once, and their choices.

    started    when they began, and `begun` when the first of them wrote (`perf_counter`).
    """

    def __init__(
        self, worker: ModelWorker, fields: Fields, requests: Sequence[Request], *, kind: str,
        reply: Callable[[], Reply] = Reply, hidden: frozenset[int] | None = None,
    ) -> None:  # fmt: skip
        self.worker, self.fields = worker, fields
        self.id, self.created = kind + uuid.uuid4().hex, int(time.time())
        self.prompt_tokens = sum(map(tokens_read, {id(one.prompt): one for one in requests}.values()))
        self.choices = [Generated(reply=reply()) for _ in requests]
        stop = stop_of(fields)
        self.started, self.begun = time.perf_counter(), 0.0
        self.rows = [worker.submit(request, stop, hidden=hidden, due=fields.due) for request in requests]

    async def taken(self) -> None:
        """Wait until the worker has taken all rows.  Raises ApiError where it refused one; the others are cancelled."""
        try:
            for row in self.rows:
                await row.taken.wait()
                if row.refused is not None:
                    raise failure(row.refused, self.worker)
        except BaseException:
            for row in self.rows:
                row.cancel()
            raise

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompts that were not computed again; of each prompt once, however many rows it has."""
        least: dict[int, int] = {}
        for row in self.rows:
            reused, prompt = 0 if row.row is None else row.row.reused, id(row.request.prompt)
            least[prompt] = min(reused, least.get(prompt, reused))
        return sum(least.values())

    @property
    def written_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def usage(self) -> dict[str, Any]:
        written = self.written_tokens
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        }  # fmt: skip

    async def pieces(self) -> AsyncIterator[tuple[int, RowPiece]]:
        """The pieces of all rows as they come, each with the number of its choice.  Raises ApiError where a row failed;
        rows that still run are cancelled, however this ends."""
        queue: asyncio.Queue[tuple[int, RowPiece]] = asyncio.Queue()

        async def forward(number: int, row: AsyncIterator[RowPiece]) -> None:
            async for piece in row:
                await queue.put((number, piece))

        tasks = [asyncio.create_task(forward(number, aiter(row))) for number, row in enumerate(self.rows)]
        try:
            while any(choice.reason is None for choice in self.choices):
                number, piece = await queue.get()
                self.begun = self.begun or time.perf_counter()
                choice = self.choices[number]
                if choice.reason is not None:  # of a row that `end` has cancelled
                    continue
                choice.text += piece.text
                choice.ids += piece.ids
                choice.logprobs += piece.logprobs
                choice.prompt += piece.prompt
                choice.reason, choice.stop = piece.reason, piece.stop
                if piece.reason == "error":
                    raise failure(piece.error, self.worker)
                yield number, piece
        finally:
            for task, row, choice in zip(tasks, self.rows, self.choices, strict=True):
                task.cancel()
                if choice.reason is None:
                    row.cancel()

    async def changes(self) -> AsyncIterator[tuple[int, RowPiece, list[Change]]]:
        """The pieces of all rows, and what each changes in the reply of its choice.  Raises as `pieces`."""
        async for number, piece in self.pieces():
            choice = self.choices[number]
            changes = choice.reply.put(piece.text)
            if choice.reply.complete and choice.reason is None:
                choice.reason = "stop"
                self.rows[number].cancel()
            if choice.reason is not None:
                changes += choice.reply.finish()
            yield number, piece, changes

    async def finish(self) -> None:
        """Wait until all rows have ended.  Raises as `pieces`."""
        async for _ in self.changes():
            pass

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.worker.name}


def tokens_read(request: Request) -> int:
    """The tokens of a prompt; of a source and what its text begins with, where an encoder reads one."""
    source = request.source
    return len(request.prompt) + (0 if source is None or isinstance(source, Tensor) else len(source))


def failure(error: Exception | None, worker: ModelWorker) -> ApiError:
    """The response to an error of a row: the caller's where it says so, else one without any detail of the inside."""
    if worker.stopping:
        return ApiError(503, STOPPING)
    if isinstance(error, TriptychError):
        return refused(error, worker)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the request failed; the server's log says why")


async def respond(
    request: HttpRequest, generation: ServedRequest, whole: Callable[[], Mapping[str, Any]],
    events: Callable[[], AsyncIterator[bytes]], *, media: str = "text/event-stream",
) -> Response:  # fmt: skip
    """The response to a request: `events()` as a stream where it wants one, else `whole()` once all rows have ended.
    The rows are cancelled where the client leaves before."""
    if "stream_options" in generation.fields.values and not generation.fields.get("stream"):
        generation.fields.note("stream_options")
    headers = advice_header(generation.fields)
    await generation.taken()
    if generation.fields.get("stream"):
        return StreamingResponse(events(), media_type=media, headers=headers)
    finish, left = asyncio.ensure_future(generation.finish()), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({finish, left}, return_when=asyncio.FIRST_COMPLETED)
        if not finish.done():
            return Response(status_code=499)  # nobody reads it
        finish.result()
    finally:
        finish.cancel()
        left.cancel()
    return JSONResponse(whole(), headers=headers)


def advice_header(fields: Fields) -> dict[str, str]:
    """The header that names the fields without effect."""
    return {ADVICE: ", ".join(fields.advice)} if fields.advice else {}


async def _disconnected(request: HttpRequest) -> None:
    """Returns when the client has closed the connection; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: object, name: str | None = None) -> bytes:
    """A server-sent event (HTML standard, 9.2)."""
    first = b"" if name is None else b"event: " + name.encode() + b"\n"
    return first + b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the response has begun, in OpenAI's form."""
    return event({"error": {"message": error.message, "type": "server_error", "param": None, "code": error.code}})
