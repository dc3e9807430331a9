"""Rules of what may follow what in Whisper's transcripts, and where its windows end (the rules are its code's)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from triptych.generate import Rule
from triptych.text import WhisperTokens


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
