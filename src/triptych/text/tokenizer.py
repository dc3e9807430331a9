"""Texts to token ids and back: one class over the `tokenizers` library, whatever file the vocabulary came from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from triptych.arguments import check_ids, checked_methods
from triptych.errors import ArgumentError, InputError, MissingNameError, TextError, library, shown
from triptych.files import writable_name
from triptych.migration_hints import TOKENIZER, ConstructorOfOthers, hint
from . import corpus_cuts, tokenizer_limits
from .chat import ChatTemplate, RenderedPrompt
from .detokenize import TextStream, TokenNames, without_spaces
from .specials import Specials

if TYPE_CHECKING:
    from torch import Tensor

_IDS = 1 << 32  # ids of the tokenizers library have 32 bits
_CHARACTERS_AT_ONCE = 1 << 20  # of a corpus, encoded in one call on all cores


@dataclass(frozen=True)
class Encoded:
    """One encoded text, or a pair of texts joined into one row.  All lists have one entry per token.

    `token_types` is the segment that BERT-like models embed.  `offsets` are the first character of the token in its own
    text and the one after its last.  `sequence_ids` tells which text the token is of: 0 for the first, 1 for the
    second, None for a special token.  `words` has the number of its word; it may be empty.
    """

    ids: list[int]
    token_types: list[int]
    offsets: list[tuple[int, int]]
    sequence_ids: list[int | None]
    words: list[int | None] = field(default_factory=list)

    def window(self, start: int, stop: int, first: int, last: int) -> Encoded:
        """A copy in which only the tokens from `first` to `last` (exclusive) remain of the run `[start, stop)`."""
        return Encoded(*(one[:start] + one[first:last] + one[stop:] for one in vars(self).values()))


@final
@checked_methods
class Tokenizer:
    """A vocabulary with its special tokens, its stop tokens and, for chat models, its template.

    `backend` is the `tokenizers.Tokenizer` that does the work.  Its truncation and padding are switched off: texts are
    never shortened silently, and there is no padding inside Triptych.  A tokenizer can be used by several threads.

    The id of a special token is `None` where the vocabulary does not have its text.  `leading_bos` is the text of BOS
    where `encode` puts it first, else None; `cleans_spaces` tells whether `decode` removes spaces before punctuation.

    Raises TextError for a backend that exceeds the limits of `triptych.text.tokenizer_limits`.
    """

    def __init__(
        self,
        backend: Backend,
        specials: Specials | None = None,
        *,
        stop_ids: Iterable[int] = (),
        chat: ChatTemplate | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        if not isinstance(backend, Backend):
            raise InputError(f"backend={shown(backend)} must be a tokenizers.Tokenizer; from_directory() reads files")
        tokenizer_limits.check(backend)
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.specials = specials or Specials()
        self.chat = chat
        self._config = dict(config or {})
        ids: list[int | None] = [None if text is None else backend.token_to_id(text) for text in astuple(self.specials)]
        self.bos_id, self.eos_id, self.pad_id, self.unk_id, self.mask_id, self.cls_id, self.sep_id = ids
        ends = check_ids(list(stop_ids) if isinstance(stop_ids, Set) else stop_ids, _IDS, "stop_ids")
        self.stop_ids: frozenset[int] = frozenset(ends).union([] if self.eos_id is None else [self.eos_id])
        # The class token of an encoder may also be named BOS; its texts are not prompts, so it may come twice.
        first = backend.encode("").ids[:1]
        starts_with_bos = self.bos_id != self.cls_id and first == [self.bos_id]
        self.leading_bos: str | None = self.specials.bos if starts_with_bos else None
        cleans = bool(self._config.get("clean_up_tokenization_spaces"))
        self.cleans_spaces = cleans and not isinstance(backend.model, BPE)
        self._names = TokenNames(backend)

    def __repr__(self) -> str:
        names = ", ".join(f"{name}={text!r}" for name, text in self.specials.named().items())
        return f"Tokenizer({self.vocab_size} tokens{', ' if names else ''}{names})"

    def __len__(self) -> int:
        return self.vocab_size

    if not TYPE_CHECKING:  # mypy is to find unknown names by itself

        def __getattr__(self, name: str) -> NoReturn:
            raise MissingNameError(f"Tokenizer has no {name!r}{hint(name, TOKENIZER, dir(type(self)))}")

        def __call__(self, *texts: object, **options: object) -> NoReturn:
            raise ArgumentError(f"a Tokenizer is not called{hint('__call__', TOKENIZER, ())}")

        def __getitem__(self, token: object) -> NoReturn:  # `in` asks it too
            raise ArgumentError("a Tokenizer has no items; write tokenizer.backend.token_to_id(token)")

        def __setattr__(self, name: str, value: object) -> None:
            if "_names" in vars(self):  # it is made
                if name not in vars(self) and not hasattr(type(self), name):
                    new = "Tokenizer(tokenizer.backend, Specials(eos=...))"
                    raise MissingNameError(f"Tokenizer has no {name!r} to set; special tokens are given to {new}")
                if name.endswith("_id") and value is not None:
                    check_ids([value], self.vocab_size, name)
            super().__setattr__(name, value)

    from_pretrained = ConstructorOfOthers(TOKENIZER["from_pretrained"])

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included.  A model may have more embeddings than this."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def check_rows(self, rows: int) -> None:
        """Raise TextError where a text can be encoded into an id that a model with `rows` embeddings does not have.

        Added tokens are not counted: some checkpoints carry more of them than their model has embeddings.
        """
        own = self.backend.get_vocab(with_added_tokens=False).values()
        around = (*self.backend.encode("").ids, *self.backend.encode("", "").ids)
        for ids, does in ((own, "has the token id {}"), (around, "puts the token id {} around texts")):
            if max(ids, default=0) >= rows:
                raise TextError(
                    f"the tokenizer {does.format(max(ids))}, and the model has rows for {rows} tokens; "
                    "take both from one checkpoint"
                )

    # -- texts to ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str | RenderedPrompt, special: bool = True) -> list[int]:
        """The ids of `text`; with `special`, between the special tokens of this vocabulary (BOS and EOS, or `[CLS]` and
        `[SEP]`).

        A rendered chat prompt contains its special tokens already, so none are added; a text that itself begins with
        the text of BOS gets no second one.

        Raises InputError for a text with half of a surrogate pair, which has no UTF-8, and TextError where the library
        fails.
        """
        if isinstance(text, RenderedPrompt):
            return self._rows([text.text], special=False)[0]
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """`encode` of each text, by several threads."""
        rows = self._rows(texts, special)
        bos = self.leading_bos
        if special and bos is not None:
            return [row[text.startswith(bos) :] for row, text in zip(rows, texts, strict=True)]
        return rows

    def encode_with_offsets(
        self, text: str, second: str | None = None, *, max_length: int | None = None, overlap: int = 0
    ) -> list[Encoded]:
        """`text`, or a pair of texts joined into one row as this vocabulary does, with the offsets of every token.

        Where the row would be longer than `max_length` tokens, the second text (the only one where there is no second)
        is cut into windows and there is one row for each; neighbouring windows share `overlap` tokens.  The first text
        of a pair is never cut.

        Raises InputError where special tokens, the first text of a pair and `overlap` leave no token for a window.
        """
        check_unicode(text + (second or ""))
        if not 0 <= overlap < (max_length or 1):
            raise InputError(
                f"overlap={overlap} is shared by rows of max_length={max_length}; give 0, or fewer than those"
            )
        with library(lambda problem: InputError(f"the texts cannot be encoded as a pair: {problem}")):
            row = self.backend.encode(text, second)
        whole = Encoded(
            list(row.ids), list(row.type_ids), list(row.offsets), list(row.sequence_ids), list(row.word_ids)
        )
        if max_length is None or len(whole.ids) <= max_length:
            return [whole]
        # Windows are cut here: truncation is a setting of the backend, which other threads use at the same time.
        inside = [i for i, sequence in enumerate(whole.sequence_ids) if sequence == (0 if second is None else 1)]
        width = max_length - (len(whole.ids) - len(inside))
        if width <= overlap:
            raise InputError(
                f"what stands in every row and {overlap} tokens of overlap leave none of the {max_length} tokens of a "
                "row to the text that is cut; shorten the first text, share fewer tokens, or make rows longer"
            )
        start, stop = inside[0], inside[-1] + 1
        firsts = range(start, max(start + 1, stop - overlap), width - overlap)
        return [whole.window(start, stop, first, min(first + width, stop)) for first in firsts]

    def encode_corpus(self, text: str) -> NDArray[np.int32]:
        """The ids `[N]` of a long `text`, without special tokens: those of `encode(text, special=False)`.

        Raises TextError where more than four million characters in a row have no place to cut.
        """
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids `[N]` of each of the `texts`, however long, without special tokens.

        A long text is encoded in parts (`triptych.text.corpus_cuts`), because the library needs about 200 bytes for
        each token that it makes in one call.

        Raises TextError where more than four million characters in a row have no place to cut.
        """
        parts, counts = list[str](), list[int]()
        for text in texts:
            own = [text] if len(text) <= corpus_cuts.PART else list(self._parts(text))
            parts += own
            counts.append(len(own))
        groups = _grouped(parts)
        rows = iter([np.asarray(row, np.int32) for group in groups for row in self._rows(group, special=False)])
        return [next(rows) if count == 1 else np.concatenate(list(islice(rows, count))) for count in counts]

    def _parts(self, text: str) -> Iterator[str]:
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        tokens = self.backend.get_vocab(with_added_tokens=False)
        single = all(len(token) == 1 or token in added for token in tokens)
        return corpus_cuts.parts(text, lambda texts: self._rows(texts, special=False), single_characters=single)

    def _rows(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        with library(lambda problem: TextError(f"this tokenizer cannot encode the text: {problem}")):
            try:
                return [row.ids for row in self.backend.encode_batch_fast(list(texts), add_special_tokens=special)]
            except (UnicodeEncodeError, TypeError) as error:
                raise InputError(f"a text cannot be encoded as UTF-8 ({error}); remove its lone surrogates") from error

    # -- ids to texts ---------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int] | NDArray[Any] | Tensor, skip_special: bool = True) -> str:
        """The text of `ids`.  Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary are left out.

        Where the config sets `clean_up_tokenization_spaces`, spaces before punctuation and English endings are removed,
        as in transformers, which does not do so for BPE.

        Raises InputError for anything but ids.
        """
        text = self._decode(check_ids(ids, _IDS, "ids"), skip_special)
        return without_spaces(text) if self.cleans_spaces else text

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        with library(lambda problem: TextError(f"this tokenizer cannot decode the ids: {problem}")):
            return str(self.backend.decode(ids, skip_special_tokens=skip_special))

    def tokens(self, ids: Iterable[int]) -> list[str]:
        r"""A short readable name for each id, for the axes of attention maps.

        A space shows as `␣`, a line break as `⏎`, a tab as `⇥`; the bytes of an unfinished character as `\xe2`.
        Raises InputError for anything but ids.
        """
        return [self._names.name(token) for token in check_ids(ids, _IDS, "ids")]

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        r"""The text of each id by itself, its spaces kept; special tokens by their names, the bytes of an unfinished
        character as `\xe2`.  Raises InputError for anything but ids."""
        return [self._names.text(token) for token in check_ids(ids, _IDS, "ids")]

    def stream(self, skip_special: bool = True) -> TextStream:
        """A detokenizer that takes ids one at a time and returns text as soon as later ids cannot change it.

        It keeps the spaces that `decode` removes under `clean_up_tokenization_spaces`.
        """
        return TextStream(lambda ids: self._decode(ids, skip_special))

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
        """Write `files()` into `directory`, which is created if it does not exist; each is replaced as a whole.

        Raises TextError where they cannot be written.
        """
        directory = Path(writable_name(directory))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory, prefix=".tokenizer-") as scratch:
                for name, content in self.files().items():
                    (Path(scratch) / name).write_bytes(content)
                for name in self.files():
                    (Path(scratch) / name).replace(directory / name)
        except (OSError, UnicodeEncodeError) as error:
            problem = getattr(error, "strerror", None) or error
            raise TextError(f"cannot write the tokenizer into {shown(str(directory))}: {problem}") from None


def check_unicode(text: str) -> None:
    """Raises TextError for half of a surrogate pair, which has no UTF-8, and InputError for what is no text."""
    if not isinstance(text, str):
        raise InputError(f"{shown(text)} is no text; a tokenizer is made from strings")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"a text cannot be encoded as UTF-8 ({error}); remove its lone surrogates") from None


def _grouped(parts: Iterable[str]) -> Iterator[list[str]]:
    """Neighbouring parts in lists of about a million characters."""
    group, size = list[str](), 0
    for part in parts:
        group.append(part)
        size += len(part)
        if size >= _CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
    yield group
