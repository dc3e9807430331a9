"""Any UTF-8 file or folder of files as training data."""

from __future__ import annotations

from pathlib import Path

from triptych.errors import TextError


def documents(path: Path | str) -> list[str]:
    """The texts of `path`: one for a file, one a file in order of their paths for a folder and the folders in it.

    Hidden files are left out, and so are empty ones.  A byte order mark is dropped and every line ends in `\\n`.

    Raises TextError if there is nothing to read, or naming the first file that is not UTF-8 and the byte where.
    """
    path = Path(path)
    if not path.exists():
        raise TextError(f"no file or folder {path}; give a UTF-8 text file or a folder of them")
    texts = [text for file in _files(path) if (text := _read(file)).strip()]
    if not texts:
        raise TextError(f"{path} holds no text; give a UTF-8 text file or a folder of them")
    return texts


def read_text(path: Path | str) -> str:
    """All of `documents(path)` as one text, a blank line between two."""
    return "\n\n".join(text.strip("\n") for text in documents(path)) + "\n"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    inside = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def _read(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise TextError(f"{file} cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The offset counts from behind a byte order mark, if there is one.
        at = error.start + len(raw) - len(error.object)
        raise TextError(f"{file} is not UTF-8 at byte {at} (0x{raw[at]:02x}); convert it first") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
