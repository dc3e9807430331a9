"""Rules that a caller gives: functions that change the logits of one row before its next token is chosen.

Temperature, top-k, top-p, min-p and the repetition penalty are in sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.errors import InputError

Rule = Callable[[Tensor, Sequence[int]], Tensor]
"""`rule(logits [V] in fp32, ids so far)` gives the logits `[V]` to choose from; a token at -inf is never chosen.
The rule may change that tensor in place."""


def forbid(ids: Sequence[int]) -> Rule:
    """A rule under which none of `ids` is ever chosen.

    Raises InputError for what is no token id; the rule raises it for an id outside the vocabulary, which it learns from
    the logits.
    """
    numbers = [integer("an id to forbid", token, 0) for token in ids]
    forbidden, highest = torch.tensor(numbers, dtype=torch.long), max(numbers, default=-1)

    def rule(logits: Tensor, row: Sequence[int]) -> Tensor:
        if highest >= len(logits):
            raise InputError(f"forbid: token id {highest} is outside the vocabulary of {len(logits)}")
        return logits.index_fill(0, forbidden.to(logits.device), -torch.inf)

    return rule


def apply_rules(rules: Sequence[Rule], logits: Tensor, row: Sequence[int]) -> Tensor:
    """The logits `[V]` of one row after each rule in turn.

    Raises InputError for a rule that returns anything but finite logits (or -inf) of the same shape, and where the
    rules leave no token to choose.
    """
    scores = logits.float().clone()
    for rule in rules:
        scores = rule(scores, row)
        if not isinstance(scores, Tensor) or scores.shape != logits.shape:
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InputError(f"a rule returned {got}, not logits {list(logits.shape)}")
    if not bool(torch.isfinite(scores.max())):
        raise InputError("the rules leave no token to choose, or return logits that are not finite")
    return scores
