"""Cached generation of many requests at once, each a row with a cache slot of its own.

Rows join with `add` and leave with `free`, or when they end, at any step; the others are neither copied nor moved.  A
step reads the next piece of every prompt that the cache does not hold yet and decodes one token of every other row, in
one forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.attention import CrossCache, Rows
from triptych.errors import InputError, TextError
from triptych.generate.arguments import check_ids, integer
from triptych.generate.request import LiveRow, Output, Request, TokenLogprobs
from triptych.generate.rules import apply_rules
from triptych.generate.sampling import Sampling, check_finite, sample
from triptych.generate.stops import StopDetector
from triptych.nn import NO_TAPS, Batch, Transformer
from triptych.probe import Session
from triptych.program.native_executor import NativeStep
from triptych.quantize import kernel_matrix
from triptych.spec.positions import LongRope

Decode = Callable[[Sequence[int]], str]
Executor = Literal["auto", "modules"]


class Engine:
    """A model with a cache and the rows that run in it.  One thread uses an engine at a time.

    `decode` makes text of ids, for stop strings.  With `chunk`, a step reads at most that many tokens of a prompt.
    `executor` says what computes a step: with "auto", the native step wherever it may (see `why_modules`), with
    "modules" always the modules.

    Raises InputError for a model that cannot generate, and for another executor.
    """

    def __init__(
        self, module: Transformer, *, decode: Decode | None = None, chunk: int | None = None,
        executor: Executor = "auto",
    ) -> None:  # fmt: skip
        if module.decoder is None:
            raise InputError(f"a {module.spec.family} encoder does not generate; use fill() or encode()")
        if module.spec.head is None:
            raise InputError(f"this {module.spec.family} model has no head, so it cannot generate")
        self.module, self.decode = module, decode
        self.chunk = sys.maxsize if chunk is None else integer("chunk", chunk, 1)
        self.rows: list[LiveRow] = []
        self.cache = module.decoder.cache()
        self.cross: CrossCache | None = None if module.encoder is None else module.decoder.cross_cache()
        if executor not in get_args(Executor):
            raise InputError(f"executor must be one of {list(get_args(Executor))}, not {executor!r}")
        self.native: NativeStep | None = None
        self.why_modules: str | None = "the engine was made with executor='modules'"
        if executor == "auto":
            self.native = NativeStep(module, self.cache, self.cross, matrix_of=kernel_matrix)
            self.why_modules = "no step has run"
        self._switch = _longrope_switch(module)
        self.regroup()

    # -- rows -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def add(self, *requests: Request) -> list[LiveRow]:
        """Rows for these requests, in the same order; their sources and prompts are read in the next steps.

        Raises InputError, before anything runs, for a row that would outgrow the model's positions, an id outside the
        vocabulary and a missing source; TextError for stop strings without a `decode`.
        """
        for request in requests:
            self._check(request)
        if sources := [request.source for request in requests if request.source is not None]:
            self.module.flat(sources)  # raises for a source of another form
        rows = [LiveRow(request, list(request.prompt), _stops(request, self.decode)) for request in requests]
        for row, slot in zip(rows, self.cache.add(len(rows)), strict=True):
            row.slot = slot
        self.rows += rows
        self.regroup()
        return rows

    @torch.inference_mode()
    def free(self, rows: Sequence[LiveRow]) -> None:
        """Remove rows and free their slots for rows that are added later; those that have left are passed over."""
        slots = [row.slot for row in rows if row.holds_slot]
        for row in rows:
            row.holds_slot = False
        self.cache.free(slots)
        if self.cross is not None:
            self.cross.free(slots)
        gone = set(rows)
        self.rows = [row for row in self.rows if row not in gone]
        self.regroup()

    def _leave(self, rows: Sequence[LiveRow]) -> None:
        self.free([row for row in rows if not row.request.keep_slot])
        self.rows = [row for row in self.rows if row.reason is None]
        self.regroup()

    @torch.inference_mode()
    def reorder(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Go on with these rows alone, in this order; one that is named several times is copied (beams)."""
        used: set[int] = set()
        named = set(rows)
        dropped = [row for row in self.rows if row not in named]
        spare = [row.slot for row in dropped]
        for row in dropped:
            row.holds_slot = False
        sources, targets, next_rows = [], [], []
        for row in rows:
            if row.slot not in used:
                used.add(row.slot)
                next_rows.append(row)
                continue
            slot = spare.pop() if spare else self.cache.add(1)[0]
            sources.append(row.slot)
            targets.append(slot)
            next_rows.append(row.copy(slot))
        self.cache.copy(sources, targets)
        if self.cross is not None:
            self.cross.copy(sources, targets)
            self.cross.free(spare)
        self.cache.free(spare)
        self.rows = next_rows
        self.regroup()
        return next_rows

    def trim(self, row: LiveRow, length: int) -> None:
        """Forget a row's tokens from `length` on, in the cache alone: they run again in the next step.

        Raises InputError when a layer with a window no longer holds what came before.
        """
        self.cache.trim(row.slot, length)
        row.cached = length

    def restart(self, row: LiveRow, request: Request) -> LiveRow:
        """Another request in the slot of `row`, beside the same source, which is not encoded again.

        Raises InputError where `row` has left its slot: give its request `keep_slot`.
        """
        if not row.holds_slot:
            raise InputError("the row has left its cache slot; give its request keep_slot=True to restart it")
        request = replace(request, source=row.request.source)
        self._check(request)
        self.cache.trim(row.slot, 0)
        new = LiveRow(request, list(request.prompt), _stops(request, self.decode), row.slot)
        new.source, row.holds_slot = row.source, False
        self.rows = [one for one in self.rows if one.slot != row.slot] + [new]
        self.regroup()
        return new

    # -- steps ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One forward of all rows: a token for each that has read its prompt.  Rows that end leave, with a `reason`.

        Raises InputError for logits that are not finite.
        """
        outputs: list[Output] = []
        ended: list[LiveRow] = []
        for session, members in self._groups:
            due, logits, every = self._forward(session, members)
            tokens: Sequence[int] = ()
            logprobs: Sequence[TokenLogprobs | None] = (None,) * len(due)
            if due and self._greedy:
                if not logits.amax(-1).isfinite().all():
                    check_finite(logits)
                tokens = logits.argmax(-1).tolist()
            elif due:
                tokens, logprobs = _choose(due, logits)
            for row, token, probs in zip(due, tokens, logprobs, strict=True):
                row.ids.append(token)
                if row.stops is not None and row.stops.put(token):
                    row.reason = "stop"
                elif token in row.request.ends:
                    row.reason = "end"
                elif len(row.ids) >= row.limit:
                    row.reason = "length"
                if row.reason is not None:
                    ended.append(row)
                outputs.append(Output(row, token, probs, every.get(row)))
            if len(every) > 0:
                outputs += [Output(row, None, None, x) for row, x in every.items() if row not in due]
        if ended:
            self._leave(ended)
        return outputs

    @torch.inference_mode()
    def logits(self, probe: Session | None = None) -> Tensor:
        """Run all that the cache does not hold of every row -> the logits after each row's last token, [B, V].

        Nothing is chosen: append the ids to go on with to `row.ids`.  `probe` reads and edits this pass alone, for rows
        whose requests have none.
        """
        last: dict[LiveRow, Tensor] = {}
        while len(last) < len(self.rows):
            for session, members in self._groups:
                waiting = [row for row in members if row not in last]
                if waiting:
                    due, logits, _ = self._forward(session or probe, waiting)
                    last.update(zip(due, logits, strict=True))
        return torch.stack([last[row] for row in self.rows])

    def _forward(
        self, session: Session | None, rows: Sequence[LiveRow]
    ) -> tuple[list[LiveRow], Tensor, dict[LiveRow, Tensor]]:
        """The next piece of each row.  Gives the rows that are now read to their end, the logits after each of these,
        and all logits of the rows that want them."""
        ids: list[int] = []
        lengths, past, slots, last = [], [], [], []
        due: list[LiveRow] = []
        for row in rows:
            done, end, chunk = row.cached, len(row.ids), self.chunk
            if done <= self._switch < end:  # LongRoPE's other factors hold for the whole row, from its first token on
                self._begin_again(row)
                done, chunk = 0, max(chunk, self._switch + 1)
            piece = row.ids[done : done + chunk]
            ids += piece
            past.append(done)
            lengths.append(len(piece))
            slots.append(row.slot)
            if done + len(piece) == end:
                due.append(row)
                last.append(len(ids) - 1)
        where = Rows(tuple(lengths), tuple(past), tuple(slots))
        wanted = range(len(ids)) if self._all_logits else last
        found = None if self.native is None else self._native_logits(self.native, session, rows, ids, where, wanted)
        if found is not None:
            for row, n in zip(rows, lengths, strict=True):
                row.cached += n
            return self._chosen(rows, due, found, where, last)
        taps = NO_TAPS
        if session is not None:
            taps, session.items = session.taps, [row.request.number for row in rows]
        inputs = torch.tensor(ids, dtype=torch.long, device=self.module.device)
        source = None if rows[0].source is None else self._sources(rows)
        batch = Batch(inputs=inputs, rows=where, source=source, cache=self.cache, cross=self.cross, taps=taps)
        hidden = self.module(batch)
        for row, n in zip(rows, lengths, strict=True):
            row.cached += n
        if source is not None:
            for row in rows:
                row.source = None
            self.regroup()
        if self._all_logits:
            return self._chosen(rows, due, self.module.unembed(hidden, where, taps), where, last)
        every: dict[LiveRow, Tensor] = {}
        if len(last) < len(ids):  # some tokens are of prompts, whose logits nobody wants
            if not due:
                return due, hidden[:0], every
            hidden, where = hidden[last], Rows((1,) * len(due), tuple([len(row.ids) - 1 for row in due]))
            if session is not None:
                session.items = [row.request.number for row in due]
        return due, self.module.unembed(hidden, where, taps), every

    def _native_logits(
        self,
        native: NativeStep,
        session: Session | None,
        rows: Sequence[LiveRow],
        ids: Sequence[int],
        where: Rows,
        wanted: Sequence[int],
    ) -> Tensor | None:
        """The logits of the tokens `wanted`, by the native step; None where the modules must run, and why in
        `why_modules`."""
        if session is not None:
            self.why_modules = "the rows are probed"
        elif rows[0].source is not None:
            self.why_modules = "the source is to be encoded"
        else:
            logits = native.logits(ids, where, wanted)
            self.why_modules = native.why_modules
            return logits
        return None

    def _chosen(
        self, rows: Sequence[LiveRow], due: list[LiveRow], logits: Tensor, where: Rows, last: Sequence[int]
    ) -> tuple[list[LiveRow], Tensor, dict[LiveRow, Tensor]]:
        """What `_forward` gives, from the logits of all tokens, or of those in `last` where no row wants all."""
        if not self._all_logits:
            return due, logits, {}
        every = {row: x for row, x in zip(rows, where.split(logits), strict=True) if row.request.all_logits}
        return due, logits[last], every

    def _begin_again(self, row: LiveRow) -> None:
        if row.cached:
            self.cache.trim(row.slot, 0)
            row.cached = 0
            if row.request.probe is not None:
                row.request.probe.trace.forget(row.request.number)

    # -- sources and settings -------------------------------------------------------------------------------------

    def _sources(self, rows: Sequence[LiveRow]) -> tuple[Tensor, Rows]:
        """What the encoder reads in the first forward of these rows."""
        inputs, where = self.module.flat([row.source for row in rows if row.source is not None])
        return inputs, Rows(where.lengths, slots=tuple([row.slot for row in rows]))

    def _check(self, request: Request) -> None:
        spec = self.module.spec
        end, limit = len(request.prompt) + request.max_new_tokens, spec.context
        if limit is not None and end > limit:
            raise InputError(
                f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones need {end} positions, the "
                f"model has {limit}; shorten the prompt or lower max_new_tokens"
            )
        check_ids(request.prompt, spec.vocab, f"prompt {request.number}")
        if request.source is None and self.cross is not None:
            raise InputError(f"prompt {request.number}: an encoder-decoder generates from a source for each row")
        if request.source is not None and self.cross is None:
            raise InputError(f"prompt {request.number}: a decoder alone takes no source")
        if request.stop and self.decode is None:
            raise TextError("stop strings need a tokenizer; give ids at which to end instead")

    def regroup(self) -> None:
        """Work out what a step uses of its rows' requests; to be called by whoever changes `rows`."""
        groups: dict[tuple[int, bool], tuple[Session | None, list[LiveRow]]] = {}
        for row in self.rows:  # one forward each: rows under one plan, those whose sources are to be encoded apart
            key = id(row.request.probe), row.source is not None
            groups.setdefault(key, (row.request.probe, []))[1].append(row)
        self._groups = list(groups.values())
        self._all_logits = any(row.request.all_logits for row in self.rows)
        plain = [
            not row.request.rules
            and row.request.logprobs is None
            and row.request.sampling.temperature == 0
            and row.request.sampling.repetition_penalty == 1
            for row in self.rows
        ]
        self._greedy = all(plain)


