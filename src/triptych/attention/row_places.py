"""Where the keys and values of some rows stand in the stores that keep every token: read and written as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.native.step import PAGES_OF_CHUNK
from .layer_cache import Store
from .pages import Pages, runs
from .rows import KeysAndValues, Rows


class RegularPlaces(NamedTuple):
    """Rows that begin `apart` places from each other, the first at place `first` of a chunk, of `room` places each."""

    chunk: int
    first: int
    apart: int
    room: int


class _TokenPlaces(NamedTuple):
    """The strip and the place of some tokens, or of all, in one chunk."""

    chunk: int
    tokens: Tensor | None
    strip: Tensor
    place: Tensor


class RowPlaces:
    """The places of `rows`, whose new tokens have room: in `pages`, or in a strip for each slot.

    regular   where the rows are a view of the stores; None where they have to be put together.
    """

    def __init__(self, rows: Rows, pages: Pages | None, device: torch.device | str) -> None:
        self.rows, self.pages, self.device = rows, pages, device
        self.regular = self._regular()

    def _regular(self) -> RegularPlaces | None:
        rows, pages = self.rows, self.pages
        if not rows.slots:
            return None
        if pages is None:
            return RegularPlaces(0, rows.slots[0], 1, 0) if _spacing(rows.slots) == 1 else None
        count = pages.count(rows.end)
        tables = [pages.tables[slot][:count] for slot in rows.slots]
        firsts = [table[0] for table in tables if len(table) == count > 0]
        apart = _spacing(firsts) if len(firsts) == len(tables) else None
        chunks = {first // PAGES_OF_CHUNK for first in firsts}
        if apart is None or len(chunks) > 1 or any(b - a != 1 for table in tables for a, b in pairwise(table)):
            return None
        first = firsts[0] % PAGES_OF_CHUNK * pages.size
        return RegularPlaces(chunks.pop(), first, apart * pages.size, count * pages.size)

    def views(self, stores: Sequence[Store]) -> dict[int, KeysAndValues]:
        """Of each of these layers that keeps every token, by its number: keys and values `[B, G, room, K or Kv]` of the
        rows as they are kept, views of its store.  None of them where the rows are no view."""
        if self.regular is None:
            return {}
        return {i: self._view(store, self.regular) for i, store in enumerate(stores) if store.places is None}

    def _view(self, store: Store, regular: RegularPlaces) -> KeysAndValues:
        chunk, first, apart, room = regular
        k, v = store.chunks[chunk]
        if self.pages is None:
            here = slice(first, first + len(self.rows))
            return k[here], v[here]
        groups, (wide, narrow) = k.shape[1], (k.shape[3], v.shape[3])
        shape, strides = (len(self.rows), groups, room), (apart, k.shape[2], 1)
        return (
            k.as_strided((*shape, wide), (*(n * wide for n in strides), 1), k.storage_offset() + first * wide),
            v.as_strided((*shape, narrow), (*(n * narrow for n in strides), 1), v.storage_offset() + first * narrow),
        )

    def read(self, store: Store) -> KeysAndValues:
        """A copy of the keys and values of the rows, zeros behind the end of each."""
        if self.pages is None:
            slots = list(self.rows.slots)
            return store.k[slots, :, : self.rows.end], store.v[slots, :, : self.rows.end]
        rows, groups = self.rows, store.layer.groups
        k, v = (
            torch.empty(len(rows), groups, rows.end, width, dtype=store.form.dtype, device=self.device)
            for width in map(store.form.length, store.widths)
        )
        for row, at, count, first, end in self._runs:
            for x, kept in zip((k, v), store.pages(first, end), strict=True):
                x[row, :, at : at + count] = kept[:, :count]
        for row, end in enumerate(rows.ends):
            if end < rows.end:
                k[row, :, end:] = v[row, :, end:] = 0
        return k, v

    def write(self, store: Store, new_k: Tensor, new_v: Tensor) -> None:
        """Keys [N, G, K] and values [N, G, Kv] of the new tokens, as they are kept."""
        for chunk, tokens, strip, place in self._of_tokens:
            for x, new in zip(store.chunks[chunk], (new_k, new_v), strict=True):
                x[strip, :, place] = new if tokens is None else new[tokens]

    @cached_property
    def _runs(self) -> list[tuple[int, int, int, int, int]]:
        """Of each run of pages: its row, the first of the row's positions that it holds and how many, and the pages."""
        assert self.pages is not None
        found = []
        for row, (slot, end) in enumerate(zip(self.rows.slots, self.rows.ends, strict=True)):
            at = 0
            for first, last in runs(self.pages.tables[slot][: self.pages.count(end)]):
                count = min((last - first) * self.pages.size, end - at)
                found.append((row, at, count, first, last))
                at += count
        return found

    @cached_property
    def _of_tokens(self) -> list[_TokenPlaces]:
        slot, position = token_places(self.rows, "cpu")
        if self.pages is None:
            return [_TokenPlaces(0, None, slot.to(self.device), position.to(self.device))]
        size = self.pages.size
        page = torch.from_numpy(self.pages.numbers)[slot, position // size].long()
        place, chunk = page % PAGES_OF_CHUNK * size + position % size, page // PAGES_OF_CHUNK
        found = []
        for number in chunk.unique().tolist():
            tokens = (chunk == number).nonzero()[:, 0]
            strip = torch.zeros_like(tokens)
            where = [x.to(self.device) for x in (tokens, strip, place[tokens])]
            found.append(_TokenPlaces(number, where[0] if len(tokens) < len(place) else None, where[1], where[2]))
        return found


def _spacing(firsts: Sequence[int]) -> int | None:
    """The distance of each number to the next, above 0; None where it is not the same."""
    apart = {b - a for a, b in pairwise(firsts)} or {1}
    return min(apart) if len(apart) == 1 and min(apart) > 0 else None


def token_places(rows: Rows, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The slot and the absolute position of each token."""
    return torch.tensor(rows.slots, device=device)[rows.row_of(device)], rows.positions(device)
