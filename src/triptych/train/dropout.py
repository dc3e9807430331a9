"""Dropout whose random numbers depend on the seed of the step alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from triptych.nn import Transformer


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
