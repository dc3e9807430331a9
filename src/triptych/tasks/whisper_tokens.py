"""Whisper's special tokens, and the rules of what may follow what (Radford et al. 2022; the rules are its code's)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from triptych.errors import TextError, shown
from triptych.generate import Rule
from triptych.text import Tokenizer

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


def rules(tokens: WhisperTokens, prompt_length: int, *, timestamps: bool = True) -> Rule:
    """What may follow in a row whose first `prompt_length` ids are its prompt: no suppressed token, and times only
    where `_restrict_times` allows them."""

    never = torch.tensor([*tokens.suppressed, tokens.no_timestamps])
    not_first = torch.tensor([*tokens.suppressed, tokens.no_timestamps, *tokens.suppressed_first])

    def allowed(scores: Tensor, row: Sequence[int]) -> Tensor:
        new = list(row[prompt_length:])
        scores = scores.float().index_fill(0, (never if new else not_first).to(scores.device), -torch.inf)
        if timestamps:
            _restrict_times(scores, new, tokens)
        else:
            scores[tokens.first_time :] = -torch.inf
        return scores

    return allowed


def _restrict_times(score: Tensor, new: Sequence[int], tokens: WhisperTokens) -> None:
    """Times come in pairs, the end of a sentence and the beginning of the next, except the first and the last; they
    never decrease; and a time is due when all times together are likelier than any single text token.

    `score` [V] is changed in place.
    """
    first = tokens.first_time
    last_is_time = bool(new) and new[-1] >= first
    paired = last_is_time and (len(new) < 2 or new[-2] >= first)
    if paired:
        score[first:] = -torch.inf
    elif last_is_time:
        score[: tokens.end] = -torch.inf
    if times := [token for token in new if token >= first]:
        score[first : times[-1] + (0 if last_is_time and not paired else 1)] = -torch.inf
    if not new:
        score[:first] = -torch.inf
        if tokens.latest_first is not None:
            score[first + tokens.latest_first + 1 :] = -torch.inf
    if score[first:].logsumexp(-1) > score[:first].max():
        score[:first] = -torch.inf


def segments(
    ids: Sequence[int], frames: int, first: int, stride: int = 2
) -> tuple[list[tuple[int, int, list[int]]], int]:
    """The sentences of a window of `frames`, each as (begin, end, ids) in units of 0.02 s, and after how many frames
    the next window begins: at the last pair of times, or at the end of this window where the text ends in a single
    time or has no pair."""
    timed = [token >= first for token in ids]
    ends = [i + 1 for i in range(len(ids) - 1) if timed[i] and timed[i + 1]]
    if not ends:
        times = [token - first for token in ids if token > first]
        return [(0, times[-1] if times else frames // stride, list(ids))], frames
    closed = timed[-2:] == [False, True]
    if closed:
        ends.append(len(ids))
    pieces = [list(ids[a:b]) for a, b in pairwise([0, *ends])]
    sentences = [(piece[0] - first, piece[-1] - first, piece) for piece in pieces]
    return sentences, frames if closed else sentences[-1][1] * stride
