"""Sparse attention (sliding windows, block patterns) as dense attention over small blocks of queries and their keys.

A sparse path gives each of `n` query blocks of `c` queries its own `w` candidate keys; blocks then stand as rows of a
batch and run on whichever dense kernel serves.  Cost is O(n · c · w) in time and memory, forward and backward.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.spec.masks import BlockSparse, Dense, Points
from . import kernel_dense, mask_lowering
from .request import AttentionRequest, Runner

SCORES = 1 << 24  # score elements of one piece when the pattern is materialized


Fold = Callable[[Tensor], Tensor]


def _refusals(request: AttentionRequest, bound: object, lacking: str) -> list[str]:
    """What no folding path serves, and what is `lacking` in a mask without its `bound`."""
    reasons = []
    if not request.aligned:
        reasons.append(
            "explicit positions: blocks are cut where keys stand at 0..S-1 and queries at the last T of them"
        )
    if request.biased:
        reasons.append("bias: it already costs T x S")
    if any(isinstance(leaf, Dense) for leaf in mask_lowering.leaves(request.mask)):
        reasons.append("a mask given as an array: it already costs T x S")
    if bound is None:
        reasons.append(f"no {lacking}")
    return reasons


def _plan(request: AttentionRequest, q_pos: Tensor, k_pos: Tensor, fold_keys: Fold, lead: int = 0) -> Runner:
    """A runner that folds q `[B, H, T, K]` to blocks of queries at q_pos `[n, c]`, and k and v `[B, G, S, K]` to
    `[B, G, n, w, K]`, their candidate keys at k_pos `[n, w]`, and attends block by block.  The first block begins with
    `lead` queries of padding, and the last may end with some: they are left out of what it gives, `[B, H, T, Kv]`."""
    n, c = q_pos.shape
    visible = _visible(request, q_pos, k_pos).expand(request.rows, n, c, -1).reshape(request.rows * n, 1, c, -1)
    inner = replace(
        request, rows=request.rows * n, queries=c, keys=k_pos.shape[1], mask=Dense(visible), q_doc=None, k_doc=None
    )
    if kernel_dense.flash_cannot(inner):
        runners = [(piece.rows, kernel_dense.plan_materialized(piece)) for piece in _pieces(inner)]
    else:
        runners = [(inner.rows, kernel_dense.plan_flash(inner))]

    def fold_queries(x: Tensor) -> Tensor:
        """`[B, H, n, c, K]`."""
        return _padded(x, lead, n * c - lead - request.queries).reshape(*x.shape[:2], n, c, x.shape[3])

    return partial(_run, request, runners, fold_queries, fold_keys, slice(lead, lead + request.queries))


def _run(
    request: AttentionRequest, pieces: list[tuple[int, Runner]], fold_queries: Fold, fold_keys: Fold, inside: slice,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    folded = (fold_queries(q), fold_keys(k), fold_keys(v))  # [B, H, n, c, K], then [B * n, H, c, K]
    parts = [x.transpose(1, 2).flatten(0, 1).split([rows for rows, _ in pieces]) for x in folded]
    outs = [run(*part, None, sinks) for (_, run), *part in zip(pieces, *parts, strict=True)]
    out = (outs[0] if len(outs) == 1 else torch.cat(outs)).view(request.rows, -1, *outs[0].shape[1:])
    return out.transpose(1, 2).flatten(2, 3)[:, :, inside]


def _visible(request: AttentionRequest, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The whole mask on the candidate pairs, `[B or 1, n, c, w]`."""
    exists = ((k_pos >= 0) & (k_pos < request.keys))[None, :, None, :]
    if mask_lowering.reads_distances(request.mask):  # a band: in every block at the same distances
        first: Tensor = request.mask.visible(Points(q_pos[:1, :, None]), Points(k_pos[:1, None, :]))
        return first & exists
    number = partial(mask_lowering.per_row, request.rows, request.device)
    q_doc = _documents(request.q_doc, q_pos - (request.keys - request.queries), -1)
    k_doc = _documents(request.k_doc, k_pos, -2)
    q = Points(q_pos[None, :, :, None], document=q_doc, per_row=number)
    k = Points(k_pos[None, :, None, :], document=k_doc, per_row=number)
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


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros before and after along the sequence, the last dimension but one."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def window_cannot(request: AttentionRequest) -> list[str]:
    return _refusals(
        request, mask_lowering.window_of(request.mask), "window in the mask that is narrower than its keys"
    )


def window_saves(request: AttentionRequest) -> bool:
    """The bands together are less than half of all pairs."""
    band = mask_lowering.window_of(request.mask)
    return band is not None and 2 * (sum(band) - 1 + _block(request.queries, *band)) <= request.keys


def plan_window(request: AttentionRequest) -> Runner:
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
        return _padded(x[:, :, inside], *pads).unfold(2, width, c).mT

    starts = torch.arange(n, device=request.device)[:, None] * c
    q_pos = first + starts + torch.arange(c, device=request.device)
    return _plan(request, q_pos, begin + starts + torch.arange(width, device=request.device), banded)


def _block(queries: int, back: int, ahead: int) -> int:
    """About half of the band: less wastes little of it, more fills matrix products; a power of two divides most T."""
    half = 1 << max((back + ahead) // 2, 32).bit_length() - 1
    return min(queries, half, 512)


def block_cannot(request: AttentionRequest) -> list[str]:
    return _refusals(request, mask_lowering.blocks_of(request.mask), "block pattern in the mask")


def block_saves(request: AttentionRequest) -> bool:
    """No query block reads more than half of the keys."""
    pattern = mask_lowering.blocks_of(request.mask)
    return pattern is not None and 2 * _candidates(request, pattern).shape[1] * pattern.block <= request.keys


def plan_block(request: AttentionRequest) -> Runner:
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
        padded = _padded(x, 0, total * size - request.keys)
        parts = padded.reshape(*x.shape[:2], total, size, x.shape[3])
        return parts.index_select(2, index).view(*x.shape[:2], n, m * size, x.shape[3])

    q_pos = first - lead + torch.arange(n * size, device=device).view(n, size)
    k_pos = candidates[:, :, None] * size + torch.arange(size, device=device)
    return _plan(request, q_pos, k_pos.view(n, m * size), gathered, lead)


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
