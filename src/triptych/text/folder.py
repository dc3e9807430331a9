"""The text files of a folder, for search and for training."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from triptych.errors import InputError, TextError
from triptych.files import read_regular

MOST_BYTES = 8 << 20  # of a file; larger ones are data more often than text
MOST_TOTAL = 1 << 30  # bytes of all files together, which are kept in memory


@dataclass(frozen=True)
class TextFile:
    """A file of a folder: its path inside it with `/` between the parts, and its text."""

    name: str
    text: str

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass
class Folder:
    """The text files of a folder in the order of their names, and how many others were skipped for each reason."""

    most_bytes: int
    files: list[TextFile] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    total: int = 0  # bytes of the files

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    @property
    def skipped_in_words(self) -> str:
        """`"2 hidden, 1 binary or not UTF-8"`; empty where nothing was skipped."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.skipped.items())


def read_folder(
    folder: str | Path, *, follow_links: bool = False, most_bytes: int = MOST_BYTES, most_total: int = MOST_TOTAL
) -> Folder:
    """The files below `folder` that hold UTF-8 text.

    Skipped and counted: hidden files and folders, symbolic links (with `follow_links` they are followed, each folder
    once), files above `most_bytes`, files that are not UTF-8 or hold a zero byte, files without text, what cannot be
    read, and pipes and devices.  Bytes of a name that are not UTF-8 are written as `\\xNN`.

    Raises InputError where `folder` is no folder that can be read, and where its files have more than `most_total`
    bytes.
    """
    root = Path(folder)
    if not str(folder) or "\0" in str(folder) or not root.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; give a folder of text files")
    contents = Folder(most_bytes)
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
            if contents.total > most_total:
                raise InputError(f"{root} holds more than {most_total >> 30} GiB of text; give a folder inside it")
        waiting += reversed(folders)  # the last one is read first
    contents.files.sort(key=lambda file: file.name.split("/"))
    return contents


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle: reading it as a file fails too, and counts it
        return False


def _read(path: Path, name: str, contents: Folder) -> None:
    """Add the file to `contents`, or count why it is skipped."""
    try:
        if path.stat().st_size > contents.most_bytes:
            return contents.skip(f"larger than {contents.most_bytes >> 20} MiB")
        data = read_regular(path, contents.most_bytes, TextError)
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
    readable = os.fsencode(name).decode("utf-8", "backslashreplace")
    contents.files.append(TextFile(readable, text))
    return None
