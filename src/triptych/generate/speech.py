"""What Whisper's vocabulary means and what may follow what in it (Radford et al. 2022; the rules are its code's)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from triptych.errors import TextError, shown
from triptych.generate.engine import Rule
from triptych.text import Tokenizer

TASKS = ("transcribe", "translate")
ENGLISH = 51864  # the vocabulary of the models that know no other language


@dataclass(frozen=True)
class Words:
    """The ids to which Whisper's vocabulary gives a meaning; ids from `first_time` on are times, 0.02 s apart."""

    start: int
    end: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]  # empty where the model knows only one
    untimed: int
    silent: int | None = None
    before: int | None = None  # opens what was said before
    never: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()
    latest_first: int | None = 50  # the last time a window may begin with

    @property
    def first_time(self) -> int:
        return self.untimed + 1

    @staticmethod
    def of(tokenizer: Tokenizer, config: Mapping[str, Any], vocab: int) -> Words:
        """From the names of a tokenizer's tokens and a checkpoint's generation config.

        Raises TextError when it is not a Whisper vocabulary.
        """
        known = tokenizer.backend.get_vocab(with_added_tokens=True)

        def named(name: str) -> int:
            if f"<|{name}|>" not in known:
                raise TextError(f"the tokenizer has no <|{name}|>, so this is no Whisper model that could transcribe")
            return int(known[f"<|{name}|>"])

        def listed(name: str) -> tuple[int, ...]:
            ids = config.get(name) or []
            if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
                raise TextError(f"generation config: {name} must be a list of token ids, not {shown(ids)}")
            return tuple(i for i in ids if 0 <= i < vocab)

        latest = config.get("max_initial_timestamp_index", 50)
        if not isinstance(latest, int | None):
            raise TextError(f"generation config: max_initial_timestamp_index must be an integer, not {shown(latest)}")
        tongues = {m[1]: i for token, i in known.items() if (m := re.fullmatch(r"<\|([a-z]{2,3})\|>", token))}
        several = config.get("is_multilingual", vocab != ENGLISH)
        return Words(
            start=named("startoftranscript"),
            end=named("endoftext"),
            tasks={task: named(task) for task in TASKS},
            languages=tongues if several else {},
            untimed=named("notimestamps"),
            silent=known.get("<|nospeech|>", known.get("<|nocaptions|>")),
            before=known.get("<|startofprev|>"),
            never=listed("suppress_tokens"),
            never_first=listed("begin_suppress_tokens"),
            latest_first=latest,
        )


def rules(words: Words, begun: int, *, timed: bool = True) -> Rule:
    """What may come next in a row whose first `begun` ids were given: never a suppressed token, and times by rule."""

    def allowed(scores: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        scores = scores.float().clone()
        scores[:, [*words.never, words.untimed]] = -torch.inf
        for score, row in zip(scores, rows, strict=True):
            said = list(row[begun:])
            if not said:
                score[list(words.never_first)] = -torch.inf
            if timed:
                _time(score, said, words)
            else:
                score[words.first_time :] = -torch.inf
        return scores

    return allowed


def _time(score: Tensor, said: Sequence[int], words: Words) -> None:
    """Times come in pairs, the end of a sentence and the beginning of the next, but for the first and the last; they
    only grow; and one comes when all of them together are likelier than any single word.  `score` [V] is changed."""
    first = words.first_time
    last = bool(said) and said[-1] >= first
    paired = last and (len(said) < 2 or said[-2] >= first)
    if paired:
        score[first:] = -torch.inf
    elif last:
        score[: words.end] = -torch.inf
    if times := [token for token in said if token >= first]:
        score[first : times[-1] + (0 if last and not paired else 1)] = -torch.inf
    if not said:
        score[:first] = -torch.inf
        if words.latest_first is not None:
            score[first + words.latest_first + 1 :] = -torch.inf
    likely = score.log_softmax(-1)
    if likely[first:].logsumexp(-1) > likely[:first].max():
        score[:first] = -torch.inf


def cut(ids: Sequence[int], frames: int, first: int, stride: int = 2) -> tuple[list[tuple[int, int, list[int]]], int]:
    """What a window of `frames` said: (begin, end, ids) of each sentence, in times, and after how many frames the next
    window begins: at the last pair of times, or at the end where one time alone closes the text or none pairs."""
    timed = [token >= first for token in ids]
    ends = [i + 1 for i in range(len(ids) - 1) if timed[i] and timed[i + 1]]
    if not ends:
        times = [token - first for token in ids if token > first]
        return [(0, times[-1] if times else frames // stride, list(ids))], frames
    closed = timed[-2:] == [False, True]
    if closed:
        ends.append(len(ids))
    pieces = [list(ids[a:b]) for a, b in pairwise([0, *ends])]
    said = [(piece[0] - first, piece[-1] - first, piece) for piece in pieces]
    return said, frames if closed else said[-1][1] * stride
