"""The KV cache of a decoder, `Cache`, and the cached keys and values of cross-attention, `CrossCache`.

A forward opens a cache with `begin(rows, provenance)` and gets a `CacheStep`: it says where each layer's keys will lie
(`layout`), takes each layer's new keys in once (`extend`) and counts them (`finish`).  Everything that the layers of
one kind share - places to write to, positions - is computed once per step.  Rows live in slots: a batch may run any of
them in any order.  How one forward writes, in whole rows, rings or sums, stands in `cache_steps`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.errors import InputError, ProbeError
from .cache_steps import FullStep, KeyStep, RingStep, SumStep, put_back, token_places
from .layer_cache import CachedLayer, CacheType, Snapshot, Store, resize_together, stored_form
from .row_plan import FlatKeys, KeyLayout, KeyLocation, SlotKeys
from .rows import KeysAndValues, Rows


class _Stores:
    """One store per layer."""

    stores: list[Store]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(store.nbytes for store in self.stores)

    def slot_bytes(self, length: int) -> int:
        """Bytes of one slot with room for `length` tokens, or for a source of so many positions."""
        return sum(store.slot_bytes(length) for store in self.stores)


class Cache(_Stores):
    """One store per layer, full or a ring, and how many tokens each slot holds.

    layers       what each layer stores.
    slots        slots that exist at once; `add` makes more.
    capacity     tokens a full layer has room for before it doubles.
    dtype        what the model computes in.
    cache_type   the type of what is kept (`CacheType`).
    longest      tokens of the longest row to come, where that is known: doubling stops there.
    lengths      tokens in each slot.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        slots: int = 0,
        *,
        capacity: int = 64,
        dtype: torch.dtype = torch.float32,
        cache_type: CacheType = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.longest: int | None = None
        form = stored_form(cache_type, dtype)
        self.stores = [Store(layer, layer.window or capacity, form, device) for layer in layers]
        self.full = any(store.places is None for store in self.stores)
        self.sums = any(layer.sums for layer in layers)
        self.snapshots: dict[int, Snapshot] = {}  # of slots whose sums may have to go back
        self.lengths: list[int] = []
        self.provenance: list[str] = []  # identifies the edits that each slot was written under
        self.high_water: list[int] = []  # the most tokens each slot ever held since it was empty
        self.free_slots: list[int] = []
        self.last: _CacheForward | None = None  # to go on from, as long as nothing else changed the slots
        self.add(slots)

    def add(self, count: int = 1) -> list[int]:
        """`count` empty slots, freed ones first."""
        self.last = None
        reused, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        new = range(len(self.lengths), len(self.lengths) + count - len(reused))
        self.lengths.extend([0] * len(new))
        self.high_water.extend([0] * len(new))
        self.provenance.extend([""] * len(new))
        for fixed in (False, True):  # which do not grow together
            stores = [store for store in self.stores if (store.places is not None) is fixed]
            resize_together(stores, len(self.lengths), 0)
        return [*reused, *new]

    def free(self, slots: Sequence[int]) -> None:
        """Forget what these slots hold; `add` may give them out again.  Raises InputError for one that is free."""
        self.last = None
        for slot in slots:
            if slot in self.free_slots or not 0 <= slot < len(self.lengths):
                raise InputError(f"slot {slot} is not in use; this cache has {len(self.lengths)} slots")
            for store in self.stores:  # hidden keys must be finite: 0 times NaN is NaN
                store.clear(slot, 0, self.high_water[slot])
            self.lengths[slot] = self.high_water[slot] = 0
            self.snapshots.pop(slot, None)
            self.free_slots.append(slot)
        self.free_slots.sort()

    def begin(self, rows: Rows, provenance: str) -> _CacheForward:
        """Open a step: `rows` go on where their slots end, under the edits these were written under.

        Raises InputError when they do not, ProbeError under other edits than before.
        """
        step = self.last
        if (  # one more token of each of the same rows
            step is not None
            and step.counted
            and not step.fresh
            and step.rows.longest == 1 == rows.longest
            and rows.slots == step.rows.slots
            and rows.past == step.rows.ends
            and provenance == step.provenance
            and rows.end <= self.capacity
        ):
            step.rows, step.counted = rows, False
        else:
            self._check_rows(rows, provenance)
            step = self.last = _CacheForward(self, rows, provenance)
        for slot, end in zip(rows.slots, rows.ends, strict=True):  # before it: the places of a failed step count too
            self.high_water[slot] = max(self.high_water[slot], end)
        return step

    def _check_rows(self, rows: Rows, provenance: str) -> None:
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

    def ensure_capacity(self, end: int) -> None:
        """Make room for `end` tokens in every full layer."""
        if end > self.capacity and self.full:
            doubled = 2 * self.capacity
            self.capacity = max(end, doubled if self.longest is None else min(doubled, self.longest))
            resize_together([store for store in self.stores if store.places is None], 0, self.capacity)

    def check_trim(self, slot: int, length: int) -> None:
        """Raise InputError when a slot is shorter already, when a ring no longer holds what a window would see, and for
        sums, from which no token can be taken, unless all are forgotten."""
        if not 0 <= length <= self.lengths[slot]:
            raise InputError(f"cannot trim slot {slot} to {length} tokens: it holds {self.lengths[slot]}")
        if self.sums and 0 < length < self.lengths[slot]:
            raise InputError(
                f"cannot trim slot {slot} from {self.lengths[slot]} to {length} tokens: a layer of linear attention "
                "keeps only sums over all tokens; free the slot and start again"
            )
        for window in [store.window for store in self.stores if store.window is not None]:
            if length and max(self.high_water[slot] - window, 0) > max(length - window + 1, 0):
                raise InputError(
                    f"cannot trim slot {slot} from {self.high_water[slot]} to {length} tokens: a layer with a window "
                    f"of {window} keeps only {window} tokens; free the slot and start again"
                )

    def trim(self, slot: int, length: int) -> None:
        """Forget a slot's tokens from `length` on.  Raises InputError as `check_trim`."""
        self.check_trim(slot, length)
        self.last = None
        self.lengths[slot] = length
        if not length:
            self.high_water[slot] = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what `sources` hold to `targets`, slot by slot; all are read before any is written (beams)."""
        moved = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not moved:
            return
        self.last = None
        take, put = zip(*moved, strict=True)
        length = max(self.high_water[slot] for slot in take)
        longer = [slot for slot in put if self.high_water[slot] > length]
        for store in self.stores:
            for slot in longer:  # what the copy does not replace
                store.clear(slot, length, self.high_water[slot])
            store.copy(take, put, store.places or length)
        copied = [(self.lengths[slot], self.high_water[slot], self.provenance[slot]) for slot in take]
        for slot, (length, high_water, provenance) in zip(put, copied, strict=True):
            self.lengths[slot], self.high_water[slot], self.provenance[slot] = length, high_water, provenance

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of slot `source` to slot `target`, which is empty.

        Raises InputError as `check_trim`, and for a target that holds tokens.
        """
        self.check_trim(source, length)
        if self.lengths[target]:
            raise InputError(
                f"cannot copy slot {source} to slot {target}, which holds {self.lengths[target]} tokens; free it first"
            )
        self.last = None
        for store in self.stores:
            store.copy([source], [target], store.places or length)
        self.lengths[target], self.high_water[target] = length, self.high_water[source]
        self.provenance[target] = self.provenance[source]

    @property
    def smallest_window(self) -> int | None:
        """Tokens that every layer can take in and give back (`snapshot`); None where no layer has a window."""
        return min((store.window for store in self.stores if store.window is not None), default=None)

    @property
    def forgets(self) -> bool:
        """Whether some layer keeps less than every token, so that tokens can be taken back after `snapshot` alone."""
        return self.sums or self.smallest_window is not None

    def snapshot(self, slot: int, count: int) -> Snapshot:
        """What the next `count` tokens of a slot, all of one step, will change in its rings and sums; `rollback` puts
        it there again.

        Raises InputError for more tokens than the smallest ring has places.
        """
        if count > (self.smallest_window or count):
            raise InputError(f"cannot take back {count} tokens: a layer has a window of {self.smallest_window}")
        rings = []
        for store in self.stores:
            if store.window is not None:
                place = torch.arange(self.lengths[slot], self.lengths[slot] + count, device=store.k.device)
                place %= store.window
                rings.append((store, store.k[slot][:, place], store.v[slot][:, place]))
        sums = {i: (x.k[slot].clone(), x.v[slot].clone()) for i, x in enumerate(self.stores) if x.layer.sums}
        snapshot = Snapshot(self.lengths[slot], self.high_water[slot], rings, sums)
        if sums:
            self.snapshots[slot] = snapshot
        return snapshot

    def rollback(self, slot: int, length: int, snapshot: Snapshot) -> None:
        """Forget a slot's tokens from `length` on, of those that were added since `snapshot`: its rings and sums
        become what they would be without them."""
        self.last = None
        self.snapshots.pop(slot, None)
        for layer in snapshot.sums:
            put_back(self.stores[layer], slot, snapshot, layer, length - snapshot.length)
        for store, k, v in snapshot.rings:
            assert store.window is not None
            place = torch.arange(length, self.lengths[slot], device=k.device) % store.window
            added = slice(length - snapshot.length, self.lengths[slot] - snapshot.length)
            store.k[slot, :, place], store.v[slot, :, place] = k[:, added], v[:, added]
        if snapshot.rings:  # without rings, what was written stays in its places
            self.high_water[slot] = max(snapshot.high_water, length)
        self.lengths[slot] = length


