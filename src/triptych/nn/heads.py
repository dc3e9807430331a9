"""Heads: from the final vectors `[N, D]` to logits, labels or one vector per row."""

from torch import Tensor

from triptych import ops
from triptych.attention import Rows
from triptych.ops.noise import HEAD
from triptych.spec import model as spec
from .linear import Linear
from .part import Module, S, VectorMap


class Transform(Module[spec.TransformSpec], of=spec.TransformSpec):
    """[N, D] -> [N, D']: `norm(act(dense(x)))`."""

    dense: Linear
    norm: VectorMap | None

    def forward(self, x: Tensor) -> Tensor:
        x = ops.ACTIVATIONS[self.spec.act](self.dense(x))
        return x if self.norm is None else self.norm(x)


class LMHead(Module[spec.LMHeadSpec], of=spec.LMHeadSpec):
    """[N, D] -> next-token logits [N, V]: `softcap(proj(scale * transform(x)))`.  The weight of `proj` may be the
    embedding's (`nn/part.py`)."""

    transform: Transform | None
    proj: Linear

    def forward(self, x: Tensor, rows: Rows, random: ops.RowNoise | None) -> Tensor:
        x = x if self.transform is None else self.transform(x)
        logits = self.proj(x if self.spec.scale is None else x * self.spec.scale)
        return logits if self.spec.softcap is None else ops.softcap(logits, self.spec.softcap)


class _TransformedHead(Module[S]):
    """[N, D] -> [N, D'], or of each row [B, D'] where the spec says how to `pool`: `last(dropout(transform(x)))`, where
    `last` is the map in the last slot, to tokens or labels."""

    transform: Transform | None

    def forward(self, x: Tensor, rows: Rows, random: ops.RowNoise | None) -> Tensor:
        how = vars(self.spec)
        x = ops.pool(x, rows, how["pool"]) if "pool" in how else x
        x = x if self.transform is None else self.transform(x)
        *_, last = self.children()
        own = None if random is None else random.of(HEAD, rows.lengths if "pool" not in how else (1,) * len(rows))
        out: Tensor = last(ops.dropout(x, how.get("dropout", 0.0), self.training, own))
        return out


class MaskedLMHead(_TransformedHead[spec.MaskedLMHeadSpec], of=spec.MaskedLMHeadSpec):
    """[N, D] -> logits of the token at each place [N, V]."""

    proj: Linear


class ReplacedHead(_TransformedHead[spec.ReplacedHeadSpec], of=spec.ReplacedHeadSpec):
    """[N, D] -> one logit per token [N, 1]: whether it was replaced."""

    proj: Linear


class ClassHead(_TransformedHead[spec.ClassHeadSpec], of=spec.ClassHeadSpec):
    """[N, D] -> class logits of each row [B, C]."""

    classes: Linear


class TokenHead(_TransformedHead[spec.TokenHeadSpec], of=spec.TokenHeadSpec):
    """[N, D] -> class logits of each token [N, C]."""

    classes: Linear


class SpanHead(_TransformedHead[spec.SpanHeadSpec], of=spec.SpanHeadSpec):
    """[N, D] -> scores of an answer's first and last token [N, 2]."""

    ends: Linear


class Pooling(Module[spec.PoolingSpec], of=spec.PoolingSpec):
    """[N, D] -> one vector per row [B, D]."""

    dense: Linear | None

    def forward(self, x: Tensor, rows: Rows, random: ops.RowNoise | None = None) -> Tensor:
        pooled = ops.pool(x, rows, "mean" if self.spec.mode == "mean" else "first")
        if self.spec.mode == "dense":
            assert self.dense is not None
            pooled = ops.ACTIVATIONS[self.spec.act](self.dense(pooled))
        return ops.l2_normalize(pooled) if self.spec.normalize else pooled


Head = LMHead | MaskedLMHead | ClassHead | TokenHead | SpanHead | ReplacedHead | Pooling
