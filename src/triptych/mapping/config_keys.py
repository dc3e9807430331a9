"""Typed reading of the keys of a `config.json`, with a record of which were read.

A key that was not read may change the model in an unknown way, so it is an error, unless it is on the list of keys that
cannot change the arithmetic (`METADATA`), or the family or the caller ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, get_args

from triptych.errors import ConfigError, closest, nearest, shown
from triptych.files import tables_of
from triptych.spec import SpecialIds
from triptych.spec.parts import Activation
from .weight_table import names_in

T = TypeVar("T")
# `ConfigKeys` has methods called int, float, str and bool, so inside it the types need other names.
Int: TypeAlias = int
Float: TypeAlias = float
Str: TypeAlias = str
Bool: TypeAlias = bool
Values: TypeAlias = dict[str, Any]  # keys of a config and what they are set to
REQUIRED: Any = object()
SIZE = 2**31 - 1  # no width, vocabulary or context is larger
COUNT = 2**12  # nor has any model more layers, heads or buckets

# Keys that describe the file, its training or its use, never the arithmetic of a forward.
METADATA = names_in("""
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels architectures bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cls_token_id custom_pipelines decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id eos_token_ids
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range label2id language length_penalty mask_token_id max_length min_length model_type name
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_scores pad_token_id prefix problem_type remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sbert_ce_default_activation_function sentence_transformers
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torch_dtype torchscript transformers.js_config transformers_version triptych_sentences typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache xla_device
""")

_TABLES = tables_of(__file__)
REFUSED: Mapping[str, str] = _TABLES["refused"]  # keys that are harmless only while they are off
ACTIVATIONS: Mapping[str, Activation] = _TABLES["activations"]
assert set(ACTIVATIONS.values()) == set(get_args(Activation))


class ConfigKeys:
    """The keys of one dict: each is checked for type and range when it is read, and `finish` refuses those left over.

    `where` names the file in errors.  `stored` are the tensor names of the checkpoint beside it, None when only
    the config is known (counting parameters, or a new model).  `ignored` are keys, of nested tables too, that the
    caller declares irrelevant.
    """

    def __init__(
        self,
        data: Mapping[Str, Any],
        where: Str = "config.json",
        stored: Collection[Str] | None = None,
        ignored: Collection[Str] = (),
    ) -> None:
        self.data, self.where, self.stored, self.ignored = data, where, stored, ignored
        self.read: set[Str] = set()

    def get(self, name: Str, default: Any = REQUIRED) -> Any:
        """The raw value, marked as read.  Raises ConfigError when it is absent and has no default."""
        self.read.add(name)
        if name in self.data:
            return self.data[name]
        if default is REQUIRED:
            close = closest(name, (key for key in self.data if self._may_be(key, name)), cutoff=0.85)
            raise self.error(f"needs the key {name!r}" + (f"; is {close!r} a misspelling of it?" if close else ""))
        return default

    def _may_be(self, key: Str, name: Str) -> Bool:
        """Whether a key that is there may be a misspelling of `name`: not one that is known or was read, nor one whose
        words contain those of `name` or are contained in them (moe_intermediate_size, type_vocab_size)."""
        words, wanted = set(key.split("_")), set(name.split("_"))
        return key not in self.read and key not in METADATA and not (words < wanted or wanted < words)

    def assume(self, **values: Any) -> None:
        """Set the values of absent keys, as the family defines them."""
        self.data = {**values, **self.data}

    def _typed(self, name: Str, kind: type[T] | tuple[type, ...], default: Any, expected: Str) -> Any:
        value = self.get(name, default)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self.error(f"{name} must be {expected}, not {shown(value)}")
        return value

    def int(self, name: Str, default: Any = REQUIRED, low: Int = 1, high: Int = SIZE) -> Int:
        """An integer in [low, high]; a boolean is not an integer."""
        value: Int = self._typed(name, int, default, "an integer")
        if value is not default and not low <= value <= high:
            raise self.error(f"{name} must be between {low} and {high}, not {value}")
        return value

    def optional_int(self, name: Str, default: Int | None = None, **limits: Int) -> Int | None:
        """An integer within the limits of `int`, None when null, `default` when absent."""
        return None if self.get(name, default) is None else self.int(name, default, **limits)

    def count(self, name: Str, default: Any = REQUIRED) -> Int:
        """A number of layers, heads or buckets: an integer in [1, 4096], so that no config asks for 2^31 blocks."""
        return self.int(name, default, high=COUNT)

    def float(self, name: Str, default: Any = REQUIRED, low: Float = 0.0, high: Float = math.inf) -> Float:
        """A finite number in [low, high]; an integer will do."""
        value: Float = self._typed(name, (int, float), default, "a number")
        if value is not default and (not math.isfinite(value) or not low <= value <= high):
            raise self.error(f"{name} must be a finite number between {low} and {high}, not {value}")
        return value if value is default else float(value)

    def optional_float(self, name: Str, default: Float | None = None, **limits: Float) -> Float | None:
        """A finite number within the limits of `float`, None when null, `default` when absent."""
        return None if self.get(name, default) is None else self.float(name, default, **limits)

    def dropout(self, name: Str, default: Any = 0.0) -> Float:
        """A probability."""
        return self.float(name, default, high=1.0)

    def bool(self, name: Str, default: Any = REQUIRED) -> Bool:
        value: Bool = self._typed(name, bool, default, "true or false")
        return value

    def flag(self, name: Str) -> Bool:
        """True or false, false when absent."""
        return self.bool(name, default=False)

    def str(self, name: Str, default: Any = REQUIRED) -> Str:
        value: Str = self._typed(name, str, default, "a string")
        return value

    def _items(self, name: Str, expected: Str, default: Any = REQUIRED) -> list[ConfigKeys]:
        """Each item of a list as keys of its own, to be read under the name of the list."""
        values = self._typed(name, (list, tuple), default, f"a list of {expected}")
        return [ConfigKeys({name: value}, self.where) for value in values]

    def floats(self, name: Str) -> tuple[Float, ...]:
        """A list of finite numbers above zero."""
        return tuple(item.float(name, low=1e-12) for item in self._items(name, "numbers"))

    def ints(self, name: Str) -> tuple[Int, ...]:
        """A list of integers of at least zero."""
        return tuple(item.int(name, low=0) for item in self._items(name, "integers"))

    def strings(self, name: Str, default: Any = REQUIRED) -> tuple[Str, ...]:
        """A list of strings."""
        return tuple(item.str(name) for item in self._items(name, "strings", default))

    def choice(self, name: Str, choices: Mapping[Str, T], default: Any = REQUIRED) -> T:
        """The value in `choices` for the string under `name`.  Raises ConfigError, listing them, for another string."""
        text = self.str(name, default)
        if text not in choices:
            raise self.error(
                f"{name} {shown(text)} is not one of {', '.join(map(repr, choices))}{nearest(text, choices)}"
            )
        return choices[text]

    def act(self, name: Str, default: Any = REQUIRED) -> Activation:
        """An activation function by its HF name."""
        return self.choice(name, ACTIVATIONS, default)

    def table(self, name: Str) -> ConfigKeys | None:
        """A nested dict as keys of its own, or None when absent, null or empty."""
        value = self.get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{name} must be a table or null, not {shown(value)}")
        return ConfigKeys(value, f"{self.where}: {name}", ignored=self.ignored) if value else None

    def architecture(self, known: Mapping[Str, T], default: Str) -> T:
        """The value for the class the checkpoint was saved from (`architectures`), or that of `default`."""
        names = self.strings("architectures", default=()) if self.get("architectures", None) is not None else ()
        name = names[0] if names else default
        if name not in known:
            raise self.error(f"architecture {shown(name)} is not one of {', '.join(known)}{nearest(name, known)}")
        return known[name]

    def has_tensor(self, name: Str, default: Bool = False) -> Bool:
        """Whether the checkpoint stores tensor `name`, under any prefix; `default` without a checkpoint."""
        if self.stored is None:
            return default
        return any(stored == name or stored.endswith("." + name) for stored in self.stored)

    def labels(self, default: Int = 2) -> Int:
        """The number of a head's classes: the length of `id2label`, else `num_labels`, else `default`."""
        names = self.get("id2label", None)
        if names is not None and not isinstance(names, Mapping):
            raise self.error(f"id2label must be a table, not {shown(names)}")
        return len(names) if names else self.int("num_labels", default=default)

    def special_ids(self, vocab: Int, start: Int | None = None) -> SpecialIds:
        """pad, bos, eos and start.  An id outside the vocabulary can never occur; some files have such values
        (-1, or 50256 with a small vocabulary), and they are dropped."""

        def one(name: Str) -> Int | None:
            value = self.optional_int(name, low=-1)
            return value if value is not None and 0 <= value < vocab else None

        eos = self.get("eos_token_id", None)
        several = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
        ends = [ConfigKeys({"eos_token_id": item}, self.where).int("eos_token_id", low=-1) for item in several]
        begin = one("decoder_start_token_id") if "decoder_start_token_id" in self.data else start
        return SpecialIds(
            pad=one("pad_token_id"), bos=one("bos_token_id"), eos=tuple(i for i in ends if 0 <= i < vocab), start=begin
        )

    def finish(self, ignore: Iterable[Str] = (), metadata: Collection[Str] = METADATA) -> None:
        """Raise ConfigError for a key that was not read and is neither metadata nor in `ignore`."""
        allowed = self.read | set(ignore) | set(metadata) | set(self.ignored)
        left = [key for key in self.data if key not in allowed]
        for key in left:
            if key in REFUSED and self.data[key]:
                raise self.error(f"{key} is set: {REFUSED[key]}; {self._advice(key)}")
        for key in left:
            if key not in REFUSED:
                close = nearest(key, (self.read | METADATA) - self.data.keys(), cutoff=0.75)
                raise self.error(f"{key!r} (= {shown(self.data[key])}) is not understood{close}; {self._advice(key)}")

    def _advice(self, key: Str) -> Str:
        made = self.where.partition(":")[0] in ("config", "model")  # the dict of a new model, and no file
        return f"if it cannot matter, {'leave it out' if made else f'load with ignore=[{key!r}]'}"

    def error(self, problem: Str) -> ConfigError:
        """A ConfigError whose message begins with the name of the file."""
        return ConfigError(f"{self.where}: {problem}")
