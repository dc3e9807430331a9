"""Sums and slices between processes that share a layer, with their gradients (Shoeybi et al. 2019, figure 3).

`entering` and `summed` are conjugate: what one does in the forward pass, the other does in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.place = dist.get_rank(group) * x.shape[-1], x.shape[-1]
        every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, x.contiguous(), group=group)
        return torch.cat(every, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].narrow(-1, *ctx.place).contiguous(), None


OfGroup = Callable[[Tensor, dist.ProcessGroup], Tensor]
_entering: OfGroup = _Entering.apply  # torch's `apply` has no annotation
_summed: OfGroup = _Summed.apply
_joined: OfGroup = _Joined.apply


def entering(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which is the same in every process and from which each computes its part; its gradient is the sum of
    theirs."""
    return _entering(x, group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the `x` of all processes, in each of them; what follows is computed alike in every one."""
    return _summed(x, group)


def joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The last dimensions of all processes end to end, in each of them; what follows is computed alike in every one."""
    return _joined(x, group)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, smoothing: float, group: dist.ProcessGroup
    ) -> Tensor:
        own = logits.shape[1]
        vocabulary = own * dist.get_world_size(group)
        most = logits.amax(1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        shares = (logits - most[:, None]).exp()
        here = (targets >= first) & (targets < first + own)
        at = torch.where(here, targets - first, 0)[:, None]
        of_target = torch.where(here, logits.gather(1, at)[:, 0], 0.0)
        sums = torch.stack((shares.sum(1), of_target, logits.sum(1)))
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log() + most
        ctx.save_for_backward(shares / sums[0][:, None], here, at)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        nats = (1.0 - smoothing) * (log_sum - sums[1]) + smoothing * (log_sum - sums[2] / vocabulary)
        return nats.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, here, at = ctx.saved_tensors
        gradient = shares - ctx.smoothing / ctx.vocabulary
        gradient.scatter_add_(1, at, -(1.0 - ctx.smoothing) * here[:, None].to(gradient.dtype))
        return gradient * gradients[0], None, None, None, None


_vocabulary_loss: Callable[[Tensor, Tensor, int, float, dist.ProcessGroup], Tensor] = _VocabularyLoss.apply


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], index: int, group: dist.ProcessGroup) -> Tensor:
        ctx.place, ctx.group = (sum(counts[:index]), counts[index]), group
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        every = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(every, padded, group=group)
        return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        first, count = ctx.place
        return total[first : first + count], None, None, None


_gathered_rows: Callable[[Tensor, list[int], int, dist.ProcessGroup], Tensor] = _GatheredRows.apply


def vocabulary_loss(logits: Tensor, targets: Tensor, first: int, smoothing: float, group: dist.ProcessGroup) -> Tensor:
    """The sum of cross-entropies [] of logits [M, V / processes], of which this process has those from `first` on.

    The share `smoothing` of each target is spread over the vocabulary, as in torch's cross-entropy.
    """
    return _vocabulary_loss(logits, targets, first, smoothing, group)


def gathered_rows(own: Tensor, counts: list[int], index: int, group: dist.ProcessGroup) -> Tensor:
    """Rows [M, ...] of all processes end to end, of which process `index` has `own` and the others as many as `counts`
    says; the gradient of a process' rows is the sum of those that all processes give them."""
    return _gathered_rows(own, counts, index, group)
