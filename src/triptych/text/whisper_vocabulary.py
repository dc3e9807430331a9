"""Whisper's special tokens, and what its decoder reads before a transcript (Radford et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from triptych.arguments import checked
from triptych.errors import InputError, TextError, nearest, shown
from .specials import SPEECH
from .tokenizer import Tokenizer

TASKS = ("transcribe", "translate")
ENGLISH = 51864  # vocabulary size of the models that know no other language


@dataclass(frozen=True)
class WhisperTokens:
    """The ids of Whisper's special tokens; ids from `first_time` on are times, 0.02 s apart."""

    start: int
    end: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]  # empty where the model knows only one
    no_timestamps: int
    no_speech: int | None = None
    previous: int | None = None  # precedes the text of the windows before
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()  # suppressed as the first token of a window
    latest_first: int | None = 50  # the last time a window may begin with

    @property
    def first_time(self) -> int:
        return self.no_timestamps + 1

    def prompt(self, language: str | None = None, task: str = "transcribe", *, timestamps: bool = False) -> list[int]:
        """The ids that a transcript follows: the start, and language and task where the model knows several.

        Raises InputError for a language or a task that the model does not know.
        """
        if task not in self.tasks:
            raise InputError(f"task={task!r} is not one of {', '.join(self.tasks)}")
        if task == "translate" and not self.languages:
            raise InputError("task='translate' needs a model of several languages, and this one knows only one")
        if language is not None and language not in self.languages:
            known = ", ".join(sorted(self.languages)) or "none: the model knows only one; leave language out"
            raise InputError(f"language={language!r} is not one of {known}{nearest(language, self.languages)}")
        named = [] if language is None else [self.languages[language], self.tasks[task]]
        return [self.start, *named, *([] if timestamps else [self.no_timestamps])]

    @staticmethod
    def of(tokenizer: Tokenizer, config: Mapping[str, Any], vocab: int) -> WhisperTokens:
        """From the names of a tokenizer's tokens and a checkpoint's generation config.

        Raises TextError when it is not a Whisper vocabulary.
        """
        known = tokenizer.backend.get_vocab(with_added_tokens=True)

        def named(name: str) -> int:
            if f"<|{name}|>" not in known:
                raise TextError(f"the tokenizer has no <|{name}|>, so it is not that of a Whisper model")
            return int(known[f"<|{name}|>"])

        def listed(name: str) -> tuple[int, ...]:
            ids = config.get(name) or []
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise TextError(f"generation config: {name} must be a list of token ids, not {shown(ids)}")
            return tuple(i for i in ids if 0 <= i < vocab)

        latest = config.get("max_initial_timestamp_index", 50)
        if not isinstance(latest, int | None):
            raise TextError(f"generation config: max_initial_timestamp_index must be an integer, not {shown(latest)}")
        languages = {m[1]: i for token, i in known.items() if (m := re.fullmatch(r"<\|([a-z]{2,3})\|>", token))}
        multilingual = config.get("is_multilingual", vocab != ENGLISH)
        return WhisperTokens(
            start=named("startoftranscript"),
            end=named("endoftext"),
            tasks={task: named(task) for task in TASKS},
            languages=languages if multilingual else {},
            no_timestamps=named("notimestamps"),
            no_speech=known.get("<|nospeech|>", known.get("<|nocaptions|>")),
            previous=known.get("<|startofprev|>"),
            suppressed=listed("suppress_tokens"),
            suppressed_first=listed("begin_suppress_tokens"),
            latest_first=latest,
        )


@checked
def with_whisper_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A new tokenizer with the special tokens that Whisper needs for one language without times.

    The last one is that after which ids would be times, of which there are none.
    """
    names = ("startoftranscript", *reversed(TASKS), "notimestamps")
    tokenizer.backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names])
    return Tokenizer(tokenizer.backend, SPEECH.specials)
