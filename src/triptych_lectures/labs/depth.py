"""Gradients through depth: pre-norm, post-norm, no residual (He et al. 2015; Xiong et al. 2020; lectures L0, L1)."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.spec import LayerNormSpec, ModelSpec, NormsSpec, SinusoidalSpec, parts
from triptych.train import collate, loss
from .lab import Check, Findings, Ints, Lab, Setup, clause, size
from .small_models import block, curve, decoder, examples, geometric_mean, growth, line_table, power

VOCAB = 97


class DepthLab(Lab):
    name = "depth"

    depths: Ints = size((2, 4, 8, 16, 32, 64), "blocks of the untrained stacks, ascending", values=2, ascending=True)
    draws: int = size(2, "untrained models of which each gradient is a mean", full=4)
    width: int = size(64, "model width of the untrained stacks, a multiple of the heads", multiple="heads")
    hidden: int = size(256, "MLP width of the untrained stacks")
    heads: int = size(4, "heads of each block")
    rows: int = size(4, "rows of an untrained stack's batch")
    tokens: int = size(32, "tokens of each of these rows")

    def findings(self, setup: Setup) -> Findings:
        depths, deep = self.depths, self.depths[-1]
        gradients: dict[str, list[tuple[float, float]]] = {}
        for name in STACKS:
            setup.progress(f"{name}: {depths[0]} to {deep} layers")
            gradients[name] = [self._measure(name, depth, setup.seed) for depth in depths]
        arrives, last = ({name: [pair[i] for pair in pairs] for name, pairs in gradients.items()} for i in (0, 1))
        fall = math.exp(growth(depths, arrives["no residual"]))
        goes = {name: power(depths, last[name]) for name in STACKS}
        arriving = {name: arrives[name][-1] for name in STACKS}
        over = f"{deep} layers: gradient at the first block over the last"
        top = "the last block's gradient grows as depth to the power"
        yield clause(
            "x + f(x) adds the gradient as it is to what f passes on: with a residual stream the first of"
            f" {deep} blocks gets {arriving['pre-norm']:.2g} times the gradient of the last under pre-norm and"
            f" {arriving['post-norm']:.2g} times under post-norm.",
            Check(f"pre-norm, {over}", arriving["pre-norm"], least=0.5, most=float(deep)),
            Check(f"post-norm, {over}", arriving["post-norm"], least=1 / deep, most=float(deep)),
            instead="The residual stream did not keep the size of the gradient",
        )
        yield clause(
            f"Without the stream each layer multiplies what passes: {fall:.2f} of it is left after each, and {deep}"
            f" layers leave {arriving['no residual']:.0e}.",
            Check("no residual: share of that ratio left after each further layer", fall, most=0.8),
            instead="The gradient arrived without the residual stream",
        )
        yield clause(
            "With a norm before each sublayer the gradient does not vanish without the addition either:"
            f" {arriving['no residual, with norms']:.2g} of the last arrives at the first. So its size alone is not"
            " what the stream is for.",
            Check(f"no residual, with norms, {over}", arriving["no residual, with norms"], 1 / deep, float(deep)),
            Check(f"control: no residual, without norms, {over}", arriving["no residual"], most=0.8 ** (deep - 1)),
            instead="That norms alone keep the size of the gradient, and nothing else, was not seen",
        )
        yield clause(
            "What the placement of the norm changes is the top: under pre-norm the gradient of the last block's"
            f" weights falls with depth L as L to the power {goes['pre-norm']:.2f}, near the 1/√L of Xiong et al.;"
            f" under post-norm it does not ({goes['post-norm']:+.2f}).",
            Check(f"pre-norm: {top}", goes["pre-norm"], -0.7, -0.25),
            Check(f"post-norm: {top}", goes["post-norm"], -0.15, 0.2),
            instead="The placement of the norm did not decide what the last block gets",
        )
        ratio = "Gradient at the first block over that at the last"
        yield line_table(f"{ratio}, before training", "layers", depths, arrives, ".2g")
        yield curve("Arriving at the first block, over the last", "layers", "ratio of norms", depths, arrives, log="xy")
        yield curve("Weights of the last block", "layers", "gradient norm", depths, last, log="xy")

    def _measure(self, name: str, depth: int, seed: int) -> tuple[float, float]:
        """(gradient at the first block's input over that at the last's output, gradient of the last block's weights),
        geometric means over draws of weights and tokens."""
        # the ratio of the deepest stack of norms alone differs from draw to draw by more than that of the others
        draws = self.draws * (4 if name == "no residual, with norms" and depth == self.depths[-1] else 1)
        pairs = [self._gradients(self._spec(name, depth), seed * draws + draw) for draw in range(draws)]
        ratio, last = map(geometric_mean, zip(*pairs, strict=True))
        return ratio, last

    def _spec(self, name: str, depth: int) -> ModelSpec:
        norm = LayerNormSpec(width=self.width)
        kind, norms = {
            "pre-norm": (parts.BlockSpec, NormsSpec(pre=norm)),
            "post-norm": (parts.BlockSpec, NormsSpec(post=norm)),
            "no residual": (NoResidual, NormsSpec()),
            "no residual, with norms": (NoResidual, NormsSpec(pre=norm)),
        }[name]
        usual = block(self.width, self.heads, self.hidden, norms=norms)
        layer = kind(attn=usual.attn, mlp=usual.mlp, attn_norm=norms, mlp_norm=norms)
        spec = decoder(VOCAB, (layer,) * depth, embedded=SinusoidalSpec(width=self.width), final_norm=norms.pre)
        return replace(spec, init_std=1.0)

    def _gradients(self, spec: ModelSpec, seed: int) -> tuple[float, float]:
        """(norm of the gradient at the first block's input over the last's output, norm at the last's weights)"""
        module = nn.new(spec, seed).double()  # a vanished gradient is far below what fp32 can tell from 0
        assert module.decoder is not None
        noise = torch.Generator().manual_seed(seed)
        for name, weight in module.named_parameters():
            if weight.dim() == 2 and "embed" not in name:  # drawn anew (Glorot & Bengio 2010)
                torch.nn.init.xavier_normal_(weight, generator=noise)
        stream: list[Tensor] = []
        for part in module.decoder.blocks:
            part.register_forward_hook(lambda _, inputs, output: stream.extend((inputs[0], output)))
        ids, targets = torch.randint(VOCAB, (2, self.rows, self.tokens), generator=noise).numpy().astype(np.int32)
        nats, count = loss(module, collate(examples(ids, targets)))
        weights = [weight for weight in module.decoder.blocks[-1].parameters() if weight.dim() == 2]
        first, last, *own = torch.autograd.grad(nats / count, [stream[0], stream[-1], *weights])
        return float(first.norm() / last.norm()), math.sqrt(sum(float(g.square().sum()) for g in own))


class NoResidual(parts.BlockSpec):
    """A block without the residual stream: each sublayer replaces what it read."""


class NoResidualBlock(nn.Block, of=NoResidual):
    def forward(self, x: Tensor, ctx: nn.Context, layer: int, taps: nn.Taps) -> Tensor:
        assert self.mlp is not None
        x = self.attn(self.attn_norm.pre(x), ctx.own[layer], layer, taps.at("attn"))
        changed: Tensor = self.mlp(self.mlp_norm.pre(x), ctx, taps.at("mlp"))
        return changed


STACKS = ("pre-norm", "post-norm", "no residual", "no residual, with norms")
