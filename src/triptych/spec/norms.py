"""Norms, as data: what brings a vector to one scale."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.spec.part import Part, Shapes


@dataclass(frozen=True, kw_only=True)
class LayerNormSpec(Part):
    """Ba et al. 2016: `(x - mean) / sqrt(var + eps) * weight + bias`."""

    width: int
    eps: float = 1e-5
    bias: bool = True

    def tensors(self) -> Shapes:
        own: Shapes = {"weight": (self.width,)}
        return own | {"bias": (self.width,)} if self.bias else own


@dataclass(frozen=True, kw_only=True)
class RMSNormSpec(Part):
    """Zhang & Sennrich 2019: `x / sqrt(mean(x^2) + eps) * (offset + weight)`; Gemma's offset is 1."""

    width: int
    eps: float = 1e-6
    offset: float = 0.0

    def tensors(self) -> Shapes:
        return {"weight": (self.width,)}


Norm = LayerNormSpec | RMSNormSpec
