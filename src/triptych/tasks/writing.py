"""Summaries, translations and generated answers: the prompts, the settings from the checkpoint's files, and the rules
of generation (a minimum length, no repeated n-grams)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triptych.errors import ConfigError, InputError, nearest, shown
from triptych.generate import Generation, Rule
from triptych.spec import LMHeadSpec
from triptych.text import RenderedPrompt
from .model_inputs import ModelInputs, TaskModel

MAX_NEW_TOKENS = 128  # where the files of the checkpoint give no limit
SUMMARIZE = "Summarize the following text in a few sentences."
ANSWER = "Answer the question in a few words, from the text alone."
#: How a language is written in a vocabulary: mBART's `en_XX`, M2M's `__en__`, NLLB's `eng_Latn`, Marian's `>>eng<<`.
_CODES = re.compile(r"[a-z]{2,3}_[A-Z]{2}|__[a-z]{2,3}__|[a-z]{3}_[A-Z][a-z]{3}|>>[A-Za-z_-]{2,12}<<")


@dataclass(frozen=True)
class WritingTask:
    """One text to write.

    prompt           what the model reads: the source of an encoder-decoder, else what a decoder continues.
    text             the prompt as text, to show it.
    decoder_prefix   ids that an encoder-decoder's output begins with: the target language.
    options          options of `Model.generate` that the checkpoint's files set for the task.
    """

    prompt: str | RenderedPrompt | list[int]
    text: str
    decoder_prefix: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def summary(inputs: ModelInputs, text: str) -> WritingTask:
    """A summary of `text`.

    An encoder-decoder reads the text after the prefix of `task_specific_params` in its config; T5 has "summarize: "
    without one (Raffel et al. 2020).  A decoder with a chat template is asked for it; another one continues the text
    and "TL;DR:" (Radford et al. 2019).  Raises InputError for a model that writes no text, and for an empty text.
    """
    _check(inputs, "summarize", text, "hub:facebook/bart-large-cnn or hub:google-t5/t5-small")
    settings = _task_settings(inputs.hf, "summarization")
    if inputs.spec.layout == "encoder-decoder":
        prefix = settings.get("prefix", "summarize: " if inputs.spec.family in ("t5", "mt5") else "")
        return _of_source(inputs, f"{prefix}{text}", settings)
    return _of_decoder(inputs, f"{SUMMARIZE}\n\n{text}", f"{text}\n\nTL;DR:")


def written_answer(inputs: ModelInputs, question: str, context: str) -> WritingTask:
    """An answer in the model's own words: T5's "question: ... context: ...", or a decoder's prompt.

    Raises InputError for a model that writes no text, and for an empty question or context.
    """
    _check(inputs, "answer", context, "hub:google/flan-t5-small")
    if not question.strip():
        raise InputError("the question is empty; ask something about the context")
    if inputs.spec.layout == "encoder-decoder":
        return _of_source(inputs, f"question: {question}  context: {context}", {})
    question_and_text = f"Text: {context}\n\nQuestion: {question}"
    return _of_decoder(inputs, f"{ANSWER}\n\n{question_and_text}", f"{question_and_text}\nAnswer:")


def translation(inputs: ModelInputs, text: str, source: str | None = None, target: str | None = None) -> WritingTask:
    """A translation of `text` from `source` to `target`, languages as the checkpoint writes them or a short form (`de`
    for `de_DE`).

    T5 is told by a prefix of `task_specific_params`, a Marian model of several targets by a token before the text, and
    mBART and its kin by a token of the source language and one that the output begins with.  A model of one pair of
    languages needs neither.  Raises InputError for a language that the checkpoint does not know, with those that it
    does, and for a model that does not translate.
    """
    _check(inputs, "translate", text, "hub:Helsinki-NLP/opus-mt-en-de or hub:google-t5/t5-small")
    if inputs.spec.layout != "encoder-decoder":
        raise InputError(
            "translate needs an encoder-decoder that was trained to translate, such as hub:Helsinki-NLP/opus-mt-en-de; "
            "a decoder is asked in words, with triptych chat or generate"
        )
    if pairs := _prefixed_pairs(inputs.hf):
        pair = _chosen_pair(pairs, source, target)
        settings = _task_settings(inputs.hf, f"translation_{pair[0]}_to_{pair[1]}")
        return _of_source(inputs, f"{settings.get('prefix', '')}{text}", settings)
    codes = language_codes(inputs)
    if not codes:
        if source is not None or target is not None:
            raise InputError(
                "this checkpoint names no languages: a model of one pair needs neither source nor target; leave them "
                "out, or take one such as hub:facebook/mbart-large-50-many-to-many-mmt"
            )
        return _of_source(inputs, text, {})
    return _between(inputs, text, codes, source, target)


def language_codes(inputs: ModelInputs) -> dict[str, int]:
    """The tokens of languages in the vocabulary -> their ids; none for a model of one pair of languages, and for
    families that are told a language in another way, whose vocabularies may have such strings by chance."""
    if inputs.spec.family in ("bart", "t5", "mt5"):
        return {}
    known = inputs.words.backend.get_vocab(with_added_tokens=True)
    return {token: id for token, id in sorted(known.items()) if _CODES.fullmatch(token) and id < inputs.spec.vocab}


def _between(
    inputs: ModelInputs, text: str, codes: Mapping[str, int], source: str | None,
    target: str | None,
) -> WritingTask:  # fmt: skip
    """A translation by a model that is told languages by tokens."""
    if target is None:
        raise InputError(f"target is missing; this checkpoint writes {_listed(codes)}")
    into = _code(target, codes, "target")
    ids = inputs.words.encode(text)
    if into.startswith(">>"):  # Marian: one source language, the target before the text
        return WritingTask([codes[into], *ids], f"{into} {text}", options=_options(inputs, {}, 0))
    around, known = inputs.words.encode(""), set(codes.values())
    places = [i for i, token in enumerate(around) if token in known]
    if source is not None and places:
        place = places[0] if places[0] < len(around) - 1 else -1  # the code stands first (mBART-50) or last (mBART)
        ids[place] = codes[_code(source, codes, "source")]
    start = inputs.spec.ids.start
    if start in known and start != codes[into]:  # a fine-tuned mBART begins with its one language
        only = next(code for code, id in codes.items() if id == start)
        raise InputError(f"target={target!r}: this checkpoint writes {only} alone")
    prefix = () if start in known else (codes[into],)
    return WritingTask(ids, text, prefix, _options(inputs, {}, len(prefix)))


def _check(inputs: ModelInputs, task: str, text: str, examples: str) -> None:
    """Raise InputError for a model that writes no text, naming `examples` of those that do, and for an empty text."""
    if not isinstance(inputs.spec.head, LMHeadSpec) or inputs.spec.layout == "encoder" or not inputs.reads_text:
        kind = inputs.spec.layout if inputs.reads_text else "model of sound or images"
        chats = "" if task == "translate" else ", or a decoder that chats"
        raise InputError(
            f"{task} needs a model that reads and writes text, and this {inputs.spec.family} {kind} does not; take an "
            f"encoder-decoder such as {examples}{chats}"
        )
    if not text.strip():
        raise InputError(f"there is no text to {'answer from' if task == 'answer' else task}")


def _of_source(inputs: ModelInputs, text: str, settings: Mapping[str, Any]) -> WritingTask:
    forced = int(inputs.generation_config().get("forced_bos_token_id") is not None)  # BART's output begins with it
    return WritingTask(text, text, options=_options(inputs, settings, forced))


def _of_decoder(inputs: ModelInputs, message: str, plain: str) -> WritingTask:
    prompt = plain if inputs.words.chat is None else inputs.render([{"role": "user", "content": message}])
    return WritingTask(prompt, str(prompt), options={"max_new_tokens": MAX_NEW_TOKENS})


def _task_settings(hf: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    """`task_specific_params` of a config for one task.  Raises ConfigError where these are no objects."""
    every = hf.get("task_specific_params") or {}
    settings = every.get(task, {}) if isinstance(every, Mapping) else None
    if not isinstance(settings, Mapping) or not isinstance(settings.get("prefix", ""), str):
        raise ConfigError(f"config: task_specific_params must hold an object for each task, not {shown(every)}")
    return settings


def _prefixed_pairs(hf: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of languages, as (source, target), that `task_specific_params` has a prefix for."""
    names = hf.get("task_specific_params") or {}
    return [(m[1], m[2]) for name in names if (m := re.fullmatch(r"translation_(\w+?)_to_(\w+)", str(name)))]


