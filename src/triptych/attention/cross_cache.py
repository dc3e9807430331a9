"""The keys and values of cross-attention: an encoder's output as decoder layers read it, `CrossKeys`, and `CrossCache`,
which keeps them between the steps of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.errors import InputError
from .layer_cache import CachedLayer, CacheType, Store, Stores, stored_form
from .row_places import token_places
from .row_plan import FlatKeys, KeyLayout, KeyLocation, SlotKeys
from .rows import KeysAndValues, Rows

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


class CrossCache(Stores):
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
        self.stores = [Store(replace(layer, window=None, sums=False), form, device) for layer in layers]
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
