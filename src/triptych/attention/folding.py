"""Sparse attention as dense attention over small blocks: every query block meets only the keys it may see.

A sparse path gives each of `n` query blocks of `c` queries its own `w` candidate keys; blocks then stand as rows of a
batch and run on whichever dense kernel serves.  Cost is O(n · c · w) in time and memory, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention import flash, lowering, materialized
from triptych.attention.request import Request
from triptych.spec.masks import Dense, Points

SCORES = 1 << 24  # score elements of one piece when the pattern is materialized


@dataclass(frozen=True, eq=False)
class Blocks:
    """q `[B, H, n, c, K]`, k `[B, G, n, w, K]`, v `[B, G, n, w, Kv]`, q_pos `[n, c]`, k_pos `[n, w]`.

    exists    `[n, w]`: there is such a key.
    uniform   every block's keys stand at the same distances from its queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor
    k_pos: Tensor
    exists: Tensor
    uniform: bool = False


def refusals(request: Request) -> list[str]:
    """What no folding path serves."""
    reasons = []
    if not request.aligned:
        reasons.append("given positions: blocks are cut where keys stand at 0..S-1 and queries at the last T of them")
    if request.bias is not None:
        reasons.append("bias: it already costs T x S")
    if any(isinstance(leaf, Dense) for leaf in lowering.leaves(request.mask)):
        reasons.append("a mask given as an array: it already costs T x S")
    return reasons


def attend(request: Request, blocks: Blocks) -> Tensor:
    """`[B, H, T, Kv]`; queries past the last (block padding) are dropped."""
    b, h, n, c, _ = blocks.q.shape
    visible = _visible(request, blocks)
    inner = Request(
        q=_as_rows(blocks.q),
        k=_as_rows(blocks.k),
        v=_as_rows(blocks.v),
        scale=request.scale,
        mask=Dense(visible.expand(b, n, c, -1).reshape(b * n, 1, c, -1)),
        softcap=request.softcap,
        sinks=request.sinks,
        dropout=request.dropout,
    )
    if flash.cannot(inner):
        out = torch.cat([materialized.run(piece) for piece in _pieces(inner)])
    else:
        out = flash.run(inner)
    return out.view(b, n, h, c, -1).transpose(1, 2).reshape(b, h, n * c, -1)


def _as_rows(x: Tensor) -> Tensor:
    """`[B, H, n, c, K]` as `[B * n, H, c, K]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _visible(request: Request, blocks: Blocks) -> Tensor:
    """The whole mask on the candidate pairs, `[B or 1, n, c, w]`."""
    exists = blocks.exists[None, :, None, :]
    if blocks.uniform and lowering.reads_distances(request.mask):
        first: Tensor = request.mask.visible(Points(blocks.q_pos[:1, :, None]), Points(blocks.k_pos[:1, None, :]))
        return first & exists
    number = lowering.per_row(request.rows, request.q.device)
    q_doc = _documents(request.q_doc, blocks.q_pos - (request.keys - request.queries), -1)
    k_doc = _documents(request.k_doc, blocks.k_pos, -2)
    q = Points(blocks.q_pos[None, :, :, None], document=q_doc, per_row=number)
    k = Points(blocks.k_pos[None, :, None, :], document=k_doc, per_row=number)
    seen: Tensor = request.mask.visible(q, k) & exists
    return seen


def _documents(labels: Tensor | None, index: Tensor, dim: int) -> Tensor | None:
    """The labels `[T]` or `[B, T]` of the block members `[n, c]`, as `[., n, c]` with one more dimension at `dim`."""
    if labels is None:
        return None
    taken = labels[..., index.clamp(0, labels.shape[-1] - 1)]
    return (taken if taken.dim() == 3 else taken[None]).unsqueeze(dim)


def _pieces(inner: Request) -> Iterator[Request]:
    rows = max(1, SCORES // (inner.heads * inner.queries * inner.keys))
    assert isinstance(inner.mask, Dense)
    for start in range(0, inner.rows, rows):
        part = slice(start, start + rows)
        yield Request(
            q=inner.q[part],
            k=inner.k[part],
            v=inner.v[part],
            scale=inner.scale,
            mask=Dense(inner.mask.array[part]),
            softcap=inner.softcap,
            sinks=inner.sinks,
            dropout=inner.dropout,
        )


def pad_to(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros before and after along the sequence, the last dimension but one."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def cut(x: Tensor, blocks: int) -> Tensor:
    """`[B, H, n * c, K]` as `[B, H, n, c, K]`."""
    return x.reshape(*x.shape[:2], blocks, -1, x.shape[3])
