"""A request for one row, the row while it runs (`LiveRow`), and what a step gives it (`Output`)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from triptych.arguments import check_ids, checked_methods, integer, listed, number
from triptych.errors import InputError, TextError, shown
from triptych.nn import InputRow, Transformer
from triptych.probe import Session
from triptych.text import Tokenizer
from .constraints import Constraint, RowConstraint, constraint_of
from .sampling import Rule, Sampling, check_rules
from .stops import Decode, StopDetector, stop_strings

GREEDY = Sampling()


@checked_methods
@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A request to generate one row.

    prompt          ids the decoder continues; beside an encoder, its start token first.
    source          what the encoder reads, for an encoder-decoder.
    sampling        how to choose each token; greedy unless given.
    max_new_tokens  tokens after which the row ends; with 0 it is for `Engine.logits` alone.
    ends            ids after which the row ends.
    stop            strings at which the row ends, as soon as its new text holds one.
    rules           applied to the logits before each choice, in order.
    constraint      what the new text must be (`Constraint`); it goes without `stop`, which would cut it.
    number          index of the request among its caller's: the noise of sampling depends on it, on the seed and on the
                    position, and on nothing else.
    probe           the reads and edits of a run, a `probe.Session`; `number` is the row's item there.
    logprobs        with each token, the log-probabilities of that many of the likeliest ones.
    all_logits      give the logits of every position that is computed, the prompt's included.
    score_from      a position of the prompt, 1 or more: give the log-probabilities of its ids from there on
                    (`Output.scores`), with those of the `logprobs` likeliest beside each.  With `max_new_tokens=0` the
                    row ends after them, and its last id, which nothing follows, does not run.
    keep_slot       keep the slot and the source when the row ends, for `Engine.restart`.
    priority        of those that wait in a `Scheduler`, larger ones join first.
    deadline        seconds after `Scheduler.submit` at which the row leaves, whether it is finished or not.

    Raises InputError for an empty prompt and for settings of another type or out of range.
    """

    prompt: Sequence[int] | Tensor
    source: InputRow | None = None
    sampling: Sampling = GREEDY
    max_new_tokens: int = 64
    ends: Collection[int] = ()
    stop: str | Sequence[str] = ()
    rules: Sequence[Rule] = ()
    constraint: Constraint | None = None
    number: int = 0
    probe: Session | None = None
    logprobs: int | None = None
    all_logits: bool = False
    score_from: int | None = None
    keep_slot: bool = False
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        first = next(iter(listed(self.prompt, f"prompt {self.number}")), 0)
        integer(f"an id of prompt {self.number}", first, 0)
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling={shown(self.sampling)} must be a Sampling")
        if not isinstance(self.ends, Collection):
            raise InputError(f"ends={shown(self.ends)} must be a collection of token ids")
        for end in self.ends:
            integer("an id of ends", end, 0)
        for name in ("number", "max_new_tokens", "logprobs"):
            integer(name, getattr(self, name) or 0, 0)
        integer("priority", self.priority)
        if self.deadline is not None:
            number("deadline", self.deadline, 0, sys.float_info.max, "seconds >= 0")
        if not len(self.prompt):
            raise InputError(f"the text is empty (prompt {self.number}); give at least one token")
        if self.score_from is not None and integer("score_from", self.score_from, 1) >= len(self.prompt):
            problem = f"score_from={self.score_from} and the prompt has {len(self.prompt)} ids"
            raise InputError(f"{problem}; a position from 1 to {len(self.prompt) - 1} has ids to score behind it")
        stop_strings(self.stop)
        if not isinstance(self.probe, Session | None):
            raise InputError(
                f"probe={shown(self.probe)} must be a Session, as probe.Session(probe.Plan.of(model.spec, read, edit))"
            )
        check_rules(self.rules)
        if not isinstance(self.constraint, Constraint | None):
            raise InputError(f"constraint={shown(self.constraint)} must be a Constraint, as Constraint.choices(['a'])")
        constraint_of(None, self.constraint, stop_strings(self.stop))


