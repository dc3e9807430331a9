"""Calls of a model that are no generation, cut into pieces between which the rows of others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from triptych.errors import TriptychError
from triptych.nn import InputRow
from triptych.tasks.labels import BATCH_TOKENS
from triptych.text import Encoded
from .fields import ApiError
from .generation import failure
from .requests import refused
from .worker import ModelWorker

Row = TypeVar("Row")
Result = TypeVar("Result")
FIRST = 256  # tokens of the first piece, whose time says how many the next ones may have
LONGEST = 1 << 16  # tokens of a row, for models whose positions have no end
SECONDS, BUSY_SECONDS = 0.5, 0.05  # of a piece; the second while rows are generated


class ClientLeft(ApiError):
    """Nobody reads the response any more."""

    def __init__(self) -> None:
        super().__init__(499, "the client has closed the connection")


async def in_pieces(
    request: HttpRequest, worker: ModelWorker, rows: Sequence[Row], lengths: Sequence[int],
    function: Callable[[Sequence[Row]], Sequence[Result]],
) -> list[Result]:  # fmt: skip
    """`function(rows)`, a result for each row in their order, called in the thread of the worker with some rows at a
    time: of like lengths, and together no more tokens than take `SECONDS`, or a single row.

    Raises ApiError for what the function refuses, and where the client has left before the last piece.
    """
    order = sorted(range(len(rows)), key=lambda i: lengths[i])
    results: dict[int, Result] = {}
    tokens, at = FIRST, 0
    while at < len(order):
        count = total = 0
        while at + count < len(order) and (not count or total + lengths[order[at + count]] <= tokens):
            total += lengths[order[at + count]]
            count += 1
        group = order[at : at + count]

        def timed(group: Sequence[int] = group) -> tuple[Sequence[Result], float]:
            start = perf_counter()
            return function([rows[i] for i in group]), perf_counter() - start

        piece, seconds = await called(worker, timed)
        results.update(zip(group, piece, strict=True))
        at += count
        limit = BUSY_SECONDS if worker.rows else SECONDS
        tokens = max(1, min(int(total * limit / max(seconds, 1e-6)), 4 * tokens, BATCH_TOKENS))
        if at < len(order) and await request.is_disconnected():
            raise ClientLeft
    return [results[i] for i in range(len(rows))]


def lengths_of(worker: ModelWorker, rows: Sequence[InputRow], field: str) -> list[int]:
    """The tokens of each row.  Raises ApiError for one that is empty or longer than the model reads."""
    context = worker.model.spec.source_context
    longest = LONGEST if context is None else context
    for i, row in enumerate(rows):
        if not len(row):
            raise ApiError(400, f"text {i} of {field} has no tokens", field)
        if len(row) > longest:
            problem = f"text {i} of {field} has {len(row):,} tokens, and {worker.name} reads at most {longest:,}"
            raise ApiError(400, problem, field)
    return [len(row) for row in rows]


async def labelled_rows(
    worker: ModelWorker, texts: Sequence[str | list[int]], second: Sequence[str] | None, field: str
) -> tuple[list[Encoded], list[int]]:
    """Rows for a head over classes, of texts or of pairs of them, and their lengths.  Raises ApiError for texts that
    the model cannot read."""
    encoded = await prepared(worker, lambda: worker.model.inputs.labelled(texts, second), field)
    rows = [row for row in encoded if isinstance(row, Encoded)]  # all of a model that reads text
    return rows, lengths_of(worker, [row.ids for row in rows], field)


async def called(worker: ModelWorker, function: Callable[[], Result]) -> Result:
    """The result of a function that uses the model, between two steps.  Raises ApiError where it fails."""
    try:
        result: Result = await worker.call(function)
    except Exception as error:
        raise failure(error, worker) from None
    return result


async def prepared(worker: ModelWorker, function: Callable[[], Result], field: str) -> Result:
    """The result of a function that prepares the rows of a request without the model, in another thread: long texts
    take long to tokenize.  Raises ApiError for what it refuses."""
    try:
        return await asyncio.to_thread(function)
    except TriptychError as error:
        raise refused(error, worker, field) from None
