"""What a run over many records has done so far, in a directory beside its file OUT, and OUT, which appears whole.

The directory is `OUT.part/`, and one process has it at a time.  On one machine it holds a record a line in the order in
which they ended (`Journal`); `ray_data` keeps what a cluster does there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from triptych.errors import InputError
from triptych.files import exists, writable_name
from triptych.run_lock import RunLock

RAY_RUN = "run.json"  # in the directory of a run with Ray, what it is of
_ROWS = 1024  # of Parquet that are in memory as Python objects at one time


@dataclass(frozen=True)
class Summary:
    """Of the `requests` of a file: those with an answer, those that were refused, the lines that are none, and those
    that an earlier run had done."""

    requests: int
    answered: int
    refused: int
    bad_lines: int
    resumed: int

    @classmethod
    def of(cls, statuses: Sequence[int], resumed: int) -> Summary:
        """Of the statuses of all records."""
        answered, bad = sum(200 <= one < 300 for one in statuses), statuses.count(0)
        return cls(len(statuses), answered, len(statuses) - answered - bad, bad, resumed)


def part_directory(out: Path) -> Path:
    """The directory of what is done for OUT so far."""
    return out.with_name(out.name + ".part")


@dataclass(eq=False)
class Journal:
    """The directory beside OUT with what is done so far; one process has it at a time.

    done   of each finished line, by its index in the input, where its record is, and the status of its response; 0 for
           a line that is no request.
    """

    out: Path
    head: Mapping[str, Any]
    done: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    end: int = 0
    resumed: int = 0

    def __post_init__(self) -> None:
        self.directory = part_directory(self.out)
        self.path = self.directory / "records.jsonl"

    def __enter__(self) -> Journal:
        """Raises InputError where OUT cannot be written, or its journal is of other requests; ConfigError where another
        process has it."""
        writable_name(self.out)
        try:
            self.directory.mkdir(exist_ok=True)
            self.lock = RunLock(self.directory).acquire()
            self.path.touch()
            self.file = self.path.open("r+b", buffering=0)
        except OSError as error:
            raise InputError(f"{self.directory}: cannot be written ({error.strerror}); give another OUT") from None
        try:
            if exists(self.directory / RAY_RUN):
                raise InputError(f"{self.directory}: is of a run with --ray; finish that, or remove it")
            self._read()
            complete = len(self.done) == self.head["requests"]  # a run that was killed before it removed its journal
            if exists(self.out) and not complete:
                raise InputError(f"{self.out}: exists already; remove it, or give another OUT")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.end:
            os.fsync(self.file.fileno())
        self.file.close()
        if not self.end:  # nothing has begun
            self._remove()
        self.lock.release()

    def _read(self) -> None:
        """What an earlier run has done; a line that it did not finish is cut off."""
        self.end, lines = self.file.seek(0, os.SEEK_END), 0
        self.file.seek(0)
        end = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    if lines:
                        self.done[entry["line"]] = (end, len(line), entry["status"])
                except (ValueError, TypeError, KeyError):
                    raise InputError(f"{self.path}: is damaged; remove {self.directory} to begin again") from None
                if not lines and entry != self.head:
                    problem = f"{self.directory}: is of other requests or models"
                    raise InputError(f"{problem}; finish those, remove the directory, or give another OUT")
                end, lines = end + len(line), lines + 1
        self.end, self.resumed = end, len(self.done)
        self.file.truncate(end)

    def begin(self) -> None:
        if not self.end:
            self._append(self.head)

    def add(self, index: int, status: int, record: Mapping[str, Any]) -> None:
        """Keep a record: from here on it outlives this process."""
        at = self.end
        self._append({"line": index, "status": status, "record": record})
        self.done[index] = (at, self.end - at, status)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line, written = encoded(entry), 0
        self.file.seek(self.end)
        try:
            while written < len(line):
                written += self.file.write(line[written:])
        except OSError:
            self.file.truncate(self.end)
            raise
        self.end += len(line)

    async def sync(self) -> None:
        """Have the disk keep what was added, over and over: it outlives the machine's power too."""
        synced = 0
        while True:
            if synced != self.end:
                synced = self.end
                await asyncio.to_thread(os.fsync, self.file.fileno())
            await asyncio.sleep(0.05)

    def finish(self) -> None:
        """Write OUT, whole and in the order of the requests, and remove the journal."""
        write_results(self.out, self._records, self.directory)
        self._remove()

    def _records(self) -> Iterator[bytes]:
        for index in sorted(self.done):
            at, size, _ = self.done[index]
            self.file.seek(at)
            yield encoded(json.loads(self.file.read(size))["record"])

    def summary(self) -> Summary:
        return Summary.of([status for _, _, status in self.done.values()], self.resumed)

    def _remove(self) -> None:
        for path in (self.path, self.lock.path):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # files of others
            self.directory.rmdir()


def encoded(entry: Mapping[str, Any]) -> bytes:
    """A line of JSON, in UTF-8 where its texts can be."""
    try:
        return json.dumps(entry, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(entry).encode() + b"\n"


def write_results(out: Path, lines: Callable[[], Iterator[bytes]], directory: Path) -> None:
    """Replace OUT by the records of `lines`, which are JSON: a line each, or a row each of a `.parquet` file.  Until it
    is whole it stands in `directory`."""
    whole = directory / f"out{out.suffix}"
    with whole.open("wb") as file:
        if out.suffix == ".parquet":
            _write_parquet(file, lines)
        else:
            file.writelines(lines())
        file.flush()
        os.fsync(file.fileno())
    os.replace(whole, out)


def _write_parquet(file: IO[bytes], lines: Callable[[], Iterator[bytes]]) -> None:
    """The columns are the fields of all records, read once for their types and once more for their values."""
    import pyarrow
    from pyarrow import parquet

    def groups() -> Iterator[list[dict[str, Any]]]:
        rows = map(json.loads, lines())
        while group := list(islice(rows, _ROWS)):
            yield group

    schema = pyarrow.schema([])
    for group in groups():
        fields = pyarrow.schema(list(pyarrow.array(group).type))
        schema = pyarrow.unify_schemas([schema, fields], promote_options="permissive")
    with parquet.ParquetWriter(file, schema) as writer:
        for group in groups():
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
