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


class Transform(Module, of=spec.Transform):
    """[N, D] -> [N, D']: `norm(act(dense(x)))`."""

    dense: Linear
    norm: Callable[[Tensor], Tensor] | None

    def forward(self, x: Tensor) -> Tensor:
        x = ACTIVATIONS[self.spec.act](self.dense(x))
        return x if self.norm is None else self.norm(x)


class MaskedLMHead(Module, of=spec.MaskedLMHead):
    """[N, D] -> logits of the token at each place [N, V]."""

    transform: Transform
    proj: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.proj(self.transform(x))  # type: ignore[no-any-return]


class ClassHead(Module, of=spec.ClassHead):
    """[N, D] -> one row of class logits a row [B, C]."""

    transform: Transform | None
    classes: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.classes(_transformed(self, _pooled(x, rows, self.spec.pool)))  # type: ignore[no-any-return]


class TokenHead(Module, of=spec.TokenHead):
    """[N, D] -> class logits of each token [N, C]."""

    transform: Transform | None
    classes: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.classes(_transformed(self, x))  # type: ignore[no-any-return]


class SpanHead(Module, of=spec.SpanHead):
    """[N, D] -> scores of an answer's first and last token [N, 2]."""

    transform: Transform | None
    ends: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.ends(_transformed(self, x))  # type: ignore[no-any-return]


class ReplacedHead(Module, of=spec.ReplacedHead):
    """[N, D] -> one logit a token [N, 1]: whether it was replaced."""

    transform: Transform
    proj: Linear

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        return self.proj(self.transform(x))  # type: ignore[no-any-return]


class Pooling(Module, of=spec.Pooling):
    """[N, D] -> one vector a row [B, D]."""

    dense: Linear | None

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        pooled = _pooled(x, rows, "mean" if self.spec.mode == "mean" else "first")
        if self.spec.mode == "dense":
            assert self.dense is not None
            pooled = ACTIVATIONS[self.spec.act](self.dense(pooled))
        return F.normalize(pooled, dim=-1) if self.spec.normalize else pooled


def _pooled(x: Tensor, rows: Rows, how: str) -> Tensor:
    """[N, D] -> [B, D]: the mean of each row, its first vector or its last."""
    if how == "mean":
        return torch.stack([row.mean(0) for row in rows.split(x)])
    return x[[start if how == "first" else start + n - 1 for start, n in zip(rows.starts, rows.lengths, strict=True)]]


def _transformed(head: ClassHead | TokenHead | SpanHead, x: Tensor) -> Tensor:
    x = x if head.transform is None else head.transform(x)
    return F.dropout(x, head.spec.dropout, head.training)
