"""What scores are before training (lectures L0 4.1, L4 exercises 2, 3 and 11).

`scaling`: why they are divided by √d (Vaswani et al. 2017, section 3.2.1).  The median gradient is used because the
mean at the queries does not vanish: a few undecided rows carry all of it.  `additive-vs-dot`: why the dot product,
q·k/√d and one matmul for all pairs, replaced the additive score w·tanh(W_q q + W_k k), a small network evaluated for
every pair (Bahdanau et al. 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import additive, attend
from triptych.errors import InputError
from triptych.page import Curve, Facts, TableSection
from triptych.spec import AdditiveSpec, attention
from triptych_lectures.labs.counting import peak_bytes, shortest_seconds
from triptych_lectures.labs.lab import Check, Lab, LabResult, Setup, size
from triptych_lectures.labs.small import curve, power


class ScalingLab(Lab):
    """q and k of unit variance: the variance of q·k, the entropy of its softmax and the queries' gradient, over d."""

    name = "scaling"
    falsified_by = (
        "The claim is false if the variance of q·k does not grow as d. It is false too if the typical (median) query"
        " keeps its gradient at large d without the division, or loses it with the division."
    )

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

        lines = {
            name: {
                label: [max(getattr(of[at], name), 1e-12) for of in measured.values()]
                for at, label in ((1, "no scale"), (2, "1/√d"))
            }
            for name in ("entropy", "gradient")
        }
        uniform = {"uniform": math.log(self.tokens)}
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
            curve("Entropy of a row of attention", "d", "nats", self.widths, lines["entropy"], uniform, "x"),
            curve("Gradient that reaches a query, median", "d", "norm", self.widths, lines["gradient"], log="xy"),
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


class Softmaxed(NamedTuple):
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


