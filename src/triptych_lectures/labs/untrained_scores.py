"""Attention scores before training: the division by √d, and additive scores beside the dot product (lectures L0 4.1,
L4 exercises 2, 3 and 11).

`scaling`: why they are divided by √d (Vaswani et al. 2017, section 3.2.1).  The median gradient is used because the
mean at the queries does not vanish: undecided rows carry all of it.  `additive-vs-dot`: why the dot product,
q·k/√d and one matmul for all pairs, replaced the additive score w·tanh(W_q q + W_k k), a small network evaluated for
every pair (Bahdanau et al. 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from triptych import nn
from triptych.attention import additive, attend
from triptych.errors import InputError
from triptych.page import Facts, TableSection
from triptych.spec import AdditiveSpec, attention
from .bounds import rounded_up
from .counting import peak_bytes, shortest_seconds
from .lab import Check, Findings, Ints, Lab, Setup, clause, ratio, size
from .small_models import curve, power


class ScalingLab(Lab):
    name = "scaling"

    widths: Ints = size((4, 8, 16, 32, 64, 128, 512, 2048), "d of q and k, ascending", values=2, ascending=True)
    tokens: int = size(64, "queries, and keys, of a row; two or more", least=2)
    rows: int = size(8, "rows of each width")
    small: float = size(0.01, "norm below which a gradient counts as none")

    def findings(self, setup: Setup) -> Findings:
        measured = [self._measure(width, setup.seed) for width in self.widths]
        variances, plain, scaled = zip(*measured, strict=True)
        scales = {"no scale": plain, "1/√d": scaled}
        names = ("entropy", "median gradient", "mean gradient", f"gradient below {self.small:g}")
        columns = [f"{name}, {scale}" for name in names for scale in scales]
        table = TableSection(
            f"{self.tokens} tokens, q and k with independent entries of variance 1",
            ("d", "variance of q·k", "its root", "divided by √d", *columns),
            [
                [str(d), *(f"{x:.4g}" for x in (variance, variance**0.5, (variance / d) ** 0.5))]
                + [f"{x:.3g}" for of_both in zip(*both, strict=True) for x in of_both]
                for d, (variance, *both) in zip(self.widths, measured, strict=True)
            ],
        )
        entropies, gradients = (
            {scale: [max(one[i], 1e-12) for one in of_scale] for scale, of_scale in scales.items()} for i in range(2)
        )
        last, most = self.widths[-1], math.log(self.tokens)
        undivided, divided, early = plain[-1], scaled[-1], ratio(plain[0].gradient, scaled[0].gradient)
        furthest = max((v / d for v, d in zip(variances, self.widths, strict=True)), key=lambda x: abs(x - 1))
        entropy_range, gradient_range = (ratio(max(of), min(of)) for of in list(zip(*scaled, strict=True))[:2])
        share = f"share of queries with a gradient below {self.small:g} at d {last}"
        over_divided = f"gradient at a query, d {last}, without scale over with 1/√d"
        mean_ratio, few = ratio(undivided.mean, divided.mean), ratio(undivided.gradient, undivided.mean)
        yield clause(
            "q·k is a sum of d products of variance 1, and its variance is d.",
            Check("variance of q·k grows as d to the power", power(self.widths, variances), 0.95, 1.05),
            Check("variance of q·k over d, the furthest from 1", furthest, 0.8, 1.2),
            instead="The variance is not d",
        )
        yield clause(
            f"Undivided, softmax becomes a hard choice: at d {last} the entropy of a row is"
            f" {undivided.entropy:.2f} nats, of at most {rounded_up(most, '.2f')}, and"
            f" {undivided.starved:.0%} of the queries get a gradient below {self.small:g}."
            f" At d {self.widths[0]} the median one is still {early:.2g} times that with the division.",
            Check(f"entropy at d {last} without scale, nats", undivided.entropy, most=0.1 * most),
            Check(f"median {over_divided}", ratio(undivided.gradient, divided.gradient), most=0.01),
            Check(f"{share}, without scale", undivided.starved, least=0.5),
            instead="Undivided, softmax did not become a hard choice without a gradient",
        )
        yield clause(
            f"Not all do: the other {1 - undivided.starved:.0%}, whose best two scores are close, keep one, so the mean"
            f" is {mean_ratio:.2g} times that with the division, where the median is nearly 0.",
            Check(f"mean {over_divided}", mean_ratio, least=0.1),
            Check(f"median over mean gradient at a query, d {last}, without scale", few, most=0.1),
            instead="That some rows keep the whole gradient was not seen",
        )
        yield clause(
            f"Divided by √d, entropy and gradient keep their size from d {self.widths[0]} to {last}.",
            Check("entropy with 1/√d, largest over smallest", entropy_range, most=1.1),
            Check("median gradient with 1/√d, largest over smallest", gradient_range, most=2.0),
            Check(f"{share}, with 1/√d", divided.starved, most=0.01),
            instead="With the division they do not all keep their size",
        )
        curves = (
            curve("Entropy of a row of attention", "d", "nats", self.widths, entropies, {"uniform": most}, "x"),
            curve("Gradient that reaches a query, median", "d", "norm", self.widths, gradients, log="xy"),
        )
        yield table
        yield from curves

    def _measure(self, width: int, seed: int) -> tuple[float, Softmaxed, Softmaxed]:
        """(variance of q·k, softmax without a scale, softmax with 1/√d)"""
        q, k, v = _draw(seed, *[(self.rows, 1, self.tokens, width)] * 3, dtype=torch.float64)
        variance = (q @ k.mT).var().item()
        return variance, _softmaxed(q, k, v, 1.0, self.small), _softmaxed(q, k, v, None, self.small)


class Softmaxed(NamedTuple):
    """One scale at one width: mean entropy of a row of weights in nats, the median and the mean norm of the gradient
    at a query, and the share of queries whose gradient is below `small`."""

    entropy: float
    gradient: float
    mean: float
    starved: float


def _softmaxed(q: Tensor, k: Tensor, v: Tensor, scale: float | None, small: float) -> Softmaxed:
    """q, k, v `[rows, 1, tokens, d]`; `scale=None` is the 1/√d of `attend`."""
    identity = torch.eye(q.shape[2], dtype=q.dtype).expand(len(q), 1, -1, -1)  # as values, they give the pattern
    entropy = _entropy(attend(q, k, identity, scale=scale))
    q = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(attend(q, k, v, scale=scale)[..., 0].sum(), q)  # of each output's first number
    norms = gradient.norm(dim=-1).flatten()
    starved = (norms < small).double().mean().item()
    return Softmaxed(entropy, norms.median().item(), norms.mean().item(), starved)


def _entropy(pattern: Tensor) -> float:
    """The mean over its rows, in nats."""
    return float(-torch.special.xlogy(pattern, pattern).sum(-1).mean())


class AdditiveVsDotLab(Lab):
    name = "additive-vs-dot"

    width: int = size(64, "width of queries, keys and values, equal to hidden")
    hidden: int = size(64, "hidden units of the additive score, equal to width")
    heads: int = size(8, "heads of the layer whose parameters are counted")
    lengths: Ints = size((32, 64, 128, 256, 512), "tokens of a row")
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

    def findings(self, setup: Setup) -> Findings:
        setup.progress("measuring both over the length of the row")
        milliseconds, nbytes = self._costs(setup.seed)
        dot, bahdanau = zip(*(self._entropies(scale, setup.seed) for scale in self.scales), strict=True)
        limit, reached = self._sharpest(setup.seed)
        plain, added = self._parameters()
        last, before = self.scales[-1], self.scales[-2]
        formula = f"additive, distance from its formula pair by pair, widths {self.narrow} and {self.wide}"
        settled = bahdanau[-1] / bahdanau[-2]
        memory, even = nbytes[ADDITIVE][-1] / nbytes[DOT][-1], bahdanau[-2] / math.log(self.tokens)
        pairs = nbytes[ADDITIVE][-1] / (4 * self.hidden * self.lengths[-1] ** 2)  # of numbers of 4 bytes
        yield clause(
            f"Additive attention is its formula, for queries and keys of any widths, and in a layer of equal width"
            f" it has {added} parameters more than the dot product: the vector w.",
            Check(formula, self._formula_error(setup.seed), most=1e-12),
            Check(f"parameters a layer gains, beside K = {self.width}", float(added), self.width, self.width),
            instead="The additive layer does not have this formula and these parameters",
        )
        yield clause(
            "tanh bounds its scores by the sum of |w|, and so the weight of one key. Keys that saturate every tanh"
            f" on the right side reach {reached / limit:.1%} of the limit, {limit:.5f} for {self.tokens} keys: a"
            " hard choice is possible.",
            Check("largest weight of keys built for it, additive, over its limit", reached / limit, 0.9, 1 + 1e-9),
            Check("largest weight of keys built for it, additive", reached, least=0.9),
            instead="The weight of one key does not come to this limit, or no hard choice is possible",
        )
        yield clause(
            "For random keys, larger inputs sharpen the choice to a limit and no further: the entropy settles at"
            f" {bahdanau[-1]:.2f} nats, {even:.0%} of that of even weights, where that of the dot product, the"
            f" control, falls to {abs(dot[-1]):.1g}.",
            Check(f"entropy at size {last:g} over that at {before:g}, additive", settled, 0.9, 1.1),
            Check(f"entropy at size {before:g}, additive, over that of even weights", even, 0.5, 0.99),
            Check(f"entropy at size {before:g}, dot product, nats", dot[-2], most=0.2),
            instead="The two scores do not differ so in how sharp they become",
        )
        yield clause(
            f"It holds {self.hidden} numbers for each pair before tanh and as many after it, and at {self.lengths[-1]}"
            f" tokens {memory:.0f} times the memory of the dot product.",
            Check(f"memory at {self.lengths[-1]} tokens, additive over dot product", memory, self.hidden / 4),
            Check(f"numbers held for each pair, over {self.hidden}", pairs, 1.9),
            instead="The memory is not that of the pairs' numbers",
        )
        rows = [
            (f"A layer of width {self.width * self.heads}, dot product", f"{plain:,} parameters"),
            ("The same, additive", f"{plain + added:,} parameters"),
        ]
        sharpness, uniform = {DOT: dot, ADDITIVE: bahdanau}, {"uniform": math.log(self.tokens)}
        title = "Entropy of a row of attention"
        yield self._cost_table(milliseconds, nbytes)
        yield Facts("Parameters and widths", rows)
        yield curve("Time of one call", "tokens", "ms", self.lengths, milliseconds, log="xy")
        yield curve(title, "size of queries and keys", "nats", self.scales, sharpness, uniform, "x")

    def _weights(self, seed: int, widths: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32) -> Weights:
        """W_q, W_k and w for queries and keys of these widths, each output with the variance of its input."""
        queries, keys = widths or (self.width, self.width)
        w_q, w_k, w = _draw(seed + 1, (self.hidden, queries), (self.hidden, keys), (self.hidden,), dtype=dtype)
        return w_q / queries**0.5, w_k / keys**0.5, w / self.hidden**0.5

    @torch.inference_mode()
    def _costs(self, seed: int) -> tuple[Costs, Costs]:
        """For each score and each length, milliseconds of one call, the best of several, and the bytes of tensors that
        it holds at one time."""
        weights = self._weights(seed)
        calls: dict[str, Callable[..., Tensor]] = {DOT: attend, ADDITIVE: partial(_bahdanau, weights=weights)}
        inputs = [_draw(seed, *[(tokens, self.width)] * 3) for tokens in self.lengths]
        times = {name: [1e3 * shortest_seconds(call, qkv, calls=5) for qkv in inputs] for name, call in calls.items()}
        return times, {name: [peak_bytes(call, qkv) for qkv in inputs] for name, call in calls.items()}

    def _entropies(self, scale: float, seed: int) -> tuple[float, float]:
        """Mean entropy of a row of weights in nats (dot product, additive), for inputs with entries of this size."""
        q, k = _draw(seed, *[(self.tokens, self.width)] * 2)
        q, k, identity = scale * q, scale * k, torch.eye(self.tokens)  # as values, it makes the output the pattern
        return _entropy(attend(q, k, identity)), _entropy(_bahdanau(q, k, identity, self._weights(seed)))

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

    def _cost_table(self, milliseconds: Costs, nbytes: Costs) -> TableSection:
        both = (zip(*costs.values(), strict=True) for costs in (milliseconds, nbytes))
        rows = [
            [
                str(n),
                *(f"{x:.3f} ms" for x in times),
                *(f"{x / 2**20:.2f} MiB" for x in held),
                f"{held[1] / held[0]:.0f}",
            ]
            for n, times, held in zip(self.lengths, *both, strict=True)
        ]
        header = ("tokens", *(f"{what}, {name}" for what in ("time", "memory") for name in nbytes), "times the memory")
        title = f"One call: width {self.width}, {self.hidden} hidden units, one head; time is the best of five"
        return TableSection(title, header, rows)


DOT, ADDITIVE = "dot product", "additive"
Costs = Mapping[str, Sequence[float]]  # of each score, at each length
Weights = tuple[Tensor, Tensor, Tensor]


def _draw(seed: int, *shapes: Ints, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=noise, dtype=dtype) for shape in shapes]


def _bahdanau(q: Tensor, k: Tensor, v: Tensor, weights: Weights) -> Tensor:
    w_q, w_k, w = weights
    return additive(q, k, v, w_q=w_q, w_k=w_k, w_v=w)
