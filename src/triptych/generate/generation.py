"""Runs requests to their ends, by sampling or beam search, and returns their text, whole or as a stream, cut before the
first stop string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from triptych.arguments import checked
from triptych.errors import InputError, shown
from triptych.migration_hints import Explained
from triptych.probe import Trace
from triptych.text import Tokenizer
from triptych.text.detokenize import TextStream
from .beam import beam_search, check_beams
from .engine import Engine
from .request import LiveRow, Request, TokenLogprobs
from .row_text import RowText
from .scheduling import MAX_ROWS, OnProgress, QueueProgress, Scheduler, check_fits, free_cache_bytes
from .stops import before_stop

OnToken = Callable[[int, int], None]  # (number of the request, id)


@dataclass(frozen=True)
class Generation(Explained):
    """What was generated for one prompt.

    text       the new text, without the prompt, the end token and the stop string; "" without a tokenizer.
    ids        the new token ids, those of the end token and of the stop string included.
    reason     why it ended: "end" (an end token, or the end of the constraint), "stop" (a stop string) or "length"
               (`max_new_tokens`).
    trace      what was read of the whole batch, where `read` or `edit` was given; the same in every result.
    logprobs   for each id its log-probability and the likeliest ones (nats), where they were requested.
    reused     how many ids of the prompt had their keys and values copied from another prompt.
    drafted, accepted   how many tokens a draft guessed, and how many of them were right.
    """

    text: str
    ids: list[int]
    reason: str
    trace: Trace | None = None
    logprobs: list[TokenLogprobs] | None = None
    reused: int = 0
    drafted: int = 0
    accepted: int = 0


@checked
def generate(
    scheduler: Scheduler,
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    *,
    on_token: OnToken | None = None,
    on_progress: OnProgress | None = None,
) -> list[Generation]:
    """Run requests to their ends, and give what they wrote in their order; `on_token` is called for every token as it
    comes, `on_progress` after each step.

    Without a tokenizer there are ids alone.  Raises what `Scheduler.submit` raises, before anything runs; ProbeError
    for reads and edits that had no effect.
    """
    rows = [scheduler.submit(request) for request in requests]
    logprobs: dict[LiveRow, list[TokenLogprobs]] = {row: [] for row in rows}
    guard = scheduler.engine.guard
    guard.visits += 1
    while scheduler.busy:
        guard.only_own_code = on_token is None and on_progress is None
        outputs = scheduler.step()
        for output in outputs:
            if output.token is None:
                continue
            if output.logprobs is not None:
                logprobs[output.row].append(output.logprobs)
            if on_token is not None:
                on_token(output.row.request.number, output.token)
        if scheduler.failed is not None:
            raise scheduler.failed
        if on_progress is not None:
            on_progress(scheduler.progress)
    return _generations(rows, tokenizer, logprobs)


@checked
def score(
    scheduler: Scheduler, requests: Iterable[Request], *, on_progress: OnProgress | None = None
) -> list[list[TokenLogprobs]]:
    """Run requests with `score_from` and `max_new_tokens=0`: for each, in their order, the log-probabilities of the ids
    of its prompt from there on, with those of the `logprobs` likeliest beside each.

    They are taken one after another as rows become free, so that there may be any number.  `on_progress`, which must
    leave the model as it is, is called after each step, and counts those that were taken.  Raises what
    `Scheduler.submit` raises, and InputError for other requests and where log-probabilities are NaN.
    """
    scores: dict[LiveRow, list[TokenLogprobs]] = {}
    if not isinstance(requests, Iterable):
        raise InputError(f"requests={shown(requests)} must be a list of generate.Request")
    waiting, guard = iter(requests), scheduler.engine.guard
    guard.visits += 1
    while True:
        for request in islice(waiting, 2 * scheduler.max_rows - len(scheduler.waiting)):
            if not isinstance(request, Request) or request.score_from is None or request.max_new_tokens:
                raise InputError("score() runs requests with score_from and max_new_tokens=0; generate() runs others")
            scores[scheduler.submit(request)] = []
        if not scheduler.busy:
            return list(scores.values())
        guard.only_own_code = True
        for output in scheduler.step():
            scores[output.row] += output.scores
        if scheduler.failed is not None:
            raise scheduler.failed
        if on_progress is not None:
            on_progress(scheduler.progress)


@checked
def search(
    engine: Engine,
    requests: Sequence[Request],
    tokenizer: Tokenizer | None,
    *,
    beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    max_rows: int = MAX_ROWS,
    on_token: OnToken | None = None,
    on_progress: OnProgress | None = None,
) -> list[Generation]:
    """The best of `beams` hypotheses for each request, of as many requests at once as have `max_rows` hypotheses and
    fit the memory; after their search `on_token` is called for the tokens of the best, and `on_progress`.

    Raises InputError, before anything runs, as `Engine.add`, and for a request whose hypotheses do not fit the memory;
    ProbeError for reads and edits that had no effect.
    """
    check_beams(engine, beams, length_penalty)
    sizes = [check_fits(engine, engine.prepare(request), free_cache_bytes(engine), beams) for request in requests]
    together = max(1, min(max_rows // beams, free_cache_bytes(engine) // max(sizes, default=1)))
    rows: list[LiveRow] = []
    for first in range(0, len(requests), together):
        some = requests[first : first + together]
        searched = beam_search(engine, some, beams=beams, length_penalty=length_penalty, early_stopping=early_stopping)
        for request, best in zip(some, searched, strict=True):
            rows.append(LiveRow(request, [*request.prompt, *best[0].tokens]))
            if on_token is not None:
                for token in best[0].tokens:
                    on_token(request.number, token)
        if on_progress is not None:
            on_progress(QueueProgress(len(rows), 0, len(requests), sum(len(row.new) for row in rows), 0))
    return _generations(rows, tokenizer, {})


@checked
def pieces(
    scheduler: Scheduler, row: LiveRow, detokenizer: TextStream, stop: Sequence[str], on_token: OnToken | None = None
) -> Iterator[str]:
    """The text of a submitted row, piece by piece as it becomes certain, up to the first of the strings in `stop`.

    The row has left the engine afterwards, however this ends; after an exception the engine begins again, with nothing
    kept.  Raises InputError, and leaves the engine as it is, while another text runs in it; InputError where somebody
    resets the engine or frees the row between two pieces; ProbeError for edits that had no effect.
    """
    engine = scheduler.engine
    if not engine.streaming.acquire(blocking=False):
        raise InputError("the engine runs another text; finish or close that one first")
    try:
        yield from _pieces(scheduler, row, detokenizer, stop, on_token)
        engine.free([row])
    except GeneratorExit:  # nobody reads on: between two steps
        engine.free([row])
        raise
    except BaseException:  # an interruption too: slots may hold part of a step
        engine.reset()
        raise
    finally:
        engine.streaming.release()
    if row.request.probe is not None:
        row.request.probe.close()


def _pieces(
    scheduler: Scheduler, row: LiveRow, detokenizer: TextStream, stop: Sequence[str], on_token: OnToken | None
) -> Iterator[str]:
    text, guard = RowText(detokenizer, row.request.ends, stop), scheduler.engine.guard
    guard.visits += 1
    read = len(row.ids)  # not the outputs of a step: another caller of engine.step() has some
    stopped = False
    while row.request.max_new_tokens and not stopped and (row.reason is None or read < len(row.ids)):
        guard.only_own_code = on_token is None
        scheduler.step()
        if row.reason is None and row.cache is not scheduler.engine.cache and not scheduler.waits(row):
            raise InputError("the engine was reset, or freed this text's row, while it ran; begin the stream again")
        new, read = row.ids[read:], len(row.ids)
        piece = ""
        for token in new:
            if on_token is not None:
                on_token(row.request.number, token)
            piece += text.put(token)
            stopped = text.stopped
            if stopped:
                break
        if scheduler.failed is not None:
            raise scheduler.failed
        if piece:
            yield piece
            guard.visits += 1
    if rest := text.finish():
        yield rest


def _generations(
    rows: Sequence[LiveRow], tokenizer: Tokenizer | None, logprobs: Mapping[LiveRow, list[TokenLogprobs]]
) -> list[Generation]:
    """The generations of rows that have ended.  Raises ProbeError for reads and edits that had no effect."""
    probes = {id(row.request.probe): row.request.probe for row in rows}
    traces = {key: None if probe is None else probe.close() for key, probe in probes.items()}
    generations = []
    for row in rows:
        request, ids = row.request, row.new
        ended = bool(ids) and ids[-1] in request.ends
        text, reason = "", "end" if ended or row.reason == "end" else "length"
        if tokenizer is not None:
            before = before_stop(tokenizer.decode(ids), request.stop) if request.stop else None
            text = _text(tokenizer, request, ids[: len(ids) - ended]) if before is None else before
            reason = reason if before is None else "stop"
        wanted, trace = None if request.logprobs is None else logprobs.get(row), traces[id(request.probe)]
        generations.append(Generation(text, ids, reason, trace, wanted, row.reused, row.drafted, row.accepted))
    return generations


def _text(tokenizer: Tokenizer, request: Request, ids: Sequence[int]) -> str:
    """The text of some ids; under a constraint with all its spaces, which are part of what is kept."""
    if request.constraint is None or not tokenizer.cleans_spaces:
        return tokenizer.decode(ids)
    stream = tokenizer.stream()
    return "".join(map(stream.put, ids)) + stream.flush()
