"""Why scores are divided by √d (Vaswani et al. 2017, section 3.2.1; lectures L0 2.4, L4 exercises 2, 3 and 11)."""

from __future__ import annotations

import math

import torch

from triptych.attention import attend
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import power
from triptych.page import Curve, TableSection

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)
TOKENS, ROWS = 64, 32


def run(setup: Setup) -> Finding:
    """q and k of unit variance: the spread of q·k, the entropy of its softmax and the gradient through it, over d."""
    rows = [_measure(width, setup.seed) for width in WIDTHS]
    uniform = math.log(TOKENS)
    slope = power(WIDTHS, [variance for variance, *_ in rows])
    narrow, wide = rows[0], rows[-1]
    table = TableSection(
        f"{TOKENS} tokens, q and k with independent unit entries",
        ("d", "variance of q·k", "entropy, no scale", "entropy, 1/√d", "gradient, no scale", "gradient, 1/√d"),
        [[str(d), *(f"{x:.4g}" for x in row)] for d, row in zip(WIDTHS, rows, strict=True)],
    )

    def line(column: int) -> list[tuple[float, float]]:
        return [(float(d), row[column]) for d, row in zip(WIDTHS, rows, strict=True)]

    entropy = Curve(
        "Entropy of a row of attention", "d", "nats", {"no scale": line(1), "1/√d": line(2)}, {"uniform": uniform}, "x"
    )
    gradient = Curve(
        "Gradient that reaches a score", "d", "mean |gradient|", {"no scale": line(3), "1/√d": line(4)}, {}, "xy"
    )
    checks = (
        Check("variance of q·k grows as d to the power", slope, 0.95, 1.05),
        Check(f"entropy at d {WIDTHS[-1]} without scale, nats", wide[1], most=0.4),
        Check(f"entropy at d {WIDTHS[-1]} with 1/√d over that at d {WIDTHS[0]}", wide[2] / narrow[2], 0.95, 1.05),
        Check("gradient with 1/√d over that without, at the widest", wide[4] / wide[3], least=3.0),
    )
    meaning = (
        "q·k is a sum of d products of unit variance, so its variance is d. Undivided, one score outgrows the others"
        " and softmax becomes a hard choice: its entropy and the gradient through it fall towards zero. Dividing by"
        " √d keeps both where they were, at any width."
    )
    return Finding("What does dividing by √d do?", meaning, checks, (table, entropy, gradient))


def _measure(width: int, seed: int) -> tuple[float, float, float, float, float]:
    """(variance of q·k, entropy without and with 1/√d in nats, mean |gradient| at a score without and with)"""
    noise = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(ROWS, 1, TOKENS, width, generator=noise) for _ in range(3))
    variance = (q @ k.transpose(-1, -2)).var().item()
    plain, scaled = (_through(q, k, v, scale) for scale in (1.0, None))
    return variance, plain[0], scaled[0], plain[1], scaled[1]


def _through(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> tuple[float, float]:
    """(entropy of a row, mean |gradient at a score|); `scale=None` is `attend`'s own."""
    # Values that are the identity make the output the pattern itself.
    pattern = attend(q, k, torch.eye(k.shape[-2]).expand(*k.shape[:-2], -1, -1), scale=scale)
    entropy = -torch.special.xlogy(pattern, pattern).sum(-1).mean().item()
    pull = pattern @ v  # a loss that wants the first value number: d loss / d score = p * (v - z)
    gradient = pattern * (v[..., 0].unsqueeze(-2) - pull[..., :1])
    return entropy, gradient.abs().mean().item()
