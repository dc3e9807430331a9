"""The attention layer: project, normalize, rotate, extend the cache, attend, project back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from triptych import ops
from triptych.attention import DOT_PRODUCT, LINEAR, AdditiveOver, AttendPlan, ContentBias, Mechanism, Rows
from triptych.attention.rows import KeysAndValues
from triptych.spec import parts
from .linear import Linear
from .part import Module, Taps, VectorMap


class Additive(Module[parts.AdditiveSpec], of=parts.AdditiveSpec):
    weight: Tensor

    def score(self) -> Mechanism:
        return AdditiveOver(self.weight)


class LinearKernel(Module[parts.LinearKernelSpec], of=parts.LinearKernelSpec):
    def score(self) -> Mechanism:
        return LINEAR


@runtime_checkable
class KindState(Protocol):
    """Mask, kernel, rotation and bias of some layers: the rows they run on, how their queries turn, where their keys
    come from, and the plan by which queries meet keys."""

    @property
    def rows(self) -> Rows: ...
    @property
    def plan(self) -> AttendPlan: ...
    @property
    def rotation(self) -> ops.Rotation | None: ...
    @property
    def content(self) -> Callable[[Attention], ContentBias] | None: ...

    def keys(self, attn: Attention, x: Tensor, layer: int, taps: Taps) -> KeysAndValues: ...


class Attention(Module[parts.AttentionSpec], of=parts.AttentionSpec):
    """`out(attend(q(x), k(y), v(y)))` over H heads, where y is the row itself or an encoder's output."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    sinks: Tensor | None
    q_norm: VectorMap | None
    k_norm: VectorMap | None
    mechanism: Additive | LinearKernel | None
    pos_q: Linear | None
    pos_k: Linear | None

    def __init__(self, spec: parts.AttentionSpec) -> None:
        super().__init__(spec)
        self.head_width, self.value_width = spec.head_width, spec.value_width

    def forward(self, x: Tensor, state: KindState, layer: int, taps: Taps) -> Tensor:
        """[N, D] -> [N, D], what attention adds to the residual stream."""
        rows = state.rows
        q = taps("q", self.q(x).view(-1, self.spec.heads, self.head_width), rows)  # [N, H, K]
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = taps("q_rot", ops.rotate(q, state.rotation), rows)
        k, v = state.keys(self, x, layer, taps)  # [N, G, K] or the cache's [slots, G, capacity, K]
        content = None if state.content is None else state.content(self)
        z = taps("z", taps.attend(state.plan, q, k, v, self.sinks, content), rows)  # [N, H, Kv]
        return self.out(z.flatten(1))

    def project(self, y: Tensor, rows: Rows, taps: Taps) -> KeysAndValues:
        """Keys [N, G, K] (normalized, not rotated) and values [N, G, Kv] of `y` [N, D]."""
        groups = self.spec.kv_heads
        k = taps("k", self.k(y).view(-1, groups, self.head_width), rows)
        v = taps("v", self.v(y).view(-1, groups, self.value_width), rows)
        return (k if self.k_norm is None else self.k_norm(k)), v

    @property
    def scoring(self) -> Mechanism:
        """The mechanism by which a query scores a key."""
        return DOT_PRODUCT if self.mechanism is None else self.mechanism.score()
