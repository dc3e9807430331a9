"""A queue of requests before an engine: rows join it as others leave, within a number of rows and bytes of cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from time import monotonic, perf_counter

from triptych import machine
from triptych.arguments import checked, integer
from triptych.errors import InputError, shown
from .cache_budget import CacheBudget
from .engine import Engine
from .pacing import Pace
from .request import LiveRow, Output, Request, check_row
from .step_runner import TWO_THREADS

MAX_ROWS = 32  # at once
BUDGET = 512  # ids of a step
CACHE_MEMORY_FRACTION = 0.75  # of the free memory
AGING = 8  # requests that join before one that waits counts as one more in priority
MOST_OVERTAKEN = 16  # requests that may join before an older one for which there is no room yet


@dataclass(frozen=True)
class QueueProgress:
    """The progress of a queue: requests that are `done` and `running`, of `total`; `tokens` written; `reused` ids of
    prompts that were not computed again."""

    done: int
    running: int
    total: int
    tokens: int
    reused: int


OnProgress = Callable[[QueueProgress], None]


class Scheduler:
    """Runs submitted requests, at most `max_rows` at once: those of a higher priority first, equal ones in the order in
    which they came.  Waiting raises a priority, so that every request joins in the end.  One for which the cache has no
    room yet lets up to `MOST_OVERTAKEN` others join before it.

    A request waits until the cache, when its row and all that run have come to their limits, takes at most
    `cache_bytes`, by default three quarters of the memory that is free now; a `CacheBudget` is shared with other
    schedulers.  So no row ever lacks memory in its middle or is computed twice; pages that rows share count once.  A
    request that would take more alone is refused.  After an exception out of `step`, such as an interruption, the rows
    that ran hold part of a step: begin again with `engine.reset()`.

    Raises InputError for settings out of range.
    """

    @checked
    def __init__(
        self, engine: Engine, *, max_rows: int = MAX_ROWS, cache_bytes: int | CacheBudget | None = None
    ) -> None:
        if not isinstance(engine, Engine):
            raise InputError(f"engine={shown(engine)} must be a generate.Engine, as model.engine() makes one")
        self.engine, self.max_rows = engine, integer("max_rows", max_rows, 1)
        own = free_cache_bytes(engine) if cache_bytes is None else cache_bytes
        self.budget = own if isinstance(own, CacheBudget) else CacheBudget(own)
        self.waiting: deque[WaitingRow] = deque()
        self.deadlines: dict[LiveRow, float] = {}  # on the clock of `monotonic`
        self.cancelled: deque[LiveRow] = deque()  # since the last step, by any thread
        self.total = self.tokens = self.joined = 0
        self.pace = Pace(engine.budget)
        self.failed: Exception | None = None  # the first error of a row in the last step

    def submit(self, request: Request) -> LiveRow:
        """Add a request to the end of the queue; its row says later what became of it.

        Raises InputError and TextError as `Engine.add`, and InputError, with the bytes, for one whose cache would not
        fit; the requests before it run on.
        """
        row = self.engine.prepare(request)
        check_fits(self.engine, row, self.budget.nbytes)
        if request.deadline is not None:
            self.deadlines[row] = monotonic() + request.deadline
        self.waiting.append(WaitingRow(row, self.joined))
        self.total += 1
        return row

    def cancel(self, row: LiveRow) -> None:
        """Let a row leave, with the reason `cancelled`, before the next step; any thread may call this.  One that has
        ended, or leaves in a step that runs meanwhile, stays as it is."""
        check_row(row)
        self.cancelled.append(row)

    def waits(self, row: LiveRow) -> bool:
        """Whether a row is in the queue and has not joined."""
        return any(one.row is row for one in self.waiting)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.waiting or self.engine.rows)

    @property
    def progress(self) -> QueueProgress:
        running, prefixes = len(self.engine.rows), self.engine.prefixes
        done = self.total - running - len(self.waiting)
        return QueueProgress(done, running, self.total, self.tokens, 0 if prefixes is None else prefixes.reused)

    def step(self) -> list[Output]:
        """Let waiting rows join, and run one step.  A row that fails leaves with the reason `error`; the others run
        on."""
        if not self.engine.lock.acquire(blocking=False):
            raise InputError(TWO_THREADS)
        try:
            self._dismiss()
            self._admit()
            before = self.engine.rows
            outputs = self._paced_step() if before else []
            if len(self.engine.rows) < len(before):
                self._claim(CacheNeeds.of(self.engine, (), self._idle_slots))
        finally:
            self.engine.guard.only_own_code = False
            self.engine.lock.release()
        self.failed = next((row.error for row in before if row.error is not None), None)
        self.tokens += sum(output.token is not None for output in outputs)
        return outputs

    def _paced_step(self) -> list[Output]:
        """One step of the engine, with as many ids of prompts as leave the rows that decode their pace."""
        engine = self.engine
        lengths = {row: row.cached for row in engine.rows}
        decoding = sum(row.decodes for row in lengths)
        pieces, pace = engine.pieces, self.pace
        engine.budget, engine.prompt_seconds = decoding + pace.ids(decoding), pace.seconds(decoding)
        start = perf_counter()
        outputs = engine.step(isolate=True)
        seconds, in_pieces = perf_counter() - start, pieces.in_last_step
        if in_pieces:
            pace.in_pieces = True
            pace.measured(seconds - in_pieces, decoding, 0)
            if not pieces.rows:
                pace.measured(pieces.seconds, 0, pieces.ids)
            return outputs
        prompt_ids = sum(row.cached - cached for row, cached in lengths.items()) - decoding
        pace.measured(seconds, decoding, max(prompt_ids, 0))
        return outputs

    def give_back(self) -> None:
        """Give back the memory of caches that hold only what later requests may reuse, where nothing waits or runs."""
        if not self.busy and self.engine.cache.nbytes:  # it may be called in each step of another scheduler
            self.engine.reset()
            self.budget.claim(self, self.engine.cache.nbytes)

    @property
    def _idle_slots(self) -> Iterable[int]:
        return () if self.engine.prefixes is None else self.engine.prefixes.idle_slots

    def _claim(self, needs: CacheNeeds) -> bool:
        """Whether the budget has what the caches need, or hold already."""
        return self.budget.claim(self, max(needs.nbytes, min(self.engine.cache.nbytes, self.budget.left(self))))

    def _dismiss(self) -> None:
        """Let rows leave that were cancelled or whose deadline has passed."""
        now = monotonic() if self.deadlines else 0.0
        leaving = {row: "deadline" for row, deadline in self.deadlines.items() if deadline <= now}
        while self.cancelled:
            leaving[self.cancelled.popleft()] = "cancelled"
        if leaving:
            running = [row for row in self.engine.rows if row in leaving]
            for row in [*running, *(one.row for one in self.waiting if one.row in leaving)]:
                row.reason = leaving[row]
            self.engine.free(running)
            self.waiting = deque(one for one in self.waiting if one.row.reason is None)
        here = {*self.engine.rows, *(one.row for one in self.waiting)} if self.deadlines else set[LiveRow]()
        for row in [row for row in self.deadlines if row not in here]:
            del self.deadlines[row]

    def _admit(self) -> None:
        joining: list[LiveRow] = []
        if not self.waiting or len(self.engine.rows) >= self.max_rows:
            return
        without_room: list[WaitingRow] = []
        needs = CacheNeeds.of(self.engine)
        for one in sorted(self.waiting, key=lambda one: -one.priority(self.joined)):  # stable: of equal ones the oldest
            full = len(self.engine.rows) + len(joining) >= self.max_rows
            if full or any(other.overtaken >= MOST_OVERTAKEN for other in without_room):
                break
            more = needs.with_row(one.row)
            granted = self._claim(more)
            if not granted and not needs.rows:
                self.engine.reset()  # alone it fits: beside nothing but the slots of rows that have left
                more = CacheNeeds.of(self.engine).with_row(one.row)
                granted = self._claim(more)
            if not granted:
                without_room.append(one)
                continue
            needs = more
            joining.append(one.row)
            self.waiting.remove(one)
            self.joined += 1
            for other in without_room:
                other.overtaken += 1
        if not joining:
            return
        running = [*self.engine.rows, *joining]
        cache, prefixes = self.engine.cache, self.engine.prefixes
        while prefixes is not None and prefixes.idle_slots:
            if self._claim(CacheNeeds.of(self.engine, joining, prefixes.idle_slots)):
                break
            prefixes.give_up(1)
        cache.longest = max(row.limit for row in running)
        lacking = len(running) - len(cache.lengths)
        if lacking > 0:  # at once, since each growth copies what slots have of their own
            cache.free(cache.add(len(cache.free_slots) + lacking))
        cache.limit_memory(self.budget.left(self) - needs.source_bytes)
        empty = [row for row in joining if not row.request.max_new_tokens and not row.only_scores]
        for row in empty:
            row.reason = "length"
        self.engine.join([row for row in joining if row not in empty])


@dataclass(eq=False)
class WaitingRow:
    """A row in the queue: `joined` requests had joined when it came, and `overtaken` have joined before it since then
    because there was no room for it."""

    row: LiveRow
    joined: int
    overtaken: int = 0

    def priority(self, joined: int) -> int:
        """Its request's, and more the longer it waits."""
        return self.row.request.priority + (joined - self.joined) // AGING


