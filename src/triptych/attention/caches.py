"""Keys and values that outlive a forward.

A forward opens a cache with `begin(rows, provenance)` and gets a `CacheStep`: it says where each layer's keys will lie
(`layout`), takes each layer's new keys in once (`extend`) and counts them (`finish`).  Everything that the layers of
one kind share - places to write to, positions - is computed once per step.  Rows live in slots: a batch may run any of
them in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.attention.row_plan import FlatKeys, KeyLayout, PlansRows, SlotKeys
from triptych.attention.rows import Rows
from triptych.errors import InputError, ProbeError


@dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """What one layer stores per token: `groups` keys of `width` and values of `value_width` numbers.

    window   the layer never looks `window` or more positions back; None keeps every token.
    """

    groups: int
    width: int
    value_width: int
    window: int | None = None


@runtime_checkable
class KeyStep(Protocol):
    """One step of the layers that store their keys in the same way."""

    @property
    def layout(self) -> PlansRows:
        """Where their keys lie once this step's are in."""

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a layer's new keys [N, G, K] and values [N, G, Kv] -> all that its queries may see, as `layout`."""


@runtime_checkable
class Continued(Protocol):
    """What a stack decided for a step; kept with it, since the next step of the same rows changes little of it."""

    def moved_on(self, rows: Rows, x: Tensor) -> bool:
        """Adapt to the next token of each of the same rows; False where it must be decided anew."""


@runtime_checkable
class CacheStep(Protocol):
    """One forward's use of a cache.  `context` is what the stack decided in the step before, where that was one token
    of each of the same rows; None elsewhere."""

    context: Continued | None

    def of(self, layer: int) -> KeyStep: ...

    def finish(self) -> None:
        """Count the step, once every layer was extended with it."""


@runtime_checkable
class KVCache(Protocol):
    """What a decoder's forward needs of a cache; `NullCache` keeps nothing."""

    def begin(self, rows: Rows, provenance: str) -> CacheStep: ...


class NullCache:
    """Keeps nothing: training, encoders, scoring."""

    def begin(self, rows: Rows, provenance: str) -> NullStep:
        return NullStep(FlatKeys(rows))


NULL_CACHE = NullCache()


@dataclass(eq=False)
class NullStep:
    layout: FlatKeys
    context: Continued | None = None

    def of(self, layer: int) -> NullStep:
        return self

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def finish(self) -> None:
        pass


