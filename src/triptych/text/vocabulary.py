"""Tokenizers of repositories without a `tokenizer.json`, built from the vocabulary files they ship instead.

    vocab.txt                           WordPiece
    vocab.json, merges.txt              byte-level BPE
    *.model, *.spm                      SentencePiece, unigram or BPE
    source.spm, vocab.json              Marian: SentencePiece cuts, the vocabulary numbers

A vocabulary file does not say how text is split and framed; the class the tokenizer was saved from does, and each class
below is built as transformers builds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from triptych.errors import TextError, nearest
from triptych.text import sentencepiece
from triptych.text.sentencepiece import Pieces
from triptych.text.specials import Specials, frame
from triptych.text.splits import SPLITS, byte_level_words

_SPM_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model", "sentencepiece.model")
_Entries = list[tuple[str, float]]


@dataclass(frozen=True)
class _Class:
    """How one class of transformers cuts and frames text.  `build` makes the backend from the vocabulary and config."""

    specials: Specials
    build: Callable[..., Backend]
    before: str | None = None  # names of special tokens
    after: str | None = None


def find(path: Path) -> tuple[Path, ...]:
    """The vocabulary files in the directory `path`, the telling one first; none where there are none."""
    source, words, merges = path / "source.spm", path / "vocab.json", path / "merges.txt"
    if source.is_file():
        return (source, words)
    models = [path / name for name in _SPM_FILES if (path / name).is_file()]
    if models:
        return (models[0],)
    if words.is_file() and merges.is_file():
        return (words, merges)
    plain = path / "vocab.txt"
    return (plain,) if plain.is_file() else ()


def build(path: Path, config: Mapping[str, Any]) -> tuple[Backend, Specials]:
    """The tokenizer of the vocabulary files in `path`, with `tokenizer_config.json` as `config`.

    Raises TextError for a class that is not known here, and for files that are malformed or do not fit each other.
    """
    files = find(path)
    known, name = _CLASSES[_kind(files[0])], _name(path, config)
    if name not in known:
        raise TextError(
            f"{path} holds {files[0].name} and no tokenizer.json, and how a {name or 'nameless'} tokenizer cuts text "
            f"is not known here{nearest(name, known)}; known are {', '.join(known)}: save its tokenizer.json first"
        )
    own = known[name]
    given = Specials.from_config(config).named()
    specials = Specials(**(own.specials.named() | given))
    try:
        backend = own.build(files, config, specials)
        _mark(backend, specials, config)
        named = specials.named()
        if own.before or own.after:
            frame(backend, own.before and named[own.before], own.after and named[own.after])
    except TextError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise TextError(f"{files[0]}: no tokenizer can be made of it: {str(error).partition(chr(10))[0]}") from error
    return backend, specials


def _kind(file: Path) -> str:
    return file.suffix.removeprefix(".") if file.name in ("vocab.txt", "vocab.json", "source.spm") else "model"


def _name(path: Path, config: Mapping[str, Any]) -> str:
    """The class without its decoration, or the one a `config.json` implies by its model type."""
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        return name.removesuffix("Fast").removesuffix("Tokenizer")
    kind = _json(path / "config.json").get("model_type") if (path / "config.json").is_file() else None
    return _OF_MODEL.get(str(kind), "")


def _mark(backend: Backend, specials: Specials, config: Mapping[str, Any]) -> None:
    """Special tokens are found in text before anything else is done with it, with the spaces their entries take."""
    for name, text in specials.named().items():
        entry = config.get(f"{name}_token")
        flags = entry if isinstance(entry, Mapping) else {}
        taken = {key: bool(flags.get(key, False)) for key in ("lstrip", "rstrip", "single_word")}
        backend.add_special_tokens([AddedToken(text, normalized=bool(flags.get("normalized", False)), **taken)])
    listed = config.get("additional_special_tokens") or ()
    backend.add_special_tokens([AddedToken(str(t), normalized=False) for t in listed if isinstance(t, str)])


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise TextError(f"{file} is not JSON: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(content, dict):
        raise TextError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def _numbered(file: Path) -> dict[str, int]:
    """A `vocab.json`: every token has a number, and they run from 0 without a gap."""
    words = _json(file)
    if not all(type(index) is int for index in words.values()) or sorted(words.values()) != list(range(len(words))):
        raise TextError(f"{file}: its numbers are not 0 to {len(words) - 1}, each once")
    return words


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TextError(f"{file} is not UTF-8 (byte {error.start})") from None


# ---------------------------------------------------------------- WordPiece and byte-level BPE


def _word_piece(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    lines = [line.rstrip("\r") for line in _lines(files[0])]
    words = {line: index for index, line in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    missing = [text for text in (specials.unk, specials.cls, specials.sep) if text not in words]
    if missing:
        raise TextError(f"{files[0]} has no {missing[0]!r}")
    backend = Backend(models.WordPiece(vocab=words, unk_token=str(specials.unk)))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _merged(files: tuple[Path, ...]) -> models.BPE:
    """A byte-level BPE of `vocab.json` and `merges.txt`, whose first line may tell its version."""
    words, lines = _numbered(files[0]), _lines(files[1])
    pairs = [line.rstrip("\r") for line in lines if not line.startswith("#version")]
    merges = []
    for line in filter(None, pairs):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= words.keys():
            raise TextError(f"{files[1]}: {line!r} is no pair of tokens of {files[0].name} that makes a third")
        merges.append((left, right))
    return models.BPE(vocab=words, merges=merges)


def _byte_level(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    backend = Backend(_merged(files))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _roberta(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    backend = _byte_level(files, config, specials)
    sep, cls = str(specials.sep), str(specials.cls)
    words = backend.get_vocab()
    if not {sep, cls} <= words.keys():
        raise TextError(f"{files[0]} has no {sep!r} or no {cls!r}")
    prefix = bool(config.get("add_prefix_space", False))
    backend.post_processor = processors.RobertaProcessing((sep, words[sep]), (cls, words[cls]), add_prefix_space=prefix)
    return backend


def _qwen(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    backend = Backend(_merged(files))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level_words(SPLITS["qwen2"])
    backend.decoder = decoders.ByteLevel()
    return backend


# ---------------------------------------------------------------- SentencePiece


def _unigram(entries: _Entries, pieces: Pieces, unk: int) -> Backend:
    """The model of `entries`, with the pieces that are tokens of their own wherever they stand in a text."""
    backend = Backend(models.Unigram(entries, unk_id=unk, byte_fallback=False))
    _mark_pieces(backend, pieces)
    return backend


def _mark_pieces(backend: Backend, pieces: Pieces) -> None:
    control = pieces.of_kind(sentencepiece.CONTROL)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, normalized=False) for text in pieces.of_kind(sentencepiece.USER_DEFINED)])


def _entries(pieces: Pieces, first: int = 0) -> _Entries:
    return [(piece.text, piece.score) for piece in pieces.pieces[first:]]


def _read(files: tuple[Path, ...], algorithm: int) -> Pieces:
    pieces = sentencepiece.read(files[0])
    if pieces.algorithm != algorithm:
        names = {sentencepiece.UNIGRAM: "unigram", sentencepiece.BPE: "BPE"}
        raise TextError(f"{files[0]} is a {names[pieces.algorithm]} model, its class expects {names[algorithm]}")
    return pieces


def _by_words(backend: Backend, pieces: Pieces) -> Backend:
    """Text is normalized by the table of the model and cut at white space, each word with its mark before it."""
    if pieces.charsmap:
        backend.normalizer = normalizers.Precompiled(pieces.charsmap)
    mark = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return backend


def _t5(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    """The sentinels `<extra_id_99>` ... `<extra_id_0>` follow the pieces."""
    pieces, count = _read(files, sentencepiece.UNIGRAM), config.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= 1 << 16:
        raise TextError(f"{files[0].parent}: extra_ids is {count!r}, not a number of sentinels")
    extra = [f"<extra_id_{i}>" for i in reversed(range(count))]
    backend = _unigram(_entries(pieces) + [(text, 0.0) for text in extra], pieces, pieces.unk_id)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in extra])
    return _by_words(backend, pieces)


def _xlm_roberta(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    """fairseq's four tokens stand where the model has three."""
    pieces = _read(files, sentencepiece.UNIGRAM)
    head = [(str(text), 0.0) for text in (specials.bos, specials.pad, specials.eos, specials.unk)]
    return _by_words(_unigram([*head, *_entries(pieces, 3), (str(specials.mask), 0.0)], pieces, 3), pieces)


