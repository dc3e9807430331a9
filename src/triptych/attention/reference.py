"""Attention as it is defined.  Every other kernel must agree with this file.

The order is: scale, softcap, bias, mask, sinks, softmax in fp32 (fp64 for fp64 input), dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.arguments import checked
from triptych.errors import ArgumentError, InputError, shown
from .request import (
    AttentionRequest,
    KeyArray,
    OutputArray,
    QueryArray,
    ScoreArray,
    ValueArray,
    prepare,
)

Hook = Callable[[str, Tensor], Tensor]
"""Called with ("scores", [B, H, T, S]) - exactly what enters softmax, hidden entries -inf, no sink column - and with
("pattern", [B, H, T, S]), softmax's result before dropout.  What it returns is used instead."""


@checked
def attend_reference(
    q: QueryArray, k: KeyArray, v: ValueArray, *, hook: Hook | None = None, **options: Any
) -> OutputArray:
    """`softmax(q kᵀ · scale) v` (Vaswani et al. 2017, eq. 1), with the options of `attend`, step by step.

    It is the definition to which every path of `attend` is compared: slow, with all scores [B, H, T, S] in memory.
    `hook(name, tensor)` may replace the scores and the weights.  A query that sees no key gives exactly 0, and its
    gradients are 0.
    """
    if "path" in options:
        raise ArgumentError("attend_reference has no path, as it is the definition; write attend(..., path=...)")
    request, tensors, restore = prepare(q, k, v, **options)
    return restore(run(request, *tensors, hook=hook))


def attention_scores(q: QueryArray, k: KeyArray, **options: Any) -> ScoreArray:
    """The scores that enter softmax, in fp32 or better; hidden entries are -inf."""
    request, (q4, k4, _, bias, _), restore = prepare(q, k, k, **options)
    return restore(scores_of(request, q4, k4, bias))


def attention_pattern(q: QueryArray, k: KeyArray, **options: Any) -> ScoreArray:
    """The attention weights, in fp32 or better.  Rows sum to 1, to less where a sink takes a share, or to 0 where
    there is nothing to see."""
    request, (q4, k4, _, bias, sinks), restore = prepare(q, k, k, **options)
    return restore(pattern_of(scores_of(request, q4, k4, bias), sinks))


def run(
    request: AttentionRequest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    hook: Hook | None = None,
) -> Tensor:
    """`[B, H, T, Kv]`, through explicit scores and pattern."""
    return finish(request, scores_of(request, q, k, bias), v, sinks, hook)


def scores_of(request: AttentionRequest, q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """scale -> softcap -> bias -> mask, `[B, H, T, S]`."""
    q, k = q.to(request.precision), k.to(request.precision)
    return adjust(request, q @ _per_head(k, request).mT, bias)


def adjust(request: AttentionRequest, scores: Tensor, bias: Tensor | None = None) -> Tensor:
    """From raw scores `[B, H, T, S]`, which are overwritten, to what enters softmax."""
    scores = scores.mul_(request.scale)
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    if bias is not None:
        scores = scores + bias
    if request.hidden is not None:
        scores = scores.masked_fill_(request.hidden, -torch.inf)
    return scores


def pattern_of(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension, a sink logit a head beside it; 0 where everything is -inf."""
    if not scores.shape[-1]:
        return scores
    empty = scores.amax(-1, keepdim=True) == -torch.inf
    if not empty.any():
        return softmax(scores, sinks)
    scores = scores.masked_fill(empty, 0.0)  # softmax of -inf alone is NaN, and so would its gradient be
    return softmax(scores, sinks).masked_fill(empty, 0.0)


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the keys; a sink logit a head takes its share and gives nothing."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def finish(
    request: AttentionRequest, scores: Tensor, v: Tensor, sinks: Tensor | None, hook: Hook | None = None
) -> Tensor:
    """softmax -> dropout -> weighted sum of the values, in the dtype of the query."""
    pattern = _hooked(hook, "pattern", pattern_of(_hooked(hook, "scores", scores), sinks))
    if request.dropout:
        pattern = ops.dropout(pattern, request.dropout, True, request.random)
    return (pattern @ _per_head(v.to(request.precision), request)).to(request.dtype)


def _hooked(hook: Hook | None, name: str, value: Tensor) -> Tensor:
    new = value if hook is None else hook(name, value)
    if not isinstance(new, Tensor) or new.shape != value.shape or not new.is_floating_point():
        problem = f"the hook returned {shown(new)} for the {name} {list(value.shape)}"
        raise InputError(f"{problem}; return a tensor of them, in floats")
    return new


def _per_head(x: Tensor, request: AttentionRequest) -> Tensor:
    """`[B, G, S, K]` as `[B, H, S, K]`: head h reads group `h * G // H`."""
    return x.repeat_interleave(request.heads // request.groups, dim=1)
