"""`/v1/chat/completions`: OpenAI's answer to a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from triptych.errors import TriptychError
from triptych.generate import Request
from triptych.generate.request import TokenLogprobs
from triptych.text import Tokenizer
from .fields import ApiError, Fields
from .generation import REASONS, Generation, error_event, event, respond
from .requests import body, generation_request, seed_of
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server


def routes(server: Server) -> list[Route]:
    async def chat(request: HttpRequest) -> Response:
        fields = await body(request, "sampling", "chat")
        worker = server.worker_of(fields)
        generation = Generation(worker, fields, chat_requests(worker, fields), kind="chatcmpl")
        return await respond(request, generation, lambda: whole(generation), lambda: events(generation))

    return [Route("/v1/chat/completions", chat, methods=["POST"])]


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


def logprobs_of(tokenizer: Tokenizer | None, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
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


def whole(generation: Generation) -> dict[str, Any]:
    tokenizer = generation.worker.model.tokenizer
    choices = [
        {
            "index": number,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": logprobs_of(tokenizer, one.ids, one.logprobs),
            "finish_reason": one.finish_reason,
        }
        for number, one in enumerate(generation.choices)
    ]
    return generation.head("chat.completion") | {"choices": choices, "usage": generation.usage}


async def events(generation: Generation) -> AsyncIterator[bytes]:
    """First the role of each choice, then what it says piece by piece, then the usage where it was requested; the last
    event is `[DONE]`."""
    head, tokenizer = generation.head("chat.completion.chunk"), generation.worker.model.tokenizer
    first = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    yield event(head | {"choices": [{"index": number} | first for number in range(len(generation.rows))]})
    try:
        async for number, piece in generation.pieces():
            if piece.text or piece.logprobs or piece.reason is not None:
                delta = {"content": piece.text} if piece.text else {}
                logprobs = logprobs_of(tokenizer, piece.ids, piece.logprobs)
                reason = REASONS.get(piece.reason or "")
                choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
                yield event(head | {"choices": [choice]})
    except ApiError as error:
        yield error_event(error)
        return
    if (generation.fields.get("stream_options") or {}).get("include_usage"):
        yield event(head | {"choices": [], "usage": generation.usage})
    yield b"data: [DONE]\n\n"
