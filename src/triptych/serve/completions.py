"""`/v1/completions`: OpenAI's continuation of a text or of token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from triptych.errors import TriptychError
from triptych.generate import Request
from .fields import ApiError, Fields
from .generation import REASONS, Generation, error_event, event, respond
from .inside import edited
from .requests import body, generation_request, seed_of
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server


def routes(server: Server) -> list[Route]:
    async def completions(request: HttpRequest) -> Response:
        fields = await body(request, "sampling", "completions", *server.inside)
        worker = server.worker_of(fields)
        requests = await edited(worker, fields, completion_requests(worker, fields))
        generation = Generation(worker, fields, requests, kind="cmpl")
        return await respond(request, generation, lambda: whole(generation), lambda: events(generation))

    return [Route("/v1/completions", completions, methods=["POST"])]


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


def choice_of(number: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": REASONS.get(reason or "")}


def whole(generation: Generation) -> dict[str, Any]:
    choices = [choice_of(number, one.text, one.reason) for number, one in enumerate(generation.choices)]
    return generation.head("text_completion") | {"choices": choices, "usage": generation.usage}


async def events(generation: Generation) -> AsyncIterator[bytes]:
    """The choices piece by piece, then the usage where it was requested; the last event is `[DONE]`."""
    head = generation.head("text_completion")
    try:
        async for number, piece in generation.pieces():
            if piece.text or piece.reason is not None:
                yield event(head | {"choices": [choice_of(number, piece.text, piece.reason)]})
    except ApiError as error:
        yield error_event(error)
        return
    if (generation.fields.get("stream_options") or {}).get("include_usage"):
        yield event(head | {"choices": [], "usage": generation.usage})
    yield b"data: [DONE]\n\n"