def _chosen_pair(pairs: Sequence[tuple[str, str]], source: str | None, target: str | None) -> tuple[str, str]:
    listed = ", ".join(f"{a} to {b}" for a, b in pairs)
    fitting = [(a, b) for a, b in pairs if source in (None, a) and target in (None, b)]
    if len(fitting) != 1 or (target is None and len(pairs) > 1):
        languages = f"source={source!r}, target={target!r}"
        raise InputError(f"{languages} is not one pair of languages of this checkpoint; it translates {listed}")
    return fitting[0]


def _code(language: str, codes: Mapping[str, int], what: str) -> str:
    """The token of a language that was named in full or by its first part."""
    if language in codes:
        return language
    fitting = [code for code in codes if code.strip("_<>").partition("_")[0] == language.strip("_<>").lower()]
    if len(fitting) != 1:
        raise InputError(
            f"{what}={language!r} is not a language of this checkpoint{nearest(language, codes)}; it knows "
            f"{_listed(codes)}"
        )
    return fitting[0]


def _listed(codes: Mapping[str, int]) -> str:
    return ", ".join(code.strip("_<>") for code in codes)


def _options(
    inputs: ModelInputs, settings: Mapping[str, Any], prefix: int
) -> dict[str, Any]:  # fmt: skip
    """Options of `Model.generate` from `settings`, else from the generation config, else from the config.

    Limits there count the start token and `prefix` ids after it, which ours do not.  Raises ConfigError for values of
    another type.
    """
    files = {**inputs.generation_config(), **settings}
    used = {name: files[name] for name in _NUMBERS if files.get(name) is not None}
    for name, value in used.items():
        if isinstance(value, bool) or not isinstance(value, _NUMBERS[name]):
            raise ConfigError(f"config: {name} must be a number, not {shown(value)}")
    longest = used.get("max_length", 20)
    new = used.get("max_new_tokens", longest - 1 if longest != 20 else MAX_NEW_TOKENS)
    options: dict[str, Any] = {"max_new_tokens": max(1, new - prefix), "beams": 0}
    if used.get("num_beams", 1) > 1:
        options["beams"], options["length_penalty"] = used["num_beams"], float(used.get("length_penalty", 1.0))
        options["early_stopping"] = files.get("early_stopping") is True
    rules = [at_least(least, inputs.spec.ids.eos)] if (least := used.get("min_length", 0)) > 1 else []
    rules += [no_repeats(size)] if (size := used.get("no_repeat_ngram_size")) else []
    return options | ({"rules": rules} if rules else {})


