"""Where the queries and keys of one attention call stand, and the request that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.attention import mask_lowering
from triptych.attention.request import AttentionRequest
from triptych.attention.rows import Rows
from triptych.spec.masks import Mask

ScoreBias = Callable[[Tensor, Tensor], Tensor]
"""`bias(q_pos, k_pos)`, of positions `[T]`, `[S]` or `[B, T]`, `[B, S]`, gives what broadcasts to `[B, H, T, S]`."""

ContentBias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`bias(q, k, placed)`, of q `[B, H, T, K]`, k `[B, G, S, K]` and what a `ScoreBias` gave for their positions, gives
what is added to the scores `[B, H, T, S]`."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The numbers of an attention part that its plan depends on; scores are `1/sqrt(width)` times the dot product when
    `scale` is None."""

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
    random: torch.Generator | None = None


@dataclass(frozen=True, eq=False)
class Placing:
    """Where the queries `[b, T]` and keys `[b, S]` of one call stand."""

    rows: Rows
    queries: int
    keys: int
    k_pos: Tensor | None = None
    documents: Tensor | None = None

    def request(self, mask: Mask, heads: Heads, bias: ScoreBias | None) -> tuple[AttentionRequest, Tensor | None]:
        """The request, and its bias.  Positions stay implicit where they are the default ones or nothing reads them."""
        past, device = self.rows.past, heads.device
        explicit = self.k_pos is not None  # the default: keys at 0..S-1 and queries at the last T of them
        if not explicit and mask_lowering.reads_positions(mask):
            explicit = set(past) != {self.keys - self.queries}
        q_pos = consecutive_positions(past, self.queries, device) if explicit or bias is not None else None
        placed = None
        if bias is not None and q_pos is not None:
            k_pos = torch.arange(self.keys, device=device) if self.k_pos is None else self.k_pos
            if q_pos.dim() != k_pos.dim():
                q_pos, k_pos = q_pos.expand(len(past), -1), k_pos.expand(len(past), -1)
            placed = bias(q_pos, k_pos)
        request = AttentionRequest(
            rows=len(self.rows), heads=heads.heads, groups=heads.groups, queries=self.queries, keys=self.keys,
            width=heads.width, value_width=heads.value_width, dtype=heads.dtype, device=device,
            scale=1.0 / math.sqrt(heads.width) if heads.scale is None else heads.scale,
            mask=mask_lowering.simplify(mask, self.queries, self.keys, aligned=not explicit),
            softcap=heads.softcap, biased=bias is not None, bias_learns=placed is not None and placed.requires_grad,
            sinks=heads.sinks, dropout=heads.dropout, q_pos=q_pos if explicit else None, k_pos=self.k_pos,
            q_doc=self.documents, k_doc=self.documents, learns=heads.learns, random=heads.random,
        )  # fmt: skip
        return request, placed


def consecutive_positions(first: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Positions `[length]` from a common first one, `[b, length]` where the first ones differ."""
    with torch.inference_mode(False):  # so that training may use what a sampling step computed
        line = torch.arange(length, device=device)
        if len(set(first)) == 1:
            return line + first[0]
        return line + torch.tensor(tuple(first), device=device)[:, None]
