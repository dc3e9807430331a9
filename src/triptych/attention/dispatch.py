"""`attend`, the choice of the kernel that serves a request, and the reasons why the others cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.arguments import checked
from triptych.errors import InputError, nearest
from triptych.spec.masks import Full, Mask
from . import kernel_dense, kernel_native, kernel_sparse, reference
from .request import (
    AttentionRequest,
    KeyArray,
    OutputArray,
    QueryArray,
    Runner,
    Tensors,
    ValueArray,
    prepare,
)

SHORT = 1 << 11  # query-key pairs up to which an explicit pattern beats the fused kernel on a CPU
SHORT_HALF = 1 << 16  # the same in half precision, where the fused backward is slow on short rows
LARGE = 1 << 24  # score elements above which building all of them is logged


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention: the reasons why it cannot serve a request, and what runs it."""

    name: str
    cannot: Callable[[AttentionRequest], list[str]]
    plan: Callable[[AttentionRequest], Runner]


def _serves_all(request: AttentionRequest) -> list[str]:
    """Nothing speaks against it."""
    return []


def _plan_native(request: AttentionRequest) -> Runner:
    return kernel_native.plan_native(request, choose_of_torch(request).plan(request))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("window", kernel_sparse.window_cannot, kernel_sparse.plan_window),
        Kernel("block", kernel_sparse.block_cannot, kernel_sparse.plan_block),
        Kernel("native", kernel_native.native_cannot, _plan_native),
        Kernel("flash", kernel_dense.flash_cannot, kernel_dense.plan_flash),
        Kernel("materialized", _serves_all, kernel_dense.plan_materialized),
        Kernel("reference", _serves_all, lambda request: partial(reference.run, request)),
    )
}


@checked
def attend(
    q: QueryArray,
    k: KeyArray,
    v: ValueArray,
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
) -> OutputArray:
    """Scaled dot-product attention, `softmax(q kᵀ · scale) v` (Vaswani et al. 2017), on the fastest exact path.

    Head h reads key/value group `h * G // H`.  Order: scale, softcap, bias, mask, sinks, softmax in fp32 or better,
    dropout.  A query that sees no key gives exactly 0.  q is [B, H, T, K], k [B, G, S, K] and v [B, G, S, Kv], with
    H a multiple of G; the result is [B, H, T, Kv].  Without rows and heads they are [T, K] (or [K]), [S, K] and
    [S, Kv].

    mask      which keys each query sees: masks combined with & and |, booleans true where visible, or None: all keys.
    bias      added to the scores, of a shape that broadcasts to [B, H, T, S]; may contain -inf.
    scale     of the scores; 1/sqrt(K) by default.
    softcap   scores become `softcap * tanh(scores / softcap)` (Gemma 2).
    sinks     [H], one logit for each head that takes part in the softmax and has no value.
    q_pos     absolute positions, [T] or [B, T]; by default the queries are the last T of the S keys.
    k_pos     [S] or [B, S]; by default 0..S-1.  A key at a negative position is an empty slot that no query sees.
    q_doc     document of each query (and of each key, unless k_doc says otherwise), for `same_document()`.
    dropout   probability of dropping a weight.
    path      "auto", the fastest that can compute the request; or "window", "block", "native", "flash", "materialized"
              or "reference".

    Raises InputError for shapes that do not fit, more queries than keys without q_pos and k_pos under a mask that
    compares positions, an unknown path, or a named path that cannot serve the request.
    """
    request, tensors, restore = prepare(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, q_pos=q_pos, k_pos=k_pos, q_doc=q_doc,
        k_doc=k_doc, dropout=dropout,
    )  # fmt: skip
    return restore(run(request, tensors, path))


def run(request: AttentionRequest, tensors: Tensors, path: str = "auto") -> Tensor:
    """`[B, H, T, Kv]` on the named kernel, or on the one that `choose` takes."""
    if request.keys == 0 or tensors.q.numel() == 0:
        return tensors.q.new_zeros(*tensors.q.shape[:3], request.value_width)
    if path == "auto":
        return choose(request).plan(request)(*tensors)
    if path not in KERNELS:
        raise InputError(f"path {path!r} is not one of auto, {', '.join(KERNELS)}{nearest(path, KERNELS)}")
    reasons = KERNELS[path].cannot(request)
    if reasons:
        raise InputError(f"path {path!r} cannot serve this request: {'; '.join(reasons)}")
    return KERNELS[path].plan(request)(*tensors)


def choose(request: AttentionRequest) -> Kernel:
    """The kernel that `auto` takes: a sparse one where it saves at least half of the work, the native one in a training
    step on a CPU, else the one of torch's."""
    if not isinstance(request.mask, Full):
        for name, saves in (("window", kernel_sparse.window_saves), ("block", kernel_sparse.block_saves)):
            if not KERNELS[name].cannot(request) and saves(request):
                return KERNELS[name]
    if kernel_native.native_saves(request) and not kernel_native.native_cannot(request):
        return KERNELS["native"]
    return choose_of_torch(request)


def choose_of_torch(request: AttentionRequest) -> Kernel:
    """Of the dense kernels of torch: an explicit pattern for short rows on a CPU (not for one query, which the fused
    kernel serves in one call), the fused kernel where it can, and an explicit pattern otherwise."""
    reasons = kernel_dense.flash_cannot(request)
    short = SHORT_HALF if request.dtype.itemsize == 2 and request.learns else SHORT
    if request.device.type == "cpu" and request.queries * request.keys <= short and (request.queries > 1 or reasons):
        return KERNELS["materialized"]
    if not reasons:
        return KERNELS["flash"]
    if request.rows * request.heads * request.queries * request.keys > LARGE:
        _log_once("; ".join(reasons))
    return KERNELS["materialized"]


def why(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> dict[str, list[str]]:
    """For every kernel, the reasons why it cannot serve this call; an empty list where it can."""
    request, _, _ = prepare(q, k, v, **options)
    return {name: kernel.cannot(request) for name, kernel in KERNELS.items()}


@lru_cache(maxsize=64)
def _log_once(reasons: str) -> None:
    logging.getLogger("triptych").info("attention builds its full T x S pattern, since flash cannot: %s", reasons)
