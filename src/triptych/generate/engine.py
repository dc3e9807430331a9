"""Cached generation of many requests at once, each a row with a cache slot of its own.

Rows join with `add` and leave with `free`, or when they end, at any step; the others are neither copied nor moved.  A
step decodes one token of every row that has read its prompt, or several that were guessed, and reads the next piece of
the other prompts, in one forward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from threading import Lock, RLock
from time import perf_counter
from typing import NoReturn, get_args

import torch
from torch import Tensor

from triptych.arguments import check_ids, checked, integer
from triptych.attention import CacheType, check_cache_type
from triptych.errors import InputError, shown
from triptych.migration_hints import Explained
from triptych.nn import Transformer
from triptych.probe import Session
from triptych.program.module_changes import ModuleGuard
from triptych.program.native_encoder import Matmul
from triptych.program.static_executor import StaticStep
from triptych.text import Tokenizer
from .next_tokens import Choice, choose, outputs_of
from .prefixes import Prefixes, SharedSources
from .prompt_pieces import PromptPieces
from .request import LiveRow, Output, Request, check_new, check_request, check_running, row_of
from .speculation import Speculation, accepts
from .step_runner import TWO_THREADS, Executor, ForwardResult, StepRunner, alone
from .stops import Decode


class Engine(Explained):
    """A model with a cache and the rows that run in it.  One thread uses an engine at a time; others are
    refused with InputError.

    decode        makes text of ids, for stop strings.
    tokenizer     the texts of the ids, for constraints.
    chunk         ids of a prompt that a step reads at most.
    budget        ids that a step runs at most, about: those of rows that decode first, then of the oldest prompts.
    executor      what computes a step.  "auto": the native step wherever it may (`why_modules` says why not elsewhere),
                  on a GPU "static"; "modules": always the modules; "static": steps of one token per row in fixed
                  shapes, as CUDA graphs on a GPU; "compiled": the same through `torch.compile`.
    matmul        the arithmetic of tokens of prompts and sources with packed weights: "bf16"; "stored", integers, as
                  for generated tokens; "auto", bf16 on a processor with AMX.  A token has the same bits in any step.
    reuse         prompts that begin alike are computed once (`Prefixes`), and equal sources encoded (`SharedSources`).
    cache_type    what the caches keep (`CacheType`); what is reused was kept in it.
    speculation   guesses several next tokens, which one forward verifies.
    rows          the rows that run.
    prompt_seconds   seconds of a step that prompts take at most, about, where their forward can stop in its middle and
                  go on in the next step; None: the forward of a step is done in that step.

    Raises InputError for a model that cannot generate, for another executor, `matmul` or type of cache, and where
    products in bf16 were asked for and cannot be had.
    """

    @checked
    def __init__(
        self, module: Transformer, *, decode: Decode | None = None, chunk: int | None = None,
        budget: int | None = None, executor: Executor = "auto", matmul: Matmul = "auto", reuse: bool = False,
        speculation: Speculation | None = None, cache_type: CacheType = "auto", tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(module, torch.nn.Module) or not hasattr(module, "spec"):
            raise InputError(f"an engine runs a Transformer, as model.module is one, not a {type(module).__name__}")
        if module.decoder is None:
            raise InputError(f"a {module.spec.family} encoder does not generate; use fill() or encode()")
        if module.spec.head is None:
            raise InputError(f"this {module.spec.family} model has no head, so it cannot generate")
        if executor not in get_args(Executor):
            raise InputError(f"executor must be one of {list(get_args(Executor))}, not {executor!r}")
        check_cache_type(cache_type)
        if matmul == "bf16" and executor != "auto":
            raise InputError(f"matmul='bf16' needs the native executor, and executor={executor!r} was asked for")
        self.module, self.decode, self.executor, self.reuse, self.matmul = module, decode, executor, reuse, matmul
        self.cache_type: CacheType = cache_type
        self.tokenizer = tokenizer
        self.chunk = sys.maxsize if chunk is None else integer("chunk", chunk, 1)
        self.budget = sys.maxsize if budget is None else integer("budget", budget, 1)
        self.prompt_seconds: float | None = None
        self.prefixes: Prefixes | None = None
        self.speculation, self.streaming = speculation, Lock()  # held while the text of one row is streamed
        self.guard, self.lock = ModuleGuard(), RLock()  # held by the thread that is in a method
        self.reset()

    @property
    def why_modules(self) -> str | None:
        """The reason why the modules computed the last step; None where the executor did."""
        return self.runner.why_modules

    def __reduce__(self) -> NoReturn:
        raise InputError("an engine is not copied or pickled, as its caches are in use; make another: model.engine()")

    @alone(nullcontext)
    def reset(self) -> None:
        """Begin again with an empty cache: no rows, nothing kept."""
        self.runner = StepRunner(self.module, self.chunk, self.executor, self.matmul, self.cache_type, self.guard)
        self.cache, self.cross = self.runner.cache, self.runner.cross
        self.pieces = PromptPieces(self.runner)
        reused = 0 if self.prefixes is None else self.prefixes.reused
        self.prefixes = Prefixes(self.runner, reused) if self.reuse and self.cross is None else None
        self.sources = SharedSources(self.cross, self.guard) if self.reuse and self.cross is not None else None
        self._reading = False  # whether a row has more to run than one token and its draft
        if self.speculation is not None:
            self.speculation.reset()
        self._set_rows([])

    @alone()
    def warm_up(self, rows: int, length: int) -> None:
        """Compile and capture what so many rows of up to `length` tokens need, so that no later step does.

        Raises InputError for an executor other than "static" and "compiled", for numbers below 1, and where the model
        has no step of fixed shapes.
        """
        rows, length = integer("rows", rows, 1), integer("length", length, 1)
        executor = self.runner.executor
        if not isinstance(executor, StaticStep):
            raise InputError(f"executor={self.executor!r} has nothing to warm up; use 'static' or 'compiled'")
        executor.warm_up(rows, length)

    # -- rows -----------------------------------------------------------------------------------------------------

    def add(self, *requests: Request) -> list[LiveRow]:
        """Rows for these requests, in the same order; their sources and prompts are read in the next steps.

        Raises InputError, before anything runs, for a row that would outgrow the model's positions, an id outside the
        vocabulary, a missing source and a constraint that cannot be kept; TextError for stop strings without a
        `decode` and for a constraint with a tokenizer that it cannot use.
        """
        rows = [self.prepare(request) for request in requests]
        self.join(rows)
        return rows

    def prepare(self, request: Request) -> LiveRow:
        """A row for this request, which has no slot yet.  Raises as `add`, and InputError where the model was moved or
        cast under rows that run; without rows the engine begins again."""
        check_request(request)
        if not self.runner.serves():
            if self.rows:
                problem = "a window of the model has changed, or it was moved or cast while rows run"
                raise InputError(f"{problem}; let them end first, or call reset()")
            self.reset()
        row = row_of(request, self.module, self.decode, self.tokenizer)
        row.module = self.module
        if request.source is not None:
            if not isinstance(request.source, Tensor):
                check_ids(request.source, self.module.spec.vocab, f"source {request.number}")
            self.module.flat([request.source])  # raises for a source of another form
            row.source_length = self.module.length(request.source)
        return row

    @alone()
    def join(self, rows: Sequence[LiveRow]) -> None:
        """Give prepared rows slots: they run from the next step on."""
        check_new(rows, self.module)
        self.guard.visits += not self.guard.only_own_code
        if self.prefixes is None:
            for row, slot in zip(rows, self.cache.add(len(rows)), strict=True):
                row.slot, row.cache = slot, self.cache
                if self.sources is not None:
                    self.sources.join(row, self.rows)
        else:
            for row in rows:
                row.slot, row.cache = self.prefixes.slot(row, self.rows), self.cache
        for row in rows:
            self._expect(row)
        self._set_rows([*self.rows, *rows])

    @alone()
    def free(self, rows: Sequence[LiveRow]) -> None:
        """Remove rows and free their slots for rows that are added later; those that have left are passed over."""
        check_running(rows, self.rows, None, self.cache)
        leaving = [row for row in rows if row.cache is not None]
        if not {*self.pieces.rows}.isdisjoint(leaving):
            self.pieces.drop()
        for row in leaving:
            row.cache, row.draft = None, ()
        prefixes, busy = self.prefixes, self.runner.running
        for_reuse = {row for row in leaving if prefixes is not None and row not in busy and prefixes.keep(row)}
        slots = [row.slot for row in leaving if row not in for_reuse]
        self.cache.free(slots)
        if self.cross is not None:
            self.cross.free(slots)
        if self.speculation is not None:
            self.speculation.forget(leaving)
        removed = set(rows)
        self._set_rows([row for row in self.rows if row not in removed])
        if prefixes is not None and for_reuse:  # before rows that join next take these slots
            for row in self.rows:
                if not row.cached:
                    prefixes.fill(row, self.rows)

    @alone()
    def reorder(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Go on with these rows alone, in this order; one that is named several times is copied (beams).

        What each reads from then on is kept under a key of its own in its `path`; `Session.settle` joins those of the
        rows that are returned.
        """
        check_running(rows, self.rows)
        self.pieces.drop()
        named = set(rows)
        dropped = [row for row in self.rows if row not in named]
        spare = [row.slot for row in dropped]
        if (lacking := len(rows) - len(named) - len(spare)) > 0:
            spare += self.cache.add(lacking)
        for row in dropped:
            row.cache = None
        next_rows: list[LiveRow] = []
        for row in rows:
            next_rows.append(row.copy(spare.pop()) if row in next_rows else row)
        copies = [(old.slot, new.slot) for old, new in zip(rows, next_rows, strict=True) if new is not old]
        sources, targets = ([slots[side] for slots in copies] for side in range(2))
        self.cache.copy(sources, targets)
        if self.cross is not None:
            self.cross.share(sources, targets)
            self.cross.free(spare)
        self.cache.free(spare)
        for row in next_rows:
            row.branch()
            self._expect(row)
        self._set_rows(next_rows)
        return next_rows

    @alone(nullcontext)
    def trim(self, row: LiveRow, length: int) -> None:
        """Forget a row's tokens from `length` on, in the cache alone: they run again in the next step.

        Raises InputError when a layer with a window no longer holds what came before.
        """
        check_running([row], self.rows)
        self.pieces.drop()
        self.cache.trim(row.slot, integer("length", length, 0))
        row.cached = length
        self._reading = True

    @alone(nullcontext)
    def restart(self, row: LiveRow, request: Request) -> LiveRow:
        """Another request in the slot of `row`, beside the same source, which is not encoded again.

        Raises InputError where `row` has left its slot: give its request `keep_slot`.
        """
        check_request(request)
        check_running([row], self.rows, None, self.cache)
        if row.cache is None:
            raise InputError("the row has left its cache slot; give its request keep_slot=True to restart it")
        self.pieces.drop()
        request = replace(request, source=row.request.source)
        new = row_of(request, self.module, self.decode, self.tokenizer, row.slot)
        self.cache.trim(row.slot, 0)
        new.source, new.cache, row.cache = row.source, self.cache, None
        self._expect(new)
        self._set_rows([other for other in self.rows if other.slot != row.slot] + [new])
        return new

    # -- steps ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, *, isolate: bool = False) -> list[Output]:
        """One forward of all rows: a token for each that has read its prompt, and the tokens of its draft that were
        right.  Rows that end leave, with a `reason`.

        With `guard.only_own_code` the executor looks for changes of the module in one of 16 steps only, those of other
        threads, unless rows have rules, edits, stop strings or drafts.

        A row whose logits are not finite, or whose rules or sampling fail, leaves with the reason `error`.  The first
        such error is raised, unless `isolate`.
        """
        if isolate not in (True, False):
            raise InputError(f"isolate={shown(isolate)} must be True or False")
        if not self.lock.acquire(blocking=False):  # as `alone`, without its frame
            raise InputError(TWO_THREADS)
        try:
            guard = self.guard
            guard.visits += not (guard.only_own_code and self._only_own_code)
            guard.only_own_code = False
            share = None
            start = None if self.speculation is None or self._reading else perf_counter()
            if self.speculation is not None:
                self.speculation.propose(self.rows, self.runner)
            pieces = self.pieces
            if self._reading or pieces.rows:
                reused = self.prefixes or self.sources
                whole = self.prompt_seconds is None or self._all_logits or self.speculation is not None
                share = pieces.share(self.rows, self.budget, None if reused is None else reused.fill, whole)
            outputs, ended = list[Output](), list[LiveRow]()
            at_once = not self._all_logits and self.speculation is None  # logits are used before the next forward
            for session, members in self._groups:
                for part in [members] if share is None else self.runner.parts(members, share):
                    counts = None if pieces.rows else share  # beside these, each runs one id
                    computed = self.runner.run(session, part, counts, self._all_logits, at_once, self._greedy)
                    if computed.scores:
                        outputs += outputs_of(computed.scores)
                        ended += [row for row in computed.scores if row.reason is not None]
                    tokens, tops = computed.best or (list[int](), list[float]())
                    if not tokens or not all(map(isfinite, tops)):
                        self._choose_tokens(computed, outputs, ended)
                        continue
                    for row, token in zip(computed.due, tokens, strict=True):
                        row.ids.append(token)
                        outputs.append(Output(row, token))
                        checked = row.stops is not None or token in row.request.ends or len(row.ids) >= row.limit
                        if checked and row.ends():
                            ended.append(row)
            if pieces.rows:
                read = pieces.go_on(self.prompt_seconds)
                if read is not None:
                    self._choose_tokens(read, outputs, ended)
            if self.sources is not None and share is not None:
                self.sources.share(share, self.rows)
            if start is not None and self.speculation is not None:
                self.speculation.measured(perf_counter() - start, len(outputs))
            if ended:
                self.free([row for row in ended if not row.request.keep_slot])
                self._set_rows([row for row in self.rows if row.reason is None])
                error = None if isolate else next((row.error for row in ended if row.error is not None), None)
                if error is not None:
                    raise error
            if share is not None:
                self._set_rows(self.rows)  # sources were read, prompts were
            return outputs
        finally:
            self.lock.release()

    def _choose_tokens(self, computed: ForwardResult, outputs: list[Output], ended: list[LiveRow]) -> None:
        """Choose the tokens of the rows that are due, one after another along each draft while it was right."""
        logits, every = computed.logits, computed.every
        live = [pair for pair in zip(computed.due, computed.places, strict=True) if pair[0].reason is None]
        best: list[int] | None = None
        if live and self._greedy and logits.amax(-1).isfinite().all():
            best = logits.argmax(-1).tolist()
        while live:
            choices: list[Choice] = []
            if best is None:
                scores = logits if len(live) == len(logits) else logits[[at for _, at in live]]
                choices = choose([row for row, _ in live], scores)
            accepted: list[tuple[LiveRow, int]] = []
            for i, (row, at) in enumerate(live):
                choice = None if best is not None else choices[i]
                token = best[at] if best is not None else choices[i].token
                if choice is not None and choice.error is not None:
                    row.reason, row.error = "error", choice.error
                    ended.append(row)
                    continue
                right = accepts(row, token)
                row.ids.append(token)
                if row.ends():
                    ended.append(row)
                elif right:
                    accepted.append((row, at + 1))
                if right and self.speculation is not None:
                    row.accepted += 1
                    self.speculation.accepted += 1
                outputs.append(Output(row, token, None if choice is None else choice.logprobs, every.get(row)))
            live = accepted
        for row in computed.due:
            if row.draft:
                assert self.speculation is not None
                self.speculation.forget_wrong_guesses(row, self.cache)
        for row, x in every.items():
            if row not in computed.due:
                outputs.append(Output(row, None, None, x))

    @checked
    @alone()
    def logits(self, probe: Session | None = None, rows: Sequence[LiveRow] | None = None) -> Tensor:
        """Run all that the cache does not hold of every row, or of `rows` -> the logits after each row's last token,
        [B, V].

        Nothing is chosen: append the ids to go on with to `row.ids`.  `probe` reads and edits this pass alone, for rows
        whose requests have none.
        """
        rows = self.rows if rows is None else rows
        check_running(rows, self.rows)
        if not rows:
            raise InputError("no rows run in this engine; add requests first")
        if any(row.only_scores for row in rows):
            raise InputError("a row with score_from and max_new_tokens=0 has no next token; step() gives its scores")
        self.guard.visits += 1
        self.pieces.drop()
        last: dict[LiveRow, Tensor] = {}
        while len(last) < len({*rows}):
            for session, members in self._groups:
                waiting = [row for row in members if row in rows and row not in last]
                if waiting:
                    encoded = waiting[0].source is not None
                    computed = self.runner.run(session or probe, waiting, None, self._all_logits)
                    if computed.due == rows:
                        return computed.logits
                    last.update(zip(computed.due, computed.logits, strict=True))
                    if encoded:
                        self._set_rows(self.rows)
        return torch.stack([last[row] for row in rows])

    # -- settings -------------------------------------------------------------------------------------------------

    def _expect(self, row: LiveRow) -> None:
        self.cache.expect(row.slot, min(len(row.request.prompt) + 1, row.limit), row.limit)

    def _set_rows(self, rows: Sequence[LiveRow]) -> None:
        """Go on with these rows, and work out what a step uses of their requests."""
        self.rows = rows
        groups: dict[tuple[int, bool], tuple[Session | None, list[LiveRow]]] = {}
        for row in self.rows:  # one forward each: rows under one plan, those whose sources are to be encoded apart
            key = id(row.request.probe), row.source is not None
            groups.setdefault(key, (row.request.probe, []))[1].append(row)
        self._groups = list(groups.values())
        self._all_logits = any(row.request.all_logits for row in self.rows)
        self._reading = any(len(row.ids) - row.cached > 1 or row.source is not None for row in self.rows)
        self._greedy = all(
            not row.request.rules
            and row.constraint is None
            and row.request.logprobs is None
            and row.request.sampling.temperature == 0
            and row.request.sampling.repetition_penalty == 1
            for row in self.rows
        )
        edited = any(row.request.probe is not None and row.request.probe.plan.edits for row in self.rows)
        others = any(row.request.rules or row.stops is not None for row in self.rows)
        self._only_own_code = self.speculation is None and not others and not edited
