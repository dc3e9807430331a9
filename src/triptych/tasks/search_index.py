"""Texts cut into passages, and the vectors of these, kept between searches in a file.

The index of a folder, a model and its settings is one safetensors file: `vectors` [N, D] in fp32, `spans` [N, 4] (the
fields of `Span`) and `counts` [F], the passages of each file, and in its metadata the SHA-256 of the bytes of each
file.  Nothing of the texts is in it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from triptych.checkpoints import atomic_write, recover
from triptych.checkpoints.safetensors import open_file
from triptych.errors import CheckpointError, InputError
from triptych.files import exists
from triptych.text import Tokenizer

MOST_CHARACTERS = 2000  # of a unit: text without any end of a sentence or line is cut there
UNITS_AT_ONCE = 4096  # tokenized in one call
FORMAT = "triptych search index 2"
_MARK = b"triptych search index "  # in every index, damaged or of another version
# The end of a sentence or of a line, with the white space after it.
_END = re.compile(r"[.!?…]['\"”’)\]]{0,3}\s+|\n\s*")


@dataclass(frozen=True)
class Span:
    """A passage as the characters `[begin, end)` of its file, and its first and last line, counted from 1."""

    begin: int
    end: int
    line: int
    last_line: int


@dataclass(frozen=True)
class _Unit:
    """A sentence, a line, or a part of one that is too long."""

    begin: int
    end: int
    tokens: int
    ends_paragraph: bool


def cut(text: str, tokenizer: Tokenizer, tokens: int, overlap: int) -> list[Span]:
    """Passages of at most `tokens` tokens, special ones not counted, that end where a sentence or a line ends.

    A passage of at least half that length ends with its paragraph.  Elsewhere the next passage begins with the last
    sentences of the one before, up to `overlap` tokens.  A sentence longer than a passage is cut between its tokens.
    """
    units = list(_units(text, tokenizer, tokens))
    newlines = [match.start() for match in re.finditer("\n", text)]
    spans = []
    for first, last in _groups(units, tokens, overlap):
        passage = text[units[first].begin : units[last - 1].end].rstrip()
        end = units[first].begin + len(passage)
        begin = end - len(passage.lstrip())
        if begin < end and any(unit.tokens for unit in units[first:last]):
            spans.append(Span(begin, end, 1 + bisect_right(newlines, begin), 1 + bisect_right(newlines, end - 1)))
    return spans


def _groups(units: Sequence[_Unit], tokens: int, overlap: int) -> Iterator[tuple[int, int]]:
    """The units of each passage, as the range `[first, last)`."""
    first = 0
    while first < len(units):
        last, total, whole = first, 0, False
        while last < len(units) and not whole and (last == first or total + units[last].tokens <= tokens):
            total += units[last].tokens
            whole = units[last].ends_paragraph and 2 * total >= tokens
            last += 1
        yield first, last
        if last == len(units):
            return
        shared, most = 0, min(overlap, tokens - units[last].tokens)  # the next passage has at least one new unit
        again = last
        while not whole and again - 1 > first and shared + units[again - 1].tokens <= most:
            again -= 1
            shared += units[again].tokens
        first = again


def _units(text: str, tokenizer: Tokenizer, tokens: int) -> Iterator[_Unit]:
    ends = [match.end() for match in _END.finditer(text)]
    borders = [0]
    for end in [*ends, len(text)]:
        while end - borders[-1] > MOST_CHARACTERS:
            near = text.rfind(" ", borders[-1] + MOST_CHARACTERS // 2, borders[-1] + MOST_CHARACTERS)
            borders.append(borders[-1] + MOST_CHARACTERS if near < 0 else near + 1)
        if end > borders[-1]:
            borders.append(end)
    for at in range(0, len(borders) - 1, UNITS_AT_ONCE):
        places = list(pairwise(borders[at : at + UNITS_AT_ONCE + 1]))
        rows = tokenizer.encode_batch([text[begin:end] for begin, end in places], special=False)
        for (begin, end), row in zip(places, rows, strict=True):
            tail = text[begin + len(text[begin:end].rstrip()) : end]  # the white space at its end
            ends_paragraph = tail.count("\n") > 1
            if len(row) <= tokens:
                yield _Unit(begin, end, len(row), ends_paragraph)
                continue
            (encoded,) = tokenizer.encode_with_offsets(text[begin:end])  # cut between its tokens
            starts = [a for (a, _), of in zip(encoded.offsets, encoded.sequence_ids, strict=True) if of is not None]
            firsts = range(0, len(starts), tokens)
            parts = pairwise([begin, *(begin + starts[i] for i in firsts[1:]), end])
            for i, (first, last) in zip(firsts, parts, strict=False):
                yield _Unit(first, last, len(starts[i : i + tokens]), ends_paragraph and last == end)


@dataclass(frozen=True, eq=False)
class Embedded:
    """The passages of one file, and their vectors [N, D] of length 1 in fp32."""

    spans: tuple[Span, ...]
    vectors: NDArray[np.float32]


def read_index(file: Path, width: int) -> dict[str, Embedded]:
    """The contents of the index `file`, by the SHA-256 of each text; nothing where there is no file.

    Raises CheckpointError for anything but an index whose vectors have `width` numbers.
    """
    if not exists(file):
        return {}
    source = open_file(file)
    digests = _digests(source.metadata)
    if digests is None or source.infos.keys() != {"vectors", "spans", "counts"}:
        raise CheckpointError(f"{file}: is no index of a search")
    n = source.infos["spans"].shape[0] if source.infos["spans"].shape else 0
    shapes = {"vectors": ("F32", (n, width)), "spans": ("I64", (n, 4)), "counts": ("I64", (len(digests),))}
    for name, (dtype, shape) in shapes.items():
        info = source.infos[name]
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointError(f"{file}: {name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}")
    vectors, spans, counts = (source.read(name).numpy().copy() for name in shapes)
    begin, end, line, last_line = spans.T
    ordered = (begin >= 0) & (begin < end) & (line >= 1) & (line <= last_line)
    if (counts < 0).any() or counts.sum() != n or not ordered.all() or not np.isfinite(vectors).all():
        raise CheckpointError(f"{file}: its passages do not fit together")
    ends = np.cumsum(counts)[:-1]
    of_files = zip(digests, np.split(spans, ends), np.split(vectors, ends), strict=False)  # none of no file
    return {digest: Embedded(tuple(Span(*row) for row in rows.tolist()), own) for digest, rows, own in of_files}


def check_place(file: Path) -> None:
    """Raise InputError for a directory, and for a file that is not empty and was never an index."""
    old = b""
    with suppress(OSError):  # what cannot be read cannot be replaced either
        old = b"-" if file.is_dir() else file.read_bytes()
    if old and _MARK not in old:
        raise InputError(f"{file} is no index of a search, and would be replaced by one; choose another name")


def write_index(file: Path, files: Mapping[str, Embedded], width: int) -> None:
    """Replace `file` as a whole; of two processes the last one's index stays.

    Raises CheckpointError, with the old file as it was, where that cannot be written.
    """
    parts = list(files.values())
    spans = [astuple(span) for part in parts for span in part.spans]
    content = save(
        {
            "vectors": np.concatenate([np.zeros((0, width), np.float32), *(part.vectors for part in parts)]),
            "spans": np.asarray(spans, np.int64).reshape(-1, 4),
            "counts": np.asarray([len(part.spans) for part in parts], np.int64),
        },
        {"format": FORMAT, "digests": " ".join(files)},
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{file.parent}: cannot be made ({error.strerror})") from None
    recover(file)
    atomic_write(file, content)


def _digests(metadata: Mapping[str, str]) -> list[str] | None:
    """The SHA-256 of each file; None where the metadata are not those of an index."""
    digests = metadata.get("digests", "").split()
    known = metadata.get("format") == FORMAT and len(set(digests)) == len(digests)
    return digests if known and all(re.fullmatch("[0-9a-f]{64}", one) for one in digests) else None
