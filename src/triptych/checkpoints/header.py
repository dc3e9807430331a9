"""Reads the spec, the config and the settings of sentence-transformers from a checkpoint's config or header alone: no
weights are read and torch is not imported."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from triptych import families
from triptych.errors import CheckpointError, ConfigError, InputError, TextError, first_line, nearest, shown
from triptych.mapping import ConfigKeys, Values, names_in
from triptych.spec import ClassHeadSpec, ModelSpec, PoolingSpec, TokenHeadSpec
from . import Source, local_path, open_source
from .locate import without_config
from .packed_safetensors import scheme, unpacked
from .source import check_text_size, file_size, json_if_there, read_json

if TYPE_CHECKING:
    from triptych.text import Tokenizer


KEY = "triptych_sentences"  # in configs of Hugging Face, which have no key for these settings
_FILE = "sentence_bert_config.json"
_GGUF = "triptych."


@dataclass(frozen=True)
class SentenceSettings:
    """`max_seq_length` tokens of a text are read, special ones included, and the rest is cut off; all where it is None.
    `do_lower_case` makes texts lower case first.

    Directories of sentence-transformers have a `modules.json`; `sentence_bert_config.json` beside it may give both, and
    without the first the tokenizer's `model_max_length` holds, up to the positions of the model.
    """

    max_seq_length: int | None = None
    do_lower_case: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> SentenceSettings:
        """The settings of a JSON object; its other keys configure how sentence-transformers loads the model.

        Raises CheckpointError for values that are not a length above 2 and a truth value.
        """
        length, lower = config.get("max_seq_length"), config.get("do_lower_case") or False
        if length is not None and (type(length) is not int or length < 3):
            raise CheckpointError(f"{source}: max_seq_length must be an integer above 2 or null, not {shown(length)}")
        if not isinstance(lower, bool):
            raise CheckpointError(f"{source}: do_lower_case must be true or false, not {shown(lower)}")
        return cls(length, lower)

    @classmethod
    def of_directory(cls, directory: Path, context: int | None) -> SentenceSettings | None:
        """The settings of a directory of sentence-transformers whose model has `context` positions; None for others."""
        own = directory / _FILE
        if file_size(own) is None and file_size(directory / "modules.json") is None:
            return None
        settings = cls.of(json_if_there(own), str(own))
        if settings.max_seq_length is not None:
            return settings
        length = json_if_there(directory / "tokenizer_config.json").get("model_max_length")
        lengths = [n for n in (length, context) if isinstance(n, int | float) and 3 <= n < math.inf]
        return cls(int(min(lengths)) if lengths else None, settings.do_lower_case)

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], source: str) -> SentenceSettings:
        """The settings that `to_gguf` wrote; the defaults for files of other programs."""
        return cls.of({name: metadata.get(_GGUF + name) for name in ("max_seq_length", "do_lower_case")}, source)

    def to_gguf(self) -> Values:
        """GGUF metadata, under keys of ours: the format has none."""
        return {_GGUF + name: value for name, value in asdict(self).items() if value}

    def truncated(self, ids: Sequence[int], around: Sequence[int], *, cut: bool = True) -> list[int]:
        """The ids of a text cut to `max_seq_length`; the special tokens at its end stay.  `around` are the ids of the
        empty text: what stands before and after every text.  Raises InputError for a longer one unless it may be
        `cut`."""
        most = self.max_seq_length
        if most is None or len(ids) <= most:
            return list(ids)
        if not cut:
            raise InputError(
                f"a text has {len(ids):,} tokens, of which the model reads {most:,}; shorten it, or cut it"
            )
        after = 0
        while after < len(around) and around[-1 - after] == ids[-1 - after]:
            after += 1
        return [*ids[: most - after], *ids[len(ids) - after :]]


#: Files that say how a checkpoint is used, which its config does not: they are copied when it is saved or converted.
BESIDE = ("generation_config.json", "preprocessor_config.json")
#: Every other file that may stand beside the weights.
_SIDE_FILES = names_in("""
    added_tokens.json chat_template.jinja merges.txt modules.json sentence_bert_config.json sentencepiece.bpe.model
    source.spm special_tokens_map.json spiece.model spm.model target.spm tokenizer.json tokenizer.model
    tokenizer_config.json vocab.json vocab.txt 1_Pooling/config.json
