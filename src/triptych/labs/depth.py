"""Gradients through depth: pre-norm, post-norm, no residual (He et al. 2015; Xiong et al. 2020; lectures L0, L1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.labs.lab import Check, LabResult, Setup, size
from triptych.labs.small import Points, block, decoder, fit, growth, power
from triptych.page import Curve, Section, TableSection
from triptych.spec import LayerNormSpec, ModelSpec, NormsSpec, SinusoidalSpec, parts
from triptych.train import Example, OptimizerSettings, Pairs, Schedule, collate, loss

VOCAB = 97
LAST = 10  # training steps whose mean loss counts
FALSIFIED_BY = (
    "Before training, the claim is false if the first block of the deepest stack gets no gradient with a residual"
    " stream or"
    " gets one without, or if the last block's gradient falls with depth alike for both placements of the norm. That"
    " post-norm needs a warm-up is false if it learns as well without one, or if pre-norm, the control, fails without"
    " one"
    " too."
)
SEEDS = 5


@dataclass(frozen=True)
class Sizes:
    depths: tuple[int, ...] = size((2, 4, 8, 16, 32, 64), "blocks of the untrained stacks, two numbers or more")
    draws: int = size(2, "untrained models of which each gradient is a mean")
    width: int = size(64, "model width of the untrained stacks, a multiple of the heads")
    hidden: int = size(256, "MLP width of the untrained stacks")
    heads: int = size(4, "heads of each block")
    rows: int = size(4, "rows of an untrained stack's batch")
    tokens: int = size(32, "tokens of each of these rows")
    layers: int = size(8, "blocks of the stacks that are trained")
    narrow: int = size(32, "their model width, a multiple of the heads")
    symbols: int = size(24, "symbols of the chains they learn")
    length: int = size(24, "symbols of a chain")
    steps: int = size(120, "training steps")
    batch: int = size(16, "rows of a training step")
    rate: float = size(3e-3, "learning rate")
    warmup: float = size(0.5, "warm-up, as a share of the steps")

    def __post_init__(self) -> None:
        if len(set(self.depths)) < 2:
            raise InputError("size depths: an exponent is fitted to them; give two or more")
        if self.width % self.heads or self.narrow % self.heads:
            raise InputError(f"sizes width and narrow: must be multiples of the {self.heads} heads")
        if self.warmup > 1:
            raise InputError(f"size warmup: {self.warmup} is a share of the steps; give at most 1")

    @property
    def warmups(self) -> dict[str, float]:
        return {"no warm-up": 0.0, "warm-up": self.warmup}


FULL = Sizes(draws=4)


@dataclass(frozen=True, kw_only=True)
class NoResidual(parts.BlockSpec):
    """A block without the residual stream: each sublayer replaces what it read."""


class NoResidualBlock(nn.Block, of=NoResidual):
    def forward(self, x: Tensor, ctx: nn.Context, layer: int, taps: nn.Taps) -> Tensor:
        assert self.mlp is not None
        x = self.attn(self.attn_norm.pre(x), ctx.own[layer], layer, taps.at("attn"))
        changed: Tensor = self.mlp(self.mlp_norm.pre(x), ctx, taps.at("mlp"))
        return changed


STACKS = ("pre-norm", "post-norm", "no residual", "no residual, with norms")


def _kind(name: str, width: int) -> tuple[type[parts.BlockSpec], NormsSpec]:
    """The blocks of one of `STACKS` and their norms."""
    norm = LayerNormSpec(width=width)
    return {
        "pre-norm": (parts.BlockSpec, NormsSpec(pre=norm)),
        "post-norm": (parts.BlockSpec, NormsSpec(post=norm)),
        "no residual": (NoResidual, NormsSpec()),
        "no residual, with norms": (NoResidual, NormsSpec(pre=norm)),
    }[name]


def run(setup: Setup) -> LabResult:
    """Untrained stacks of 2 to 64 blocks: the gradient at the first and the last; then 8 blocks trained."""
    sizes = setup.sized(Sizes(), FULL)
    depths, layers = sizes.depths, sizes.layers
    gradients: dict[str, list[tuple[float, float]]] = {}
    for name in STACKS:
        setup.progress(f"{name}: {depths[0]} to {depths[-1]} layers")
        gradients[name] = [_measure(name, depth, sizes, setup.seed) for depth in depths]
    arrives, last = ({name: [pair[i] for pair in pairs] for name, pairs in gradients.items()} for i in (0, 1))
    fall = math.exp(growth(depths, arrives["no residual"]))
    goes = {name: power(depths, last[name]) for name in STACKS}
    losses: dict[tuple[str, str], Points] = {}
    for name in ("pre-norm", "post-norm"):
        for how, warmup in sizes.warmups.items():
            setup.progress(f"{name}, {how}: training {layers} layers for {sizes.steps} steps")
            losses[name, how] = _train(name, warmup, sizes, setup.seed)
    end = {key: fmean(nats for _, nats in points[-LAST:]) for key, points in losses.items()}
    gain = {name: end[name, "no warm-up"] - end[name, "warm-up"] for name in ("pre-norm", "post-norm")}
    checks = (
        Check(
            f"pre-norm, {depths[-1]} layers: gradient at the first block over the last", arrives["pre-norm"][-1], 0.5
        ),
        Check("no residual: what is left of it after each further layer", fall, most=0.8),
        Check("pre-norm: the last block's gradient goes as depth to the power", goes["pre-norm"], -0.7, -0.25),
        Check("post-norm: the last block's gradient goes as depth to the power", goes["post-norm"], -0.15, 0.35),
        Check(f"post-norm, {layers} layers trained: nats lost without a warm-up", gain["post-norm"], least=0.5),
        Check("control: nats that pre-norm loses without a warm-up", gain["pre-norm"], most=0.2),
    )
    meaning = (
        "x + f(x) passes the gradient on whatever f is, so with a residual stream the loss reaches the first of"
        f" {depths[-1]} blocks. Without one every layer multiplies what passes: {fall:.2f} of it is left after each,"
        " and"
        f" {depths[-1]} layers leave {arrives['no residual'][-1]:.0e}. Norms alone, without the addition, keep the"
        " scale from collapsing so fast but do not carry"
        " the gradient. Before training both placements of the norm carry it; what differs is the top. Under post-norm"
        " the last block's gradient does not shrink with depth, under pre-norm it does as 1/√depth (theorem 1 of Xiong"
        f" et al.). Training shows what that means: {layers} post-norm layers at a learning rate of {sizes.rate:g} end"
        " at"
        f" {end['post-norm', 'no warm-up']:.2f} nats without a warm-up and at {end['post-norm', 'warm-up']:.2f} with"
        f" one, where guessing is {math.log(sizes.symbols):.2f}; pre-norm ends at {end['pre-norm', 'no warm-up']:.2f}"
        " and"
        f" {end['pre-norm', 'warm-up']:.2f}. The rates are those of Xavier's weights, one size and one learning rate."
    )
    sections: tuple[Section, ...] = (
        _gradient_table(arrives, sizes),
        _trained_table(end, sizes),
        *_curves(arrives, last, losses, sizes),
    )
    return LabResult("What carries the gradient through a deep stack?", meaning, checks, sections)


def _measure(name: str, depth: int, sizes: Sizes, seed: int) -> tuple[float, float]:
    """(gradient at the first block's input over that at the last's output, gradient of the last block's weights),
    geometric means over `draws` draws of weights and tokens."""
    pairs = [_gradients(_spec(name, depth, sizes), sizes, seed * sizes.draws + draw) for draw in range(sizes.draws)]
    ratio, last = (math.exp(fmean(math.log(pair[i]) for pair in pairs)) for i in (0, 1))
    return ratio, last


def _spec(name: str, depth: int, sizes: Sizes) -> ModelSpec:
    kind, norms = _kind(name, sizes.width)
    usual = block(sizes.width, sizes.heads, sizes.hidden, norms=norms)
    one = kind(attn=usual.attn, mlp=usual.mlp, attn_norm=norms, mlp_norm=norms)
    spec = decoder(VOCAB, (one,) * depth, embedded=SinusoidalSpec(width=sizes.width), final_norm=norms.pre)
    return replace(spec, init_std=1.0)


def _xavier(module: nn.Transformer, seed: int) -> torch.Generator:
    """Draws the matrices outside the embedding anew (Glorot & Bengio 2010)."""
    noise = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            torch.nn.init.xavier_normal_(weight, generator=noise)
    return noise


def _gradients(spec: ModelSpec, sizes: Sizes, seed: int) -> tuple[float, float]:
    """(norm of the gradient at the first block's input over that at the last's output, norm at the last's weights)"""
    module = nn.new(spec, seed).double()  # a vanished gradient is far below what fp32 can tell from 0
    assert module.decoder is not None
    noise = _xavier(module, seed)
    stream: list[Tensor] = []
    for part in module.decoder.blocks:
        part.register_forward_hook(lambda _, inputs, output: stream.extend((inputs[0], output)))
    ids, targets = torch.randint(VOCAB, (2, sizes.rows, sizes.tokens), generator=noise).numpy().astype(np.int32)
    rows = [Example(row, target, np.ones(sizes.tokens, bool)) for row, target in zip(ids, targets, strict=True)]
    nats, count = loss(module, collate(rows))
    weights = [weight for weight in module.decoder.blocks[-1].parameters() if weight.dim() == 2]
    first, last, *own = torch.autograd.grad(nats / count, [stream[0], stream[-1], *weights])
    return float(first.norm() / last.norm()), math.sqrt(sum(float(g.square().sum()) for g in own))


def _train(name: str, warmup: float, sizes: Sizes, seed: int) -> Points:
    """The loss of a stack of `layers` blocks over training, without gradient clipping."""
    width, symbols = sizes.narrow, sizes.symbols
    _, norms = _kind(name, width)
    blocks = [block(width, sizes.heads, 4 * width, norms=norms)] * sizes.layers
    module = nn.new(decoder(symbols, blocks, embedded=SinusoidalSpec(width=width), final_norm=norms.pre), seed)
    _xavier(module, seed)
    noise = np.random.default_rng(seed)
    follows = noise.permutation(symbols)
    data = Pairs(tuple(_chain(noise, follows, sizes.length) for _ in range(sizes.steps * sizes.batch)))
    settings = OptimizerSettings(name="adamw", lr=sizes.rate, weight_decay=0.0, clip=0.0)
    schedule = Schedule(shape="constant", warmup=warmup)
    return fit(
        module,
        data,
        rows=sizes.batch,
        length=sizes.length,
        steps=sizes.steps,
        seed=seed,
        optimizer=settings,
        schedule=schedule,
    )


def _chain(noise: np.random.Generator, follows: np.ndarray, length: int) -> Example:
    """Symbols of which each is the one that follows the last, or one in ten a random one."""
    ids = noise.integers(len(follows), size=length + 1).astype(np.int32)
    for i in np.flatnonzero(noise.random(length) < 0.9) + 1:
        ids[i] = follows[ids[i - 1]]
    return Example(ids[:-1], ids[1:], np.ones(length, bool))


def _gradient_table(arrives: dict[str, list[float]], sizes: Sizes) -> TableSection:
    return TableSection(
        "Gradient at the first block over that at the last, before training",
        ("layers", *STACKS),
        [[str(d), *(f"{arrives[name][i]:.2g}" for name in STACKS)] for i, d in enumerate(sizes.depths)],
    )


def _trained_table(end: dict[tuple[str, str], float], sizes: Sizes) -> TableSection:
    rows = [[name, *(f"{end[name, how]:.2f}" for how in sizes.warmups)] for name in ("pre-norm", "post-norm")]
    return TableSection(
        f"{sizes.layers} layers after {sizes.steps} steps, nats a symbol", ("stack", *sizes.warmups), rows
    )


def _curves(
    arrives: dict[str, list[float]],
    last: dict[str, list[float]],
    losses: dict[tuple[str, str], Points],
    sizes: Sizes,
) -> tuple[Curve, ...]:
    trained = {f"{name}, {how}": points for (name, how), points in losses.items()}
    return (
        Curve(
            "Arriving at the first block, over the last", "layers", "gradient norm", _lines(arrives, sizes), {}, "xy"
        ),
        Curve("Weights of the last block", "layers", "gradient norm", _lines(last, sizes), {}, "xy"),
        Curve(
            f"{sizes.layers} layers in training",
            "step",
            "nats a symbol",
            trained,
            {"guessing": math.log(sizes.symbols)},
        ),
    )


def _lines(series: dict[str, list[float]], sizes: Sizes) -> dict[str, Points]:
    return {name: [(float(depth), y) for depth, y in zip(sizes.depths, ys, strict=True)] for name, ys in series.items()}
