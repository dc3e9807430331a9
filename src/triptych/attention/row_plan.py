"""Plans the attention of a flat batch of rows once for all layers that share a mask; each layer then runs the plan.

`plan_rows` turns rows, the place of their keys and a mask into a `RowPlan`: one or more pieces, each a batch
`[B, H, T, K]` over `[B, G, S, K]` with its positions, its mask and its kernel chosen, whether they come
from a cache or not: where the cache holds nothing after the query, causality is dropped from the mask.  Rows of one
length are a view; causal rows of similar length are padded on the right, where causality hides the padding; other rows
run grouped by shape.  A row's output does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import sub
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.ops.noise import CROSS, SELF, RowNoise
from triptych.spec.masks import Keys, Mask
from . import mask_lowering
from .mechanisms import DOT_PRODUCT, Mechanism
from .request import (
    AttentionRequest,
    ContentBias,
    Heads,
    Runner,
    ScoreBias,
    consecutive_positions,
    placed_request,
)
from .rows import (
    Batching,
    CacheKeys,
    FlatBatchKeys,
    KeyBatching,
    RowGroups,
    Rows,
    batched,
    neighbours,
)

SIMILAR = 64  # causal rows below twice this length, and beyond it rows within a factor of two, are padded together
SHORT = 64  # rows of an encoder below this length are padded together, in three sizes
PADDED = 1 << 18  # mask elements up to which ragged cached rows run as one padded call

RowHook = Callable[[str, Tensor, int], Tensor]
"""`hook(name, tensor [H, T, S], row)`, as in `attend_reference` but row by row."""


def plan_rows(
    keys: KeyLayout, rows: Rows, mask: Mask, heads: Heads, bias: ScoreBias | None = None,
    mechanism: Mechanism = DOT_PRODUCT,
) -> RowPlan:  # fmt: skip
    """How `rows` attend to `keys`.  Raises InputError when they are not as many, when the mask compares documents and
    the rows have none, and when documents meet keys of other rows."""
    if len(rows) != len(keys):
        raise InputError(f"queries in {len(rows)} rows, keys in {len(keys)} rows; give both for the same rows")
    compares = mask_lowering.needs_documents(mask)
    if compares and rows.documents is None:
        raise InputError("the mask has same_document() and the batch has no documents; give Rows(..., documents=...)")
    if compares and not (isinstance(keys, FlatKeys) and keys.rows is rows):
        raise InputError("same_document() compares tokens of one batch; documents are not kept in a cache")
    return RowPlan(rows, keys, mask, heads, bias, mechanism)


@dataclass(frozen=True, eq=False)
class FlatKeys:
    """Keys lie in a flat batch of their own `rows`: k `[M, G, K]`, v `[M, G, Kv]`."""

    rows: Rows

    plan = plan_rows

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class SlotKeys:
    """Keys lie in cache slots: k `[slots, G, capacity, K]`, of which row b reads the first `lengths[b]` of slot
    `slots[b]`.

    positions   [B, capacity] absolute position of each key, -1 where there is none; None where a key's place is its
                position.
    """

    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    positions: Tensor | None = None

    plan = plan_rows

    def __len__(self) -> int:
        return len(self.lengths)


KeyLayout = FlatKeys | SlotKeys


@runtime_checkable
class AttendPlan(Protocol):
    """Attention decided: what a layer runs."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None) -> Tensor: ...


@runtime_checkable
class KeyLocation(Protocol):
    """The layout of keys, from which follows how rows attend to them: `FlatKeys`, `SlotKeys`, or a symbol of both."""

    def plan(
        self, rows: Rows, mask: Mask, heads: Heads, bias: ScoreBias | None = None, mechanism: Mechanism = DOT_PRODUCT
    ) -> AttendPlan: ...


