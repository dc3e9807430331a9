"""Stacked causal convolutions: how far back they reach, and what that takes, beside recurrence and attention.

Oord et al. 2016 (WaveNet) and Kalchbrenner et al. 2016 (ByteNet), with dilation; Gehring et al. 2017, without; Vaswani
et al. 2017, table 1, for the lengths of the paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.attention import attend
from triptych.errors import InputError
from triptych.page import TableSection
from triptych.spec import attention, causal
from triptych.train import OptimizerSettings, Schedule
from .bounds import rounded_up
from .counting import longest_chain, products
from .generated_tasks import Places, TrainingBudget, attention_alone, trained_head
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .small_models import curve, descend, line_table, parameters

PLAIN, DILATED, RECURRENT, ATTENTION = "convolutions", "dilated convolutions", "GRU", "attention"
BEYOND = 3  # distances outside the reach of the dilated convolutions that are tested


class ConvolutionLab(Lab):
    name = "convolution"

    kernel: int = size(2, "tokens that one convolution reads, k, two or more", least=2)
    layers: int = size(4, "layers of the trained stacks, two or more", least=2)
    symbols: int = size(4, "distinct symbols", least=2)
    width: int = size(64, "width of embeddings and states")
    length: int = size(32, "symbols of a row")
    steps: int = size(200, "training steps")
    rows: int = size(32, "rows of a training step")
    rate: float = size(3e-3, "learning rate of AdamW, which falls linearly to 0")
    tested: int = size(256, "new rows that are tested")
    apart: Ints = size((4, 8, 16, 32, 64), "distances that are to be connected", values=2, ascending=True)
    tokens: Ints = size((32, 128), "tokens of the rows on which costs are counted", values=2, ascending=True)

    def __post_init__(self) -> None:
        if self.farthest >= self.length:
            raise InputError(
                f"size length: the dilated stack reaches {self.farthest - BEYOND} symbols back; make the rows longer"
                f" than {self.farthest}, or take fewer layers"
            )

    def dilations(self, name: str, layers: int) -> list[int]:
        """Of each layer: 1, or k times that of the layer before, so that no token is read twice."""
        return [self.kernel**layer if name == DILATED else 1 for layer in range(layers)]

    def reach(self, name: str, layers: int) -> int:
        """How far back a stack reads by the formula: (k - 1) times the sum of its dilations."""
        return (self.kernel - 1) * sum(self.dilations(name, layers))

    @property
    def farthest(self) -> int:
        """The largest distance that is tested."""
        return self.reach(DILATED, self.layers) + BEYOND

    def findings(self, setup: Setup) -> Findings:
        distances, chance = range(1, self.farthest + 1), 1 / self.symbols
        right = {name: self._right(name, setup) for name in (PLAIN, DILATED)}
        inside, beyond = (
            [share for name, line in right.items() for n, share in zip(distances, line, strict=True)
             if (n <= self.reach(name, self.layers)) == within]
            for within in (True, False)
        )  # fmt: skip
        setup.progress(f"attention, distance {self.farthest}: {self.steps} steps")
        task = Places(self.symbols, self.length, (self.farthest,))
        budget = TrainingBudget(self.steps, self.rows, self.rate, warmup=0.1, shape="linear")
        head = attention_alone(attention(self.width, 1, head_width=self.width), self.symbols, self.length, setup.seed)
        attended = trained_head(head, task, budget, self.tested, setup.seed).right
        setup.progress("counting layers and costs")
        layers = {name: [self._layers(name, n, setup.seed) for n in self.apart] for name in (PLAIN, DILATED)}
        formula = {
            name: [next(own for own in count(1) if self.reach(name, own) >= n) for n in self.apart] for name in layers
        }
        off = max(abs(a - b) for name in layers for a, b in zip(layers[name], formula[name], strict=True))
        kinds = (PLAIN, DILATED, RECURRENT, ATTENTION)
        costs = {name: [self._cost(name, tokens) for tokens in self.tokens] for name in kinds}
        times, last = self.tokens[-1] / self.tokens[0], self.apart[-1]
        chain, flops = (
            {name: getattr(line[-1], of) / getattr(line[0], of) for name, line in costs.items()}
            for of in ("chain", "flops")
        )
        constant = max(chain[name] for name in (PLAIN, DILATED, ATTENTION))
        near, far = (self.reach(name, self.layers) for name in (PLAIN, DILATED))
        yield clause(
            f"{self.layers} convolutions of width {self.kernel} name the symbol up to {near} places back, with"
            f" dilation up to {far} ({min(inside):.1%} right at the worst), and at any distance beyond no more than"
            f" guessing gives ({rounded_up(max(beyond), '.0%')} at most): the receptive field says exactly where"
            " they fail.",
            Check("inside the receptive field: right, the worst distance", min(inside), least=0.95),
            Check("beyond it: right, the best distance", max(beyond), most=chance + 0.05),
            instead="The receptive field did not say where the stacks fail",
        )
        yield clause(
            f"Two tokens {last} apart are connected by {layers[PLAIN][-1]:g} layers, n / (k - 1), with dilation by"
            f" {layers[DILATED][-1]:g}, which grows as the logarithm, and by one layer of attention: trained on"
            f" distance {self.farthest}, beyond both stacks, it is right in {attended:.0%}.",
            Check("layers needed, by gradients: the largest difference from the formula", off, most=0),
            Check(f"one layer of attention: right at distance {self.farthest}", attended, least=0.95),
            instead="The layers that connect two tokens were not as claimed",
        )
        yield clause(
            f"In rows {times:g} times as long, a GRU's chain of products that wait for one another is"
            f" {chain[RECURRENT]:.3g} times as long; that of convolutions and attention stays as it was. The FLOPs"
            f" of convolutions grow {flops[PLAIN]:.3g} times, those of attention {flops[ATTENTION]:.3g} times.",
            Check("GRU: growth of the chain over that of the row", chain[RECURRENT] / times, 0.9, 1.1),
            Check("convolutions and attention: growth of the chain, the largest", constant, 1, 1),
            Check("convolutions: growth of the FLOPs over that of the row", flops[PLAIN] / times, 0.99, 1.01),
            Check("attention: growth of the FLOPs over that of the row", flops[ATTENTION] / times, least=1.1),
            instead="The costs did not grow as claimed",
        )
        rows = [
            [name, f"{line[0].parameters:,}", *(f"{one.flops:,}" for one in line), *(f"{one.chain}" for one in line)]
            for name, line in costs.items()
        ]
        of_tokens = [f"{what}, T {tokens}" for what in ("FLOPs", "chain") for tokens in self.tokens]
        yield curve("Symbols named right, by distance", "places back", "share", distances, right, {"chance": chance})
        title = "Layers that connect two tokens, by their gradients; one of attention does"
        yield line_table(title, "tokens apart", self.apart, layers, "g")
        title = f"Costs of {self.layers} layers, and of one of the others, at width {self.width}"
        yield TableSection(title, ("layers of", "parameters", *of_tokens), rows)

    def _stack(self, name: str, layers: int, outputs: int, seed: int) -> Convolutions:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Convolutions(self.symbols, outputs, self.width, self.kernel, self.dilations(name, layers))

    def _right(self, name: str, setup: Setup) -> list[float]:
        """The share of new symbols named right at each distance, of a stack with an output for each distance."""
        setup.progress(f"{name}: {self.steps} steps")
        module = self._stack(name, self.layers, self.farthest * self.symbols, setup.seed)
        noise = torch.Generator().manual_seed(setup.seed)

        def answered(rows: int) -> tuple[Tensor, Tensor]:
            """Logits `[N, distances, symbols]`, and the symbols so far back `[N, distances]`."""
            ids = torch.randint(self.symbols, (rows, self.length), generator=noise)
            asked = range(self.farthest, self.length)
            back = torch.stack([ids[:, asked.start - n : self.length - n] for n in range(1, self.farthest + 1)], -1)
            logits = module(ids)[:, asked.start :].unflatten(-1, (self.farthest, self.symbols))
            return logits.flatten(0, 1), back.flatten(0, 1)

        def loss(step: int) -> Tensor:
            logits, back = answered(self.rows)
            return F.cross_entropy(logits.flatten(0, 1), back.flatten())

        optimizer = OptimizerSettings(name="adamw", lr=self.rate, weight_decay=0.0)
        schedule = Schedule(shape="linear", warmup=0.1)
        for _ in descend(module, loss, steps=self.steps, optimizer=optimizer, schedule=schedule):
            pass
        with torch.no_grad():
            logits, back = answered(self.tested)
        shares: list[float] = (logits.argmax(-1) == back).double().mean(0).tolist()
        return shares

    def _layers(self, name: str, apart: int, seed: int) -> float:
        """The fewest layers through which a token has a gradient in the one `apart` places before it; infinite where
        not even `apart` layers are enough."""
        for layers in range(1, apart + 1):
            embedded = torch.randn(1, apart + 1, self.width, dtype=torch.float64, requires_grad=True)
            out = self._stack(name, layers, 1, seed).double().states(embedded)
            (gradient,) = torch.autograd.grad(out[0, -1].sum(), embedded)
            if gradient[0, 0].abs().max() > 0:
                return layers
        return math.inf

    def _cost(self, name: str, tokens: int) -> LayerCost:
        """Of the layers alone, on embedded tokens; attention by the path whose products are torch's own."""
        x, width = torch.randn(1, tokens, self.width, requires_grad=True), self.width
        layer: nn.Module
        run: Callable[[], Tensor]
        if name == RECURRENT:
            gru = nn.GRU(width, width, batch_first=True)
            layer, run = gru, lambda: gru(x)[0]
        elif name == ATTENTION:
            *qkv, out = (nn.Linear(width, width, bias=False) for _ in range(4))
            layer = nn.ModuleList([*qkv, out])
            run = lambda: out(attend(*(w(x)[0] for w in qkv), mask=causal(), path="materialized"))  # noqa: E731
        else:
            stack = self._stack(name, self.layers, 1, 0)
            layer, run = stack.layers, lambda: stack.states(x)
        return LayerCost(parameters(layer), products(run).total, longest_chain(run()))


