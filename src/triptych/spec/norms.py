"""LayerNorm and RMSNorm, as data."""

from .part import Part, Shapes


class LayerNormSpec(Part):
    """Ba et al. 2016: `(x - mean) / sqrt(var + eps) * weight + bias`."""

    width: int
    eps: float = 1e-5
    bias: bool = True

    def tensors(self) -> Shapes:
        own: Shapes = {"weight": (self.width,)}
        return own | {"bias": (self.width,)} if self.bias else own


class RMSNormSpec(Part):
    """Zhang & Sennrich 2019: `x / sqrt(mean(x^2) + eps) * (offset + weight)`; Gemma's offset is 1."""

    width: int
    eps: float = 1e-6
    offset: float = 0.0

    def tensors(self) -> Shapes:
        return {"weight": (self.width,)}


Norm = LayerNormSpec | RMSNormSpec
