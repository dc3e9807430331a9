"""Limits on what a tokenizer may do to a text, checked before it reads one.

A `tokenizer.json` is a small program from a checkpoint, so it is not trusted.  A few hundred bytes of it can turn one
character into 2^60 (replacements whose results are replaced again), or put ten megabytes in front of every text.  The
limits are far above what real tokenizers do: the largest growth of one step is NFKC's, 18 characters for U+FDFA, and
the bound for ALBERT's, which has two such steps, is 2,592.

The time that a hostile regular expression takes is not limited.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer as Backend
from tokenizers.models import Unigram, WordPiece

from triptych.errors import TextError

MAX_GROWTH = 1 << 14  # characters that one character of a text may become, by an upper bound
MAX_ADDED = 1 << 10  # characters, or special tokens, put around a text
MAX_STEPS = 1 << 8  # normalizers and pre-tokenizers, or decoders, applied in turn
MAX_TOKEN = 1 << 16  # characters of a token
MAX_PIECE = 1 << 10  # characters of a unigram piece: every position of a text tries all lengths
MAX_WORD = 1 << 8  # characters of a word that WordPiece splits: the time grows with the cube
MAX_AFFIX = 1 << 6  # characters that mark a piece inside a word, or at its end

Step = Mapping[str, Any]
"""One step of a tokenizer as `tokenizer.json` writes it: its `type` and its settings."""

#: Keys under which a `Sequence` lists its steps.
_INSIDE = ("normalizers", "pretokenizers", "processors", "decoders")
#: type -> characters that any one character may become.  Other steps do not lengthen a text.
_UNICODE_GROWTH = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 8, "ByteLevel": 4, "Metaspace": 2,
    "WordPiece": 2, "BPEDecoder": 2, "CTC": 2,
}  # fmt: skip


@runtime_checkable
class Component(Protocol):
    """A normalizer, pre-tokenizer, post-processor or decoder of the `tokenizers` library."""

    def __getstate__(self) -> bytes: ...


def check(backend: Backend) -> None:
    """Raise TextError, naming the limit, for a tokenizer that could need huge memory or time for a short text."""
    reading = [*steps(backend.normalizer), *steps(backend.pre_tokenizer)]
    _check_growth("its normalizer and pre-tokenizer", reading)
    _check_growth("its decoders", list(steps(backend.decoder)))
    _check_templates(list(steps(backend.post_processor)))
    model = backend.model
    if isinstance(model, WordPiece) and model.max_input_chars_per_word > MAX_WORD:
        raise TextError(f"its max_input_chars_per_word is {model.max_input_chars_per_word}; {MAX_WORD} is the limit")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, name, None) or ""
        if len(affix) > MAX_AFFIX:
            raise TextError(f"its {name} has {len(affix):,} characters; {MAX_AFFIX} is the limit")
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
    limit = MAX_PIECE if isinstance(model, Unigram) else MAX_TOKEN
    if longest > limit:
        raise TextError(f"it has a token of {longest:,} characters; {limit:,} is the limit")


def steps(component: Component | None) -> Iterator[Step]:
    """The steps of a component in the order they are applied; a `Sequence` is replaced by the steps inside it."""
    waiting: list[Step] = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        inside = [part for key in _INSIDE for part in step.get(key, ())]
        if step["type"] != "Sequence":
            yield step
        waiting += reversed(inside)


class Growth:
    """An upper bound on how many characters the last steps make of each character, computed from the last step back.

    `added` bounds the characters that come from no character of the text.
    """

    def __init__(self) -> None:
        self._default_growth = 1.0
        self._growth_of: dict[str, float] = {}
        self.added = 0.0

    @property
    def largest(self) -> float:
        return max(self._default_growth, *self._growth_of.values()) if self._growth_of else self._default_growth

    def prepend_step(self, step: Step) -> None:
        """Include `step`, which comes before the steps included so far."""
        if step["type"] == "Replace":
            self._replaced(step["pattern"], step["content"])
        elif step["type"] == "Prepend":
            self.added += self._sum(step["prepend"])
        elif step["type"] == "Precompiled":
            self._multiply(_longest_replacement(step))
        else:
            self._multiply(_UNICODE_GROWTH.get(step["type"], 1))

    def _sum(self, text: str) -> float:
        return sum(self._growth_of.get(char, self._default_growth) for char in text)

    def _multiply(self, count: int) -> None:
        if count > 1:
            self._default_growth, self._growth_of = self.largest * count, {}

    def _replaced(self, pattern: Mapping[str, str], content: str) -> None:
        length, literal = self._sum(content), pattern.get("String")
        if literal:  # the length of the content is divided among the characters of a match
            for char in literal:
                self._growth_of[char] = max(self._growth_of.get(char, self._default_growth), length / len(literal))
        else:  # a regular expression may match anything, and also before every character and at the end
            self._default_growth += length
            self._growth_of = {char: old + length for char, old in self._growth_of.items()}
            self.added += length


def _check_growth(name: str, reading: list[Step]) -> None:
    if len(reading) > MAX_STEPS:
        raise TextError(f"{name} apply {len(reading)} steps; {MAX_STEPS} is the limit")
    growth = Growth()
    for step in reversed(reading):
        growth.prepend_step(step)
    if growth.largest > MAX_GROWTH:
        raise TextError(f"{name} can make {growth.largest:.3g} characters of one; {MAX_GROWTH:,} is the limit")
    if growth.added > MAX_ADDED:
        raise TextError(f"{name} can add {growth.added:.3g} characters to a text; {MAX_ADDED:,} is the limit")


def _check_templates(processors: list[Step]) -> None:
    if len(processors) > MAX_STEPS:
        raise TextError(f"it has {len(processors)} post-processors; {MAX_STEPS} is the limit")
    added = 0
    for step in (step for step in processors if step["type"] == "TemplateProcessing"):
        for template in (step["single"], step["pair"]):
            texts = [piece["Sequence"]["id"] for piece in template if "Sequence" in piece]
            if len(set(texts)) < len(texts):
                raise TextError("its post-processor repeats a text; each may occur once")
            names = [piece["SpecialToken"]["id"] for piece in template if "SpecialToken" in piece]
            added += sum(len(step["special_tokens"][name]["ids"]) for name in names)
    if added > MAX_ADDED:
        raise TextError(f"its post-processor adds {added:,} tokens to texts; {MAX_ADDED:,} is the limit")


def _longest_replacement(step: Step) -> int:
    """Characters of the longest replacement in a compiled table (see `sentencepiece_file.check_charsmap`)."""
    table = base64.b64decode(step["precompiled_charsmap"] or "")
    texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace")
    return max(map(len, texts.split("\0")))
