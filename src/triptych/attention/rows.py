"""How the flat batch meets attention.

Outside, N tokens of all rows stand in one `[N, ...]` and padding does not exist.  Here alone rows become a batch: as a
view where their lengths are equal; padded on the right where causality hides the padding; otherwise rows of one shape
together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.attention import lowering
from triptych.attention.mechanisms import Mechanism, dot_product
from triptych.attention.reference import Hook
from triptych.attention.request import prepare
from triptych.errors import InputError
from triptych.spec.masks import Keys, Mask

SIMILAR = 64  # causal rows below twice this length, and beyond it rows within a factor of two, are padded together
SHORT = 64  # rows of an encoder below this length are padded together, in three sizes
PADDED = 1 << 18  # mask elements up to which ragged cached rows run as one padded call

Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | Tensor
"""`bias(q, k, q_pos, k_pos)`, of q `[B, H, T, K]` and k `[B, G, S, K]` as they meet and their positions `[T]`, `[S]` or
`[B, T]`, `[B, S]`, gives what broadcasts to `[B, H, T, S]`.  A tensor must too, and needs rows of one length."""

RowHook = Callable[[str, Tensor, int], Tensor]
"""`hook(name, tensor [H, T, S], row)`, as in `attend_reference` but row by row."""


@dataclass(frozen=True)
class Rows:
    """Where each row of the flat batch begins and ends, as host integers.

    `past` is the absolute position of each row's first token; 0 unless its earlier tokens are in a cache.
    """

    lengths: tuple[int, ...]
    past: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.past:
            object.__setattr__(self, "past", (0,) * len(self.lengths))
        if len(self.past) != len(self.lengths):
            raise InputError(f"{len(self.lengths)} rows but {len(self.past)} past lengths")

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @cached_property
    def total(self) -> int:
        """N."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def equal(self) -> bool:
        """All rows have one length."""
        return len(set(self.lengths)) <= 1

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Absolute position after each row's last token: what a cache holds once the row is in."""
        return tuple(past + length for past, length in zip(self.past, self.lengths, strict=True))

    def row_of(self, device: torch.device | str = "cpu") -> Int[Tensor, " N"]:
        """The row of each token."""
        return self._labels(device)[0]

    def positions(self, device: torch.device | str = "cpu") -> Int[Tensor, " N"]:
        """The absolute position of each token."""
        return self._labels(device)[1]

    def split(self, x: Tensor) -> list[Tensor]:
        """`[N, ...]` as one view a row."""
        return list(torch.split(x, list(self.lengths)))

    def take(self, rows: Sequence[int]) -> Rows:
        """Some of the rows, in this order."""
        return Rows(tuple(self.lengths[row] for row in rows), tuple(self.past[row] for row in rows))

    def _labels(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Made once a device, outside inference mode so that training may use what a sampling step made."""
        made: dict[torch.device, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_made", {})
        device = torch.device(device)
        if device not in made:
            with torch.inference_mode(False):
                lengths = torch.tensor(self.lengths, dtype=torch.long)
                row = torch.arange(len(self)).repeat_interleave(lengths)
                shift = torch.tensor(self.past, dtype=torch.long) - torch.tensor(self.starts, dtype=torch.long)
                made[device] = (row.to(device), (torch.arange(self.total) + shift[row]).to(device))
        return made[device]


@dataclass(frozen=True, eq=False)
class FlatKeys:
    """Keys of the flat batch itself, or of an encoder's output: k `[N, G, K]`, v `[N, G, Kv]`."""

    k: Tensor
    v: Tensor
    rows: Rows


@dataclass(frozen=True, eq=False)
class SlotKeys:
    """Keys in a cache: k `[B, G, S, K]`, v `[B, G, S, Kv]`, of which row b holds the first `lengths[b]`.

    `positions` `[B, S]`, -1 for an empty slot; None where a key's place is its position.
    """

    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]
    positions: Tensor | None = None


def attend_rows(
    q: Float[Tensor, "N H K"],
    keys: FlatKeys | SlotKeys,
    rows: Rows,
    *,
    mask: Mask,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    hook: RowHook | None = None,
    mechanism: Mechanism = dot_product,
) -> Float[Tensor, "N H Kv"]:
    """Attention of every row of the flat batch over its own keys; options as in `attend`.

    A row's output does not depend on the rows beside it.

    hook        called row by row, through the definition; a key's column is its position (FlatKeys: its place).
    mechanism   how queries score keys: dot products unless given.

    Raises InputError when rows and keys disagree, or a bias tensor meets rows of unequal length.
    """
    if len(rows) != (len(keys.rows) if isinstance(keys, FlatKeys) else len(keys.lengths)) or q.shape[0] != rows.total:
        raise InputError(f"{q.shape[0]} queries in {len(rows)} rows of {rows.total} tokens, keys in other rows")
    if isinstance(bias, Tensor) and not rows.equal:
        raise InputError("bias: a tensor fits rows of one length; give a function of (q, k, q_pos, k_pos)")
    mask = lowering.adopt(mask, q.device)
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    if rows.total == 0:
        return q.new_zeros(*q.shape[:2], keys.v.shape[-1])
    if hook is not None:
        return _one_by_one(q, keys, rows, _Call(mask, bias, options, mechanism), hook)
    call = _Call(mask, bias, options, mechanism)
    return _flat(q, keys, rows, call) if isinstance(keys, FlatKeys) else _slots(q, keys, rows, call)


