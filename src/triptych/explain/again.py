"""The operations of a program a second time, by their names: each equation as it is written, in the precision of its
arguments.

Nothing here calls what it checks: norms are not torch's, a rotation is a product of complex numbers, softmax is exp
over its sum.  Values with heads are `[H, N, K]` here, heads first, as they are printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.errors import InputError


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b"""
    out = torch.einsum("...i,oi->...o", x.to(weight.dtype), weight)
    return out if bias is None else out + bias


def conv1d(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """Every token of `[T, D]` from its neighbours within the kernel, one matrix of `[D, D, kernel]` for each of them;
    zeros beyond the ends."""
    kernel = weight.shape[2]
    padded = torch.nn.functional.pad(x, (0, 0, kernel // 2, kernel // 2))
    shifted = [padded[j : j + len(x) : stride] for j in range(kernel)]
    return bias + sum(torch.einsum("ti,oi->to", shifted[j], weight[..., j]) for j in range(kernel))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    out = centred / ((centred * centred).mean(-1, keepdim=True) + eps) ** 0.5 * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps) ** 0.5 * (weight + offset)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x Φ(x), or its tanh form (Hendrycks & Gimpel 2016)."""
    if approximate == "tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def tanh(x: Tensor) -> Tensor:
    return 1 - 2 / (torch.exp(2 * x) + 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Each pair of dimensions of `[H, N, K]` as a complex number, turned by its angle (Su et al. 2021)."""
    half = cos.shape[-1]
    turned = x.clone()
    a, b = (
        (slice(0, half), slice(half, 2 * half)) if pairing == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    z = torch.complex(x[..., a], x[..., b]) * torch.complex(cos, sin)
    turned[..., a], turned[..., b] = z.real, z.imag
    return turned


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """exp(s) / Σ exp(s), a head's sink in the sum where it has one; 0 for a query that sees no key."""
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    e = torch.exp(scores - largest)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - largest)
    return e / total.masked_fill(total == 0, 1.0)


def split_heads(x: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.stack(x.split(shape[-1], dim=-1))


def pool(x: Tensor, mode: str) -> Tensor:
    """One vector of one row `[T, D]`."""
    return {"mean": x.sum(0) / len(x), "first": x[0], "last": x[-1]}[mode]


def l2_normalize(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True) ** 0.5


def choice(scores: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts that each token goes to, and their weights."""
    weights, chosen = softmax(scores).topk(top_k)
    return chosen, weights / weights.sum(-1, keepdim=True) if normalize else weights


def grouped(x: Tensor, heads: int) -> Tensor:
    """`[G, S, K]` as each of H heads reads it: head h reads group h·G//H.  A matrix belongs to one head."""
    return x if x.dim() == 2 else x[[h * len(x) // heads for h in range(heads)]]


AGAIN: dict[str, Callable[..., Tensor]] = {
    "linear": linear, "conv1d": conv1d, "layer_norm": layer_norm, "rms_norm": rms_norm, "rotate": rotate, "pool": pool,
    "split_heads": split_heads, "merge_heads": lambda x: torch.cat(list(x), dim=-1), "relu": lambda x: x.clamp(min=0),
    "gelu": gelu, "silu": lambda x: x / (1 + torch.exp(-x)), "tanh": tanh, "l2_normalize": l2_normalize,
    "add": lambda x, y: x + y, "multiply": lambda x, y: x * y, "scale": lambda x, factor: x * factor,
    "shift": lambda x, offset: x + offset, "softcap": lambda x, cap: cap * tanh(x / cap),
    "cast": lambda x, dtype: x,
}  # fmt: skip
"""By the name of an operation in `triptych.ops`; `attend` and `experts` are recomputed in several steps."""


def run(op: str, tensors: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """An operation of a program.  Raises InputError for one that is not recomputed here."""
    if op not in AGAIN:
        raise InputError(f"explain does not recompute the operation {op!r}")
    settings = {key: value for key, value in attributes.items() if key in ops.OPERATIONS[op].arguments}
    return AGAIN[op](**tensors, **settings)
