"""Dot-product, additive and linear attention behind one interface, with the same masks and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from triptych.errors import InputError
from triptych.spec.masks import Causal, Points
from . import dispatch, mask_lowering, reference
from .reference import Hook
from .request import (
    AttentionRequest,
    KeyArray,
    OutputArray,
    QueryArray,
    Runner,
    ValueArray,
    prepare,
)

_NO_SCORES = "linear attention: it has no scores and no pattern to read or edit"
CHUNK = 64  # tokens whose pairs linear attention forms at once


class DotProduct:
    """Scaled dot products on the fastest kernel that serves them; by the definition under a hook."""

    name = "dot_product"
    width_of_scores = 1

    def raw_scores(self, q: Tensor, k: Tensor, scale: float, buffer: Tensor) -> Tensor:
        """The heads of a group stand side by side as queries, so that no key is repeated."""
        together = (q * scale).reshape(len(k), -1, q.shape[-1])
        size = together.shape[0] * together.shape[1] * k.shape[1]
        out = torch.bmm(together, k.mT, out=buffer[:size].view(*together.shape[:2], -1))
        return out.view(*q.shape[:2], -1)

    def plan(self, request: AttentionRequest, hook: Hook | None = None) -> Runner:
        return dispatch.choose(request).plan(request) if hook is None else partial(reference.run, request, hook=hook)


@dataclass(frozen=True, eq=False)
class AdditiveOver:
    """Additive scores `weight · tanh(q + k)` of queries and keys projected to width A already; ask for `scale=1.0`."""

    name = "additive"
    weight: Tensor

    @property
    def width_of_scores(self) -> int:
        return len(self.weight)

    def raw_scores(self, q: Tensor, k: Tensor, scale: float, buffer: Tensor) -> Tensor:
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        return torch.tanh(q[:, :, None] + k[:, None]) @ (self.weight.to(q.dtype) * scale)

    def plan(self, request: AttentionRequest, hook: Hook | None = None) -> Runner:
        return partial(self._run, request, hook)

    def _run(
        self, request: AttentionRequest, hook: Hook | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        q, k = q.to(request.precision), k.to(request.precision)
        k = k.repeat_interleave(request.heads // request.groups, dim=1)
        scores = torch.tanh(q[:, :, :, None] + k[:, :, None]) @ self.weight.to(request.precision)
        return reference.finish(request, reference.adjust(request, scores, bias), v, sinks, hook)


class LinearKernelized:
    """Linear attention."""

    name = "linear"
    width_of_scores = 1

    def raw_scores(self, q: Tensor, k: Tensor, scale: float, buffer: Tensor) -> Tensor:
        raise InputError(_NO_SCORES)

    def plan(self, request: AttentionRequest, hook: Hook | None = None) -> Runner:
        if hook is not None:
            raise InputError(_NO_SCORES)
        acting = {"softcap": request.softcap is not None, "bias": request.biased, "sinks": request.sinks}
        reasons = [f"{name}: it acts on scores, and there are none" for name, present in acting.items() if present]
        if request.dropout:
            reasons.append("dropout: it acts on a pattern, and there is none")
        for part in mask_lowering.conjuncts(request.mask):
            if not isinstance(part, Causal) and not mask_lowering.only_keys(part):
                reasons.append(f"mask {part}: a query's keys must be all of them, those before it, or the same for all")
        if reasons:
            raise InputError(f"linear attention: {'; '.join(reasons)}")
        return partial(_linear, request, _present(request))


DOT_PRODUCT, LINEAR = DotProduct(), LinearKernelized()

Mechanism = DotProduct | AdditiveOver | LinearKernelized
"""How queries score keys: `plan` prepares a runner for a request; under a hook one that shows it scores and pattern.

name              as it stands in a program.
raw_scores        `[h, n, s]` of queries [h, n, K] and keys [g, s, K], scaled, before softcap, bias and mask; head i
                  reads group i · g // h.  They may lie in `buffer`, which has at least so many numbers.
