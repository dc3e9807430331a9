"""Gradients through depth: pre-norm, post-norm, no residual (He et al. 2015; Xiong et al. 2020; lectures L0, L1).

Before training, the claim is false if the first of 64 blocks gets no gradient with a residual stream or gets one
without, or if the last block's gradient falls with depth alike for both placements of the norm.  That post-norm needs
a warm-up is false if it learns as well without one, or if pre-norm fails without one too (the control).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.labs.lab import Check, LabResult, Setup
from triptych.labs.small import Points, block, decoder, fit, growth, power
from triptych.page import Curve, Section, TableSection
from triptych.spec import LayerNormSpec, ModelSpec, NormsSpec, SinusoidalSpec, parts
from triptych.train import Example, OptimizerSettings, Pairs, Schedule, collate, loss

DEPTHS = (2, 4, 8, 16, 32, 64)
DRAWS = 4
WIDTH, HEADS, HIDDEN, VOCAB = 64, 4, 256, 97
ROWS, TOKENS = 4, 32

# The stacks that are trained: on sequences in which one symbol decides the next, nine times out of ten.
LAYERS, NARROW, SYMBOLS, LENGTH = 8, 32, 24, 24
STEPS, BATCH, RATE = 120, 16, 3e-3
WARMUPS = {"no warm-up": 0.0, "warm-up": 0.5}  # as a share of the steps
LAST = 10  # steps whose mean loss counts


@dataclass(frozen=True, kw_only=True)
class NoResidual(parts.BlockSpec):
    """A block without the residual stream: each sublayer replaces what it read."""


class NoResidualBlock(nn.Block, of=NoResidual):
    def forward(self, x: Tensor, ctx: nn.Context, layer: int, taps: nn.Taps) -> Tensor:
        assert self.mlp is not None
        x = self.attn(self.attn_norm.pre(x), ctx.own[layer], layer, taps.at("attn"))
        changed: Tensor = self.mlp(self.mlp_norm.pre(x), ctx, taps.at("mlp"))
        return changed


NORM = LayerNormSpec(width=WIDTH)
STACKS: dict[str, tuple[type[parts.BlockSpec], NormsSpec]] = {
    "pre-norm": (parts.BlockSpec, NormsSpec(pre=NORM)),
    "post-norm": (parts.BlockSpec, NormsSpec(post=NORM)),
    "no residual": (NoResidual, NormsSpec()),
    "no residual, with norms": (NoResidual, NormsSpec(pre=NORM)),
}


def run(setup: Setup) -> LabResult:
    """Untrained stacks of 2 to 64 blocks: the gradient at the first and the last; then 8 blocks trained."""
    gradients: dict[str, list[tuple[float, float]]] = {}
    for name in STACKS:
        setup.progress(f"{name}: {DEPTHS[0]} to {DEPTHS[-1]} layers")
        gradients[name] = [_measure(name, depth, setup.seed) for depth in DEPTHS]
    arrives, last = ({name: [pair[i] for pair in pairs] for name, pairs in gradients.items()} for i in (0, 1))
    fall = math.exp(growth(DEPTHS, arrives["no residual"]))
    goes = {name: power(DEPTHS, last[name]) for name in STACKS}
    losses: dict[tuple[str, str], Points] = {}
    for name in ("pre-norm", "post-norm"):
        for how, warmup in WARMUPS.items():
            setup.progress(f"{name}, {how}: training {LAYERS} layers for {STEPS} steps")
            losses[name, how] = _train(name, warmup, setup.seed)
    end = {key: fmean(nats for _, nats in points[-LAST:]) for key, points in losses.items()}
    gain = {name: end[name, "no warm-up"] - end[name, "warm-up"] for name in ("pre-norm", "post-norm")}
    checks = (
        Check(
            f"pre-norm, {DEPTHS[-1]} layers: gradient at the first block over the last", arrives["pre-norm"][-1], 0.5
        ),
        Check("no residual: what is left of it after each further layer", fall, most=0.8),
        Check("pre-norm: the last block's gradient goes as depth to the power", goes["pre-norm"], -0.7, -0.25),
        Check("post-norm: the last block's gradient goes as depth to the power", goes["post-norm"], -0.15, 0.35),
        Check(f"post-norm, {LAYERS} layers trained: nats lost without a warm-up", gain["post-norm"], least=0.5),
        Check("control: nats that pre-norm loses without a warm-up", gain["pre-norm"], most=0.2),
    )
    meaning = (
        "x + f(x) passes the gradient on whatever f is, so with a residual stream the loss reaches the first of 64"
        f" blocks. Without one every layer multiplies what passes: {fall:.2f} of it is left after each, and 64 layers"
        " leave nothing. Norms alone, without the addition, keep the scale from collapsing so fast but do not carry"
        " the gradient. Before training both placements of the norm carry it; what differs is the top. Under post-norm"
        " the last block's gradient does not shrink with depth, under pre-norm it does as 1/√depth (theorem 1 of Xiong"
        f" et al.). Training shows what that means: {LAYERS} post-norm layers at a learning rate of {RATE:g} end at"
        f" {end['post-norm', 'no warm-up']:.2f} nats without a warm-up and at {end['post-norm', 'warm-up']:.2f} with"
        f" one, where guessing is {math.log(SYMBOLS):.2f}; pre-norm ends at {end['pre-norm', 'no warm-up']:.2f} and"
        f" {end['pre-norm', 'warm-up']:.2f}. The rates are those of Xavier's weights, one size and one learning rate."
    )
    sections: tuple[Section, ...] = (_gradient_table(arrives), _trained_table(end), *_curves(arrives, last, losses))
    return LabResult("What carries the gradient through a deep stack?", meaning, checks, sections)


def _measure(name: str, depth: int, seed: int) -> tuple[float, float]:
    """(gradient at the first block's input over that at the last's output, gradient of the last block's weights),
    geometric means over `DRAWS` draws of weights and tokens."""
    pairs = [_gradients(_spec(name, depth), seed * DRAWS + draw) for draw in range(DRAWS)]
    ratio, last = (math.exp(fmean(math.log(pair[i]) for pair in pairs)) for i in (0, 1))
    return ratio, last


def _spec(name: str, depth: int) -> ModelSpec:
    kind, norms = STACKS[name]
    usual = block(WIDTH, HEADS, HIDDEN, norms=norms)
    one = kind(attn=usual.attn, mlp=usual.mlp, attn_norm=norms, mlp_norm=norms)
    spec = decoder(VOCAB, (one,) * depth, embedded=SinusoidalSpec(width=WIDTH), final_norm=norms.pre)
    return replace(spec, init_std=1.0)


def _xavier(module: nn.Transformer, seed: int) -> torch.Generator:
    """Draws the matrices outside the embedding anew (Glorot & Bengio 2010)."""
    noise = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            torch.nn.init.xavier_normal_(weight, generator=noise)
    return noise


def _gradients(spec: ModelSpec, seed: int) -> tuple[float, float]:
    """(norm of the gradient at the first block's input over that at the last's output, norm at the last's weights)"""
    module = nn.new(spec, seed).double()  # a vanished gradient is far below what fp32 can tell from 0
    assert module.decoder is not None
    noise = _xavier(module, seed)
    stream: list[Tensor] = []
    for part in module.decoder.blocks:
        part.register_forward_hook(lambda _, inputs, output: stream.extend((inputs[0], output)))
    ids, targets = torch.randint(VOCAB, (2, ROWS, TOKENS), generator=noise).numpy().astype(np.int32)
    rows = [Example(row, target, np.ones(TOKENS, bool)) for row, target in zip(ids, targets, strict=True)]
    nats, count = loss(module, collate(rows))
    weights = [weight for weight in module.decoder.blocks[-1].parameters() if weight.dim() == 2]
    first, last, *own = torch.autograd.grad(nats / count, [stream[0], stream[-1], *weights])
    return float(first.norm() / last.norm()), math.sqrt(sum(float(g.square().sum()) for g in own))


def _train(name: str, warmup: float, seed: int) -> Points:
    """The loss of a stack of `LAYERS` blocks over training, without gradient clipping."""
    norm = LayerNormSpec(width=NARROW)
    norms = NormsSpec(pre=norm) if name == "pre-norm" else NormsSpec(post=norm)
    blocks = [block(NARROW, HEADS, 4 * NARROW, norms=norms)] * LAYERS
    module = nn.new(decoder(SYMBOLS, blocks, embedded=SinusoidalSpec(width=NARROW), final_norm=norms.pre), seed)
    _xavier(module, seed)
    noise = np.random.default_rng(seed)
    follows = noise.permutation(SYMBOLS)
    data = Pairs(tuple(_chain(noise, follows) for _ in range(STEPS * BATCH)))
    settings = OptimizerSettings(name="adamw", lr=RATE, weight_decay=0.0, clip=0.0)
    schedule = Schedule(shape="constant", warmup=warmup)
    return fit(module, data, rows=BATCH, length=LENGTH, steps=STEPS, seed=seed, optimizer=settings, schedule=schedule)


def _chain(noise: np.random.Generator, follows: np.ndarray) -> Example:
    """Symbols of which each is the one that follows the last, or one in ten a random one."""
    ids = noise.integers(SYMBOLS, size=LENGTH + 1).astype(np.int32)
    for i in np.flatnonzero(noise.random(LENGTH) < 0.9) + 1:
        ids[i] = follows[ids[i - 1]]
    return Example(ids[:-1], ids[1:], np.ones(LENGTH, bool))


def _gradient_table(arrives: dict[str, list[float]]) -> TableSection:
    return TableSection(
        "Gradient at the first block over that at the last, before training",
        ("layers", *STACKS),
        [[str(d), *(f"{arrives[name][i]:.2g}" for name in STACKS)] for i, d in enumerate(DEPTHS)],
    )


def _trained_table(end: dict[tuple[str, str], float]) -> TableSection:
    rows = [[name, *(f"{end[name, how]:.2f}" for how in WARMUPS)] for name in ("pre-norm", "post-norm")]
    return TableSection(f"{LAYERS} layers after {STEPS} steps, nats a symbol", ("stack", *WARMUPS), rows)


def _curves(
    arrives: dict[str, list[float]], last: dict[str, list[float]], losses: dict[tuple[str, str], Points]
) -> tuple[Curve, ...]:
    trained = {f"{name}, {how}": points for (name, how), points in losses.items()}
    return (
        Curve("Arriving at the first block, over the last", "layers", "gradient norm", _lines(arrives), {}, "xy"),
        Curve("Weights of the last block", "layers", "gradient norm", _lines(last), {}, "xy"),
        Curve(f"{LAYERS} layers in training", "step", "nats a symbol", trained, {"guessing": math.log(SYMBOLS)}),
    )


def _lines(series: dict[str, list[float]]) -> dict[str, Points]:
    return {name: [(float(depth), y) for depth, y in zip(DEPTHS, ys, strict=True)] for name, ys in series.items()}
