"""Sparse attention as dense attention over small blocks: every query block meets only the keys it may see.

A sparse path gives each of `n` query blocks of `c` queries its own `w` candidate keys; blocks then stand as rows of a
batch and run on whichever dense kernel serves.  Cost is O(n · c · w) in time and memory, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention import kernel_flash, kernel_materialized, mask_lowering
from triptych.attention.request import AttentionRequest, Runner
from triptych.spec.masks import Dense, Points

SCORES = 1 << 24  # score elements of one piece when the pattern is materialized


@dataclass(frozen=True, eq=False)
class Blocks:
    """Where the queries and candidate keys of each block stand: q_pos `[n, c]`, k_pos `[n, w]`.

    exists    `[n, w]`: there is such a key.
    uniform   every block's keys stand at the same distances from its queries.
    """

    q_pos: Tensor
    k_pos: Tensor
    exists: Tensor
    uniform: bool = False


Fold = Callable[[Tensor], Tensor]


def refusals(request: AttentionRequest) -> list[str]:
    """What no folding path serves."""
    reasons = []
    if not request.aligned:
        reasons.append(
            "explicit positions: blocks are cut where keys stand at 0..S-1 and queries at the last T of them"
        )
    if request.biased:
        reasons.append("bias: it already costs T x S")
    if any(isinstance(leaf, Dense) for leaf in mask_lowering.leaves(request.mask)):
        reasons.append("a mask given as an array: it already costs T x S")
    return reasons


def plan(request: AttentionRequest, blocks: Blocks, fold_queries: Fold, fold_keys: Fold, lead: int = 0) -> Runner:
    """A runner that folds q `[B, H, T, K]` to `[B, H, n, c, K]` and k, v `[B, G, S, K]` to `[B, G, n, w, K]`, and
    attends block by block.  The first block begins with `lead` queries of padding, and the last may end with some: they
    are left out of what it gives, `[B, H, T, Kv]`."""
    n, c = blocks.q_pos.shape
    visible = _visible(request, blocks).expand(request.rows, n, c, -1).reshape(request.rows * n, 1, c, -1)
    inner = replace(
        request, rows=request.rows * n, queries=c, keys=blocks.k_pos.shape[1], mask=Dense(visible), q_doc=None,
        k_doc=None,
    )  # fmt: skip
    pieces = [inner] if not kernel_flash.cannot(inner) else list(_pieces(inner))
    kernel = kernel_flash if not kernel_flash.cannot(inner) else kernel_materialized
    inside = slice(lead, lead + request.queries)
    runners = [(piece.rows, kernel.plan(piece)) for piece in pieces]
    return partial(_run, request, runners, fold_queries, fold_keys, inside)


def _run(
    request: AttentionRequest, pieces: list[tuple[int, Runner]], fold_queries: Fold, fold_keys: Fold, inside: slice,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    folded = [_as_rows(fold_queries(q)), _as_rows(fold_keys(k)), _as_rows(fold_keys(v))]
    q_parts, k_parts, v_parts = (x.split([rows for rows, _ in pieces]) for x in folded)
    outs = [run(q_parts[i], k_parts[i], v_parts[i], None, sinks) for i, (_, run) in enumerate(pieces)]
    out = (outs[0] if len(outs) == 1 else torch.cat(outs)).view(request.rows, -1, *outs[0].shape[1:])
    return out.transpose(1, 2).flatten(2, 3)[:, :, inside]


def _as_rows(x: Tensor) -> Tensor:
    """`[B, H, n, c, K]` as `[B * n, H, c, K]`."""
    return x.transpose(1, 2).flatten(0, 1)


def _visible(request: AttentionRequest, blocks: Blocks) -> Tensor:
    """The whole mask on the candidate pairs, `[B or 1, n, c, w]`."""
    exists = blocks.exists[None, :, None, :]
    if blocks.uniform and mask_lowering.reads_distances(request.mask):
        first: Tensor = request.mask.visible(Points(blocks.q_pos[:1, :, None]), Points(blocks.k_pos[:1, None, :]))
        return first & exists
    number = mask_lowering.per_row(request.rows, request.device)
    q_doc = _documents(request.q_doc, blocks.q_pos - (request.keys - request.queries), -1)
    k_doc = _documents(request.k_doc, blocks.k_pos, -2)
    q = Points(blocks.q_pos[None, :, :, None], document=q_doc, per_row=number)
    k = Points(blocks.k_pos[None, :, None, :], document=k_doc, per_row=number)
    visible: Tensor = request.mask.visible(q, k) & exists
    return visible


def _documents(labels: Tensor | None, index: Tensor, dim: int) -> Tensor | None:
    """The labels `[T]` or `[B, T]` of the block members `[n, c]`, as `[., n, c]` with one more dimension at `dim`."""
    if labels is None:
        return None
    taken = labels[..., index.clamp(0, labels.shape[-1] - 1)]
    return (taken if taken.dim() == 3 else taken[None]).unsqueeze(dim)


def _pieces(inner: AttentionRequest) -> Iterator[AttentionRequest]:
    rows = max(1, SCORES // (inner.heads * inner.queries * inner.keys))
    assert isinstance(inner.mask, Dense)
    for start in range(0, inner.rows, rows):
        part = inner.mask.array[start : start + rows]
        yield replace(inner, rows=len(part), mask=Dense(part))


def pad_to(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros before and after along the sequence, the last dimension but one."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def cut(x: Tensor, blocks: int) -> Tensor:
    """`[B, H, n * c, K]` as `[B, H, n, c, K]`."""
    return x.reshape(*x.shape[:2], blocks, -1, x.shape[3])
