"""Pieces of documents packed into rows of equal length, so that few documents are cut."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

Cut = tuple[int, int, int]  # a piece by its index, and positions [start, stop) of it


def pack(lengths: Sequence[int], rows: int, length: int) -> list[list[Cut]]:
    """Pieces with `rows * length` positions in all, in `rows` rows of exactly `length`.

    A piece of more than `length` positions first fills rows of its own.  What is left is packed by best fit, the
    longest first: each goes whole to the row with the least room that has enough (Johnson 1973; for documents, Ding et
    al. 2024).  Those that fit nowhere whole are cut to fill the rows that have room left, the roomiest first.
    """
    packed: list[list[Cut]] = []
    rest: list[tuple[int, int, int]] = []  # minus the positions, the piece, where they begin
    for item, size in enumerate(lengths):
        whole = size - size % length
        if whole:
            packed += [[(item, start, start + length)] for start in range(0, whole, length)]
        if size > whole:
            rest.append((whole - size, item, whole))
    rest.sort()
    free = [(length, row) for row in range(len(packed), rows)]  # room and row, by room
    packed += [[] for _ in free]
    homeless: list[tuple[int, int, int]] = []
    for one in rest:
        size, item, start = -one[0], one[1], one[2]
        at = bisect_left(free, (size, 0))
        if at == len(free):
            homeless.append(one)
            continue
        room, row = free.pop(at)
        packed[row].append((item, start, start + size))
        if room > size:
            insort(free, (room - size, row))
    for size, item, start in homeless:
        end = start - size
        while start < end:
            room, row = free.pop()
            stop = min(end, start + room)
            packed[row].append((item, start, stop))
            if room > stop - start:
                insort(free, (room - stop + start, row))
            start = stop
    return packed
