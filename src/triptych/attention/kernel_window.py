"""Sliding-window attention in O(T · window): each block of queries meets the band of keys around it."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.attention import folding, mask_lowering
from triptych.attention.request import AttentionRequest, Runner


def cannot(request: AttentionRequest) -> list[str]:
    reasons = folding.refusals(request)
    if mask_lowering.window_of(request.mask) is None:
        reasons.append("no window in the mask that is narrower than its keys")
    return reasons


def saves(request: AttentionRequest) -> bool:
    """The bands together are less than half of all pairs."""
    band = mask_lowering.window_of(request.mask)
    if band is None:
        return False
    block = _block(request.queries, *band)
    return 2 * (sum(band) - 1 + block) <= request.keys


def plan(request: AttentionRequest) -> Runner:
    """Queries in blocks of `c`; block i reads the `back - 1 + c + ahead` keys that any of its queries may see."""
    band = mask_lowering.window_of(request.mask)
    assert band is not None
    back, ahead = band
    c = _block(request.queries, back, ahead)
    n = -(-request.queries // c)
    width = back - 1 + c + ahead
    first = request.keys - request.queries  # position of the first query
    begin, end = first - back + 1, first + n * c + ahead  # keys any block reads, [begin, end)
    inside = slice(max(begin, 0), min(end, request.keys))
    pads = (max(-begin, 0), max(end - request.keys, 0))

    def banded(x: Tensor) -> Tensor:
        """`[B, G, n, width, K]`, blocks overlapping in memory."""
        return folding.pad_to(x[:, :, inside], *pads).unfold(2, width, c).mT

    def cut(x: Tensor) -> Tensor:
        return folding.cut(folding.pad_to(x, 0, n * c - request.queries), n)

    starts = torch.arange(n, device=request.device)[:, None] * c
    k_pos = begin + starts + torch.arange(width, device=request.device)
    blocks = folding.Blocks(
        q_pos=first + starts + torch.arange(c, device=request.device),
        k_pos=k_pos,
        exists=(k_pos >= 0) & (k_pos < request.keys),
        uniform=True,
    )
    return folding.plan(request, blocks, cut, banded)


def _block(queries: int, back: int, ahead: int) -> int:
    """About half of the band: less wastes little of it, more fills matrix products; a power of two divides most T."""
    half = 1 << max((back + ahead) // 2, 32).bit_length() - 1
    return min(queries, half, 512)
