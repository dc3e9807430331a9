"""The small files beside a vocabulary; whatever is wrong with one is a TextError of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triptych.errors import TextError, first_line
from triptych.files import exists, read_regular

MAX_BYTES = 1 << 28  # of a file; the largest known tokenizer.json has 2^25


def read_text(file: Path) -> str:
    """The whole of a UTF-8 file.  Raises TextError for anything else, and for more than 2^28 bytes."""
    try:
        return read_regular(file, MAX_BYTES, TextError).decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 (byte {error.start})") from None


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file without their ends, which may be those of Windows."""
    lines = [line.rstrip("\r") for line in read_text(file).split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or an empty one where nothing of that name exists.

    Raises TextError for a file that is not JSON or holds something else than an object.
    """
    if not exists(file):
        return {}
    raw = read_text(file)
    try:
        content = json.loads(raw)
        if "\\u" in raw:  # JSON can spell half of a surrogate pair, which is not a character
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise TextError(f"{file} is not JSON: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise TextError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def read_vocab_json(file: Path) -> dict[str, int]:
    """A `vocab.json`: token -> id, the ids from 0 on without a gap.  Raises TextError for anything else."""
    if not exists(file):
        raise TextError(f"{file} is missing; the other vocabulary files here need it")
    ids = read_json_object(file)
    if not all(type(index) is int for index in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise TextError(f"{file}: its ids are not 0 to {len(ids) - 1}, each once")
    return ids
