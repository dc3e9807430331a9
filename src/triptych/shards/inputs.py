"""Files of texts, cut into parts: each part becomes one shard, so that a part can be tokenized again alone.

Where a part begins and ends follows from the files and `shard_bytes` alone.  A data set of the hub can be read once, in
its order: its parts carry their texts, and a digest of them.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from triptych.errors import FetchError, InputError, TextError, counted, library, nearest, shown
from triptych.files import exists
from triptych.text.record_files import Located, json_rows, open_parquet, parquet_rows, separated_rows
from .manifest import InputEntry, Manifest

HUB = "hub:"
_SEPARATED = {".csv": ",", ".tsv": "\t"}
RECORDS = (".jsonl", ".parquet", *_SEPARATED)
_JUDGED = 1 << 13  # bytes at the beginning of a file in a folder by which it is known as text
_LINE = 1 << 20  # bytes after a place to cut a text in which the end of a line is searched


@dataclass(frozen=True)
class Piece:
    """A stretch of a file: bytes `[start, stop)`, of Parquet row groups; `weight` is its size in bytes."""

    path: str
    start: int
    stop: int
    weight: int


@dataclass(frozen=True)
class Part:
    """What becomes one shard: pieces of files, or `texts` with their digest."""

    pieces: tuple[Piece, ...] = ()
    texts: tuple[str, ...] = ()
    digest: str = ""

    @property
    def weight(self) -> int:
        """Bytes of the pieces, characters of the texts."""
        return sum(piece.weight for piece in self.pieces) + sum(map(len, self.texts))

    def to_json(self) -> dict[str, object]:
        """What `from_json` makes the part of again."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        return cls(tuple(Piece(**piece) for piece in values["pieces"]), tuple(values["texts"]), values["digest"])


def list_inputs(inputs: Sequence[str | Path]) -> tuple[list[InputEntry], list[str]]:
    """The files that `inputs` name, those of folders in the order of their names, and notes on what was skipped.

    In a folder, hidden files and those that are no text are skipped.  Raises TextError for a path with nothing, for a
    folder without texts, and for a file that two inputs name.
    """
    entries, notes = list[InputEntry](), list[str]()
    for one in inputs:
        if not isinstance(one, str | Path) or not str(one):
            raise InputError(f"{shown(one)} is not the path of an input; give files, folders or hub:org/name")
        if str(one).startswith(HUB):
            entries.append(InputEntry(path=str(one)))
            continue
        path = Path(os.path.abspath(one))
        if not exists(path):
            raise TextError(
                f"no file or folder {shown(str(one))}; give texts, .jsonl, .csv, .tsv, .parquet or hub:org/name"
            )
        if path.is_dir():
            files, skipped = _files_below(path)
            if not files:
                raise TextError(f"{one} holds no text; give a folder of texts or of files of records")
            notes += [f"{one}: {counted(skipped, 'file')} skipped, which are no UTF-8 text"] if skipped else []
        elif path.is_file():
            files = [path]
        else:
            raise TextError(f"{one} is a pipe or a device; give a regular file")
        for file in files:
            status = file.stat()
            entries.append(InputEntry(path=str(file), size=status.st_size, changed=status.st_mtime_ns))
    names = [entry.path for entry in entries]
    if len(set(names)) < len(names):
        raise InputError(f"{shown(max(names, key=names.count))} is named twice; each input is read once")
    return entries, notes


def _files_below(folder: Path) -> tuple[list[Path], int]:
    """The files of texts and records below a folder, and how many others there are."""
    files, skipped = list[Path](), 0
    for directory, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            file = Path(directory, name)
            if file.suffix.lower() in RECORDS or _is_text(file):
                files.append(file)
            else:
                skipped += 1
    return files, skipped


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            beginning = opened.read(_JUDGED) if file.is_file() else b"\0"
        beginning.decode("utf-8")
    except UnicodeDecodeError as error:  # a character may be cut off at the end
        return error.end == len(beginning) == _JUDGED and error.reason == "unexpected end of data"
    except OSError:
        return False
    return b"\0" not in beginning


def parts(plan: Manifest, hub: Hub) -> Iterator[Part]:
    """The parts of all inputs, in order."""
    waiting, weight = list[Piece](), 0
    for entry in plan.inputs:
        if entry.path.startswith(HUB):
            if waiting:
                yield Part(tuple(waiting))
            waiting, weight = [], 0
            yield from _once(hub(entry.path.removeprefix(HUB), plan.field), plan.shard_bytes)
            continue
        for piece in _pieces(entry, plan):
            waiting.append(piece)
            weight += piece.weight
            if weight >= plan.shard_bytes:
                yield Part(tuple(waiting))
                waiting, weight = [], 0
    if waiting:
        yield Part(tuple(waiting))


def _pieces(entry: InputEntry, plan: Manifest) -> Iterator[Piece]:
    """The pieces of a file, of about `plan.shard_bytes` bytes each."""
    path, step = Path(entry.path), plan.shard_bytes
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        groups = open_parquet(path).metadata
        for i in range(groups.num_row_groups):
            yield Piece(entry.path, i, i + 1, groups.row_group(i).total_byte_size)
        return
    if entry.size <= step:
        ends: Iterable[int] = ()
    elif suffix in _SEPARATED:
        ends = _ends_of_rows(path, _SEPARATED[suffix], step)
    else:
        text = suffix != ".jsonl"
        mark = (plan.separator or "\n") if text else "\n"
        ends = _ends_of_marks(path, entry.size, step, mark.encode(), anywhere=text and plan.separator is None)
    start = 0
    for end in (*ends, entry.size):
        if start < end <= entry.size:
            yield Piece(entry.path, start, end, end - start)
            start = end


