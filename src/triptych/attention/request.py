"""The request of one attention call: sizes, mask, scale and positions, without q, k and v; all kernels read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.arguments import checked, number
from triptych.errors import InputError
from triptych.ops.noise import Noise
from triptych.spec.masks import Dense, Full, Mask, Points
from . import mask_lowering
from .rows import Rows

Runner = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""A kernel prepared for one request: `runner(q, k, v, bias, sinks)` gives `[B, H, T, Kv]`."""


QueryArray = Float[Tensor, "B H T K"] | Float[Tensor, "T K"] | Float[Tensor, " K"]
KeyArray = Float[Tensor, "B G S K"] | Float[Tensor, "S K"]
ValueArray = Float[Tensor, "B G S Kv"] | Float[Tensor, "S Kv"]
OutputArray = Float[Tensor, "B H T Kv"] | Float[Tensor, "T Kv"] | Float[Tensor, " Kv"]
ScoreArray = Float[Tensor, "B H T S"] | Float[Tensor, "T S"] | Float[Tensor, " S"]
"""Arguments and results of attention: of B rows, of one head of one row, and of one query of it."""

Value = TypeVar("Value")
Sized = TypeVar("Sized", bound="Heads")


class CachedValue(Generic[Value]):
    """A property that is computed once.  Python's own takes a lock, which torch.compile cannot trace."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute, self.name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, request: None, owner: type) -> CachedValue[Value]: ...
    @overload
    def __get__(self, request: object, owner: type) -> Value: ...
    def __get__(self, request: object | None, owner: type) -> Value | CachedValue[Value]:
        if request is None:
            return self
        value = self.compute(request)
        request.__dict__[self.name] = value
        return value


ScoreBias = Callable[[Tensor, Tensor], Tensor]
"""`bias(q_pos, k_pos)`, of positions `[T]`, `[S]` or `[B, T]`, `[B, S]`, gives what broadcasts to `[B, H, T, S]`."""

ContentBias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`bias(q, k, placed)`, of q `[B, H, T, K]`, k `[B, G, S, K]` and what a `ScoreBias` gave for their positions, gives
what is added to the scores `[B, H, T, S]`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Heads:
    """The numbers of an attention part that its plan depends on.

    scale    of the dot products; 1/sqrt(width) when None.
    sinks    one logit a head takes its share of the softmax.
    learns   a gradient will be asked for.
    crosses  the keys are those of an encoder's output.
    random   where dropout draws from; torch's global generator when None.
    """

    heads: int
    groups: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    learns: bool = False
    crosses: bool = False
    random: Noise | None = None

    @classmethod
    def of(cls: type[Sized], q: Tensor, k: Tensor, v: Tensor, **numbers: Any) -> Sized:
        """With the sizes, the dtype and the device of q [., H, ..., K], k [., G, ..., K] and v [., G, ..., Kv]."""
        return cls(
            heads=q.shape[1], groups=k.shape[1], width=q.shape[-1], value_width=v.shape[-1], dtype=q.dtype,
            device=q.device, **numbers,
        )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionRequest(Heads):
    """Attention of q `[B, H, T, K]` over k `[B, G, S, K]` and v `[B, G, S, Kv]`; head h reads group `h * G // H`.

    rows, queries, keys   B, T and S; H, G, K and Kv are those of `Heads`.
    mask       simplified for these sizes (`mask_lowering.simplify`).
    biased     a bias `[B or 1, H or 1, T or 1, S or 1]` is added to the scores; `bias_learns`: it needs a gradient.
    q_pos      absolute positions, `[T]` or `[B, T]` (keys `[S]`, `[B, S]`); None is the default, keys at 0..S-1 and
               queries at the last T of them.  A key at a negative position is an empty slot.
    q_doc      document of each query and key, in the same shapes, where the mask asks for them.
    """

    rows: int
    queries: int
    keys: int
    scale: float
    mask: Mask = mask_lowering.FULL
    biased: bool = False
    bias_learns: bool = False
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    q_doc: Tensor | None = None
    k_doc: Tensor | None = None

    @property
    def aligned(self) -> bool:
        """Positions are the default, so a kernel may reason about them without reading a tensor."""
        return self.q_pos is None and self.k_pos is None

    @CachedValue
    def precision(self) -> torch.dtype:
        """The dtype of softmax: fp32, or fp64 for fp64 input."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def points(self) -> tuple[Points, Points]:
        """The positions that masks compare: of queries `[., 1, T, 1]` and of keys `[., 1, 1, S]`.  Where none were
        given, the T queries are the last T of the S keys."""
        number = partial(mask_lowering.per_row, self.rows, self.device)
        index = torch.arange(self.keys, device=self.device)
        q_pos = self.q_pos
        if q_pos is None:
            q_pos = torch.arange(self.keys - self.queries, self.keys, device=self.device)
        k_pos = index if self.k_pos is None else self.k_pos
        q_doc = None if self.q_doc is None else as_column(self.q_doc)
        k_doc = None if self.k_doc is None else as_line(self.k_doc)
        return (
            Points(as_column(q_pos), document=q_doc, per_row=number),
            Points(as_line(k_pos), index=as_line(index), document=k_doc, per_row=number),
        )

    @CachedValue
    def visible(self) -> Tensor | None:
        """The mask as booleans that broadcast to `[B, H, T, S]`, true where visible; None when everything is.

        Masks that speak of keys alone keep one row for all queries.
        """
        if isinstance(self.mask, Full) and self.k_pos is None:
            return None
        q, k = self.points()
        if mask_lowering.only_keys(self.mask):
            q = Points(q.position[..., :1, :], per_row=q.per_row)
        visible: Tensor = self.mask.visible(q, k)
        if self.k_pos is not None:
            visible = visible & (k.position >= 0)
        return visible

    @CachedValue
    def hidden(self) -> Tensor | None:
        """The complement of `visible`."""
        return None if self.visible is None else ~self.visible


