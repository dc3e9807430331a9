"""What one attention call asks for, in one normal form that every path reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from triptych.attention import lowering
from triptych.errors import InputError
from triptych.spec.masks import Mask, Points


@dataclass(frozen=True, eq=False)
class Request:
    """Shapes: q `[B, H, T, K]`, k `[B, G, S, K]`, v `[B, G, S, Kv]`; head h reads group `h * G // H`.

    Positions are `[T]` or `[B, T]` (keys `[S]`, `[B, S]`); None is the default, keys at 0..S-1 and queries at the
    last T of them.  A key at a negative position is an empty slot.  `mask` is already simplified for these sizes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Mask
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    q_doc: Tensor | None = None
    k_doc: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.k.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def aligned(self) -> bool:
        """Positions are the default, so a path may reason about them without reading a tensor."""
        return self.q_pos is None and self.k_pos is None

    @property
    def learns(self) -> bool:
        """A gradient will be asked for."""
        given = (self.q, self.k, self.v, self.bias, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)

    @property
    def precision(self) -> torch.dtype:
        """Where softmax happens: fp32, or fp64 for fp64 input."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def points(self) -> tuple[Points, Points]:
        """Queries `[., 1, T, 1]` and keys `[., 1, 1, S]` as the mask algebra sees them."""
        device, number = self.q.device, lowering.per_row(self.rows, self.q.device)
        index = torch.arange(self.keys, device=device)
        q_pos = self.q_pos
        if q_pos is None:
            q_pos = torch.arange(self.keys - self.queries, self.keys, device=device)
        k_pos = index if self.k_pos is None else self.k_pos
        return (
            Points(_column(q_pos), document=_column(self.q_doc), per_row=number),
            Points(_line(k_pos), index=_line(index), document=_line(self.k_doc), per_row=number),
        )

    @cached_property
    def visible(self) -> Tensor | None:
        """The mask as booleans that broadcast to `[B, H, T, S]`, true where visible; None when all is.

        Masks that speak of keys alone keep one row for all queries.
        """
        if lowering.is_full(self.mask) and self.k_pos is None:
            return None
        q, k = self.points()
        if lowering.only_keys(self.mask):
            q = Points(q.position[..., :1, :], per_row=q.per_row)
        seen: Tensor = self.mask.visible(q, k)
        if self.k_pos is not None:
            seen = seen & (k.position >= 0)
        scores = (self.rows, self.heads, self.queries, self.keys)
        if not fits(seen, scores):
            raise InputError(f"mask of shape {list(seen.shape)} does not fit scores [B,H,T,S] {list(scores)}")
        return seen


def fits(x: Tensor, shape: tuple[int, ...]) -> bool:
    """`x` broadcasts to `shape`, dimension by dimension."""
    return x.dim() == len(shape) and all(size in (1, whole) for size, whole in zip(x.shape, shape, strict=True))


def _by_row(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


def _column(x: Tensor | None) -> Any:
    """`[T]` or `[B, T]` as `[., 1, T, 1]`."""
    return None if x is None else _by_row(x)[:, None, :, None]


def _line(x: Tensor | None) -> Any:
    """`[S]` or `[B, S]` as `[., 1, 1, S]`."""
    return None if x is None else _by_row(x)[:, None, None, :]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Request, Callable[[Tensor], Tensor]]:
    """The request, and how to give its output the shape of the input.

    Accepts `[B, H, T, K]`, one head of one row `[T, K]`, or one query `[K]` over keys `[S, K]`.

    Raises InputError when shapes, dtypes or devices do not fit together.
    """
    restore: Callable[[Tensor], Tensor] = _same
    if q.dim() == 1:
        q, restore = q[None, None, None], lambda out: out[0, 0, 0]
    elif q.dim() == 2:
        q, restore = q[None, None], lambda out: out[0, 0]
    if k.dim() == 2 and v.dim() == 2:
        k, v = k[None, None], v[None, None]
    _check(q, k, v, sinks, dropout)
    if bias is not None:
        bias = _fit_bias(bias, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if q_doc is not None and k_doc is None:
        k_doc = q_doc
    if (q_doc is None) != (k_doc is None):
        raise InputError("k_doc without q_doc: same_document compares both")
    _check_labels(q, k, q_pos=q_pos, k_pos=k_pos, q_doc=q_doc, k_doc=k_doc)
    simple = lowering.simplify(
        lowering.adopt(mask, q.device),
        q.shape[2],
        k.shape[2],
        documents=q_doc is not None,
        aligned=q_pos is None and k_pos is None,
    )
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    request = Request(q, k, v, scale, simple, softcap, bias, sinks, dropout, q_pos, k_pos, q_doc, k_doc)
    return request, restore


def _same(out: Tensor) -> Tensor:
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, dropout: float) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(f"{shapes}: give q [B,H,T,K], k [B,G,S,K], v [B,G,S,Kv], or [T,K] with [S,K], [S,Kv]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"{shapes}: k and v share B, G, S; q and k share B and K")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} heads cannot share {k.shape[1]} key/value groups: H must be a multiple of G")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: give one floating dtype")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k, v are on {q.device}, {k.device}, {v.device}: give one device")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise InputError(f"sinks {list(sinks.shape)}: one logit a head, [{q.shape[1]}]")
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout {dropout}: a probability in [0, 1)")


def _fit_bias(bias: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    whole = bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias
    if not fits(whole, shape) or not bias.is_floating_point():
        raise InputError(f"bias {bias.dtype} {list(bias.shape)} cannot be added to scores [B,H,T,S] {list(shape)}")
    return whole


def _check_labels(q: Tensor, k: Tensor, **labels: Tensor | None) -> None:
    for name, label in labels.items():
        if label is None:
            continue
        length = q.shape[2] if name.startswith("q") else k.shape[2]
        if label.shape not in ((length,), (1, length), (q.shape[0], length)):
            raise InputError(f"{name} {list(label.shape)}: give [{length}] or [{q.shape[0]}, {length}]")
