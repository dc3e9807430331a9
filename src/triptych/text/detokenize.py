"""Text from ids that arrive one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
WITH_SPACE_BEFORE = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def without_spaces(text: str) -> str:
    """`text` without the spaces that a tokenizer of words leaves before punctuation and English endings.

    The replacements and their order are those of `clean_up_tokenization` in transformers.
    """
    for ending in WITH_SPACE_BEFORE:
        text = text.replace(ending, ending.strip())
    return text


class TextStream:
    """Returns the text of a growing list of ids, each part once and only when later ids cannot change it.

    A token may be a part of a character, and what a decoder does with a space depends on the token before.  Each step
    therefore decodes a short window: the tokens of the last finished part, for context, and those since.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []
        self._returned = 0  # characters of the pending text

    def put(self, token: int) -> str:
        """The text that the id `token` completes; empty while a character is unfinished."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED):
            return self._new_part(text.rstrip(_UNFINISHED))
        part = self._new_part(text)
        if text:
            self._context, self._pending, self._returned = self._pending, [], 0
        return part

    def flush(self) -> str:
        """The rest of the text at the end; an unfinished character is U+FFFD."""
        part = self._new_part(self._text())
        self._context, self._pending, self._returned = [], [], 0
        return part

    def _text(self) -> str:
        """The text of the pending ids, decoded after the context."""
        context = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(context) :]

    def _new_part(self, text: str) -> str:
        """What of `text`, the beginning of the pending text, has not been returned before."""
        part, self._returned = text[self._returned :], max(self._returned, len(text))
        return part
