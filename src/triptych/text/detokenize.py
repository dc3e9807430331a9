"""Text from ids that arrive one at a time, and readable names of single tokens, for the axes of attention maps."""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as Backend

from triptych.errors import InputError
from .tokenizer_limits import steps

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CHARACTER = 4  # most bytes of a character in UTF-8, and so most tokens that one needs
_MOST_PENDING = 32  # tokens without a finished character at their end, from which on they may be bytes of none
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
        if token is True or token is False:
            raise InputError(f"{token} is no token id; ids are integers")
        self._pending.append(token)
        text = self._text()
        if text.endswith(_UNFINISHED):
            part = self._settled(text) if len(self._pending) > _MOST_PENDING else ""
            return part + self._new_part(self._text().rstrip(_UNFINISHED) if part else text.rstrip(_UNFINISHED))
        part = self._new_part(text)
        if text:
            self._context, self._pending, self._returned = self._pending, [], 0
        return part

    def flush(self) -> str:
        """The rest of the text at the end; an unfinished character is U+FFFD."""
        part = self._new_part(self._text())
        self._context, self._pending, self._returned = [], [], 0
        return part

    def _settled(self, text: str) -> str:
        """The new part of all pending tokens but the last few, which become the context; nothing where their text does
        not stand by itself.

        Bytes that are no characters would otherwise all stay pending, and each step would decode all of them.
        """
        before = len(self._decode(self._context)) if self._context else 0
        for count in range(_CHARACTER, 2 * _CHARACTER):  # tokens that are left: no character has more bytes
            first, rest = self._pending[:-count], self._pending[-count:]
            begin = self._decode(self._context + first)[before:]
            if begin + self._decode(first + rest)[len(self._decode(first)) :] == text:
                part = self._new_part(begin)
                self._context, self._pending, self._returned = first, rest, self._returned - len(begin)
                return part
        return ""

    def _text(self) -> str:
        """The text of the pending ids, decoded after the context."""
        context = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(context) :]

    def _new_part(self, text: str) -> str:
        """The part of `text`, the beginning of the pending text, that has not been returned before."""
        part, self._returned = text[self._returned :], max(self._returned, len(text))
        return part


_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
#: Character -> byte, for the characters with which byte-level BPE writes the 256 bytes: those that are printable in
#: Latin-1 as themselves, the others as U+0100 onwards in order (Radford et al. 2019, the encoder of GPT-2).
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


class TokenNames:
    """Names the tokens of one vocabulary as its decoder would read them, with white space made visible."""

    def __init__(self, backend: Backend) -> None:
        decoders = {step["type"] for step in steps(backend.decoder)}
        self._backend = backend
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._byte_level = "ByteLevel" in decoders
        self._marks_spaces = bool(decoders & {"Metaspace", "Replace"})

    def name(self, token: int) -> str:
        """The name of the token id `token`; an id that the vocabulary does not have is `<id>`."""
        return self._added[token] if token in self._added else self.text(token).translate(_VISIBLE)

    def text(self, token: int) -> str:
        r"""The name with white space as it is; the bytes of an unfinished character are `\xe2`."""
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token)
        if piece is None:
            return f"<{token}>"
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            piece = bytes(BYTE_OF[char] for char in piece).decode(errors="backslashreplace")
        elif self._marks_spaces:
            piece = piece.replace("▁", " ")
        return piece
