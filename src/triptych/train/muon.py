"""Muon (Jordan et al. 2024) with the matrices of one shape orthogonalized together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOGETHER = 1 << 22  # numbers orthogonalized at a time, so that large matrices need no more memory than in torch


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`: the same numbers and the same state.

    torch iterates over one matrix at a time.  A small model has many of the same shape, and a product of matrices of
    width 128 takes less time than the call.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch has overloads
        """One update of every matrix that has a gradient; there is no `closure`."""
        for group in self.param_groups:
            alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                count = max(1, TOGETHER // shape.numel())
                for first in range(0, len(parameters), count):
                    self._update(group, parameters[first : first + count])

    def _update(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Update matrices of one shape [rows, columns]."""
        directions = orthogonal(
            torch.stack([self._direction(group, parameter) for parameter in parameters]),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        factor = 0.2 * max(parameters[0].shape) ** 0.5  # as large as an update of AdamW: Liu et al. 2025
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction, alpha=-group["lr"] * factor)

    def _direction(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """The gradient mixed with its running mean, which takes it in first (Nesterov)."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """[n, rows, columns] in bf16: each matrix with its singular values moved near 1.

    `steps` times `a x + b (x xᵀ) x + c (x xᵀ)² x`, from a matrix of norm 1: the quintic Newton-Schulz iteration of
    Jordan et al. 2024.
    """
    a, b, c = coefficients
    upright = x.shape[1] > x.shape[2]
    x = x.bfloat16()
    x = x.mT if upright else x  # the smaller of the two products of x and xᵀ
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if upright else x
