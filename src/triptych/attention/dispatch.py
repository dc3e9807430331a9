"""Which path serves a request, and why the others do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.attention import block, flash, materialized, reference, window
from triptych.attention.request import Request, prepare
from triptych.errors import InputError, nearest
from triptych.spec.masks import Mask

SHORT = 1 << 11  # query-key pairs up to which an explicit pattern beats the fused kernel on a CPU
SHORT_HALF = 1 << 16  # the same in half precision, where the fused backward is slow on short rows
LARGE = 1 << 24  # score elements above which building them is worth a word


@dataclass(frozen=True)
class Path:
    """One way to compute attention: reasons why it cannot serve a request, and the computation."""

    name: str
    cannot: Callable[[Request], list[str]]
    run: Callable[[Request], Tensor]


PATHS = {
    path.name: path
    for path in (
        Path("window", window.cannot, window.run),
        Path("block", block.cannot, block.run),
        Path("flash", flash.cannot, flash.run),
        Path("materialized", materialized.cannot, materialized.run),
        Path("reference", lambda request: [], reference.run),
    )
}


def attend(
    q: Float[Tensor, "B H T K"] | Float[Tensor, "T K"] | Float[Tensor, " K"],
    k: Float[Tensor, "B G S K"] | Float[Tensor, "S K"],
    v: Float[Tensor, "B G S Kv"] | Float[Tensor, "S Kv"],
    *,
    mask: Mask | Bool[Tensor, ...] | None = None,
    bias: Float[Tensor, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    q_pos: Int[Tensor, "... T"] | None = None,
    k_pos: Int[Tensor, "... S"] | None = None,
    q_doc: Int[Tensor, "... T"] | None = None,
    k_doc: Int[Tensor, "... S"] | None = None,
    dropout: float = 0.0,
    path: str = "auto",
) -> Float[Tensor, "B H T Kv"] | Float[Tensor, "T Kv"] | Float[Tensor, " Kv"]:
    """Scaled dot-product attention, `softmax(q kᵀ · scale) v` (Vaswani et al. 2017), on the fastest exact path.

    Head h reads key/value group `h * G // H`.  Order: scale, softcap, bias, mask, sinks, softmax in fp32 or better,
    dropout.  A query with nothing to see gives exactly 0.

    mask      what each query sees: an expression of `triptych.spec.masks`, booleans true where visible, or None: all.
    bias      added to the scores, broadcast to [B, H, T, S]; may hold -inf.
    scale     1/sqrt(K) unless given.
    softcap   scores become `softcap * tanh(scores / softcap)` (Gemma 2).
    sinks     one logit a head that takes its share of the softmax and gives nothing.
    q_pos     absolute positions, [T] or [B, T]; by default the queries are the last T of the S keys.
    k_pos     [S] or [B, S]; by default 0..S-1.  A negative one is an empty slot that nobody sees.
    q_doc     document of each query (and of each key, unless k_doc says otherwise), for `same_document()`.
    dropout   probability of dropping a weight.
    path      "auto", or one of window, block, flash, materialized, reference.

    Raises InputError for shapes that do not fit, an unknown path, or a named path that cannot serve the request.
    """
    request, restore = prepare(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        q_pos=q_pos,
        k_pos=k_pos,
        q_doc=q_doc,
        k_doc=k_doc,
        dropout=dropout,
    )
    return restore(run(request, path))


def run(request: Request, path: str = "auto") -> Tensor:
    """`[B, H, T, Kv]` on the named path, or on the first that can."""
    if request.keys == 0 or request.q.numel() == 0:
        return request.q.new_zeros(*request.q.shape[:3], request.v.shape[3])
    if path == "auto":
        return choose(request).run(request)
    if path not in PATHS:
        raise InputError(f"path {path!r}: know auto, {', '.join(PATHS)}{nearest(path, PATHS)}")
    reasons = PATHS[path].cannot(request)
    if reasons:
        raise InputError(f"path {path!r} cannot serve this request: {'; '.join(reasons)}")
    return PATHS[path].run(request)


def choose(request: Request) -> Path:
    """The path that `auto` takes.  Sparse paths come first where they save at least half of the work."""
    for sparse, saves in ((PATHS["window"], window.saves), (PATHS["block"], block.saves)):
        if not sparse.cannot(request) and saves(request):
            return sparse
    short = SHORT_HALF if request.q.dtype.itemsize == 2 else SHORT
    if request.q.device.type == "cpu" and request.queries * request.keys <= short:
        return PATHS["materialized"]
    reasons = flash.cannot(request)
    if not reasons:
        return PATHS["flash"]
    if request.rows * request.heads * request.queries * request.keys > LARGE:
        _say_once("; ".join(reasons))
    return PATHS["materialized"]


def why(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, list[str]]:
    """For every path, the reasons why it cannot serve this call; an empty list where it can."""
    request, _ = prepare(q, k, v, **options)
    return {name: path.cannot(request) for name, path in PATHS.items()}


@lru_cache(maxsize=64)
def _say_once(reasons: str) -> None:
    logging.getLogger("triptych").info("attention builds its full T x S pattern, since flash cannot: %s", reasons)
