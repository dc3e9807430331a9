"""The attention layer: project, normalize, rotate, extend the cache, attend, project back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from triptych.attention import FlatKeys, Rows, SlotKeys, attend_rows
from triptych.attention.mechanisms import Mechanism, additive_over, dot_product, run_linear
from triptych.nn.linear import Linear
from triptych.nn.part import Module
from triptych.nn.positions import LayerBias, Rotation, unbiased
from triptych.nn.taps import Taps
from triptych.spec import parts
from triptych.spec.masks import Full, Mask

_EVERYTHING = Full()


@dataclass(frozen=True)
class SelfView:
    """One layer's keys when a row attends to itself: what the cache holds of it, then its own tokens."""

    rows: Rows
    mask: Mask
    rotate: Rotation
    bias: LayerBias
    cache: Any  # Cache or NullCache
    layer: int

    def keys(self, attn: Attention, x: Tensor, taps: Taps) -> FlatKeys | SlotKeys:
        k, v = attn.project(x, self.rows, taps)
        k = taps("k_rot", self.rotate(k), self.rows)
        return self.cache.extend(self.layer, k, v, self.rows)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CrossView:
    """One layer's keys when a row attends to an encoder's output: projected once, before the first step."""

    rows: Rows
    held: FlatKeys | SlotKeys
    mask: Mask = _EVERYTHING
    bias: LayerBias = unbiased

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def keys(self, attn: Attention, x: Tensor, taps: Taps) -> FlatKeys | SlotKeys:
        return self.held


class Additive(Module, of=parts.Additive):
    weight: Tensor

    def score(self) -> Mechanism:
        return additive_over(self.weight)


class LinearKernel(Module, of=parts.LinearKernel):
    def score(self) -> Mechanism:
        return run_linear


class Attention(Module, of=parts.Attention):
    """`out(attend(q(x), k(y), v(y)))` over H heads, where y is the row itself or an encoder's output."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    sinks: Tensor
    q_norm: Callable[[Tensor], Tensor] | None
    k_norm: Callable[[Tensor], Tensor] | None
    mechanism: Additive | LinearKernel | None
    pos_q: Linear | None
    pos_k: Linear | None

    def forward(self, x: Tensor, view: SelfView | CrossView, taps: Taps) -> Tensor:
        """[N, D] -> [N, D]; the residual stream is the block's business."""
        spec, rows = self.spec, view.rows
        q = taps("q", self.q(x).unflatten(-1, (spec.heads, spec.head_width)), rows)  # [N, H, K]
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = taps("q_rot", view.rotate(q), rows)
        keys = taps.keys(view.keys(self, x, taps))  # [N, G, K] or the cache's [B, G, S, K]
        call = partial(
            attend_rows, q, keys, rows, mask=view.mask, bias=view.bias(self), scale=spec.scale, softcap=spec.softcap,
            sinks=self.sinks if spec.sinks else None, dropout=spec.dropout if self.training else 0.0,
            mechanism=dot_product if self.mechanism is None else self.mechanism.score(),
        )  # fmt: skip
        z = taps("z", taps.attend(call, rows), rows)  # [N, H, Kv]
        return self.out(z.flatten(1))  # type: ignore[no-any-return]

    def project(self, y: Tensor, rows: Rows, taps: Taps) -> tuple[Tensor, Tensor]:
        """Keys [N, G, K] (normalized, not rotated) and values [N, G, Kv] of `y` [N, D]."""
        spec = self.spec
        k = taps("k", self.k(y).unflatten(-1, (spec.kv_heads, spec.head_width)), rows)
        v = taps("v", self.v(y).unflatten(-1, (spec.kv_heads, spec.value_width)), rows)
        return (k if self.k_norm is None else self.k_norm(k)), v
