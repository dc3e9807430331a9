"""Where the first inf or NaN of a forward or backward pass came from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from triptych.errors import TriptychError

LOWER = "lower the learning rate, lengthen the warm-up"  # what to do about it


class DivergedError(TriptychError):
    """The loss or a gradient of a training step is not finite: `Trainer.run` (loop.py) raises it, and the weights are
    those before the step.  Also: what the step made of the weights is not."""


def nonfinite_parameter(module: nn.Module) -> str | None:
    """The name of the first parameter that holds inf or NaN."""
    return next((name for name, weight in module.named_parameters() if not torch.isfinite(weight).all()), None)


def first_nonfinite(module: nn.Module, forward: Callable[[], object]) -> str:
    """The first cause, in words: a stored parameter, the first module whose output is not finite, or, when the whole
    `forward` is finite, the last parameter (the first in the backward pass) whose gradient is not."""
    if stored := nonfinite_parameter(module):
        return f"parameter {stored} holds inf or NaN"
    nonfinite: list[str] = []
    handles = [
        part.register_forward_hook(_record_nonfinite(name, nonfinite)) for name, part in module.named_modules() if name
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if nonfinite:
        return f"{nonfinite[0]} was the first to give inf or NaN"
    broken = [name for name, p in module.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return f"the forward pass is finite, the gradient of {broken[-1]} is not" if broken else "the logits overflowed"


def _record_nonfinite(name: str, names: list[str]) -> Callable[[nn.Module, object, object], None]:
    """A forward hook that appends `name` to `names` if the output is a tensor with inf or NaN."""

    def hook(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            names.append(name)

    return hook
