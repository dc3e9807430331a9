"""One forward of some rows of an engine: the model with its caches, run natively or by its modules; in one thread at a
time (`alone`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from triptych.attention import Cache, CacheType, CrossCache, Rows
from triptych.attention.mask_lowering import implies_causal
from triptych.attention.rows import FlatBatch
from triptych.errors import InputError
from triptych.native.step import PAGE_POSITIONS
from triptych.nn import NO_TAPS, Batch, Transformer
from triptych.probe import Session
from triptych.program.module_changes import ModuleGuard
from triptych.program.native_calls import Largest, largest_of
from triptych.program.native_encoder import Matmul, NativeEncoder
from triptych.program.native_executor import NativeStep, prompts_in_bf16
from triptych.program.static_executor import StaticStep, best_of, compiled
from triptych.quantize import kernel_matrix
from triptych.spec.positions import LongRope
from .request import LiveRow, TokenLogprobs
from .scored_tokens import ScoredTokens, places

P = ParamSpec("P")
R = TypeVar("R")
Executor = Literal["auto", "modules", "static", "compiled"]
TWO_THREADS = "two threads use this engine; give each its own, or submit() to one Scheduler that one of them steps"


def alone(context: Callable[[], Any] = torch.inference_mode) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a method that runs in this context; raises InputError while another thread has the `lock` of its object."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            owner: Any = args[0]
            if not owner.lock.acquire(blocking=False):
                raise InputError(TWO_THREADS)
            try:
                with context():
                    return method(*args, **kwargs)
            finally:
                owner.lock.release()

        return call

    return decorate


@dataclass(frozen=True, eq=False)
class ForwardResult:
    """The result of a forward.

    due      the rows that are now read to their end.
    logits   [W, V]: after the last id of each of these and after each id of its draft, row after row.
    places   where the logits of each due row begin.
    every    [T, V]: all that was computed of the rows that want all logits.
    scores   of the next ids of prompts that are scored.
    best     the token with the largest logit of each row of `logits`, and that logit, NaN where a logit is NaN; None
             where they were not asked for.
    """

    due: list[LiveRow]
    logits: Tensor
    places: list[int]
    every: dict[LiveRow, Tensor]
    best: Largest | None
    scores: Mapping[LiveRow, list[TokenLogprobs]]


@dataclass(frozen=True, eq=False)
class NextTokens:
    """The ids that some rows run next.

    wanted    the tokens whose logits are wanted, of the rows that are `due`: read to their end then.
    places    where the logits of each due row begin among these.
    prompts   of each row, how many of its tokens are of its prompt.
    """

    ids: list[int]
    rows: Rows
    wanted: list[int]
    places: list[int]
    due: list[LiveRow]
    prompts: list[int]


NOTHING_YET = ForwardResult([], torch.empty(0), [], {}, None, {})


class StepRunner:
    """A model with the caches of an engine's rows.

    chunk         ids of a prompt that run at once, at most.
    in_pieces     whether a prompt may be read in pieces: every token sees earlier ones alone.
    switch        the length beyond which LongRoPE has other factors for the whole row.
    executor      what computes a forward where it can, as `Engine` says.
    matmul        what tokens of prompts and sources are multiplied with packed weights in, as `Engine` says.
    prompts_use_bf16   whether prompt tokens are multiplied in bf16, and generated ones are not.
    cache_type    what the caches keep.
    guard         says in which steps the module is looked at.
    why_modules   why the modules computed the last forward; None where the executor did.
    running       the rows of a forward that has begun: after an exception their slots hold part of a step.
    """

    def __init__(
        self, module: Transformer, chunk: int, executor: Executor, matmul: Matmul = "auto",
        cache_type: CacheType = "auto", guard: ModuleGuard | None = None,
    ) -> None:  # fmt: skip
        assert module.decoder is not None
        assert module.spec.decoder is not None
        self.module, self.vocab = module, module.spec.vocab
        self.guard = guard or ModuleGuard()
        if executor == "auto" and module.device.type == "cuda":
            executor = "static"
        fixed = executor in ("static", "compiled")  # shapes and addresses of a step
        self.cache: Cache = module.decoder.cache(cache_type=cache_type, page=None if fixed else PAGE_POSITIONS)
        self.made_for = self._needs()
        self.cross: CrossCache | None = None
        if module.encoder is not None:
            self.cross = module.decoder.cross_cache(cache_type)
        self.executor: NativeStep | StaticStep | None = None
        self.sources: NativeEncoder | None = None
        self.why_modules: str | None = "the engine was made with executor='modules'"
        self.prompts_use_bf16 = prompts_in_bf16(module, matmul) and executor == "auto"
        if executor == "auto":
            self.executor = NativeStep(
                module, self.cache, self.cross, matrix_of=kernel_matrix, bf16=self.prompts_use_bf16, guard=self.guard
            )
        elif executor != "modules":
            compiler = compiled if executor == "compiled" else None
            self.executor = StaticStep(module, self.cache, self.cross, compiler=compiler, guard=self.guard)
        if self.executor is not None:
            self.why_modules = "no step has run"
        kinds = module.spec.decoder.kinds.values()
        scalings = [getattr(kind.position, "scaling", None) for kind in kinds]
        lengths = [s.original_length for s in scalings if isinstance(s, LongRope) and s.short != s.long]
        self.switch = max(lengths, default=sys.maxsize)  # without LongRoPE one that no row reaches
        self.in_pieces = all(implies_causal(kind.mask) for kind in kinds)
        self.chunk = chunk if self.in_pieces else sys.maxsize
        self.running: Sequence[LiveRow] = ()
        self._logged = False  # that steps run as modules, which is said once

    def serves(self) -> bool:
        """Whether the model still has the dtype, the device and the layers that the caches were made for."""
        return self.made_for == self._needs()

    def _needs(self) -> tuple[object, ...]:
        assert self.module.decoder is not None
        return self.module.dtype, self.module.device, self.module.spec.context, self.module.decoder.cached_layers()

    def token_counts(
        self, rows: Sequence[LiveRow], budget: int, fill: Callable[[LiveRow, Sequence[LiveRow]], bool] | None
    ) -> dict[LiveRow, int]:
        """The number of ids that each row runs in the next step, of about `budget`; rows that wait are left out.

        Rows that decode come first, then the prompts with the fewest ids left, of each at most `chunk` ids; the oldest
        prompt has a quarter of what is left for prompts, so that it comes to its end.  `fill` (`Prefixes.fill`) is
        asked before an empty row begins.
        """
        running: dict[LiveRow, int] = {}
        reading: list[LiveRow] = []
        left = budget
        for row in rows:
            if row.decodes:
                running[row] = 1
                left -= 1 + len(row.draft)
            else:
                reading.append(row)
        of_oldest = max(left // 4, 1)
        for row in sorted(reading, key=lambda row: len(row.ids) - row.cached):
            most = max(left, of_oldest) if row is reading[0] else left - of_oldest * (reading[0] not in running)
            if most <= 0 and running:
                continue
            if not row.cached and fill is not None and not fill(row, rows):
                continue
            rest = len(row.ids) - row.cached
            running[row] = min(rest, self.chunk, max(most, 1)) if self.in_pieces else rest
            left -= running[row] + (0 if row.source is None else self.module.length(row.source))
        return running

    def parts(self, members: Sequence[LiveRow], running: Mapping[LiveRow, int]) -> list[list[LiveRow]]:
        """The rows of one group that run now; rows that decode and rows that read prompts run apart where padding would
        copy rings: with a sliding-window cache, modules would copy every ring and pad it to the longest piece."""
        now = [row for row in members if row in running]
        if self.cache.smallest_window is None or self.why_modules is None:
            return [now] if now else []
        apart = [row for row in now if running[row] == 1], [row for row in now if running[row] > 1]
        return [part for part in apart if part]

    def run(
        self, session: Session | None, rows: Sequence[LiveRow], share: Mapping[LiveRow, int] | None, all_logits: bool,
        at_once: bool = False, find_best: bool = False, begin: Callable[[NextTokens], None] | None = None,
    ) -> ForwardResult:  # fmt: skip
        """The next piece of each row: what it lacks, at most `chunk` ids or its `share`, and its draft behind the end.

        Logits of all positions are computed where `all_logits`; those of `every` are for the rows that want them.  The
        next forward may overwrite the logits where they are used `at_once`, which goes without `all_logits`; then the
        likeliest tokens are looked for where `find_best`.  `begin` gets what would run, instead of this forward.
        """
        find_best = find_best and at_once
        if at_once and share is None and isinstance(self.executor, NativeStep):
            next_tokens = self._next_tokens(self.executor, session, rows, find_best)
            if next_tokens is not None:
                return next_tokens
        ids, logit_places, starts, due = list[int](), list[int](), list[int](), list[LiveRow]()
        lengths, past, slots, prompts = [], [], [], []
        scored: ScoredTokens | None = None
        for row in rows:
            done, end, most = row.cached, len(row.ids), self.chunk if share is None else share[row]
            if done <= self.switch < end:  # LongRoPE's other factors hold for the whole row, from its first token on
                self.begin_again(row)
                done, most = 0, max(most, self.switch + 1)
            piece = row.ids[done : done + most]
            if row.next_score <= done + len(piece):
                scored = scored or ScoredTokens()
                scored.add(row, done, done + len(piece), len(ids))
            if done + len(piece) == end and not row.only_scores:
                due.append(row)
                starts.append(len(logit_places))
                logit_places.extend(range(len(ids) + len(piece) - 1, len(ids) + len(piece) + len(row.draft)))
                piece.extend(row.draft)
            ids += piece
            past.append(done)
            lengths.append(len(piece))
            slots.append(row.slot)
            prompts.append(min(max(len(row.request.prompt) - done, 0), len(piece)))
        pieces = Rows(tuple(lengths), tuple(past), tuple(slots))
        if begin is not None:
            begin(NextTokens(ids, pieces, logit_places, starts, due, prompts))
            return NOTHING_YET
        whole = all_logits or (scored is not None and session is not None)  # a site is read of whole pieces
        used = logit_places if scored is None else sorted([*logit_places, *scored.before])
        chosen: Sequence[int] = range(len(ids)) if whole else used
        self.running = rows
        if session is not None:
            session.begin([row.path[-1] for row in rows], {row.path[-1] for row in rows if row.draft})
        executed, encoded = None, False  # encoded: the sources are read
        if self.executor is not None:
            tokens_of_step = ids, pieces, chosen, prompts
            executed, encoded = self._execute(self.executor, session, rows, due, tokens_of_step, keep=not at_once)
        if executed is None:
            self.guard.visits += session is not None  # an edit may change anything
            if self.executor is not None and len(ids) == len(rows) and not self._logged:
                self._logged = True
                logging.getLogger("triptych").info("steps of generation run as modules: %s", self.why_modules)
            taps, computed_rows = NO_TAPS if session is None else session.taps, pieces
            if min(ids) < 0 or max(ids) >= self.vocab:
                raise InputError(f"a row's ids hold one outside the vocabulary of {self.vocab}")
            inputs = torch.tensor(ids, dtype=torch.long, device=self.module.device)
            source = None if encoded or rows[0].source is None else self._sources(rows)
            batch = Batch(inputs=inputs, rows=pieces, source=source, cache=self.cache, cross=self.cross, taps=taps)
            hidden = self.module(batch)
            if scored is not None and not whole:
                hidden, computed_rows = hidden[used], Rows((len(used),))
            elif len(chosen) < len(ids):  # some are of prompts, whose logits nobody wants
                hidden, computed_rows = _last_vectors(session, due, hidden[logit_places])
            executed = self.module.unembed(hidden, computed_rows, taps) if len(hidden) else hidden, computed_rows
        logits, computed_rows = executed
        for row, end in zip(rows, pieces.ends, strict=True):
            row.cached, row.source = end, None
        self.running = ()
        every: dict[LiveRow, Tensor] = {}
        if all_logits:
            every = {row: x for row, x in zip(rows, computed_rows.split(logits), strict=True) if row.request.all_logits}
        scores = {} if scored is None else scored.scores(logits, chosen)
        if whole or scored is not None:
            logits = logits[places(logit_places, chosen)]
        best: Largest | None = None
        if find_best and due and logits.is_cpu:  # numpy's search takes a tenth of torch's time
            tokens = (logits.numpy() if logits.dtype == torch.float32 else logits).argmax(-1).tolist()
            best = tokens, logits[[*range(len(tokens))], tokens].tolist()
        elif find_best and due:
            best = self.executor.best() if isinstance(self.executor, StaticStep) and self.why_modules is None else None
            if best is None:
                tokens, largest = best_of(logits).tolist()
                best = [int(token) for token in tokens], largest
        return ForwardResult(due, logits, starts, every, best, scores)

    def _execute(
        self, executor: NativeStep | StaticStep, session: Session | None, rows: Sequence[LiveRow],
        due: Sequence[LiveRow], tokens: tuple[list[int], Rows, Sequence[int], list[int]], *, keep: bool,
    ) -> tuple[FlatBatch | None, bool]:  # fmt: skip
        """The logits of some `tokens` (`ids`, `rows`, `chosen` and `prompts` of `NativeStep.logits`) and their rows, or
        None where the modules must run, and why in `why_modules`; and whether the executor read the sources."""
        self.why_modules = refusal = None if session is None else self._refusal(session, rows)
        if refusal is not None or not (rows[0].source is None or self._read_sources(rows)):
            return None, False
        ids, computed_rows, chosen, _ = tokens
        reads = None if session is None else session.native_reads(computed_rows.slots)
        logits = (
            executor.logits(*tokens, reads, keep=keep or session is not None)
            if isinstance(executor, NativeStep)
            else executor.logits(*tokens, reads)
        )
        self.why_modules = executor.why_modules
        if logits is None:
            return None, True
        if session is not None and len(logits):
            if len(chosen) < len(ids):
                logits, computed_rows = _last_vectors(session, due, logits)
            logits = session.taps_under("")("logits", logits, computed_rows)
        return (logits, computed_rows), True

    def _next_tokens(
        self, executor: NativeStep, session: Session | None, rows: Sequence[LiveRow], find_best: bool
    ) -> ForwardResult | None:
        """What `run` gives of rows that have one token to run each and no draft, where the native step takes them: the
        step of most forwards, with nothing else to decide.  Its logits are overwritten by the next forward, unless they
        are read."""
        if session is not None and self._refusal(session, rows) is not None:
            return None
        ids, past, slots = [], [], []
        for row in rows:
            done = row.cached
            if len(row.ids) != done + 1 or done < len(row.request.prompt) or row.draft or done == self.switch:
                return None
            ids.append(row.ids[done])
            past.append(done)
            slots.append(row.slot)
        self.running = rows
        own = Rows((1,) * len(ids), tuple(past), tuple(slots))
        if session is None:
            logits = executor.logits(ids, own, own.starts, keep=False)
        else:
            session.begin([row.path[-1] for row in rows])
            reads, keep = session.native_reads(slots), "logits" in session.plan.reads
            logits = executor.logits(ids, own, own.starts, reads=reads, keep=keep)
        if logits is None:
            self.running = ()
            return None
        if session is not None:
            logits = session.taps_under("")("logits", logits, own)
        best = largest_of(logits) if find_best else None
        self.running = ()
        for row in rows:
            row.cached += 1
        self.why_modules = None
        return ForwardResult([*rows], logits, [*range(len(ids))], {}, best, {})

    def _refusal(self, session: Session, rows: Sequence[LiveRow]) -> str | None:
        """The reason why the executor cannot serve what is read and edited of these rows."""
        if not isinstance(self.executor, NativeStep):
            return "the rows are probed"
        if session.plan.reads_source and rows[0].source is not None:
            return "the encoder, or keys and values of the source, are read"
        return session.plan.why_modules

    def _read_sources(self, rows: Sequence[LiveRow]) -> bool:
        """Run the encoder natively on the sources of these rows, and project its output; False where the modules must
        run, and why in `why_modules`."""
        if not isinstance(self.executor, NativeStep):
            self.why_modules = "the source is to be encoded"
            return False
        assert self.cross is not None
        if self.sources is None:
            self.sources = NativeEncoder(self.module, matrix_of=kernel_matrix, bf16=self.prompts_use_bf16)
        done = self.sources.project(*self._sources(rows), self.cross)
        self.why_modules = self.sources.why_modules
        return done

    def begin_again(self, row: LiveRow) -> None:
        if row.cached:
            self.cache.trim(row.slot, 0)
            row.cached = 0
            if row.request.probe is not None:
                for key in row.path:
                    row.request.probe.trace.forget(key)

    def _sources(self, rows: Sequence[LiveRow]) -> FlatBatch:
        """The encoder's input in the first forward of these rows."""
        inputs, source_rows = self.module.flat([row.source for row in rows if row.source is not None])
        return inputs, Rows(source_rows.lengths, slots=tuple([row.slot for row in rows]))


def _last_vectors(session: Session | None, due: Sequence[LiveRow], hidden: Tensor) -> FlatBatch:
    """`hidden` of the last id and the draft of each due row, with the rows that these are."""
    if session is not None:
        session.keys = [row.path[-1] for row in due]
    return hidden, Rows(tuple([1 + len(row.draft) for row in due]), tuple([len(row.ids) - 1 for row in due]))
