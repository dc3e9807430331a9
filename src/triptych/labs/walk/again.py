"""The arithmetic of a walk a second time: each formula as it is written, in the precision it is given.

Nothing here calls what it checks: norms are not torch's, a rotation is a product of complex numbers, softmax is exp
over its sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from triptych.spec import LayerNormSpec
from triptych.spec.norms import Norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b"""
    out = torch.einsum("...i,oi->...o", x.to(weight.dtype), weight)
    return out if bias is None else out + bias


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each place of `[T, D]` from itself and its neighbours, one matrix of `[D, D, kernel]` for each; zeros beyond the
    ends"""
    kernel = weight.shape[2]
    padded = torch.nn.functional.pad(x, (0, 0, kernel // 2, kernel // 2))
    return bias + sum(torch.einsum("ti,oi->to", padded[j : j + len(x)], weight[..., j]) for j in range(kernel))


def norm(x: Tensor, spec: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
    """LayerNorm: (x - mean) / √(var + ε) · w + b.  RMSNorm: x / √(mean(x²) + ε) · w."""
    if isinstance(spec, LayerNormSpec):
        centred = x - x.mean(-1, keepdim=True)
        out = centred / ((centred * centred).mean(-1, keepdim=True) + spec.eps) ** 0.5 * weight
        return out if bias is None else out + bias
    return x / ((x * x).mean(-1, keepdim=True) + spec.eps) ** 0.5 * (weight + spec.offset)


def activation(name: str, x: Tensor) -> Tensor:
    """relu max(x, 0); gelu x Φ(x) or its tanh form (Hendrycks & Gimpel 2016); silu x σ(x); tanh."""
    if name == "relu":
        return x.clamp(min=0)
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    if name == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    if name == "silu":
        return x / (1 + torch.exp(-x))
    return torch.tanh(x)


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
    """exp(s) / Σ exp(s), a head's sink in the sum where it has one; 0 where there is nothing to see."""
    most = scores.amax(-1, keepdim=True)
    most = most.masked_fill(most == -math.inf, 0.0)
    e = torch.exp(scores - most)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - most)
    return e / total.masked_fill(total == 0, 1.0)


def grouped(x: Tensor, heads: int) -> Tensor:
    """`[G, S, K]` as each of H heads reads it: head h group h·G//H.  A matrix alone is one head's."""
    return x if x.dim() == 2 else x[[h * len(x) // heads for h in range(heads)]]
