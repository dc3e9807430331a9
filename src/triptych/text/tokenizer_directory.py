"""The tokenizer of a Hugging Face directory: of `tokenizer.json`, or built from the vocabulary files in its place.

    vocab.txt                           WordPiece
    vocab.json, merges.txt              byte-level BPE
    *.model, *.spm                      SentencePiece, unigram or BPE
    source.spm, vocab.json              Marian: SentencePiece pieces, and their ids

A vocabulary file does not tell how a text is split and which special tokens are put around it.  The class of
transformers that saved it does, and each class below is built as transformers builds it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers, processors

from triptych.arguments import checked
from triptych.errors import TextError, library, nearest, shown
from triptych.files import exists
from . import sentencepiece_tokenizers as sentencepiece
from .chat import ChatTemplate
from .gguf_tokenizer import SPLITS, Split, byte_level, byte_level_words, word_piece
from .sentencepiece_file import check_charsmap
from .sentencepiece_tokenizers import TokenizerFiles
from .side_files import MAX_ID, add_tokens, read_json_object, read_lines, read_text, read_vocab_json
from .specials import Specials
from .tokenizer import Tokenizer

#: A `tokenizer.json` without a match has no id over a few million and no table of replacements, however it is spelled.
_NEEDS_CHECK = re.compile(r"\d{8}|charsmap|\\u00[2-7]")


@checked
def from_directory(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: `tokenizer.json`, or the vocabulary files that stand in for it,
    with what the files beside it add.

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
        with library(lambda problem: TextError(f"{file} is not a tokenizer.json: {problem}")):
            raw = read_text(file)
            if _NEEDS_CHECK.search(raw):
                _check_state(json.loads(raw))
            backend = Backend.from_str(raw)
        specials = Specials.from_config(config)
        add_tokens(backend, specials, config, path)
    else:
        backend, specials = _from_vocabulary_files(path, config)
    source = _chat_source(path, config)
    chat = None if source is None else ChatTemplate(source, specials.config())
    rest = {key: value for key, value in config.items() if key not in ("auto_map", "chat_template")}
    return Tokenizer(backend, specials, stop_ids=_stop_ids(path), chat=chat, config=rest)


def has_tokenizer(path: Path) -> bool:
    """Whether the directory `path` holds a `tokenizer.json` or vocabulary files."""
    return exists(path / "tokenizer.json") or bool(_vocabulary_files(path))


def _stop_ids(path: Path) -> list[int]:
    """The `eos_token_id` of `generation_config.json`, one or several."""
    value = read_json_object(path / "generation_config.json").get("eos_token_id") or []
    ids = value if isinstance(value, list) else [value]
    if not all(type(index) is int for index in ids):
        raise TextError(f"{path / 'generation_config.json'}: eos_token_id {shown(value)} is not an id or a list of ids")
    return ids


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


# ---------------------------------------------------------------- vocabulary files

_SPM_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model", "sentencepiece.model")


@dataclass(frozen=True)
class _Class:
    """How one class of transformers splits texts and puts special tokens around them.

    `build` makes the backend from the files, the config and the special tokens.  `templates` are words, for a text and,
    after a bar, for a pair: `$A` and `$B` are the texts, the field name of a special token stands for its text, `lang`
    for the code of the source language (`src_lang` of the config), and any other word is the text of a token.  `?`
    after a name means that the token is there only where the config sets its `add_..._token`, and `:1` that it is of
    token type 1.  None: `build` sets it.
    """

    specials: Specials
    build: Callable[[TokenizerFiles], Backend]
    templates: str | None = None


def _vocabulary_files(path: Path) -> tuple[Path, ...]:
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


def _from_vocabulary_files(path: Path, config: Mapping[str, object]) -> tuple[Backend, Specials]:
    """The tokenizer of the vocabulary files in `path`, with `tokenizer_config.json` as `config`.

    Raises TextError for a class that is not known here, and for files that are malformed or do not fit each other.
    """
    paths = _vocabulary_files(path)
    named = paths[0].name in ("vocab.txt", "vocab.json", "source.spm")
    known = _CLASSES[paths[0].suffix.removeprefix(".") if named else "model"]
    name = _name(path, config, known)
    if name not in known:
        raise TextError(
            f"{path} holds {paths[0].name} and no tokenizer.json, and the tokenizer class {name[:40]!r} is not "
            f"supported{nearest(name, known)}; supported are {', '.join(known)}: add a tokenizer.json, which "
            "transformers saves"
        )
    own = known[name]
    specials = Specials(**(own.specials.named() | Specials.from_config(config).named()))
    files = TokenizerFiles(paths, config, specials)
    with library(lambda problem: TextError(f"{paths[0]}: no tokenizer can be made from it: {problem}")):
        backend = own.build(files)
        add_tokens(backend, specials, config, path)
        if own.templates is not None:
            _set_templates(backend, files, own.templates)
    return backend, specials


def _name(path: Path, config: Mapping[str, object], known: Mapping[str, _Class]) -> str:
    """The class, without `Tokenizer` and `Fast`: of `tokenizer_config.json`, of `config.json`, or of the model type."""
    model = read_json_object(path / "config.json")
    named = [one.get("tokenizer_class") for one in (config, model)]
    plain = [name.removesuffix("Fast").removesuffix("Tokenizer") for name in named if isinstance(name, str)]
    of_type = [name for name, types in _MODEL_TYPES.items() if str(model.get("model_type")) in types.split()]
    names = (*plain, *of_type, "")
    return next((name for name in names if name and name in known), names[0])


def _set_templates(backend: Backend, files: TokenizerFiles, templates: str) -> None:
    """Make `backend` put special tokens around texts by the two templates of `_Class.templates`."""
    named = files.specials.named() | {"lang": str(files.config.get("src_lang") or "en_XX")}
    ids: dict[str, int] = {}

    def spelled(template: str) -> list[str]:
        pieces = []
        for word in template.split():
            whole, mark, kind = word.partition(":")
            name = whole.removesuffix("?")
            if name != whole and not files.config.get(f"add_{name}_token"):
                continue
            text = named.get(name, name)
            if not text.startswith("$"):
                index = backend.token_to_id(text)
                if index is None:
                    raise TextError(f"the vocabulary has no {shown(text)}, which this tokenizer puts around texts")
                ids[text] = index
            pieces.append(f"{text}{mark}{kind}")
        return pieces

    single, pair = map(spelled, templates.split(" | "))
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(ids.items()))


# ---------------------------------------------------------------- WordPiece and byte-level BPE


def _word_piece(files: TokenizerFiles) -> Backend:
    words = {line: index for index, line in enumerate(read_lines(files.paths[0]))}
    normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(files.config.get("tokenize_chinese_chars", True)),
        strip_accents=None if (strip := files.config.get("strip_accents")) is None else bool(strip),
        lowercase=bool(files.config.get("do_lower_case", True)),
    )
    return word_piece(words, files.specials, normalizer, str(files.paths[0]))


def _byte_level(files: TokenizerFiles, *, composed: bool = False, split: Split | None = None) -> Backend:
    """The BPE of `vocab.json` and `merges.txt`, whose first line may be a version; with NFC first if `composed`."""
    words, merges = read_vocab_json(files.paths[0]), []
    for line in filter(None, read_lines(files.paths[1])):
        if line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= words.keys():
            problem = f"{line!r} is not a pair of tokens of {files.paths[0].name} that joins into a third"
            raise TextError(f"{files.paths[1]}: {problem}")
        merges.append((left, right))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=bool(files.config.get("add_prefix_space", False)))
    return byte_level(words, merges, whole if split is None else byte_level_words(split), composed=composed)


_composed = partial(_byte_level, composed=True)


def _roberta(files: TokenizerFiles) -> Backend:
    backend = _byte_level(files)
    sep, cls = str(files.specials.sep), str(files.specials.cls)
    words = backend.get_vocab()
    if not {sep, cls} <= words.keys():
        raise TextError(f"{files.paths[0]} has no {sep!r} or no {cls!r}")
    prefix = bool(files.config.get("add_prefix_space", False))
    backend.post_processor = processors.RobertaProcessing((sep, words[sep]), (cls, words[cls]), add_prefix_space=prefix)
    return backend


def _whisper(files: TokenizerFiles) -> Backend:
    for name in ("language", "task", "predict_timestamps"):
        if files.config.get(name):
            problem = f"{name} is set, which needs a tokenizer.json; transformers saves one"
            raise TextError(f"{files.paths[0].parent}: {problem}")
    return _byte_level(files)


_BERT = Specials(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_DEBERTA = Specials(bos="[CLS]", eos="[SEP]", **_BERT.named())
_GPT2 = Specials(bos="<|endoftext|>", eos="<|endoftext|>", unk="<|endoftext|>")
_QWEN = Specials(eos="<|endoftext|>", unk="<|endoftext|>", pad="<|endoftext|>")
_FAIRSEQ = Specials(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")
_T5 = Specials(eos="</s>", unk="<unk>", pad="<pad>")
_GEMMA = Specials(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>")
_TYPED = "cls $A sep | cls $A sep $B:1 sep:1"
_TWO_BETWEEN = "bos $A eos | bos $A eos eos $B eos"
_BY_CONFIG = "bos? $A eos? | bos? $A eos? bos?:1 $B:1 eos?:1"
_START = "<|startoftranscript|> <|notimestamps|>"
_CLASSES: Mapping[str, Mapping[str, _Class]] = {
    "txt": dict.fromkeys(
        ("Bert", "DistilBert", "Electra", "MobileBert", "Lxmert", ""), _Class(_BERT, _word_piece, _TYPED)
    ),
    "json": {
        "GPT2": _Class(_GPT2, _byte_level, _BY_CONFIG),
        "CodeGen": _Class(_GPT2, _byte_level, _BY_CONFIG),
        "GPTNeoX": _Class(Specials(pad="<|padding|>", **_GPT2.named()), _composed, _BY_CONFIG),
        "Roberta": _Class(_FAIRSEQ, _roberta),
        "Bart": _Class(_FAIRSEQ, _roberta),
        "Deberta": _Class(_DEBERTA, _byte_level, "cls $A sep | cls $A sep sep $B sep"),
        "Qwen2": _Class(_QWEN, partial(_composed, split=SPLITS["qwen2"]), _BY_CONFIG),
        "Whisper": _Class(_GPT2, _whisper, f"{_START} $A eos | {_START} $A $B:1 eos:1"),
    },
    "model": {
        "T5": _Class(_T5, sentencepiece.t5, "$A eos | $A eos $B eos"),
        "XLMRoberta": _Class(_FAIRSEQ, sentencepiece.xlm_roberta, _TWO_BETWEEN),
        "Camembert": _Class(_FAIRSEQ, sentencepiece.camembert, _TWO_BETWEEN),
        "MBart": _Class(_FAIRSEQ, sentencepiece.mbart, "$A eos lang | $A $B eos lang"),
        "MBart50": _Class(replace(_FAIRSEQ, bos=None), sentencepiece.mbart50, "lang $A eos | lang $A $B eos"),
        "DebertaV2": _Class(_DEBERTA, sentencepiece.deberta, _TYPED),
        "Llama": _Class(Specials(bos="<s>", eos="</s>", unk="<unk>"), sentencepiece.llama, _BY_CONFIG),
        "Gemma": _Class(_GEMMA, sentencepiece.gemma, _BY_CONFIG),
    },
    "spm": {"Marian": _Class(_T5, sentencepiece.marian, "$A eos | $A $B eos")},
}
#: The types of models whose tokenizer is of each class where no config names it.
_MODEL_TYPES = {
    "Bert": "bert", "DistilBert": "distilbert", "Electra": "electra", "GPT2": "gpt2 gpt_neo gptj phi starcoder2",
    "GPTNeoX": "gpt_neox", "Roberta": "roberta", "Bart": "bart", "Deberta": "deberta", "Whisper": "whisper",
    "Qwen2": "qwen2 qwen3 qwen3_moe", "T5": "t5 mt5", "XLMRoberta": "xlm-roberta", "Camembert": "camembert",
    "MBart": "mbart", "DebertaV2": "deberta-v2", "Llama": "llama mistral mixtral phi3",
    "Gemma": "gemma gemma2 gemma3_text", "Marian": "marian",
}  # fmt: skip
