"""Readable names of single tokens."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend

_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level BPE writes the 256 bytes, and the byte of each.

    Bytes that are printable in Latin-1 stand for themselves, the others for U+0100 onwards in order (Radford et al.
    2019, the encoder of GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class PieceReader:
    """Names tokens of one vocabulary by how its decoder would read them."""

    def __init__(self, backend: Backend) -> None:
        kinds = _kinds(backend.decoder)
        self._backend = backend
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._byte_level = "ByteLevel" in kinds
        self._marked = bool(kinds & {"Metaspace", "Replace"})
        #: Whether the ids of a word do not depend on what comes lines before it, so that a long text may be cut.
        self.local = _is_local(backend)

    def name(self, token: int) -> str:
        if token in self._added:
            return self._added[token]
        piece = self._backend.id_to_token(token)
        if piece is None:
            return f"<{token}>"
        if self._byte_level and BYTE_OF.keys() >= set(piece):
            piece = bytes(BYTE_OF[char] for char in piece).decode(errors="backslashreplace")
        elif self._marked:
            piece = piece.replace("▁", " ")
        return piece.translate(_VISIBLE)


def _is_local(backend: Backend) -> bool:
    """Words are split before they are merged, and no mark is put in front of the whole text."""
    marking = {"Metaspace", "Prepend"}
    return backend.pre_tokenizer is not None and not marking & (
        _kinds(backend.pre_tokenizer) | _kinds(backend.normalizer)
    )


def _kinds(part: Any) -> set[str]:
    """The types of a tokenizer's part and of the parts inside it."""
    found, waiting = set(), [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        state = waiting.pop()
        found.add(state["type"])
        for inside in ("decoders", "pretokenizers", "normalizers"):
            waiting += state.get(inside, [])
    return found
