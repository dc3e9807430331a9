"""`/v1/completions`: OpenAI's continuation of a text or of token ids, and the target that an encoder-decoder writes for
a source.

With `echo` the text begins with what the decoder read, and `logprobs` cover it: its first id has none, as nothing comes
before it.  An encoder-decoder's decoder reads its start token and then `decoder_prefix`, which is a field of our own:
its log-probabilities are those of a target beside the source in `prompt`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from triptych.errors import TriptychError
from triptych.generate import Request
from triptych.generate.request import TokenLogprobs
from triptych.tasks.generation_requests import decoder_rows
from triptych.text import Tokenizer
from .abilities import require
from .edits import edited
from .fields import MOST_ROWS, ApiError, Fields
from .generation import REASONS, Generated, ServedRequest, error_event, event, respond
from .requests import body, generation_request, refused, seed_of
from .structured import constraint_of
from .worker import ModelWorker, RowPiece

if TYPE_CHECKING:
    from .app import Server

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


def routes(server: Server) -> list[Route]:
    async def completions(request: HttpRequest) -> Response:
        fields = await body(request, "sampling", "constraint", "completions", *server.inside)
        worker = server.worker_of(fields)
        require(worker, "completions")
        rows = await asyncio.to_thread(rows_of, worker, fields)  # long texts take long to tokenize
        requests = await edited(worker, fields, [one for row in rows for one in row.requests])
        generation = ServedRequest(worker, fields, requests, kind="cmpl-")
        completion = Completion(generation, rows)
        return await respond(request, generation, completion.whole, completion.events)

    return [Route("/v1/completions", completions, methods=["POST"])]


@dataclass(frozen=True, eq=False)
class PromptRows:
    """The requests of one prompt, of which `count` are answered, and the ids and the text that `echo` repeats."""

    requests: Sequence[Request]
    count: int
    ids: Sequence[int]
    text: str


def rows_of(worker: ModelWorker, fields: Fields) -> list[PromptRows]:
    """`best_of` rows for each prompt, or `n`.  Raises ApiError for what the model cannot read, and for settings that do
    not go together."""
    model, prompts, prefix = worker.model, fields.rows("prompt"), fields.get("decoder_prefix", "")
    each, count, seed = _rows_of_each(worker, fields), fields.get("n", 1), seed_of(fields)
    constraint = constraint_of(fields, model)
    try:
        rows, sources = decoder_rows(model.inputs, prompts, prefix)
    except TriptychError as error:
        raise refused(error, worker, "prompt") from None
    logprobs = fields.get("logprobs")
    scored = bool(fields.get("echo")) and logprobs is not None
    if logprobs is None and each > count:
        logprobs = 0  # which the best ones are chosen by
    made = []
    for i, row in enumerate(rows):
        repeated = prompts[i] if sources is None else prefix
        text = repeated if isinstance(repeated, str) else "" if model.tokenizer is None else model.tokenizer.decode(row)
        source = None if sources is None else sources[i]
        numbers = range(i * each, (i + 1) * each)
        more = {"logprobs": logprobs, "constraint": constraint, "score_from": 1 if scored and len(row) > 1 else None}
        requests = [generation_request(model, fields, row, source, number, seed, **more) for number in numbers]
        made.append(PromptRows(requests, count, row, text))
    return made


def _rows_of_each(worker: ModelWorker, fields: Fields) -> int:
    """The rows of each prompt.  Raises ApiError for settings that do not go together."""
    count, echo, prefix = fields.get("n", 1), fields.get("echo"), fields.get("decoder_prefix")
    both = worker.model.spec.layout == "encoder-decoder"
    best_of = int(fields.get("best_of", count))
    rows = best_of * len(fields.rows("prompt"))
    if rows > MOST_ROWS:
        problem = f"{'best_of' if best_of > count else 'n'}={best_of} of each prompt are {rows:,} rows"
        raise ApiError(400, f"{problem}, and {MOST_ROWS:,} are the limit; send several requests", "n")
    if best_of < count:
        raise ApiError(400, f"best_of={best_of} must be at least n={count}", "best_of")
    if best_of > count and fields.get("stream"):
        problem = "best_of chooses among finished texts, which cannot be streamed; leave out stream or best_of"
        raise ApiError(400, problem, "best_of")
    if not echo and fields.get("max_tokens") == 0:
        raise ApiError(400, "max_tokens must be at least 1 without echo", "max_tokens")
    if prefix and not both:
        problem = f"decoder_prefix is for encoder-decoders, and {worker.name} is a decoder; put it at the end of prompt"
        raise ApiError(400, problem, "decoder_prefix")
    if both and echo and not prefix:
        raise ApiError(
            400,
            f"{worker.name} is an encoder-decoder: its encoder reads prompt, whose tokens have no log-probabilities; "
            "give the target as decoder_prefix, which echo then repeats and scores",
            "echo",
        )
    return best_of


class Completion:
    """The response to a request, of the rows of a generation."""

    def __init__(self, generation: ServedRequest, rows: Sequence[PromptRows]) -> None:
        self.generation, self.fields, self.rows = generation, generation.fields, rows
        self.tokenizer = generation.worker.model.tokenizer
        self.row_of = [row for row in rows for _ in row.requests]
        self.texts: dict[int, OffsetText] = {}  # of choices whose first piece was answered

    def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for row in self.rows:
            numbers = [number for number, one in enumerate(self.row_of) if one is row]
            if len(numbers) > row.count:
                numbers.sort(key=lambda number: -mean_logprob(self.generation.choices[number]))
            for number in numbers[: row.count]:
                one = self.generation.choices[number]
                piece = RowPiece(tuple(one.ids), one.text, tuple(one.logprobs), tuple(one.prompt), one.reason)
                choices.append(self.choice(number, piece) | {"index": len(choices)})
        return self.generation.head("text_completion") | {"choices": choices, "usage": self.generation.usage}

    async def events(self) -> AsyncIterator[bytes]:
        """The choices piece by piece, then the usage where it was requested; the last event is `[DONE]`."""
        head = self.generation.head("text_completion")
        try:
            async for number, piece in self.generation.pieces():
                if piece.text or piece.logprobs or piece.reason is not None:
                    yield event(head | {"choices": [self.choice(number, piece)]})
        except ApiError as error:
            yield error_event(error)
            return
        if (self.fields.get("stream_options") or {}).get("include_usage"):
            yield event(head | {"choices": [], "usage": self.generation.usage})
        yield b"data: [DONE]\n\n"

    def choice(self, number: int, piece: RowPiece) -> dict[str, Any]:
        """What a piece adds to a choice; the first one of each begins with the echo."""
        first, row, wanted = number not in self.texts, self.row_of[number], self.fields.get("logprobs")
        offsets = self.texts.setdefault(number, OffsetText(self.tokenizer))
        ids, text = list(piece.ids), piece.text
        every: list[TokenLogprobs | None] = [*piece.logprobs]
        if first and self.fields.get("echo"):
            ids, text, every = [*row.ids, *ids], row.text + text, [None, *piece.prompt, *every]
        reason = REASONS.get(piece.reason or "")
        logprobs = None if wanted is None else offsets.logprobs(ids, every)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


def mean_logprob(choice: Generated) -> float:
    """What `best_of` ranks by: the mean over the tokens of a text."""
    return fmean(one.logprob for one in choice.logprobs) if choice.logprobs else LEAST_LOGPROB


class OffsetText:
    """The places of tokens in the text that they are, while this grows."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.stream = None if tokenizer is None else tokenizer.stream()
        self.length = 0  # characters so far

    def logprobs(self, ids: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The next ids, as OpenAI's `logprobs` has them: the chosen token is among the likeliest."""
        offsets = []
        for token in ids:
            offsets.append(self.length)
            self.length += 0 if self.stream is None else len(self.stream.put(token))
        tops = [None if one is None else dict(map(self._pair, [*one.top, (token, one.logprob)]))
                for token, one in zip(ids, scores, strict=True)]  # fmt: skip
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": [None if one is None else max(one.logprob, LEAST_LOGPROB) for one in scores],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        return f"<{token}>" if self.tokenizer is None else self.tokenizer.token_texts([token])[0]

    def _pair(self, pair: tuple[int, float]) -> tuple[str, float]:
        return self._name(pair[0]), max(pair[1], LEAST_LOGPROB)
