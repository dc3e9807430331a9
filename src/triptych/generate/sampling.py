"""Draws the next token from logits: first the rules of the request (`apply_rules`), then its sampling (`sample`).

In this order: rules, repetition penalty, temperature, top-k, top-p, min-p, then one draw.  Its random number is a
function of (seed, request, absolute position) alone, so batching, chunking and finished neighbours never change a
sample: of the tokens in the order of the vocabulary, that one is drawn in whose share of the probability it falls.
On the CPU all rows are drawn by one call of the native kernels (sample.h), elsewhere by torch.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.arguments import checked_methods, integer, listed, number, takes
from triptych.errors import InputError, shown
from triptych.native import DRAW, library, usable_threads

TINY = torch.finfo(torch.float32).tiny  # the smallest temperature: below it 0 / temperature is NaN


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
    return draw(scores, [sampling] * len(rows), [*map(len, rows)], requests)


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """The tokens that rows may choose: `words` [M, W] of 32 bits, the lowest first, and the number in `which` [B] of
    each row's mask; -1 for a row that may choose all."""

    words: NDArray[np.uint32]
    which: NDArray[np.int32]

    def of(self, rows: Sequence[int]) -> TokenMasks:
        """Those of some rows."""
        return TokenMasks(self.words, self.which[list(rows)])

    @property
    def arrays(self) -> tuple[int, int, int]:
        """As the kernels take them."""
        return self.words.ctypes.data, self.words.shape[1], self.which.ctypes.data

    def apply(self, scores: Tensor) -> Tensor:
        """The scores [B, V] in fp32, in a tensor of their own, with those at -inf that are not allowed."""
        kernels, scores = library(), scores.contiguous()
        if kernels is not None and scores.is_cpu:
            out = torch.empty_like(scores)
            kernels.functions.mask_scores(scores.data_ptr(), out.data_ptr(), *scores.shape, *self.arrays)
            return out
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little")[:, : scores.shape[1]]
        out, places = scores.clone(), [i for i, number in enumerate(self.which) if number >= 0]
        barred = torch.from_numpy(bits[self.which[places]] == 0).to(scores.device)
        out[places] = out[places].masked_fill(barred, -torch.inf)
        return out


def draw(
    scores: Tensor, samplings: Sequence[Sampling], lengths: Sequence[int], requests: Sequence[int],
    masks: TokenMasks | None = None,
) -> list[int]:  # fmt: skip
    """The next token of each row from its scores [B, V] in fp32, which are finite (or -inf) and penalized where that is
    wanted, of those that `masks` allow.  The position of a new token is one of `lengths`, `requests` are the numbers of
    the rows' requests."""
    kernels = library() if scores.is_cpu else None
    if kernels is None and masks is not None:
        scores, masks = masks.apply(scores), None
    if masks is None and all(sampling.temperature == 0 for sampling in samplings):
        # numpy's search takes a tenth of torch's time
        best: list[int] = (scores.detach().numpy() if scores.is_cpu else scores).argmax(-1).tolist()
        return best
    numbers = [  # 0 draws the first token that stays
        0.0 if sampling.temperature == 0 else uniform(sampling.seed, request, length)
        for sampling, request, length in zip(samplings, requests, lengths, strict=True)
    ]
    if kernels is None:
        return _by_torch(scores, samplings, numbers)
    (count, vocab), threads = scores.shape, usable_threads(torch.get_num_threads())
    hows = np.array([
        (
            number, how.top_p, max(how.temperature, TINY), math.log(how.min_p) if how.min_p else -math.inf,
            min(how.top_k, vocab), 0,
        )
        for how, number in zip(samplings, numbers, strict=True)
    ], dtype=DRAW)  # fmt: skip
    hows["top_k"][[how.temperature == 0 for how in samplings]] = 1
    scores, tokens = scores.contiguous(), np.empty(len(samplings), np.int32)
    scratch = np.empty((threads, 5, vocab), np.float32)
    arrays = (hows.ctypes.data, tokens.ctypes.data, scratch.ctypes.data)
    allowed = (None, 0, None) if masks is None else masks.arrays
    kernels.functions.draw_tokens(scores.data_ptr(), count, vocab, *arrays, threads, *allowed)
    return tokens.tolist()


def _by_torch(scores: Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """The same by torch's operations, for the rows of each setting at once."""
    alike: dict[Sampling, list[int]] = {}
    for i, sampling in enumerate(samplings):
        alike.setdefault(replace(sampling, seed=0), []).append(i)
    tokens = [0] * len(samplings)
    for sampling, members in alike.items():
        chosen = scores if len(members) == len(tokens) else scores[members]
        if sampling.temperature == 0:
            best = chosen.argmax(dim=-1)
        else:
            # At most 0, so that nothing overflows.
            scaled = (chosen - chosen.amax(dim=-1, keepdim=True)) / max(sampling.temperature, TINY)
            filtered = filter_top(scaled, sampling)
            filtered = filtered.cpu() if filtered.device.type == "mps" else filtered  # which has no fp64
            probs = filtered.double().softmax(dim=-1)
            sums = probs.cumsum(dim=-1)
            targets = sums.new_tensor([[numbers[i]] for i in members]) * sums[:, -1:]
            best = torch.searchsorted(sums, targets, right=True)[:, 0]
        for i, token in zip(members, best.tolist(), strict=True):
            tokens[i] = token
    return tokens


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
    """[B, V] with every token outside top-k, top-p and min-p at -inf; the likeliest always stays, and so does every
    token that is as likely as one that stays."""
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if sampling.top_p < 1:
        ordered = scores.sort(dim=-1, descending=True).values
        probs = torch.softmax(ordered.double() if ordered.is_cpu else ordered, dim=-1)
        before = probs.cumsum(dim=-1) - probs  # mass of the tokens likelier than this one
        count = (before < sampling.top_p).sum(dim=-1, keepdim=True).clamp_min(1)
        scores = scores.masked_fill(scores < ordered.gather(-1, count - 1), -torch.inf)
    if sampling.min_p > 0:
        floor = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    return scores


def uniform(seed: int, request: int, position: int) -> float:
    """The random number in [0, 1), a multiple of 2^-52, of one draw."""
    digest = hashlib.blake2b(f"{seed}/{request}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52


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