@dataclass(frozen=True)
class CacheNeeds:
    """What an engine's caches need when all rows have come to their limits: for so many `rows` and `pages`, the longest
    row and the longest source."""

    engine: Engine
    rows: int
    pages: int
    longest: int = 0
    source: int = 0

    @staticmethod
    def of(engine: Engine, joining: Sequence[LiveRow] = (), idle: Iterable[int] = ()) -> CacheNeeds:
        """Of the rows that run and those that are `joining`; `idle` slots keep what they hold."""
        cache = engine.cache
        lengths = {slot: cache.lengths[slot] for slot in idle} | {row.slot: row.limit for row in engine.rows}
        source = max((row.source_length for row in engine.rows), default=0)
        needs = CacheNeeds(engine, len(lengths), cache.pages_for(lengths), max(lengths.values(), default=0), source)
        return reduce(CacheNeeds.with_row, joining, needs)

    def with_row(self, row: LiveRow) -> CacheNeeds:
        pages = 0 if self.engine.cache.pages is None else self.engine.cache.pages.count(row.limit)
        longest, source = max(self.longest, row.limit), max(self.source, row.source_length)
        return CacheNeeds(self.engine, self.rows + 1, self.pages + pages, longest, source)

    @property
    def source_bytes(self) -> int:
        cross, slots = self.engine.cross, max(self.rows, len(self.engine.cache.lengths))
        return 0 if cross is None else slots * cross.slot_bytes(self.source)

    @property
    def nbytes(self) -> int:
        return self.engine.cache.bytes_for(self.rows, self.longest, self.pages) + self.source_bytes


def check_fits(engine: Engine, row: LiveRow, limit: int, slots: int = 1) -> int:
    """Bytes of the cache of one row in so many slots.  Raises InputError, with the bytes, for more than `limit`."""
    cache, cross = engine.cache, engine.cross
    slot = cache.slot_bytes(row.limit if cache.pages is not None else max(row.limit, cache.capacity))
    nbytes = slots * (slot + (0 if cross is None else cross.slot_bytes(row.source_length)))
    if nbytes > limit:
        raise InputError(
            f"prompt {row.request.number}: the cache of its {row.limit:,} positions would take {nbytes:,} bytes, and "
            f"{limit:,} are free for it; shorten the prompt or lower max_new_tokens"
        )
    return nbytes


def free_cache_bytes(engine: Engine) -> int:
    """Bytes that the cache of an engine may take: what it has, and a share of what is free."""
    free = machine.free_on(engine.module.device)
    return 1 << 62 if free is None else engine.cache.nbytes + int(CACHE_MEMORY_FRACTION * free)
