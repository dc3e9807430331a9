"""Attention of the rows of a flat batch, planned and run in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triptych.attention import DOT_PRODUCT, ContentBias, Heads, KeyLayout, Mechanism, Rows, ScoreBias
from triptych.attention.mask_lowering import adopt
from triptych.attention.row_plan import RowHook
from triptych.errors import InputError
from triptych.spec.masks import Mask


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, keys: KeyLayout, *, mask: Mask, bias: ScoreBias | None = None,
    content: ContentBias | None = None, sinks: Tensor | None = None, hook: RowHook | None = None,
    mechanism: Mechanism = DOT_PRODUCT, **options: Any,
) -> Tensor:  # fmt: skip
    """Plan and run in one: attention of every row of the flat batch, q [N, H, K], over its own keys -> [N, H, Kv];
    `options` are scale, softcap and dropout, as in `attend`.

    hook        called row by row, through the definition; a key's column is its position (FlatKeys: its place).
    mechanism   how queries score keys: dot products unless given.

    Raises InputError when rows and keys disagree.
    """
    if q.shape[0] != rows.total:
        raise InputError(f"{q.shape[0]} queries, but the rows have {rows.total} tokens")
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    heads = Heads.of(q, k, v, sinks=sinks is not None, learns=learns, **options)
    plan = keys.plan(rows, adopt(mask, q.device), heads, bias, mechanism)
    return plan.run(q, k, v, sinks, content) if hook is None else plan.run_hooked(q, k, v, hook, sinks, content)
