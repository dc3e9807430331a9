"""Torch's fused kernel, called so that it stays fused and sees as little of a mask as possible.

What it must not be given (it falls back to a `[T, S]` product in silence): on a CPU dropout, a mask that learns, a
mask of three dimensions, values narrower or wider than keys; anywhere a last dimension that is not contiguous.
`is_causal` there is top-left aligned, so it is right for T == S alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.attention import lowering
from triptych.attention.request import Request


def cannot(request: Request) -> list[str]:
    reasons = []
    cpu = request.q.device.type == "cpu"
    if request.softcap is not None:
        reasons.append("softcap: the kernel has no place for it")
    if request.dropout and cpu:
        reasons.append("dropout on a CPU: the kernel would fall back to a T x S product")
    if request.bias is not None and request.bias.requires_grad and request.learns:
        reasons.append("a bias that learns: the kernel gives it no gradient")
    if request.sinks is not None and (request.learns or not cpu or request.dropout):
        reasons.append("sinks need the kernel's log-sum-exp, which a CPU gives, without a gradient")
    return reasons


def run(request: Request) -> Tensor:
    q, k, v = _even(request)
    width = request.v.shape[3]
    if request.sinks is not None:
        out, lse = _with_lse(request, q, k, v)
        keep = torch.sigmoid(lse - request.sinks.to(lse.dtype)[:, None])  # softmax's share beside one more logit
        return (out * keep[..., None]).to(q.dtype)[..., :width]
    if _is_chunk(request):
        return _chunk(request, q, k, v)[..., :width]
    causal, mask = _lowered(request)
    grouped = request.heads != request.groups
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=request.scale, dropout_p=request.dropout, enable_gqa=grouped
    )
    return out[..., :width]


def _even(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of one width, the narrower filled with zeros, last dimension contiguous."""
    q, k, v = request.q, request.k, request.v
    lack = k.shape[3] - v.shape[3]
    if lack > 0:
        v = F.pad(v, (0, lack))
    elif lack < 0:
        q, k = F.pad(q, (0, -lack)), F.pad(k, (0, -lack))
    return _dense_rows(q), _dense_rows(k), _dense_rows(v)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _lowered(request: Request) -> tuple[bool, Tensor | None]:
    """`(is_causal, mask)`."""
    square = request.aligned and request.queries == request.keys
    if square and lowering.is_causal(request.mask) and request.bias is None:
        return True, None
    visible = request.visible
    if request.bias is None:
        if visible is not None and visible.shape[2] != request.queries:
            visible = visible.expand(-1, -1, request.queries, -1)  # stride 0: still one row in memory
        return False, visible
    bias = request.bias.to(request.q.dtype)
    if visible is not None:
        bias = bias.masked_fill(~visible, -torch.inf)
    return False, bias


def _is_chunk(request: Request) -> bool:
    """Queries of a causal row whose earlier keys are already there, with no gradient asked."""
    return (
        request.aligned
        and 1 < request.queries < request.keys
        and lowering.is_causal(request.mask)
        and request.bias is None
        and not request.learns
        and request.q.device.type == "cpu"
        and not request.dropout
    )


def _chunk(request: Request, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Past keys without a mask, the chunk's own with `is_causal`, joined exactly by their log-sum-exps."""
    return _merged(request, q, k, v)[0].to(q.dtype)


def _merged(request: Request, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    past = request.keys - request.queries
    old, old_lse = _kernel(q, k[:, :, :past], v[:, :, :past], request.scale)
    new, new_lse = _kernel(q, k[:, :, past:], v[:, :, past:], request.scale, causal=True)
    lse = torch.logaddexp(old_lse, new_lse)
    old_share, new_share = (old_lse - lse).exp()[..., None], (new_lse - lse).exp()[..., None]
    return old * old_share + new * new_share, lse


def _with_lse(request: Request, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if _is_chunk(request):
        return _merged(request, q, k, v)
    causal, mask = _lowered(request)
    return _kernel(q, k, v, request.scale, causal=causal, mask=mask)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(out [B, H, T, Kv], log-sum-exp [B, H, T])`.  The kernel writes an lse of 0 for a query that sees nothing; its
    output is 0 there, so no share of it can show."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse
