"""OpenAI's routes of generation: `/v1/completions` and `/v1/chat/completions`, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.errors import TriptychError
from triptych.generate import Request
from triptych.generate.request import TokenLogprobs
from triptych.text import Tokenizer
from .fields import ApiError, Fields
from .requests import generation_request, seed_of, stop_of
from .worker import ModelWorker, Piece, ServedRow

REASONS = {"end": "stop", "stop": "stop", "length": "length", "deadline": "length", "cancelled": "stop"}


@dataclass(eq=False)
class Generated:
    """One choice of a response while it is written."""

    text: str = ""
    tokens: int = 0
    reason: str | None = None


class Generation:
    """The rows of one request, and what a response says of them."""

    def __init__(self, worker: ModelWorker, fields: Fields, requests: Sequence[Request], *, kind: str) -> None:
        self.worker, self.fields, self.kind = worker, fields, kind
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self.prompt_tokens = sum(len(one.prompt) for one in {id(one.prompt): one for one in requests}.values())
        self.choices = [Generated() for _ in requests]
        stop = stop_of(fields)
        self.rows = [worker.submit(request, stop) for request in requests]

    @property
    def usage(self) -> dict[str, int]:
        written = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }  # fmt: skip

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all rows as they come, each with the number of its choice.  Raises ApiError where a row failed;
        rows that still run are cancelled, however this ends."""
        queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

        async def forward(number: int, row: ServedRow) -> None:
            async for piece in row:
                await queue.put((number, piece))

        tasks = [asyncio.create_task(forward(number, row)) for number, row in enumerate(self.rows)]
        try:
            while any(choice.reason is None for choice in self.choices):
                number, piece = await queue.get()
                choice = self.choices[number]
                choice.text += piece.text
                choice.tokens += len(piece.ids)
                choice.reason = piece.reason
                if piece.reason == "error":
                    raise failure(piece.error)
                yield number, piece
        finally:
            for task, row, choice in zip(tasks, self.rows, self.choices, strict=True):
                task.cancel()
                if choice.reason is None:
                    row.cancel()

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.worker.name}


def failure(error: Exception | None) -> ApiError:
    """The response to an error of a row: the caller's where it says so, else one without any detail of the inside."""
    if isinstance(error, TriptychError):
        return ApiError(400, str(error))
    return ApiError(500, "the request failed; the server's log says why")


# -- completions ------------------------------------------------------------------------------------------------------


def completion_requests(worker: ModelWorker, fields: Fields) -> list[Request]:
    """`n` rows for each prompt: a text, token ids, or a list of either."""
    model, prompt = worker.model, fields.values["prompt"]
    single = isinstance(prompt, str) or (prompt and all(type(one) is int for one in prompt))
    prompts = [prompt] if single else prompt
    if not prompts or not all(isinstance(one, str) or (isinstance(one, list) and one) for one in prompts):
        raise ApiError(400, "prompt must be a text, a list of token ids, or a list of either", "prompt")
    seed, count = seed_of(fields), fields.get("n", 1)
    try:
        rows, sources = model.inputs.prompts(prompts, "")
    except TriptychError as error:
        raise ApiError(400, str(error), "prompt") from None
    return [
        generation_request(
            model, fields, row, None if sources is None else sources[i], i * count + j, seed,
            logprobs=fields.get("logprobs"),
        )
        for i, row in enumerate(rows) for j in range(count)
    ]  # fmt: skip


def completion_choice(number: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": REASONS.get(reason or "")}


# -- chat -------------------------------------------------------------------------------------------------------------


def messages_of(fields: Fields) -> list[dict[str, str]]:
    """The messages as templates read them: of content in parts the texts, joined.  Raises ApiError for other parts."""
    messages = []
    for i, message in enumerate(fields.values["messages"]):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    problem = f"messages[{i}] has a part that is no text, which no model here reads"
                    raise ApiError(400, problem, "messages")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{i}] must have a role and a content of text", "messages")
        messages.append({"role": message["role"], "content": content})
    return messages


def chat_requests(worker: ModelWorker, fields: Fields) -> list[Request]:
    """`n` rows for the conversation."""
    model, seed = worker.model, seed_of(fields)
    try:
        (row,), sources = model.inputs.prompts([model.render(messages_of(fields))], "")
    except TriptychError as error:
        raise ApiError(400, str(error), "messages") from None
    top = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    source = None if sources is None else sources[0]
    return [
        generation_request(model, fields, row, source, j, seed, logprobs=top) for j in range(fields.get("n", 1))
    ]  # fmt: skip


def chat_logprobs(tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    if not logprobs or tokenizer is None:
        return None

    def entry(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*pair) for pair in one.top]}
        for token, one in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


async def whole(generation: Generation) -> dict[str, Any]:
    """The response with all choices."""
    tokenizer = generation.worker.model.tokenizer
    ids: list[list[int]] = [[] for _ in generation.rows]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in generation.rows]
    async for number, piece in generation.pieces():
        ids[number] += piece.ids
        logprobs[number] += piece.logprobs
    chat = generation.kind == "chatcmpl"
    choices = []
    for number, choice in enumerate(generation.choices):
        if chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            details = chat_logprobs(tokenizer, ids[number], logprobs[number])
            reason = REASONS.get(choice.reason or "")
            choices.append({"index": number, "message": message, "logprobs": details, "finish_reason": reason})
        else:
            choices.append(completion_choice(number, choice.text, choice.reason))
    head = generation.head("chat.completion" if chat else "text_completion")
    return head | {"choices": choices, "usage": generation.usage}


async def events(generation: Generation) -> AsyncIterator[bytes]:
    """The same as server-sent events, the last one `[DONE]`; an error after the first is an event of its own."""
    chat = generation.kind == "chatcmpl"
    head = generation.head("chat.completion.chunk" if chat else "text_completion")
    tokenizer = generation.worker.model.tokenizer
    if chat:
        first = [{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                 for i in range(len(generation.rows))]  # fmt: skip
        yield event(head | {"choices": first})
    try:
        async for number, piece in generation.pieces():
            if not piece.text and piece.reason is None and not piece.logprobs:
                continue
            reason = REASONS.get(piece.reason or "")
            if chat:
                details = chat_logprobs(tokenizer, piece.ids, piece.logprobs)
                delta = {"content": piece.text} if piece.text else {}
                choice = {"index": number, "delta": delta, "logprobs": details, "finish_reason": reason}
            else:
                choice = completion_choice(number, piece.text, piece.reason)
            yield event(head | {"choices": [choice]})
    except ApiError as error:
        yield event({"error": {"message": error.message, "type": "server_error", "param": None, "code": error.code}})
        return
    if (generation.fields.get("stream_options") or {}).get("include_usage"):
        yield event(head | {"choices": [], "usage": generation.usage})
    yield b"data: [DONE]\n\n"
