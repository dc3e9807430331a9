"""The text files of a folder, and the passages that they are cut into."""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych.errors import InputError, TextError
from triptych.files import read_regular
from triptych.text import Tokenizer

MOST_BYTES = 8 << 20  # of a file; larger ones are data more often than text
MOST_TOTAL = 1 << 30  # bytes of all files together, which are kept in memory
MOST_CHARACTERS = 2000  # of a unit: text without any end of a sentence or line is cut there
UNITS_AT_ONCE = 4096  # tokenized in one call
# The end of a sentence or of a line, with the white space after it.
_END = re.compile(r"[.!?…]['\"”’)\]]{0,3}\s+|\n\s*")


@dataclass(frozen=True)
class TextFile:
    """A file of a folder: its path inside it with `/` between the parts, its text, and the SHA-256 of its bytes."""

    name: str
    text: str
    digest: str


@dataclass
class Folder:
    """The text files of a folder in the order of their names, and how many others were skipped for each reason."""

    files: list[TextFile] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    total: int = 0  # bytes of the files

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def read_folder(folder: str | Path, *, follow_links: bool = False) -> Folder:
    """The files below `folder` that hold UTF-8 text.

    Skipped and counted: hidden files and folders, symbolic links (with `follow_links` they are followed, each folder
    once), files above `MOST_BYTES`, files that are not UTF-8 or hold a zero byte, files without text, what cannot be
    read, and pipes and devices.  Bytes of a name that are not UTF-8 are written as `\\xNN`.

    Raises InputError where `folder` is no folder that can be read, and where its files have more than `MOST_TOTAL`
    bytes.
    """
    root = Path(folder)
    if not str(folder) or "\0" in str(folder) or not root.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give the folder whose files are to be searched")
    contents = Folder()
    visited: set[tuple[int, int]] = set()
    waiting: list[tuple[Path, str]] = [(root, "")]
    while waiting:
        directory, name = waiting.pop()
        try:
            status = directory.stat()
            entries = sorted(os.scandir(directory), key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            if not name:
                raise InputError(f"{directory}: the folder cannot be read ({error.strerror})") from None
            contents.skip("unreadable")
            continue
        if (status.st_dev, status.st_ino) in visited:
            contents.skip("links to a folder that is read already")
            continue
        visited.add((status.st_dev, status.st_ino))
        folders = []
        for entry in entries:
            if entry.name.startswith("."):
                contents.skip("hidden")
            elif entry.is_symlink() and not follow_links:
                contents.skip("symbolic links")
            elif _is_folder(entry):
                folders.append((Path(entry.path), f"{name}{entry.name}/"))
            else:
                _read(Path(entry.path), name + entry.name, contents)
        waiting += reversed(folders)  # the last one is read first
    contents.files.sort(key=lambda file: file.name)
    return contents


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle: reading it as a file fails too, and counts it
        return False


def _read(path: Path, name: str, contents: Folder) -> None:
    """Add the file to `contents`, or count why it is skipped."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return contents.skip(f"larger than {MOST_BYTES >> 20} MiB")
        data = read_regular(path, MOST_BYTES, TextError)
    except (OSError, TextError):
        return contents.skip("unreadable")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return contents.skip("binary or not UTF-8")
    if "\0" in text:
        return contents.skip("binary or not UTF-8")
    if not text.strip():
        return contents.skip("without text")
    contents.total += len(data)
    if contents.total > MOST_TOTAL:
        raise InputError(f"the folder holds more than {MOST_TOTAL >> 30} GiB of text; search a folder inside it")
    readable = os.fsencode(name).decode("utf-8", "backslashreplace")
    contents.files.append(TextFile(readable, text, hashlib.sha256(data).hexdigest()))
    return None


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
        begin, end = units[first].begin, units[last - 1].end
        passage = text[begin:end]
        begin += len(passage) - len(passage.lstrip())
        end -= len(passage) - len(passage.rstrip())
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
        places = list(zip(borders[at : at + UNITS_AT_ONCE], borders[at + 1 : at + 1 + UNITS_AT_ONCE], strict=False))
        rows = tokenizer.encode_batch([text[begin:end] for begin, end in places], special=False)
        for (begin, end), row in zip(places, rows, strict=True):
            tail = text[begin + len(text[begin:end].rstrip()) : end]  # the white space at its end
            ends_paragraph = tail.count("\n") > 1
            if len(row) <= tokens:
                yield _Unit(begin, end, len(row), ends_paragraph)
            else:
                yield from _parts(text, begin, end, tokenizer, tokens, ends_paragraph)


def _parts(
    text: str, begin: int, end: int, tokenizer: Tokenizer, tokens: int, ends_paragraph: bool
) -> Iterator[_Unit]:  # fmt: skip
    """A unit of too many tokens, cut between these."""
    (encoded,) = tokenizer.encode_with_offsets(text[begin:end])
    starts = [a for (a, _), of in zip(encoded.offsets, encoded.sequence_ids, strict=True) if of is not None]
    firsts = range(0, len(starts), tokens)
    borders = [0, *(starts[i] for i in firsts[1:]), end - begin]
    for number, i in enumerate(firsts):
        last = number == len(firsts) - 1
        yield _Unit(
            begin + borders[number], begin + borders[number + 1], len(starts[i : i + tokens]), ends_paragraph and last
        )
