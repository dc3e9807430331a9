"""Text from ids that arrive one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CLOSE_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def without_spaces(text: str) -> str:
    """`text` without the spaces that a tokenizer of words leaves before marks and English endings."""
    for one in _CLOSE_UP:
        text = text.replace(one, one.strip())
    return text


class Stream:
    """Gives the text of a growing list of ids, each part once and only when later ids cannot change it.

    A token may be a piece of a character, and what a decoder does with a space depends on the token before, so
    each step decodes a short window: the tokens of the last finished part, for context, and those since.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []
        self._given = 0

    def put(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED):
            return self._give(text.rstrip(_UNFINISHED))
        given = self._give(text)
        if text:
            self._context, self._pending, self._given = self._pending, [], 0
        return given

    def flush(self) -> str:
        """What is left at the end: an unfinished character, as U+FFFD."""
        given = self._give(self._text())
        self._context, self._pending, self._given = [], [], 0
        return given

    def _text(self) -> str:
        """The text of the pending ids, read after the context."""
        context = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(context) :]

    def _give(self, text: str) -> str:
        part, self._given = text[self._given :], max(self._given, len(text))
        return part
