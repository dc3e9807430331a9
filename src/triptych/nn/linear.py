"""Linear maps and norms, which act on one token at a time, `[N, D] -> [N, D']`."""

from torch import Tensor, nn

from triptych import ops
from triptych.spec import norms, parts
from .packed_weight import dense, rows
from .part import Module, VectorMap


class Linear(Module[parts.LinearSpec], of=parts.LinearSpec):
    """`x @ weight.T + bias`.  A slot: LoRA, packed weights and others take its place by the same call."""

    takes_packed = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def matrix(self) -> Tensor:
        """The matrix that it multiplies with, [outputs, inputs], as plain numbers."""
        return dense(self.weight)

    def matrix_rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of that; of a packed weight only these are unpacked."""
        return rows(self.weight, start, stop)


class LayerNorm(Module[norms.LayerNormSpec], of=norms.LayerNormSpec):
    """Statistics in fp32 or better whatever the dtype of `x`; divides by sqrt(var + eps), not by (std + eps)."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.spec.eps)


class RMSNorm(Module[norms.RMSNormSpec], of=norms.RMSNormSpec):
    """Mean square in fp32 or better whatever the dtype of `x`."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.spec.offset, self.spec.eps)


class Scale(Module[parts.ScaleSpec], of=parts.ScaleSpec):
    """`factor * x`."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.spec.factor


class Norms(Module[parts.NormsSpec], of=parts.NormsSpec):
    """The norms around one sublayer; an empty slot passes its input on."""

    pre: VectorMap
    out: VectorMap
    post: VectorMap

    def __init__(self, spec: parts.NormsSpec) -> None:
        super().__init__(spec)
        for slot in ("pre", "out", "post"):
            if getattr(spec, slot) is None:
                setattr(self, slot, nn.Identity())
