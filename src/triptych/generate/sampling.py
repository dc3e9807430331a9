"""Draws the next token from logits: first the rules of the request (`apply_rules`), then its sampling (`sample`).

In this order: rules, repetition penalty, temperature, top-k, top-p, min-p, then one draw.  The noise of a draw is a
function of (seed, request, absolute position) alone, so batching, chunking and finished neighbours never change a
sample.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.arguments import checked_methods, integer, listed, number, takes
from triptych.errors import InputError, shown


@checked_methods
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose.  `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0`, `repetition_penalty=1` are off.

    top-p: the smallest set of tokens with that much probability (Holtzman et al. 2020).  min-p: tokens with at least
    that share of the likeliest one's probability (Nguyen et al. 2024).  Repetition penalty: logits of tokens already
    in the row divided by it when positive, multiplied when negative (Keskar et al. 2019).

    Raises InputError for a setting of another type or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        tiny, huge = sys.float_info.min, sys.float_info.max
        self.__dict__.update(
            temperature=number("temperature", self.temperature, 0, huge, ">= 0"),
            top_k=integer("top_k", self.top_k, 0),
            top_p=number("top_p", self.top_p, tiny, 1, "in (0, 1]"),
            min_p=number("min_p", self.min_p, 0, 1, "in [0, 1]"),
            repetition_penalty=number("repetition_penalty", self.repetition_penalty, tiny, huge, "> 0"),
            seed=integer("seed", self.seed),
        )


NOT_FINITE = "the model gave logits that are not finite; its weights or its dtype are broken"


def check_finite(logits: Tensor) -> None:
    """Raise InputError where a row of `[B, V]` holds NaN or inf, or nothing but -inf."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise InputError(NOT_FINITE)


def sample(logits: Tensor, sampling: Sampling, requests: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """The next token of each row: `logits` [B, V], `rows` the ids so far, `requests` the number of each row's request.

    Raises InputError for logits that are not finite, or no tensor, and for another `sampling`.
    """
    if not isinstance(logits, Tensor) or not isinstance(sampling, Sampling):
        raise InputError("sample() needs logits in a tensor [B, V] and a generate.Sampling(temperature=1.0)")
    check_finite(logits)
    scores = logits.float()
    if sampling.repetition_penalty != 1:
        scores = penalize(scores, rows, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return scores.argmax(dim=-1).tolist()
    temperature = max(sampling.temperature, torch.finfo(scores.dtype).tiny)  # below it 0 / temperature is NaN
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperature  # at most 0, so that nothing overflows
    probs = torch.softmax(filter_top(scores, sampling), dim=-1)
    noise = [
        exponential(sampling.seed, request, len(row), probs.shape[-1])
        for request, row in zip(requests, rows, strict=True)
    ]
    return (probs / torch.stack(noise).to(probs.device)).argmax(dim=-1).tolist()


def penalize(scores: Tensor, rows: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """[B, V] with the logits of each row's own tokens lowered.  Raises InputError where they overflow."""
    scores = scores.clone()
    for b, row in enumerate(rows):
        present = torch.tensor(sorted(set(row)), device=scores.device)
        value = scores[b, present]
        scores[b, present] = torch.where(value > 0, value / penalty, value * penalty)
    if not torch.isfinite(scores.amax(dim=-1)).all():
        raise InputError(f"repetition_penalty={penalty} makes the scores overflow; choose a value nearer to 1")
    return scores


def filter_top(scores: Tensor, sampling: Sampling) -> Tensor:
    """[B, V] with every token outside top-k, top-p and min-p at -inf; the likeliest always stays."""
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=True)
        probs = torch.softmax(ordered, dim=-1)
        before = probs.cumsum(dim=-1) - probs  # mass of the tokens likelier than this one
        scores = scores.masked_fill((before >= sampling.top_p).scatter(-1, index, before >= sampling.top_p), -torch.inf)
    if sampling.min_p > 0:
        floor = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores


def exponential(seed: int, request: int, position: int, size: int) -> Tensor:
    """[size] exponential noise; dividing probabilities by it and taking the largest draws from them."""
    digest = hashlib.blake2b(f"{seed}/{request}/{position}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(size, dtype=torch.float32, device="cpu").exponential_(generator=generator)


Rule = Callable[[Tensor, Sequence[int]], Tensor]
"""`rule(logits [V] in fp32, ids so far)` gives the logits `[V]` to choose from; a token at -inf is never chosen.
The rule may change that tensor in place."""


def forbid(ids: Sequence[int]) -> Rule:
    """A rule under which none of `ids` is ever chosen.

    Raises InputError for what is no token id; the rule raises it for an id outside the vocabulary, which it learns from
    the logits.
    """
    numbers = [integer("an id to forbid", token, 0) for token in listed(ids, "forbid(ids)")]
    forbidden, highest = torch.tensor(numbers, dtype=torch.long), max(numbers, default=-1)

    def rule(logits: Tensor, row: Sequence[int]) -> Tensor:
        if highest >= len(logits):
            raise InputError(f"forbid: token id {highest} is outside the vocabulary of {len(logits)}")
        return logits.index_fill(0, forbidden.to(logits.device), -torch.inf)

    return rule


def check_rules(rules: object) -> None:
    """Raise InputError for anything but a list of rules."""
    if isinstance(rules, str | bytes) or not isinstance(rules, Sequence):
        raise InputError(f"rules must be a list of functions, not {shown(rules)}")
    for rule in rules:
        if not takes(rule, "logits", "ids"):
            raise InputError(f"a rule must be a function of (logits, ids so far), not {shown(rule)}")


def apply_rules(rules: Sequence[Rule], logits: Tensor, row: Sequence[int]) -> Tensor:
    """The logits `[V]` of one row after each rule in turn.

    Raises InputError for a rule that returns anything but finite logits (or -inf) of the same shape, and where the
    rules leave no token to choose.
    """
    scores = logits.float().clone()
    for rule in rules:
        scores = rule(scores, row)
        usable = isinstance(scores, Tensor) and scores.is_floating_point() and scores.device == logits.device
        if not usable or scores.shape != logits.shape:
            got = list(scores.shape) if isinstance(scores, Tensor) else shown(scores)
            raise InputError(f"a rule returned {got}, not logits {list(logits.shape)} on {logits.device}")
    if not torch.isfinite(scores.max()):
        raise InputError("the rules leave no token to choose, or return logits that are not finite")
    return scores
