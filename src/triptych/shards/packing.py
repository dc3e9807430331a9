"""Pieces of documents packed into rows of equal length, so that few documents are cut."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """Positions `[start, stop)` of the piece `item`."""

    item: int
    start: int
    stop: int


def pack(lengths: Sequence[int], rows: int, length: int) -> list[list[Cut]]:
    """Pieces with `rows * length` positions in all, in `rows` rows of exactly `length`.

    A piece of more than `length` positions first fills rows of its own.  What is left is packed by best fit, the
    longest first: each goes whole to the row with the least room that has enough (Johnson 1973; for documents, Ding et
    al. 2024).  Those that fit nowhere whole are cut to fill the rows that have room left, the roomiest first.
    """
    packed: list[list[Cut]] = []
    rest: list[Cut] = []
    for item, size in enumerate(lengths):
        whole = size - size % length
        packed += [[Cut(item, start, start + length)] for start in range(0, whole, length)]
        if size > whole:
            rest.append(Cut(item, whole, size))
    rest.sort(key=lambda cut: cut.start - cut.stop)
    free = [(length, row) for row in range(len(packed), rows)]  # room and row, by room
    packed += [[] for _ in free]
    homeless: list[Cut] = []
    for cut in rest:
        size = cut.stop - cut.start
        at = bisect_left(free, (size, 0))
        if at == len(free):
            homeless.append(cut)
            continue
        room, row = free.pop(at)
        packed[row].append(cut)
        if room > size:
            insort(free, (room - size, row))
    for cut in homeless:
        start = cut.start
        while start < cut.stop:
            room, row = free.pop()
            stop = min(cut.stop, start + room)
            packed[row].append(Cut(cut.item, start, stop))
            if room > stop - start:
                insort(free, (room - stop + start, row))
            start = stop
    return packed
