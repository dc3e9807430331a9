"""Tokenizers for new models: bytes, characters, byte-level BPE and WordPiece.

Each is an ordinary `tokenizers` object, so its `tokenizer.json` opens in transformers with the same ids.  The
vocabulary is a function of the texts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from triptych.arguments import checked
from triptych.errors import InputError, TextError, shown
from .corpus_cuts import words_together
from .detokenize import BYTE_OF
from .gguf_tokenizer import byte_level
from .specials import DECODER, ENCODER, SEQ2SEQ, SpecialsLayout
from .tokenizer import Tokenizer, check_unicode

MOST_TOKENS = 1 << 20  # of a new vocabulary: the memory for all of it is taken before the first token is made


Layout = Literal["decoder", "encoder", "encoder-decoder"]
LAYOUTS: dict[Layout, SpecialsLayout] = {"decoder": DECODER, "encoder": ENCODER, "encoder-decoder": SEQ2SEQ}


@checked
def new_tokenizer(wanted: str, texts: Sequence[str], layout: Layout | SpecialsLayout) -> Tokenizer | None:
    """`byte`, `characters`, `bpe:4096` or `words:4096`, the vocabulary made from `texts`; None for any other name.

    `layout` is that of the model, or the special tokens themselves.  Raises InputError for another one.
    """
    if not isinstance(layout, SpecialsLayout) and layout not in LAYOUTS:
        raise InputError(f"layout={shown(layout)} must be one of {', '.join(LAYOUTS)}")
    specials = layout if isinstance(layout, SpecialsLayout) else LAYOUTS[layout]
    name, _, size = wanted.partition(":")
    if wanted == "byte":
        return byte_tokenizer(specials)
    if wanted == "characters":
        return character_tokenizer("".join(texts), specials)
    if name in ("bpe", "words") and size.isdecimal():
        return (bpe_tokenizer if name == "bpe" else word_tokenizer)(texts, int(size), specials)
    return None


@checked
def byte_tokenizer(layout: SpecialsLayout = DECODER) -> Tokenizer:
    """The 256 bytes of UTF-8, each its own id, and the special tokens from 256 on.  Decoding restores every text."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _finish(byte_level(BYTE_OF, [], words), layout)


@checked
def character_tokenizer(text: str, layout: SpecialsLayout = DECODER) -> Tokenizer:
    """The special tokens, then each character of `text` in order of its code point.

    A character outside that alphabet becomes the unknown token, `<unk>` where none is named.

    Raises TextError if `text` is empty.
    """
    if not text:
        raise TextError("a character tokenizer takes its alphabet from a text, and this one is empty; give more text")
    if layout.specials.unk is None:
        layout = replace(layout, specials=replace(layout.specials, unk="<unk>"))
    names = _texts(layout)
    alphabet = sorted(set(text) - set(names))
    check_unicode("".join(alphabet))
    vocab = {token: index for index, token in enumerate([*names, *alphabet])}
    # BPE without merges looks up characters, three times faster than WordLevel after a split into characters.
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token=layout.specials.unk))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.decoder = decoders.Fuse()
    return _finish(backend, layout)


@checked
def bpe_tokenizer(texts: Iterable[str], vocab_size: int, layout: SpecialsLayout = DECODER) -> Tokenizer:
    """Byte-level BPE trained on `texts`: special tokens, the 256 bytes, then merges up to `vocab_size` in all.

    The split into words is GPT-2's.  Decoding restores every text.

    Raises TextError if `vocab_size` is too small for the special tokens and the bytes, or above `MOST_TOKENS`.
    """
    _check_size("byte-level", vocab_size, 256 + len(_texts(layout)))
    backend = byte_level({}, [], pre_tokenizers.ByteLevel(add_prefix_space=False))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_texts(layout),
        initial_alphabet=sorted(BYTE_OF, key=BYTE_OF.__getitem__),
        show_progress=False,
    )
    backend.train_from_iterator((part for text in _checked(texts) for part in words_together(text)), trainer)
    return _finish(backend, layout)


@checked
def word_tokenizer(texts: Iterable[str], vocab_size: int, layout: SpecialsLayout = ENCODER) -> Tokenizer:
    """The most frequent words and punctuation marks of `texts`, up to `vocab_size` tokens with the special ones.

    Texts are lowercased and accents removed.  Every other word becomes the unknown token.

    Raises TextError if `vocab_size` leaves no token for a word, or is above `MOST_TOKENS`.
    """
    _check_size("word-level", vocab_size, 1 + len(_texts(layout)))
    backend = Backend(models.WordLevel(unk_token=layout.specials.unk or "[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=_texts(layout), show_progress=False)
    lines = (line for text in _checked(texts) for line in text.splitlines())
    backend.train_from_iterator((part for line in lines for part in words_together(line)), trainer)
    return _finish(backend, layout)


def _checked(texts: Iterable[str]) -> Iterator[str]:
    empty = True
    for text in texts:
        check_unicode(text)
        empty = empty and not text.strip()
        yield text
    if empty:
        raise TextError("the vocabulary is learned from texts, and there is none but empty ones; give more text")


def _check_size(kind: str, vocab_size: int, least: int) -> None:
    if not least <= vocab_size <= MOST_TOKENS:
        raise TextError(f"a {kind} vocabulary has {least} to {MOST_TOKENS:,} tokens, not {vocab_size:,}")


def _finish(backend: Backend, layout: SpecialsLayout) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in _texts(layout)])
    layout.apply(backend)
    return Tokenizer(backend, layout.specials)


def _texts(layout: SpecialsLayout) -> list[str]:
    return list(layout.specials.named().values())
