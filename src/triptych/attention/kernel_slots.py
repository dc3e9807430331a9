"""Attention of one query per cache slot by torch's kernel for rows of unlike lengths: it reads the keys there are."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.attention.store import Store


def serves(store: Store, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel reads queries of `dtype` and the numbers of a store: on a GPU in half precision, where keys
    and values have one width."""
    layer, half = store.layer, dtype in (torch.bfloat16, torch.float16)
    fits = layer.width == layer.value_width and layer.width % 8 == 0 and layer.width <= 256
    return device.type == "cuda" and half and fits and store.window is None and store.form.dtype is dtype


def run(q: Tensor, store: Store, used: Tensor, longest: int, scale: float) -> Tensor:
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
