"""Heads: from the final vectors `[N, D]` to logits, labels or one vector a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.nn.linear import ACTIVATIONS, Linear
from triptych.nn.part import Module
from triptych.spec import model as spec


class LMHead(Module, of=spec.LMHead):
    """[N, D] -> next-token logits [N, V]: `softcap * tanh(proj(scale * x) / softcap)`."""

    proj: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        logits = self.proj(x if self.spec.scale is None else x * self.spec.scale)
        cap = self.spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)  # type: ignore[no-any-return]


class MaskedLMHead(Module, of=spec.MaskedLMHead):
    """[N, D] -> logits of the token at each place [N, V]."""

    dense: Linear
    norm: Callable[[Tensor], Tensor]
    proj: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.proj(self.norm(ACTIVATIONS[self.spec.act](self.dense(x))))  # type: ignore[no-any-return]


class ClassHead(Module, of=spec.ClassHead):
    """[N, D] -> one row of class logits a row [B, C], from its first token."""

    dense: Linear | None
    classes: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        first = x[list(rows.starts)]
        if self.dense is not None:
            first = torch.tanh(self.dense(first))
        return self.classes(F.dropout(first, self.spec.dropout, self.training))  # type: ignore[no-any-return]


class TokenHead(Module, of=spec.TokenHead):
    """[N, D] -> class logits of each token [N, C]."""

    classes: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.classes(F.dropout(x, self.spec.dropout, self.training))  # type: ignore[no-any-return]


class Pooling(Module, of=spec.Pooling):
    """[N, D] -> one vector a row [B, D]."""

    dense: Linear | None

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        if self.spec.mode == "mean":
            pooled = torch.stack([row.mean(0) for row in rows.split(x)])
        else:
            pooled = x[list(rows.starts)]
            if self.spec.mode == "dense":
                assert self.dense is not None
                pooled = torch.tanh(self.dense(pooled))
        return F.normalize(pooled, dim=-1) if self.spec.normalize else pooled
