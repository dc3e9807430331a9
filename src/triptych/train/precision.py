"""The precision a step computes in.  Weights, gradients and optimizer state stay in the dtype they are stored in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from triptych.errors import InputError

Precision = Literal["auto", "bf16", "fp32"]
WIDE = 128  # width from which a model is trained in bf16 on a processor that has it (docs/log.md has the measurement)


def has_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 run in hardware; emulated, they are slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def chosen(precision: Precision, device: torch.device, width: int) -> Precision:
    """What `auto` means for a model of this width.

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
