"""SentencePiece model files: the pieces and the settings that decide how a text is split.

The file is a protocol buffer (github.com/google/sentencepiece, src/sentencepiece_model.proto).  The reader here knows
the four wire types and the fields named below; it skips all other fields.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.errors import TextError
from triptych.files import read_regular

MAX_BYTES = 1 << 28  # of a file; the largest known have 2^24
MAX_PIECE = 1 << 10  # characters; BPE tries every way to split a piece in two
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # of a piece; GGUF has the same numbers
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class VocabularyPiece:
    """One entry of the vocabulary; its id is its position in the file."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class Pieces:
    """The contents of a model file: vocabulary, algorithm, and the normalization the model was trained with."""

    pieces: tuple[VocabularyPiece, ...]
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    charsmap: bytes = b""  # a compiled table of replacements, as `normalizers.Precompiled` takes it

    def of_kind(self, *kinds: int) -> list[str]:
        """The texts of the pieces of these kinds, in order."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def read(file: Path) -> Pieces:
    """The model in `file`.  Raises TextError for a file that cannot be read or breaks the format."""
    data = read_regular(file, MAX_BYTES, TextError)
    try:
        return parse(data)
    except (Malformed, UnicodeDecodeError) as error:
        raise TextError(f"{file} is not a SentencePiece model: {error}") from None


class Malformed(Exception):
    """Bytes that break the format; the message says how."""


def parse(data: bytes) -> Pieces:
    """The model in the bytes of a file.  Raises Malformed, or UnicodeDecodeError for a piece that is not UTF-8."""
    pieces: list[VocabularyPiece] = []
    trainer = normalizer = b""
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_as_bytes(value)))
        elif number == 2:
            trainer = _as_bytes(value)
        elif number == 3:
            normalizer = _as_bytes(value)
    if not pieces:
        raise Malformed("it has no pieces")
    settings, charsmap = dict(_fields(trainer)), _as_bytes(dict(_fields(normalizer)).get(2, b""))
    unk, algorithm = _as_int(settings.get(40, 0)), _as_int(settings.get(3, UNIGRAM))
    if algorithm not in (UNIGRAM, BPE):
        raise Malformed(f"its algorithm is number {algorithm}; unigram (1) and BPE (2) are known")
    if unk >= len(pieces):
        raise Malformed(f"its unknown piece is number {unk} of {len(pieces)}")
    check_charsmap(charsmap)
    return Pieces(tuple(pieces), algorithm, bool(_as_int(settings.get(35, 0))), unk, charsmap)


def check_charsmap(data: bytes) -> None:
    """Raise Malformed for a table of replacements that points outside itself; the library reads it without a check.

    The table is the size of a double-array trie in bytes, its 32-bit units (Yata, darts-clone), and the replacements,
    each ended by a zero byte.  An inner unit (bit 31 clear) points at a block of 256 units; where its bit 8 is set, the
    first unit of the block holds the offset of a replacement.
    """
    if not data:
        return
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 0 < size <= len(data) - 4:
        raise Malformed(f"its table of replacements should have {size} bytes, and {len(data) - 4} are left")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = np.frombuffer(data[4 + size :] + b"\0", np.uint8)
    inner = units >> 31 == 0
    base = np.arange(len(units)) ^ (units >> 10 << ((units & 512) >> 6))
    if bool((base[inner] | 255).max(initial=0) >= len(units)):
        raise Malformed("its table of replacements points outside itself")
    offsets = units[base[inner & (units >> 8 & 1 == 1)]] & 0x7FFF_FFFF
    if bool((offsets >= len(texts)).any()) or bool((texts[offsets] & 0xC0 == 0x80).any()):
        raise Malformed("its table of replacements has one that begins outside it or inside a character")


def _piece(data: bytes) -> VocabularyPiece:
    fields = dict(_fields(data))
    score = _as_bytes(fields.get(2, bytes(4)))
    if len(score) != 4:
        raise Malformed("a score is not a 32-bit number")
    text = _as_bytes(fields.get(1, b"")).decode()
    if not 0 < len(text) <= MAX_PIECE:
        raise Malformed(f"a piece of {len(text)} characters; 1 to {MAX_PIECE} are allowed")
    (number,) = struct.unpack("<f", score)
    if not math.isfinite(number):
        raise Malformed(f"the score of {text[:40]!r} is not finite")
    return VocabularyPiece(text, number, _as_int(fields.get(3, NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a message: an int for a varint, else bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise Malformed(f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise Malformed(f"field {number} needs {size} bytes at byte {at}, {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Malformed("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise Malformed(f"a number before byte {at} has no end")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise Malformed("a number stands where bytes belong")
    return value


def _as_int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise Malformed("bytes stand where a number belongs")
    return value
