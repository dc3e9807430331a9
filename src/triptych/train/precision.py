"""Numerics of a training step: precision, the random numbers of dropout, and the origin of an inf or NaN.

Weights, gradients and optimizer state stay in the dtype they are stored in.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from triptych.errors import InputError, TriptychError
from triptych.nn import Transformer
from triptych.nn.packed_weight import own_part

Precision = Literal["auto", "bf16", "fp32"]
WIDE = 128  # width from which a model is trained in bf16 on a processor that has it (docs/log.md has the measurement)


def has_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 run in hardware; emulated, they are slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def chosen(precision: Precision, device: torch.device, width: int) -> Precision:
    """The precision that `auto` means for a model of this width.

    Products of narrow matrices are no faster in bf16 on a processor, and rows of ever new lengths make them slower:
    oneDNN generates code for each new shape.
    """
    if precision != "auto":
        return precision
    return "bf16" if has_bf16(device) and (device.type != "cpu" or width >= WIDE) else "fp32"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in.  `auto` is bf16 where the processor has it.

    There is no fp16: activations of T5 models overflow it.  Raises InputError for bf16 on a processor without it.
    """
    if precision == "fp32" or (precision == "auto" and not has_bf16(device)):
        return nullcontext()
    if not has_bf16(device):
        raise InputError(f"this {device.type} has no bf16 arithmetic; use precision fp32 or auto")
    return torch.autocast(device.type, dtype=torch.bfloat16)


def has_dropout(module: Transformer) -> bool:
    """Whether a forward in training mode draws random numbers."""
    in_spec = any(getattr(part, "dropout", 0.0) > 0.0 for _, part in module.spec.walk())
    return in_spec or draws_globally(module)


def draws_globally(module: Transformer) -> bool:
    """Whether a part that is not ours draws from torch's global generator; our own draw from `nn.Batch.random`."""
    return any(isinstance(part, nn.Dropout) and part.p > 0.0 for part in module.modules())


@contextmanager
def global_dropout(seed: int) -> Iterator[None]:
    """Inside, torch's global generator is seeded with `seed`: for compiled code and GPU kernels, which read no other.

    Other threads must not draw from it inside; its state is restored at the end.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


LOWER = "lower the learning rate, lengthen the warm-up"  # what to do about it


class DivergedError(TriptychError):
    """The loss or a gradient of a training step is not finite: `Trainer.run` (loop.py) raises it, and the weights are
    those before the step.  Also: what the step made of the weights is not."""


def nonfinite_parameter(module: nn.Module) -> str | None:
    """The name of the first parameter that holds inf or NaN."""
    weights = ((name, own_part(weight)) for name, weight in module.named_parameters())
    return next((name for name, weight in weights if not torch.isfinite(weight).all()), None)


def nonfinite_gradient(module: nn.Module) -> str | None:
    """The name of the last parameter, the first in the backward pass, whose gradient holds inf or NaN."""
    gradients = [(name, own_part(p.grad)) for name, p in module.named_parameters() if p.grad is not None]
    return next((name for name, gradient in reversed(gradients) if not torch.isfinite(gradient).all()), None)


def first_nonfinite(module: nn.Module, forward: Callable[[], object]) -> str:
    """The first cause, in words: a stored parameter, the first module whose output is not finite, or, when the whole
    `forward` is finite, the last parameter (the first in the backward pass) whose gradient is not."""
    if stored := nonfinite_parameter(module):
        return f"parameter {stored} holds inf or NaN"
    names = {part: name for name, part in module.named_modules() if name}
    nonfinite: list[str] = []

    def record(part: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor) and not torch.isfinite(output).all():
            nonfinite.append(names[part])

    handles = [part.register_forward_hook(record) for part in names]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if nonfinite:
        return f"{nonfinite[0]} was the first to give inf or NaN"
    broken = nonfinite_gradient(module)
    return f"the forward pass is finite, the gradient of {broken} is not" if broken else "the logits overflowed"
