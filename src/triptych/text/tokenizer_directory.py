"""The tokenizer of a Hugging Face directory."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from triptych.errors import TextError, library, shown
from triptych.files import exists
from triptych.text import vocabulary_files
from triptych.text.chat import ChatTemplate
from triptych.text.sentencepiece_file import check_charsmap
from triptych.text.side_files import MAX_ID, add_tokens, read_json_object, read_text
from triptych.text.specials import Specials
from triptych.text.tokenizer import Tokenizer

#: A `tokenizer.json` without a match has no id over a few million and no table of replacements, however it is spelled.
_NEEDS_CHECK = re.compile(r"\d{8}|charsmap|\\u00[2-7]")


def from_directory(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: `tokenizer.json`, or the vocabulary files that stand in for it
    (`triptych.text.vocabulary_files`), with what the files beside it add.

    `tokenizer_config.json` and `special_tokens_map.json` name the special tokens.  The chat template is read from
    `chat_template.jinja` or the config.  Which special tokens are put around a text is in `tokenizer.json`; the
    config's `add_bos_token` and `add_eos_token` are for tokenizers without that file.  `generation_config.json` adds
    stop tokens to EOS.  Code that a config points to is never run.

    Raises TextError if there is neither, if one of the files cannot be read, and for a tokenizer that exceeds the
    limits of `triptych.text.tokenizer_limits`.
    """
    path = Path(path)
    if not has_tokenizer(path):
        raise TextError(f"no tokenizer in {path}; give a directory that holds tokenizer.json, or a .gguf file")
    config, token_map = (read_json_object(path / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    # The order of precedence is that of transformers.
    config = token_map | config if "added_tokens_decoder" in config else config | token_map
    try:
        with library(lambda problem: TextError(f"it cannot be used: {problem}")):
            return _assembled(path, config)
    except TextError as error:
        if str(path) in str(error):
            raise
        raise TextError(f"the tokenizer in {path}: {error}") from error


def _assembled(path: Path, config: Mapping[str, object]) -> Tokenizer:
    file = path / "tokenizer.json"
    if exists(file):
        backend, specials = _parse(file), Specials.from_config(config)
        add_tokens(backend, specials, config, path)
    else:
        backend, specials = vocabulary_files.build(path, config)
    source = _chat_source(path, config)
    chat = None if source is None else ChatTemplate(source, specials.config())
    rest = {key: value for key, value in config.items() if key not in ("auto_map", "chat_template")}
    return Tokenizer(backend, specials, stop_ids=_stop_ids(path), chat=chat, config=rest)


def has_tokenizer(path: Path) -> bool:
    """Whether the directory `path` holds a `tokenizer.json` or vocabulary files."""
    return exists(path / "tokenizer.json") or bool(vocabulary_files.find(path))


def _stop_ids(path: Path) -> list[int]:
    """The `eos_token_id` of `generation_config.json`, one or several."""
    value = read_json_object(path / "generation_config.json").get("eos_token_id") or []
    ids = value if isinstance(value, list) else [value]
    if not all(type(index) is int for index in ids):
        raise TextError(f"{path / 'generation_config.json'}: eos_token_id {shown(value)} is not an id or a list of ids")
    return ids


def _parse(file: Path) -> Backend:
    with library(lambda problem: TextError(f"{file} is not a tokenizer.json: {problem}")):
        raw = read_text(file)
        if _NEEDS_CHECK.search(raw):
            _check_state(json.loads(raw))
        return Backend.from_str(raw)


def _check_state(state: Any) -> None:
    """Raise ValueError for two things with which the library aborts the process while it parses: a huge id, for which
    it allocates that many entries, and a table of replacements (in any normalizer) that points outside itself."""
    vocab = state["model"]["vocab"]
    ids = [
        *(vocab.values() if isinstance(vocab, dict) else ()),
        *(token["id"] for token in state.get("added_tokens") or ()),
    ]
    if any(type(index) is not int or index >= MAX_ID for index in ids):
        raise ValueError(f"one of its ids is not an integer below {MAX_ID}")
    waiting = [state.get("normalizer")]
    for normalizer in waiting:
        if isinstance(normalizer, dict):
            check_charsmap(base64.b64decode(normalizer.get("precompiled_charsmap") or ""))
            waiting += normalizer.get("normalizers") or ()


def _chat_source(path: Path, config: Mapping[str, object]) -> str | None:
    """The template in `chat_template.jinja`, or the one in the config, of several there the one named `default`."""
    file = path / "chat_template.jinja"
    if exists(file):
        return read_text(file)
    source = config.get("chat_template")
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str | None):
        raise TextError(f"{path / 'tokenizer_config.json'}: chat_template is {shown(source)}, not a template")
    return source
