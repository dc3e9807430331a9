"""The vocabulary of a model as bytes, from its tokenizer's own tables, in the form in which llguidance searches it."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from triptych.errors import InputError, TextError, library, shown
from triptych.text import Tokenizer
from triptych.text.detokenize import BYTE_OF
from triptych.text.tokenizer_limits import steps

STUCK = "no token of this vocabulary leads to a text of it"
MOST_COMPILED = 64  # constraints that a vocabulary keeps
_TOGETHER = 64  # tokens decoded at once
Words = NDArray[np.uint32]
"""Bits of tokens, the lowest of the first word first."""


def guidance() -> ModuleType:
    """The library llguidance.  Raises InputError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise InputError("a constraint needs the package llguidance: pip install 'llguidance>=1.3'") from None
    return llguidance


class TokenVocabulary:
    """The texts of a model's tokens, for constraints.

    tokens         the bytes of each id below `size`; none where the tokenizer has no such id.
    end            an id beyond those of the model: its bit in a mask says that the text may end.
    never_first    the bits of the tokens whose first space is not in the text where they begin it.

    Special and other added tokens are in no text, and neither are ids that the tokenizer does not have.

    Raises TextError for a tokenizer whose decoder makes other texts of tokens than those of each by itself.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size, self.end = size, size
        strips, self.tokens, special = token_bytes(tokenizer, size)
        self.words = (size + 1 + 31) // 32
        begins = [i for i, text in enumerate(self.tokens) if strips and text.startswith(b" ")]
        self.never_first = bits_of(begins, self.words)
        self.lock = Lock()
        self.compiled: OrderedDict[str, Any] = OrderedDict()
        texts = [*self.tokens, b"<end>"]
        for token in special:  # a name each: the library takes tokens of one name for each other
            texts[token] = b"<%d>" % token
        source = _Tokens(texts, [*special, self.end], self.end)
        self.library = guidance().LLTokenizer(source, eos_token=self.end, slices=_slices())

    def matcher(self, grammar: str) -> Any:
        """A matcher at the beginning of its text.  Raises InputError where the library cannot compile the grammar."""
        with self.lock:
            compiled = self.compiled.get(grammar)
            if compiled is not None:
                self.compiled.move_to_end(grammar)
        if compiled is None:
            llguidance = guidance()
            compiled = llguidance.LLMatcher(self.library, grammar, log_level=0, limits=limits())
            if compiled.is_error():
                raise InputError(f"the constraint cannot be used with this vocabulary: {reason(compiled.get_error())}")
            if warned := compiled.get_grammar_warnings():
                raise InputError(f"the constraint would not be kept whole: {reason(str(warned[0]))}")
            with self.lock:
                self.compiled[grammar] = compiled
                while len(self.compiled) > MOST_COMPILED:
                    self.compiled.popitem(last=False)
        return compiled.deep_copy()


_VOCABULARIES: WeakKeyDictionary[Tokenizer, dict[tuple[int, int], TokenVocabulary]] = WeakKeyDictionary()
_LOCK = Lock()


def vocabulary_of(tokenizer: Tokenizer, size: int) -> TokenVocabulary:
    """The vocabulary of a model with `size` embeddings, made once: seconds for 262,144 tokens."""
    key = size, tokenizer.vocab_size
    with _LOCK:
        made = _VOCABULARIES.setdefault(tokenizer, {})
        if key not in made:
            made[key] = TokenVocabulary(tokenizer, size)
        return made[key]


def limits() -> Any:
    """The library's limits, with errors that say what is wrong and nothing of its inside."""
    return guidance().LLParserLimits(verbose_errors=False)


def reason(message: str) -> str:
    """What the library says is wrong, in one line and without its excerpt of the grammar."""
    lines = [line.strip() for line in message.splitlines()]
    stop = next((i for i, line in enumerate(lines) if line[:1].isdigit() and " | " in line), len(lines))
    text = "; ".join(line for line in lines[:stop] if line and not set(line) <= {"^"} and line != "<non-verbose/>")
    if text.startswith("NoExtension"):
        return STUCK
    return text[:300].removeprefix("at 1(8): ").removeprefix("failed to compile JSON schema: ")


