"""`/v1/classify` and `/v1/fill`: the labels of texts, and the words behind their masks."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.tasks.labels import class_probabilities
from .abilities import require
from .calls import in_pieces, labelled_rows, lengths_of, prepared
from .embeddings import usage_of
from .fields import ApiError, Fields
from .generation import advice_header
from .requests import body
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server


def routes(server: Server) -> list[Route]:
    async def classify(request: HttpRequest) -> Response:
        fields = await body(request, "classify")
        worker = server.worker_of(fields)
        require(worker, "classify")
        return await classified(request, worker, fields)

    async def fill(request: HttpRequest) -> Response:
        fields = await body(request, "fill")
        worker = server.worker_of(fields)
        require(worker, "fill")
        return await filled(request, worker, fields)

    return [Route("/v1/classify", classify, methods=["POST"]), Route("/v1/fill", fill, methods=["POST"])]


async def classified(request: HttpRequest, worker: ModelWorker, fields: Fields) -> Response:
    """The probabilities of all labels of each text, in the order of the classes, as vLLM's route gives them, and beside
    them the likeliest label."""
    model, texts, second = worker.model, fields.rows("input"), fields.texts("second")
    if second and (len(second) != len(texts) or not all(isinstance(text, str) for text in texts)):
        raise ApiError(400, f"second must have a text for each of the {len(texts)} texts of input", "second")
    rows, lengths = await labelled_rows(worker, texts, second or None, "input")
    every = await in_pieces(request, worker, rows, lengths, lambda group: class_probabilities(model, group))
    data = [
        {"index": i, "label": model.labels[probs.index(max(probs))], "probs": probs, "num_classes": len(probs)}
        for i, probs in enumerate(every)
    ]
    return _listed(worker, fields, "classify", data, sum(lengths), labels=model.labels)


async def filled(request: HttpRequest, worker: ModelWorker, fields: Fields) -> Response:
    """The likeliest tokens at each mask of each text."""
    model, top = worker.model, fields.get("top", 5)
    rows = await prepared(worker, lambda: model.inputs.ids(fields.rows("input")), "input")
    lengths = lengths_of(worker, rows, "input")
    words = model.inputs.words
    for i, row in enumerate(rows):
        if words.mask_id is not None and words.mask_id not in row:
            (name,) = words.tokens([words.mask_id])
            raise ApiError(400, f"text {i} has no mask token to fill; write {name} for a word", "input")
    answers = await in_pieces(request, worker, rows, lengths, lambda group: model.fill(group, top=top))
    data = [
        {"index": i, "masks": [[{"token": token, "probability": p} for token, p in mask] for mask in masks]}
        for i, masks in enumerate(answers)
    ]
    return _listed(worker, fields, "fill", data, sum(lengths))


def _listed(
    worker: ModelWorker, fields: Fields, kind: str, data: list[dict[str, Any]], tokens: int, **more: object
) -> Response:
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": worker.name}
    return JSONResponse(head | more | {"data": data, "usage": usage_of(tokens)}, headers=advice_header(fields))
