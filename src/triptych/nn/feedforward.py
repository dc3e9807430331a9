"""The feed-forward part of a block: MLP, GLU, and a mixture of experts."""

from collections.abc import Sequence
from functools import partial
from operator import mul

from torch import Tensor

from triptych import ops
from triptych.spec import parts
from .attention_states import Context
from .linear import Linear
from .part import NO_TAPS, Module, Taps


class MLP(Module[parts.MLPSpec], of=parts.MLPSpec):
    """`down(act(up(x)))`."""

    up: Linear
    down: Linear

    def forward(self, x: Tensor, ctx: Context, taps: Taps) -> Tensor:
        up = taps("up", self.up(x), ctx.rows)
        act = partial(ops.activated, self.spec.act) if self.training else ops.ACTIVATIONS[self.spec.act]
        hidden = taps("act", taps.computed(act, up), ctx.rows)
        return self.down(ops.dropout(hidden, self.spec.dropout, self.training, ctx.random))


class GLU(Module[parts.GLUSpec], of=parts.GLUSpec):
    """`down(act(gate(x)) * up(x))`; the site `act` is the product that enters `down`."""

    gate: Linear
    up: Linear
    down: Linear

    def forward(self, x: Tensor, ctx: Context, taps: Taps) -> Tensor:
        gate = taps("gate", self.gate(x), ctx.rows)
        up = taps("up", self.up(x), ctx.rows)
        if self.training:
            product = taps.computed(partial(ops.gated, self.spec.act), gate, up)
        else:
            product = taps.computed(mul, taps.computed(ops.ACTIVATIONS[self.spec.act], gate), up)
        hidden = taps("act", product, ctx.rows)
        return self.down(ops.dropout(hidden, self.spec.dropout, self.training, ctx.random))


class MoE(Module[parts.MoESpec], of=parts.MoESpec):
    """Each token through its `top_k` experts, those with the largest scores, weighted by the softmax of the scores
    (`ops/experts.py`).  The site `router` is these scores, before the softmax."""

    router: Linear
    experts: Sequence[GLU]

    def __init__(self, spec: parts.MoESpec) -> None:
        super().__init__(spec)
        self.router.takes_packed = False  # an error of rounding may choose other experts

    def forward(self, x: Tensor, ctx: Context, taps: Taps) -> Tensor:
        scores = taps("router", self.router(x), ctx.rows)
        experts = [partial(expert, ctx=ctx, taps=NO_TAPS) for expert in self.experts]
        return ops.experts(x, scores, experts, self.spec.top_k, self.spec.normalize)
