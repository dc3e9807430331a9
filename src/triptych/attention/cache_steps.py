"""One forward step of a KV cache for each kind of layer: all keys kept, a ring of the last ones (a sliding window), two
running sums (linear attention), or nothing kept.

Causal linear attention (Katharopoulos et al. 2020) weighs the value v_j by `φ(q)·φ(k_j)`, so what a query needs of all
keys before it is `Σ φ(k_j) v_jᵀ [K, Kv]` and `Σ φ(k_j) [K]`: two sums of constant size.  A step adds its tokens to
these sums when it is finished, and its queries read the sums before it and its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.errors import InputError
from triptych.spec.masks import Mask
from .layer_cache import Snapshot, Store
from .mechanisms import LINEAR, Mechanism, divided, features, running
from .request import ContentBias, Heads, ScoreBias, placed_request
from .row_places import RowPlaces, token_places
from .row_plan import FlatKeys, KeyLayout, KeyLocation, SlotKeys
from .rows import KeysAndValues, Rows, batched


@runtime_checkable
class KeyStep(Protocol):
    """One step of the layers that store their keys in the same way."""

    @property
    def layout(self) -> KeyLocation:
        """The places of their keys once this step's are in."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> KeysAndValues:
        """Take in a layer's new keys [N, G, K] and values [N, G, Kv] -> all that its queries may see, as `layout`."""


@runtime_checkable
class CacheStep(Protocol):
    """One forward's use of a cache.  `context` is what the stack decided in the step before, where that was one token
    of each of the same rows; None elsewhere."""

    context: object | None

    def of(self, layer: int) -> KeyStep: ...

    def finish(self) -> None:
        """Count the step, once every layer was extended with it."""


@runtime_checkable
class KVCache(Protocol):
    """The methods of a cache that a decoder's forward needs; `NullCache` keeps nothing."""

    def begin(self, rows: Rows, provenance: str) -> CacheStep: ...


class NullCache:
    """Keeps nothing: training, encoders, scoring."""

    def begin(self, rows: Rows, provenance: str) -> NullStep:
        return NullStep(FlatKeys(rows))


NULL_CACHE = NullCache()


@dataclass(eq=False)
class NullStep:
    layout: FlatKeys
    context: object | None = None

    def of(self, layer: int) -> NullStep:
        return self

    def extend(self, layer: int, k: Tensor, v: Tensor) -> KeysAndValues:
        return k, v

    def finish(self) -> None:
        pass


class FullStep:
    """Layers that keep every token: a key's place is its position.  A first prefill gives the new keys
    and values back as they are, which keeps their gradient; causality still applies.

    Where the store keeps numbers in another form than they are computed in, every query gets what is kept, in a first
    prefill too, so that a prompt is the same in any pieces.  The rows' keys are then decoded in each step."""

    def __init__(self, stores: Sequence[Store], like: Store, rows: Rows, places: RowPlaces, *, fresh: bool) -> None:
        self.stores, self.rows, self.fresh, self.places = stores, rows, fresh, places
        self.exact = like.exact
        self.layout: KeyLayout = FlatKeys(rows) if fresh else SlotKeys(rows.ends, tuple(range(len(rows))))
        self.views = places.views(stores)  # by layer
        self.at: slice | None = None  # of a view of the rows, all new tokens
        if rows.even and places.regular is not None:
            self.at = slice(rows.past[0], rows.ends[0])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> KeysAndValues:
        store, rows = self.stores[layer], self.rows
        new = store.encode(k, v)
        kept = self.views.get(layer)
        if kept is None or self.at is None:
            self.places.write(store, *new)
        else:
            for stored, x in zip(kept, new, strict=True):
                stored[:, :, self.at] = x.view(len(rows.lengths), rows.longest, *x.shape[1:]).transpose(1, 2)
        if self.fresh:
            return (k, v) if self.exact else store.decode(*new)
        keys, values = self.places.read(store) if kept is None else kept
        return (keys, values) if self.exact else store.decode(keys[:, :, : rows.end], values[:, :, : rows.end])


