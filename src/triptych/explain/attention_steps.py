"""Attention in steps: scores, scale, bias, mask, softmax and weighted sum, one formula each.

What a fused kernel never holds - the products before their scale, the bias apart from the mask - comes from
`triptych.attention.attention_scores`, the definition; the scores that enter softmax, the pattern and the sum are the
forward's own where they are given, so the chain must end in them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych import ops
from triptych.attention import alibi_slopes, attend_reference, attention_pattern, attention_scores, t5_bucket
from triptych.spec import Mask, full
from triptych.spec.masks import Full, Points, mask_text
from . import reference_ops
from .expressions import AppliedOp, equation
from .stack_run import StackRun
from .steps import PrintedTensors, ShownTensor, WalkStep

FEW = 30  # entries of which the mean and the variance say too little


@dataclass(kw_only=True)
class AttentionSteps:
    """One attention over `q` [H, T, K], `k` [G, S, K], `v` [G, S, Kv], or over plain matrices."""

    part: str
    prefix: str  # of the names
    q: ShownTensor
    k: ShownTensor
    v: ShownTensor
    mask: Mask = field(default_factory=full)
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: WalkStep | None = None  # as `position_bias` gives it
    q_pos: Tensor | None = None  # positions of the queries and keys; from 0 on by default
    k_pos: Tensor | None = None
    head: int = 0
    forward: Mapping[str, Tensor] = field(default_factory=dict)  # its own scores, pattern and z
    out: str = ""  # the name of the result; `z` after the prefix unless there is one

    def __post_init__(self) -> None:
        self.heads = 1 if self.q.value.dim() == 2 else len(self.q.value)
        self.at_q = torch.arange(self.q.value.shape[-2]) if self.q_pos is None else self.q_pos
        self.at_k = torch.arange(self.k.value.shape[-2]) if self.k_pos is None else self.k_pos
        self.added = None if self.bias is None else self.bias.makes[0].value[None]
        self.options = {
            "scale": self.scale, "softcap": self.softcap, "bias": self.added, "mask": self.mask, "sinks": self.sinks,
            "q_pos": self.at_q, "k_pos": self.at_k,
        }  # fmt: skip

    def steps(self) -> list[WalkStep]:
        """Scores, scale, bias, mask, softmax, weighted sum."""
        biased = [] if self.bias is None else [self._bias(self.bias)]
        return [self._products(), self._scale(), *biased, self._mask(), self._softmax(), self._sum()]

    def _products(self) -> WalkStep:
        q, k = self.q.name, self.k.name
        why = "One dot product for each query and key: the larger, the more weight the key gets."
        if self.heads > 1 and (groups := len(self.k.value)) < self.heads:
            group = self.head * groups // self.heads
            why += f" Head {self.head} shares the keys and values of group {group} with other heads."
        shown = self._matrix("products", "s", self._applied(attention_scores, scale=1.0))
        return WalkStep(
            self.part, "Scores", "s = q kᵀ", why, [shown], lambda g: g[q] @ reference_ops.grouped(g[k], self.heads).mT
        )

    def _scale(self) -> WalkStep:
        width = self.q.value.shape[-1]
        scale = width**-0.5 if self.scale is None else self.scale
        formula = f"s ← s / √{width}" if math.isclose(scale, width**-0.5) else f"s ← {scale:g} · s"
        title = "Scale"
        why = ""
        if scale == 1.0:
            why = (
                f"The products are not divided by √{width}. "
                if width > 1
                else "√1 is 1: there is nothing to divide by. "
            )
            title, formula = "No scale", "s ← s"
        why += self._spread(scale)
        if self.softcap is not None:
            formula += f",  then {self.softcap:g} · tanh(s / {self.softcap:g})"
            why += f" The soft cap keeps every score within ±{self.softcap:g}."

        def once_more(g: PrintedTensors) -> Tensor:
            s = g[f"{self.prefix}products"] * scale
            return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

        value = self._applied(attention_scores, scale=scale, softcap=self.softcap)
        return WalkStep(self.part, title, formula, why, [self._matrix("scaled", "s", value)], once_more)

    def _spread(self, scale: float) -> str:
        """The spread of the scores of this run before and after the scale, and whether the premise of 1/√d holds."""
        q, k = (one if one.dim() == 2 else one[self.head * len(one) // self.heads]
                for one in (self.q.value.double(), self.k.value.double()))  # fmt: skip
        products, width = q @ k.T, q.shape[-1]
        if products.numel() < 2:
            return "One score alone has no spread."
        of = f" of head {self.head}" if self.heads > 1 else ""
        before, after = (float(one.var(correction=0)) for one in (products, products * scale))  # variances
        said = f"The {products.numel():,} scores{of} have a standard deviation of {before**0.5:.3g}"
        said += " before it" * (scale != 1.0) + f" (variance {before:.3g})"
        said += f" and {after**0.5:.3g} after it (variance {after:.3g})." if scale != 1.0 else "."
        spreads = [(float(x.mean()), float(x.var(correction=0)), x.numel()) for x in (q, k)]
        (mean_q, var_q, _), (mean_k, var_k, _) = spreads
        if not all(_standard(*one) for one in spreads):
            given = f"independent entries of mean 0 and these variances would give {width * var_q * var_k:.3g}"
            verdict = f"the premise does not hold; {given}"
        elif min(q.numel(), k.numel()) < FEW:
            verdict = "so few numbers cannot decide whether the premise holds"
        elif not 0.5 <= before / width <= 2:
            verdict = "this agrees with the premise, but the scores do not vary as those of independent entries"
        else:
            verdict = "nothing here contradicts the premise"
        return (
            f"{said} 1/√{width} brings the variance to 1 where the entries of q and k are independent, with mean 0 "
            f"and variance 1, so that q·k has variance {width}. Here q has mean {mean_q:.3g} and variance {var_q:.3g}, "
            f"k mean {mean_k:.3g} and variance {var_k:.3g}: {verdict}."
        )

    def _bias(self, bias: WalkStep) -> WalkStep:
        value = self._applied(attention_scores, scale=self.scale, softcap=self.softcap, bias=self.added)
        shown = [self._matrix("bias", "b", bias.makes[0].value), self._matrix("biased", "s", value)]

        def once_more(g: PrintedTensors) -> list[Tensor]:
            added = bias.again(g)
            assert isinstance(added, Tensor)
            return [added, g[f"{self.prefix}scaled"] + added]

        return replace(bias, part=self.part, makes=shown, again=once_more)

    def _mask(self) -> WalkStep:
        before, name = f"{self.prefix}{'scaled' if self.bias is None else 'biased'}", f"{self.prefix}mask"
        scores = [self._matrix("scores", "s", self._of_forward("scores", attention_scores))]
        if isinstance(self.mask, Full):
            why = "Every query sees every key; these scores enter the softmax."
            return WalkStep(self.part, "No mask", "s ← s", why, scores, lambda g: g[before])
        hidden = additive_mask(self.mask, self.at_q, self.at_k)
        m = ShownTensor(name, "m", "T S", hidden, self.q.labels, self.k.labels, focus=self.q.focus)
        why = f"The mask is {mask_text(self.mask)}. A key that a query may not see gets -∞, so weight 0."
        return WalkStep(self.part, "Mask", "s ← s + m", why, scores, lambda g: g[before] + g[name], [m])

    def _softmax(self) -> WalkStep:
        scores, sink = f"{self.prefix}scores", f"{self.prefix}sinks"
        uses = [] if self.sinks is None else [ShownTensor(sink, "sink", "H", self.sinks)]
        value = self._of_forward("pattern", attention_pattern)
        formula = "p = exp(s) / Σ exp(s)" if self.sinks is None else "p = exp(s) / (exp(sink) + Σ exp(s))"
        rest = "" if self.sinks is None else " with what the sink takes"
        why = f"Each row becomes weights that sum to 1{rest}." + self._largest_weight(value)
        return WalkStep(
            self.part, "Softmax", formula, why, [self._matrix("pattern", "p", value)],
            lambda g: reference_ops.softmax(g[scores], None if self.sinks is None else g[sink]), uses,
        )  # fmt: skip

    def _sum(self) -> WalkStep:
        pattern, v = f"{self.prefix}pattern", self.v.name
        value = self._of_forward("z", attend_reference, self.v)
        letters = "T V" if value.dim() == 2 else "H T V"
        name, why = self.out or f"{self.prefix}z", "The values of all keys, added with these weights."
        shown = ShownTensor(name, "z", letters, value, self.q.labels, head=self.head, focus=self.q.focus)
        return WalkStep(
            self.part, "Weighted sum", "z = p v", why, [shown],
            lambda g: g[pattern] @ reference_ops.grouped(g[v], self.heads),
        )  # fmt: skip

    def _applied(self, function: Callable[..., Tensor], *more: ShownTensor, **options: Any) -> Tensor:
        """A function of batches of queries, keys and `more`."""
        tensors = [one.value if self.q.value.dim() == 2 else one.value[None] for one in (self.q, self.k, *more)]
        out = function(*tensors, **options)
        return out if self.q.value.dim() == 2 else out[0]

    def _of_forward(self, leaf: str, function: Callable[..., Tensor], *more: ShownTensor) -> Tensor:
        """A value of the forward, else by its definition."""
        return self.forward[leaf] if leaf in self.forward else self._applied(function, *more, **self.options)

    def _matrix(self, leaf: str, symbol: str, value: Tensor) -> ShownTensor:
        letters = "T S" if value.dim() == 2 else "H T S"
        labels, columns = self.q.labels, self.k.labels
        return ShownTensor(f"{self.prefix}{leaf}", symbol, letters, value, labels, columns, self.head, self.q.focus)

    def _largest_weight(self, pattern: Tensor) -> str:
        """The key that the followed query attends to most, in words."""
        if self.q.focus is None or not self.k.labels:
            return ""
        row = (pattern if pattern.dim() == 2 else pattern[self.head])[self.q.focus]
        best = int(row.argmax())
        who = f" In head {self.head} “" if self.heads > 1 else " “"
        query, key = self.q.labels[self.q.focus], self.k.labels[best]
        return f"{who}{query}” gives its largest weight, {row[best]:.0%}, to “{key}”."


def _standard(mean: float, variance: float, count: int) -> bool:
    """Whether so many numbers may have mean 0 and variance 1: within 0.1, and two standard errors of normal ones."""
    return abs(mean) <= 0.1 + 2 / math.sqrt(count) and abs(variance - 1) <= 0.1 + 2 * math.sqrt(2 / count)


def additive_mask(mask: Mask, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The numbers that a mask adds to the scores: 0, and -∞ for a key that the query may not see."""
    visible = torch.as_tensor(mask.visible(Points(q_pos[:, None]), Points(k_pos[None])))
    return torch.zeros(visible.shape).masked_fill(~visible, -math.inf)


