"""The next token of each row from its logits, by its rules and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import InputError
from .request import LiveRow, TokenLogprobs
from .sampling import NOT_FINITE, Sampling, apply_rules, sample


@dataclass(eq=False)
class Choice:
    """The choice for one row: a token, with log-probabilities where its request wants them, or the error that
    its logits, its rules or its sampling raised."""

    token: int = -1
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


def choose(rows: Sequence[LiveRow], logits: Tensor) -> list[Choice]:
    """A choice for each row from its logits [B, V].  An error of one row leaves the others as they are."""
    choices = [Choice() for _ in rows]
    for i, finite in enumerate(torch.isfinite(logits.amax(dim=-1)).tolist()):
        if not finite:
            choices[i].error = InputError(NOT_FINITE)
    scores = logits
    if any(row.request.rules for row in rows):
        ruled = [_ruled(row, x, choice) for row, x, choice in zip(rows, logits, choices, strict=True)]
        scores = torch.stack(ruled)
    alike: dict[Sampling, list[int]] = {}
    for i, row in enumerate(rows):
        if choices[i].error is None:
            alike.setdefault(row.request.sampling, []).append(i)
    for sampling, members in alike.items():
        _sample(sampling, members, rows, scores, choices)
    for row, x, choice in zip(rows, logits, choices, strict=True):
        if row.request.logprobs is not None and choice.error is None:
            choice.logprobs = _logprobs(x, choice.token, row.request.logprobs)
    return choices


def _ruled(row: LiveRow, logits: Tensor, choice: Choice) -> Tensor:
    """The logits [V] of one row after its rules.  A rule is the caller's own function: whatever it raises is the error
    of this row."""
    if choice.error is None:
        try:
            return apply_rules(row.request.rules, logits, row.ids)
        except Exception as error:
            choice.error = error
    return logits.float()


def _sample(
    sampling: Sampling, members: Sequence[int], rows: Sequence[LiveRow], scores: Tensor, choices: Sequence[Choice]
) -> None:
    """Draw the tokens of rows that are sampled alike; together, and one by one where a row among them fails."""
    chosen = scores if len(members) == len(rows) else scores[list(members)]
    numbers, ids = [rows[i].request.number for i in members], [rows[i].ids for i in members]
    try:
        for i, token in zip(members, sample(chosen, sampling, numbers, ids), strict=True):
            choices[i].token = token
    except InputError as error:
        if len(members) == 1:
            choices[members[0]].error = error
            return
        for i in members:
            _sample(sampling, [i], rows, scores, choices)


def _logprobs(logits: Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprobs(float(logprobs[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