def _camembert(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    pieces = _read(files, sentencepiece.UNIGRAM)
    head = [("<s>NOTUSED", 0.0), (str(specials.pad), 0.0), ("</s>NOTUSED", 0.0), (str(specials.unk), 0.0)]
    entries = [*head, ("<unk>NOTUSED", -100.0), *_entries(pieces, 1), (str(specials.mask), 0.0)]
    return _by_words(_unigram(entries, pieces, 3), pieces)


def _deberta(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    """Runs of white space are one; the table of the model is not used by the reference."""
    pieces = _read(files, sentencepiece.UNIGRAM)
    backend = _unigram(_entries(pieces), pieces, pieces.unk_id)
    lower = [normalizers.Lowercase()] if config.get("do_lower_case", False) else []
    spaces = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(left=False)]
    backend.normalizer = normalizers.Sequence([*lower, *spaces])
    apart = [pre_tokenizers.Punctuation(behavior="isolated")] if config.get("split_by_punct", False) else []
    mark = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*apart, mark])
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return backend


def _marian(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    """Pieces of the source cut, and `vocab.json` numbers those of both languages.

    A piece of the target alone scores below everything, so that no text becomes one; a piece without a number cannot
    be used, where the reference would cut it out and call it unknown.
    """
    if config.get("separate_vocabs"):
        raise TextError(f"{files[1].parent}: separate_vocabs is set: one vocabulary for both languages can be read")
    pieces, words = _read(files, sentencepiece.UNIGRAM), _numbered(files[1])
    scores = {piece.text: piece.score for piece in pieces.pieces if piece.kind == sentencepiece.NORMAL}
    below = min(scores.values(), default=0.0) - 1000.0
    order = sorted(words, key=lambda word: words[word])
    if specials.unk not in words:
        raise TextError(f"{files[1]} has no {specials.unk!r}")
    backend = Backend(models.Unigram([(word, scores.get(word, below)) for word in order], unk_id=words[specials.unk]))
    codes = [word for word in order if word.startswith(">>") and word.endswith("<<")]
    backend.add_tokens([AddedToken(code, normalized=False) for code in codes])
    table = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    backend.normalizer = normalizers.Sequence([*table, normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return backend


def _bpe(pieces: Pieces, unk: str | None) -> Backend:
    """Every way to join two pieces into a third, the earlier piece first."""
    ids = {piece.text: index for index, piece in enumerate(pieces.pieces)}
    found = []
    for piece, index in ids.items():
        ways = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = sorted(((ids[a], ids[b]), a, b) for a, b in ways if a in ids and b in ids)
        found += [(index, len(a), len(b), n, (a, b)) for n, (_, a, b) in enumerate(known)]
    merges = [pair for *_, pair in sorted(found)]
    backend = Backend(models.BPE(vocab=ids, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    _mark_pieces(backend, pieces)
    return backend


def _llama(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    """A space before the text unless `add_prefix_space` is off; with `legacy`, before what follows a special too."""
    backend = _bpe(_read(files, sentencepiece.BPE), None)
    prefix = config.get("add_prefix_space") in (None, True)
    scheme = "never" if not prefix else "always" if config.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    _frame_as_asked(backend, config, specials)
    return backend


def _gemma(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    backend = _bpe(_read(files, sentencepiece.BPE), specials.unk)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _frame_as_asked(backend, config, specials)
    return backend


def _frame_as_asked(backend: Backend, config: Mapping[str, Any], specials: Specials) -> None:
    """BOS before a text unless the config says no, EOS after it where it says yes."""
    before = specials.bos if config.get("add_bos_token", True) else None
    frame(backend, before, specials.eos if config.get("add_eos_token", False) else None)


_BERT = Specials(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_GPT2 = Specials(bos="<|endoftext|>", eos="<|endoftext|>", unk="<|endoftext|>")
_FAIRSEQ = Specials(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")
_WORDS = _Class(_BERT, _word_piece, "cls", "sep")
_CLASSES: Mapping[str, Mapping[str, _Class]] = {
    "txt": dict.fromkeys(("Bert", "DistilBert", "Electra", "MobileBert", "Lxmert", ""), _WORDS),
    "json": {
        "GPT2": _Class(_GPT2, _byte_level),
        "Roberta": _Class(_FAIRSEQ, _roberta),
        "Bart": _Class(_FAIRSEQ, _roberta),
        "Qwen2": _Class(Specials(eos="<|endoftext|>", unk="<|endoftext|>", pad="<|endoftext|>"), _qwen),
    },
    "model": {
        "T5": _Class(Specials(eos="</s>", unk="<unk>", pad="<pad>"), _t5, after="eos"),
        "XLMRoberta": _Class(_FAIRSEQ, _xlm_roberta, "bos", "eos"),
        "Camembert": _Class(_FAIRSEQ, _camembert, "cls", "sep"),
        "DebertaV2": _Class(Specials(bos="[CLS]", eos="[SEP]", **_BERT.named()), _deberta, "cls", "sep"),
        "Llama": _Class(Specials(bos="<s>", eos="</s>", unk="<unk>"), _llama),
        "Gemma": _Class(Specials(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>"), _gemma),
    },
    "spm": {"Marian": _Class(Specials(eos="</s>", unk="<unk>", pad="<pad>"), _marian, after="eos")},
}
_OF_MODEL = {
    "bert": "Bert", "distilbert": "DistilBert", "electra": "Electra", "gpt2": "GPT2", "roberta": "Roberta",
    "bart": "Bart", "qwen2": "Qwen2", "qwen3": "Qwen2", "t5": "T5", "mt5": "T5", "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert", "deberta-v2": "DebertaV2", "llama": "Llama", "mistral": "Llama", "mixtral": "Llama",
    "gemma": "Gemma", "gemma2": "Gemma", "marian": "Marian",
}  # fmt: skip