""")
#: The kinds of `problem_type`.
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True, eq=False)
class Header:
    """A spec, the HF config it came from, and the tensors beside it; `source` is None where there are no weights."""

    path: Path
    spec: ModelSpec
    hf: Values
    source: Source | None
    ends: object = None

    @property
    def notes(self) -> tuple[str, ...]:
        """A line on end tokens outside the vocabulary, which are left out; `ends` are those of the files."""
        ends = self.ends if isinstance(self.ends, list) else [self.ends]
        lost = [end for end in ends if end is not None and end not in range(self.spec.vocab)]
        if self.spec.decoder is None or not lost:
            return ()
        return (f"eos_token_id {shown(lost)} is outside the vocabulary of {self.spec.vocab} tokens, and ends no text",)

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that came with the checkpoint, None when there is none.

        Raises TextError if it is broken, or gives ids that the model has no embedding for.
        """
        tokenizer = self._tokenizer()
        rows = [count for count in (self.spec.vocab, self.spec.source_vocab) if count]
        if tokenizer is not None and rows:
            try:
                tokenizer.check_rows(min(rows))
            except TextError as error:
                raise TextError(f"{self.path}: {error}") from error
        return tokenizer

    def _tokenizer(self) -> Tokenizer | None:
        from triptych import text

        if self.source is not None and self.source.kind == "gguf":
            metadata = self.source.metadata
            return None if metadata.get("tokenizer.ggml.model") == "no_vocab" else text.from_gguf(metadata)
        return text.from_directory(self.path) if text.has_tokenizer(self.path) else None


def read_header(
    path: str | Path, ignore: Collection[str] = (), *, offline: bool = False, weights: bool = True
) -> Header:
    """The header of a model directory (with or without its weights), a `config.json`, a `.gguf` file, or
    `hub:org/name`, of which `weights=False` fetches the small files alone.

    Raises CheckpointError, ConfigError or FetchError naming what is missing or not understood.
    """
    local = local_path(path, offline, weights)
    try:
        local.stat()
    except FileNotFoundError:
        pass  # `open_source` says what was expected there
    except (OSError, ValueError) as error:  # a name too long or with a zero byte, a loop of links, no permission
        raise CheckpointError(f"{shown(str(local))} cannot be opened ({first_line(error)})") from None
    if local.is_dir() or (local.suffix == ".json" and local.is_file()):
        return _check_ignored(ignore, _with_config(local, ignore))
    source = open_source(local)
    if source.kind != "gguf":
        raise CheckpointError(f"{local}: is weights alone; give the directory that holds them and their config.json")
    shapes = {name: info.shape for name, info in source.infos.items()}
    hf, spec = families.read_gguf(
        source.metadata, shapes, read=lambda name: source.read(name).tolist(), ignore=ignore, where=str(local)
    )
    settings = SentenceSettings.of_gguf(source.metadata, str(local))
    if settings != SentenceSettings():
        hf = {**hf, KEY: asdict(settings)}
    return _check_ignored(ignore, Header(local, spec, hf, source, hf.get("eos_token_id")))


def _check_ignored(ignore: Collection[str], header: Header) -> Header:
    """Raise InputError for a name in `ignore` that no key, tensor or module has; without weights it cannot be known."""
    if not ignore or header.source is None:
        return header
    quoted = "".join(
        file.read_text("utf-8", "replace")
        for file in (header.path / "config.json", header.path / "modules.json")
        if file.is_file()
    )
    quoted += "".join(f'"{key}" "{key.partition(".")[2]}"' for key in header.source.metadata)
    for name in ignore:
        if not (name and (f'"{name}"' in quoted or fnmatch.filter(header.source.names, name))):
            raise InputError(
                f"ignore: {shown(name)} is no config key and matches no tensor{nearest(name, header.hf)}; leave it out"
            )
    return header


def _with_config(model_path: Path, ignore: Collection[str]) -> Header:
    """Of a directory, or of a `config.json` alone."""
    for name in (*BESIDE, *sorted(_SIDE_FILES)):  # one that is there and cannot be read must not count as absent
        file = (model_path if model_path.is_dir() else model_path.parent) / name
        check_text_size(file, file_size(file))
    config = model_path / "config.json" if model_path.is_dir() else model_path
    if model_path.is_dir() and file_size(config) is None:
        raise without_config(model_path)
    hf = read_json(config)
    if config.name != "config.json" and "model_type" not in hf:
        raise ConfigError(f"{config}: is not the config of a model; give the directory that holds config.json")
    packing = scheme(hf.pop("quantization_config"), str(config)) if hf.get("quantization_config") else None
    hf = dict(families.text_config(hf, str(config), ignore))
    source = unpacked(open_source(model_path), packing) if any(model_path.glob("*.safetensors*")) else None
    stored = None if source is None else source.names
    generation = json_if_there(model_path / BESIDE[0])
    special_ids = {name: generation[name] for name in _IDS if generation.get(name) is not None}  # they override
    ConfigKeys(special_ids, str(model_path / BESIDE[0])).special_ids(0)  # raises the errors of that file
    read = partial(families.read_config, stored=stored, ignore=ignore, where=str(config))
    spec = read(hf | special_ids)
    if (model_path / "modules.json").is_file() and stored is not None and _headless(spec, stored):
        hf.pop("architectures", None)
        spec = read(hf | special_ids)
    pooled = _pooled(spec, model_path, ignore)
    if pooled != spec and isinstance(pooled.head, PoolingSpec):
        # Saved with the config: a saved model has no 1_Pooling.
        hf = {**hf, "triptych_pooling": {"mode": pooled.head.mode, "normalize": pooled.head.normalize}}
    settings = SentenceSettings.of_directory(model_path, spec.context) if model_path.is_dir() else None
    if settings is not None and isinstance(spec.head, PoolingSpec):
        hf = {**hf, KEY: asdict(settings)}
    return Header(model_path, pooled, hf, source, (hf | special_ids).get("eos_token_id"))


