"""Small files beside a vocabulary, read so that whatever is wrong with one is a `TextError` of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triptych.errors import TextError, said


def text(file: Path) -> str:
    """The whole of a UTF-8 file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise TextError(f"{file} cannot be read ({error.strerror})") from None


def lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file, which may end as on Windows, without their ends."""
    found = [line.rstrip("\r") for line in text(file).split("\n")]
    return found[:-1] if found[-1] == "" else found


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; an empty one where there is no file."""
    if not file.is_file():  # opening a pipe would wait for ever
        return {}
    try:
        content = json.loads(raw := text(file))
        if "\\u" in raw:  # half a character can be written so
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise TextError(f"{file} is not JSON: {said(error)}") from None
    if not isinstance(content, dict):
        raise TextError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def numbered(file: Path) -> dict[str, int]:
    """A `vocab.json`: every token has a number, and they run from 0 without a gap."""
    if not file.is_file():
        raise TextError(f"{file} is not there; the files beside it need it")
    words = json_object(file)
    if not all(type(index) is int for index in words.values()) or sorted(words.values()) != list(range(len(words))):
        raise TextError(f"{file}: its numbers are not 0 to {len(words) - 1}, each once")
    return words