@dataclass(eq=False)
class LiveRow:
    """A request while it runs: its ids so far, and the cache slot that holds the first `cached` of them.

    `reason` is None while the row runs; then `end` (an id of `ends`, or a constraint after which nothing comes), `stop`
    (a stop string), `length`, `cancelled`, `deadline`, or `error`, with the exception in `error`.  `cache` is the one
    that has its slot, None before and after.  `reused` ids of the prompt came from another row's cache.  `draft` are
    guesses for the next ids; of all that were made, `drafted`, `accepted` were right.  `path` are the keys under which
    the probe keeps what the row read, the newest last (`probe.Session.branch`).
    """

    request: Request
    ids: list[int]
    stops: StopDetector | None = None
    slot: int = -1
    cached: int = 0
    reason: str | None = None
    cache: object = field(default=None, repr=False)
    error: Exception | None = None
    reused: int = 0
    draft: Sequence[int] = ()
    drafted: int = 0
    accepted: int = 0
    constraint: RowConstraint | None = None

    def __post_init__(self) -> None:
        prompt, first = len(self.request.prompt), self.request.score_from
        self.only_scores = first is not None and not self.request.max_new_tokens
        self.next_score = sys.maxsize if first is None else first  # the position of the next id to score
        self.limit = prompt + (-1 if self.only_scores else self.request.max_new_tokens)
        self.source = self.request.source  # None once it was encoded
        self.module: object = None  # of the engine that prepared the row
        self.source_length = 0  # positions of the source, as the engine that prepares the row counts them
        self.path: tuple[int, ...] = (self.request.number,)

    def copy(self, slot: int) -> LiveRow:
        """The same row in another slot, to go on in another way (beams)."""
        twin = LiveRow(self.request, list(self.ids), None, slot, self.cached)
        twin.source, twin.path, twin.cache = self.source, self.path, self.cache
        twin.constraint = None if self.constraint is None else self.constraint.copy()
        return twin

    def branch(self) -> None:
        """Keep what the row reads from now on apart from what other rows with the same beginning read."""
        if self.request.probe is not None:
            self.path = (*self.path, self.request.probe.branch(self.request.number))

    def ends(self) -> bool:
        """Whether the row ends after its newest id; `reason` says why."""
        token, constraint = self.ids[-1], self.constraint
        if self.stops is not None and self.stops.put(token):
            self.reason = "stop"
        elif token in self.request.ends or (constraint is not None and constraint.advance(token)):
            self.reason = "end"
        elif constraint is not None and constraint.problem is not None:
            self.reason, self.error = "error", constraint.error
        elif len(self.ids) >= self.limit:
            self.reason = "length"
        return self.reason is not None

    @property
    def decodes(self) -> bool:
        """Whether the next step chooses a token of the row, and runs one id for it."""
        return len(self.ids) - self.cached == 1 and self.source is None and not self.only_scores

    @property
    def most_reused(self) -> int:
        """Ids that may be taken over from another row: not those whose logits are wanted."""
        return min(len(self.ids), self.next_score) - 1

    @property
    def new(self) -> list[int]:
        """The ids after the prompt."""
        return self.ids[len(self.request.prompt) :]


def row_of(
    request: Request, module: Transformer, decode: Decode | None, tokenizer: Tokenizer | None, slot: int = -1
) -> LiveRow:
    """A row for this request, where the model can serve it.  Raises as `Engine.add`."""
    spec = module.spec
    only_scores = request.score_from is not None and not request.max_new_tokens
    end, limit = len(request.prompt) + (-1 if only_scores else request.max_new_tokens), spec.longest_row
    if limit is not None and end > limit:
        raise InputError(
            f"prompt {request.number}: {len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones "
            f"need {end} positions, the model has {limit}; shorten the prompt or lower max_new_tokens"
        )
    check_ids(request.prompt, spec.vocab, f"prompt {request.number}")
    if request.source is None and module.encoder is not None:
        raise InputError(f"prompt {request.number}: an encoder-decoder generates from a source for each row")
    if request.source is not None and module.encoder is None:
        raise InputError(f"prompt {request.number}: a decoder alone takes no source")
    if request.stop and decode is None:
        raise TextError("stop strings need a tokenizer; give ids at which to end instead")
    stops = StopDetector(request.stop, decode) if request.stop and decode is not None else None
    start = None if request.constraint is None else request.constraint.start
    constraint = None if start is None else start(tokenizer, spec.vocab, request.ends)
    ids = list(request.prompt)
    return LiveRow(request, ids[:-1] if only_scores else ids, stops, slot, constraint=constraint)


def check_request(request: object) -> None:
    """Raise InputError for anything but a request."""
    if not isinstance(request, Request):
        raise InputError(f"{shown(request)} is no generate.Request(prompt=[5, 6, 7])")


def check_row(row: object) -> None:
    """Raise InputError for anything but a row."""
    if not isinstance(row, LiveRow):
        raise InputError(f"{shown(row)} is no row, as submit() or add() returned it")


def check_new(rows: Sequence[LiveRow], module: object) -> None:
    """Raise InputError for what is no list of rows that were prepared for this module, each once, and never ran."""
    known = isinstance(rows, Sequence) and all(isinstance(row, LiveRow) and row.module is module for row in rows)
    if not known or len({row for row in rows if row.slot < 0}) < len(rows):
        raise InputError("give rows that prepare() made for this model and that never ran, each once")


def check_running(rows: object, running: Sequence[LiveRow], *caches: object) -> None:
    """Raise InputError for what is no list of rows that run, or whose slots are in one of these caches."""
    if not isinstance(rows, Sequence) or not all(
        isinstance(row, LiveRow) and (row in running or row.cache in caches) for row in rows
    ):
        raise InputError("give rows that run in this engine, as its add() returned them since its last reset()")


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """The log-probability (nats) of a token and of the likeliest ones, best first: the model's own distribution, before
    rules, penalties, temperature and filters."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class Output:
    """The result of one step for a row: the token that was chosen, None while its prompt is still being read.

    `logits` `[T, V]` are those of all positions computed in the step, where the request wants them; `scores` are those
    of the next ids of the prompt, from its `score_from` on.
    """

    row: LiveRow
    token: int | None
    logprobs: TokenLogprobs | None = None
    logits: Tensor | None = None
    scores: Sequence[TokenLogprobs] = ()