def _ends_of_marks(path: Path, size: int, step: int, mark: bytes, *, anywhere: bool) -> Iterator[int]:
    """Of each multiple of `step` the end of the next `mark`; with `anywhere`, where there is none within `_LINE` bytes,
    the end of the character there."""
    with path.open("rb") as file:
        last = 0
        for place in range(step, size, step):
            if place <= last:
                continue
            file.seek(max(last, place - len(mark)))
            at, read = file.tell(), b""
            while (found := read.find(mark)) < 0 and (block := file.read(_LINE)):
                read += block
                if anywhere and len(read) >= _LINE:
                    break
            if found >= 0:
                last = at + found + len(mark)
            elif anywhere and read:
                last = at + next((i for i, byte in enumerate(read[1:5], 1) if byte & 0xC0 != 0x80), 1)
            else:
                return
            yield last


def _ends_of_rows(path: Path, separator: str, step: int) -> Iterator[int]:
    """Ends of rows of CSV, `step` bytes or more apart: only a reader of the whole file knows them, since a quoted field
    may hold line breaks."""
    read = 0

    def lines(file: Iterable[bytes]) -> Iterator[str]:
        nonlocal read
        for line in file:
            read += len(line)
            yield line.decode("utf-8", "replace").replace("\r\n", "\n")

    with path.open("rb") as file:
        last = 0
        try:
            for _ in csv.reader(lines(file), delimiter=separator, strict=True):
                if read - last >= step:
                    yield (last := read)
        except csv.Error:
            return  # what reads the rest names the line


def texts_of(part: Part, field: str, separator: str | None) -> Iterator[str]:
    """The documents of a part, blank records included."""
    yield from part.texts
    for piece in part.pieces:
        path = Path(piece.path)
        suffix = path.suffix.lower()
        if suffix not in RECORDS:
            text = _text(path, piece)
            yield from (one for one in text.split(separator) if one.strip()) if separator else [text]
            continue
        for where, row in _rows(path, suffix, piece, field):
            if field not in row:
                there = ", ".join(map(str, row)) or "none"
                raise TextError(
                    f"{where}: there is no field {field!r}{nearest(field, map(str, row))}; it has {there}; name "
                    "the field that has the text with --field"
                )
            if not isinstance(value := row[field], str | None):
                raise TextError(f"{where}: {field} is {shown(value)}, not a text")
            yield value or ""


def _rows(path: Path, suffix: str, piece: Piece, field: str) -> Located:
    if suffix == ".parquet":
        names = open_parquet(path).schema_arrow.names
        columns = [field] if field in names else None
        return parquet_rows(path, range(piece.start, piece.stop), columns)
    lines = partial(_lines, path)
    if suffix == ".jsonl":
        return json_rows(lines(piece.start, piece.stop), path, piece.start)
    separator, header = _SEPARATED[suffix], None
    if piece.start:
        first = islice(csv.reader(lines(0, piece.start), delimiter=separator, strict=True), 1)
        header = [name.strip() for name in next(first)]
    return separated_rows(lines(piece.start, piece.stop), path, separator, piece.start, header)


def _lines(path: Path, start: int, stop: int) -> Iterator[str]:
    """The lines of the bytes `[start, stop)`, which end with `\\n` whatever they end with in the file."""
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while at < stop and (raw := file.readline(stop - at)):
            yield _decoded(path, raw, at).replace("\r\n", "\n")
            at += len(raw)


def _text(path: Path, piece: Piece) -> str:
    with path.open("rb") as file:
        file.seek(piece.start)
        raw = file.read(piece.stop - piece.start)
    return _decoded(path, raw, piece.start).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(path: Path, raw: bytes, start: int) -> str:
    """`raw`, which begins at byte `start` of the file, without a byte order mark at its beginning."""
    if start == 0 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TextError(f"{path} is UTF-16; write it as UTF-8: iconv -f UTF-16 -t UTF-8")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        raise TextError(f"{path} is not UTF-8 at byte {at} (0x{raw[error.start]:02x}); convert it first") from None
    return text.removeprefix("\ufeff") if start == 0 else text


Hub = Callable[[str, str], Iterator[str]]
"""The texts of a data set of the hub, by its name and the name of the field."""


def hub_texts(name: str, field: str, *, split: str = "train", subset: str | None = None) -> Iterator[str]:
    """The field `field` of each row of a data set, streamed by the library datasets.

    Raises InputError where datasets is missing, FetchError where it cannot read the data set.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(f"hub:{name} is read by the library datasets; run: pip install 'datasets>=4'") from None
    with library(lambda problem: FetchError(f"hub:{name} cannot be read: {problem}")):
        for number, row in enumerate(datasets.load_dataset(name, subset, split=split, streaming=True), 1):
            if not isinstance(value := row.get(field), str | None) or field not in row:
                problem = f"has no text in {field!r}; its fields are {', '.join(map(str, row))}"
                raise TextError(f"hub:{name}, row {number}: {problem}; --field names the one to read")
            yield value or ""


def _once(texts: Iterator[str], step: int) -> Iterator[Part]:
    """Parts of about `step` characters."""
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= step:
            yield Part(texts=tuple(group), digest=_digest(group))
            group, size = [], 0
    if group:
        yield Part(texts=tuple(group), digest=_digest(group))


def _digest(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