class Store:
    """The keys and values of one layer: `[slot, G, capacity, K]`.  Room not yet written is zero: a hidden key has
    weight 0, and 0 times what is left there may be NaN."""

    def __init__(self, layer: CachedLayer, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.window = layer.window
        self.k = torch.zeros(0, layer.groups, capacity, layer.width, dtype=dtype, device=device)
        self.v = torch.zeros(0, layer.groups, capacity, layer.value_width, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def resize(self, slots: int, capacity: int) -> None:
        """At least so many slots and places."""
        if slots > self.k.shape[0] or capacity > self.k.shape[2]:
            self.k, self.v = (_resized(x, slots, capacity) for x in (self.k, self.v))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slots `sources` to slots `targets`, all read before any is written."""
        take, put = (torch.tensor(list(slots), device=self.k.device) for slots in (sources, targets))
        self.k[put], self.v[put] = self.k[take], self.v[take]


class FullStep:
    """Layers that keep every token: a key's place is its position.  A first prefill gives the fresh tensors back, so
    it needs no mask and keeps their gradient."""

    def __init__(self, stores: Sequence[Store], rows: Rows, *, fresh: bool) -> None:
        self.stores, self.rows, self.fresh = stores, rows, fresh
        slots = rows.slots
        self.run = slice(slots[0], slots[0] + len(slots)) if slots and _consecutive(slots) else None
        self.layout: KeyLayout = FlatKeys(rows) if fresh else SlotKeys(rows.ends, slots)
        if rows.even and self.run is not None:
            self.at = slice(rows.past[0], rows.ends[0])
        else:
            self.run = None
            self.slot_of, self.place = token_places(rows, stores[0].k.device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        store, rows = self.stores[layer], self.rows
        keys, values = store.k, store.v
        old_k, old_v = (k.detach(), v.detach()) if k.requires_grad or v.requires_grad else (k, v)
        if self.run is None:
            keys[self.slot_of, :, self.place] = old_k.to(keys.dtype)
            values[self.slot_of, :, self.place] = old_v.to(values.dtype)
        elif rows.longest == 1:
            keys[self.run, :, self.at] = old_k.unsqueeze(2)
            values[self.run, :, self.at] = old_v.unsqueeze(2)
        else:
            keys[self.run, :, self.at] = old_k.view(len(rows.lengths), rows.longest, *k.shape[1:]).transpose(1, 2)
            values[self.run, :, self.at] = old_v.view(len(rows.lengths), rows.longest, *v.shape[1:]).transpose(1, 2)
        return (k, v) if self.fresh else (keys, values)


class RingStep:
    """Layers that look back less than `window` positions keep that many in a ring: position p stands at place
    `p % window`.  A chunk of several tokens reads the old ring beside its own keys, since writing them overwrites what
    its first queries see."""

    def __init__(self, stores: Sequence[Store], window: int, rows: Rows, *, fresh: bool) -> None:
        self.stores, self.rows, self.fresh, self.window = stores, rows, fresh, window
        device = stores[0].k.device
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
            self.layout = SlotKeys(rows.ends, rows.slots, ring_positions(rows.ends, window, device))
        else:
            self.slots = torch.tensor(rows.slots, device=device)
            self.row, self.step_place = rows.row_of(device), token_places(_from_zero(rows), device)[1]
            self.layout = self._beside(device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        store = self.stores[layer]
        visible = (k, v) if self.fresh else None
        if visible is None and self.rows.longest > 1:
            visible = self._joined(store.k, k), self._joined(store.v, v)
        k, v = k.detach(), v.detach()
        if self.last is not None:
            k, v = k[self.last], v[self.last]
        store.k[self.slot_of, :, self.place] = k.to(store.k.dtype)
        store.v[self.slot_of, :, self.place] = v.to(store.v.dtype)
        return (store.k, store.v) if visible is None else visible

    def _joined(self, ring: Tensor, new: Tensor) -> Tensor:
        """The rows' rings and their new tokens, `[B, G, window + longest, K]`."""
        room = new.new_zeros(len(self.rows), self.rows.longest, *new.shape[1:])
        room = room.index_put((self.row, self.step_place), new)
        return torch.cat((ring[self.slots].to(new.dtype), room.transpose(1, 2)), 2)

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
    length = torch.tensor(list(lengths), device=device)[:, None]
    place = torch.arange(window, device=device)
    return (length - 1 - (length - 1 - place) % window).clamp(min=-1)


class Cache:
    """One store per layer, full or a ring, and how many tokens each slot holds.

    layers       what each layer stores.
    slots        slots that exist at once; `add` makes more.
    capacity     tokens a full layer has room for before it doubles.
    lengths      tokens in each slot.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        slots: int = 0,
        *,
        capacity: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.stores = [Store(layer, layer.window or capacity, dtype, device) for layer in layers]
        self.full = any(layer.window is None for layer in layers)
        self.lengths: list[int] = []
        self.provenance: list[str] = []  # identifies the edits that each slot was written under
        self.reached: list[int] = []  # the most tokens each slot ever held since it was empty
        self.free_slots: list[int] = []
        self.last: _Step | None = None  # to go on from, as long as nothing else changed the slots
        self.add(slots)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(store.nbytes for store in self.stores)

    def add(self, count: int = 1) -> list[int]:
        """`count` empty slots, freed ones first."""
        self.last = None
        reused, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        new = range(len(self.lengths), len(self.lengths) + count - len(reused))
        for numbers in (self.lengths, self.reached):
            numbers.extend([0] * len(new))
        self.provenance.extend([""] * len(new))
        for store in self.stores:
            store.resize(len(self.lengths), 0)
        return [*reused, *new]

    def free(self, slots: Sequence[int]) -> None:
        """Forget what these slots hold; `add` may give them out again.  Raises InputError for one that is free."""
        self.last = None
        for slot in slots:
            if slot in self.free_slots or not 0 <= slot < len(self.lengths):
                raise InputError(f"slot {slot} is not in use; this cache has {len(self.lengths)} slots")
            self.lengths[slot] = self.reached[slot] = 0
            self.free_slots.append(slot)
            for store in self.stores:  # hidden keys must be finite: 0 times NaN is NaN
                store.k[slot].zero_()
                store.v[slot].zero_()
        self.free_slots.sort()

    def begin(self, rows: Rows, provenance: str) -> _Step:
        """Open a step: `rows` go on where their slots end, under the edits these were written under.

        Raises InputError when they do not, ProbeError under other edits than before.
        """
        last = self.last
        if last is not None and last.counted and not last.fresh and last.rows.longest == 1 == rows.longest:
            same = rows.slots == last.rows.slots and rows.past == last.rows.ends and provenance == last.provenance
            if same and max(rows.ends) <= self.capacity:  # one more token of each of the same rows
                last.rows, last.fresh, last.counted = rows, False, False
                last.steps = {}  # prepared anew where the stack cannot go on from its last context
                return last
        for slot, past in zip(rows.slots, rows.past, strict=True):
            if not 0 <= slot < len(self.lengths):
                raise InputError(f"a row lives in slot {slot}, but the cache has {len(self.lengths)} slots")
            if past != self.lengths[slot]:
                raise InputError(f"cache slot {slot} holds {self.lengths[slot]} tokens, its row begins at {past}")
            if past and provenance != self.provenance[slot]:
                raise ProbeError(
                    f"cache slot {slot} was written under edits {self.provenance[slot] or 'none'!r}, not "
                    f"{provenance or 'none'!r}: start again with an empty one"
                )
        if len(set(rows.slots)) != len(rows.slots):
            raise InputError(f"two rows live in one cache slot: {list(rows.slots)}")
        self.last = _Step(self, rows, provenance)
        return self.last

    def room(self, end: int) -> None:
        """Make room for `end` tokens in every full layer."""
        if end > self.capacity and self.full:
            self.capacity = max(end, 2 * self.capacity)
            for store in self.stores:
                if store.window is None:
                    store.resize(0, self.capacity)

    def check_trim(self, slot: int, length: int) -> None:
        """Raise InputError when a slot is shorter already, or a ring no longer holds what a window would see."""
        if not 0 <= length <= self.lengths[slot]:
            raise InputError(f"trim slot {slot} to {length}: it holds {self.lengths[slot]} tokens")
        windows = [store.window for store in self.stores if store.window is not None]
        for window in windows:
            if length and max(self.reached[slot] - window, 0) > max(length - window + 1, 0):
                raise InputError(
                    f"trim: slot {slot} cannot go back from {self.reached[slot]} to {length}, a layer with a window "
                    f"of {window} keeps only {window} tokens; free the slot and start again"
                )

    def trim(self, slot: int, length: int) -> None:
        """Forget a slot's tokens from `length` on.  Raises InputError as `check_trim`."""
        self.check_trim(slot, length)
        self.last = None
        self.lengths[slot] = length
        if not length:
            self.reached[slot] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """What `sources` hold to `targets`, slot by slot; all are read before any is written (beams)."""
        moved = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not moved:
            return
        self.last = None
        take, put = zip(*moved, strict=True)
        for store in self.stores:
            store.copy(take, put)
        copied = [(self.lengths[slot], self.reached[slot], self.provenance[slot]) for slot in take]
        for slot, (length, reached, provenance) in zip(put, copied, strict=True):
            self.lengths[slot], self.reached[slot], self.provenance[slot] = length, reached, provenance


class _Step:
    """A step of a `Cache`; each way of storing keys is prepared when its first layer asks."""

    def __init__(self, cache: Cache, rows: Rows, provenance: str) -> None:
        self.cache, self.rows, self.provenance = cache, rows, provenance
        self.fresh = not any(rows.past)
        self.context: Continued | None = None
        self.counted = False
        self.steps: dict[int | None, KeyStep] = {}
        cache.room(max(rows.ends, default=0))

    def of(self, layer: int) -> KeyStep:
        window = self.cache.stores[layer].window
        if window not in self.steps:
            stores, rows, fresh = self.cache.stores, self.rows, self.fresh
            if window is None:
                self.steps[window] = FullStep(stores, rows, fresh=fresh)
            else:
                self.steps[window] = RingStep(stores, window, rows, fresh=fresh)
        return self.steps[window]

    def finish(self) -> None:
        cache = self.cache
        for slot, end in zip(self.rows.slots, self.rows.ends, strict=True):
            cache.lengths[slot] = end
            if end > cache.reached[slot]:
                cache.reached[slot] = end
            cache.provenance[slot] = self.provenance
        self.counted = True


def _resized(x: Tensor, slots: int, capacity: int) -> Tensor:
    larger = x.new_zeros(max(slots, x.shape[0]), x.shape[1], max(capacity, x.shape[2]), x.shape[3])
    larger[: x.shape[0], :, : x.shape[2]] = x
    return larger


def token_places(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """The slot and the absolute position of each token."""
    return torch.tensor(rows.slots, device=device)[rows.row_of(device)], rows.positions(device)


def _consecutive(slots: tuple[int, ...]) -> bool:
    return slots == tuple(range(slots[0], slots[0] + len(slots)))


def _from_zero(rows: Rows) -> Rows:
    """The same rows, counted from their own first token."""
    return Rows(rows.lengths)
