"""Statistics of attention, for each head and query, without its T x S pattern in memory.

For the weights p of one query over its keys, which are those of the pattern (beside a sink they sum to less than 1):

    entropy        -Σ p ln p, in nats; e to it is the effective number of keys
    distance       Σ p · |position of the query - position of the key|
    first          the weight of the row's first token
    previous       the weight of the token before the query
    delimiters     Σ p over the keys that the caller marked
    own_document   Σ p over the keys with the query's label
    top_keys       positions of the keys with the largest weights, -1 where fewer have any, and `top_weights`
    received       of each key: Σ p over the queries

A row is computed in pieces of some queries over all their keys (`RowScores`), so that memory grows with T alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from triptych.native import ScoreTile, library, usable_threads
from triptych.native.step import STATISTICS_PANEL, STATISTICS_TOP
from .row_scores import RowScores, ScorePiece

OfQueries = Float[Tensor, "h t"]
"""A number for each query of each head."""
PER_QUERY = ("entropy", "distance", "first", "previous", "delimiters", "own_document")


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Statistics of the attention weights of one row, for h heads, t queries and S keys.

    entropy                 [h, t] of a query's weights, in nats.
    distance                [h, t] mean distance from the query to its keys, in positions.
    first, previous         [h, t] weight of the first token, and of the token before the query.
    top_keys, top_weights   [h, t, top] the keys with the largest weights, largest first, and these weights.
    received                [h, S] sum over the queries of the weight that each key gets.
    delimiters              [h, t] weight of the tokens marked as delimiters; None where none were marked.
    own_document            [h, t] weight of the tokens with the query's label; None without labels."""

    entropy: OfQueries
    distance: OfQueries
    first: OfQueries
    previous: OfQueries
    top_keys: Int[Tensor, "h t top"]
    top_weights: Float[Tensor, "h t top"]
    received: Float[Tensor, "h S"]
    delimiters: OfQueries | None = None
    own_document: OfQueries | None = None

    @property
    def effective_keys(self) -> OfQueries:
        """e to the entropy: n for even weights over n keys, 1 for all weight on one."""
        return self.entropy.exp()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The measures that there are, by name."""
        return ((name, value) for name, value in vars(self).items() if value is not None)


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyLabels:
    """The description of one row's tokens: which keys are delimiters, and labels of queries and keys, or neither."""

    delimiters: Bool[Tensor, " S"] | None = None
    q_document: Int[Tensor, " t"] | None = None
    k_document: Int[Tensor, " S"] | None = None


NO_LABELS = KeyLabels()


