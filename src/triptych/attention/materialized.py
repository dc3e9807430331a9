"""Attention through an explicit `[T, S]` pattern: for short rows two matrix products beat a fused kernel on a CPU,
and whatever a fused kernel cannot express still runs here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention import lowering
from triptych.attention.request import Request


def cannot(request: Request) -> list[str]:
    """Nothing: it serves every request, at the price of `[B, H, T, S]`."""
    return []


def run(request: Request) -> Tensor:
    """The key and value groups are never repeated: the heads of a group stand side by side as queries."""
    b, h, t, s = request.rows, request.heads, request.queries, request.keys
    together = (b, request.groups, h // request.groups * t)
    q = (request.q * request.scale).reshape(*together, -1)
    scores = (q @ request.k.mT).view(b, h, t, s).to(request.precision)
    if request.softcap is not None:
        scores = torch.tanh(scores / request.softcap) * request.softcap
    if request.bias is not None:
        scores = scores + request.bias
    if request.visible is not None:
        # Where the pattern is 0 so is its gradient: backward need not know of the mask.
        scores.detach().masked_fill_(~request.visible, -torch.inf)
    empty = _empty(request, scores)
    if empty is not None:
        scores = scores.masked_fill(empty, 0.0)
    pattern = _softmax(scores, request.sinks)
    if empty is not None:
        pattern = pattern.masked_fill(empty, 0.0)
    if request.dropout:
        pattern = F.dropout(pattern, request.dropout)
    out = pattern.to(request.v.dtype).view(*together, s) @ request.v
    return out.view(b, h, t, -1)


def _empty(request: Request, scores: Tensor) -> Tensor | None:
    """Queries that see nothing, `[., ., T, 1]`; None where there can be none."""
    if request.bias is not None:
        return scores.amax(-1, keepdim=True) == -torch.inf
    sees_itself = request.aligned and request.queries <= request.keys and lowering.reads_distances(request.mask)
    if request.visible is None or sees_itself:
        return None
    return ~request.visible.any(-1, keepdim=True)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
