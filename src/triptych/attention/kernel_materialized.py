"""Attention through an explicit `[T, S]` pattern: for short rows two matrix products beat a fused kernel on a CPU,
and whatever a fused kernel cannot express still runs here."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import mask_lowering
from triptych.attention.reference import softmax
from triptych.attention.request import AttentionRequest, Runner


def cannot(request: AttentionRequest) -> list[str]:
    """Nothing: it serves every request, at the price of `[B, H, T, S]`."""
    return []


def plan(request: AttentionRequest) -> Runner:
    return partial(_run, request, request.hidden, _empty(request))


def _run(
    request: AttentionRequest,
    hidden: Tensor | None,
    empty: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """GQA: fold the heads of a group into the query axis, so that keys and values are never repeated."""
    b, h, t, s = request.rows, request.heads, request.queries, request.keys
    together = (b, request.groups, h // request.groups * t)
    q = (q * request.scale).reshape(*together, -1)
    scores = (q @ k.mT).view(b, h, t, s).to(request.precision)
    if request.softcap is not None:
        scores = torch.tanh(scores / request.softcap) * request.softcap
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        # Where the pattern is 0 so is its gradient: backward need not know of the mask.
        scores.detach().masked_fill_(hidden, -torch.inf)
    if bias is not None:
        empty = scores.amax(-1, keepdim=True) == -torch.inf
    if empty is not None:
        scores = scores.masked_fill(empty, 0.0)
    pattern = softmax(scores, sinks) if sinks is not None else scores.softmax(-1)
    if empty is not None:
        pattern = pattern.masked_fill(empty, 0.0)
    if request.dropout:
        pattern = ops.dropout(pattern, request.dropout, True, request.random)
    out = pattern.to(v.dtype).view(*together, s) @ v
    return out.view(b, h, t, -1)


def _empty(request: AttentionRequest) -> Tensor | None:
    """Queries that see nothing by the mask alone, `[., ., T, 1]`; None where there can be none.  A bias may hold -inf
    too, which is looked for in its scores."""
    sees_itself = request.aligned and request.queries <= request.keys and mask_lowering.reads_distances(request.mask)
    if request.biased or request.visible is None or sees_itself:
        return None
    return ~request.visible.any(-1, keepdim=True)
