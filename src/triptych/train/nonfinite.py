"""Where the first inf or NaN of a forward or backward pass came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from triptych.errors import TriptychError


class DivergedError(TriptychError):
    """The loss or a gradient of a training step is not finite."""


def first_nonfinite(module: nn.Module, forward: Callable[[], object]) -> str:
    """What went wrong first, in words: a stored parameter, the module whose output is not finite though its input
    was, or, when `forward` is finite throughout, the last parameter whose gradient is not."""
    for name, parameter in module.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"parameter {name} holds inf or NaN"
    found: list[str] = []
    handles = [part.register_forward_hook(_watch(name, found)) for name, part in module.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"{found[0]} was the first to give inf or NaN"
    broken = [name for name, p in module.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return f"the forward pass is finite, the gradient of {broken[-1]} is not" if broken else "the logits overflowed"


def _watch(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def look(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            found.append(name)

    return look