@torch.no_grad()
def attention_statistics(
    scores: RowScores, *, top: int = 4, labels: KeyLabels = NO_LABELS, native: bool = True
) -> AttentionStatistics:
    """Of one row's chosen heads and queries, in fp32: exact to rounding, in O(t + S) memory beside the results.

    Computed natively where the library is built, unless `native` is False; the results are the same to rounding.
    """
    out = _room(scores.shape, top, labels, scores.q.device)
    kernels = library() if native and scores.q.device.type == "cpu" and scores.q.dtype != torch.float64 else None
    products = scores.products() if kernels is not None and kernels.wide else None
    if kernels is not None and products is not None and min(scores.shape):
        _, queries, keys = scores.shape
        panels = -(-keys // STATISTICS_PANEL)
        laid = pad(products["k"], (0, 0, 0, panels * STATISTICS_PANEL - keys))
        products["k"] = laid.unflatten(1, (panels, STATISTICS_PANEL)).mT
        _native(
            kernels.functions, out, scores.shape, slice(0, queries), slice(0, keys), scores.chosen_sinks, labels,
            k_pos=torch.arange(keys), base=0, **products,
        )  # fmt: skip
        return AttentionStatistics(**out)
    for piece in scores.pieces():
        part = {name: value[piece.heads] for name, value in out.items()}
        if kernels is None:
            _add(part, piece, _weighed(part, piece), labels)
        elif piece.scores.shape[2]:
            heads, queries, keys = piece.scores.shape
            _native(
                kernels.functions, part, (heads, queries, keys), piece.queries, piece.columns, piece.sinks, labels,
                q_pos=piece.q_pos, k_pos=piece.k_pos, from_=torch.zeros(queries), to=torch.full((queries,), keys),
                base=piece.base, scores=piece.scores,
            )  # fmt: skip
    return AttentionStatistics(**out)


def pattern_statistics(
    pattern: Float[Tensor, "h t S"], q_pos: Int[Tensor, " t"], *, top: int = 4, labels: KeyLabels = NO_LABELS
) -> AttentionStatistics:
    """The same of an explicit pattern whose columns are the keys' positions: the definition."""
    out = _room(pattern.shape, top, labels, pattern.device)
    pattern = pattern.float()
    k_pos = torch.arange(pattern.shape[2], device=pattern.device)
    out["entropy"].copy_(torch.special.entr(pattern).sum(-1))
    whole = ScorePiece(slice(0, len(pattern)), slice(0, pattern.shape[1]), 0, 0, q_pos, k_pos, pattern)
    _add(out, whole, pattern, labels)
    return AttentionStatistics(**out)


def _room(shape: Sequence[int], top: int, labels: KeyLabels, device: torch.device) -> dict[str, Tensor]:
    heads, queries, keys = shape
    absent = {"delimiters": labels.delimiters is None, "own_document": labels.k_document is None}
    zeros = partial(torch.zeros, dtype=torch.float32, device=device)
    out = {name: zeros(heads, queries) for name in PER_QUERY if not absent.get(name, False)}
    out["top_keys"] = torch.full((heads, queries, top), -1, dtype=torch.int32, device=device)
    out["top_weights"] = zeros(heads, queries, top)
    out["received"] = zeros(heads, keys)
    return out


def _weighed(out: Mapping[str, Tensor], piece: ScorePiece) -> Tensor:
    """The weights `[h, n, s]` of a piece, whose scores are overwritten, after taking down their entropy.

    With e = exp(score - max) and Z their sum (and the sink's share), -Σ p ln p is (ln Z · Σ e - Σ e (score - max)) / Z.
    """
    scores, sinks = piece.scores, None
    if not scores.shape[-1]:
        return scores
    most = scores.amax(-1, keepdim=True)
    if piece.sinks is not None:
        sinks = piece.sinks.to(scores.dtype)[:, None, None]
        most = torch.maximum(most, sinks)
    most = most.masked_fill(most == -torch.inf, 0.0)
    below = scores.sub_(most).clamp_(min=-1e30)  # finite, so that 0 · it is 0
    weights = below.exp()
    total = z = weights.sum(-1, keepdim=True)
    if sinks is not None:
        z = total + (sinks - most).exp()
    z = z.masked_fill(z == 0, 1.0)
    entropy = (z.log() * total - below.mul_(weights).sum(-1, keepdim=True)) / z
    out["entropy"][:, piece.queries] = entropy[..., 0].float()
    return weights.div_(z)


def _add(out: Mapping[str, Tensor], piece: ScorePiece, weights: Tensor, labels: KeyLabels) -> None:
    """Everything but the entropy, from the weights `[h, n, s]`."""
    at, columns, (q_pos, k_pos) = piece.queries, piece.columns, (piece.q_pos, piece.k_pos)
    if not weights.shape[-1]:
        return
    sums = {"distance": (q_pos[:, None] - k_pos[None]).abs().to(weights.dtype)}  # [n, s] each
    if labels.delimiters is not None:
        sums["delimiters"] = labels.delimiters[columns].to(weights.dtype).expand(len(q_pos), -1)
    if labels.q_document is not None and labels.k_document is not None:
        sums["own_document"] = (labels.q_document[at, None] == labels.k_document[columns]).to(weights.dtype)
    factors = torch.stack(list(sums.values()), dim=-1)  # [n, s, C]
    for name, column in zip(sums, (weights.transpose(0, 1) @ factors).unbind(-1), strict=True):
        out[name][:, at] = column.T.float()
    if 0 <= -piece.base < len(k_pos):
        out["first"][:, at] = (weights[..., -piece.base] * (k_pos[-piece.base] == 0)).float()
    before = (q_pos - 1 - piece.base).clamp(0, len(k_pos) - 1)
    there = (k_pos[before] == q_pos - 1) & (q_pos > 0)
    previous = weights.gather(-1, before[None, :, None].expand(len(weights), -1, 1))[..., 0]
    out["previous"][:, at] = (previous * there).float()
    out["received"][:, columns] += weights.sum(1).float()
    count = min(out["top_keys"].shape[-1], len(k_pos))
    largest, index = weights.topk(count)
    out["top_weights"][:, at, :count] = largest.float()
    out["top_keys"][:, at, :count] = k_pos[index].masked_fill(largest == 0, -1).int()


def _native(
    functions: ctypes.CDLL, out: Mapping[str, Tensor], shape: tuple[int, int, int], at: slice, columns: slice,
    sinks: Tensor | None, labels: KeyLabels, *, q_pos: Tensor, k_pos: Tensor, from_: Tensor, to: Tensor, base: int,
    scores: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None, group: Tensor | None = None,
) -> None:  # fmt: skip
    """The same by one call of statistics.h, of `shape` heads, queries and keys, which are the queries `at` and the keys
    `columns` of the results: of their scores, or of the queries and the keys in panels from which it computes them."""
    (heads, queries, keys), start = shape, at.start
    held: list[Tensor] = []  # what the call reads, alive until it is done

    def read(x: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        if x is None:
            return None
        held.append(x.to(dtype).contiguous())
        return held[-1].data_ptr()

    def write(name: str, first: int = start, width: int = 1) -> int | None:
        return out[name].data_ptr() + 4 * width * first if name in out else None

    q_doc, k_doc, marked, top = labels.q_document, labels.k_document, labels.delimiters, out["top_keys"].shape[-1]
    panels, threads = -(-keys // STATISTICS_PANEL), usable_threads(torch.get_num_threads())
    by_key = (k_pos, None if marked is None else marked[columns], None if k_doc is None else k_doc[columns])
    positions, delimiters, documents = (
        None if x is None else pad(x, (0, panels * STATISTICS_PANEL - keys)) for x in by_key
    )
    record = ScoreTile(
        heads=heads, queries=queries, keys=keys, top=top, stride=out["entropy"].shape[1], row=out["received"].shape[1],
        base=base, scores=read(scores), q=read(q), k=read(k), group=read(group, torch.int32),
        width=0 if q is None else q.shape[2], sinks=read(sinks), q_pos=read(q_pos), k_pos=read(positions),
        delimiters=read(delimiters), k_doc=read(documents, torch.int32),
        q_doc=read(None if q_doc is None else q_doc[at], torch.int32), from_=read(from_, torch.int32),
        to=read(to, torch.int32), panels=panels, entropy=write("entropy"), distance=write("distance"),
        first=write("first"), previous=write("previous"), on_delimiters=write("delimiters"),
        on_document=write("own_document"), top_keys=write("top_keys", width=top),
        top_weights=write("top_weights", width=top), received=write("received", columns.start),
    )  # fmt: skip
    record.scratch = read(torch.empty(threads * functions.scratch_floats(ctypes.byref(record))))
    assert top <= STATISTICS_TOP
    functions.score_statistics(ctypes.byref(record), threads)
