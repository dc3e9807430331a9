"""The tokenizer of a GGUF file, from its metadata.

A GGUF names the kind of its tokenizer (`tokenizer.ggml.model`) and, for byte-level BPE, only the *name* of the way text
is split into words first (`tokenizer.ggml.pre`).  With a wrong split the model still runs, but its predictions get
worse without an error, so the names are a closed table and an unknown name is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from triptych.arguments import checked
from triptych.errors import TextError, nearest
from .chat import ChatTemplate
from .sentencepiece_file import (
    BYTE,
    CONTROL,
    MAX_PIECE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Malformed,
    check_charsmap,
)
from .sentencepiece_tokenizers import bytes_to_text
from .specials import Specials, surround
from .tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
#: Special token -> the key of its id.
SPECIAL_IDS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id",
    "mask": "mask_token_id", "cls": "cls_token_id", "sep": "seperator_token_id",  # the format itself misspells it
}  # fmt: skip
#: Keys of Triptych's own, where the format has none: Metaspace's prepend scheme, the ids of tokens that take the spaces
#: on their left or right, and whether NFC comes first where the named split has no normalizer.
SCHEME, STRIPPED = "space_prefix_scheme", ("lstrip_token_ids", "rstrip_token_ids")
COMPOSED = "compose_characters"
OWN_KEYS = (SCHEME, *STRIPPED, COMPOSED)


@dataclass(frozen=True)
class Split:
    """The split of texts into words, before merging, by one family of byte-level BPE.

    `patterns` are regular expressions applied in turn; each makes its matches words of their own.  `whole_words`: a
    word that is itself a token is not merged from its characters (`ignore_merges`).  `add_bos`: whether texts begin
    with BOS where a file does not say.  `composed`: whether NFC comes first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    composed: bool = False


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """The pattern of cl100k and its successors; the pattern `digits` matches a run of digits."""
    return rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN_WORDS = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_O200K_WORDS = (
    rf"{_START}{_UPPER}*{_LOWER}+{_SHORTENED}?|{_START}{_UPPER}+{_LOWER}*{_SHORTENED}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)

_CL100K = Split((_words(r"\p{N}{1,3}"),))

#: Name in a GGUF -> the split in the `tokenizer.json` that the models of that name were published with.
SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), Split((_GPT2_WORDS,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), Split((r"\p{N}", _GPT2_WORDS))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), replace(_CL100K, whole_words=True, add_bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((_words(r"\p{N}"),), composed=True)),
    "tekken": Split((_TEKKEN_WORDS,), whole_words=True, add_bos=True),
    "gpt-4o": Split((_O200K_WORDS,)),
}


def byte_level_words(split: Split) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that splits a text into words by `split` and writes their bytes as characters."""
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level(
    words: dict[str, int],
    merges: list[tuple[str, str]],
    splitting: pre_tokenizers.PreTokenizer,
    *,
    composed: bool = False,
    whole_words: bool = False,
) -> Backend:
    """Byte-level BPE (Radford et al. 2019) with this pre-tokenizer, with NFC first if `composed`."""
    backend = Backend(models.BPE(vocab=words, merges=merges, ignore_merges=whole_words))
    if composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting
    backend.decoder = decoders.ByteLevel()
    return backend


def word_piece(words: dict[str, int], specials: Specials, normalizer: normalizers.Normalizer, where: str) -> Backend:
    """WordPiece (Devlin et al. 2019).  Raises TextError, beginning with `where`, for a special token it lacks."""
    for text in (specials.cls, specials.sep, specials.unk):
        if text not in words:
            raise TextError(f"{where} has no {text!r}")
    backend = Backend(models.WordPiece(vocab=words, unk_token=str(specials.unk), max_input_chars_per_word=100))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


@dataclass(frozen=True)
class _Vocabulary:
    """The `tokenizer.ggml.*` part of a file's metadata, with tokens and types of equal length."""

    fields: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        fields = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
        tokens = list(fields.get("tokens", ()))
        if not tokens:
            raise TextError("there is no tokenizer.ggml.tokens; convert the model again with its tokenizer")
        types = [int(kind) for kind in fields.get("token_type", ())] or [NORMAL] * len(tokens)
        if len(types) != len(tokens):
            raise TextError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        if len(set(tokens)) != len(tokens):
            twice = Counter(tokens).most_common(1)[0][0]
            raise TextError(f"tokenizer.ggml.tokens holds {twice!r} twice")
        return cls(fields, tokens, types)

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def scores(self) -> list[float]:
        scores = [float(score) for score in self.fields.get("scores", ())]
        if len(scores) != len(self.tokens):
            raise TextError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(self.tokens)} tokens")
        return scores

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.fields.get(name, default))

    def specials(self) -> Specials:
        texts = {}
        for name, field in SPECIAL_IDS.items():
            index = self.fields.get(field, self.fields.get("separator_token_id") if name == "sep" else None)
            if index is not None and not 0 <= int(index) < len(self.tokens):
                raise TextError(f"tokenizer.ggml.{field} is {index}, but there are {len(self.tokens)} tokens")
            texts[name] = None if index is None else self.tokens[int(index)]
        return Specials(**texts)


