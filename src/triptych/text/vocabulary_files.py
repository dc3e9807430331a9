"""Tokenizers of repositories without a `tokenizer.json`, built from the vocabulary files they ship instead.

    vocab.txt                           WordPiece
    vocab.json, merges.txt              byte-level BPE
    *.model, *.spm                      SentencePiece, unigram or BPE
    source.spm, vocab.json              Marian: SentencePiece cuts, the vocabulary numbers

A vocabulary file does not say how text is split and framed; the class the tokenizer was saved from does, and each class
below is built as transformers builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from triptych.errors import TextError, library, nearest, shown
from triptych.files import exists
from triptych.text import added_tokens
from triptych.text import sentencepiece_tokenizers as sentencepiece
from triptych.text.side_files import read_json_object, read_lines, read_vocab_json
from triptych.text.specials import Specials
from triptych.text.splits import SPLITS, byte_level_words

_SPM_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model", "sentencepiece.model")
_Frame = Callable[[Mapping[str, Any]], tuple[str, str]]  # of the config


@dataclass(frozen=True)
class _Class:
    """How one class of transformers cuts and frames text.

    `build` makes the backend from the files, the config and the special tokens.  `frame` says how a text and a pair of
    texts are framed, in words: `$A` and `$B` are the texts, a special token goes by its job, others stand for
    themselves, and `:1` after a word makes it of token type 1.  None: `build` has seen to it.
    """

    specials: Specials
    build: Callable[[tuple[Path, ...], Mapping[str, Any], Specials], Backend]
    frame: _Frame | None = None


def find(path: Path) -> tuple[Path, ...]:
    """The vocabulary files in the directory `path`, the one that tells their kind first; none where there are none."""
    source, words, merges = path / "source.spm", path / "vocab.json", path / "merges.txt"
    if exists(source):
        return (source, words)
    models = [path / name for name in _SPM_FILES if exists(path / name)]
    if models:
        return (models[0],)
    if exists(words) and exists(merges):
        return (words, merges)
    plain = path / "vocab.txt"
    return (plain,) if exists(plain) else ()


def build(path: Path, config: Mapping[str, Any]) -> tuple[Backend, Specials]:
    """The tokenizer of the vocabulary files in `path`, with `tokenizer_config.json` as `config`.

    Raises TextError for a class that is not known here, and for files that are malformed or do not fit each other.
    """
    files = find(path)
    known = _CLASSES[_kind(files[0])]
    name = _name(path, config, known)
    if name not in known:
        raise TextError(
            f"{path} holds {files[0].name} and no tokenizer.json, and how a {name[:40] or 'nameless'} tokenizer cuts "
            f"text is not known here{nearest(name, known)}; known are {', '.join(known)}: save its tokenizer.json first"
        )
    own = known[name]
    specials = Specials(**(own.specials.named() | Specials.from_config(config).named()))
    with library(lambda problem: TextError(f"{files[0]}: no tokenizer can be made of it: {problem}")):
        backend = own.build(files, config, specials)
        added_tokens.add(backend, specials, config, path)
        if own.frame is not None:
            _frame(backend, specials, *own.frame(config))
    return backend, specials


def _kind(file: Path) -> str:
    return file.suffix.removeprefix(".") if file.name in ("vocab.txt", "vocab.json", "source.spm") else "model"


def _name(path: Path, config: Mapping[str, Any], known: Mapping[str, _Class]) -> str:
    """The class without its decoration: what the tokenizer's config says, or the model's, or what its type implies."""
    model = read_json_object(path / "config.json")
    named = [one.get("tokenizer_class") for one in (config, model)]
    plain = [name.removesuffix("Fast").removesuffix("Tokenizer") for name in named if isinstance(name, str)]
    names = (*plain, _OF_MODEL.get(str(model.get("model_type")), ""))
    return next((name for name in names if name and name in known), names[0])


def _frame(backend: Backend, specials: Specials, single: str, pair: str) -> None:
    """Frame texts as `_Class` says."""
    named, ids = specials.named(), dict[str, int]()

    def spelled(template: str) -> list[str]:
        pieces = []
        for word in template.split():
            name, mark, kind = word.partition(":")
            text = named.get(name, name)
            if not text.startswith("$"):
                ids[text] = _id(backend, text)
            pieces.append(f"{text}{mark}{kind}")
        return pieces

    backend.post_processor = processors.TemplateProcessing(
        single=spelled(single), pair=spelled(pair), special_tokens=list(ids.items())
    )


def _id(backend: Backend, text: str) -> int:
    index = backend.token_to_id(text)
    if index is None:
        raise TextError(f"the vocabulary has no {shown(text)}, with which this tokenizer frames a text")
    return int(index)


# ---------------------------------------------------------------- how texts are framed


def _always(single: str, pair: str) -> _Frame:
    return lambda config: (single, pair)


def _as_asked(config: Mapping[str, Any]) -> tuple[str, str]:
    """BOS before every text and EOS behind it where the config says so, the second of a pair too."""
    before, after = ("bos" if config.get("add_bos_token") else ""), ("eos" if config.get("add_eos_token") else "")
    first, second = f"{before} $A {after}", f"{before and 'bos:1'} $B:1 {after and 'eos:1'}"
    return first, f"{first} {second}"


def _in_language(single: str, pair: str) -> _Frame:
    """`lang` is the language a text is in."""

    def frame(config: Mapping[str, Any]) -> tuple[str, str]:
        language = str(config.get("src_lang") or "en_XX")
        return single.replace("lang", language), pair.replace("lang", language)

    return frame


_TYPED = _always("cls $A sep", "cls $A sep $B:1 sep:1")
_TWO_BETWEEN = _always("bos $A eos", "bos $A eos eos $B eos")


# ---------------------------------------------------------------- WordPiece and byte-level BPE


def _word_piece(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    words = {line: index for index, line in enumerate(read_lines(files[0]))}
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
    words, merges = read_vocab_json(files[0]), []
    for line in filter(None, read_lines(files[1])):
        if line.startswith("#version"):
            continue
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


def _composed(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    backend = _byte_level(files, config, specials)
    backend.normalizer = normalizers.NFC()
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


def _whisper(files: tuple[Path, ...], config: Mapping[str, Any], specials: Specials) -> Backend:
    for name in ("language", "task", "predict_timestamps"):
        if config.get(name):
            raise TextError(f"{files[0].parent}: {name} is set, which is not read; save its tokenizer.json first")
    return _byte_level(files, config, specials)


_BERT = Specials(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_DEBERTA = Specials(bos="[CLS]", eos="[SEP]", **_BERT.named())
_GPT2 = Specials(bos="<|endoftext|>", eos="<|endoftext|>", unk="<|endoftext|>")
_FAIRSEQ = Specials(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")
_T5 = Specials(eos="</s>", unk="<unk>", pad="<pad>")
_MBART50 = Specials(eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")
_GEMMA = Specials(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>")
_START = "<|startoftranscript|> <|notimestamps|>"
_CLASSES: Mapping[str, Mapping[str, _Class]] = {
    "txt": dict.fromkeys(
        ("Bert", "DistilBert", "Electra", "MobileBert", "Lxmert", ""), _Class(_BERT, _word_piece, _TYPED)
    ),
    "json": {
        "GPT2": _Class(_GPT2, _byte_level, _as_asked),
        "CodeGen": _Class(_GPT2, _byte_level, _as_asked),
        "GPTNeoX": _Class(Specials(pad="<|padding|>", **_GPT2.named()), _composed, _as_asked),
        "Roberta": _Class(_FAIRSEQ, _roberta),
        "Bart": _Class(_FAIRSEQ, _roberta),
        "Deberta": _Class(_DEBERTA, _byte_level, _always("cls $A sep", "cls $A sep sep $B sep")),
        "Qwen2": _Class(Specials(eos="<|endoftext|>", unk="<|endoftext|>", pad="<|endoftext|>"), _qwen, _as_asked),
        "Whisper": _Class(_GPT2, _whisper, _always(f"{_START} $A eos", f"{_START} $A $B:1 eos:1")),
    },
    "model": {
        "T5": _Class(_T5, sentencepiece.t5, _always("$A eos", "$A eos $B eos")),
        "XLMRoberta": _Class(_FAIRSEQ, sentencepiece.xlm_roberta, _TWO_BETWEEN),
        "Camembert": _Class(_FAIRSEQ, sentencepiece.camembert, _TWO_BETWEEN),
        "MBart": _Class(_FAIRSEQ, sentencepiece.mbart, _in_language("$A eos lang", "$A $B eos lang")),
        "MBart50": _Class(_MBART50, sentencepiece.mbart50, _in_language("lang $A eos", "lang $A $B eos")),
        "DebertaV2": _Class(_DEBERTA, sentencepiece.deberta, _TYPED),
        "Llama": _Class(Specials(bos="<s>", eos="</s>", unk="<unk>"), sentencepiece.llama, _as_asked),
        "Gemma": _Class(_GEMMA, sentencepiece.gemma, _as_asked),
    },
    "spm": {"Marian": _Class(_T5, sentencepiece.marian, _always("$A eos", "$A $B eos"))},
}
_OF_MODEL = {
    "bert": "Bert", "distilbert": "DistilBert", "electra": "Electra", "gpt2": "GPT2", "gpt_neo": "GPT2", "gptj": "GPT2",
    "phi": "GPT2", "starcoder2": "GPT2", "gpt_neox": "GPTNeoX", "roberta": "Roberta", "bart": "Bart",
    "deberta": "Deberta", "whisper": "Whisper", "qwen2": "Qwen2", "qwen3": "Qwen2", "qwen3_moe": "Qwen2", "t5": "T5",
    "mt5": "T5", "xlm-roberta": "XLMRoberta", "camembert": "Camembert", "mbart": "MBart", "deberta-v2": "DebertaV2",
    "llama": "Llama", "mistral": "Llama", "mixtral": "Llama", "phi3": "Llama", "gemma": "Gemma", "gemma2": "Gemma",
    "gemma3_text": "Gemma", "marian": "Marian",
}  # fmt: skip
