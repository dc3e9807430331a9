"""Stop strings: whether the text of a growing list of ids holds one, at a cost per token that does not grow.

`LiveRow.ends` asks after each new id; generation.py cuts the text with `before_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.errors import InputError, shown

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
Decode = Callable[[Sequence[int]], str]
MARGIN = 8  # characters before a stop string that may change how it is written, as a space before a comma may go


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """A stop string, or several.  Raises InputError for an empty one, and for anything that is no string."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise InputError(f"stop={shown(stop)} must be a string or a list of strings")
    if any(not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text) for text in strings):
        raise InputError(f"stop={shown(stop)} has a lone surrogate, which no text holds; leave it out")
    if "" in strings:
        raise InputError("stop has an empty string, which is in every text; leave it out")
    return tuple(strings)


def before_stop(text: str, stop: Sequence[str]) -> str | None:
    """`text` up to the first of the strings in `stop`; None where it holds none of them."""
    places = [text.find(end) for end in stop if end in text]
    return text[: min(places)] if places else None


class StopDetector:
    """Says after each id whether the text of all ids holds one of the strings.

    Only the newest ids are decoded, as many as a stop string and a margin need; what they hold is confirmed by decoding
    all of them once.  The front is dropped only before a token that begins a character, where what remains decodes to
    the end of what was there.
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self.stop, self._decode = stop, decode
        self._needed = max(map(len, stop)) + MARGIN
        self._ids: list[int] = []
        self._tail: list[int] = []
        self._next_cut = 2 * self._needed

    def put(self, token: int) -> bool:
        """Add an id.  True when the text now holds a stop string."""
        self._ids.append(token)
        self._tail.append(token)
        text = self._decode(self._tail)
        if any(end in text for end in self.stop) and any(end in self._decode(self._ids) for end in self.stop):
            return True
        if len(text) >= self._next_cut:
            self._cut(text)
        return False

    def _cut(self, text: str) -> None:
        """Drop the front of the tail, as far as the rest still has the characters that are needed."""
        for at in range(len(self._tail) - 1, 0, -1):
            rest = self._decode(self._tail[at:])
            if len(rest) < self._needed:
                continue
            if text.endswith(rest) and _UNFINISHED not in self._decode(self._tail[at : at + 1]):
                self._tail = self._tail[at:]
                self._next_cut = 2 * max(self._needed, len(rest))
                return
        self._next_cut = 2 * len(text)  # no place to cut: try again when there is more
