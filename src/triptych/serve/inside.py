"""`/v1/inspect`: reads, statistics and edits by the library's own sites, served with `--inspect` only."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import TYPE_CHECKING, Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from triptych.errors import TriptychError
from triptych.model import Model
from triptych.probe import Read, Trace
from . import chat, conversation
from .edits import edits_of
from .fields import ApiError, Fields
from .requests import body
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server

MOST_BYTES = 4 << 20  # of the values of one answer


def routes(server: Server) -> list[Route]:
    async def inspect(request: HttpRequest) -> Response:
        if not server.inspect:
            raise ApiError(404, "start the server with --inspect to read values inside its models")
        fields = await body(request, "inspect", *server.inside)
        worker = server.worker_of(fields)
        prompt = await prompt_of(worker, fields)
        return JSONResponse(await worker.call(lambda: inspection(worker.model, worker.name, fields, prompt)))

    return [Route("/v1/inspect", inspect, methods=["POST"])]


async def prompt_of(worker: ModelWorker, fields: Fields) -> Any:
    """What is inspected: `prompt`, or the ids of `messages` as the chat route reads them.  Raises ApiError for both."""
    if ("prompt" in fields.values) == ("messages" in fields.values):
        raise ApiError(400, "give what is read as prompt, or as messages", "prompt")
    if "prompt" in fields.values:
        return fields.values["prompt"]
    read = await asyncio.to_thread(conversation.prompt_of, worker, chat.conversation_of(fields))
    if read.source is not None:
        raise ApiError(400, "messages are for models that continue a text; give a prompt and a target", "messages")
    return read.ids


# ---------------------------------------------------------------- reads


def read_of(fields: Fields, value: object, at: str) -> Read:
    """One read: the name of a site or a glob, or an object with heads, positions, layers and a reduction."""
    if isinstance(value, str):
        return Read(value)
    one = fields.inner(value, "read", at=at)
    return Read(
        one.values["site"], heads=one.get("heads"), at=one.get("at"), layers=one.get("layers"), reduce=one.get("reduce")
    )


def inspection(model: Model, name: str, fields: Fields, prompt: Any) -> dict[str, Any]:
    """The answer: one forward of a prompt under the edits, with what was read, statistics of the attention, and the
    likeliest next tokens at each position.  Raises ApiError for what the model cannot do, and for too many bytes."""
    rows, target = [prompt], fields.get("target")
    targets = None if target is None else [target]
    limit = min(fields.get("max_bytes", MOST_BYTES), MOST_BYTES)
    encoded = fields.get("encoding_format") == "base64"
    try:
        edits = edits_of(model, fields)
        reads = [read_of(fields, one, f"read[{i}]") for i, one in enumerate(fields.get("read", []))]
        trace = model.trace(rows, targets, read=reads, edit=edits, max_bytes=limit, allow_null=True)
        answer: dict[str, Any] = {"object": "inspection", "model": name, "tokens": tokens_of(model, trace)}
        answer["reads"] = {site: value_of(trace, site, encoded=encoded) for site in trace}
        answer["edits"] = dict(trace.fired)
        if "statistics" in fields.values:
            how = dict(fields.inner(fields.values["statistics"], "statistics", at="statistics").values)
            measured = model.statistics(rows, targets, edit=edits, max_bytes=limit, **how)
            answer["statistics"] = {site: value_of(measured, site, encoded=encoded) for site in measured}
    except TriptychError as error:
        raise ApiError(400, str(error)) from None
    if fields.get("top_logprobs"):
        answer["predictions"] = predictions(model, trace.logits[0], fields.values["top_logprobs"])
    return answer


def tokens_of(model: Model, trace: Trace) -> list[dict[str, Any]]:
    tokenizer = model.tokenizer
    return [
        {"id": token, "text": None if tokenizer is None else tokenizer.decode([token])}
        for token in (trace.targets or trace.tokens or [[]])[0]
    ]


def value_of(trace: Trace, site: str, *, encoded: bool) -> dict[str, Any]:
    """A value as nested lists, with null where it is not finite (masked scores are -inf), or as the bytes of little-
    endian 32-bit floats in base64."""
    (value,) = trace[site]
    value = value.detach().float().cpu().contiguous()
    shape = {"shape": [*value.shape], "positions": [*trace.positions(site)[0]]}
    if encoded:
        return shape | {"base64": base64.b64encode(value.numpy().astype("<f4").tobytes()).decode()}
    finite = bool(torch.isfinite(value).all())
    return shape | {"values": value.tolist() if finite else without_infinities(value.tolist())}


def without_infinities(value: Any) -> Any:
    if isinstance(value, list):
        return [without_infinities(one) for one in value]
    return value if math.isfinite(value) else None


def predictions(model: Model, logits: Tensor, count: int) -> list[list[dict[str, Any]]]:
    """For each position the likeliest next tokens with their log-probabilities (nats), best first."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    tokenizer = model.tokenizer
    return [
        [
            {"id": token, "text": None if tokenizer is None else tokenizer.decode([token]), "logprob": logprob}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        for ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