def _headless(spec: ModelSpec, stored: Collection[str]) -> bool:
    """Whether no file has the head that the config names: sentence-transformers stores the bare encoder, and some
    of its configs still name the class that was trained."""
    names = {load.source for load in families.save_plan(spec) if load.ours[0].startswith("head.")}
    return bool(names) and names.isdisjoint(stored)


def _pooled(spec: ModelSpec, model_path: Path, ignore: Collection[str]) -> ModelSpec:
    """The pooling a sentence-transformers directory declares beside a bare encoder."""
    pooling = model_path / "1_Pooling" / "config.json"
    if not isinstance(spec.head, PoolingSpec) or not pooling.is_file():
        return spec
    known: dict[str, Literal["first", "mean"]] = {"cls": "first", "mean": "mean"}
    modes = _modes(read_json(pooling))
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(f"{pooling}: unsupported pooling_mode {shown(modes)}; use mean or cls")
    normalize = _normalizes(model_path / "modules.json", ignore)
    return replace(spec, head=replace(spec.head, mode=known[modes[0]], normalize=normalize))


def _modes(config: Values) -> list[Any]:
    """The pooling modes of sentence-transformers: one name or several under one key, or a flag each in old files."""
    modes = config.get("pooling_mode")
    if modes is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        modes = [flag.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for flag in flags]
    return list(modes) if isinstance(modes, list) else [modes]


def _normalizes(modules: Path, ignore: Collection[str]) -> bool:
    """Whether the modules that sentence-transformers lists scale vectors to length 1.

    Raises CheckpointError for a module that changes them otherwise.
    """
    if not modules.is_file():
        return False
    try:
        chain = [
            (str(module.get("type", "")), str(module.get("path", ""))) for module in json.loads(modules.read_bytes())
        ]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{modules}: is not a JSON list of modules ({type(error).__name__})") from None
    for kind, path in chain:
        if not kind.endswith((".Transformer", ".Pooling", ".Normalize")) and path not in ignore:
            raise CheckpointError(
                f"{modules}: unsupported module {shown(kind)}; to stop before it, load with ignore=[{path!r}]"
            )
    return any(kind.endswith(".Normalize") for kind, _ in chain)


def check_new(spec: ModelSpec, hf: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is read past in files, and wrong in the config of a new model: ids outside the
    vocabulary, labels that are not numbered from 0 or not told apart, and unknown kinds of problems."""
    for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id"):
        for token in hf[key] if isinstance(hf.get(key), list | tuple) else [hf.get(key)]:
            if spec.vocab and token is not None and token not in range(spec.vocab):
                raise ConfigError(f"config: {key} is {token}, and the vocabulary has {spec.vocab} tokens; leave it out")
    _check_labels(hf.get("id2label"), hf.get("label2id"))
    if (problem := hf.get("problem_type")) not in (None, *PROBLEMS):
        raise ConfigError(f"config: problem_type {shown(problem)} is not one of {', '.join(PROBLEMS)}")


def _check_labels(names: object, numbers: object) -> None:
    if not isinstance(names, Mapping):
        return
    labels = {str(i): name for i, name in names.items()}
    if not names or labels.keys() != set(map(str, range(len(names)))):
        raise ConfigError(f"config: id2label has {shown(list(names))}; number the labels from 0")
    given = {name for name in names.values() if isinstance(name, str)}
    back = {str(i): name for name, i in numbers.items()} if isinstance(numbers, Mapping) and numbers else labels
    if len(given) < len(names) or back != labels:
        raise ConfigError(f"config: id2label {shown(names)}: give each label its own name, the one in label2id")


def label_names(spec: ModelSpec, hf: Mapping[str, Any]) -> list[str]:
    """The names of the classes in the config `hf`; `LABEL_0`, `LABEL_1`, ... where it has none."""
    if not isinstance(spec.head, ClassHeadSpec | TokenHeadSpec):
        return []
    names = hf.get("id2label") or {}
    return [str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(spec.head.classes.outputs)]
