"""Block-sparse attention in O(T · visible blocks): each block of queries gathers the key blocks it may see."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.attention import folding, mask_lowering
from triptych.attention.request import AttentionRequest, Runner
from triptych.spec.masks import BlockSparse


def cannot(request: AttentionRequest) -> list[str]:
    reasons = folding.refusals(request)
    if mask_lowering.blocks_of(request.mask) is None:
        reasons.append("no block pattern in the mask")
    return reasons


def saves(request: AttentionRequest) -> bool:
    """No query block reads more than half of the keys."""
    pattern = mask_lowering.blocks_of(request.mask)
    if pattern is None:
        return False
    return 2 * _candidates(request, pattern).shape[1] * pattern.block <= request.keys


def plan(request: AttentionRequest) -> Runner:
    pattern = mask_lowering.blocks_of(request.mask)
    assert pattern is not None
    size, device = pattern.block, request.device
    first = request.keys - request.queries
    lead = first % size  # the first block may hold keys before the first query
    candidates = _candidates(request, pattern).to(device)  # [n, m] key blocks, -1 for none
    n, m = candidates.shape
    total = -(-request.keys // size)
    index = candidates.clamp(min=0).flatten()

    def gathered(x: Tensor) -> Tensor:
        """`[B, G, n, m * size, K]`."""
        padded = folding.pad_to(x, 0, total * size - request.keys)
        parts = padded.reshape(*x.shape[:2], total, size, x.shape[3])
        return parts.index_select(2, index).view(*x.shape[:2], n, m * size, x.shape[3])

    def cut(x: Tensor) -> Tensor:
        return folding.cut(folding.pad_to(x, lead, n * size - lead - request.queries), n)

    k_pos = candidates[:, :, None] * size + torch.arange(size, device=device)
    blocks = folding.Blocks(
        q_pos=first - lead + torch.arange(n * size, device=device).view(n, size),
        k_pos=k_pos.view(n, m * size),
        exists=((candidates[:, :, None] >= 0) & (k_pos < request.keys)).view(n, m * size),
    )
    return folding.plan(request, blocks, cut, gathered, lead)


def _candidates(request: AttentionRequest, pattern: BlockSparse) -> Tensor:
    """Key blocks that each query block may see, `[n, m]` on the host, -1 where a block sees fewer than m.  Named by
    their distances, so that no `[n, n]` booleans are made."""
    size = pattern.block
    first = request.keys - request.queries
    total = -(-request.keys // size)
    q = torch.arange(first // size, total)[:, None]
    near = torch.tensor(pattern.distances(total))
    k = torch.cat((q - near, torch.tensor(pattern.visible_to_all(total), dtype=torch.long).expand(len(q), -1)), 1)
    visible = (k >= 0) & (k < total)
    if mask_lowering.implies_causal(request.mask):
        visible &= k <= q
    visible[:, len(near) :] &= ~torch.isin(q - k[:, len(near) :], near)  # named once
    m = max(1, int(visible.sum(1).max()))
    order = visible.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :m]
    return k.gather(1, order).masked_fill(~visible.gather(1, order), -1)