@dataclass(frozen=True, eq=False)
class _Call:
    """What all rows of one call share."""

    mask: Mask
    bias: Bias | None
    options: dict[str, Any]
    mechanism: Mechanism

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Sequence[int],
        k_pos: Tensor | None = None,
        hook: Hook | None = None,
    ) -> Tensor:
        """q `[b, H, T, K]` beginning at positions `past`, over keys at `k_pos` `[b, S]` (None: 0..S-1).

        Positions stay implicit where they are the default ones or where nothing asks for them.
        """
        unusual = lowering.reads_positions(self.mask) and any(first != k.shape[2] - q.shape[2] for first in past)
        explicit = k_pos is not None or unusual
        q_pos, bias = None, self.bias
        if explicit or not (bias is None or isinstance(bias, Tensor)):
            q_pos = _consecutive(past, q.shape[2], q.device)
        if q_pos is not None and bias is not None and not isinstance(bias, Tensor):
            at = _consecutive((0,), k.shape[2], q.device) if k_pos is None else k_pos
            if q_pos.dim() != at.dim():
                q_pos, at = q_pos.expand(len(past), -1), at.expand(len(past), -1)
            bias = bias(q, k, q_pos, at)
        assert bias is None or isinstance(bias, Tensor)
        q_pos = q_pos if explicit else None
        request, _ = prepare(q, k, v, mask=self.mask, bias=bias, q_pos=q_pos, k_pos=k_pos, **self.options)
        return self.mechanism(request, hook)

    def of(self, rows: Sequence[int]) -> _Call:
        return replace(self, mask=lowering.for_rows(self.mask, rows))


def _flat(q: Tensor, keys: FlatKeys, rows: Rows, call: _Call) -> Tensor:
    theirs = keys.rows
    if rows.equal and theirs.equal:
        b = len(rows)
        k_pos = _consecutive(theirs.past, theirs.longest, q.device, rows=b) if any(theirs.past) else None
        return _unbatched(call.run(_batched(q, b), _batched(keys.k, b), _batched(keys.v, b), rows.past, k_pos))
    own = rows.lengths == theirs.lengths and not any(rows.past + theirs.past)
    buckets = _buckets(_alike(rows, call.mask) if own else zip(rows.lengths, theirs.lengths, strict=True))
    if len(buckets) > 1:
        return _flat_buckets(q, keys, rows, call, buckets)
    if not lowering.implies_causal(call.mask):
        call = replace(call, mask=call.mask & Keys(rows.lengths))
    slots = _places(rows, q.device)
    q, k, v = (_padded(x, slots, rows) for x in (q, keys.k, keys.v))
    return _unbatched(call.run(q, k, v, rows.past)).index_select(0, slots)


