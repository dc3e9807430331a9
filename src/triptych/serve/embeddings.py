"""`/v1/embeddings`: OpenAI's vectors of texts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from triptych.nn import InputRow
from .abilities import require
from .calls import in_pieces, lengths_of, prepared
from .fields import ApiError, Fields
from .generation import advice_header
from .requests import body
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server


def routes(server: Server) -> list[Route]:
    async def embeddings(request: HttpRequest) -> Response:
        fields = await body(request, "embeddings")
        worker = server.worker_of(fields)
        require(worker, "embeddings")
        vectors, count = await vectors_of(request, worker, fields, fields.rows("input"))
        packed = fields.get("encoding_format") == "base64"
        data = (
            {"object": "embedding", "index": i, "embedding": base64_of(vector) if packed else vector.tolist()}
            for i, vector in enumerate(vectors)
        )
        answer = {"object": "list", "model": worker.name, "usage": usage_of(count)}
        return await listed(answer, "data", data, headers=advice_header(fields))

    return [Route("/v1/embeddings", embeddings, methods=["POST"])]


async def vectors_of(
    request: HttpRequest, worker: ModelWorker, fields: Fields, texts: Sequence[str | Sequence[int]]
) -> tuple[Tensor, int]:
    """The vectors [B, D] of texts and rows of ids, in fp32 on the CPU, and how many tokens these have.

    `truncate` allows what the checkpoint reads only the beginning of.  Raises ApiError for texts that the model cannot
    read, and for another number of dimensions than it has.
    """
    model = worker.model
    width = model.spec.reads.outputs
    if fields.get("dimensions", width) != width:
        problem = f"vectors of {worker.name} have {width} dimensions, and it was not trained to have fewer"
        raise ApiError(400, problem, "dimensions")
    cut = bool(fields.get("truncate"))
    rows = await prepared(worker, lambda: model.inputs.sentences(list(texts), cut=cut), "input")
    lengths = lengths_of(worker, rows, "input")

    def encoded(group: Sequence[InputRow]) -> list[Tensor]:
        return list(model.encode(group).float().cpu())

    return torch.stack(await in_pieces(request, worker, rows, lengths, encoded)), sum(lengths)


def base64_of(vector: Tensor) -> str:
    """The numbers as little-endian fp32, as OpenAI's clients read them."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


async def listed(
    answer: Mapping[str, object], name: str, entries: Iterable[object], *, headers: Mapping[str, str]
) -> Response:
    """An answer with a long list, made in another thread entry by entry: as a whole, thousands of vectors would keep
    all other threads waiting for a second."""

    def content() -> str:
        every = ",".join(map(json.dumps, entries))
        return f'{json.dumps(answer)[:-1]}, "{name}": [{every}]}}'

    return Response(await asyncio.to_thread(content), media_type="application/json", headers=headers)


def usage_of(count: int) -> dict[str, Any]:
    """The tokens that were read; none were written."""
    return {"prompt_tokens": count, "total_tokens": count}
