"""Pages of a cache: memory of a fixed number of positions that slots with a common beginning share (Kwon et al. 2023).

A page holds the keys and values of all layers that keep every token.  It is copied before a slot writes to it while
others hold it too (copy on write), so that sharing changes tables and counts alone.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from triptych.native.huge_pages import HugePages
from triptych.native.step import PAGES_OF_CHUNK
from .layer_cache import LEAST_IN_HUGE_PAGES, Store
from .rows import Rows

SPARE_POSITIONS = 256  # that a row takes at once beyond what it needs, of those that it may need
SPARE_PART = 32  # of the memory that may be unused, so that there are few chunks, and pages of a row are neighbours
Run = tuple[int, int]


class Pages:
    """The pages of a cache's stores, and the table of pages of each slot.

    A page is a number: that of its chunk of memory, times `PAGES_OF_CHUNK`, and its place in the chunk, the same in
    the store of every layer.  Pages of one chunk that follow one another are one piece of memory.

    size      positions of a page.
    tables    the pages of each slot, in the order of its positions; some may hold no token yet.
    holders   how many slots hold each page that any does.
    free      runs [first, end) of the pages that no slot holds, in rising order.
    lengths   positions that each slot will have at least, and those that it may have at most, where that is known.
    room      positions that each slot may write up to from its last token on; 0 where that is to be looked up.
    written   pages that may not be zero.
    limit     pages that the memory should not exceed, where that is known.
    numbers   the tables as native kernels read them, [slots, most pages].
    copies    pages that were copied before a slot wrote to them.
    """

    def __init__(self, stores: Sequence[Store], size: int) -> None:
        self.stores, self.size = stores, size
        self.page_bytes = sum(store.place_bytes for store in stores) * size
        self.tables: list[list[int]] = []
        self.holders: dict[int, int] = {}
        self.free: list[Run] = []
        self.lengths: dict[int, Run] = {}
        self.room: list[int] = []
        self.written: set[int] = set()
        self.chunks: list[int] = []
        self.limit: int | None = None
        self.numbers: npt.NDArray[np.int32] = np.zeros((0, 1), np.int32)
        self.copies = 0
        self.memory = HugePages()

    def count(self, length: int) -> int:
        """Pages of so many positions."""
        return -(-length // self.size)

    @property
    def total(self) -> int:
        """Pages that there is memory for."""
        return sum(self.chunks)

    def lacking(self, slot: int, past: int, length: int) -> int:
        """Pages that a slot of `past` tokens takes until it has `length`, copies of those that it shares included."""
        table = self.tables[slot]
        copies = sum(self.holders[page] > 1 for page in table[past // self.size : self.count(length)])
        return max(self.count(length) - len(table), 0) + copies

    def add_slots(self, count: int) -> None:
        """Tables for `count` slots in all."""
        new = count - len(self.tables)
        self.tables.extend([] for _ in range(new))
        self.room.extend([0] * new)
        self._follow(range(count - new, count))

    # -- what slots do with their pages ---------------------------------------------------------------------------

    def make_room(self, rows: Rows) -> None:
        """Let rows write their next tokens, in pages that their slots hold alone."""
        slots = [
            (slot, past, end)
            for slot, past, end in zip(rows.slots, rows.past, rows.ends, strict=True)
            if end > self.room[slot] and end > past
        ]
        if not slots:
            return
        self._extend({slot: end for slot, _, end in slots}, self._copies(slots))
        for slot, past, end in slots:
            table = self.tables[slot]
            for at in range(past // self.size, self.count(end)):
                if self.holders[table[at]] > 1:
                    self._copy(table, at, past - at * self.size)
                self.written.add(table[at])
            self.room[slot] = self.count(end) * self.size
        self._follow([slot for slot, _, _ in slots])

    def _copies(self, slots: Iterable[tuple[int, int, int]]) -> int:
        """Pages to copy before these slots write from their past to their end; the last that holds a page need not."""
        writers = Counter[int]()
        for slot, past, end in slots:
            writers.update(self.tables[slot][past // self.size : self.count(end)])
        return sum(min(count, self.holders[page] - 1) for page, count in writers.items())

    def share(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Let slots `targets` hold the first `lengths` positions of slots `sources`, in the same pages, and nothing
        else; all sources are read before any target changes."""
        tables = [self.tables[slot][: self.count(length)] for slot, length in zip(sources, lengths, strict=True)]
        for page in (page for table in tables for page in table):
            self.holders[page] += 1
        for slot in targets:
            self._release(self.tables[slot])
        for slot, table in zip(targets, tables, strict=True):
            self.tables[slot] = table
        for slot in (*sources, *targets):
            self.room[slot] = 0
        self._follow(targets)

    def trim(self, slot: int, length: int, *, keep_room: bool = True) -> None:
        """A slot has `length` positions left: it gives up the pages behind them that others hold too, and where it
        does not `keep_room`, all of them."""
        table, first = self.tables[slot], self.count(length)
        if not keep_room or any(self.holders[page] > 1 for page in table[first:]):
            self._release(table[first:])
            del table[first:]
            self._follow([slot])
        self.room[slot] = 0

    def _release(self, pages: Iterable[int]) -> None:
        """One slot less holds these pages; those that none holds are zeros again: a hidden key must be finite, as 0
        times NaN is NaN."""
        unused: list[int] = []
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                del self.holders[page]
                unused.append(page)
        unused.sort()
        for first, end in runs(page for page in unused if page in self.written):
            for store in self.stores:
                for x in store.pages(first, end):
                    x.zero_()
        self.written.difference_update(unused)
        self.free = _joined(sorted([*self.free, *runs(unused)]))

    # -- where pages come from ------------------------------------------------------------------------------------

    def _extend(self, ends: Mapping[int, int], more: int) -> None:
        """Give slots pages for so many positions, and for as many as they will have, neighbours where possible; and
        have `more` free ones.  Without memory for all, nothing changes."""
        lacking = dict[int, int]()
        for slot, end in ends.items():
            least, most = self.lengths.get(slot, (0, 0))
            wanted = max(end, min(max(end, least) + SPARE_POSITIONS, most))
            if end > len(self.tables[slot]) * self.size:
                lacking[slot] = self.count(wanted) - len(self.tables[slot])
        self._grow(sum(lacking.values()) + more)
        for slot, count in lacking.items():
            table = self.tables[slot]
            table += self._take(count, table[-1] + 1 if table else -1)

    def _grow(self, count: int) -> None:
        """Memory for at least `count` free pages, of neighbours where that leaves little of it unused."""
        unused = sum(end - first for first, end in self.free)
        lacking, spare = count - unused, self.total // SPARE_PART
        while lacking > 0:
            size = max(count if unused <= spare else lacking, spare)
            if self.limit is not None:
                size = max(min(size, self.limit - self.total), lacking)
            size = min(size, PAGES_OF_CHUNK - 1)  # so that pages of two chunks are never neighbours
            self._add_chunk(size)
            insort(self.free, (len(self.chunks) * PAGES_OF_CHUNK, len(self.chunks) * PAGES_OF_CHUNK + size))
            self.chunks.append(size)
            lacking -= size

    def _add_chunk(self, pages: int) -> None:
        large = (self.total + pages) * self.page_bytes >= LEAST_IN_HUGE_PAGES
        memory = self.memory if large else None
        chunks = [store.new_chunk(pages * self.size, memory) for store in self.stores]  # of all, or of none
        for store, chunk in zip(self.stores, chunks, strict=True):
            store.chunks.append(chunk)

    def _take(self, count: int, after: int) -> list[int]:
        """So many free pages: from `after` on, or from the shortest run that has as many, or from the longest ones."""
        taken: list[int] = []
        while count > len(taken):
            lacking = count - len(taken)
            fitting = [run for run in self.free if run[1] - run[0] >= lacking]
            first, end = next(
                (run for run in fitting if run[0] == after),
                min(fitting, key=_length) if fitting else max(self.free, key=_length),
            )
            last = min(end, first + lacking)
            taken += range(first, last)
            self.free.remove((first, end))
            if last < end:
                insort(self.free, (last, end))
        self.holders.update(dict.fromkeys(taken, 1))
        return taken

    def _copy(self, table: list[int], at: int, positions: int) -> None:
        """Put a copy in the place of a page that others hold too, of its first `positions`."""
        old, (new,) = table[at], self._take(1, table[at - 1] + 1 if at else -1)
        if positions > 0:
            for store in self.stores:
                for source, target in zip(store.pages(old, old + 1), store.pages(new, new + 1), strict=True):
                    target[..., :positions, :] = source[..., :positions, :]
        table[at] = new
        self._release([old])
        self.copies += 1

    def _follow(self, slots: Iterable[int]) -> None:
        """Write the tables of these slots to `numbers`."""
        rows, columns = self.numbers.shape
        most = max(map(len, self.tables), default=0)
        if rows < len(self.tables) or columns < most:
            larger = np.zeros((max(len(self.tables), rows), max(columns, most, min(2 * columns, 2 * most))), np.int32)
            larger[:rows, :columns] = self.numbers
            self.numbers = larger
        for slot in slots:
            self.numbers[slot, : len(self.tables[slot])] = self.tables[slot]


def _length(run: Run) -> int:
    return run[1] - run[0]


def runs(pages: Iterable[int]) -> list[Run]:
    """These pages as runs [first, end) of neighbours, in their order."""
    return _joined((page, page + 1) for page in pages)


def _joined(parts: Iterable[Run]) -> list[Run]:
    """The same pages, in as few runs as their order allows."""
    joined: list[Run] = []
    for first, end in parts:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, end))
    return joined
