"""Matching passages of two editions of a play, one in old and one in modern spelling.

Words are compared by a key that ignores spelling.  Runs of words that occur exactly once in each edition are anchors,
of which the longest increasing chain is used (as in patience diff).  The words between two anchors are aligned in the
same way with shorter runs, down to single words.  A passage is a few whole lines of one modern speech whose ends, and
most of whose words, are aligned with one speech of the other edition.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

#: Lengths in words of the runs that are anchors, tried in turn.
_RUNS = (5, 3, 2, 1)
#: The fewest and the most words of a passage, and the share of them, in both editions, that must be aligned.
_MIN_WORDS, _MAX_WORDS, _SHARE = 6, 20, 0.8

_WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*|&")
_TAIL = re.compile(r"'?[,.;:!?)]*")
_DIRECTION = re.compile(r"\[[^\]]*\]")
_FOLIO_DIRECTION = re.compile(r" *(Enter|Exit|Exeunt|Manet|Actus|S\w*ena|Flourish|Alarum|Sound|Sennet|FINIS)\b")
_FOLIO_SPEAKER = re.compile(r" {1,3}(?:[A-Z1-9][A-Za-z']*[ .]{1,2}){1,4}(?<=[.] )")


class _Word(NamedTuple):  # faster to make than a dataclass; a play has 50,000
    key: str
    start: int
    end: int
    line: int
    speech: int


@dataclass(frozen=True)
class _Edition:
    """The text with everything that is not spoken replaced by spaces, and its words."""

    text: str
    words: list[_Word]

    def passage(self, first: int, last: int) -> str:
        """The text from the word `first` to the word `last` and the punctuation behind it, on one line."""
        end = self.words[last].end
        tail = _TAIL.match(self.text, end)
        return " ".join(self.text[self.words[first].start : tail.end() if tail else end].split())


def passages(folio: str, modern: str) -> list[tuple[str, str]]:
    """Passages of 6 to 20 words that both editions have, in the spelling of `folio` and of `modern`, in order."""
    old, new = _edition(_folio_lines(folio)), _edition(_modern_lines(modern))
    partner = align([word.key for word in new.words], [word.key for word in old.words])
    pairs = []
    for first, last in _spans(old, new, partner):
        begin, end = partner[first], partner[last]
        assert begin is not None
        assert end is not None
        pairs.append((old.passage(begin, end), new.passage(first, last)))
    return pairs


def words(text: str) -> list[str]:
    """The words of a passage in lower case, without apostrophes; `&` is one."""
    return [word.lower().replace("'", "") for word in _WORD.findall(text)]


def same_words(old: str, new: str) -> list[tuple[int, int]]:
    """The words that two spellings of a passage share, as pairs of indices into `words` of each, in order."""
    first, second = ([_key(word) for word in _WORD.findall(text)] for text in (old, new))
    return [(i, j) for j, i in enumerate(align(second, first)) if i is not None]


# -- editions to words -----------------------------------------------------------------------------------------------


def _modern_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Each line with spaces for what is not spoken, and whether a speech begins after it.

    Stage directions are in brackets.  A speaker's name is alone on the first line of a paragraph, and occurs again.
    """
    lines = _DIRECTION.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text).split("\n")
    first = [not before.strip() for before in ["", *lines[:-1]]]
    names = Counter(line.strip() for line, begins in zip(lines, first, strict=True) if begins)
    for line, begins in zip(lines, first, strict=True):
        speaker = begins and names[line.strip()] > 1 and len(line.split()) <= 4
        heading = begins and line.startswith(("ACT ", "SCENE ", "Act ", "Scene "))
        yield (" " * len(line) if speaker or heading else line), speaker or heading


def _folio_lines(text: str) -> Iterator[tuple[str, bool]]:
    """The same for the Folio, where a speaker's name is indented and ends with a full stop, and a stage direction
    continues to the next blank line."""
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
        for match in _WORD.finditer(line):
            words.append(_Word(_key(match[0]), offset + match.start(), offset + match.end(), number, speech))
        texts.append(line)
        offset += len(line) + 1
    return _Edition("\n".join(texts), words)


_SAME_LETTER = str.maketrans({"v": "u", "j": "i", "y": "i", "k": "c", "'": None})


@cache
def _key(word: str) -> str:
    """The same key for all spellings of a word: `haue` and `have`, `Ioynt` and `joint`, `Musicke` and `music`."""
    if word == "&":
        word = "and"
    letters = re.sub(r"(.)\1+", r"\1", word.lower().translate(_SAME_LETTER))
    return letters[0] + re.sub(r"[aeiou]", "", letters[1:])


# -- words to aligned words --------------------------------------------------------------------------------------------


def align(a: Sequence[str], b: Sequence[str]) -> list[int | None]:
    """For each item of `a` the index in `b` of the equal item it is aligned with, or None; the indices increase."""
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
            # A stretch begins at an anchor, and the loops above match the run of the anchor as its common start.
            bounds = [(a0, b0), *_anchors(a, b, (a0, a1), (b0, b1), _RUNS[level]), (a1, b1)]
            waiting += [(i, j, k, m, level + 1) for (i, k), (j, m) in pairwise(bounds)]
    return partner


def _anchors(
    a: Sequence[str], b: Sequence[str], within_a: tuple[int, int], within_b: tuple[int, int], run: int
) -> list[tuple[int, int]]:
    """The starts of runs that occur once in both stretches: the longest chain that increases in both."""
    in_a, in_b = _once(a, *within_a, run), _once(b, *within_b, run)
    return _longest_increasing([(i, in_b[gram]) for gram, i in in_a.items() if gram in in_b])


def _once(items: Sequence[str], start: int, end: int, run: int) -> dict[tuple[str, ...], int]:
    """The runs of `run` items that occur once, in order, and where each begins."""
    grams = [tuple(items[i : i + run]) for i in range(start, end - run + 1)]
    counts = Counter(grams)
    return {gram: start + i for i, gram in enumerate(grams) if counts[gram] == 1}


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest chain of `pairs`, ordered by first number, with increasing second numbers (patience sorting)."""
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


# -- aligned words to passages -----------------------------------------------------------------------------------------


def _spans(old: _Edition, new: _Edition, partner: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """First and last word of each passage: the fewest whole lines of a modern speech that `_is_aligned` accepts."""
    for _, speech in groupby(range(len(new.words)), key=lambda index: new.words[index].speech):
        lines = [list(line) for _, line in groupby(speech, key=lambda index: new.words[index].line)]
        at = 0
        while at < len(lines):
            ends = (end for end in range(at, len(lines)) if _is_aligned(old, partner, lines[at][0], lines[end][-1]))
            end = next(ends, None)
            if end is None:
                at += 1
            else:
                yield lines[at][0], lines[end][-1]
                at = end + 1


def _is_aligned(old: _Edition, partner: Sequence[int | None], first: int, last: int) -> bool:
    """Whether a passage has enough words, is aligned at both ends (two words each) within one old speech, and has
    nearly all of its words aligned."""
    count = last - first + 1
    if not _MIN_WORDS <= count <= _MAX_WORDS:
        return False
    begin, second, end, last_but_one = (partner[i] for i in (first, first + 1, last, last - 1))
    if begin is None or second != begin + 1 or end is None or last_but_one != end - 1:
        return False
    paired = sum(partner[i] is not None for i in range(first, last + 1))
    one_speech = old.words[begin].speech == old.words[end].speech
    return one_speech and paired >= _SHARE * max(count, end - begin + 1)
