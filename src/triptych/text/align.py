"""Two editions of one play to pairs of matching passages.

Words are compared by a key that forgets spelling.  Runs of words that occur once in both editions anchor the
alignment, the longest increasing chain of anchors is kept (a patience difference), and the stretches between anchors
are aligned in the same way with shorter runs, down to single words.  A passage is then a few whole lines of one modern
speech whose ends, and most of whose words, have partners in one speech of the other edition.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

#: Lengths of the runs that anchor, tried in turn.
_RUNS = (5, 3, 2, 1)
#: Words of a passage, and the share of them, on either side, that must have partners.
_FEWEST, _MOST, _SHARE = 6, 20, 0.8

_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*|&")
_TAIL = re.compile(r"'?[,.;:!?)]*")
_DIRECTION = re.compile(r"\[[^\]]*\]")
_FOLIO_DIRECTION = re.compile(r" *(Enter|Exit|Exeunt|Manet|Actus|S\w*ena|Flourish|Alarum|Sound|Sennet|FINIS)\b")
_FOLIO_SPEAKER = re.compile(r" {1,3}(?:[A-Z1-9][A-Za-z']*[ .]{1,2}){1,4}(?<=[.] )")


class _Word(NamedTuple):  # not a dataclass: a play has 50,000 of them
    key: str
    start: int
    end: int
    line: int
    speech: int


@dataclass(frozen=True)
class _Edition:
    """What is spoken, all else blanked out, and its words."""

    text: str
    words: list[_Word]

    def passage(self, first: int, last: int) -> str:
        """The text from one word to another with the punctuation behind it, on one line."""
        end = self.words[last].end
        tail = _TAIL.match(self.text, end)
        return " ".join(self.text[self.words[first].start : tail.end() if tail else end].split())


def passages(folio: str, modern: str) -> list[tuple[str, str]]:
    """Pairs of the same 6 to 20 words in the spelling of `folio` and of `modern`, in order."""
    old, new = _edition(_folio_lines(folio)), _edition(_modern_lines(modern))
    partner = align([word.key for word in new.words], [word.key for word in old.words])
    found = []
    for first, last in _spans(old, new, partner):
        begin, end = partner[first], partner[last]
        assert begin is not None
        assert end is not None
        found.append((old.passage(begin, end), new.passage(first, last)))
    return found


# -- editions to words -----------------------------------------------------------------------------------------------


def _modern_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Each line with what is not spoken blanked, and whether a speech begins after it.

    Directions stand in brackets; a speaker's name stands alone on the first line of a paragraph, more than once.
    """
    lines = _DIRECTION.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text).split("\n")
    first = [not before.strip() for before in ["", *lines[:-1]]]
    names = Counter(line.strip() for line, begins in zip(lines, first, strict=True) if begins)
    for line, begins in zip(lines, first, strict=True):
        speaker = begins and names[line.strip()] > 1 and len(line.split()) <= 4
        heading = begins and line.startswith(("ACT ", "SCENE ", "Act ", "Scene "))
        yield (" " * len(line) if speaker or heading else line), speaker or heading


def _folio_lines(text: str) -> Iterator[tuple[str, bool]]:
    """The same for the Folio: a speaker's name is indented and ends in a point, a direction runs to a blank line."""
    direction = False
    for line in text.split("\n"):
        speaker = _FOLIO_SPEAKER.match(line)
        direction = bool(line.strip()) and not speaker and (direction or _FOLIO_DIRECTION.match(line) is not None)
        named = speaker.end() if speaker else 0
        yield (" " * len(line) if direction else " " * named + line[named:]), bool(speaker)


def _edition(lines: Iterable[tuple[str, bool]]) -> _Edition:
    texts, words, offset, speech = [], [], 0, 0
    for number, (line, begins) in enumerate(lines):
        speech += begins
        for found in _WORD.finditer(line):
            words.append(_Word(_key(found[0]), offset + found.start(), offset + found.end(), number, speech))
        texts.append(line)
        offset += len(line) + 1
    return _Edition("\n".join(texts), words)