class Tensors(NamedTuple):
    """The arguments of a runner."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


def fits(x: Tensor, shape: tuple[int, ...]) -> bool:
    """`x` broadcasts to `shape`, dimension by dimension."""
    return x.dim() == len(shape) and all(size in (1, full) for size, full in zip(x.shape, shape, strict=True))


def as_column(x: Tensor) -> Tensor:
    """`[T]` or `[B, T]` as `[., 1, T, 1]`."""
    return (x if x.dim() == 2 else x[None])[:, None, :, None]


def as_line(x: Tensor) -> Tensor:
    """`[S]` or `[B, S]` as `[., 1, 1, S]`."""
    return (x if x.dim() == 2 else x[None])[:, None, None, :]


@checked
def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_doc: Tensor | None = None,
    k_doc: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[AttentionRequest, Tensors, Callable[[Tensor], Tensor]]:
    """The request, the tensors of it in four dimensions, and how to give the output the shape of the input.

    Accepts `[B, H, T, K]`, one head of one row `[T, K]`, or one query `[K]` over keys `[S, K]`.

    Raises InputError for arrays and lists in place of tensors, when shapes, dtypes or devices do not fit together, and
    when documents and a mask that compares them do not come together.
    """
    k_doc = q_doc if k_doc is None else k_doc
    every = {"q_pos": q_pos, "k_pos": k_pos, "q_doc": q_doc, "k_doc": k_doc}
    labels: dict[str, Any] = {name: label for name, label in every.items() if label is not None}
    _check_tensors(q=q, k=k, v=v, bias=bias, sinks=sinks, **labels)
    lacking = {1: 3, 2: 2}.get(q.dim(), 0)  # dimensions
    q = q[(None,) * lacking] if lacking else q
    if k.dim() == 2 and v.dim() == 2:
        k, v = k[None, None], v[None, None]
    _check(q, k, v, sinks)
    _check_numbers(scale, softcap, dropout, torch.finfo(torch.promote_types(q.dtype, torch.float32)))
    scores = (*q.shape[:3], k.shape[2])
    if bias is not None:
        bias = _fit_bias(bias, scores)
    adopted = mask_lowering.adopt(mask, q.device)
    labels = _labels(q, k, **labels)
    aligned = q_pos is k_pos is None
    if aligned and scores[2] > scores[3] and mask_lowering.reads_positions(adopted):
        raise InputError(
            f"{scores[2]} queries and {scores[3]} keys: by default queries are the last of the keys, so the mask would "
            "leave some without any; give their positions, q_pos and k_pos"
        )
    for leaf in mask_lowering.leaves(adopted):
        if isinstance(leaf, Dense) and not fits(leaf.array, scores):
            raise InputError(f"mask of shape {list(leaf.array.shape)} does not fit scores [B,H,T,S] {list(scores)}")
    mask_lowering.check_documents(adopted, q_doc=q_doc is not None, k_doc=k_doc is not None)
    tensors = Tensors(q, k, v, bias, sinks)
    request = AttentionRequest.of(
        q, k, v, rows=q.shape[0], queries=q.shape[2], keys=k.shape[2],
        scale=1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        mask=mask_lowering.simplify(adopted, q.shape[2], k.shape[2], aligned=aligned),
        softcap=softcap, biased=bias is not None, bias_learns=bias is not None and bias.requires_grad,
        sinks=sinks is not None, dropout=dropout, **labels,
        learns=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
    )  # fmt: skip
    return request, tensors, lambda out: out[(0,) * lacking] if lacking else out


def _check_tensors(q: Tensor, **arguments: object) -> None:
    """Raise InputError for an argument that is no tensor (None where it may be left out)."""
    for name, value in {"q": q, **arguments}.items():
        if not isinstance(value, Tensor) and (value is not None or name in ("q", "k", "v")):
            make = "torch.from_numpy" if type(value).__module__ == "numpy" else "torch.tensor"
            raise InputError(f"{name} is a {type(value).__name__}, not a tensor; give {make}({name})")
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            kind = "nested" if value.is_nested else f"{value.layout}"
            raise InputError(f"{name} is a {kind} tensor; give a dense one: {name}.to_dense(), or padded")
        if isinstance(value, Tensor) and value.device != q.device:
            raise InputError(f"{name} is on {value.device} and q on {q.device}: give one device")


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(f"{shapes}: give q [B,H,T,K], k [B,G,S,K], v [B,G,S,Kv], or [T,K] with [S,K], [S,Kv]")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(f"{shapes}: k and v must agree in B, G and S, and q and k in B and K")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} heads cannot share {k.shape[1]} key/value groups: H must be a multiple of G")
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point and q.dtype.itemsize > 1):
        raise InputError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}: give one floating dtype of 16 bits or more")
    if sinks is not None and (sinks.shape != (q.shape[1],) or not sinks.is_floating_point()):
        raise InputError(f"sinks {sinks.dtype} {list(sinks.shape)}: give one logit for each head, [{q.shape[1]}]")
    if sinks is not None and sinks.device.type == "cpu" and not (sinks < torch.inf).all():
        raise InputError("sinks hold NaN or infinity; give finite logits, or -inf for a head without a sink")
    if not q.shape[3]:
        raise InputError(f"{shapes}: the heads have no width; K must be at least 1")


def _check_numbers(scale: float | None, softcap: float | None, dropout: float, of: torch.finfo) -> None:
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout {dropout} must be a probability in [0, 1)")
    if scale is not None:
        number("scale", scale, of.min, of.max, f"a finite number of {of.dtype}")
    if softcap is not None:
        number("softcap", softcap, of.tiny, of.max, f"a finite number of {of.dtype} above 0")


def _fit_bias(bias: Tensor, shape: tuple[int, ...]) -> Tensor:
    in_four = bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias
    if not fits(in_four, shape) or not bias.is_floating_point():
        raise InputError(f"bias {bias.dtype} {list(bias.shape)} cannot be added to scores [B,H,T,S] {list(shape)}")
    return in_four


def _labels(q: Tensor, k: Tensor, **labels: Tensor) -> dict[str, Any]:
    """Positions and documents as int64, whose differences do not overflow."""
    for name, label in labels.items():
        length = q.shape[2] if name.startswith("q") else k.shape[2]
        if label.shape not in ((length,), (1, length), (q.shape[0], length)):
            raise InputError(f"{name} {list(label.shape)}: give [{length}] or [{q.shape[0]}, {length}]")
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise InputError(f"{name} is {label.dtype}; give integers")
        labels[name] = label.long()
    if "k_pos" in labels and labels["k_pos"].numel() and (labels["k_pos"] < 0).all():
        raise InputError("all of k_pos is negative, which are empty slots, so that no query sees anything")
    return labels


def placed_request(
    rows: Rows, keys: int, mask: Mask, heads: Heads, bias: ScoreBias | None, k_pos: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[AttentionRequest, Tensor | None]:  # fmt: skip
    """The request of `rows`, padded to the longest, for so many keys each, at positions k_pos `[b, S]`; and its bias.
    Positions stay implicit where they are the default ones or nothing reads them."""
    past, device, queries = rows.past, heads.device, rows.longest
    explicit = k_pos is not None  # the default: keys at 0..S-1 and queries at the last T of them
    if not explicit and mask_lowering.reads_positions(mask):
        explicit = set(past) != {keys - queries}
    q_pos = consecutive_positions(past, queries, device) if explicit or bias is not None else None
    placed = None
    if bias is not None and q_pos is not None:
        at = torch.arange(keys, device=device) if k_pos is None else k_pos
        same = q_pos.dim() == at.dim()
        placed = bias(q_pos, at) if same else bias(q_pos.expand(len(past), -1), at.expand(len(past), -1))
    shared = vars(heads) | {"scale": 1.0 / math.sqrt(heads.width) if heads.scale is None else heads.scale}
    request = AttentionRequest(
        **shared, rows=len(rows), queries=queries, keys=keys,
        mask=mask_lowering.simplify(mask, queries, keys, aligned=not explicit), biased=bias is not None,
        bias_learns=placed is not None and placed.requires_grad, q_pos=q_pos if explicit else None, k_pos=k_pos,
        q_doc=documents, k_doc=documents,
    )  # fmt: skip
    return request, placed


def consecutive_positions(first: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Positions `[length]` from a common first one, `[b, length]` where the first ones differ."""
    with torch.inference_mode(False):  # so that training may use what a sampling step computed
        line = torch.arange(length, device=device)
        if len(set(first)) == 1:
            return line + first[0]
        return line + torch.tensor(first, device=device)[:, None]
