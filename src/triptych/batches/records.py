"""Files of records, each with an `id`, and a work done for all of them on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from triptych.errors import InputError, TriptychError, first_line, shown
from triptych.text.record_files import json_rows, parquet_rows
from .journal import Journal, Summary, encoded

SUFFIXES = (".jsonl", ".parquet")
Row = dict[str, Any]
Answers = Sequence[tuple[int, Mapping[str, Any]]]
WorkFunction = Callable[[Sequence[bytes]], Answers]
"""Lines of JSON -> of each the status, as in HTTP, and its record."""


@dataclass(frozen=True)
class Work:
    """What is done for all records: `start(**options)` loads the model and gives the function that does it.

    `start` is a function of a module and `options` are plain values, so that other processes can be told of them.
    `at_once` lines are done in one call, and kept together; `calls` run at one time.
    """

    start: Callable[..., WorkFunction]
    options: Mapping[str, Any]
    at_once: int
    calls: int = 1

    def head(self, lines: Lines) -> dict[str, Any]:
        """What a run of this work is of, in plain values."""
        head = {"requests": len(lines), "digest": lines.digest, "work": self.start.__name__, "options": self.options}
        return dict(json.loads(json.dumps(head)))


@runtime_checkable
class Lines(Protocol):
    """Lines of JSON, a record each, which can be read several times, and a digest of all of them."""

    digest: str

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[bytes]: ...


class RecordInput:
    """The records of a `.jsonl` or `.parquet` file: of each line or row its `id` and the text in `field`.

    `read` makes what is handed on of a text.  Raises InputError and TextError for a file that cannot be read, for a
    record without a text in `field` or with no `id`, and for an id that two records have.
    """

    def __init__(self, path: Path, field: str, read: Callable[[str], str] = str) -> None:
        if path.suffix not in SUFFIXES:
            raise InputError(f"{path}: is not {' or '.join(SUFFIXES)}; give a file of records with id and {field}")
        if path.suffix == ".jsonl" and not path.is_file():
            raise InputError(f"{path}: there is no such file; give a file of records with id and {field}")
        self.path, self.field, self.read = path, field, read
        digest, places = hashlib.sha256(), dict[str | int, object]()
        for where, row in self._rows():
            self._check(where, row)
            if (before := places.setdefault(row["id"], where)) is not where:
                raise InputError(f"{where}: has the id {shown(row['id'])} of {before}; each record needs its own")
            digest.update(self._line(row))
        if not places:
            raise InputError(f"{path}: has no record; give records with id and {field}")
        if len({type(one) for one in places}) > 1:
            raise InputError(f"{path}: some ids are texts and some are numbers; write all of them as texts")
        self.digest, self.count = digest.hexdigest(), len(places)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        return (self._line(row) for _, row in self._rows())

    def _line(self, row: Row) -> bytes:
        return encoded({"id": row["id"], self.field: self.read(row[self.field])})

    def _rows(self) -> Iterator[tuple[object, Row]]:
        if self.path.suffix == ".parquet":
            yield from parquet_rows(self.path, columns=["id", self.field])
            return
        try:
            with self.path.open(encoding="utf-8-sig", newline="\n") as file:
                yield from json_rows(file, self.path)
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: is not UTF-8 ({first_line(error)}); convert it") from None

    def _check(self, where: object, row: Row) -> None:
        one, text = row.get("id"), row.get(self.field)
        if type(one) not in (str, int) or one == "":
            raise InputError(f"{where}: its id is {shown(one)}; each record needs an id, a text or an integer")
        if not isinstance(text, str):
            raise InputError(f"{where}: its {self.field} is {shown(text)}, which must be a text")


def each_record(function: Callable[[list[Row]], Sequence[Mapping[str, Any]]]) -> WorkFunction:
    """`function` for lines of records: its results with their ids; where it raises, each record alone, and those that
    it refuses get its message as `error`."""

    def work(lines: Sequence[bytes]) -> Answers:
        rows = [json.loads(line) for line in lines]
        try:
            results = function(rows)
        except TriptychError as error:
            if len(lines) > 1:
                return [answer for line in lines for answer in work([line])]
            return [(400, {"id": rows[0]["id"], "error": str(error)})]
        return [(200, {"id": row["id"], **one}) for row, one in zip(rows, results, strict=True)]

    return work


def run_here(work: Work, lines: Iterable[bytes], journal: Journal, progress: Callable[[int], object]) -> Summary:
    """Do what the journal does not have yet, and write its file.  `progress` is called with the records done."""
    journal.begin()
    waiting = ((index, line) for index, line in enumerate(lines) if index not in journal.done)
    function: WorkFunction | None = None
    while group := list(islice(waiting, work.at_once)):
        function = function or work.start(**work.options)
        answers = function([line for _, line in group])
        for (index, _), (status, record) in zip(group, answers, strict=True):
            journal.add(index, status, record)
        progress(len(journal.done))
    journal.finish()
    return journal.summary()
