"""UTF-8 text files, or folders of them, as training data."""

from __future__ import annotations

from pathlib import Path

from triptych.errors import TextError
from triptych.files import exists, read_regular

MAX_BYTES = 1 << 33  # of a file, which is held in memory


def documents(path: Path | str) -> list[str]:
    """The text of the file `path`, or the texts of all files in the folder `path` and its subfolders, ordered by path.

    Hidden and empty files are left out.  A byte order mark is removed, and line ends become `\\n`.

    Raises TextError if there is no text, and for a file that is not UTF-8, naming the file and the first bad byte.
    """
    path = Path(path)
    if not exists(path):
        raise TextError(f"no file or folder {path}; give a UTF-8 text file or a folder of them")
    texts = [text for file in _files(path) if (text := _read(file)).strip()]
    if not texts:
        raise TextError(f"{path} holds no text; give a UTF-8 text file or a folder of them")
    return texts


def read_text(path: Path | str) -> str:
    """`documents(path)` joined into one text by blank lines."""
    return "\n\n".join(text.strip("\n") for text in documents(path)) + "\n"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def _read(file: Path) -> str:
    raw = read_regular(file, MAX_BYTES, TextError)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise TextError(f"{file} is UTF-16; write it as UTF-8: iconv -f UTF-16 -t UTF-8") from None
        # Python counts from the end of a byte order mark, where there is one.
        at = error.start + len(raw) - len(error.object)
        raise TextError(f"{file} is not UTF-8 at byte {at} (0x{raw[at]:02x}); convert it first") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
