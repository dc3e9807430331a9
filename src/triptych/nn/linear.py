"""Linear maps, norms and activations: what acts on one token at a time, `[N, D] -> [N, D']`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.nn.part import Module
from triptych.nn.taps import NO_TAPS, Taps
from triptych.spec import norms, parts

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Linear(Module, of=parts.Linear):
    """`x @ weight.T + bias`.  A slot: LoRA, packed weights and others take its place by the same call."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: parts.Linear) -> None:
        super().__init__(spec)
        if not spec.bias:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm(Module, of=norms.LayerNorm):
    """Statistics in fp32 or better whatever the dtype of `x`; divides by sqrt(var + eps), not by (std + eps)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: norms.LayerNorm) -> None:
        super().__init__(spec)
        if not spec.bias:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), x.shape[-1:], self.weight.to(wide), bias, self.spec.eps).to(x.dtype)


class RMSNorm(Module, of=norms.RMSNorm):
    """Mean square in fp32 or better whatever the dtype of `x`."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.spec.offset:
            weight = weight + self.spec.offset
        return F.rms_norm(x.to(wide), x.shape[-1:], weight, self.spec.eps).to(x.dtype)


class Scale(Module, of=parts.Scale):
    """`factor * x`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(self.spec.factor)


class Norms(Module, of=parts.Norms):
    """The norms around one sublayer; an empty slot passes its input on."""

    pre: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    post: Callable[[Tensor], Tensor]

    def __init__(self, spec: parts.Norms) -> None:
        super().__init__(spec)
        for slot in ("pre", "out", "post"):
            if getattr(spec, slot) is None:
                setattr(self, slot, _same)


def _same(x: Tensor) -> Tensor:
    return x


class MLP(Module, of=parts.MLP):
    """`down(act(up(x)))`."""

    up: Linear
    down: Linear

    def forward(self, x: Tensor, rows: Rows, taps: Taps) -> Tensor:
        up = taps("up", self.up(x), rows)
        hidden = taps("act", ACTIVATIONS[self.spec.act](up), rows)
        return self.down(F.dropout(hidden, self.spec.dropout, self.training))  # type: ignore[no-any-return]


class GLU(Module, of=parts.GLU):
    """`down(act(gate(x)) * up(x))`; the site `act` is the product that enters `down`."""

    gate: Linear
    up: Linear
    down: Linear

    def forward(self, x: Tensor, rows: Rows, taps: Taps) -> Tensor:
        gate = taps("gate", self.gate(x), rows)
        up = taps("up", self.up(x), rows)
        hidden = taps("act", ACTIVATIONS[self.spec.act](gate) * up, rows)
        return self.down(F.dropout(hidden, self.spec.dropout, self.training))  # type: ignore[no-any-return]


class MoE(Module, of=parts.MoE):
    """Each token through its experts, one call an expert on all tokens it was given: work is N times top_k.

    The site `router` is its scores, before the softmax.
    """

    router: Linear
    experts: Sequence[GLU]

    def forward(self, x: Tensor, rows: Rows, taps: Taps) -> Tensor:
        count = self.spec.top_k
        scores = taps("router", self.router(x), rows)
        weights, chosen = scores.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1).topk(count)  # [N, top_k]
        if self.spec.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)
        token, weights = by_expert // count, weights.flatten()[by_expert, None].to(x.dtype)
        given = chosen.flatten().bincount(minlength=self.spec.experts).tolist()
        out = torch.zeros_like(x)
        for expert, end, number in zip(self.experts, accumulate(given), given, strict=True):
            if number:
                mine = slice(end - number, end)
                out.index_add_(0, token[mine], (expert(x[token[mine]], rows, NO_TAPS) * weights[mine]).to(x.dtype))
        return out