def _choose(rows: Sequence[LiveRow], logits: Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
    """A token for each row from its logits [B, V], by rules and sampling, and log-probabilities where wanted."""
    check_finite(logits)
    scores = logits
    if any(row.request.rules for row in rows):
        scores = torch.stack([apply_rules(row.request.rules, x, row.ids) for row, x in zip(rows, logits, strict=True)])
    alike: dict[Sampling, list[int]] = {}
    for i, row in enumerate(rows):
        alike.setdefault(row.request.sampling, []).append(i)
    tokens = [0] * len(rows)
    for sampling, members in alike.items():
        chosen = scores if len(members) == len(rows) else scores[members]
        numbers, ids = [rows[i].request.number for i in members], [rows[i].ids for i in members]
        for i, token in zip(members, sample(chosen, sampling, numbers, ids), strict=True):
            tokens[i] = token
    wanted = [row.request.logprobs for row in rows]
    return tokens, [
        None if n is None else _logprobs(x, token, n) for n, x, token in zip(wanted, logits, tokens, strict=True)
    ]


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def _stops(request: Request, decode: Decode | None) -> StopDetector | None:
    return StopDetector(request.stop, decode) if request.stop and decode is not None else None


def _longrope_switch(module: Transformer) -> int:
    """The length beyond which LongRoPE has other factors for the whole row; without it, one that no row reaches."""
    assert module.spec.decoder is not None
    scalings = [getattr(kind.position, "scaling", None) for kind in module.spec.decoder.kinds.values()]
    lengths = [s.original_length for s in scalings if isinstance(s, LongRope) and s.short != s.long]
    return max(lengths, default=sys.maxsize)