def bits_of(ids: list[int], words: int) -> Words:
    """So many words with the bits of these ids."""
    bits = np.zeros(words, np.uint32)
    places = np.asarray(ids, np.int64)
    np.bitwise_or.at(bits, places >> 5, (1 << (places & 31)).astype(np.uint32))
    return bits


def token_bytes(tokenizer: Tokenizer, size: int) -> tuple[bool, list[bytes], list[int]]:
    """Whether the first space of a text is left out; the bytes of each id below `size` in a text; the ids of tokens
    that are in none.  Raises TextError as `TokenVocabulary`."""
    backend = tokenizer.backend
    decoder = [dict(step) for step in steps(backend.decoder)]
    kinds = [step["type"] for step in decoder]
    odd = next((step["type"] for step in decoder if not _is_plain(step)), None if kinds else "no decoder")
    if odd is not None:
        raise _not_byte_wise(f"this one has {odd}, which makes a text of several tokens")
    added = backend.get_added_tokens_decoder()
    specials = (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id)
    special = {*added, *tokenizer.stop_ids, *(token for token in specials if token is not None)}
    tokens = [b""] * size
    for text, token in backend.get_vocab(with_added_tokens=False).items():
        if token < size and token not in special:
            tokens[token] = _decoded(text, decoder)
    strips = any(step.get("start") == 1 or step.get("prepend_scheme", "never") != "never" for step in decoder)
    _check(tokenizer, tokens, strips)
    return strips, tokens, sorted(token for token in special if token < size)


def _is_plain(step: dict[str, Any]) -> bool:
    """Whether a step of a decoder makes the bytes of each token by itself, but for the first space of a text."""
    kind = step["type"]
    if kind == "Replace":
        return "String" in step["pattern"]
    if kind == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and not step["stop"])
    return kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")


def _decoded(text: str, decoder: list[dict[str, Any]]) -> bytes:
    """The bytes of one token, by the steps of its decoder."""
    for step in decoder:
        kind = step["type"]
        if kind == "ByteLevel":
            return bytes(BYTE_OF[char] for char in text) if BYTE_OF.keys() >= {*text} else text.encode()
        if kind == "ByteFallback" and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                continue
        if kind == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
        if kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
    return text.encode()


def _check(tokenizer: Tokenizer, tokens: list[bytes], strips: bool) -> None:
    """Compare the bytes of all tokens with what the tokenizer makes of them, beside one another."""
    whole = [token for token, text in enumerate(tokens) if text and _is_text(text)]
    for first in range(0, len(whole), _TOGETHER):
        ids = whole[first : first + _TOGETHER]
        expected = b"".join(tokens[token] for token in ids).decode()
        expected = expected[strips and expected.startswith(" ") :]
        with library(lambda problem: TextError(f"this tokenizer cannot decode its own tokens: {problem}")):
            text = tokenizer.backend.decode(ids, skip_special_tokens=True)
        if text != expected:
            at = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), 0)
            raise _not_byte_wise(f"it decodes {shown(expected[at : at + 20])} as {shown(text[at : at + 20])}")


def _is_text(text: bytes) -> bool:
    try:
        return bool(text.decode())
    except UnicodeDecodeError:
        return False


def _not_byte_wise(problem: str) -> TextError:
    return TextError(
        f"a constraint needs a tokenizer whose tokens are parts of the text, as byte-level and SentencePiece ones are; "
        f"{problem}"
    )


def _slices() -> list[str]:
    """Sets of tokens that the library looks at once, where text is free: those of strings in JSON."""
    slices: list[str] = guidance().LLTokenizer.json_slices()
    return slices


class _Tokens:
    """A vocabulary as the library asks for it.  It is never asked to encode: constraints force no tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError
