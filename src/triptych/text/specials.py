"""The special tokens of a vocabulary by their purpose, how they are put around a text, and the small files beside a
vocabulary with the tokens that they add to it.  Whatever is wrong with one is a TextError of one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from triptych.errors import TextError, first_line, shown
from triptych.files import exists, read_regular


@dataclass(frozen=True)
class Specials:
    """The texts of the special tokens a tokenizer has; `None` where it has none.

    The fields are named as for BERT, GPT and T5: begin and end of a text, padding, unknown, mask, classification and
    separator.
    """

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None
    mask: str | None = None
    cls: str | None = None
    sep: str | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Specials:
        """From the `bos_token`, `eos_token`, ... of a `tokenizer_config.json` or `special_tokens_map.json`.

        Raises TextError for one that is neither a text nor an object with its text under `content`.
        """
        return cls(**{f.name: _content(f"{f.name}_token", config.get(f"{f.name}_token")) for f in fields(cls)})

    def config(self) -> dict[str, str]:
        """The keys of `tokenizer_config.json` for the tokens that exist."""
        return {f"{name}_token": text for name, text in self.named().items()}

    def named(self) -> dict[str, str]:
        """Field name -> text of the tokens that exist, in the order of the fields."""
        return {f.name: text for f in fields(self) if (text := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class SpecialsLayout:
    """The special tokens of a new vocabulary, and the field names of those put before and after each text."""

    specials: Specials
    before: str | None = None
    after: str | None = None

    def apply(self, backend: Backend) -> None:
        """Make `backend` put the tokens `before` and `after` around every text."""
        named = self.specials.named()
        surround(backend, self.before and named[self.before], self.after and named[self.after])


#: What a new decoder, encoder and encoder-decoder need.  The tokens are those of GPT, BERT and T5.
DECODER = SpecialsLayout(Specials(eos="<|endoftext|>"))
ENCODER = SpecialsLayout(
    Specials(pad="[PAD]", unk="[UNK]", mask="[MASK]", cls="[CLS]", sep="[SEP]"), before="cls", after="sep"
)
SEQ2SEQ = SpecialsLayout(Specials(pad="<pad>", eos="</s>", unk="<unk>"), after="eos")
#: What a new Whisper needs beside its tokens of the prompt; nothing is put around a transcript.
SPEECH = SpecialsLayout(Specials(pad="<pad>", eos="<|endoftext|>", unk="<unk>"))


def surround(backend: Backend, before: str | None, after: str | None) -> None:
    """Make `backend` put the special token `before` ahead of every text and `after` behind it.

    A second text has `after` behind it too, and is of token type 1, as in BERT.
    """
    single = [piece for piece in (before, "$A", after) if piece]
    second = [f"{piece}:1" for piece in ("$B", after) if piece]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(token, backend.token_to_id(token)) for token in (before, after) if token],
    )


def _content(key: str, token: object) -> str | None:
    """A token is written as its text, or as an object that has it under `content`."""
    if token is None:
        return None
    text: object = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise TextError(f"{key} is {shown(token)}, not a token; write its text")
    return text


# ---------------------------------------------------------------- files

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
        for text, index in read_json_object(path / "added_tokens.json").items():
            yield (
                _id(index, path / "added_tokens.json"),
                _token({"normalized": text not in special}, text, text in special),
            )
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