width_of_scores   numbers that one raw score takes while it is computed.
"""


def additive(
    q: Float[Tensor, "B H T Dq"] | Float[Tensor, "T Dq"] | Float[Tensor, " Dq"],
    k: Float[Tensor, "B G S Dk"] | Float[Tensor, "S Dk"],
    v: ValueArray,
    *,
    w_q: Float[Tensor, "A Dq"],
    w_k: Float[Tensor, "A Dk"],
    w_v: Float[Tensor, " A"],
    hook: Hook | None = None,
    **options: Any,
) -> OutputArray:
    """Bahdanau et al. 2015: the score is `w_v · tanh(w_q q + w_k k)`.  Options and order as in `attend`, with a scale
    of 1.  Queries and keys may differ in width.  Builds `[B, H, T, S, A]`."""
    request, tensors, restore = prepare(q @ w_q.mT, k @ w_k.mT, v, **{"scale": 1.0, **options})
    return restore(AdditiveOver(w_v).plan(request, hook)(*tensors))


def linear(q: QueryArray, k: KeyArray, v: ValueArray, **options: Any) -> OutputArray:
    """Katharopoulos et al. 2020: weights `φ(q)·φ(k) / Σ φ(q)·φ(k)` with `φ(x) = elu(x) + 1`, in O(T).

    Masks: everything, `causal()`, `keys(lengths)`, `prefix(n)`, and causal with the latter two.

    Raises InputError, with the reason, for what has no O(T) form.
    """
    request, tensors, restore = prepare(q, k, v, **options)
    return restore(LINEAR.plan(request)(*tensors))


def _linear(
    request: AttentionRequest, present: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    b, h, t = request.rows, request.heads, request.queries
    grouped = q.to(request.precision).reshape(b, request.groups, h // request.groups, t, -1)
    q, k = features(grouped), features(k.to(request.precision))
    k = k * present
    v = v.to(request.precision)
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # the last column sums the weights
    causal = mask_lowering.CAUSAL in mask_lowering.conjuncts(request.mask)
    if causal and request.aligned:
        total = running(q, k[:, :, None], v[:, :, None])
    elif causal:  # rows of a cache that stand at different places: pair by pair, [T, S] of a short T
        pairs = q @ k[:, :, None].mT
        total = (pairs if request.visible is None else pairs * request.visible[:, :, None]) @ v[:, :, None]
    else:
        total = q @ (k.mT @ v)[:, :, None]
    return divided(total).reshape(b, h, t, -1).to(request.dtype)


def features(x: Tensor) -> Tensor:
    """φ of queries or keys: positive, so that weights are."""
    return F.elu(x) + 1


def divided(total: Tensor) -> Tensor:
    """Sums of weighted values [..., Kv + 1], the last of which is the sum of the weights -> their means [..., Kv]."""
    weight = total[..., -1:]
    return total[..., :-1] / weight.masked_fill(weight == 0, 1.0)  # no visible key: 0 / 1


def _present(request: AttentionRequest) -> Tensor:
    """`[B or 1, 1, S, 1]`: 1 where a key exists, whatever the query; for all queries it would be `[T, S]`."""
    rest = mask_lowering.without_causal(request.mask)
    q, k = request.points()
    visible = rest.visible(Points(q.position[..., -1:, :], per_row=q.per_row), k)[..., -1:, :]
    if request.k_pos is not None:
        visible = visible & (k.position >= 0)
    present: Tensor = visible.mT.to(request.precision)
    return present


def running(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each of q `[..., T, K]` (the last T of max(T, S) positions) over the keys up to it: pairs within a chunk, a
    running sum of `kᵀ v` before it."""
    t, s = q.shape[-2], k.shape[-2]
    length = max(t, s)
    size = min(CHUNK, length)
    n = -(-length // size)

    def chunks(x: Tensor) -> Tensor:
        front = length - x.shape[-2]
        x = F.pad(x, (0, 0, front, n * size - length))
        return x.reshape(*x.shape[:-2], n, size, x.shape[-1])

    q, k, v = chunks(q), chunks(k), chunks(v)
    out = (q @ k.mT).tril() @ v
    if n > 1:
        states = (k.mT @ v).cumsum(-3)
        out = out + q @ F.pad(states, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    return out.flatten(-3, -2)[..., length - t : length, :]
