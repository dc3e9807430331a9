"""Tokenizers of repositories without a `tokenizer.json`, built from the vocabulary files they ship instead.

    vocab.txt                           WordPiece
    vocab.json, merges.txt              byte-level BPE
    *.model, *.spm                      SentencePiece, unigram or BPE
    source.spm, vocab.json              Marian: SentencePiece pieces, and their ids

A vocabulary file does not tell how a text is split and which special tokens are put around it.  The class of
transformers that saved it does, and each class below is built as transformers builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from triptych.errors import TextError, library, nearest, shown
from triptych.files import exists
from triptych.text import sentencepiece_tokenizers as sentencepiece
from triptych.text.side_files import add_tokens, read_json_object, read_lines, read_vocab_json
from triptych.text.specials import Specials
from triptych.text.splits import SPLITS, byte_level_words

_SPM_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model", "sentencepiece.model")
_Templates = Callable[[Mapping[str, object]], tuple[str, str]]  # of the config


@dataclass(frozen=True)
class _Class:
    """How one class of transformers splits texts and puts special tokens around them.

    `build` makes the backend from the files, the config and the special tokens.  `templates` returns two templates of
    words, for a text and for a pair: `$A` and `$B` are the texts, the field name of a special token stands for its
    text, any other word is the text of a token, and `:1` after a word makes it of token type 1.  None: `build` sets it.
    """

    specials: Specials
    build: Callable[[tuple[Path, ...], Mapping[str, object], Specials], Backend]
    templates: _Templates | None = None


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


def build(path: Path, config: Mapping[str, object]) -> tuple[Backend, Specials]:
    """The tokenizer of the vocabulary files in `path`, with `tokenizer_config.json` as `config`.

    Raises TextError for a class that is not known here, and for files that are malformed or do not fit each other.
    """
    files = find(path)
    known = _CLASSES[_kind(files[0])]
    name = _name(path, config, known)
    if name not in known:
        raise TextError(
            f"{path} holds {files[0].name} and no tokenizer.json, and the tokenizer class {name[:40]!r} is not "
            f"supported{nearest(name, known)}; supported are {', '.join(known)}: add a tokenizer.json, which "
            "transformers saves"
        )
    own = known[name]
    specials = Specials(**(own.specials.named() | Specials.from_config(config).named()))
    with library(lambda problem: TextError(f"{files[0]}: no tokenizer can be made from it: {problem}")):
        backend = own.build(files, config, specials)
        add_tokens(backend, specials, config, path)
        if own.templates is not None:
            _set_templates(backend, specials, *own.templates(config))
    return backend, specials


def _kind(file: Path) -> str:
    return file.suffix.removeprefix(".") if file.name in ("vocab.txt", "vocab.json", "source.spm") else "model"


def _name(path: Path, config: Mapping[str, object], known: Mapping[str, _Class]) -> str:
    """The class, without `Tokenizer` and `Fast`: of `tokenizer_config.json`, of `config.json`, or of the model type."""
    model = read_json_object(path / "config.json")
    named = [one.get("tokenizer_class") for one in (config, model)]
    plain = [name.removesuffix("Fast").removesuffix("Tokenizer") for name in named if isinstance(name, str)]
    names = (*plain, _OF_MODEL.get(str(model.get("model_type")), ""))
    return next((name for name in names if name and name in known), names[0])


def _set_templates(backend: Backend, specials: Specials, single: str, pair: str) -> None:
    """Make `backend` put special tokens around texts by the two templates of `_Class.templates`."""
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
        raise TextError(f"the vocabulary has no {shown(text)}, which this tokenizer puts around texts")
    return int(index)


# ---------------------------------------------------------------- special tokens around texts


def _always(single: str, pair: str) -> _Templates:
    return lambda config: (single, pair)


def _by_config(config: Mapping[str, object]) -> tuple[str, str]:
    """BOS before and EOS behind every text of a row where `add_bos_token` and `add_eos_token` are set."""
    before, after = ("bos" if config.get("add_bos_token") else ""), ("eos" if config.get("add_eos_token") else "")
    first, second = f"{before} $A {after}", f"{before and 'bos:1'} $B:1 {after and 'eos:1'}"
    return first, f"{first} {second}"


def _in_language(single: str, pair: str) -> _Templates:
    """`lang` stands for the code of the source language, `src_lang` of the config."""

    def templates(config: Mapping[str, object]) -> tuple[str, str]:
        language = str(config.get("src_lang") or "en_XX")
        return single.replace("lang", language), pair.replace("lang", language)

    return templates


_TYPED = _always("cls $A sep", "cls $A sep $B:1 sep:1")
_TWO_BETWEEN = _always("bos $A eos", "bos $A eos eos $B eos")


# ---------------------------------------------------------------- WordPiece and byte-level BPE


def _word_piece(files: tuple[Path, ...], config: Mapping[str, object], specials: Specials) -> Backend:
    words = {line: index for index, line in enumerate(read_lines(files[0]))}
    missing = [text for text in (specials.unk, specials.cls, specials.sep) if text not in words]
    if missing:
        raise TextError(f"{files[0]} has no {missing[0]!r}")
    backend = Backend(models.WordPiece(vocab=words, unk_token=str(specials.unk)))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=None if (strip := config.get("strip_accents")) is None else bool(strip),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _merged(files: tuple[Path, ...]) -> models.BPE:
    """The BPE of `vocab.json` and `merges.txt`, whose first line may hold a version."""
    words, merges = read_vocab_json(files[0]), []
    for line in filter(None, read_lines(files[1])):
        if line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= words.keys():
            raise TextError(f"{files[1]}: {line!r} is not a pair of tokens of {files[0].name} that joins into a third")
        merges.append((left, right))
    return models.BPE(vocab=words, merges=merges)


def _byte_level(files: tuple[Path, ...], config: Mapping[str, object], specials: Specials) -> Backend:
    backend = Backend(_merged(files))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _composed(files: tuple[Path, ...], config: Mapping[str, object], specials: Specials) -> Backend:
    backend = _byte_level(files, config, specials)
    backend.normalizer = normalizers.NFC()
    return backend


def _roberta(files: tuple[Path, ...], config: Mapping[str, object], specials: Specials) -> Backend:
    backend = _byte_level(files, config, specials)
    sep, cls = str(specials.sep), str(specials.cls)
    words = backend.get_vocab()
    if not {sep, cls} <= words.keys():
        raise TextError(f"{files[0]} has no {sep!r} or no {cls!r}")
    prefix = bool(config.get("add_prefix_space", False))
    backend.post_processor = processors.RobertaProcessing((sep, words[sep]), (cls, words[cls]), add_prefix_space=prefix)
    return backend


def _qwen(files: tuple[Path, ...], config: Mapping[str, object], specials: Specials) -> Backend:
    backend = Backend(_merged(files))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level_words(SPLITS["qwen2"])
    backend.decoder = decoders.ByteLevel()
    return backend


def _whisper(files: tuple[Path, ...], config: Mapping[str, object], specials: Specials) -> Backend:
    for name in ("language", "task", "predict_timestamps"):
        if config.get(name):
            raise TextError(f"{files[0].parent}: {name} is set, which needs a tokenizer.json; transformers saves one")
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
        "GPT2": _Class(_GPT2, _byte_level, _by_config),
        "CodeGen": _Class(_GPT2, _byte_level, _by_config),
        "GPTNeoX": _Class(Specials(pad="<|padding|>", **_GPT2.named()), _composed, _by_config),
        "Roberta": _Class(_FAIRSEQ, _roberta),
        "Bart": _Class(_FAIRSEQ, _roberta),
        "Deberta": _Class(_DEBERTA, _byte_level, _always("cls $A sep", "cls $A sep sep $B sep")),
        "Qwen2": _Class(Specials(eos="<|endoftext|>", unk="<|endoftext|>", pad="<|endoftext|>"), _qwen, _by_config),
        "Whisper": _Class(_GPT2, _whisper, _always(f"{_START} $A eos", f"{_START} $A $B:1 eos:1")),
    },
    "model": {
        "T5": _Class(_T5, sentencepiece.t5, _always("$A eos", "$A eos $B eos")),
        "XLMRoberta": _Class(_FAIRSEQ, sentencepiece.xlm_roberta, _TWO_BETWEEN),
        "Camembert": _Class(_FAIRSEQ, sentencepiece.camembert, _TWO_BETWEEN),
        "MBart": _Class(_FAIRSEQ, sentencepiece.mbart, _in_language("$A eos lang", "$A $B eos lang")),
        "MBart50": _Class(_MBART50, sentencepiece.mbart50, _in_language("lang $A eos", "lang $A $B eos")),
        "DebertaV2": _Class(_DEBERTA, sentencepiece.deberta, _TYPED),
        "Llama": _Class(Specials(bos="<s>", eos="</s>", unk="<unk>"), sentencepiece.llama, _by_config),
        "Gemma": _Class(_GEMMA, sentencepiece.gemma, _by_config),
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
