"""The text files of a folder, for search, and UTF-8 text files or folders of them as training data."""

import hashlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from triptych.errors import InputError, TextError
from triptych.files import exists, read_regular

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
                _add_file(Path(entry.path), name + entry.name, contents)
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


def _add_file(path: Path, name: str, contents: Folder) -> None:
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


MAX_BYTES = 1 << 33  # of a file or a folder, which is held in memory


def read_documents(path: Path | str, wanted: str = "a UTF-8 text file or a folder of them") -> Folder:
    """The text of the file `path`, or the texts of all text files in the folder `path` and its subfolders, ordered by
    path, with what was skipped of a folder: hidden and empty files, and those that are no UTF-8 text.

    A byte order mark is removed, and line ends become `\\n`.  Raises TextError if there is no text, and for a single
    file that is not UTF-8, naming the file and the first bad byte; `wanted` is what they advise to give.
    """
    path = Path(path)
    if not exists(path):
        raise TextError(f"no file or folder {path}; give {wanted}")
    if path.is_dir():
        contents = read_folder(path, follow_links=True, most_bytes=MAX_BYTES, most_total=MAX_BYTES)
    else:
        text = _read(path)
        contents = Folder(MAX_BYTES, [TextFile(path.name, text)] if text.strip() else [])
    if not contents.files:
        skipped = f" (skipped: {contents.skipped_in_words})" if contents.skipped else ""
        raise TextError(f"{path} holds no text{skipped}; give {wanted}")
    contents.files = [
        TextFile(file.name, file.text.replace("\r\n", "\n").replace("\r", "\n")) for file in contents.files
    ]
    return contents


def documents(path: Path | str) -> list[str]:
    """The texts of `read_documents`."""
    return [file.text for file in read_documents(path).files]


def read_text(path: Path | str) -> str:
    """`documents(path)` joined into one text by blank lines."""
    return "\n\n".join(text.strip("\n") for text in documents(path)) + "\n"


def _read(file: Path) -> str:
    raw = read_regular(file, MAX_BYTES, TextError)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise TextError(f"{file} is UTF-16; write it as UTF-8: iconv -f UTF-16 -t UTF-8") from None
        # Python counts from the end of a byte order mark, where there is one.
        at = error.start + len(raw) - len(error.object)
        raise TextError(f"{file} is not UTF-8 at byte {at} (0x{raw[at]:02x}); convert it first") from error