# ---------------------------------------------------------------- what positions add to the scores


def position_bias(at: StackRun, value: AppliedOp, q: ShownTensor, k: ShownTensor, k_pos: Tensor) -> WalkStep:
    """What a bias operation adds to the scores of `q` [H, T, K] and `k` [G, S, K], as the first that the step makes."""
    step, q_pos, names = value.step, at.places, dict[str, str]()
    distance, attributes = k_pos[None, :] - q_pos[:, None], dict(step.attributes)
    bias_inputs: dict[str, Any] = {"q_pos": q_pos, "k_pos": k_pos, **attributes}
    uses: list[ShownTensor]
    again: Callable[[PrintedTensors], Tensor]

    def matrix(name: str, symbol: str, values: Tensor) -> ShownTensor:
        return ShownTensor(f"{at.block}{name}", symbol, "T S", values, at.labels, k.labels, focus=at.focus)

    if step.op == "alibi_bias":
        meaning = "The further a key, the lower its score, by a slope of each head's own."
        slopes = ShownTensor(f"{at.block}slopes", "slope", "H", alibi_slopes(attributes["heads"]))
        apart = matrix("distance", "|q_pos - k_pos|", distance.abs())
        uses, again = [slopes, apart], lambda g: -g[slopes.name][:, None, None] * g[apart.name]
    elif step.op == "t5_bias":
        meaning = "One learned number for each head and bucket of distances; far distances share a bucket."
        table = at.parameter(step.weights["weight"], "W_p", "buckets H")
        bucket = matrix("bucket", "bucket", t5_bucket(distance, buckets=len(table.value), **attributes))
        uses, again = [table, bucket], lambda g: g[table.name][g[bucket.name]].permute(2, 0, 1)
        bias_inputs["weight"] = table.value
    else:
        meaning = (
            "The layer maps each distance to a query and a key of its own, which meet the keys and queries of tokens."
        )
        row_of = value.inputs["row"]
        assert isinstance(row_of, AppliedOp)
        places = {"longest": at.first + len(at.ids) - 1, "q_pos": q_pos, "k_pos": k_pos}
        row = matrix("row", "row", ops.RUN[row_of.op](**places, **row_of.step.attributes))
        vectors = _of_distances(at, value, k)
        tensors = {key: vector.value.transpose(0, 1) for key, vector in vectors.items()}
        bias_inputs = {"q": q.value[None], "k": k.value[None], "row": row.value, **tensors}
        names = {name: name for name in ("q", "k", "row", *vectors)}
        uses, again = [*vectors.values(), row], partial(_distances_with_words, vectors, row.name, q.name, k.name)
    added = ops.RUN[step.op](**bias_inputs)
    shown = ShownTensor("", "b", "H T S", added if added.dim() == 3 else added[0])
    return WalkStep("", "Position bias", f"s ← s + b,  b = {equation(value, names)}", meaning, [shown], again, uses)


def _of_distances(at: StackRun, value: AppliedOp, k: ShownTensor) -> dict[str, ShownTensor]:
    """Disentangled attention: a table of distances that this layer has mapped to keys and queries."""
    vectors = {}
    for key, letters, head in (("pos_k", "G R K", k.head), ("pos_q", "H R K", at.head)):
        if isinstance(applied := value.inputs.get(key), AppliedOp):
            vector = at.value(at.entry, applied.step.out[0]).transpose(0, 1)
            vectors[key] = ShownTensor(f"{at.block}{key}", key, letters, vector, head=head)
    return vectors


def _distances_with_words(vectors: Mapping[str, ShownTensor], row: str, q: str, k: str, g: PrintedTensors) -> Tensor:
    terms, heads = [], len(g[q])
    for key, vector in vectors.items():
        pairs = reference_ops.grouped(g[vector.name], heads)[:, g[row]]  # [H, T, S, K]
        word = reference_ops.grouped(g[q if key == "pos_k" else k], heads)
        terms.append((pairs * (word[:, :, None] if key == "pos_k" else word[:, None])).sum(-1))
    return torch.stack(terms).sum(0)