class _CacheForward:
    """A step of a `Cache`; each way of storing keys is prepared when its first layer asks.  The cache keeps its last
    step, so the step does not keep the cache: its memory is freed with the last use, not by the garbage collector."""

    def __init__(self, cache: Cache, rows: Rows, provenance: str) -> None:
        self.cache: Cache = weakref.proxy(cache)
        self.rows, self.provenance = rows, provenance
        self.fresh = not any(rows.past)
        self.context: object | None = None
        self.counted = False
        self.steps: dict[tuple[int | None, bool], KeyStep] = {}  # by window, and whether sums are kept
        cache.ensure_capacity(rows.end)

    def of(self, layer: int) -> KeyStep:
        stores, rows, fresh = self.cache.stores, self.rows, self.fresh
        store, window = stores[layer], stores[layer].window
        kind = window, store.layer.sums
        if kind not in self.steps:
            if store.layer.sums:
                self.steps[kind] = SumStep(stores, rows, self.cache.snapshots, fresh=fresh)
            elif window is None:
                self.steps[kind] = FullStep(stores, store, rows, fresh=fresh)
            else:
                self.steps[kind] = RingStep(stores, store, window, rows, fresh=fresh)
        return self.steps[kind]

    def finish(self) -> None:
        cache = self.cache
        for step in self.steps.values():
            if isinstance(step, SumStep):
                step.finish()
        self.steps = {}  # prepared anew where the stack cannot go on from its last context
        for slot, end in zip(self.rows.slots, self.rows.ends, strict=True):
            cache.lengths[slot] = end
            cache.provenance[slot] = self.provenance
        self.counted = True


