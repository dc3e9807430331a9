"""Dense attention by torch's fused kernels, called without a mask where possible, and by an explicit pattern.

What a fused kernel must not be given (it silently falls back to a `[T, S]` product): on a CPU dropout, a mask that
learns, a mask of three dimensions, values narrower or wider than keys; anywhere a last dimension that is not
contiguous.  `is_causal` there is top-left aligned, so it is right for T == S alone.

On a CPU it gives 0 to a query whose scores are all NaN, where there are fewer keys than a register holds numbers and
neither a mask nor a bias.  Such a call gets a mask that hides nothing more: the same bits otherwise, and NaN stays NaN.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych import ops
from triptych.spec.masks import Causal
from . import mask_lowering
from .layer_cache import Store
from .reference import softmax
from .request import AttentionRequest, Runner

WIDEST_REGISTER = 64  # bytes, of any processor that torch is compiled for


def flash_cannot(request: AttentionRequest) -> list[str]:
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


def plan_flash(request: AttentionRequest) -> Runner:
    """The cheapest call of the kernel that serves the request, everything about it decided."""
    if request.sinks or _is_chunk(request):
        return partial(_by_parts, request)
    causal, visible = _lowered(request)
    even = request.width == request.value_width
    if even and request.queries == 1 and not request.biased and (visible is None or visible.shape[1] == 1):
        return partial(_one_query, request, visible, _keys_per_register(request))
    return partial(_sdpa, request, causal, visible)


def _keys_per_register(request: AttentionRequest) -> int:
    """Keys below which the kernel, which computes in fp32 or fp64, could give 0 for scores that are NaN without a mask:
    as many as fill a register."""
    return WIDEST_REGISTER // max(request.dtype.itemsize, 4) if request.device.type == "cpu" else 0


def _sdpa(
    request: AttentionRequest, causal: bool, visible: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    even = request.width == request.value_width
    if not even:
        q, k, v = _evened(request, q, k, v)
    if bias is not None:
        bias = bias.to(q.dtype)
        visible = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
    if visible is None and k.shape[2] < _keys_per_register(request):
        visible, causal = _all_visible(q, k, causal), False
    out = F.scaled_dot_product_attention(
        q if q.stride(3) == 1 else q.contiguous(),
        k if k.stride(3) == 1 else k.contiguous(),
        v if v.stride(3) == 1 else v.contiguous(),
        attn_mask=visible,
        is_causal=causal,
        scale=request.scale,
        dropout_p=request.dropout,
        enable_gqa=request.heads != request.groups,
    )
    return out if even else out[..., : request.value_width]


def _one_query(
    request: AttentionRequest, visible: Tensor | None, too_few: int, q: Tensor, k: Tensor, v: Tensor, bias: None,
    sinks: None,
) -> Tensor:  # fmt: skip
    """One query a row: the heads of a group stand side by side as queries, so that each key is read once."""
    q = q.reshape(request.rows, request.groups, request.heads // request.groups, request.width)
    if visible is None and k.shape[2] < too_few:
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


def _all_visible(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Booleans `[1, 1, T, S]` that hide nothing, or what is not `causal`."""
    visible = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    return visible.tril() if causal else visible


def _evened(request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of unlike widths: the narrower filled with zeros."""
    lack = request.width - request.value_width
    return (q, k, F.pad(v, (0, lack))) if lack >= 0 else (F.pad(q, (0, -lack)), F.pad(k, (0, -lack)), v)


def _lowered(request: AttentionRequest) -> tuple[bool, Tensor | None]:
    """`(is_causal, booleans true where visible)`.  With `is_causal` the kernel multiplies its -inf by the scale, which
    must be positive."""
    square = request.aligned and request.queries == request.keys and request.scale > 0
    if square and isinstance(request.mask, Causal) and not request.biased:
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
        and isinstance(request.mask, Causal)
        and not request.biased
        and not request.learns
        and request.device.type == "cpu"
        and not request.dropout
    )


def _by_parts(
    request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """What the kernel's log-sum-exp joins exactly: in a chunk past keys, without a mask, and its own, with `is_causal`;
    and softmax's share beside one more logit a head."""
    q, k, v = _evened(request, q, k, v)
    if _is_chunk(request):
        past = request.keys - request.queries
        old, old_lse = _kernel(request, q, k[:, :, :past], v[:, :, :past])
        new, new_lse = _kernel(request, q, k[:, :, past:], v[:, :, past:], causal=True)
        lse = torch.logaddexp(old_lse, new_lse)
        out = old * (old_lse - lse).exp()[..., None] + new * (new_lse - lse).exp()[..., None]
    else:
        causal, mask = _lowered(request)
        if bias is not None:
            mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, -torch.inf)
        out, lse = _kernel(request, q, k, v, causal=causal, mask=mask)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])[..., None]
    return out.to(q.dtype)[..., : request.value_width]


