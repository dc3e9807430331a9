"""Why the dot product, and not the score attention began with?  (Lecture L4; Bahdanau et al. 2015, Vaswani et al. 2017)

Additive: w·tanh(W_q q + W_k k), a small network asked for every pair.  Dot product: q·k/√d, one matmul for all pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import additive, attend
from triptych.errors import InputError
from triptych.labs.lab import Check, Finding, Setup
from triptych.page import Curve, Facts, TableSection
from triptych.spec import Additive, attention

WIDTH, HIDDEN, HEADS = 64, 64, 8
LENGTHS = (32, 64, 128, 256, 512)
SIZES = (0.25, 1.0, 4.0, 16.0, 64.0)
TOKENS = 64
NARROW, WIDE = 24, 40  # of queries and keys that no dot product can compare


def run(setup: Setup) -> Finding:
    """Both scores on the same tensors: time over T, sharpness over the size of the input, widths, parameters."""
    setup.say("timing both over the length of the row")
    times = [_times(tokens, setup.seed) for tokens in LENGTHS]
    sharp = [_entropies(size, setup.seed) for size in SIZES]
    error, refused = _mismatched(setup.seed)
    plain, gained = _parameters()
    speed = TableSection(
        f"Time of one call: width {WIDTH}, {HIDDEN} hidden units, one head, best of several",
        ("tokens", "dot product", "additive", "times slower", "numbers built, additive"),
        [
            [f"{t}", f"{1e3 * d:.3f} ms", f"{1e3 * a:.2f} ms", f"{a / d:.0f}", f"{t * t * HIDDEN:,}"]
            for t, (d, a) in zip(LENGTHS, times, strict=True)
        ],
    )
    facts = Facts(
        "What each needs",
        [
            (f"A layer of width {WIDTH * HEADS}, dot product", f"{plain:,} parameters"),
            ("The same, additive", f"{plain + gained:,} parameters"),
            (f"Queries of width {NARROW}, keys of {WIDE}", "additive only"),
        ],
    )
    slower = Curve(
        "Time of one call",
        "tokens",
        "ms",
        {n: [(float(t), 1e3 * x[i]) for t, x in zip(LENGTHS, times, strict=True)] for i, n in enumerate(NAMES)},
        {},
        "xy",
    )
    flat = Curve(
        "Entropy of a row of attention",
        "size of queries and keys",
        "nats",
        {n: [(size, x[i]) for size, x in zip(SIZES, sharp, strict=True)] for i, n in enumerate(NAMES)},
        {"uniform": math.log(TOKENS)},
        "x",
    )
    checks = (
        Check("additive against its formula, pair by pair, widths 24 and 40", error, most=1e-12),
        Check("dot products of width 24 with width 40 refused", float(refused), 1.0, 1.0),
        Check(f"additive over dot product, time at {LENGTHS[-1]} tokens", times[-1][1] / times[-1][0], least=3.0),
        Check(f"parameters a layer gains, beside K = {WIDTH}", float(gained), WIDTH, WIDTH),
        Check(f"entropy at size {SIZES[-1]:g}, dot product, nats", sharp[-1][0], most=0.2),
        Check(f"entropy at size {SIZES[-1]:g}, additive, nats", sharp[-1][1], least=2.0),
    )
    return Finding("Why the dot product, and not the first score?", MEANING, checks, (speed, facts, slower, flat))


NAMES = ("dot product", "additive")
MEANING = (
    "Both look every key up for every query, and in a layer they have the same parameters but for one vector. Additive"
    " attention takes queries and keys of any widths, and tanh bounds its scores by the sum of |w|: however large the"
    " input, its softmax cannot become a hard choice, where that of the dot product does. But it asks a small network"
    " for each pair - T S A tanh's - while all dot products are one matmul, which is what processors are made for, and"
    " which fused kernels never even store. That is why it lost, not because it chooses worse; which of the two learns"
    " better, this lab does not ask."
)


def _draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=noise, dtype=dtype) for shape in shapes]


Weights = tuple[Tensor, Tensor, Tensor]


def _weights(seed: int, queries: int = WIDTH, keys: int = WIDTH, dtype: torch.dtype = torch.float32) -> Weights:
    """W_q, W_k and w, each keeping the size of what it maps."""
    w_q, w_k, w = _draw(seed + 1, (HIDDEN, queries), (HIDDEN, keys), (HIDDEN,), dtype=dtype)
    return w_q / queries**0.5, w_k / keys**0.5, w / HIDDEN**0.5


def _bahdanau(q: Tensor, k: Tensor, v: Tensor, weights: Weights) -> Tensor:
    w_q, w_k, w = weights
    return additive(q, k, v, w_q=w_q, w_k=w_k, w_v=w)


@torch.inference_mode()
def _times(tokens: int, seed: int) -> tuple[float, float]:
    """Seconds of one call (dot product, additive), the best of several."""
    q, k, v = _draw(seed, *[(tokens, WIDTH)] * 3)
    weights = _weights(seed)
    return _best(lambda: attend(q, k, v), 30), _best(lambda: _bahdanau(q, k, v, weights), 5)


def _best(call: Callable[[], object], times: int) -> float:
    found = math.inf
    for _ in range(times):
        began = time.perf_counter()
        call()
        found = min(found, time.perf_counter() - began)
    return found


def _entropies(size: float, seed: int) -> tuple[float, float]:
    """Mean entropy of a row of weights in nats (dot product, additive), for inputs with entries of this size."""
    q, k = _draw(seed, *[(TOKENS, WIDTH)] * 2)
    q, k, own = size * q, size * k, torch.eye(TOKENS)  # values that are the identity make the output the pattern
    patterns = attend(q, k, own), _bahdanau(q, k, own, _weights(seed))
    dot, add = (-torch.special.xlogy(p, p).sum(-1).mean().item() for p in patterns)
    return dot, add


def _mismatched(seed: int) -> tuple[float, bool]:
    """(largest distance of additive attention from its formula in fp64, whether the dot product refused the widths)"""
    q, k, v = _draw(seed, (5, NARROW), (7, WIDE), (7, 3), dtype=torch.float64)
    weights = _weights(seed, NARROW, WIDE, torch.float64)
    w_q, w_k, w = weights
    scores = torch.stack([torch.stack([w @ torch.tanh(w_q @ one + w_k @ other) for other in k]) for one in q])
    error = (_bahdanau(q, k, v, weights) - scores.softmax(-1) @ v).abs().max().item()
    try:
        attend(q, k, v)
    except InputError:
        return error, True
    return error, False


def _parameters() -> tuple[int, int]:
    """Of an attention layer with the dot product, and how many more with the additive score."""
    layers = (attention(WIDTH * HEADS, HEADS), attention(WIDTH * HEADS, HEADS, mechanism=Additive(width=WIDTH)))
    plain, bahdanau = (sum(p.numel() for p in nn.build(layer).parameters()) for layer in layers)
    return plain, bahdanau - plain
