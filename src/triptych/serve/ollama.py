"""Ollama's routes: its version, the list and details of models, conversations, continuations and vectors; streams are
lines of JSON.

Sampling that a request leaves out is as Ollama's documentation gives it, but that nothing is penalized for repetition.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.tasks.generation_requests import decoder_rows
from .abilities import require
from .calls import prepared
from .cards import ModelCard
from .chat import function_of
from .conversation import Conversation, Message, ToolCall, begin
from .embeddings import listed, vectors_of
from .fields import ApiError, Fields, read
from .generation import REASONS, ServedRequest, advice_header, respond
from .replies import CallPart, TextPart
from .requests import body, generation_request, seed_of
from .structured import constraint_of
from .thinking import with_thinking
from .tools import functions, tool_use
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server

VERSION = "0.12.0"  # of Ollama, whose API this is; its clients compare it with the least that they work with
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
STAYS = "9999-12-31T23:59:59Z"  # until when a model is loaded
NDJSON = "application/x-ndjson"


def routes(server: Server) -> list[Route]:
    async def version(request: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(request: HttpRequest) -> Response:
        cards = [server.card(name) for name in server.names]
        return JSONResponse({"models": await asyncio.to_thread(lambda: [card.described for card in cards])})

    async def running(request: HttpRequest) -> Response:
        cards = [server.card(name) for name in server.workers]
        return JSONResponse({"models": await asyncio.to_thread(lambda: [running_json(card) for card in cards])})

    async def show(request: HttpRequest) -> Response:
        fields = await body(request, "ollama_show", load=False)
        if len({fields.values[one] for one in ("model", "name") if one in fields.values}) > 1:
            raise ApiError(400, "model and name differ, and are two names of one field; leave name out", "name")
        name = server.name_of(fields.get("model", fields.get("name")))
        if name is None:
            raise ApiError(400, "model is missing", "model")
        card = server.card(name)
        return JSONResponse(await asyncio.to_thread(lambda: card.shown), headers=advice_header(fields))

    async def chat(request: HttpRequest) -> Response:
        fields = await body(request, "ollama", "ollama_chat")
        worker = server.worker_of(fields)
        require(worker, "chat")
        sampling = sampling_of(fields)
        if not fields.values["messages"]:
            return loaded(worker, fields, {"message": {"role": "assistant", "content": ""}})
        variables = await asyncio.to_thread(with_thinking, worker, fields)
        conversation = replace(conversation_of(fields), variables=variables)
        generation = await begin(worker, sampling, conversation, kind="ollama", shorten=True)
        return await answered(request, generation, message_json)

    async def generate(request: HttpRequest) -> Response:
        fields = await body(request, "ollama", "ollama_generate")
        worker = server.worker_of(fields)
        require(worker, "completions")
        sampling = sampling_of(fields)
        check_system(worker, fields)
        if not fields.get("prompt"):
            return loaded(worker, fields, {"response": ""})
        generation = await continuation(worker, sampling)
        return await answered(request, generation, lambda text, calls: {"response": text})

    async def embed(request: HttpRequest) -> Response:
        fields = await body(request, "ollama_embed")
        worker, start = server.worker_of(fields), time.perf_counter()
        require(worker, "embeddings")
        vectors, count = await vectors_of(request, worker, fields, fields.rows("input"))
        took = {"load_duration": 0, "total_duration": _nanoseconds(time.perf_counter() - start)}
        answer = {"model": worker.name, "prompt_eval_count": count, **took}
        lists = (vector.tolist() for vector in vectors)
        return await listed(answer, "embeddings", lists, headers=advice_header(fields))

    async def embeddings(request: HttpRequest) -> Response:
        fields = await body(request, "ollama_embeddings")
        worker = server.worker_of(fields)
        require(worker, "embeddings")
        text = fields.values["prompt"]
        vectors = (await vectors_of(request, worker, fields, [text]))[0].tolist() if text else [[]]
        return JSONResponse({"embedding": vectors[0]}, headers=advice_header(fields))

    return [
        Route("/api/version", version),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/chat", chat, methods=["POST"]),
        Route("/api/generate", generate, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/embeddings", embeddings, methods=["POST"]),
    ]


# ---------------------------------------------------------------- the request


def conversation_of(fields: Fields) -> Conversation:
    """The conversation of a request.  Calls have no ids here: what a tool returned is for the first call of its name
    that waits, or the first of all.  Raises ApiError for messages and tools that are none."""
    messages: list[Message] = []
    waiting: list[ToolCall] = []
    for i, one in enumerate(fields.values["messages"]):
        message = fields.inner(one, "ollama_message", at=f"messages[{i}]")
        role, content = message.values["role"], message.get("content", "")
        called = [fields.inner(call, "ollama_call", at=f"messages[{i}].tool_calls[{j}]").values["function"]
                 for j, call in enumerate(message.get("tool_calls", []))]  # fmt: skip
        calls = tuple(ToolCall(f"call_{i}_{j}", call["name"], call["arguments"]) for j, call in enumerate(called))
        waiting += calls
        name, answers = message.get("tool_name"), waiting if role == "tool" else []
        answered_call = next((call for call in answers if call.name == name), answers[0] if answers else None)
        if answered_call is not None:
            waiting.remove(answered_call)
        messages.append(Message(role, content, calls, "" if answered_call is None else answered_call.id, name))
    return Conversation(
        messages, tool_use(functions(fields, ("function", None), function_of, "chat_tool"), "auto", None, True)
    )


def sampling_of(fields: Fields) -> Fields:
    """The fields of a request with its options under OpenAI's names.  Raises ApiError for an option that is not known,
    of another type or out of its bounds."""
    options = read(fields.get("options", {}), "ollama_options", at="options")
    for name in options.advice:
        fields.note(name)
    values = DEFAULTS | dict(options.values)
    if values.get("top_p") == 0:  # Ollama's for the likeliest token alone
        values |= {"top_p": 1.0, "top_k": 1}
    check_repetition(fields, values)
    if "repeat_penalty" in values:
        values["repetition_penalty"] = values.pop("repeat_penalty")
    limit = values.pop("num_predict", -1)  # -1 and -2: until the model ends or its context is full
    values |= {"max_tokens": limit} if limit > 0 else {}
    return fields.changed(**{"stream": True, **fields.values, **values})


def check_repetition(fields: Fields, values: dict[str, Any]) -> None:
    """Take `repeat_last_n` from the options: all tokens of a row are penalized here (-1), or none (0).  Raises ApiError
    for another number where something is penalized."""
    last = values.pop("repeat_last_n", -1)
    if last == 0:
        values["repeat_penalty"] = 1.0
    elif last > 0 and values.get("repeat_penalty", 1.0) != 1.0:
        problem = "options.repeat_last_n must be -1 or 0 beside repeat_penalty, which is of all tokens here"
        raise ApiError(400, problem, "options.repeat_last_n")
    elif last > 0:
        fields.note("options.repeat_last_n")


def templated(worker: ModelWorker, fields: Fields) -> bool:
    """Whether a prompt is rendered as a conversation."""
    tokenizer = worker.model.tokenizer
    return not fields.get("raw") and tokenizer is not None and tokenizer.chat is not None


def check_system(worker: ModelWorker, fields: Fields) -> None:
    """Raise ApiError for a system prompt where nothing would read it."""
    if fields.get("system") and not templated(worker, fields):
        raise ApiError(400, f"system needs a chat template, which raw leaves out or {worker.name} lacks", "system")


async def continuation(worker: ModelWorker, fields: Fields) -> ServedRequest:
    """The row of `/api/generate`: a prompt as it is where `raw`, and without a template; else as a conversation."""
    model, prompt, system = worker.model, fields.values["prompt"], fields.get("system")
    variables = await asyncio.to_thread(with_thinking, worker, fields, templated(worker, fields))
    if templated(worker, fields):
        messages = [*([Message("system", system)] if system else []), Message("user", prompt)]
        return await begin(worker, fields, Conversation(messages, variables=variables), kind="ollama", shorten=True)
    (row,), sources = await prepared(worker, lambda: decoder_rows(model.inputs, [prompt], ""), "prompt")
    source = None if sources is None else sources[0]
    constraint = await asyncio.to_thread(constraint_of, fields, model)
    request = generation_request(model, fields, row, source, 0, seed_of(fields), shorten=True, constraint=constraint)
    return ServedRequest(worker, fields, [request], kind="ollama")


# ---------------------------------------------------------------- the response


def message_json(text: str, calls: Sequence[CallPart]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    values = [(call.name, value) for call in calls if (value := call.value()) is not None]
    if values:
        message["tool_calls"] = [{"function": {"name": name, "arguments": value}} for name, value in values]
    return {"message": message}


def running_json(card: ModelCard) -> dict[str, Any]:
    """A model that is loaded, and stays so."""
    known = {key: value for key, value in card.described.items() if key != "modified_at"}
    return known | {"expires_at": STAYS, "size_vram": 0, "context_length": card.spec.longest_row or 0}


def loaded(worker: ModelWorker, fields: Fields, nothing: dict[str, Any]) -> Response:
    """The response to a request without a prompt, which only loads the model."""
    head = {"model": worker.name, "created_at": _now(), **nothing}
    return JSONResponse(head | {"done": True, "done_reason": "load"}, headers=advice_header(fields))


async def answered(
    request: HttpRequest, generation: ServedRequest, part: Callable[[str, Sequence[CallPart]], dict[str, Any]]
) -> Response:
    """The response to a request for a text, of which `part` makes what it has of it and of calls of tools."""
    head, (choice,) = {"model": generation.worker.name}, generation.choices

    def last(text: str, calls: Sequence[CallPart]) -> dict[str, Any]:
        usage, started, begun, ended = generation.usage, generation.started, generation.begun, time.perf_counter()
        return head | {
            "created_at": _now(), **part(text, calls), "done": True, "done_reason": REASONS.get(choice.reason or ""),
            "load_duration": 0, "total_duration": _nanoseconds(ended - started),
            "prompt_eval_count": usage["prompt_tokens"], "prompt_eval_duration": _nanoseconds(begun - started),
            "eval_count": usage["completion_tokens"], "eval_duration": _nanoseconds(ended - begun),
        }  # fmt: skip

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for _, _, changes in generation.changes():
                text = "".join(change.delta for change in changes if isinstance(change.part, TextPart))
                calls = [change.part for change in changes if change.ends and isinstance(change.part, CallPart)]
                if text or calls:
                    yield _line(head | {"created_at": _now(), **part(text, calls), "done": False})
        except ApiError as error:
            yield _line({"error": error.message})
            return
        yield _line(last("", []))

    def whole() -> dict[str, Any]:
        return last(choice.reply.text, choice.reply.calls)

    return await respond(request, generation, whole, lines, media=NDJSON)


def _line(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
