"""Records: rows of named fields from JSON lines, CSV, TSV or Parquet, each with the place it was read from.

An objective says which fields it needs (`text`, `label`); `data.columns = {text = "review"}` says under which column a
file has a field.  Every problem is one line with the file and the line (of Parquet: the row) where it is.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from triptych.arguments import checked
from triptych.errors import ConfigError, TextError, nearest, shown
from triptych.text import corpus
from triptych.text.record_files import Located, json_rows, parquet_rows, separated_rows
from .data import RandomUse, random_numbers

SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")  # endings of images in a folder
T = TypeVar("T")
_INTEGER = re.compile(r"-?\d{1,18}")


@dataclass(frozen=True)
class DataRecord:
    """Values by the objective's names of the fields; `location` is the file and the line, for messages."""

    values: Mapping[str, object]
    location: str

    def text(self, field: str, *, empty: bool = False) -> str:
        """The text in `field`.  Raises TextError for anything else, and for an empty text unless `empty`."""
        value = self.values[field]
        if not isinstance(value, str):
            raise self.error(f"{field} is {shown(value)}, not a text")
        if not value.strip() and not empty:
            raise self.error(f"{field} is empty; remove the record or fill it in")
        return value

    def label(self, field: str) -> str:
        """The name of a label: a text, an integer or a truth value, without spaces around it."""
        value = self.values[field]
        if not isinstance(value, str | int) or not str(value).strip():
            raise self.error(f"{field} is {shown(value)}, not a label; write a text or an integer")
        return str(value).lower() if isinstance(value, bool) else str(value).strip()

    def listed(self, field: str, separator: str | None) -> list[str]:
        """Several texts or labels: a list of them, or one text cut at `separator` (at spaces where it is None)."""
        value = self.values[field]
        if isinstance(value, str):
            return [part.strip() for part in value.split(separator) if part.strip()]
        if not isinstance(value, list):
            raise self.error(f"{field} is {shown(value)}, not a list")
        return [DataRecord({field: one}, self.location).label(field) for one in value]

    def integer(self, field: str) -> int | None:
        """An integer, also one written as text; None for null and for an empty text."""
        value = self.values[field]
        if value is None or value == "":
            return None
        if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"{field} is {shown(value)}, not an integer")
        return value

    def error(self, problem: str) -> TextError:
        return TextError(f"{self.location}: {problem}")


@checked
def read_records(
    path: Path | str, needed: Sequence[str], optional: Sequence[str] = (), columns: Mapping[str, str] | None = None
) -> list[DataRecord]:
    """The records of the file `path` with the fields `needed`, and those of `optional` that it has.

    `columns` gives the column of a field, which otherwise is called as the field is.  Empty lines are skipped.  Raises
    TextError for a file that cannot be read, has no record, or lacks a field; ConfigError for an unknown key in
    `columns`; InputError where pyarrow is missing for Parquet.  Of a folder, images with their labels are read: the
    files in its subfolders, each labelled by the name of the subfolder.
    """
    path, columns = Path(path), columns or {}
    known = (*needed, *optional)
    for field in columns:
        if field not in known:
            raise ConfigError(
                f"data.columns: {field} is no field of this objective{nearest(field, known)}; "
                f"its fields are {', '.join(known)}"
            )
    reader = _image_folder if path.is_dir() and {"image", "label"} <= set(needed) else _READERS.get(path.suffix.lower())
    if reader is None:
        raise TextError(f"{path} is not one of {', '.join(SUFFIXES)}; records are read from these")
    names = {field: columns.get(field, field) for field in known}
    records = []
    for where, row in reader(path):
        for field, name in names.items():
            # A column that the recipe names must be there, also for a field that the objective could do without.
            if name not in row and (field in needed or field in columns):
                there = ", ".join(map(str, row)) or "none"
                raise TextError(
                    f"{where}: there is no field {name!r}{nearest(name, map(str, row))}; it has {there}; "
                    f'data.columns = {{{field} = "..."}} in the recipe names the one to read'
                )
        records.append(DataRecord({field: row[name] for field, name in names.items() if name in row}, str(where)))
    if not records:
        raise TextError(f"{path} holds no record")
    return records


def split(items: Sequence[T], share: float, where: str) -> tuple[list[T], list[T]]:
    """Items to train on and to hold out: a `share` of them, at least one, drawn at random and always the same.

    They are drawn and not taken from the end, because files of records are often sorted by their label.
    """
    if len(items) < 2:
        raise TextError(f"{where} holds {len(items)} record; give at least two, one to train on and one to hold out")
    count = min(len(items) - 1, max(1, round(share * len(items))))
    held_out = set(random_numbers(0, RandomUse.SPLIT, 0).permutation(len(items))[:count].tolist())
    return [one for i, one in enumerate(items) if i not in held_out], [items[i] for i in sorted(held_out)]


def _json_lines(path: Path) -> Located:
    return json_rows(_text(path).split("\n"), path)  # splitlines() would also cut at U+2028 inside a text


def _separated(path: Path, separator: str) -> Located:
    return separated_rows(io.StringIO(_text(path), newline=""), path, separator)


def columns_of(path: Path | str) -> list[str]:
    """The fields of the first record of the file `path`; of a folder `image` and `label` where it has images in
    subfolders and nothing else, otherwise none.  Raises TextError for a file that cannot be read or has no record."""
    path = Path(path)
    if path.is_dir():
        files = [at for at in path.glob("**/*") if at.is_file() and not at.name.startswith(".")]
        images = all(file.suffix.lower() in IMAGES and file.parent != path for file in files)
        return ["image", "label"] if images and files else []
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        return []
    for _, row in reader(path):
        return list(map(str, row))
    raise TextError(f"{path} holds no record")


def _image_folder(path: Path) -> Located:
    """The files in the subfolders of `path`, each labelled with the name of its subfolder; hidden ones are left out."""
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if not file.is_file() or any(part.startswith(".") for part in parts):
            continue
        if len(parts) == 1:
            raise TextError(f"{file} lies in no subfolder of {path}; images are labelled by the subfolder they lie in")
        yield str(file), {"image": str(file.absolute()), "label": parts[0]}


def _text(path: Path) -> str:
    if path.is_dir():
        raise TextError(f"{path} is a directory; give one file of records")
    return corpus.read_documents(path, "a file of records").files[0].text


_READERS: dict[str, Callable[[Path], Located]] = {
    ".jsonl": _json_lines,
    ".csv": lambda path: _separated(path, ","),
    ".tsv": lambda path: _separated(path, "\t"),
    ".parquet": parquet_rows,
}