@checked
def from_gguf(metadata: Mapping[str, Any], *, pre: str | None = None) -> Tokenizer:
    """The tokenizer that the `metadata` of a GGUF describes: all keys, with values as the reader returns them.

    `pre` replaces a `tokenizer.ggml.pre` that is missing, `default` or wrong.

    Raises TextError for a kind of tokenizer or a split that is not known here, for tables that do not fit each other,
    and for a tokenizer that exceeds the limits of `triptych.text.tokenizer_limits`.
    """
    try:
        return _read(metadata if pre is None else {**metadata, f"{_PREFIX}pre": pre})
    except TextError as error:
        raise TextError(f"GGUF: {error}") from error
    except Exception as error:  # the library raises bare Exception
        raise TextError(f"GGUF: its tokenizer.ggml tables do not fit together: {error}") from error


def _read(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _Vocabulary.read(metadata)
    kind = str(vocabulary.fields.get("model", "missing"))
    if kind not in _KINDS:
        raise TextError(f"tokenizer.ggml.model {kind!r} is not supported; known are {', '.join(_KINDS)}")
    backend, specials = _KINDS[kind](vocabulary, vocabulary.specials())
    _mark_added(backend, vocabulary)
    source = metadata.get("tokenizer.chat_template")
    ends = [vocabulary.fields[name] for name in ("eot_token_id", "eom_token_id") if name in vocabulary.fields]
    chat = None if source is None else ChatTemplate(str(source), specials.config())
    return Tokenizer(backend, specials, stop_ids=map(int, ends), chat=chat)


def _mark_added(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Make unknown, control and user-defined tokens added ones, which are matched before a text is split into words."""
    before, after = ({vocabulary.tokens[i] for i in vocabulary.fields.get(key, ())} for key in STRIPPED)
    for add, kinds in ((backend.add_special_tokens, (UNKNOWN, CONTROL)), (backend.add_tokens, (USER_DEFINED,))):
        tokens = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in kinds]
        add([AddedToken(t, normalized=False, lstrip=t in before, rstrip=t in after) for t in tokens])


def _add_bos_and_eos(
    backend: Backend, vocabulary: _Vocabulary, specials: Specials, add_bos: bool, add_eos: bool = False
) -> None:
    bos = specials.bos if vocabulary.flag("add_bos_token", add_bos) else None
    surround(backend, bos, specials.eos if vocabulary.flag("add_eos_token", add_eos) else None)


def _byte_level(vocabulary: _Vocabulary, specials: Specials) -> tuple[Backend, Specials]:
    """`tokens`, `merges`, and the split that `pre` names."""
    split, merges = _split(str(vocabulary.fields.get("pre", "missing"))), []
    for merge in vocabulary.fields.get("merges", ()):
        left, _, right = merge.partition(" ")
        if not right or " " in right:
            raise TextError(f"tokenizer.ggml.merges holds {merge!r}, which is not a pair")
        merges.append((left, right))
    composed = split.composed or vocabulary.flag(COMPOSED, False)
    words = byte_level_words(split)
    backend = byte_level(vocabulary.ids, merges, words, composed=composed, whole_words=split.whole_words)
    _add_bos_and_eos(backend, vocabulary, specials, split.add_bos)
    return backend, specials


def _split(name: str) -> Split:
    if name not in SPLITS:
        raise TextError(
            f"tokenizer.ggml.pre {name!r} is not a known pre-tokenizer{nearest(name, SPLITS)}; known are "
            f"{', '.join(SPLITS)}: pass the one this model was trained with as pre= (a wrong one makes the model worse "
            "without an error)"
        )
    return SPLITS[name]


def _sentencepiece(vocabulary: _Vocabulary, specials: Specials) -> tuple[Backend, Specials]:
    """SentencePiece BPE (Kudo and Richardson 2018): merges the neighbours whose joint piece has the highest score."""
    fallback = BYTE in vocabulary.types
    backend = Backend(
        models.BPE(
            vocab=vocabulary.ids,
            merges=list(_merges(vocabulary)),
            unk_token=specials.unk or vocabulary.tokens[0],
            fuse_unk=True,
            byte_fallback=fallback,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    scheme = vocabulary.fields.get(SCHEME)
    prefix = vocabulary.flag("add_space_prefix", True)
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
    if scheme is None:
        backend.normalizer = normalizers.Sequence(spaces)
    else:  # Metaspace adds no mark before a text that begins with one; as "first", none behind a special token
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", str(scheme), split=False)
    backend.decoder = bytes_to_text(prefix=prefix)
    _add_bos_and_eos(backend, vocabulary, specials, add_bos=True)
    return backend, specials


def _merges(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that joins into a third, ordered by the score of the third, the highest first."""
    scores = vocabulary.scores()
    ids = {token: i for i, token in enumerate(vocabulary.tokens) if vocabulary.types[i] == NORMAL}
    longest = max(map(len, ids), default=0)
    if longest > MAX_PIECE:
        raise TextError(f"tokenizer.ggml.tokens holds a piece of {longest:,} characters; {MAX_PIECE:,} is the limit")
    pairs = [
        (-scores[whole], ids[piece[:cut]], ids[piece[cut:]])
        for piece, whole in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return ((vocabulary.tokens[left], vocabulary.tokens[right]) for _, left, right in sorted(pairs))


def _unigram(vocabulary: _Vocabulary, specials: Specials) -> tuple[Backend, Specials]:
    """SentencePiece's unigram model (Kudo 2018): splits a text into the pieces with the highest sum of scores.

    Scores are raised to that of the lowest normal piece.  The library derives the score of an unknown character from
    the lowest score, and converters give -10000 to rows without a token.
    """
    unk = next((index for index, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    unk = vocabulary.fields.get("unknown_token_id", unk)  # an id beyond the tokens was refused before
    if unk is None:
        raise TextError("a unigram tokenizer needs tokenizer.ggml.unknown_token_id")
    scores = vocabulary.scores()
    lowest = min(score for score, kind in zip(scores, vocabulary.types, strict=True) if kind == NORMAL)
    scored = [(token, max(score, lowest)) for token, score in zip(vocabulary.tokens, scores, strict=True)]
    backend = Backend(models.Unigram(scored, unk_id=int(unk)))
    charsmap, prefix = _charsmap(vocabulary), vocabulary.flag("add_space_prefix", True)
    table: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if vocabulary.flag("remove_extra_whitespaces", True):
        table.append(normalizers.Replace(Regex(r"\A +| +\z|(?<= ) +"), ""))
    table += [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(table)
    backend.decoder = decoders.Metaspace(prepend_scheme="always" if prefix else "never")
    _add_bos_and_eos(backend, vocabulary, specials, add_bos=False, add_eos=True)
    return backend, replace(specials, unk=vocabulary.tokens[int(unk)])


def _charsmap(vocabulary: _Vocabulary) -> bytes:
    """The compiled table of replacements.  Raises TextError for one that is malformed."""
    values = vocabulary.fields.get("precompiled_charsmap", ())
    try:
        charsmap = bytes(value & 0xFF for value in values)  # files have signed or unsigned bytes
        check_charsmap(charsmap)
    except (Malformed, TypeError) as error:
        raise TextError(f"tokenizer.ggml.precompiled_charsmap: {error}") from None
    return charsmap


def _word_piece(vocabulary: _Vocabulary, specials: Specials) -> tuple[Backend, Specials]:
    """GGUF marks tokens that begin a word, BERT those that continue one."""
    kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
    pieces = {_bert_piece(token, kind): index for index, (token, kind) in enumerate(kinds)}
    # BERT has neither BOS nor EOS: files that name them mean [CLS] and [SEP].
    cls, sep = specials.cls or specials.bos or "[CLS]", specials.sep or specials.eos or "[SEP]"
    specials = replace(specials, bos=None, eos=None, unk=specials.unk or "[UNK]", cls=cls, sep=sep)
    normalizer = normalizers.BertNormalizer(lowercase=vocabulary.flag("normalizer.lowercase", True))
    backend = word_piece(pieces, specials, normalizer, "its WordPiece vocabulary")
    backend.post_processor = processors.BertProcessing((sep, pieces[sep]), (cls, pieces[cls]))
    return backend, specials


def _bert_piece(token: str, kind: int) -> str:
    if kind != NORMAL:
        return token
    return token[1:] if token.startswith("▁") else f"##{token}"


_KINDS: Mapping[str, Callable[[_Vocabulary, Specials], tuple[Backend, Specials]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _unigram,
    "bert": _word_piece,
}