Project = Callable[[Tensor, Rows], KeysAndValues]
"""A layer's cross-attention keys [M, G, K] and values [M, G, Kv] of an encoder's output [M, D]."""


@runtime_checkable
class CrossKeys(Protocol):
    """An encoder's output as a decoder's cross-attention layers read it."""

    def layout(self, rows: Rows) -> KeyLocation:
        """The places of the keys of the sources of `rows`."""

    def keys(self, layer: int, project: Project) -> KeysAndValues: ...


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """An encoder's output [M, D] for one uncached forward: each layer projects it once."""

    memory: Tensor
    rows: Rows

    def layout(self, rows: Rows) -> KeyLayout:
        return FlatKeys(self.rows)

    def keys(self, layer: int, project: Project) -> KeysAndValues:
        return project(self.memory, self.rows)


class CrossCache(_Stores):
    """The keys and values of encoder outputs, projected by each layer in the first forward after `fill` and read at
    every later one.  Slots are those of the decoder's rows.

    dtype        what the model computes in.
    cache_type   the type of what is kept, as in `Cache`.
    lengths      positions of the source of each slot.
    places       where the source of each slot lies in the stores; rows of one source, such as beams, share its place.
    """

    def __init__(
        self, layers: Sequence[CachedLayer], dtype: torch.dtype, device: torch.device | str, *,
        cache_type: CacheType = "auto",
    ) -> None:  # fmt: skip
        form = stored_form(cache_type, dtype)
        self.stores = [Store(replace(layer, window=None, sums=False), 0, form, device) for layer in layers]
        self.lengths: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.pending: EncoderOutput | None = None
        self.projected: set[int] = set()

    def fill(self, memory: Tensor, rows: Rows) -> None:
        """Take an encoder's output [M, D] in; each row goes to its slot, whatever that held before.

        Raises InputError while some layer has not read the output that was taken in before."""
        self.pending, self.projected = EncoderOutput(memory, self.assign_places(rows)), set()

    def assign_places(self, rows: Rows) -> Rows:
        """Give the sources `rows` places of their own in the stores: the same rows, with these as their slots.

        Raises InputError as `fill`.
        """
        if self.pending is not None:
            raise InputError("a source waits for the forward that reads it; run the decoder before the next source")
        self.free(rows.slots)
        taken = set(self.places.values())
        places = tuple(islice((place for place in count() if place not in taken), len(rows)))
        self.places.update(zip(rows.slots, places, strict=True))
        self.lengths.update(zip(rows.slots, rows.lengths, strict=True))
        for store in self.stores:
            store.resize(max(places, default=-1) + 1, rows.longest)
        return Rows(rows.lengths, slots=places)

    def layout(self, rows: Rows) -> KeyLayout:
        """Raises InputError for a row without a source."""
        missing = [slot for slot in rows.slots if slot not in self.lengths]
        if missing:
            raise InputError(f"cache slots {missing} have no source; encode one for each row first")
        return SlotKeys(*self.of(rows.slots))

    def of(self, slots: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths of the sources of these slots, and their places."""
        return tuple([self.lengths[slot] for slot in slots]), tuple([self.places[slot] for slot in slots])

    def keys(self, layer: int, project: Project) -> KeysAndValues:
        store = self.stores[layer]
        if self.pending is not None and layer not in self.projected:
            rows = self.pending.rows
            k, v = project(self.pending.memory, rows)
            slot, place = token_places(rows, k.device)
            store.k[slot, :, place], store.v[slot, :, place] = store.encode(k, v)
            self.projected.add(layer)
            if len(self.projected) == len(self.stores):
                self.pending = None
        return (store.k, store.v) if store.exact else store.decode(store.k, store.v)

    def free(self, slots: Sequence[int]) -> None:
        """Forget the sources of these slots."""
        for slot in slots:
            self.lengths.pop(slot, None)
            self.places.pop(slot, None)

    def share(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let slots `targets` read the sources of slots `sources` too (beams).  Raises InputError before they were
        projected."""
        if self.pending is not None:
            raise InputError("a source cannot be shared before the first forward that reads it")
        for known in (self.lengths, self.places):
            known.update(zip(targets, [known[slot] for slot in sources], strict=True))