def _alike(rows: Rows, mask: Mask) -> list[int]:
    """Equal numbers for rows that may be padded to one length.

    Padding on the right is in every real query's future, so causality alone hides it.  Where all see all, a mask over
    keys hides it, which costs the fused path; that pays for short rows, of which there are many of every length.
    """
    if lowering.implies_causal(mask):
        return [max(length, SIMILAR).bit_length() for length in rows.lengths]
    if lowering.only_keys(mask):
        return [max(n, SHORT // 4).bit_length() if n < SHORT else n for n in rows.lengths]
    return list(rows.lengths)


def _flat_buckets(q: Tensor, keys: FlatKeys, rows: Rows, call: _Call, buckets: list[list[int]]) -> Tensor:
    """Rows of one shape together, or of nearly one length where they may be padded."""
    qs, ks, vs = rows.split(q), keys.rows.split(keys.k), keys.rows.split(keys.v)
    out_of: dict[int, Tensor] = {}
    for members in buckets:
        some, mine, theirs = call.of(members), rows.take(members), keys.rows.take(members)
        q, k, v = (torch.cat([x[row] for row in members]) for x in (qs, ks, vs))
        out_of.update(zip(members, mine.split(_flat(q, FlatKeys(k, v, theirs), mine, some)), strict=True))
    return torch.cat([out_of[row] for row in range(len(rows))])


def _slots(q: Tensor, keys: SlotKeys, rows: Rows, call: _Call) -> Tensor:
    b, longest = len(rows), max(keys.lengths)
    k, v, lengths = keys.k, keys.v, keys.lengths
    if keys.positions is None:
        k, v = k[:, :, :longest], v[:, :, :longest]
        if len(set(lengths)) > 1:
            call = replace(call, mask=call.mask & Keys(lengths))
        if all(past + 1 >= end for past, end in zip(rows.past, lengths, strict=True)):
            call = replace(call, mask=lowering.without_causal(call.mask))
        even = rows.equal and len(set(lengths)) == 1 and len(set(rows.past)) == 1
        if not even and not lowering.only_keys(call.mask) and b * rows.longest * longest > PADDED:
            return _slots_by_shape(q, keys, rows, call)
    if rows.equal:
        return _unbatched(call.run(_batched(q, b), k, v, rows.past, keys.positions))
    slots = _places(rows, q.device)
    out = call.run(_padded(q, slots, rows), k, v, rows.past, keys.positions)
    return _unbatched(out).index_select(0, slots)


def _slots_by_shape(q: Tensor, keys: SlotKeys, rows: Rows, call: _Call) -> Tensor:
    """Long ragged chunks: rows of one shape together, so that no `[T, S]` mask is built."""
    qs = rows.split(q)
    out_of: dict[int, Tensor] = {}
    for members in _buckets(zip(rows.lengths, keys.lengths, rows.past, strict=True)):
        end = keys.lengths[members[0]]
        one = slice(members[0], members[0] + 1)
        k, v = (x[one if len(members) == 1 else members, :, :end] for x in (keys.k, keys.v))
        batch = torch.stack([qs[row] for row in members]).transpose(1, 2)
        out = call.of(members).run(batch, k, v, [rows.past[row] for row in members])
        out_of.update(zip(members, out.transpose(1, 2), strict=True))
    return torch.cat([out_of[row] for row in range(len(rows))])


def _one_by_one(q: Tensor, keys: FlatKeys | SlotKeys, rows: Rows, call: _Call, hook: RowHook) -> Tensor:
    outs = []
    for row, mine in enumerate(rows.split(q)):
        k, v, k_pos = _keys_of(keys, row, rows.ends[row])

        def one(name: str, x: Tensor, row: int = row) -> Tensor:
            return hook(name, x[0], row)[None]

        outs.append(_unbatched(call.of([row]).run(mine.transpose(0, 1)[None], k, v, (rows.past[row],), k_pos, one)))
    return torch.cat(outs)


def _keys_of(keys: FlatKeys | SlotKeys, row: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """One row's keys `[1, G, S, K]`, values and positions.  A ring of slots is laid out by position again."""
    if isinstance(keys, FlatKeys):
        theirs = keys.rows
        here = slice(theirs.starts[row], theirs.starts[row] + theirs.lengths[row])
        k, v = (x[here].transpose(0, 1)[None] for x in (keys.k, keys.v))
        first = theirs.past[row]
        return k, v, _consecutive((first,), k.shape[2], k.device, rows=1) if first else None
    k, v = keys.k[row : row + 1], keys.v[row : row + 1]
    if keys.positions is None:
        return k[:, :, : keys.lengths[row]], v[:, :, : keys.lengths[row]], None
    positions = keys.positions[row]
    held = positions >= 0
    at = positions[held]
    k_pos = torch.full((1, end), -1, device=k.device)
    k_pos[0, at] = at
    laid = [x.new_zeros(*x.shape[:2], end, x.shape[3]).index_copy(2, at, x[:, :, held]) for x in (k, v)]
    return laid[0], laid[1], k_pos


def _buckets(shapes: Iterable[Hashable]) -> list[list[int]]:
    """Row indices grouped by shape, in order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for row, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(row)
    return list(groups.values())


def _consecutive(first: Sequence[int], length: int, device: torch.device, rows: int | None = None) -> Tensor:
    """Positions `[length]` from a common first one, `[b, length]` where the first ones differ (or `rows` asks).

    Layer after layer asks for the same and is given the same tensor, which nobody may change.
    """
    start = tuple(first[:1]) if rows is None and len(set(first)) == 1 else tuple(first)
    made = _line if torch.compiler.is_compiling() else _kept_line
    return made(start, length, device, rows is not None or len(start) > 1)


def _line(first: tuple[int, ...], length: int, device: torch.device, batched: bool) -> Tensor:
    with torch.inference_mode(False):  # so that training may use what a sampling step made
        line = torch.arange(length, device=device)
        return line + (torch.tensor(first, device=device)[:, None] if batched else first[0])


_kept_line = lru_cache(maxsize=32)(_line)


def _places(rows: Rows, device: torch.device) -> Tensor:
    """Where each token stands in the padded batch `[B * T]`."""
    row = rows.row_of(device)
    return row * rows.longest + rows.positions(device) - torch.tensor(rows.past, device=device)[row]


def _padded(x: Tensor, slots: Tensor, rows: Rows) -> Tensor:
    """`[N, H, K]` as `[B, H, T, K]`, zeros after each row's end."""
    room = x.new_zeros(len(rows) * rows.longest, *x.shape[1:])
    return _batched(room.index_copy(0, slots, x), len(rows))


def _batched(x: Tensor, rows: int) -> Tensor:
    """`[N, H, K]` of equal rows as `[B, H, T, K]`, a view."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2)


def _unbatched(x: Tensor) -> Tensor:
    """`[B, H, T, K]` as `[B * T, H, K]`."""
    return x.transpose(1, 2).flatten(0, 1)