class AdditiveVsDotLab(Lab):
    """Both scores on the same tensors: memory and time over T, sharpness over the size of the input, parameters."""

    name = "additive-vs-dot"
    falsified_by = (
        "The claim is false if the additive layer differs from its formula by more than rounding, or needs no more"
        " memory or parameters than the dot product. It is false too if its sharpness grows with the size of the input"
        " without a limit as the dot product's does, or if its limit 1/(1 + (S-1) exp(-2 Σ|w|)) is exceeded or cannot"
        " be approached."
    )

    width: int = size(64, "width of queries, keys and values, equal to hidden")
    hidden: int = size(64, "hidden units of the additive score, equal to width")
    heads: int = size(8, "heads of the layer whose parameters are counted")
    lengths: tuple[int, ...] = size((32, 64, 128, 256, 512), "tokens of a row")
    scales: tuple[float, ...] = size(
        (0.25, 1.0, 4.0, 16.0, 64.0, 1024.0), "sizes of the entries of q and k, ascending", values=2, ascending=True
    )
    tokens: int = size(64, "keys among which one is chosen, two or more", least=2)
    narrow: int = size(24, "width of queries that no dot product compares with the keys")
    wide: int = size(40, "width of those keys")

    def __post_init__(self) -> None:
        if self.width != self.hidden:
            raise InputError(
                f"sizes width {self.width} and hidden {self.hidden}: this lab inverts W_k; make them equal"
            )

    def run(self, setup: Setup) -> LabResult:
        setup.progress("measuring both over the length of the row")
        costs = [self._costs(tokens, setup.seed) for tokens in self.lengths]
        entropies = [self._entropies(scale, setup.seed) for scale in self.scales]
        limit, reached = self._sharpest(setup.seed)
        plain, added = self._parameters()
        last, before = self.scales[-1], self.scales[-2]
        memory = costs[-1]["additive"][1] / costs[-1]["dot product"][1]
        checks = (
            Check(
                f"additive, distance from its formula pair by pair, widths {self.narrow} and {self.wide}",
                self._formula_error(setup.seed),
                most=1e-12,
            ),
            Check(f"memory at {self.lengths[-1]} tokens, additive over dot product", memory, least=self.hidden / 4),
            Check(f"parameters a layer gains, beside K = {self.width}", float(added), self.width, self.width),
            Check("largest weight of keys built for it, additive, over its limit", reached / limit, 0.9, 1 + 1e-9),
            Check(
                f"entropy at size {last:g} over that at {before:g}, additive",
                entropies[-1][1] / entropies[-2][1],
                least=0.9,
            ),
            Check(f"entropy at size {before:g}, additive, nats", entropies[-2][1], least=2.0),
            Check(f"entropy at size {before:g}, dot product, nats", entropies[-2][0], most=0.2),
        )
        meaning = (
            "Both compare every query with every key, and in a layer they have the same parameters but for one vector."
            " Additive attention takes queries and keys of any widths. tanh bounds its scores by the sum of |w|, so one"
            f" key's weight has a limit, {limit:.5f} for {self.tokens} keys and the weights drawn here. Keys that tanh"
            f" saturates on the right sides reach {reached:.5f}, a hard choice. What saturation does prevent is that"
            " scaling the input sharpens the choice without end: for random keys the entropy settles, where that of the"
            f" dot product goes to 0. The cost is memory and time. Additive attention holds {self.hidden} numbers for"
            f" each pair and evaluates a tanh for each, here {memory:.0f} times the memory of the dot product, which is"
            " one matmul and in a fused kernel stores no scores at all. This lab does not measure which of the two"
            " learns better. Times depend on the machine and decide nothing."
        )
        sections = (self._cost_table(costs), self._facts(plain, added), *self._curves(costs, entropies))
        return LabResult("Why the dot product and not the additive score?", meaning, checks, sections)

    def _weights(self, seed: int, widths: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32) -> Weights:
        """W_q, W_k and w for queries and keys of these widths, each output with the variance of its input."""
        queries, keys = widths or (self.width, self.width)
        w_q, w_k, w = _draw(seed + 1, (self.hidden, queries), (self.hidden, keys), (self.hidden,), dtype=dtype)
        return w_q / queries**0.5, w_k / keys**0.5, w / self.hidden**0.5

    @torch.inference_mode()
    def _costs(self, tokens: int, seed: int) -> dict[str, tuple[float, int]]:
        """For each score, (seconds of one call, the best of several; bytes of tensors it holds at one time)."""
        inputs = _draw(seed, *[(tokens, self.width)] * 3)
        weights = self._weights(seed)
        calls: dict[str, Callable[..., Tensor]] = {
            "dot product": attend,
            "additive": lambda q, k, v: _bahdanau(q, k, v, weights),
        }
        return {
            name: (shortest_seconds(call, inputs, calls=5), peak_bytes(call, inputs)) for name, call in calls.items()
        }

    def _entropies(self, scale: float, seed: int) -> tuple[float, float]:
        """Mean entropy of a row of weights in nats (dot product, additive), for inputs with entries of this size."""
        q, k = _draw(seed, *[(self.tokens, self.width)] * 2)
        q, k, identity = scale * q, scale * k, torch.eye(self.tokens)  # as values, it makes the output the pattern
        patterns = attend(q, k, identity), _bahdanau(q, k, identity, self._weights(seed))
        dot, bahdanau = (-torch.special.xlogy(p, p).sum(-1).mean().item() for p in patterns)
        return dot, bahdanau

    def _sharpest(self, seed: int) -> tuple[float, float]:
        """(limit of one key's weight among all under bounded scores, the weight of the first of keys built to reach it)

        The keys solve W_k k = ±c sign(w), so that every tanh saturates with the sign of its w for the first key and
        against it for the others.
        """
        weights = w_q, w_k, w = self._weights(seed, dtype=torch.float64)
        tokens = self.tokens
        limit = 1 / (1 + (tokens - 1) * math.exp(-2 * float(w.abs().sum())))
        best = torch.linalg.solve(w_k, 50.0 * w.sign())
        k = torch.stack([best, *[-best] * (tokens - 1)])
        pattern = _bahdanau(torch.zeros(1, w_q.shape[1], dtype=torch.float64), k, torch.eye(tokens).double(), weights)
        return limit, float(pattern[0, 0])

    def _formula_error(self, seed: int) -> float:
        """Largest distance of additive attention from its formula, evaluated pair by pair in fp64."""
        q, k, v = _draw(seed, (5, self.narrow), (7, self.wide), (7, 3), dtype=torch.float64)
        weights = w_q, w_k, w = self._weights(seed, (self.narrow, self.wide), torch.float64)
        scores = torch.stack([torch.stack([w @ torch.tanh(w_q @ query + w_k @ key) for key in k]) for query in q])
        return (_bahdanau(q, k, v, weights) - scores.softmax(-1) @ v).abs().max().item()

    def _parameters(self) -> tuple[int, int]:
        """(parameters of an attention layer with the dot product, how many more it has with the additive score)"""
        width, heads = self.width * self.heads, self.heads
        layers = (attention(width, heads), attention(width, heads, mechanism=AdditiveSpec(width=self.width)))
        plain, bahdanau = (sum(p.numel() for p in nn.build(layer).parameters()) for layer in layers)
        return plain, bahdanau - plain

    def _cost_table(self, costs: list[dict[str, tuple[float, int]]]) -> TableSection:
        rows = []
        for tokens, cost in zip(self.lengths, costs, strict=True):
            times, nbytes = zip(*(cost[name] for name in NAMES), strict=True)
            cells = [f"{1e3 * x:.3f} ms" for x in times] + [f"{x / 2**20:.2f} MiB" for x in nbytes]
            rows.append([str(tokens), *cells, f"{nbytes[1] / nbytes[0]:.0f}"])
        header = ("tokens", *(f"{what}, {name}" for what in ("time", "memory") for name in NAMES), "times the memory")
        return TableSection(
            f"One call: width {self.width}, {self.hidden} hidden units, one head; time is the best of five",
            header,
            rows,
        )

    def _facts(self, plain: int, added: int) -> Facts:
        rows = [
            (f"A layer of width {self.width * self.heads}, dot product", f"{plain:,} parameters"),
            ("The same, additive", f"{plain + added:,} parameters"),
            (f"Queries of width {self.narrow}, keys of {self.wide}", "additive only"),
        ]
        return Facts("Parameters and widths", rows)

    def _curves(
        self, costs: list[dict[str, tuple[float, int]]], entropies: list[tuple[float, float]]
    ) -> tuple[Curve, Curve]:
        times = {name: [1e3 * cost[name][0] for cost in costs] for name in NAMES}
        sharpness = dict(zip(NAMES, zip(*entropies, strict=True), strict=True))
        title, uniform = "Entropy of a row of attention", {"uniform": math.log(self.tokens)}
        return (
            curve("Time of one call", "tokens", "ms", self.lengths, times, log="xy"),
            curve(title, "size of queries and keys", "nats", self.scales, sharpness, uniform, "x"),
        )


NAMES = ("dot product", "additive")

Weights = tuple[Tensor, Tensor, Tensor]


def _draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=noise, dtype=dtype) for shape in shapes]


def _bahdanau(q: Tensor, k: Tensor, v: Tensor, weights: Weights) -> Tensor:
    w_q, w_k, w = weights
    return additive(q, k, v, w_q=w_q, w_k=w_k, w_v=w)
