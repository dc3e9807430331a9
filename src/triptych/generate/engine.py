"""Prefill and cached decode of ragged batches, for decoders alone and beside an encoder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.attention import Cache, CrossCache, Rows
from triptych.errors import InputError
from triptych.generate.sampling import Sampling, sample
from triptych.nn import NO_TAPS, Batch, Row, Taps, Transformer
from triptych.probe import Session
from triptych.spec.positions import LongRope

Rule = Callable[[Tensor, Sequence[Sequence[int]]], Tensor]  # (logits [B, V], rows so far) -> logits to choose from
Stop = Callable[[int, list[int]], bool]  # (row of the batch, its new tokens) -> has it ended?


@dataclass
class State:
    """Live rows of a generation: their ids, the keys and values of all but the newest, and which request each is.

    `never` are tokens that are not to be chosen.
    """

    module: Transformer
    rows: list[list[int]]
    cache: Cache
    cross: CrossCache | None = None
    requests: list[int] = field(default_factory=list)
    session: Session | None = None
    never: Sequence[int] = ()
    slots: list[int] = field(default_factory=list)  # the cache slot of each live row

    def __post_init__(self) -> None:
        self.slots = self.slots or list(range(len(self.rows)))

    @property
    def taps(self) -> Taps:
        return NO_TAPS if self.session is None else self.session.taps

    def keep(self, live: Sequence[int]) -> None:
        """Go on with these of the live rows, in this order; a row may be kept more than once (beams)."""
        if list(live) == list(range(len(self.rows))):
            return
        slots, copies, used = [self.slots[i] for i in live], [], set[int]()
        self._free([slot for slot in self.slots if slot not in slots])
        for i, slot in enumerate(slots):
            if slot in used:
                (slots[i],) = self.cache.add()
                copies.append((slot, slots[i]))
            used.add(slots[i])
        if copies:
            sources, targets = zip(*copies, strict=True)
            self.cache.copy(sources, targets)
            if self.cross is not None:
                self.cross.copy(sources, targets)
        self.slots = slots
        self.rows = [list(self.rows[i]) for i in live]
        self.requests = [self.requests[i] for i in live]

    def _free(self, slots: Sequence[int]) -> None:
        self.cache.free(slots)
        if self.cross is not None:
            self.cross.free(slots)

    def advance(self, chunk: int | None = None) -> Tensor:
        """Run what the cache has not seen of every row, at most `chunk` tokens of each at a time -> the logits after
        each row's last token, [B, V].

        A row that outgrows the first factors of LongRoPE begins again, and at once with the second ones: they hold
        for all of its tokens, as in one whole forward.
        """
        turn, past = _turn(self.module), [self.cache.lengths[slot] for slot in self.slots]
        grown = [have <= turn < len(row) for have, row in zip(past, self.rows, strict=True)]
        for slot, again in zip(self.slots, grown, strict=True):
            if again:
                self.cache.trim(slot, 0)
        todo = [row[self.cache.lengths[slot] :] for row, slot in zip(self.rows, self.slots, strict=True)]
        step = chunk or max(len(row) for row in todo)
        sizes = [max(step, turn + 1) if again else step for again in grown]
        last: list[Tensor | None] = [None] * len(todo)
        while any(todo):
            live = [i for i, row in enumerate(todo) if row]
            hidden, rows = self._run(live, [todo[i][: sizes[i]] for i in live])
            todo = [row[size:] for row, size in zip(todo, sizes, strict=True)]
            sizes = [step] * len(todo)
            for i, x in zip(live, rows.split(hidden), strict=True):
                last[i] = x[-1]
        final = torch.stack([x for x in last if x is not None])
        at = Rows((1,) * len(todo), tuple(len(row) - 1 for row in self.rows))
        if self.session is not None:
            self.session.items = self.requests
        logits = self.module.unembed(final, at, self.taps)
        return (
            logits.index_fill(1, torch.tensor(self.never, device=logits.device), -torch.inf) if self.never else logits
        )

    def _run(self, live: Sequence[int], parts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows]:
        """The hidden states of the next tokens of some live rows."""
        slots = tuple(self.slots[i] for i in live)
        rows = Rows(tuple(map(len, parts)), tuple(self.cache.lengths[slot] for slot in slots), slots)
        if self.session is not None:
            self.session.items = [self.requests[i] for i in live]
        ids = torch.tensor([token for part in parts for token in part], dtype=torch.long, device=self.module.device)
        batch = Batch(inputs=ids, rows=rows, cache=self.cache, cross=self.cross, taps=self.taps)
        return self.module(batch), rows


def _turn(module: Transformer) -> int:
    """The length beyond which LongRoPE has other factors for the whole row; without it, one that no row reaches."""
    assert module.spec.decoder is not None
    scalings = [getattr(kind.position, "scaling", None) for kind in module.spec.decoder.kinds.values()]
    lengths = [s.original_length for s in scalings if isinstance(s, LongRope) and s.short != s.long]
    return max(lengths, default=sys.maxsize)


@torch.no_grad()
def start(
    module: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    sources: Sequence[Row] | None = None,
    session: Session | None = None,
    never: Sequence[int] = (),
) -> State:
    """A state that has seen nothing yet.  `prompts` are the decoder's rows (its start token first, beside an encoder),
    `sources` the encoder's, `never` tokens not to be chosen.  Raises InputError for an empty row or a missing
    source."""
    for i, row in enumerate(prompts):
        if not row:
            raise InputError(f"prompt {i} is empty: give it at least one token")
    if module.decoder is None:
        raise InputError(f"a {module.spec.family} encoder does not generate; use fill() or encode()")
    cross = None
    if module.encoder is not None:
        if sources is None or len(sources) != len(prompts):
            raise InputError("an encoder-decoder generates from a source for each row")
        source, rows = module.flat(sources)
        cross = module.decoder.cross_cache()
        taps = NO_TAPS if session is None else session.taps
        module(Batch(source=(source, rows), cross=cross, taps=taps))
    cache = module.decoder.cache(len(prompts))
    return State(module, [list(row) for row in prompts], cache, cross, list(range(len(prompts))), session, never)


@torch.inference_mode()
def stream(
    state: State,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    eos: Sequence[int] = (),
    stop: Stop | None = None,
    rule: Rule | None = None,
    chunk: int | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Step by step, the (request, token) pairs that were chosen; a row leaves the batch after an end token, when
    `stop` says so, or after `max_new_tokens`.  `rule` changes the logits before each choice.  Raises InputError when a
    row would outgrow the model's positions."""
    limit = state.module.spec.context
    longest = max(len(row) for row in state.rows)
    if limit is not None and longest + max_new_tokens > limit:
        raise InputError(
            f"{longest} prompt tokens and {max_new_tokens} new ones need {longest + max_new_tokens} positions, the "
            f"model has {limit}; shorten the prompt or lower max_new_tokens"
        )
    begun = {request: len(row) for request, row in zip(state.requests, state.rows, strict=True)}
    for _ in range(max_new_tokens):
        scores = state.advance(chunk)
        if rule is not None:
            scores = rule(scores, state.rows)
        tokens = sample(scores, sampling, state.requests, state.rows)
        live = []
        for i, token in enumerate(tokens):
            state.rows[i].append(token)
            request = state.requests[i]
            ended = token in eos or (stop is not None and stop(request, state.rows[i][begun[request] :]))
            if not ended:
                live.append(i)
        yield list(zip(state.requests, tokens, strict=True))
        if not live:
            return
        state.keep(live)
