"""Texts to token ids and back: one class over the `tokenizers` library, whatever file the vocabulary came from."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from triptych.errors import InputError, TextError, library, shown
from triptych.text import added, limits, sentencepiece, vocabulary
from triptych.text.chat import ChatTemplate, RenderedPrompt
from triptych.text.detokenize import Stream, without_spaces
from triptych.text.files import json_object
from triptych.text.files import text as read_text
from triptych.text.pieces import PieceReader
from triptych.text.specials import Specials

#: Between a word character and a line break no pre-tokenizer we know makes one token, so a corpus may be cut there.
_SAFE_CUT = re.compile(r"(?<=\w)(?=\n)")
#: A `tokenizer.json` without these has no id over a few million and no table of replacements, however it is spelled.
_SUSPECT = re.compile(r"\d{8}|charsmap|\\u00[2-7]")
_CUT_EVERY, _AT_ONCE = 1 << 16, 16


@dataclass(frozen=True)
class Encoded:
    """One encoded text, or a pair of texts joined into one row.  All lists have one entry per token.

    `token_types` is the segment that BERT-like models embed.  `offsets` are the first character of the token in its own
    text and the one after its last.  `sequence_ids` tells which text the token is of: 0 for the first, 1 for the
    second, None for a special token.
    """

    ids: list[int]
    token_types: list[int]
    offsets: list[tuple[int, int]]
    sequence_ids: list[int | None]

    def window(self, start: int, stop: int, first: int, last: int) -> Encoded:
        """A copy in which only the tokens from `first` to `last` (exclusive) remain of the run `[start, stop)`."""
        kept = [*range(start), *range(first, last), *range(stop, len(self.ids))]
        return Encoded(
            [self.ids[i] for i in kept],
            [self.token_types[i] for i in kept],
            [self.offsets[i] for i in kept],
            [self.sequence_ids[i] for i in kept],
        )


@final
class Tokenizer:
    """A vocabulary with its special tokens, its stop tokens and, for chat models, its template.

    `backend` is the `tokenizers.Tokenizer` that does the work.  Its truncation and padding are switched off: a text is
    never cut without being asked, and padding does not exist inside Triptych.

    A special token whose text the vocabulary does not hold has the id `None`.
    """

    def __init__(
        self,
        backend: Backend,
        specials: Specials | None = None,
        *,
        stop_ids: Iterable[int] = (),
        chat: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        limits.check(backend)
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.specials = specials or Specials()
        self.chat = chat
        self._config = dict(config or {})
        ids = {name: backend.token_to_id(text) for name, text in self.specials.named().items()}
        self.bos_id: int | None = ids.get("bos")
        self.eos_id: int | None = ids.get("eos")
        self.pad_id: int | None = ids.get("pad")
        self.unk_id: int | None = ids.get("unk")
        self.mask_id: int | None = ids.get("mask")
        self.cls_id: int | None = ids.get("cls")
        self.sep_id: int | None = ids.get("sep")
        own = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids: frozenset[int] = frozenset((*own, *stop_ids))
        # Encoders begin with a class token that may be named BOS too; theirs are no prompts, and are taken as they are.
        first = backend.encode("").ids[:1]
        self._begins = self.bos_id is not None and self.bos_id != self.cls_id and first == [self.bos_id]
        self._cleans = bool(self._config.get("clean_up_tokenization_spaces")) and not isinstance(backend.model, BPE)
        self._pieces = PieceReader(backend)

    def __repr__(self) -> str:
        names = ", ".join(f"{name}={text!r}" for name, text in self.specials.named().items())
        return f"Tokenizer({self.vocab_size} tokens{', ' if names else ''}{names})"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included.  A model may have more rows than this, never fewer."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def check_rows(self, rows: int) -> None:
        """Raise TextError where a text can be encoded into an id that a model with `rows` embeddings does not have.

        Added tokens are not counted: some checkpoints carry more of them than their model has embeddings.
        """
        largest = max(self.backend.get_vocab(with_added_tokens=False).values(), default=0)
        if largest >= rows:
            raise TextError(
                f"the tokenizer has the token id {largest}, and the model has rows for {rows} tokens; "
                "take both from one checkpoint"
            )
        around = max((*self.backend.encode("").ids, *self.backend.encode("", "").ids), default=0)
        if around >= rows:
            raise TextError(
                f"the tokenizer puts the token id {around} around texts, and the model has rows for {rows} tokens; "
                "take both from one checkpoint"
            )

    # -- texts to ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str | RenderedPrompt, special: bool = True) -> list[int]:
        """The ids of `text`, framed with BOS, EOS or `[CLS]`...`[SEP]` as this vocabulary does when `special`.

        A rendered chat prompt already holds its special tokens, so it is never framed; a text that itself begins with
        the text of BOS gets no second one.
        """
        if isinstance(text, RenderedPrompt):
            return self._rows([text.text], special=False)[0]
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        rows = self._rows(texts, special)
        if special and self._begins:
            bos = str(self.specials.bos)
            return [row[text.startswith(bos) :] for row, text in zip(rows, texts, strict=True)]
        return rows

    def encode_with_offsets(
        self, text: str, second: str | None = None, *, max_length: int | None = None, overlap: int = 0
    ) -> list[Encoded]:
        """`text`, or a pair of texts joined into one row as this vocabulary does, with the offsets of every token.

        Where the row of a pair would be longer than `max_length` tokens, the second text is cut into windows and there
        is one row for each; neighbouring windows share `overlap` tokens.  The first text is never cut.

        Raises InputError where special tokens, `text` and `overlap` leave no token for the second text.
        """
        with library(lambda problem: InputError(f"the texts cannot be encoded as a pair: {problem}")):
            row = self.backend.encode(text, second)
        whole = Encoded(list(row.ids), list(row.type_ids), list(row.offsets), list(row.sequence_ids))
        if max_length is None or second is None or len(whole.ids) <= max_length:
            return [whole]
        # Windows are cut here: truncation is a setting of the backend, which other threads use at the same time.
        inside = [i for i, sequence in enumerate(whole.sequence_ids) if sequence == 1]
        width = max_length - (len(whole.ids) - len(inside))
        if overlap < 0 or width <= overlap:
            raise InputError(
                f"the first text and {overlap} tokens of overlap leave none of the {max_length} tokens of a row to "
                "the second text; shorten the first text"
            )
        start, stop = inside[0], inside[-1] + 1
        firsts = range(start, max(start + 1, stop - overlap), width - overlap)
        return [whole.window(start, stop, first, min(first + width, stop)) for first in firsts]

    def encode_corpus(self, text: str) -> NDArray[np.int32]:
        """The ids of a long `text` as one array, without special tokens: `encode(text, special=False)`, in pieces.

        The library keeps a string for every token it makes, about 200 bytes each, so a corpus is cut where no token can
        reach across.  Vocabularies that put a mark before each text (SentencePiece) are not cut.
        """
        cuts = [0, *_cuts(text), len(text)] if self._pieces.local else [0, len(text)]
        parts = [text[a:b] for a, b in pairwise(cuts)]
        found = [np.zeros(0, np.int32)]
        for at in range(0, len(parts), _AT_ONCE):
            found += [np.asarray(row, np.int32) for row in self._rows(parts[at : at + _AT_ONCE], special=False)]
        return np.concatenate(found)

    def _rows(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        with library(lambda problem: TextError(f"this tokenizer cannot encode the text: {problem}")):
            try:
                return [row.ids for row in self.backend.encode_batch_fast(list(texts), add_special_tokens=special)]
            except (UnicodeEncodeError, TypeError) as error:
                raise InputError(f"a text cannot be encoded as UTF-8 ({error}); remove its lone surrogates") from error

    # -- ids to texts ---------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary become nothing.

        Where the config says `clean_up_tokenization_spaces`, no space is left before marks and English endings, as in
        transformers, which never does so to a BPE.
        """
        text = self._decode(ids, skip_special)
        return without_spaces(text) if self._cleans else text

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        with library(lambda problem: TextError(f"this tokenizer cannot decode the ids: {problem}")):
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        r"""A short readable name for each id, for the axes of attention maps.

        A space shows as `␣`, a line break as `⏎`, a tab as `⇥`; the bytes of an unfinished character as `\xe2`.
        """
        return [self._pieces.name(token) for token in ids]

    def stream(self, skip_special: bool = True) -> Stream:
        """A detokenizer that takes ids one at a time and gives text as soon as it cannot change any more: the spaces
        that `decode` would take back stay."""
        return Stream(lambda ids: self._decode(ids, skip_special))

    # -- files ----------------------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """`tokenizer.json` and `tokenizer_config.json`, which transformers' `AutoTokenizer` opens with the same ids."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._config,
            **self.specials.config(),
        }
        if self.chat is not None:
            config["chat_template"] = self.chat.source
        return {
            "tokenizer.json": self.backend.to_str(pretty=False).encode(),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode() + b"\n",
        }

    def save(self, directory: Path | str) -> None:
        """Write `files()` into `directory`, which is made if it does not exist."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (directory / name).write_bytes(content)


def from_directory(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: `tokenizer.json`, or the vocabulary files that stand for it
    (`triptych.text.vocabulary`), with what the files beside it add.

    `tokenizer_config.json` and `special_tokens_map.json` name the special tokens, the chat template is read from
    `chat_template.jinja` or the config.  How a text is framed is what `tokenizer.json` says: the config's
    `add_bos_token` and `add_eos_token` are for tokenizers without that file.  `generation_config.json` adds ends of
    generation to EOS.  Code that a config points to is never run.

    Raises TextError if there is neither, or one of the files cannot be read.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not has_tokenizer(path):
        raise TextError(f"no tokenizer in {path}; give a directory that holds tokenizer.json, or a .gguf file")
    config, older = json_object(path / "tokenizer_config.json"), json_object(path / "special_tokens_map.json")
    config = older | config if "added_tokens_decoder" in config else config | older  # as transformers takes them
    if file.is_file():
        backend, specials = _parse(file), Specials.from_config(config)
        added.add(backend, specials, config, path)
    else:
        backend, specials = vocabulary.build(path, config)
    source = _chat_source(path, config)
    chat = None if source is None else ChatTemplate(source, specials.config())
    ends = json_object(path / "generation_config.json").get("eos_token_id") or []
    stop_ids = ends if isinstance(ends, list) else [ends]
    if not all(type(index) is int for index in stop_ids):
        raise TextError(f"{path / 'generation_config.json'}: eos_token_id {shown(ends)} is no id and no list of ids")
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "chat_template")}
    try:
        with library(lambda problem: TextError(f"it cannot be used: {problem}")):
            return Tokenizer(backend, specials, stop_ids=stop_ids, chat=chat, config=kept)
    except TextError as error:
        raise TextError(f"the tokenizer in {path}: {error}") from error


def has_tokenizer(path: Path) -> bool:
    """Whether the directory `path` holds a `tokenizer.json` or vocabulary files."""
    return (path / "tokenizer.json").is_file() or bool(vocabulary.find(path))


def _parse(file: Path) -> Backend:
    with library(lambda problem: TextError(f"{file} is not a tokenizer.json: {problem}")):
        raw = read_text(file)
        if _SUSPECT.search(raw):
            _judge(json.loads(raw))
        return Backend.from_str(raw)


def _judge(state: Any) -> None:
    """Raise ValueError for what would make the library end the program: an id for which it makes that many places, and
    a table of replacements that leads out of itself, in a normalizer and those inside."""
    vocab = state["model"]["vocab"]
    ids = [
        *(vocab.values() if isinstance(vocab, dict) else ()),
        *(one["id"] for one in state.get("added_tokens") or ()),
    ]
    if any(type(index) is not int or index >= added.MOST for index in ids):
        raise ValueError(f"one of its ids is no whole number below {added.MOST}")
    waiting = [state.get("normalizer")]
    for part in waiting:
        if isinstance(part, dict):
            sentencepiece.check_charsmap(base64.b64decode(part.get("precompiled_charsmap") or ""))
            waiting += part.get("normalizers") or ()


def _chat_source(path: Path, config: Mapping[str, Any]) -> str | None:
    """A template of its own file, one in the config, or the one named `default` where the config holds several."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    source = config.get("chat_template")
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str | None):
        raise TextError(f"{path / 'tokenizer_config.json'}: chat_template is {shown(source)}, not a template")
    return source


def _cuts(text: str) -> list[int]:
    """Places at least `_CUT_EVERY` characters apart where no token can reach across."""
    cuts, at = [], 0
    while (found := _SAFE_CUT.search(text, at + _CUT_EVERY)) is not None:
        at = found.start()
        cuts.append(at)
    return cuts
