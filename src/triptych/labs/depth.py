"""Gradients through depth: pre-norm, post-norm, no residual (He et al. 2015; Xiong et al. 2020; lectures L0, L1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych import nn
from triptych.attention import Rows
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import block, decoder, growth, power
from triptych.page import Curve, TableSection
from triptych.spec import LayerNorm, Model, Norms, Sinusoidal, parts

DEPTHS = (2, 4, 8, 16, 32, 64)
DRAWS = 4
WIDTH, HEADS, HIDDEN, VOCAB = 64, 4, 256, 97
ROWS, TOKENS = 4, 32


@dataclass(frozen=True, kw_only=True)
class Plain(parts.Block):
    """A block without the residual stream: each sublayer replaces what it read."""


class PlainBlock(nn.Block, of=Plain):
    def forward(self, x: Tensor, ctx: nn.Context, layer: int, taps: nn.Taps) -> Tensor:
        assert self.mlp is not None
        x = self.attn(self.attn_norm.pre(x), ctx.own[layer], layer, taps.at("attn"))
        changed: Tensor = self.mlp(self.mlp_norm.pre(x), ctx, taps.at("mlp"))
        return changed


NORM = LayerNorm(width=WIDTH)
STACKS: dict[str, tuple[type[parts.Block], Norms]] = {
    "pre-norm": (parts.Block, Norms(pre=NORM)),
    "post-norm": (parts.Block, Norms(post=NORM)),
    "no residual": (Plain, Norms()),
    "no residual, with norms": (Plain, Norms(pre=NORM)),
}


def run(setup: Setup) -> Finding:
    """Untrained stacks of 2 to 64 blocks: what of the gradient arrives at the first, and what the last one gets."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name in STACKS:
        setup.say(f"{name}: {DEPTHS[0]} to {DEPTHS[-1]} layers")
        found[name] = [_measure(name, depth, setup.seed) for depth in DEPTHS]
    arrives, last = ({name: [pair[i] for pair in pairs] for name, pairs in found.items()} for i in (0, 1))
    fall = math.exp(growth(DEPTHS, arrives["no residual"]))
    goes = {name: power(DEPTHS, last[name]) for name in STACKS}
    checks = (
        Check(
            f"pre-norm, {DEPTHS[-1]} layers: gradient at the first block over the last", arrives["pre-norm"][-1], 0.5
        ),
        Check("no residual: what is left of it after each further layer", fall, most=0.8),
        Check("pre-norm: the last block's gradient goes as depth to the power", goes["pre-norm"], -0.7, -0.25),
        Check("post-norm: the last block's gradient goes as depth to the power", goes["post-norm"], -0.15, 0.35),
    )
    table = TableSection(
        "Gradient at the first block over that at the last, before training",
        ("layers", *STACKS),
        [[str(d), *(f"{arrives[name][i]:.2g}" for name in STACKS)] for i, d in enumerate(DEPTHS)],
    )
    curves = tuple(
        Curve(title, "layers", "gradient norm", {name: _points(line[name]) for name in STACKS}, {}, "xy")
        for title, line in (
            ("Arriving at the first block, over the last", arrives),
            ("Weights of the last block", last),
        )
    )
    meaning = (
        "x + f(x) passes the gradient on whatever f is, so with a residual stream the first of 64 blocks hears of the"
        f" loss. Without one every layer multiplies what passes: {fall:.2f} of it is left after each, and 64 layers"
        " leave nothing. Norms alone, without the addition, keep the scale from collapsing so fast but do not carry"
        " the signal. Before training both placements of the norm carry it; what differs is the top. Under post-norm"
        " the last block's gradient does not shrink with depth, under pre-norm it does as 1/√depth (theorem 1 of Xiong"
        " et al.), which is why post-norm needs a warm-up. The rates are those of Xavier's weights; nothing here was"
        " trained."
    )
    return Finding("What carries the gradient through a deep stack?", meaning, checks, (table, *curves))


def _measure(name: str, depth: int, seed: int) -> tuple[float, float]:
    """(gradient at the first block's input over that at the last's output, gradient of the last block's weights),
    geometric means over `DRAWS` draws of weights and tokens."""
    found = [_gradients(_spec(name, depth), seed * DRAWS + draw) for draw in range(DRAWS)]
    ratio, last = (math.exp(fmean(math.log(pair[i]) for pair in found)) for i in (0, 1))
    return ratio, last


def _spec(name: str, depth: int) -> Model:
    kind, norms = STACKS[name]
    usual = block(WIDTH, HEADS, HIDDEN, norms=norms)
    one = kind(attn=usual.attn, mlp=usual.mlp, attn_norm=norms, mlp_norm=norms)
    made = decoder(VOCAB, (one,) * depth, embedded=Sinusoidal(width=WIDTH), final_norm=norms.pre)
    return replace(made, init_std=1.0)


def _gradients(spec: Model, seed: int) -> tuple[float, float]:
    noise = torch.Generator().manual_seed(seed)
    module = nn.new(spec, seed).double()  # a vanished gradient is far below what fp32 can tell from 0
    assert module.decoder is not None
    for name, weight in module.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            torch.nn.init.xavier_normal_(weight, generator=noise)
    stream: list[Tensor] = []
    for part in module.decoder.blocks:
        part.register_forward_hook(lambda _, given, made: stream.extend((given[0], made)))
    ids, targets = torch.randint(VOCAB, (2, ROWS * TOKENS), generator=noise)
    loss = F.cross_entropy(module.logits(nn.Batch(inputs=ids, rows=Rows((TOKENS,) * ROWS))), targets)
    weights = [weight for weight in module.decoder.blocks[-1].parameters() if weight.dim() == 2]
    first, last, *own = torch.autograd.grad(loss, [stream[0], stream[-1], *weights])
    return float(first.norm() / last.norm()), math.sqrt(sum(float(g.square().sum()) for g in own))


def _points(ys: list[float]) -> list[tuple[float, float]]:
    return [(float(depth), y) for depth, y in zip(DEPTHS, ys, strict=True)]