_SAME = str.maketrans({"v": "u", "j": "i", "y": "i", "k": "c", "'": None})


@cache
def _key(word: str) -> str:
    """A word without its spelling: `haue` and `have`, `Ioynt` and `joint`, `Musicke` and `music` have one key."""
    if word == "&":
        word = "and"
    letters = re.sub(r"(.)\1+", r"\1", word.lower().translate(_SAME))
    return letters[0] + re.sub(r"[aeiou]", "", letters[1:])


# -- words to partners -----------------------------------------------------------------------------------------------


def align(a: Sequence[str], b: Sequence[str]) -> list[int | None]:
    """For each item of `a` the index of its equal partner in `b`, or None; partners never cross."""
    partner: list[int | None] = [None] * len(a)
    waiting = [(0, len(a), 0, len(b), 0)]
    while waiting:
        a0, a1, b0, b1, level = waiting.pop()
        while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
            partner[a0] = b0
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
            partner[a1] = b1
        if level < len(_RUNS) and a0 < a1 and b0 < b1:
            # Each stretch begins at an anchor, whose run is then matched as the stretch's common start.
            marks = [(a0, b0), *_anchors(a, b, (a0, a1), (b0, b1), _RUNS[level]), (a1, b1)]
            waiting += [(i, j, k, m, level + 1) for (i, k), (j, m) in pairwise(marks)]
    return partner


def _anchors(
    a: Sequence[str], b: Sequence[str], within_a: tuple[int, int], within_b: tuple[int, int], run: int
) -> list[tuple[int, int]]:
    """Where runs that occur once in both stretches begin, as many as go up in both."""
    in_a, in_b = _once(a, *within_a, run), _once(b, *within_b, run)
    return _longest_increasing([(i, in_b[gram]) for gram, i in in_a.items() if gram in in_b])


def _once(items: Sequence[str], start: int, end: int, run: int) -> dict[tuple[str, ...], int]:
    """The runs that occur once, in order, and where."""
    grams = [tuple(items[i : i + run]) for i in range(start, end - run + 1)]
    counts = Counter(grams)
    return {gram: start + i for i, gram in enumerate(grams) if counts[gram] == 1}


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pairs with increasing first numbers, the longest chain whose second ones increase too (patience sorting)."""
    tops: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for index, (_, value) in enumerate(pairs):
        pile = bisect_left(tops, value)
        before.append(last[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [value]
        last[pile : pile + 1] = [index]
    chain, index = [], last[-1] if last else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


# -- partners to passages --------------------------------------------------------------------------------------------


def _spans(old: _Edition, new: _Edition, partner: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """First and last word of the passages: in each modern speech, the fewest whole lines that hold together."""
    for _, speech in groupby(range(len(new.words)), key=lambda index: new.words[index].speech):
        lines = [list(line) for _, line in groupby(speech, key=lambda index: new.words[index].line)]
        at = 0
        while at < len(lines):
            ends = (end for end in range(at, len(lines)) if _confident(old, partner, lines[at][0], lines[end][-1]))
            end = next(ends, None)
            if end is None:
                at += 1
            else:
                yield lines[at][0], lines[end][-1]
                at = end + 1


def _confident(old: _Edition, partner: Sequence[int | None], first: int, last: int) -> bool:
    """Long enough, both ends paired together with a neighbour, one old speech, and hardly a word without partner."""
    count = last - first + 1
    if not _FEWEST <= count <= _MOST:
        return False
    begin, second, end, last_but_one = (partner[i] for i in (first, first + 1, last, last - 1))
    if begin is None or second != begin + 1 or end is None or last_but_one != end - 1:
        return False
    paired = sum(partner[i] is not None for i in range(first, last + 1))
    whole = old.words[begin].speech == old.words[end].speech
    return whole and paired >= _SHARE * max(count, end - begin + 1)
