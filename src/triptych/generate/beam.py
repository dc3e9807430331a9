"""Beam search (Sutskever et al. 2014; length penalty as in Wu et al. 2016 without coverage): deterministic, cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from triptych import machine
from triptych.arguments import checked, integer, number
from triptych.errors import InputError
from triptych.probe import Session
from .constraints import masks_of
from .engine import Engine
from .request import LiveRow, Request, check_request
from .sampling import Sampling, apply_rules, check_finite

BLOCK = 64  # columns of logits whose maximum is looked at first
OF_A_TOKEN = 8  # bytes of a logit and of its log-probability
PENALTIES = 10.0  # length penalties are in [-10, 10]; beyond it, powers of a length overflow


@dataclass(frozen=True)
class Beam:
    """One hypothesis: its new tokens, the sum of their log-probabilities (nats), and the keys under which a probe keeps
    what was read on its path (`LiveRow.path`)."""

    tokens: list[int]
    logprob: float
    path: tuple[int, ...] = ()

    def score(self, length_penalty: float) -> float:
        """Log-probability over `length ** length_penalty`."""
        return float(self.logprob / max(len(self.tokens), 1) ** length_penalty)


def check_beam_settings(sampling: Sampling, others: Sequence[str], *, seeded: bool = False) -> None:
    """Raise InputError for settings that a search for the likeliest text has no use for: sampling that is not the
    default, any seed that was given (`seeded`), and the names of `others` that were given."""
    for setting in fields(sampling):
        if getattr(sampling, setting.name) != setting.default or (seeded and setting.name == "seed"):
            why = "beam search ranks texts by the model's own probabilities"
            raise InputError(f"beams and {setting.name} do not go together: {why}; leave {setting.name} out")
    for name in others:
        why = "a hypothesis may be dropped after it was computed"
        raise InputError(f"beams and {name} do not go together: {why}; leave {name} out")


def check_beams(engine: Engine, beams: int, length_penalty: float) -> float:
    """The length penalty as a float.  Raises InputError for either out of range, and for more beams than a step has
    tokens to choose from or memory for their probabilities."""
    integer("beams", beams, 1)
    vocab, free = engine.module.spec.vocab, machine.free_on(engine.module.device)
    if beams > vocab:
        raise InputError(
            f"beams={beams} is more than the {vocab:,} tokens of the vocabulary, of which a hypothesis can go on with "
            "each once; give fewer, usually 4 to 10"
        )
    needed = beams * vocab * OF_A_TOKEN
    if free is not None and needed > free:
        raise InputError(
            f"beams={beams} needs {needed:,} bytes for the probabilities of {vocab:,} tokens after each of them, and "
            f"{free:,} are free; give fewer"
        )
    return number("length_penalty", length_penalty, -PENALTIES, PENALTIES, f"in [{-PENALTIES}, {PENALTIES}]")


@checked
@torch.inference_mode()
def beam_search(
    engine: Engine,
    requests: Sequence[Request],
    *,
    beams: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> list[list[Beam]]:
    """For each request, up to `beams` hypotheses, best first.

    Of a request its prompt, source, limit, end ids, rules, constraint and probe count.  A probe's edits are made in
    every token of every hypothesis; its trace has what the best hypothesis of each request read.  The search for a
    request ends once it has `beams` finished hypotheses and no live one, were it to end now, would score better than
    the worst of them; with a length penalty above 0 a longer one might still have (as in transformers' default).  With
    `early_stopping` it ends as soon as it has `beams` finished hypotheses.

    Raises InputError for settings out of range, for sampling, for logits that are not finite, and for a constraint
    without end ids or that leaves no hypothesis a token.
    """
    length_penalty = check_beams(engine, beams, length_penalty)
    for request in requests:
        check_request(request)
        check_beam_settings(request.sampling, [])
        if request.constraint is not None and not request.ends:
            raise InputError("beams and a constraint need an end id, with which a hypothesis ends; give stop_ids")
    live = [*enumerate(engine.add(*requests))]
    searches = [_Search(request, beams, length_penalty, early_stopping) for request in requests]
    probes = _probes(requests)
    for step in range(max((request.max_new_tokens for request in requests), default=0)):
        if not live:
            break
        logits = engine.logits()
        check_finite(logits)
        scores = torch.log_softmax(logits.float(), dim=-1)
        if any(row.request.rules for _, row in live):  # what a rule forbids keeps its probability, as in transformers
            rules = [(row.request.rules, x, row.ids) for (_, row), x in zip(live, scores, strict=True)]
            scores = torch.stack([apply_rules(*one) if one[0] else one[1] for one in rules])
        if any(row.constraint for _, row in live):
            scores = masks_of([row.constraint for _, row in live]).apply(scores)
        searching = list(dict.fromkeys(owner for owner, _ in live))
        sums = scores.new_tensor([beam.logprob for i in searching for beam in searches[i].live])
        likeliest, ids = _largest(scores, max(searches[i].continuation_count for i in searching))
        totals = likeliest + sums[:, None]
        grown: list[tuple[int, LiveRow, int]] = []  # the search, the row to go on from, and the next token
        for i in searching:
            mine = [at for at, (owner, _) in enumerate(live) if owner == i]
            paths = [live[at][1].path for at in mine]
            pairs = _best_pairs(totals[mine], ids[mine], searches[i].continuation_count)
            if searches[i].request.constraint is not None:
                pairs = [pair for pair in pairs if pair[0] > -torch.inf]
            grown += [(i, live[mine[at]][1], token) for at, token in searches[i].extend(pairs, step + 1, paths)]
        rows = engine.reorder([row for _, row, _ in grown])
        for row, (_, _, token) in zip(rows, grown, strict=True):
            row.ids.append(token)
            if row.constraint is not None:
                row.constraint.advance(token)
        live = [(owner, row) for row, (owner, _, _) in zip(rows, grown, strict=True)]
        for session, probed in probes:
            alive = [beam.path for i in probed for beam in (*searches[i].finished, *searches[i].live)]
            session.keep_only(alive + [row.path for owner, row in live if owner in probed])
    engine.free([row for _, row in live])
    best = [search.best() for search in searches]
    for request, beams_of in zip(requests, best, strict=True):
        if not beams_of:
            raise InputError(f"prompt {request.number}: the constraint leaves no hypothesis a token to go on with")
    for session, probed in probes:
        session.settle({requests[i].number: best[i][0].path for i in probed})
    return best


def _probes(requests: Sequence[Request]) -> list[tuple[Session, list[int]]]:
    """The sessions of the requests, each with the requests that have it."""
    probes: dict[int, tuple[Session, list[int]]] = {}
    for i, request in enumerate(requests):
        if request.probe is not None:
            probes.setdefault(id(request.probe), (request.probe, []))[1].append(i)
    return list(probes.values())


def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each row of x [B, V], or all V, and their columns: [B, C] both.

    They are searched for in the blocks with the largest maxima, as many as are wanted, and in the columns after the
    last whole block: no other block has a larger number than all of these have.
    """
    count, blocks = min(count, x.shape[1]), x.shape[1] // BLOCK
    if blocks <= count:
        values, columns = x.topk(count)
        return values, columns
    whole = blocks * BLOCK
    best = x[:, :whole].unflatten(1, (blocks, BLOCK)).amax(-1).topk(count).indices  # [B, count]
    inside = best[..., None] * BLOCK + torch.arange(BLOCK, device=x.device)
    rest = torch.arange(whole, x.shape[1], device=x.device).expand(len(x), -1)
    columns = torch.cat((inside.flatten(1), rest), 1)
    values, places = x.gather(1, columns).topk(count)
    return values, columns.gather(1, places)


def _best_pairs(totals: Tensor, ids: Tensor, count: int) -> list[tuple[float, int, int]]:
    """The `count` largest of `totals` [rows, C], best first, each with its row and its token of `ids` [rows, C]; of
    equal ones the first.  No others become Python objects, of which there would be rows times C."""
    least = totals.flatten().topk(min(count, totals.numel())).values[-1]
    at, column = (totals >= least).nonzero(as_tuple=True)
    pairs = list(zip(totals[at, column].tolist(), at.tolist(), ids[at, column].tolist(), strict=True))
    return sorted(pairs, key=lambda pair: -pair[0])[:count]


@dataclass(eq=False)
class _Search:
    """The hypotheses of one request: the finished ones, and the live ones."""

    request: Request
    beams: int
    length_penalty: float
    early_stopping: bool
    finished: list[Beam] = field(default_factory=list)
    live: list[Beam] = field(default_factory=lambda: [Beam([], 0.0)])

    @property
    def continuation_count(self) -> int:
        """The number of continuations to look at: as many as beams, were all others the ends of hypotheses."""
        return self.beams * (1 + len(self.request.ends))

    def extend(
        self, pairs: Sequence[tuple[float, int, int]], length: int, paths: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, int]]:
        """One more token: which of the live hypotheses to go on from, and the token of each; none where the search has
        ended.

        pairs    the `continuation_count` largest sums of log-probabilities of a live hypothesis with one more token,
                 each with the hypothesis and the token (`_best_pairs`).
        paths    of the rows of these hypotheses (`LiveRow.path`).
        """
        grown: list[tuple[int, int]] = []
        live: list[Beam] = []
        for rank, (value, parent, token) in enumerate(pairs):
            beam = Beam([*self.live[parent].tokens, token], value, paths[parent])
            if token in self.request.ends:
                if rank < self.beams:  # an end that is less likely than `beams` continuations ends nothing
                    self.finished.append(beam)
            elif len(live) < self.beams:
                live.append(beam)
                grown.append((parent, token))
        self.finished = self._sorted(self.finished)[: self.beams]
        if len(self.finished) == self.beams and live and (self.early_stopping or self._settled(live, length)):
            live, grown = [], []
        self.live = live
        if length >= self.request.max_new_tokens:
            grown = []
        return grown

    def best(self) -> list[Beam]:
        """The best hypotheses, those that the length limit cut short among them."""
        return self._sorted([*self.finished, *self.live])[: self.beams]

    def _sorted(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -beam.score(self.length_penalty))

    def _settled(self, live: Sequence[Beam], length: int) -> bool:
        """No live hypothesis, were it to end now, would beat the worst finished one."""
        longest = Beam([0] * length, max(beam.logprob for beam in live))
        return self.finished[-1].score(self.length_penalty) >= longest.score(self.length_penalty)
