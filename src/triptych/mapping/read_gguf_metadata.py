"""GGUF metadata as plain keys: those of one architecture, and what only tensors hold."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TENSORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")  # divisors of RoPE, beside the metadata
POOLING = {1: "mean", 2: "first"}


def under(
    metadata: Mapping[str, Any],
    arch: str,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Sequence[float]] | None,
) -> dict[str, Any]:
    """The keys under the architecture's prefix, without the prefix, and the values that only tensors hold."""
    start = f"{arch}."
    keys: dict[str, Any] = {
        name.removeprefix(start): _decimal(value) if isinstance(value, float) else value
        for name, value in metadata.items()
        if name.startswith(start)
    }
    for key, tensor in {"vocab_size": "token_embd.weight", "token_types": "token_types.weight"}.items():
        if tensor in shapes:
            keys[key] = shapes[tensor][0]
    for name in TENSORS:
        if (tensor := f"{name}.weight") in shapes:
            keys[name] = [float(x) for x in (read(tensor) if read else [1.0] * shapes[tensor][0])]
    return keys | {"model_type": arch}


def _decimal(value: float) -> float:
    """The shortest decimal that is stored as the same float32: 1e-5 for 0.0000099999997473787516."""
    single = struct.pack("<f", value)
    shorter = (short for n in range(1, 18) if struct.pack("<f", short := float(f"{value:.{n}g}")) == single)
    return next(shorter, value)  # NaN has bits of its own