@dataclass(frozen=True, eq=False)
class Piece:
    """Rows that run as one call.  `placed` is the bias of its positions, or what a `ContentBias` is made from."""

    request: AttentionRequest
    runner: Runner
    queries: Batching
    keys: KeyBatching
    placed: Tensor | None

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None) -> Tensor:
        q = self.queries.batch(q)
        k, v = self.keys.batch(k, v)
        bias = self.placed
        if content is not None and bias is not None:
            bias = content(q, k, bias)
        return self.queries.flat(self.runner(q, k, v, bias, sinks))


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Attention of `rows` over `keys` under `mask`, decided.  Where there are several pieces, `queries` are the tokens
    of each, and `flat_keys` those of its keys, unless they lie in slots."""

    rows: Rows
    keys: KeyLayout
    mask: Mask
    heads: Heads
    bias: ScoreBias | None
    mechanism: Mechanism
    pieces: tuple[Piece, ...] = field(init=False)
    queries: RowGroups | None = field(init=False)
    flat_keys: RowGroups | None = field(init=False)

    def __post_init__(self) -> None:
        rows, keys, mask, device = self.rows, self.keys, self.mask, self.heads.device
        pieces: tuple[Piece, ...] = ()  # where there are tokens at all
        queries = theirs = None
        if rows.total:
            if isinstance(keys, FlatKeys):
                groups = self._flat_groups(keys.rows)
            else:
                mask, groups = self._slot_groups(keys)
            if len(groups) > 1:
                pieces = tuple(self._piece(mask, group) for group in groups)
                queries = RowGroups.of(rows, groups, device)
                if isinstance(keys, FlatKeys):
                    same = keys.rows.lengths == rows.lengths  # as in self-attention
                    theirs = queries if same else RowGroups.of(keys.rows, groups, device)
            else:
                pieces = (self._piece(mask, None),)
        self.__dict__.update(pieces=pieces, queries=queries, flat_keys=theirs)

    def _flat_groups(self, keys: Rows) -> list[list[int]]:
        """The rows that run as one call, over keys in a flat batch."""
        rows, mask = self.rows, self.mask
        if rows.equal and keys.equal:
            return []
        if rows.lengths == keys.lengths and not any(rows.past + keys.past):
            return _grouped(_padding_bucket(rows, mask))
        if mask_lowering.only_keys(mask) and self.bias is None:  # no position matters: both sides may be padded
            return _grouped(zip(_padding_bucket(rows, mask), _padding_bucket(keys, mask), strict=True))
        return _grouped(zip(rows.lengths, keys.lengths, strict=True))

    def _slot_groups(self, keys: SlotKeys) -> tuple[Mask, list[list[int]]]:
        """The same over keys in cache slots, and the mask that is left there."""
        rows, mask, ragged = self.rows, self.mask, len(set(keys.lengths)) > 1
        if keys.positions is not None:
            return mask, []
        if ragged:
            mask = mask & Keys(keys.lengths)
        if max(map(sub, keys.lengths, rows.past), default=0) <= 1:  # no key is in any query's future
            mask = mask_lowering.without_causal(mask)
        elements = len(rows) * rows.longest * max(keys.lengths, default=0)
        if (rows.even and not ragged) or mask_lowering.only_keys(mask) or elements <= PADDED:
            return mask, []
        return mask, _grouped(zip(rows.lengths, keys.lengths, rows.past, strict=True))

    def _piece(self, mask: Mask, members: Sequence[int] | None) -> Piece:
        """Some of the rows, or all, as one call."""
        rows, device, k_pos, documents = self.rows, self.heads.device, None, None
        if members is not None:
            rows, mask = rows.take(members), mask_lowering.for_rows(mask, members)
        queries = batched(rows, device)
        keys: KeyBatching
        if isinstance(self.keys, SlotKeys):
            slots, lengths, k_pos = self.keys.slots, self.keys.lengths, self.keys.positions
            if members is not None:
                slots, lengths = tuple(slots[i] for i in members), tuple(lengths[i] for i in members)
            count, where = max(lengths, default=0) if k_pos is None else k_pos.shape[1], neighbours(slots)
            keys = CacheKeys(torch.tensor(slots, device=device) if where is None else where, count)
        else:
            theirs = self.keys.rows if members is None else self.keys.rows.take(members)
            count = theirs.longest
            keys = FlatBatchKeys(queries if theirs.lengths == rows.lengths else batched(theirs, device))
            if not theirs.equal and not mask_lowering.implies_causal(mask):
                mask = mask & Keys(theirs.lengths)
            if any(theirs.past):
                k_pos = consecutive_positions(theirs.past, count, device).expand(len(rows), -1)
            if self.rows.documents is not None and mask_lowering.needs_documents(mask):
                documents = self.rows.documents
                here = documents if members is None else documents[self.rows.tokens(members, device)]
                documents = queries.batch(here[:, None, None] + 1)[:, 0, :, 0]  # 0 is padding's
        heads = self._heads(range(len(rows)) if members is None else members)
        request, placed = placed_request(rows, count, mask, heads, self.bias, k_pos, documents)
        empty = request.keys == 0 or request.queries == 0
        return Piece(request, _zeros if empty else self.mechanism.plan(request), queries, keys, placed)

    def _heads(self, members: Sequence[int]) -> Heads:
        """`heads`, whose dropout draws the numbers of some of the rows."""
        random, keys = self.heads.random, self.keys
        if not isinstance(random, RowNoise) or not self.heads.dropout:
            return self.heads
        lengths = keys.rows.lengths if isinstance(keys, FlatKeys) else keys.lengths
        queries, theirs = ([numbers[i] for i in members] for numbers in (self.rows.lengths, lengths))
        site = CROSS if self.heads.crosses else SELF
        return replace(self.heads, random=random.of_patterns(members, queries, theirs, site))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, content: ContentBias | None = None
    ) -> Tensor:
        """q [N, H, K] over keys as `self.keys` says -> [N, H, Kv]."""
        if not self.pieces:
            return q.new_zeros(*q.shape[:2], v.shape[-1])
        if self.queries is None:
            return self.pieces[0].run(q, k, v, sinks, content)
        flat = self.flat_keys
        keys, values = ([x] * len(self.pieces) if flat is None else flat.split(x) for x in (k, v))
        parts = zip(self.pieces, self.queries.split(q), keys, values, strict=True)
        return self.queries.joined([piece.run(qs, ks, vs, sinks, content) for piece, qs, ks, vs in parts])

    def run_hooked(
        self, q: Tensor, k: Tensor, v: Tensor, hook: RowHook, sinks: Tensor | None = None,
        content: ContentBias | None = None,
    ) -> Tensor:  # fmt: skip
        """The same by the definition, row by row; `hook` is called with each row's scores and pattern, in which a key's
        column is its position (in a flat batch, its place)."""
        outs = []
        for row, own in enumerate(self.rows.split(q)):
            keys, values, k_pos = keys_of(self.keys, k, v, row, self.rows.ends[row])
            request, placed = self._request(row, keys.shape[2], k_pos)
            batched = own.transpose(0, 1)[None]
            bias = placed if content is None or placed is None else content(batched, keys, placed)

            def one(name: str, x: Tensor, row: int = row) -> Tensor:
                return hook(name, x[0], row)[None]

            out = self.mechanism.plan(request, one)(batched, keys, values, bias, sinks)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)

    def _request(self, row: int, keys: int, k_pos: Tensor | None) -> tuple[AttentionRequest, Tensor | None]:
        """The request of one row by itself, and its bias, the same in all layers of the plan; `keys` and `k_pos` follow
        from the layout of the keys."""
        if row not in self._requests:
            own, mask = self.rows.take([row]), mask_lowering.for_rows(self.mask, [row])
            self._requests[row] = placed_request(
                own, keys, mask, self._heads([row]), self.bias, k_pos, self.documents(row)
            )
        return self._requests[row]

    @cached_property
    def _requests(self) -> dict[int, tuple[AttentionRequest, Tensor | None]]:
        return {}

    def documents(self, row: int) -> Tensor | None:
        """[1, T], the document of each token of a row."""
        documents = self.rows.documents
        return None if documents is None else self.rows.split(documents)[row][None]


def _zeros(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Nothing to see, or nobody who looks."""
    return q.new_zeros(*q.shape[:3], v.shape[3])


