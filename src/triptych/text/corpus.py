"""UTF-8 text files, or folders of them, as training data."""

from __future__ import annotations

from pathlib import Path

from triptych.errors import TextError
from triptych.files import exists, read_regular
from triptych.text.folder import Folder, TextFile, read_folder

MAX_BYTES = 1 << 33  # of a file or a folder, which is held in memory


def read_documents(path: Path | str) -> Folder:
    """The text of the file `path`, or the texts of all text files in the folder `path` and its subfolders, ordered by
    path, with what was skipped of a folder: hidden and empty files, and those that are no UTF-8 text.

    A byte order mark is removed, and line ends become `\\n`.  Raises TextError if there is no text, and for a single
    file that is not UTF-8, naming the file and the first bad byte.
    """
    path = Path(path)
    if not exists(path):
        raise TextError(f"no file or folder {path}; give a UTF-8 text file or a folder of them")
    if path.is_dir():
        contents = read_folder(path, follow_links=True, most_bytes=MAX_BYTES, most_total=MAX_BYTES)
    else:
        text = _read(path)
        contents = Folder(MAX_BYTES, [TextFile(path.name, text)] if text.strip() else [])
    if not contents.files:
        skipped = f" (skipped: {contents.skipped_in_words})" if contents.skipped else ""
        raise TextError(f"{path} holds no text{skipped}; give a UTF-8 text file or a folder of them")
    contents.files = [TextFile(file.name, _line_ends(file.text)) for file in contents.files]
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


def _line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
