"""`/v1/rerank` and `/rerank`: documents by how well they answer a query, in the shapes of Cohere and Jina (`documents`)
and of text-embeddings-inference (`texts`).

A cross-encoder, a classifier of pairs with one class, scores by the sigmoid of its logit, or by the logit where
`raw_scores`; a model of sentence embeddings by the cosine of two vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.spec import ClassHeadSpec
from triptych.tasks.labels import head_outputs
from triptych.text import Encoded
from .abilities import require
from .calls import in_pieces, labelled_rows, lengths_of, prepared
from .embeddings import usage_of, vectors_of
from .fields import ApiError, Fields
from .requests import body
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server

Ranked = list[tuple[int, float]]


def routes(server: Server) -> list[Route]:
    async def rerank(request: HttpRequest) -> Response:
        fields = await body(request, "rerank")
        worker = server.worker_of(fields)
        require(worker, "rerank")
        documents = documents_of(fields)
        scores, count = await scores_of(request, worker, fields, documents)
        ranked = sorted(enumerate(scores), key=lambda pair: -pair[1])
        if "texts" in fields.values:
            return JSONResponse([
                {"index": i, "score": score} | ({"text": documents[i]} if fields.get("return_text") else {})
                for i, score in ranked
            ])  # fmt: skip
        results = [
            {"index": i, "relevance_score": score}
            | ({"document": {"text": documents[i]}} if fields.get("return_documents") else {})
            for i, score in ranked[: fields.get("top_n", len(ranked))]
        ]
        return JSONResponse({"model": worker.name, "results": results, "usage": usage_of(count)})

    return [Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")]


def documents_of(fields: Fields) -> list[str]:
    """The texts of the documents, in whichever of the two shapes.  Raises ApiError for both, neither, and what is no
    text."""
    names = [name for name in ("documents", "texts") if name in fields.values]
    if len(names) != 1:
        problem = "give the texts to rank as documents (Cohere's and Jina's shape) or as texts (TEI's)"
        raise ApiError(400, problem, "documents")
    (name,) = names
    others = (
        ("return_text", "raw_scores", "truncation_direction") if name == "documents" else ("top_n", "return_documents")
    )
    if wrong := next((other for other in others if other in fields.values), None):
        raise ApiError(400, f"{wrong} does not go with {name}; leave it out", wrong)
    values = [one.get("text") if isinstance(one, Mapping) else one for one in fields.values[name]]
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) < len(values):
        raise ApiError(400, f'{name} must be texts, or objects with a "text"', name)
    return texts


async def scores_of(
    request: HttpRequest, worker: ModelWorker, fields: Fields, documents: Sequence[str]
) -> tuple[list[float], int]:
    """A score for each document, and how many tokens were read.  Raises ApiError for what the model cannot read."""
    query, model = fields.values["query"], worker.model
    if not isinstance(model.spec.head, ClassHeadSpec):
        vectors, count = await vectors_of(request, worker, fields, [query, *documents])
        unit = torch.nn.functional.normalize(vectors, dim=-1)
        return (unit[1:] @ unit[0]).tolist(), count
    if fields.get("truncate"):
        rows = await prepared(worker, lambda: cut_pairs(worker, query, documents), "documents")
        lengths = lengths_of(worker, [row.ids for row in rows], "documents")
    else:
        rows, lengths = await labelled_rows(worker, [query] * len(documents), documents, "documents")
    logits = await in_pieces(request, worker, rows, lengths, lambda group: _logits(worker, group))
    return [logit if fields.get("raw_scores") else _sigmoid(logit) for logit in logits], sum(lengths)


def cut_pairs(worker: ModelWorker, query: str, documents: Sequence[str]) -> list[Encoded]:
    """The query beside the beginning of each document that the model reads with it.  Raises InputError for a query that
    leaves no room for any."""
    longest, words = worker.model.spec.source_context, worker.model.inputs.words
    return [words.encode_with_offsets(query, one, max_length=longest)[0] for one in documents]


def _logits(worker: ModelWorker, rows: Sequence[Encoded]) -> list[float]:
    return [float(one) for one in head_outputs(worker.model.module, rows)]


def _sigmoid(logit: float) -> float:
    return float(torch.tensor(logit).sigmoid())
