"""From queries, keys and values to the weighted sum of each head, one formula at a time.

What a fused kernel never holds - the products before their scale, the bias apart from the mask - comes from
`triptych.attention.attention_scores`, the definition; the scores that enter softmax, the pattern and the sum are the
forward's own where `ForwardValues` gives them, so the chain must end in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triptych.attention import attend_reference, attention_pattern, attention_scores
from triptych.explain import reference_ops
from triptych.explain.steps import Printed, Shown, Step
from triptych.spec import Mask, full
from triptych.spec.masks import Full, Points, mask_text


@dataclass(frozen=True)
class Bias:
    """What a position part adds to the scores: `value` [H, T, S], how it is looked up, and from what."""

    value: Tensor
    formula: str
    meaning: str
    uses: Sequence[Shown]
    again: Any  # Printed -> Tensor


@dataclass(frozen=True)
class ForwardValues:
    """The values of the forward itself."""

    scores: Tensor
    pattern: Tensor
    z: Tensor


@dataclass(frozen=True, kw_only=True)
class Attending:
    """One attention over `q` [H, T, K], `k` [G, S, K], `v` [G, S, Kv], or over plain matrices."""

    part: str
    prefix: str  # of the names
    q: Shown
    k: Shown
    v: Shown
    mask: Mask = field(default_factory=full)
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Bias | None = None
    q_pos: Tensor | None = None  # positions of the queries and keys; from 0 on by default
    k_pos: Tensor | None = None
    head: int = 0
    forward: ForwardValues | None = None
    out: str = ""  # the name of the result; `z` after the prefix unless there is one

    def steps(self) -> list[Step]:
        """Scores, scale, bias, mask, softmax, weighted sum."""
        biased = [] if self.bias is None else [self._bias(self.bias)]
        return [self._products(), self._scale(), *biased, self._mask(), self._softmax(), self._sum()]

    @property
    def heads(self) -> int:
        return 1 if self.q.value.dim() == 2 else len(self.q.value)

    def _products(self) -> Step:
        q, k = self.q.name, self.k.name
        grouping = ""
        if self.heads > 1 and (groups := len(self.k.value)) < self.heads:
            group = self.head * groups // self.heads
            grouping = f" Head {self.head} shares the keys and values of group {group} with other heads."
        return Step(
            self.part,
            "Scores",
            "s = q kᵀ",
            "One dot product for each query and key: the larger, the more weight the key gets." + grouping,
            [self._matrix("products", "s", self._scored(scale=1.0))],
            lambda g: g[q] @ reference_ops.grouped(g[k], self.heads).mT,
        )

    def _scale(self) -> Step:
        width = self.q.value.shape[-1]
        scale = width**-0.5 if self.scale is None else self.scale
        formula = f"s ← s / √{width}" if math.isclose(scale, width**-0.5) else f"s ← {scale:g} · s"
        title, why = (
            "Scale",
            f"A sum of {width} products has a variance of {width}; √{width} brings it back to about 1.",
        )
        if scale == 1.0:
            title, formula, why = "No scale", "s ← s", "The products are not divided by √K."
        if self.softcap is not None:
            formula += f",  then {self.softcap:g} · tanh(s / {self.softcap:g})"
            why += f" The soft cap keeps every score within ±{self.softcap:g}."

        def once_more(g: Printed) -> Tensor:
            s = g[f"{self.prefix}products"] * scale
            return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

        value = self._scored(scale=scale, softcap=self.softcap)
        return Step(self.part, title, formula, why, [self._matrix("scaled", "s", value)], once_more)

    def _bias(self, bias: Bias) -> Step:
        value = self._scored(scale=self.scale, softcap=self.softcap, bias=bias.value[None])
        shown = [self._matrix("bias", "b", bias.value), self._matrix("biased", "s", value)]

        def once_more(g: Printed) -> list[Tensor]:
            added = bias.again(g)
            return [added, g[f"{self.prefix}scaled"] + added]

        return Step(self.part, "Position bias", bias.formula, bias.meaning, shown, once_more, bias.uses)

    def _mask(self) -> Step:
        before, name = f"{self.prefix}{'scaled' if self.bias is None else 'biased'}", f"{self.prefix}mask"
        scores = [self._matrix("scores", "s", self._of_forward("scores", self._scored(**self._options)))]
        if isinstance(self.mask, Full):
            why = "Every query sees every key; these scores enter the softmax."
            return Step(self.part, "No mask", "s ← s", why, scores, lambda g: g[before])
        q_pos, k_pos = self._positions
        visible = torch.as_tensor(self.mask.visible(Points(q_pos[:, None]), Points(k_pos[None])))
        hidden = torch.zeros(len(q_pos), len(k_pos)).masked_fill(~visible, -math.inf)
        m = Shown(name, "m", "T S", hidden, self.q.labels, self.k.labels, focus=self.q.focus)
        why = f"The mask is {mask_text(self.mask)}. A key that a query may not see gets -∞, so weight 0."
        return Step(self.part, "Mask", "s ← s + m", why, scores, lambda g: g[before] + g[name], [m])

    def _softmax(self) -> Step:
        scores, sink = f"{self.prefix}scores", f"{self.prefix}sinks"
        uses = [] if self.sinks is None else [Shown(sink, "sink", "H", self.sinks)]
        pattern = attention_pattern(_batch(self.q.value), _batch(self.k.value), **self._options)
        value = self._of_forward("pattern", _unbatch(pattern, self.q.value))
        formula = "p = exp(s) / Σ exp(s)" if self.sinks is None else "p = exp(s) / (exp(sink) + Σ exp(s))"
        return Step(
            self.part,
            "Softmax",
            formula,
            "Each row becomes weights that sum to 1." + self._largest_weight(value),
            [self._matrix("pattern", "p", value)],
            lambda g: reference_ops.softmax(g[scores], None if self.sinks is None else g[sink]),
            uses,
        )

    def _sum(self) -> Step:
        pattern, v = f"{self.prefix}pattern", self.v.name
        z = attend_reference(_batch(self.q.value), _batch(self.k.value), _batch(self.v.value), **self._options)
        value = self._of_forward("z", _unbatch(z, self.q.value))
        letters = "T V" if value.dim() == 2 else "H T V"
        name, focus = self.out or f"{self.prefix}z", self.q.focus
        width = Shown(name, "z", letters, value, self.q.labels, head=self.head, focus=focus)
        return Step(
            self.part,
            "Weighted sum",
            "z = p v",
            "The values of all keys, added with these weights.",
            [width],
            lambda g: g[pattern] @ reference_ops.grouped(g[v], self.heads),
        )

    @property
    def _options(self) -> dict[str, Any]:
        bias = None if self.bias is None else self.bias.value[None]
        return {
            "scale": self.scale, "softcap": self.softcap, "bias": bias, "mask": self.mask, "sinks": self.sinks,
            "q_pos": self._positions[0], "k_pos": self._positions[1],
        }  # fmt: skip

    @property
    def _positions(self) -> tuple[Tensor, Tensor]:
        q_pos = torch.arange(self.q.value.shape[-2]) if self.q_pos is None else self.q_pos
        return q_pos, torch.arange(self.k.value.shape[-2]) if self.k_pos is None else self.k_pos

    def _scored(self, **options: Any) -> Tensor:
        return _unbatch(attention_scores(_batch(self.q.value), _batch(self.k.value), **options), self.q.value)

    def _of_forward(self, leaf: str, defined: Tensor) -> Tensor:
        return defined if self.forward is None else getattr(self.forward, leaf)

    def _matrix(self, leaf: str, symbol: str, value: Tensor) -> Shown:
        letters = "T S" if value.dim() == 2 else "H T S"
        labels, columns = self.q.labels, self.k.labels
        return Shown(f"{self.prefix}{leaf}", symbol, letters, value, labels, columns, self.head, self.q.focus)

    def _largest_weight(self, pattern: Tensor) -> str:
        """The key that the followed query attends to most, in words."""
        if self.q.focus is None or not self.k.labels:
            return ""
        row = (pattern if pattern.dim() == 2 else pattern[self.head])[self.q.focus]
        best = int(row.argmax())
        who = f" In head {self.head}, " if self.heads > 1 else " "
        return f"{who}{self.q.labels[self.q.focus]} attends most, {row[best]:.0%}, to {self.k.labels[best]}."


def _batch(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[None]


def _unbatch(x: Tensor, like: Tensor) -> Tensor:
    return x if like.dim() == 2 else x[0]