class RingStep:
    """Layers that look back less than `window` positions keep that many in a ring: position p stands at place
    `p % window`.  A chunk of several tokens reads the old ring beside its own keys, since writing them overwrites what
    its first queries see.  What queries get is in every case what the store keeps (`FullStep`)."""

    def __init__(self, stores: Sequence[Store], like: Store, window: int, rows: Rows, *, fresh: bool) -> None:
        self.stores, self.rows, self.fresh, self.window = stores, rows, fresh, window
        device = like.k.device
        slot, position = token_places(rows, device)
        self.last: Tensor | None = None
        if rows.longest > window:  # the last of the new tokens, so that no place is written twice
            end = torch.tensor(rows.ends, device=device)[rows.row_of(device)]
            self.last = (position >= end - window).nonzero()[:, 0]
            slot, position = slot[self.last], position[self.last]
        self.slot_of, self.place = slot, position % window
        self.layout: KeyLayout
        if fresh:
            self.layout = FlatKeys(rows)
        elif rows.longest <= 1:
            slots = rows.slots if like.exact else tuple(range(len(rows)))
            self.layout = SlotKeys(rows.ends, slots, ring_positions(rows.ends, window, device))
        else:
            self.slots = torch.tensor(rows.slots, device=device)
            self.row, self.step_place = rows.row_of(device), token_places(Rows(rows.lengths), device)[1]
            self.layout = self._beside(device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> KeysAndValues:
        store = self.stores[layer]
        new_k, new_v = store.encode(k, v)
        if not store.exact:
            k, v = store.decode(new_k, new_v)
        visible = (k, v) if self.fresh else None
        if visible is None and self.rows.longest > 1:
            old_k, old_v = store.decode(store.k[self.slots], store.v[self.slots])
            visible = self._joined(old_k, k), self._joined(old_v, v)
        if self.last is not None:
            new_k, new_v = new_k[self.last], new_v[self.last]
        store.k[self.slot_of, :, self.place] = new_k
        store.v[self.slot_of, :, self.place] = new_v
        if visible is not None:
            return visible
        if store.exact:
            return store.k, store.v
        slots = list(self.rows.slots)
        return store.decode(store.k[slots], store.v[slots])

    def _joined(self, ring: Tensor, new: Tensor) -> Tensor:
        """The rows' rings and their new tokens, `[B, G, window + longest, K]`."""
        padded = new.new_zeros(len(self.rows), self.rows.longest, *new.shape[1:])
        padded = padded.index_put((self.row, self.step_place), new)
        return torch.cat((ring.to(new.dtype), padded.transpose(1, 2)), 2)

    def _beside(self, device: torch.device) -> SlotKeys:
        rows = self.rows
        place = torch.arange(rows.longest, device=device)
        past, length = (torch.tensor(x, device=device)[:, None] for x in (rows.past, rows.lengths))
        positions = (past + place).masked_fill(place >= length, -1)
        positions = torch.cat((ring_positions(rows.past, self.window, device), positions), 1)
        return SlotKeys((positions.shape[1],) * len(rows), tuple(range(len(rows))), positions)


def ring_positions(lengths: Sequence[int], window: int, device: torch.device) -> Tensor:
    """`[B, window]`: the last position below each length that belongs at each place of its ring, -1 for none.

    After a trim a place may hold a forgotten token instead; `Cache.trim` refuses where a window would still see it.
    """
    length = torch.tensor(lengths, device=device)[:, None]
    place = torch.arange(window, device=device)
    return (length - 1 - (length - 1 - place) % window).clamp(min=-1)


@dataclass(frozen=True, eq=False)
class SumPlan:
    """Linear attention of `rows` over their new keys and values behind the sums of what came before, which it plans by
    itself: k `[N, G, K]` are features, v `[N + B * K, G, Kv + 1]` the values, with a 1 behind each, and then for each
    row its sums, one row of them for each feature."""

    rows: Rows

    def plan(
        self, rows: Rows, mask: Mask, heads: Heads, bias: ScoreBias | None = None, mechanism: Mechanism = LINEAR
    ) -> SumPlan:
        """Raises InputError for what linear attention has no form for, as without a cache."""
        if mechanism is not LINEAR:
            raise InputError("a cache of sums serves linear attention alone")
        LINEAR.plan(placed_request(rows, rows.longest, mask, heads, bias)[0])  # raises where it cannot serve
        return SumPlan(rows)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, content: ContentBias | None = None
    ) -> Tensor:
        """q [N, H, K] -> [N, H, Kv]."""
        rows, groups = self.rows, k.shape[1]
        batching = batched(rows, q.device)
        new, before = v[: rows.total], v[rows.total :].view(len(rows), -1, *v.shape[1:]).transpose(1, 2)
        queries = batching.batch(features(q.to(k.dtype)))
        grouped = queries.view(len(rows), groups, -1, *queries.shape[2:])  # [B, G, H / G, T, K]
        keys, values = (batching.batch(x)[:, :, None] for x in (k, new))
        total = running(grouped, keys, values) + grouped @ before[:, :, None]
        return batching.flat(divided(total).flatten(1, 2)).to(q.dtype)


class SumStep:
    """One step of the layers that keep sums.  A first prefill gives the fresh tensors back, as `FullStep` does."""

    def __init__(self, stores: Sequence[Store], rows: Rows, snapshots: dict[int, Snapshot], *, fresh: bool) -> None:
        self.stores, self.rows, self.snapshots, self.fresh = stores, rows, snapshots, fresh
        self.layout = FlatKeys(rows) if fresh else SumPlan(rows)
        self.slots = list(rows.slots)
        self.begin = [row for row, past in enumerate(rows.past) if not past]  # what their slots still have is forgotten
        self.after: dict[int, Tensor] = {}  # of each layer, written by `finish`

    def extend(self, layer: int, k: Tensor, v: Tensor) -> KeysAndValues:
        store, rows = self.stores[layer], self.rows
        k_terms, v_terms = k.detach().to(store.k.dtype), v.detach().to(store.k.dtype)
        new_k, new_v = features(k_terms), F.pad(v_terms, (0, 1), value=1.0)  # in the store's precision
        batching = batched(rows, k.device)
        before = torch.cat((store.k[self.slots], store.v[self.slots]), -1)
        before[self.begin] = 0.0
        self.after[layer] = before + batching.batch(new_k).mT @ batching.batch(new_v)
        for row, slot in enumerate(self.slots):
            if slot in self.snapshots:
                here = rows.place(row)
                self.snapshots[slot].added[layer] = new_k[here], new_v[here]
        if self.fresh:
            return k, v
        return new_k, torch.cat((new_v, before.transpose(1, 2).flatten(0, 1)))

    def finish(self) -> None:
        """Add the step's tokens.  Not before every layer was extended: a step that fails changes nothing."""
        for layer, after in self.after.items():
            store = self.stores[layer]
            store.k[self.slots], store.v[self.slots] = after[..., :-1], after[..., -1:]


def put_back(store: Store, slot: int, snapshot: Snapshot, layer: int, count: int) -> None:
    """The sums of a slot as they were at `snapshot`, and after the first `count` of the tokens that came since."""
    new_k, new_v = (x[:count].transpose(0, 1) for x in snapshot.added[layer])
    k, v = snapshot.sums[layer]
    after = torch.cat((k, v), -1) + new_k.mT @ new_v
    store.k[slot], store.v[slot] = after[..., :-1], after[..., -1:]
