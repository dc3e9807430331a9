"""The keys and values of encoder outputs, which each layer of a decoder projects once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.attention.caches import token_places
from triptych.attention.row_plan import FlatKeys, KeyLayout, PlansRows, SlotKeys
from triptych.attention.rows import Rows
from triptych.attention.store import CachedLayer, Store
from triptych.errors import InputError

Project = Callable[[Tensor, Rows], tuple[Tensor, Tensor]]
"""A layer's cross-attention keys [M, G, K] and values [M, G, Kv] of an encoder's output [M, D]."""


@runtime_checkable
class CrossKeys(Protocol):
    """An encoder's output as a decoder's cross-attention layers read it."""

    def layout(self, rows: Rows) -> PlansRows:
        """Where the keys of the sources of `rows` lie."""

    def keys(self, layer: int, project: Project) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """An encoder's output [M, D] for one uncached forward: each layer projects it once."""

    memory: Tensor
    rows: Rows

    def layout(self, rows: Rows) -> KeyLayout:
        return FlatKeys(self.rows)

    def keys(self, layer: int, project: Project) -> tuple[Tensor, Tensor]:
        return project(self.memory, self.rows)


class CrossCache:
    """The keys and values of encoder outputs, projected by each layer in the first forward after `fill` and read at
    every later one.  Slots are those of the decoder's rows."""

    def __init__(self, layers: Sequence[CachedLayer], dtype: torch.dtype, device: torch.device | str) -> None:
        self.stores = [Store(replace(layer, window=None), 0, dtype, device) for layer in layers]
        self.lengths: dict[int, int] = {}
        self.pending: EncoderOutput | None = None
        self.projected: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    def slot_bytes(self, length: int) -> int:
        """Bytes of one slot with room for a source of `length` positions."""
        return sum(store.slot_bytes(length) for store in self.stores)

    def fill(self, memory: Tensor, rows: Rows) -> None:
        """Take an encoder's output [M, D] in; each row goes to its slot, whatever that held before.

        Raises InputError while some layer has not read the output that was taken in before."""
        if self.pending is not None:
            raise InputError("a source waits for the forward that reads it; run the decoder before the next source")
        self.pending, self.projected = EncoderOutput(memory, rows), set()
        self.lengths.update(zip(rows.slots, rows.lengths, strict=True))
        for store in self.stores:
            store.resize(max(rows.slots, default=-1) + 1, rows.longest)

    def layout(self, rows: Rows) -> KeyLayout:
        """Raises InputError for a row without a source."""
        missing = [slot for slot in rows.slots if slot not in self.lengths]
        if missing:
            raise InputError(f"cache slots {missing} have no source; encode one for each row first")
        return SlotKeys(tuple(self.lengths[slot] for slot in rows.slots), rows.slots)

    def keys(self, layer: int, project: Project) -> tuple[Tensor, Tensor]:
        store = self.stores[layer]
        if self.pending is not None and layer not in self.projected:
            rows = self.pending.rows
            k, v = project(self.pending.memory, rows)
            slot, place = token_places(rows, k.device)
            store.k[slot, :, place], store.v[slot, :, place] = k.detach(), v.detach()
            self.projected.add(layer)
            if len(self.projected) == len(self.stores):
                self.pending = None
        return store.k, store.v

    def free(self, slots: Sequence[int]) -> None:
        """Forget the sources of these slots."""
        for slot in slots:
            self.lengths.pop(slot, None)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The sources of some slots for others too (beams).  Raises InputError before they were projected."""
        if self.pending is not None:
            raise InputError("a source cannot be copied before the first forward that reads it")
        moved = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not moved:
            return
        take, put = zip(*moved, strict=True)
        for store in self.stores:
            store.resize(max(put) + 1, 0)
            store.copy(take, put)
        self.lengths.update(zip(put, [self.lengths[slot] for slot in take], strict=True))