class LayerCost(NamedTuple):
    """Parameters of some layers, FLOPs of their products on a row, and the longest chain of these."""

    parameters: int
    flops: int
    chain: int


class Convolutions(nn.Module):
    """Embeddings, causal convolutions of width k with these dilations, a tanh after each, and a linear head.

    A convolution reads its own token and k - 1 before it, `dilation` apart; before the row there are zeros.
    """

    def __init__(self, symbols: int, outputs: int, width: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(symbols, width), nn.Linear(width, outputs)
        self.before = [dilation * (kernel - 1) for dilation in dilations]  # places back that each layer reads
        convolutions = [nn.Conv1d(width, width, kernel, dilation=dilation) for dilation in dilations]
        for one in convolutions:  # so that a layer keeps the variance of its input
            nn.init.kaiming_normal_(one.weight, nonlinearity="linear")
        self.layers = nn.ModuleList(convolutions)

    def forward(self, ids: Tensor) -> Tensor:
        """`[B, T]` -> `[B, T, outputs]`."""
        logits: Tensor = self.head(self.states(self.embed(ids)))
        return logits

    def states(self, x: Tensor) -> Tensor:
        """`[B, T, D]` -> the last layer's states `[B, T, D]`."""
        x = x.transpose(1, 2)
        for layer, before in zip(self.layers, self.before, strict=True):
            x = layer(F.pad(x, (before, 0))).tanh()
        return x.transpose(1, 2)
