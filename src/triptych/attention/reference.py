"""Attention as it is defined.  Every other path must agree with this file.

The order is: scale, softcap, bias, mask, sinks, softmax in fp32 (fp64 for fp64 input), dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from triptych.attention.request import Request, prepare

Hook = Callable[[str, Tensor], Tensor]
"""Called with ("scores", [B, H, T, S]) - exactly what enters softmax, hidden entries -inf, no sink column - and with
("pattern", [B, H, T, S]), softmax's result before dropout.  What it returns is used instead."""


def attend_reference(
    q: Float[Tensor, "B H T K"] | Float[Tensor, "T K"] | Float[Tensor, " K"],
    k: Float[Tensor, "B G S K"] | Float[Tensor, "S K"],
    v: Float[Tensor, "B G S Kv"] | Float[Tensor, "S Kv"],
    *,
    hook: Hook | None = None,
    **options: Any,
) -> Float[Tensor, "B H T Kv"] | Float[Tensor, "T Kv"] | Float[Tensor, " Kv"]:
    """`softmax(q kᵀ · scale) v` (Vaswani et al. 2017, eq. 1), with the options of `attend`, step by step.

    A query with nothing to see gives exactly 0, and its gradients are 0.
    """
    request, restore = prepare(q, k, v, **options)
    return restore(run(request, hook))


def attention_scores(
    q: Float[Tensor, "B H T K"] | Float[Tensor, "T K"] | Float[Tensor, " K"],
    k: Float[Tensor, "B G S K"] | Float[Tensor, "S K"],
    **options: Any,
) -> Float[Tensor, "B H T S"] | Float[Tensor, "T S"] | Float[Tensor, " S"]:
    """What enters softmax, in fp32 or better; hidden entries are -inf."""
    request, restore = prepare(q, k, k, **options)
    return restore(scores_of(request))


def attention_pattern(
    q: Float[Tensor, "B H T K"] | Float[Tensor, "T K"] | Float[Tensor, " K"],
    k: Float[Tensor, "B G S K"] | Float[Tensor, "S K"],
    **options: Any,
) -> Float[Tensor, "B H T S"] | Float[Tensor, "T S"] | Float[Tensor, " S"]:
    """The attention weights, in fp32 or better.  Rows sum to 1, to less where a sink takes a share, or to 0 where
    there is nothing to see."""
    request, restore = prepare(q, k, k, **options)
    return restore(pattern_of(scores_of(request), request.sinks))


def run(request: Request, hook: Hook | None = None) -> Tensor:
    return finish(scores_of(request), request, hook)


def scores_of(request: Request) -> Tensor:
    """scale -> softcap -> bias -> mask."""
    q, k = request.q.to(request.precision), request.k.to(request.precision)
    return adjust(q @ _per_head(k, request).mT, request)


def adjust(scores: Tensor, request: Request) -> Tensor:
    """From raw scores `[B, H, T, S]` to what enters softmax."""
    scores = scores * request.scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    if request.bias is not None:
        scores = scores + request.bias
    if request.visible is not None:
        scores = scores.masked_fill(~request.visible, -torch.inf)
    return scores


def pattern_of(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension, a sink logit a head beside it; 0 where everything is -inf."""
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)  # softmax of -inf alone is NaN, and so would its gradient be
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.masked_fill(empty, 0.0)


def finish(scores: Tensor, request: Request, hook: Hook | None = None) -> Tensor:
    """softmax -> dropout -> weighted sum of the values, in the dtype of the query."""
    if hook is not None:
        scores = hook("scores", scores)
    pattern = pattern_of(scores, request.sinks)
    if hook is not None:
        pattern = hook("pattern", pattern)
    if request.dropout:
        pattern = F.dropout(pattern, request.dropout)
    v = _per_head(request.v.to(request.precision), request)
    return (pattern @ v).to(request.q.dtype)


def _per_head(x: Tensor, request: Request) -> Tensor:
    """`[B, G, S, K]` as `[B, H, S, K]`: head h reads group `h * G // H`."""
    return x.repeat_interleave(request.heads // request.groups, dim=1)