_NUMBERS: dict[str, Any] = {
    "max_new_tokens": int, "max_length": int, "min_length": int, "num_beams": int, "no_repeat_ngram_size": int,
    "length_penalty": (int, float),
}  # fmt: skip


def at_least(length: int, ends: Sequence[int]) -> Rule:
    """A rule under which none of the ids `ends` comes before a row has `length` ids, its prompt included."""
    forbidden = torch.tensor(list(ends), dtype=torch.long)

    def rule(logits: Tensor, row: Sequence[int]) -> Tensor:
        return logits.index_fill(0, forbidden.to(logits.device), -torch.inf) if len(row) < length else logits

    return rule


def no_repeats(size: int) -> Rule:
    """A rule under which no sequence of `size` ids comes twice in a row, its prompt included (Paulus et al. 2018)."""

    def rule(logits: Tensor, row: Sequence[int]) -> Tensor:
        last = list(row[len(row) - size + 1 :])
        starts = range(len(row) - size + 1)
        banned = [row[i + size - 1] for i in starts if list(row[i : i + size - 1]) == last]
        return logits.index_fill(0, torch.tensor(banned, dtype=torch.long, device=logits.device), -torch.inf)

    return rule


def summarize(model: TaskModel, texts: Sequence[str], **options: Any) -> list[Generation]:
    """A summary of each text, by an encoder-decoder, or by a decoder with a chat template.

    The files of the checkpoint set beams and limits; `options` are those of `generate` and replace them.  Raises
    InputError for a model that writes no text, and for an empty text.
    """
    return _written(model, [summary(model.inputs, text) for text in texts], options)


def translate(
    model: TaskModel, texts: Sequence[str], source: str | None = None, target: str | None = None, **options: Any
) -> list[Generation]:
    """Each text in the language `target`; `source` and `target` as the checkpoint names them ("en_XX"), or in short
    ("en").

    `options` as in `summarize`.  Raises InputError for a language that the checkpoint does not know, with those
    that it does, for a model that does not translate, and for an empty text.
    """
    return _written(model, [translation(model.inputs, text, source, target) for text in texts], options)


def answer_in_words(model: TaskModel, question: str, context: str, **options: Any) -> Generation:
    """An answer to `question` from `context`, generated by the model; `options` as in `summarize`.

    `answer` selects a piece of the context instead.  Raises InputError for a model that writes no text, and for an
    empty question or context.
    """
    return _written(model, [written_answer(model.inputs, question, context)], options)[0]


def _written(model: TaskModel, writing_tasks: Sequence[WritingTask], options: Mapping[str, Any]) -> list[Generation]:
    if not writing_tasks:
        raise InputError("there are no texts; give a list of texts: [text]")
    first = writing_tasks[0]
    settings = {"decoder_prefix": first.decoder_prefix, **first.options, **options}
    if not settings.get("beams"):
        for name in {"length_penalty", "early_stopping"} - options.keys():
            settings.pop(name, None)
    return model.generate([one.prompt for one in writing_tasks], **settings)
