"""The KV cache of a decoder, `Cache`.

A forward opens a cache with `begin(rows, provenance)` and gets a `CacheStep`: it says where each layer's keys will lie
(`layout`), takes each layer's new keys in once (`extend`) and counts them (`finish`).  Everything that the layers of
one kind share - places to write to, positions - is computed once per step.  Rows live in slots: a batch may run any of
them in any order.  How one forward writes, in whole rows, rings or sums, stands in `cache_steps`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence

import torch

from triptych.arguments import integer
from triptych.errors import InputError, ProbeError
from triptych.native.step import PAGE_POSITIONS
from .cache_steps import FullStep, KeyStep, RingStep, SumStep, put_back
from .layer_cache import CachedLayer, CacheType, Snapshot, Store, Stores, resize_together, stored_form
from .pages import Pages
from .row_places import RowPlaces
from .rows import KeysAndValues, Rows


class Cache(Stores):
    """One store per layer, full or a ring, and how many tokens each slot holds.

    layers       what each layer stores.
    slots        slots that exist at once; `add` makes more.
    page         tokens of a page of the layers that keep every token; with None, each slot has room of its own for as
                 many as the longest may have, at addresses that stay while slots and room do (`static_executor`).
    capacity     tokens that there is room for before it doubles, without pages.
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
        page: int | None = PAGE_POSITIONS,
        capacity: int = 64,
        dtype: torch.dtype = torch.float32,
        cache_type: CacheType = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        page = None if page is None else integer("page", page, 1)
        self.capacity = capacity
        self.longest: int | None = None
        form = stored_form(cache_type, dtype)
        self.stores = [Store(layer, form, device, capacity=capacity, page=page) for layer in layers]
        paged = [store for store in self.stores if store.page is not None]
        self.pages = Pages(paged, page) if paged and page is not None else None
        self.strips = [store for store in self.stores if store.page is None]
        self.full = [store for store in self.strips if store.places is None]
        self.sums = any(layer.sums for layer in layers)
        self.snapshots: dict[int, Snapshot] = {}  # of slots whose sums may have to go back
        self.lengths: list[int] = []
        self.provenance: list[str] = []  # identifies the edits that each slot was written under
        self.high_water: list[int] = []  # the most tokens each slot ever held since it was empty
        self.free_slots: list[int] = []
        self.last: _CacheForward | None = None  # to go on from, as long as nothing else changed the slots
        self.add(slots)

    def pages_for(self, lengths: Mapping[int, int]) -> int:
        """Pages once these slots hold so many tokens each; those that they share count once."""
        if self.pages is None:
            return 0
        held = set().union(*(self.pages.tables[slot] for slot in lengths))
        return len(held) + sum(self.pages.lacking(slot, self.lengths[slot], n) for slot, n in lengths.items())

    def bytes_for(self, slots: int, longest: int, pages: int) -> int:
        """Bytes of so many slots, the longest of so many tokens, and pages: what slots have of their own is not given
        back."""
        slots, longest = max(slots, len(self.lengths)), max(longest, self.capacity)
        own = slots * sum(store.slot_bytes(longest) for store in self.strips)
        return own + (0 if self.pages is None else pages * self.pages.page_bytes)

    def limit_memory(self, nbytes: int) -> None:
        """Let the memory of pages grow beyond so many bytes only where it must."""
        if self.pages is not None:
            nbytes -= sum(store.nbytes for store in self.strips)
            self.pages.limit = max(nbytes, 0) // self.pages.page_bytes

    def add(self, count: int = 1) -> list[int]:
        """`count` empty slots, freed ones first."""
        self.last = None
        reused, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        new = range(len(self.lengths), len(self.lengths) + count - len(reused))
        self.lengths.extend([0] * len(new))
        self.high_water.extend([0] * len(new))
        self.provenance.extend([""] * len(new))
        for fixed in (False, True):  # which do not grow together
            stores = [store for store in self.strips if (store.places is not None) is fixed]
            resize_together(stores, len(self.lengths), 0)
        if self.pages is not None:
            self.pages.add_slots(len(self.lengths))
        return [*reused, *new]

    def expect(self, slot: int, least: int, most: int) -> None:
        """A slot will hold at least `least` tokens, and `most` at most: its pages are taken as neighbours."""
        if self.pages is not None:
            self.pages.lengths[slot] = least, most

    def free(self, slots: Sequence[int]) -> None:
        """Forget what these slots hold; `add` may give them out again.  Raises InputError for one that is free."""
        self.last = None
        for slot in slots:
            if slot in self.free_slots or not 0 <= slot < len(self.lengths):
                raise InputError(f"slot {slot} is not in use; this cache has {len(self.lengths)} slots")
            for store in self.strips:  # hidden keys must be finite: 0 times NaN is NaN
                store.clear(slot, 0, self.high_water[slot])
            if self.pages is not None:
                self.pages.trim(slot, 0, keep_room=False)
                self.pages.lengths.pop(slot, None)
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
            and rows.equal
            and rows.slots == step.rows.slots
            and rows.past == step.rows.ends
            and provenance == step.provenance
            and rows.end <= step.end_of_room
        ):
            step.rows, step.counted = rows, False
        else:
            self._check_rows(rows, provenance)
            self.last = None
            if self.pages is not None:
                self.pages.make_room(rows)
            self.ensure_capacity(rows.end)
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

    def steps_in_room(self, rows: Rows) -> int:
        """Tokens that each of these rows can write behind its end before memory or tables change."""
        if self.pages is None:
            return self.capacity - rows.end if self.full else sys.maxsize
        room = self.pages.room
        return min((room[slot] - end for slot, end in zip(rows.slots, rows.ends, strict=True)), default=0)

    def ensure_capacity(self, end: int) -> None:
        """Make room for `end` tokens in every slot, where there are no pages."""
        if end > self.capacity and self.full:
            self.last = None  # it holds views of the memory
            doubled = 2 * self.capacity
            self.capacity = max(end, doubled if self.longest is None else min(doubled, self.longest))
            resize_together(self.full, 0, self.capacity)

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
        if self.pages is not None:
            self.pages.trim(slot, length)

    def give_up_room(self, slot: int) -> None:
        """Free the pages that a slot has for tokens to come."""
        if self.pages is not None:
            self.last = None
            self.pages.trim(slot, self.lengths[slot], keep_room=False)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy what `sources` hold to `targets`, slot by slot; all are read before any is written (beams).  Pages are
        shared."""
        moved = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not moved:
            return
        self.last = None
        take, put = zip(*moved, strict=True)
        length = max(self.high_water[slot] for slot in take)
        longer = [slot for slot in put if self.high_water[slot] > length]
        for store in self.strips:
            for slot in longer:  # what the copy does not replace
                store.clear(slot, length, self.high_water[slot])
            store.copy(take, put, store.places or length)
        if self.pages is not None:
            self.pages.share(take, put, [self.lengths[slot] for slot in take])
        copied = [(self.lengths[slot], self.high_water[slot], self.provenance[slot]) for slot in take]
        for slot, (length, high_water, provenance) in zip(put, copied, strict=True):
            self.lengths[slot], self.high_water[slot], self.provenance[slot] = length, high_water, provenance

    def share_prefix(self, source: int, target: int, length: int) -> None:
        """Let slot `target`, which is empty, hold the first `length` tokens of slot `source`: pages are shared, rings
        and sums are copied.

        Raises InputError as `check_trim`, and for a target that holds tokens.
        """
        self.check_trim(source, length)
        if self.lengths[target]:
            raise InputError(
                f"cannot copy slot {source} to slot {target}, which holds {self.lengths[target]} tokens; free it first"
            )
        self.last = None
        for store in self.strips:
            store.copy([source], [target], store.places or length)
        if self.pages is not None:
            self.pages.share([source], [target], [length])
        self.lengths[target], self.high_water[target] = length, self.high_water[source]
        self.provenance[target] = self.provenance[source]

    def kept(self, layer: int, slot: int) -> KeysAndValues:
        """A copy of the keys [G, S, K] and values [G, S, Kv] that a layer has of the tokens of a slot, as it keeps
        them; of a ring its places."""
        store, rows = self.stores[layer], Rows((0,), (self.lengths[slot],), (slot,))
        k, v = RowPlaces(rows, None if store.page is None else self.pages, store.device).read(store)
        return k[0], v[0]

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
        self.end_of_room = rows.end + cache.steps_in_room(rows)  # of the longest row, while all advance alike
        self.fresh = not any(rows.past)
        self.context: object | None = None
        self.counted = False
        self.steps: dict[tuple[int | None, bool], KeyStep] = {}  # by window, and whether sums are kept

    def of(self, layer: int) -> KeyStep:
        stores, rows, fresh = self.cache.stores, self.rows, self.fresh
        store, window = stores[layer], stores[layer].window
        kind = window, store.layer.sums
        if kind not in self.steps:
            if store.layer.sums:
                self.steps[kind] = SumStep(stores, rows, self.cache.snapshots, fresh=fresh)
            elif window is None:
                places = RowPlaces(rows, self.cache.pages, store.device)
                self.steps[kind] = FullStep(stores, store, rows, places, fresh=fresh)
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
