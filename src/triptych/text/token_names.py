"""Readable names of single tokens, for the axes of attention maps."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from triptych.text.tokenizer_limits import steps

_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, for the characters with which byte-level BPE writes the 256 bytes.

    Bytes that are printable in Latin-1 are written as themselves, the others as U+0100 onwards in order (Radford et al.
    2019, the encoder of GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


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
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token)
        if piece is None:
            return f"<{token}>"
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            piece = bytes(BYTE_OF[char] for char in piece).decode(errors="backslashreplace")
        elif self._marks_spaces:
            piece = piece.replace("▁", " ")
        return piece.translate(_VISIBLE)
