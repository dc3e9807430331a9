"""The next token of each row from its logits, by its rules and sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan

import torch
from torch import Tensor

from triptych.errors import InputError
from .constraints import masks_of
from .request import LiveRow, Output, TokenLogprobs
from .sampling import NOT_FINITE, TokenMasks, apply_rules, draw, penalize

POSITIONS = 64  # whose log-probabilities are in memory at once: one for each token of the vocabulary


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
    for i, largest in enumerate(_largest(logits)):
        if not isfinite(largest):
            choices[i].error = InputError(NOT_FINITE)
    scores = logits
    if any(row.request.rules for row in rows):
        ruled = [_ruled(row, x, choice) for row, x, choice in zip(rows, logits, choices, strict=True)]
        scores = torch.stack(ruled)
    masks = _masks(rows, scores, choices)
    scores = _penalized(rows, scores.float(), choices)
    good = [i for i, choice in enumerate(choices) if choice.error is None]
    if good:
        every, live = len(good) == len(rows), [rows[i] for i in good]
        chosen, allowed = (scores, masks) if every else (scores[good], masks and masks.of(good))
        settings, numbers = [row.request.sampling for row in live], [row.request.number for row in live]
        tokens = draw(chosen, settings, [len(row.ids) for row in live], numbers, allowed)
        for i, token in zip(good, tokens, strict=True):
            choices[i].token = token
            if token < 0:
                choices[i].error = InputError("the model's logits of all tokens that may come next are -inf")
    for row, x, choice in zip(rows, logits, choices, strict=True):
        if row.request.logprobs is not None and choice.error is None:
            (choice.logprobs,) = token_logprobs(x[None], [choice.token], row.request.logprobs)
    return choices


def _largest(logits: Tensor) -> list[float]:
    """The largest logit of each row [B, V], NaN where one is NaN; by numpy on a CPU, in a fraction of torch's time."""
    plain = logits.is_cpu and logits.dtype == torch.float32
    largest: list[float] = (logits.detach().numpy().max(-1) if plain else logits.amax(dim=-1)).tolist()
    return largest


def _ruled(row: LiveRow, logits: Tensor, choice: Choice) -> Tensor:
    """The logits [V] of one row after its rules.  A rule is the caller's own function: whatever it raises is the error
    of this row."""
    if choice.error is None:
        try:
            return apply_rules(row.request.rules, logits, row.ids)
        except Exception as error:
            choice.error = error
    return logits.float()


def _masks(rows: Sequence[LiveRow], scores: Tensor, choices: Sequence[Choice]) -> TokenMasks | None:
    """The tokens that the constraints of the rows allow, None where there are no constraints; where one leaves nothing
    of the scores [B, V], its error is in the choice."""
    states = [row.constraint if choice.error is None else None for row, choice in zip(rows, choices, strict=True)]
    if not any(states):
        return None
    masks = masks_of(states)
    for i, (row, state) in enumerate(zip(rows, states, strict=True)):
        if state is None:
            continue
        if row.request.rules and not masks.of([i]).apply(scores[i : i + 1].float()).isfinite().any():
            state.problem = state.problem or "the rules forbid all tokens that it allows"
        if state.problem is not None:
            choices[i].error = state.error
    return masks


def _penalized(rows: Sequence[LiveRow], scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The scores [B, V] after the repetition penalties of the rows; where one fails, its error is in the choice."""
    penalties = {i: row.request.sampling.repetition_penalty for i, row in enumerate(rows)}
    penalized = {i: penalty for i, penalty in penalties.items() if penalty != 1 and choices[i].error is None}
    if penalized:
        scores = scores.clone()
    for i, penalty in penalized.items():
        try:
            scores[i] = penalize(scores[i : i + 1], [rows[i].ids], penalty)[0]
        except InputError as error:
            choices[i].error = error
    return scores


def outputs_of(scores: Mapping[LiveRow, list[TokenLogprobs]]) -> list[Output]:
    """The outputs of a step that scored ids of prompts.  A row of which no more is wanted ends; one with scores that
    are no numbers ends with the reason `error`."""
    for row, own in scores.items():
        if any(isnan(one.logprob) for one in own):
            row.reason, row.error = "error", InputError(NOT_FINITE)
        elif row.only_scores and row.cached >= len(row.ids):
            row.reason = "length"
    return [Output(row, None, scores=own) for row, own in scores.items() if row.reason != "error"]


def token_logprobs(logits: Tensor, ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The log-probabilities of `ids` [T], and of the `count` likeliest ones beside each, by logits [T, V]."""
    every: list[TokenLogprobs] = []
    for at in range(0, len(ids), POSITIONS):
        chosen = torch.tensor(ids[at : at + POSITIONS], device=logits.device)
        logprobs = logits[at : at + len(chosen)].float().log_softmax(-1)
        best = _likeliest(logprobs, min(count, logprobs.shape[-1]))
        values, likeliest = logprobs.gather(-1, chosen[:, None])[:, 0].tolist(), logprobs.gather(-1, best).tolist()
        for value, top, likely in zip(values, best.tolist(), likeliest, strict=True):
            every.append(TokenLogprobs(value, list(zip(top, likely, strict=True))))
    return every


def _likeliest(logprobs: Tensor, count: int) -> Tensor:
    """The `count` likeliest tokens of each row [T, V], best first, [T, count]; one by numpy on a CPU, in a fraction of
    torch's time."""
    if count == 1 and logprobs.is_cpu:
        return torch.from_numpy(logprobs.detach().numpy().argmax(-1))[:, None]
    return logprobs.topk(count).indices
