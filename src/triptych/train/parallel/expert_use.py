"""Experts that saw no token, in mixtures of experts that several processes train.

A rank's expert without tokens would have no gradient, and the ranks' sums would not be of the same tensors.  It takes
part with an input of no rows, which gives zeros.  An expert that no rank used has no gradient, as in one process.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triptych.nn import Transformer
from triptych.nn.feedforward import GLU, MoE
from triptych.nn.part import NO_TAPS


class ExpertUse:
    """Which experts took a token since the last step; hooks of the mixtures keep it."""

    def __init__(self) -> None:
        self.mixtures: list[MoE] = []
        self._called: dict[nn.Module, set[int]] = defaultdict(set)  # in the present forward
        self._used: dict[nn.Module, set[int]] = defaultdict(set)  # since the last step

    @staticmethod
    def of(module: Transformer) -> ExpertUse:
        """With hooks on every mixture of `module`."""
        use = ExpertUse()
        for part in module.modules():
            if isinstance(part, MoE):
                use.mixtures.append(part)
                part.register_forward_hook(use._join_unused)
                for number, expert in enumerate(part.experts):
                    expert.register_forward_pre_hook(partial(use._note, part, number))
        return use

    def _note(self, mixture: MoE, number: int, expert: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._called[mixture].add(number)
        if torch.is_grad_enabled():
            self._used[mixture].add(number)

    def _join_unused(self, mixture: MoE, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        called = self._called.pop(mixture, set())
        if not torch.is_grad_enabled():
            return output
        x, ctx, _ = inputs
        for number, expert in enumerate(mixture.experts):
            if number not in called:
                output = output + expert.forward(x[:0], ctx, NO_TAPS).sum().to(output.dtype)
        return output

    def forget_unused(self, group: dist.ProcessGroup) -> None:
        """Set to None the gradients of experts that took no token on any rank of `group` since the last call."""
        if not self.mixtures:
            return
        flags = [int(n in self._used[mixture]) for mixture in self.mixtures for n in range(len(mixture.experts))]
        self._used.clear()
        used = torch.tensor(flags)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        experts: list[GLU] = [expert for mixture in self.mixtures for expert in mixture.experts]
        for expert, took_tokens in zip(experts, used.tolist(), strict=True):
            if not took_tokens:
                expert.zero_grad(set_to_none=True)
