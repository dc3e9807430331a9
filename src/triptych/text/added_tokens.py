"""Tokens that the files beside a vocabulary add to it, found in a text before anything else is done with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from triptych.errors import TextError, shown
from triptych.text.side_files import read_json_object
from triptych.text.specials import Specials

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
MAX_ID = 1 << 24  # no vocabulary is near it


def add(backend: Backend, specials: Specials, config: Mapping[str, Any], path: Path) -> None:
    """Add, as transformers does and in its order: the tokens listed with their ids, in `added_tokens_decoder` of
    `tokenizer_config.json` or in `added_tokens.json`, then those with a job, then the extra special ones.

    Raises TextError for a list that is malformed, and for an id that is not the next one.
    """
    for index, token in sorted(_listed(config, specials, path), key=lambda item: item[0]):
        if token not in backend.get_added_tokens_decoder().values():  # one with other flags gives way
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != index:
            raise TextError(
                f"{path}: its config gives {shown(token.content)} the id {index}, its vocabulary gives it "
                f"{backend.token_to_id(token.content)}; take both from one revision"
            )
    jobs = [(config.get(f"{name}_token"), text) for name, text in specials.named().items()]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for entry, text in jobs:
        if text not in known:
            backend.add_special_tokens([_token(entry if isinstance(entry, Mapping) else {}, text, True)])
    for token in _extra(config, path):
        if token.content not in known:
            backend.add_special_tokens([token])


def _listed(config: Mapping[str, Any], specials: Specials, path: Path) -> Iterator[tuple[int, AddedToken]]:
    listed = config.get("added_tokens_decoder")
    if listed is None:
        jobs = {*specials.named().values(), *(token.content for token in _extra(config, path))}
        for text, index in read_json_object(path / "added_tokens.json").items():
            yield _id(index, path / "added_tokens.json"), _token({"normalized": text not in jobs}, text, text in jobs)
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
        raise TextError(f"{file}: {shown(index)} is not the id of a token")
    return index


def _extra(config: Mapping[str, Any], path: Path) -> Iterator[AddedToken]:
    """What `additional_special_tokens` lists, which version 5 of transformers calls `extra_special_tokens`."""
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


def _token(entry: Mapping[str, Any], text: str, special: bool) -> AddedToken:
    flags = {key: bool(entry.get(key, False)) for key in _FLAGS}
    return AddedToken(text, special=special, **flags)