def _kernel(
    request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`(out [B, H, T, Kv], log-sum-exp [B, H, T])`.  The kernel writes an lse of 0 for a query that sees nothing; its
    output is 0 there, so no share of it can show."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    if mask is None and k.shape[2] < _keys_per_register(request):
        mask, causal = _all_visible(q, k, causal), False
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=request.scale
    )
    return out, lse


def plan_materialized(request: AttentionRequest) -> Runner:
    """Through an explicit `[T, S]` pattern: for short rows two matrix products beat a fused kernel on a CPU, and what a
    fused kernel cannot express still runs here."""
    return partial(_materialized, request, request.hidden, _empty(request))


def _materialized(
    request: AttentionRequest, hidden: Tensor | None, empty: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """GQA: fold the heads of a group into the query axis, so that keys and values are never repeated."""
    b, h, t, s = request.rows, request.heads, request.queries, request.keys
    together = (b, request.groups, h // request.groups * t)
    q = (q * request.scale).reshape(*together, -1)
    scores = (q @ k.mT).view(b, h, t, s).to(request.precision)
    if request.softcap is not None:
        scores = torch.tanh(scores / request.softcap) * request.softcap
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        # Where the pattern is 0 so is its gradient: backward need not know of the mask.
        scores.detach().masked_fill_(hidden, -torch.inf)
    if bias is not None:
        empty = scores.amax(-1, keepdim=True) == -torch.inf
    if empty is not None:
        scores = scores.masked_fill(empty, 0.0)
    pattern = softmax(scores, sinks) if sinks is not None else scores.softmax(-1)
    if empty is not None:
        pattern = pattern.masked_fill(empty, 0.0)
    if request.dropout:
        pattern = ops.dropout(pattern, request.dropout, True, request.random)
    out = pattern.to(v.dtype).view(*together, s) @ v
    return out.view(b, h, t, -1)


def _empty(request: AttentionRequest) -> Tensor | None:
    """Queries that see nothing by the mask alone, `[., ., T, 1]`; None where there can be none.  A bias may hold -inf
    too, which is looked for in its scores."""
    sees_itself = request.aligned and request.queries <= request.keys and mask_lowering.reads_distances(request.mask)
    if request.biased or request.visible is None or sees_itself:
        return None
    return ~request.visible.any(-1, keepdim=True)


def slots_serve(store: Store, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel reads queries of `dtype` and the numbers of a store: on a GPU in half precision, where keys
    and values have one width."""
    layer, half = store.layer, dtype in (torch.bfloat16, torch.float16)
    fits = layer.width == layer.value_width and layer.width % 8 == 0 and layer.width <= 256
    return device.type == "cuda" and half and fits and store.window is None and store.form.dtype is dtype


def attend_slots(q: Tensor, store: Store, used: Tensor, longest: int, scale: float) -> Tensor:
    """`[slots, H, Kv]` of q `[slots, H, K]` over the first `used[s]` keys of slot s, int32; none has over `longest`.

    The kernel takes keys of all rows as one `[places, G, K]`, with the place where each row begins.  In the store,
    `[slots, G, capacity, K]`, a head's keys lie together: place p of slot s is place `s G capacity + p` of a view whose
    heads are `capacity K` numbers apart.
    """
    slots, groups, capacity, width = store.k.shape
    shape = ((slots - 1) * groups * capacity + capacity, groups, width)
    k, v = (x.as_strided(shape, (width, capacity * width, 1)) for x in (store.k, store.v))
    rows = torch.arange(slots + 1, dtype=torch.int32, device=q.device)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, rows, rows * (groups * capacity), 1, longest, 0.0, False, False, scale=scale, seqused_k=used
    )[0]
    return out
