"""Text of a run: whole when its rows have ended, or piece by piece; cut before the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from triptych.generate.beam import beam_search
from triptych.generate.engine import Engine
from triptych.generate.request import LiveRow, Request, TokenLogprobs
from triptych.generate.stops import before_stop
from triptych.probe import Trace
from triptych.text import Tokenizer
from triptych.text.detokenize import TextStream

OnToken = Callable[[int, int], None]  # (number of the request, id)


@dataclass(frozen=True)
class Generation:
    """The new `text` and `ids` of one prompt and why it ended; the trace of the whole batch and the log-probabilities
    of the ids, where the request has them."""

    text: str
    ids: list[int]
    reason: str  # "end", "stop" or "length"
    trace: Trace | None = None
    logprobs: list[TokenLogprobs] | None = None


def generate(
    engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer | None, *, on_token: OnToken | None = None
) -> list[Generation]:
    """Run requests to their ends; `on_token` is called for every token as it comes.

    Without a tokenizer there are ids alone.  Raises ProbeError for reads and edits that had no effect.
    """
    rows = engine.add(*requests)
    engine.free([row for row in rows if not row.request.max_new_tokens])
    logprobs: dict[LiveRow, list[TokenLogprobs]] = {row: [] for row in rows}
    while engine.rows:
        for output in engine.step():
            if output.token is None:
                continue
            if output.logprobs is not None:
                logprobs[output.row].append(output.logprobs)
            if on_token is not None:
                on_token(output.row.request.number, output.token)
    traces = {id(request.probe): request.probe.close() for request in requests if request.probe is not None}
    return [
        _generation(row.request, row.new, tokenizer, traces.get(id(row.request.probe)), logprobs[row]) for row in rows
    ]


def search(
    engine: Engine,
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    *,
    beams: int,
    length_penalty: float = 1.0,
    on_token: OnToken | None = None,
) -> list[Generation]:
    """The best of `beams` hypotheses for each request; `on_token` is called for its tokens after the search."""
    hypotheses = beam_search(engine, requests, beams=beams, length_penalty=length_penalty)
    if on_token is not None:
        for request, best in zip(requests, hypotheses, strict=True):
            for token in best[0].tokens:
                on_token(request.number, token)
    return [_generation(request, best[0].tokens, tokenizer) for request, best in zip(requests, hypotheses, strict=True)]


def pieces(
    engine: Engine, request: Request, detokenizer: TextStream, stop: Sequence[str], on_token: OnToken | None = None
) -> Iterator[str]:
    """The text of a request that was added to `engine`, piece by piece as it becomes certain, up to the first of the
    strings in `stop`.  Raises ProbeError for edits that had no effect."""
    unsure = max(map(len, stop), default=1) - 1  # so many characters may be the beginning of a stop string
    held = ""
    if not request.max_new_tokens:
        return
    while engine.rows:
        for output in engine.step():
            if output.token is None:
                continue
            if on_token is not None:
                on_token(request.number, output.token)
            held += detokenizer.put(output.token) if output.token not in request.ends else ""
        if (before := before_stop(held, stop)) is not None:
            held = before
            break
        certain = len(held) - unsure
        if certain > 0:
            yield held[:certain]
            held = held[certain:]
    else:
        held += detokenizer.flush()
    if held:
        yield held
    if request.probe is not None:
        request.probe.close()


def _generation(
    request: Request,
    ids: list[int],
    tokenizer: Tokenizer | None,
    trace: Trace | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> Generation:
    wanted = None if request.logprobs is None else logprobs
    ended = bool(ids) and ids[-1] in request.ends
    if tokenizer is None:
        return Generation("", ids, "end" if ended else "length", trace, wanted)
    if request.stop and (text := before_stop(tokenizer.decode(ids), request.stop)) is not None:
        return Generation(text, ids, "stop", trace, wanted)
    return Generation(tokenizer.decode(ids[: len(ids) - ended]), ids, "end" if ended else "length", trace, wanted)
