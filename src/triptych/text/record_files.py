"""The rows of files of records, one at a time: JSON lines, CSV, TSV and Parquet, each with the place where it stands.

Nothing here reads a whole file.  Every problem is one line with the file and the line (of Parquet: the row) where it
is.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from triptych.errors import InputError, TextError, counted, first_line, shown

_SEPARATORS = {",": "a comma", "\t": "a tab", ";": "a semicolon"}
_BATCH = 1024  # rows of Parquet that are in memory as Python objects at one time


@dataclass(frozen=True)
class Place:
    """Where a row stands: in the line `number` after byte `start` of the file `path`.  As a text it has the number of
    the line in the file, for which what precedes `start` is read."""

    path: Path
    number: int
    start: int = 0

    def __str__(self) -> str:
        return f"{self.path}, line {self.number + _lines_before(self.path, self.start)}"


def _lines_before(path: Path, start: int) -> int:
    count = 0
    if start:
        with path.open("rb") as file:
            while start > 0 and (block := file.read(min(start, 1 << 20))):
                count += block.count(b"\n")
                start -= len(block)
    return count


Located = Iterator[tuple[Place | str, dict[str, Any]]]  # rows and where each stands


def json_rows(lines: Iterable[str], path: Path, start: int = 0) -> Located:
    """The object of each of the `lines`, which begin at byte `start` of `path`; empty lines are skipped.

    Raises TextError for a line that is no JSON object, has a field twice, or spells half of a character.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = Place(path, number, start)
        try:
            row = json.loads(line, object_pairs_hook=partial(_unrepeated, where=where))
        except (ValueError, RecursionError) as error:
            raise TextError(f"{where} is not JSON ({first_line(error)}); write one object a line") from None
        if not isinstance(row, dict):
            kind = "a list" if isinstance(row, list) else shown(row)
            raise TextError(f'{where} is {kind}, not an object like {{"text": "..."}}; write one object a line')
        if "\\u" in line and re.search("[\\ud800-\\udfff]", json.dumps(row, ensure_ascii=False)):
            raise TextError(f"{where} spells half of a surrogate pair (\\ud800 to \\udfff), no character; remove it")
        yield where, row


def _unrepeated(pairs: list[tuple[str, object]], where: Place) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        _check_repeated([name for name, _ in pairs], f"{where} has the field")
    return row


def _check_repeated(names: Sequence[str], problem: str) -> None:
    """Raises TextError naming the first, in alphabetical order, of the names that occur more than once."""
    if len(set(names)) < len(names):
        raise TextError(f"{problem} {shown(min((Counter(names) - Counter(set(names))).keys()))} twice")


def separated_rows(
    lines: Iterable[str], path: Path, separator: str, start: int = 0, header: list[str] | None = None
) -> Located:
    """CSV as RFC 4180 has it: quoted fields may hold the separator and line breaks; the first row names the columns.

    `lines` begin at byte `start` of `path`; in the middle of a file `header` has the names of the columns.
    """
    rows = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        where = Place(path, rows.line_num + 1, start)
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problem = f"is not CSV: {first_line(error)}"
            if "field limit" in str(error):  # of Python's module, one for the whole process
                limit = csv.field_size_limit()
                problem = f"has a field of more than {limit:,} characters; write the records as .jsonl"
            raise TextError(f"{where} {problem}") from None
        if not row:
            continue
        if header is None:
            header = _header(row, where, separator)
        elif len(row) != len(header):
            raise TextError(f"{where} has {counted(len(row), 'field')}, and the first row names {len(header)} columns")
        else:
            yield where, dict(zip(header, row, strict=True))


def _header(row: list[str], where: Place, separator: str) -> list[str]:
    header = [name.strip() for name in row]
    _check_repeated(header, f"{where} names the column")
    if len(header) == 1 and any(other in header[0] for other in _SEPARATORS.keys() - {separator}):
        raise TextError(
            f"{where} is one column, {shown(header[0])}; in a {where.path.suffix} file there is "
            f"{_SEPARATORS[separator]} between columns"
        )
    return header


def open_parquet(path: Path) -> Any:
    """The `pyarrow.parquet.ParquetFile` of `path`.  Raises InputError where pyarrow is missing, TextError for a file
    that cannot be read."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs pyarrow; run: pip install pyarrow") from None
    if not path.is_file():
        raise TextError(f"no file {path}")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise TextError(f"{path} is not Parquet: {first_line(error)}") from None
    _check_repeated(file.schema_arrow.names, f"{path} names the column")
    return file


def parquet_rows(path: Path, groups: range | None = None, columns: Sequence[str] | None = None) -> Located:
    """The rows of the row groups `groups` (all of them when None), with all `columns` or those named."""
    file = open_parquet(path)
    chosen = range(file.num_row_groups) if groups is None else groups
    number = sum(file.metadata.row_group(i).num_rows for i in range(chosen.start))
    try:
        for batch in file.iter_batches(_BATCH, row_groups=list(chosen), columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read after row {number}: {first_line(error)}") from None
