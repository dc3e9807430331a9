"""Why scores are divided by √d (Vaswani et al. 2017, section 3.2.1; lectures L0 4.1, L4 exercises 2, 3 and 11).

The median gradient is used because the mean at the queries does not vanish: a few undecided rows carry all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triptych.attention import attend
from triptych.page import Curve, TableSection
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import power


class ScalingLab(Lab):
    """q and k of unit variance: the variance of q·k, the entropy of its softmax and the queries' gradient, over d."""

    name = "scaling"
    falsified_by = (
        "The claim is false if the variance of q·k does not grow as d. It is false too if the typical (median) query"
        " keeps its gradient at large d without the division, or loses it with the division."
    )
    seeds = 5

    widths: tuple[int, ...] = size(
        (4, 8, 16, 32, 64, 128, 512, 2048), "widths d of queries and keys, in ascending order", values=2, ascending=True
    )
    tokens: int = size(64, "queries, and keys, of a row; two or more", least=2)
    rows: int = size(8, "rows of each width")
    small: float = size(0.01, "norm below which a gradient counts as none")

    def run(self, setup: Setup) -> LabResult:
        columns = {"entropy": "entropy", "median gradient": "gradient", f"gradient below {self.small:g}": "starved"}
        measured = {width: self._measure(width, setup.seed) for width in self.widths}
        variances = [variance for variance, _, _ in measured.values()]
        table = TableSection(
            f"{self.tokens} tokens, q and k with independent entries of variance 1",
            ("d", "variance of q·k", *(f"{name}, {scale}" for name in columns for scale in ("no scale", "1/√d"))),
            [
                [
                    str(d),
                    f"{variance:.4g}",
                    *(f"{getattr(one, name):.3g}" for name in columns.values() for one in scales),
                ]
                for d, (variance, *scales) in measured.items()
            ],
        )

        def curve(title: str, unit: str, name: str, axes: Literal["x", "xy"], **reference: float) -> Curve:
            lines = {
                label: [(float(d), max(getattr(measured[d][at], name), 1e-12)) for d in self.widths]
                for label, at in (("no scale", 1), ("1/√d", 2))
            }
            return Curve(title, "d", unit, lines, reference, axes)

        (_, _, narrow), (_, plain, scaled) = measured[self.widths[0]], measured[self.widths[-1]]
        checks = (
            Check("variance of q·k grows as d to the power", power(self.widths, variances), 0.95, 1.05),
            Check(f"entropy at d {self.widths[-1]} without scale, nats", plain.entropy, most=0.4),
            Check(
                f"entropy at d {self.widths[-1]} with 1/√d over that at d {self.widths[0]}",
                scaled.entropy / narrow.entropy,
                0.95,
                1.05,
            ),
            Check(
                f"median gradient at a query, d {self.widths[-1]}, without scale over with 1/√d",
                plain.gradient / scaled.gradient,
                most=0.01,
            ),
            Check(
                f"median gradient with 1/√d, d {self.widths[-1]} over d {self.widths[0]}",
                scaled.gradient / narrow.gradient,
                0.5,
                2.0,
            ),
            Check(
                f"share of queries with a gradient below {self.small:g} at d {self.widths[-1]}, without scale",
                plain.starved,
                least=0.5,
            ),
            Check(
                f"share of queries with a gradient below {self.small:g} at d {self.widths[-1]}, with 1/√d",
                scaled.starved,
                most=0.01,
            ),
        )
        meaning = (
            "q·k is a sum of d products of unit variance, so its variance is d. Undivided, the largest score of a row"
            " leads the second by ever more and softmax becomes a hard choice: its entropy falls towards zero, and"
            f" {plain.starved:.0%} of the queries at d {self.widths[-1]} get a gradient below {self.small:g}. Not all:"
            " a few rows in which two scores are close still get a large gradient, so the mean does not vanish where"
            " the median does. Divided by √d, entropy and gradient keep their size at any width."
        )
        curves = (
            curve("Entropy of a row of attention", "nats", "entropy", "x", uniform=math.log(self.tokens)),
            curve("Gradient that reaches a query, median", "norm", "gradient", "xy"),
        )
        return LabResult("What does dividing by √d do?", meaning, checks, (table, *curves))

    def _measure(self, width: int, seed: int) -> tuple[float, Softmaxed, Softmaxed]:
        """(variance of q·k, softmax without a scale, softmax with 1/√d)"""
        noise = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(self.rows, 1, self.tokens, width, generator=noise, dtype=torch.float64) for _ in range(3)
        )
        variance = (q @ k.mT).var().item()
        return variance, _softmaxed(q, k, v, 1.0, self.small), _softmaxed(q, k, v, None, self.small)


@dataclass(frozen=True)
class Softmaxed:
    """One scale at one width: mean entropy of a row of weights in nats, the median norm of the gradient at a query,
    and the share of queries whose gradient is below `small`."""

    entropy: float
    gradient: float
    starved: float


def _softmaxed(q: Tensor, k: Tensor, v: Tensor, scale: float | None, small: float) -> Softmaxed:
    """q, k, v `[rows, 1, tokens, d]`; `scale=None` is the 1/√d of `attend`."""
    identity = torch.eye(q.shape[2], dtype=q.dtype).expand(
        len(q), 1, -1, -1
    )  # as values, they make the output the pattern
    pattern = attend(q, k, identity, scale=scale)
    entropy = -torch.special.xlogy(pattern, pattern).sum(-1).mean().item()
    q = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(q, k, v, scale=scale)[..., 0].sum(), q)  # of each output's first number
    norms = gradient.norm(dim=-1).flatten()
    return Softmaxed(entropy, norms.median().item(), float((norms < small).double().mean()))
