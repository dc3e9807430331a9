"""The small files beside a vocabulary, and the tokens that they add to it.

Whatever is wrong with one is a TextError of one line.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from triptych.errors import TextError, first_line, shown
from triptych.files import exists, read_regular
from .specials import Specials

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


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
MAX_ID = 1 << 24  # no vocabulary is near it


def add_tokens(backend: Backend, specials: Specials, config: Mapping[str, object], path: Path) -> None:
    """Add tokens to `backend` in the order of transformers.

    First the tokens listed with their ids, in `added_tokens_decoder` of `tokenizer_config.json` or in
    `added_tokens.json`; then `specials`; then the extra special tokens.

    Raises TextError for a list that is malformed, and for an id that is not the next free one.
    """
    listed = sorted(_listed(config, specials, path), key=lambda item: item[0])
    before = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for _, token in listed if before.get(token.content) != token])  # also with other flags
    for index, token in listed:
        if backend.token_to_id(token.content) != index:
            raise TextError(
                f"{path}: the config gives {shown(token.content)} the id {index}, the vocabulary "
                f"{backend.token_to_id(token.content)}; take both from one revision"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for name, text in specials.named().items():
        entry = config.get(f"{name}_token")
        if text not in known:
            backend.add_special_tokens([_token(entry if isinstance(entry, Mapping) else {}, text, True)])
    for token in _extra(config, path):
        if token.content not in known:
            backend.add_special_tokens([token])


def _listed(config: Mapping[str, object], specials: Specials, path: Path) -> Iterator[tuple[int, AddedToken]]:
    listed = config.get("added_tokens_decoder")
    if listed is None:
        special = {*specials.named().values(), *(token.content for token in _extra(config, path))}
        file = path / "added_tokens.json"
        for text, index in read_json_object(file).items():
            yield _id(index, file), _token({"normalized": text not in special}, text, text in special)
        return
    file = path / "tokenizer_config.json"
    if not isinstance(listed, Mapping):
        raise TextError(f"{file}: added_tokens_decoder is {shown(listed)}, not an object")
    for key, entry in listed.items():
        index = _id(int(key) if key.isdecimal() and len(key) < 9 else key, file)
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not content:
            raise TextError(f"{file}: added_tokens_decoder gives {index} the entry {shown(entry)}, not a token")
        yield index, _token(entry, content, bool(entry.get("special")))


def _id(index: object, file: Path) -> int:
    if type(index) is not int or not 0 <= index < MAX_ID:
        raise TextError(f"{file}: {shown(index)} is not a token id")
    return index


def _extra(config: Mapping[str, object], path: Path) -> Iterator[AddedToken]:
    """The tokens of `additional_special_tokens`, which transformers 5 calls `extra_special_tokens`."""
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    entries = list(listed.values()) if isinstance(listed, Mapping) else listed
    if not isinstance(entries, list | tuple):
        raise TextError(f"{path}: its additional special tokens are {shown(listed)}, not a list")
    for entry in entries:
        flags = entry if isinstance(entry, Mapping) else {}
        text: object = flags.get("content") if flags else entry
        if not isinstance(text, str) or not text:
            raise TextError(f"{path}: {shown(entry)} among its additional special tokens is not a token")
        yield _token(flags, text, True)


def _token(entry: Mapping[str, object], text: str, special: bool) -> AddedToken:
    flags = {key: bool(entry.get(key, False)) for key in _FLAGS}
    return AddedToken(text, special=special, **flags)
