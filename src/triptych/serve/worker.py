"""A model with its engine in a thread of its own, which requests from an event loop reach and leave at any time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Protocol, TypeVar

from triptych.errors import InputError
from triptych.generate import CacheBudget, LiveRow, Request, Scheduler
from triptych.generate.request import TokenLogprobs
from triptych.generate.row_text import RowText
from triptych.model import Model

Result = TypeVar("Result")
WAIT = 0.01  # seconds between two looks whether other models have given memory back
STOPPING = "the server is stopping; send the request again to another one, or later"


@dataclass(frozen=True)
class RowPiece:
    """What a step gave a request: new ids, their log-probabilities where they were requested, and the text that they
    make certain; with the first ids of a request with `score_from`, the log-probabilities of its prompt from there
    on.  The last piece has the `reason` why the row ended; with "error" the exception is in `error`, with "stop" the
    string is in `stop`."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()
    reason: str | None = None
    error: Exception | None = None
    stop: str | None = None


@dataclass(eq=False)
class ServedRow:
    """A request that a worker runs, as the event loop sees it: `async for` gives its pieces, the last one included.

    row       in the engine; None until the worker has taken it, and where it was refused.
    hidden    special tokens whose text is no part of the row's; None for all.
    taken     set once the worker has taken the row, or has refused it for the reason `refused`.
    scored    log-probabilities of ids of the prompt that were computed and not delivered.
    last      when its newest ids came, `submitted` when it was queued, and `due` when it leaves (`monotonic`).
    """

    worker: ModelWorker
    request: Request
    stop: tuple[str, ...]
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[RowPiece] = field(default_factory=asyncio.Queue)
    row: LiveRow | None = None
    text: RowText | None = None
    cancelled: bool = False
    hidden: frozenset[int] | None = None
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Exception | None = None
    scored: list[TokenLogprobs] = field(default_factory=list)
    submitted: float = field(default_factory=monotonic)
    last: float | None = None
    due: float | None = None

    async def __aiter__(self) -> AsyncIterator[RowPiece]:
        """Leaving the loop before the last piece cancels the row."""
        ended = False
        try:
            while not ended:
                piece = await self.pieces.get()
                ended = piece.reason is not None
                yield piece
        finally:
            if not ended:
                self.cancel()

    def cancel(self) -> None:
        """Let the row leave before the next step; from any thread, also where it has ended."""
        self.cancelled = True
        self.worker.post(lambda: self.worker.drop(self))

    def deliver(self, piece: RowPiece) -> None:
        """From the thread of the worker."""
        self.call(lambda: self.pieces.put_nowait(piece))

    def call(self, function: Callable[[], object]) -> None:
        """Call this in the event loop; from the thread of the worker."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)


class Meter(Protocol):
    """Counts what a worker does; called from its thread."""

    def read(self, prompt: int) -> None: ...
    def written(self, count: int, seconds: float, *, first: bool) -> None: ...


class ModelWorker:
    """Runs the requests for one model, and other calls of it, one after another in one thread: of the calls that wait
    one between two steps, so that neither keeps the other from running.

    name        of the model in requests.
    meter       told of the tokens of prompts that are taken, and of those that are written: how many, and the seconds
                since the request came or since those before them.
    last_step   when the newest step ended (`monotonic`), or when work came to a worker that had none.
    """

    def __init__(self, model: Model, name: str, *, max_rows: int, budget: CacheBudget | None = None) -> None:
        self.model, self.name = model, name
        self.scheduler: Scheduler | None = None
        if model.spec.decoder is not None:
            self.scheduler = Scheduler(model.engine(), max_rows=max_rows, cache_bytes=budget)
            self.scheduler.budget.follow(self.scheduler, lambda: self.post(self._give_back))
        self.commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.calls: deque[Callable[[], object]] = deque()  # only the thread uses it
        self.meter: Meter | None = None
        self.rows: dict[LiveRow, ServedRow] = {}
        self.last_step, self.stopping = monotonic(), False
        self.lock, self.ended = Lock(), False  # of the end of the thread: nothing is queued behind it
        self.thread = Thread(target=self._run, name=f"triptych {name}", daemon=True)
        self.thread.start()

    # -- from the event loop --------------------------------------------------------------------------------------

    def submit(
        self, request: Request, stop: tuple[str, ...] = (), *, hidden: frozenset[int] | None = None,
        due: float | None = None,
    ) -> ServedRow:  # fmt: skip
        """Queue a request, whose row leaves at the time `due` (`monotonic`), however long it waits before.  What cannot
        be run comes as an error in its only piece."""
        served = ServedRow(self, request, stop, asyncio.get_running_loop(), hidden=hidden, due=due)
        if not self.post(lambda: self._take(served)):
            self._refuse(served, InputError(STOPPING))
        return served

    async def call(self, function: Callable[[], Result]) -> Result:
        """The result of a function that uses the model, called between two steps.  Raises what it raises, and
        InputError where the worker has stopped."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if not self.post(lambda: self.calls.append(run)):
            raise InputError(STOPPING)
        return await asyncio.wrap_future(future)

    def post(self, command: Callable[[], object]) -> bool:
        """Have the thread call this between two steps; False where the thread has ended."""
        with self.lock:
            if not self.ended:
                self.commands.put(command)
            return not self.ended

    @property
    def busy_for(self) -> float:
        """Seconds since the newest step ended while requests wait or run; 0 where there are none."""
        return monotonic() - self.last_step if self.rows else 0.0

    def healthy(self, longest: float) -> bool:
        """Whether the thread lives, and no step has taken longer than so many seconds."""
        return self.thread.is_alive() and self.busy_for <= longest

    def stop(self) -> None:
        """Take no more requests, run those that are here to their ends, and end the thread."""
        self.stopping = True
        self.post(lambda: None)

    def cut(self) -> None:
        """Take no more requests, and end those that are here with an error that says so."""
        self.stopping = True
        self.post(self._cut)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.rows or self.calls or not self.stopping:
            with suppress(Empty):
                while True:
                    self.commands.get(block=not (self.rows or self.calls or self.stopping))()
            if self.calls:
                self.calls.popleft()()
            if self.rows:
                self._step()
        with self.lock:
            self.ended = True
        with suppress(Empty):
            while True:
                self.commands.get(block=False)()
        for call in self.calls:
            call()

    def _refuse(self, served: ServedRow, error: Exception) -> None:
        served.refused = error
        served.call(served.taken.set)
        served.deliver(RowPiece((), "", reason="error", error=error))

    def _take(self, served: ServedRow) -> None:
        if served.cancelled:
            served.deliver(RowPiece((), "", reason="cancelled"))
            served.call(served.taken.set)
            return
        try:
            if self.stopping:
                raise InputError(STOPPING)
            if self.scheduler is None:
                raise InputError(f"{self.name} does not generate")
            if self.model.tokenizer is not None:
                stream = self.model.tokenizer.stream(skip_special=served.hidden is None)
                without_text = {*served.request.ends, *(served.hidden or ())}
                served.text = RowText(stream, without_text, served.stop)
            left = None if served.due is None else max(served.due - monotonic(), 0.0)
            served.row = self.scheduler.submit(replace(served.request, deadline=left))
            if self.meter is not None:
                self.meter.read(len(served.request.prompt))
        except Exception as error:
            self._refuse(served, error)
            return
        if not self.rows:
            self.last_step = monotonic()
        self.rows[served.row] = served
        served.call(served.taken.set)

    def _give_back(self) -> None:
        if self.scheduler is not None:
            self.scheduler.give_back()

    def _cut(self) -> None:
        for row, served in self.rows.items():
            if self.scheduler is not None:
                self.scheduler.cancel(row)
            self._refuse(served, InputError(STOPPING))
        self.rows.clear()

    def drop(self, served: ServedRow) -> None:
        """Cancel the row of a request, where it runs."""
        if served.row is not None and self.scheduler is not None:
            self.scheduler.cancel(served.row)

    def _step(self) -> None:
        assert self.scheduler is not None
        try:
            outputs = self.scheduler.step()
            for output in outputs:
                if output.scores and output.row in self.rows:
                    self.rows[output.row].scored += output.scores
        except Exception as error:  # a step that failed as a whole leaves its rows in an unknown state
            self.scheduler.engine.reset()
            for served in self.rows.values():
                self._refuse(served, error)
            self.rows.clear()
            return
        if not self.scheduler.engine.rows and self.scheduler.waiting:  # other models have the memory
            sleep(WAIT)
        self.last_step = monotonic()
        ids: dict[LiveRow, list[int]] = {}
        logprobs: dict[LiveRow, list[TokenLogprobs]] = {}
        for output in outputs:
            if output.token is not None:
                ids.setdefault(output.row, []).append(output.token)
                logprobs.setdefault(output.row, []).extend([] if output.logprobs is None else [output.logprobs])
        for row, served in [*self.rows.items()]:
            if row in ids or row.reason is not None:
                self._deliver(served, row, ids.get(row, []), logprobs.get(row, []))

    def _deliver(self, served: ServedRow, row: LiveRow, ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Give a request what this step wrote, and let it end where it has."""
        text, pieces, count = served.text, "", len(ids)
        if text is not None:
            count = 0
            while count < len(ids) and not text.stopped:
                pieces += text.put(ids[count])
                count += 1
        reason = "stop" if text is not None and text.stopped else row.reason
        if reason is not None:
            pieces += "" if text is None else text.finish()
            del self.rows[row]
            if row.reason is None:
                assert self.scheduler is not None
                self.scheduler.cancel(row)
        stop = None if text is None else text.stopped_by
        if count and self.meter is not None:
            now, before = monotonic(), served.submitted if served.last is None else served.last
            self.meter.written(count, now - before, first=served.last is None)
            served.last = now
        scored, served.scored = tuple(served.scored), []
        served.deliver(RowPiece(tuple(ids[:count]), pieces, tuple(logprobs[:count]), scored, reason, row.error, stop))