def _padding_bucket(rows: Rows, mask: Mask) -> list[int]:
    """Equal numbers for rows that may be padded to one length.

    Padding on the right is in every real query's future, so causality alone hides it.  Where all see all, a mask over
    keys hides it, which costs the fused kernel; that pays for short rows, of which there are many of every length.
    """
    if mask_lowering.implies_causal(mask):
        return [max(length, SIMILAR).bit_length() for length in rows.lengths]
    if mask_lowering.only_keys(mask):
        return [max(n, SHORT // 4).bit_length() if n < SHORT else n for n in rows.lengths]
    return list(rows.lengths)


def keys_of(layout: KeyLayout, k: Tensor, v: Tensor, row: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """One row's keys `[1, G, S, K]`, values and positions.  A ring of slots is laid out by position again."""
    if isinstance(layout, FlatKeys):
        rows = layout.rows
        here = rows.place(row)
        k, v = (x[here].transpose(0, 1)[None] for x in (k, v))
        first = rows.past[row]
        return k, v, consecutive_positions((first,), k.shape[2], k.device)[None] if first else None
    slot = layout.slots[row]
    k, v = k[slot : slot + 1], v[slot : slot + 1]
    if layout.positions is None:
        return k[:, :, : layout.lengths[row]], v[:, :, : layout.lengths[row]], None
    positions = layout.positions[row]
    present = positions >= 0
    at = positions[present]
    k_pos = torch.full((1, end), -1, device=k.device)
    k_pos[0, at] = at
    laid = [x.new_zeros(*x.shape[:2], end, x.shape[3]).index_copy(2, at, x[:, :, present]) for x in (k, v)]
    return laid[0], laid[1], k_pos


def _grouped(shapes: Iterable[Hashable]) -> list[list[int]]:
    """Row indices grouped by shape, in order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(row)
    return list(groups.values())
