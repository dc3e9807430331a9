"""Torch's fused kernel, called so that it stays fused and sees as little of a mask as possible.

What it must not be given (it silently falls back to a `[T, S]` product): on a CPU dropout, a mask that learns, a
mask of three dimensions, values narrower or wider than keys; anywhere a last dimension that is not contiguous.
`is_causal` there is top-left aligned, so it is right for T == S alone.

On a CPU it gives 0 to a query whose scores are all NaN, where there are fewer keys than a register holds numbers and
neither a mask nor a bias.  Such a call gets a mask that hides nothing more: the same bits otherwise, and NaN stays NaN.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention import mask_lowering
from triptych.attention.request import AttentionRequest, Runner

WIDEST_REGISTER = 64  # bytes, of any processor that torch is compiled for


def cannot(request: AttentionRequest) -> list[str]:
    reasons = []
    cpu = request.device.type == "cpu"
    if request.softcap is not None:
        reasons.append("softcap: the kernel has no place for it")
    if request.dropout and (cpu or request.random is not None):
        reasons.append("dropout on a CPU or from a generator: the kernel would fall back to a T x S product")
    if request.bias_learns and request.learns:
        reasons.append("a bias that learns: the kernel gives it no gradient")
    if request.sinks and (request.learns or not cpu or request.dropout):
        reasons.append("sinks need the kernel's log-sum-exp, which a CPU gives, without a gradient")
    return reasons


def plan(request: AttentionRequest) -> Runner:
    """The cheapest call of the kernel that serves the request, everything about it decided."""
    if request.sinks:
        return partial(_with_sinks, request)
    if _is_chunk(request):
        return partial(_chunk, request)
    causal, visible = _lowered(request)
    even = request.width == request.value_width
    if even and request.queries == 1 and not request.biased and (visible is None or visible.shape[1] == 1):
        return partial(_one_query, request, visible)
    return partial(_sdpa if even else _uneven, request, causal, visible)


def _sdpa(
    request: AttentionRequest, causal: bool, visible: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if bias is not None:
        bias = bias.to(q.dtype)
        visible = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
    if visible is None and _swallows_nan(k):
        visible, causal = _all_visible(q, k, causal), False
    return F.scaled_dot_product_attention(
        q if q.stride(3) == 1 else q.contiguous(),
        k if k.stride(3) == 1 else k.contiguous(),
        v if v.stride(3) == 1 else v.contiguous(),
        attn_mask=visible,
        is_causal=causal,
        scale=request.scale,
        dropout_p=request.dropout,
        enable_gqa=request.heads != request.groups,
    )


def _one_query(
    request: AttentionRequest, visible: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: None, sinks: None
) -> Tensor:
    """One query a row: the heads of a group stand side by side as queries, so that each key is read once."""
    q = q.reshape(request.rows, request.groups, request.heads // request.groups, request.width)
    # The condition of `_swallows_nan`, which a step of every layer would call.
    if visible is None and k.shape[2] * max(k.element_size(), 4) < WIDEST_REGISTER and k.is_cpu:
        visible = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool)
    out = F.scaled_dot_product_attention(
        q,
        k if k.stride(3) == 1 else k.contiguous(),
        v if v.stride(3) == 1 else v.contiguous(),
        attn_mask=visible,
        scale=request.scale,
        dropout_p=request.dropout,
    )
    return out.reshape(request.rows, request.heads, 1, request.width)


def _swallows_nan(k: Tensor) -> bool:
    """Whether the kernel, which computes in fp32 or fp64, could give 0 for scores that are NaN without a mask."""
    return k.is_cpu and k.shape[2] * max(k.element_size(), 4) < WIDEST_REGISTER


def _all_visible(q: Tensor, k: Tensor, causal: bool = False) -> Tensor:
    """What `is_causal` says, as booleans `[1, 1, T, S]`."""
    visible = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return visible.tril() if causal else visible


def _uneven(
    request: AttentionRequest, causal: bool, visible: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Keys and values of unlike widths: the narrower filled with zeros."""
    q, k, v = _evened(request, q, k, v)
    return _sdpa(request, causal, visible, q, k, v, bias, sinks)[..., : request.value_width]


def _evened(request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lack = request.width - request.value_width
    return (q, k, F.pad(v, (0, lack))) if lack >= 0 else (F.pad(q, (0, -lack)), F.pad(k, (0, -lack)), v)


def _lowered(request: AttentionRequest) -> tuple[bool, Tensor | None]:
    """`(is_causal, booleans true where visible)`.  With `is_causal` the kernel multiplies its -inf by the scale, which
    must be positive."""
    square = request.aligned and request.queries == request.keys and request.scale > 0
    if square and mask_lowering.is_causal(request.mask) and not request.biased:
        return True, None
    visible = request.visible
    if visible is not None and visible.shape[2] != request.queries:
        visible = visible.expand(-1, -1, request.queries, -1)  # stride 0: still one row in memory
    return False, visible


def _is_chunk(request: AttentionRequest) -> bool:
    """Queries of a causal row whose earlier keys are already there, with no gradient asked."""
    return (
        request.aligned
        and request.scale > 0
        and 1 < request.queries < request.keys
        and mask_lowering.is_causal(request.mask)
        and not request.biased
        and not request.learns
        and request.device.type == "cpu"
        and not request.dropout
    )


def _chunk(
    request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Past keys without a mask, the chunk's own with `is_causal`, joined exactly by their log-sum-exps."""
    q, k, v = _evened(request, q, k, v)
    return _merged(request, q, k, v)[0].to(q.dtype)[..., : request.value_width]


def _merged(request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    past = request.keys - request.queries
    old, old_lse = _kernel(q, k[:, :, :past], v[:, :, :past], request.scale)
    new, new_lse = _kernel(q, k[:, :, past:], v[:, :, past:], request.scale, causal=True)
    lse = torch.logaddexp(old_lse, new_lse)
    old_share, new_share = (old_lse - lse).exp()[..., None], (new_lse - lse).exp()[..., None]
    return old * old_share + new * new_share, lse


def _with_sinks(
    request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Softmax's share beside one more logit a head follows from the log-sum-exp."""
    assert sinks is not None
    q, k, v = _evened(request, q, k, v)
    if _is_chunk(request):
        out, lse = _merged(request, q, k, v)
    else:
        causal, mask = _lowered(request)
        if bias is not None:
            mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, -torch.inf)
        out, lse = _kernel(q, k, v, request.scale, causal=causal, mask=mask)
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * share[..., None]).to(q.dtype)[..., : request.value_width]


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(out [B, H, T, Kv], log-sum-exp [B, H, T])`.  The kernel writes an lse of 0 for a query that sees nothing; its
    output is 0 there, so no share of it can show."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    if mask is None and _swallows_nan(k):
        mask, causal = _all_visible(q, k, causal), False
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse
