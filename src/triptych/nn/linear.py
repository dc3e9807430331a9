"""Linear maps, norms and MLPs: what acts on one token at a time, `[N, D] -> [N, D']`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from triptych import ops
from triptych.nn.kinds import Context
from triptych.nn.part import Module
from triptych.nn.taps import NO_TAPS, Taps
from triptych.spec import norms, parts


class Linear(Module[parts.LinearSpec], of=parts.LinearSpec):
    """`x @ weight.T + bias`.  A slot: LoRA, packed weights and others take its place by the same call."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: parts.LinearSpec) -> None:
        super().__init__(spec)
        if not spec.bias:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class LayerNorm(Module[norms.LayerNormSpec], of=norms.LayerNormSpec):
    """Statistics in fp32 or better whatever the dtype of `x`; divides by sqrt(var + eps), not by (std + eps)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: norms.LayerNormSpec) -> None:
        super().__init__(spec)
        if not spec.bias:
            self.bias = None

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

    pre: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    post: Callable[[Tensor], Tensor]

    def __init__(self, spec: parts.NormsSpec) -> None:
        super().__init__(spec)
        for slot in ("pre", "out", "post"):
            if getattr(spec, slot) is None:
                setattr(self, slot, nn.Identity())


class MLP(Module[parts.MLPSpec], of=parts.MLPSpec):
    """`down(act(up(x)))`."""

    up: Linear
    down: Linear

    def forward(self, x: Tensor, ctx: Context, taps: Taps) -> Tensor:
        up = taps("up", self.up(x), ctx.rows)
        hidden = taps("act", ops.ACTIVATIONS[self.spec.act](up), ctx.rows)
        return self.down(ops.dropout(hidden, self.spec.dropout, self.training, ctx.random))


class GLU(Module[parts.GLUSpec], of=parts.GLUSpec):
    """`down(act(gate(x)) * up(x))`; the site `act` is the product that enters `down`."""

    gate: Linear
    up: Linear
    down: Linear

    def forward(self, x: Tensor, ctx: Context, taps: Taps) -> Tensor:
        gate = taps("gate", self.gate(x), ctx.rows)
        up = taps("up", self.up(x), ctx.rows)
        hidden = taps("act", ops.ACTIVATIONS[self.spec.act](gate) * up, ctx.rows)
        return self.down(ops.dropout(hidden, self.spec.dropout, self.training, ctx.random))


class MoE(Module[parts.MoESpec], of=parts.MoESpec):
    """Each token through its `top_k` experts.  The site `router` is its scores, before the softmax."""

    router: Linear
    experts: Sequence[GLU]

    def forward(self, x: Tensor, ctx: Context, taps: Taps) -> Tensor:
        scores = taps("router", self.router(x), ctx.rows)
        experts = [partial(expert, ctx=ctx, taps=NO_TAPS) for expert in self.experts]
        return ops.experts(x, scores, experts, self.spec.top_k, self.spec.normalize)
