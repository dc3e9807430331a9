"""One stack of a model as a walk sees it: what was read of its forward, its parameters, and what of it is followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triptych import nn
from triptych.labs.walk import again
from triptych.labs.walk.steps import Given, Shown, Step
from triptych.probe import Trace
from triptych.spec import (
    BlockSpec,
    GLUSpec,
    LayerNormSpec,
    LinearSpec,
    ModelSpec,
    MoESpec,
    ParallelBlockSpec,
    ScaleSpec,
)
from triptych.spec.norms import Norm
from triptych.spec.parts import NormsSpec

LEAVES = ("in", "q", "k", "v", "q_rot", "k_rot", "scores", "pattern", "z", "out")


def reads(spec: ModelSpec, name: str, layer: int) -> list[str]:
    """The sites of one stack that a walk through `layer` prints."""
    stack, prefix = spec.stacks[name], f"{name}." if spec.layout == "encoder-decoder" else ""
    block, last = stack.blocks[layer], len(stack.blocks) - 1
    under = [f"attn.{leaf}" for leaf in LEAVES]
    under += [f"cross.{leaf}" for leaf in LEAVES] if block.cross is not None else []
    if isinstance(block.mlp, MoESpec):
        under += ["mlp.in", "mlp.router", "mlp.out"]
    elif block.mlp is not None:
        under += ["mlp.in", "mlp.up", "mlp.act", "mlp.out"] + ["mlp.gate"] * isinstance(block.mlp, GLUSpec)
    between = [] if isinstance(block, ParallelBlockSpec) else ["resid_mid"]
    between += ["branch.out"] if isinstance(block, BlockSpec) and block.branch is not None else []
    sites = [f"blocks.{layer}.{leaf}" for leaf in ("resid_pre", *under, *between, "resid_post")]
    return [prefix + site for site in dict.fromkeys(("embed", *sites, f"blocks.{last}.resid_post", "final"))]


@dataclass(frozen=True)
class Applied:
    """A linear map or a norm: the parameters it prints, its formula, and itself once more."""

    uses: list[Shown]
    formula: str
    run: Callable[[Given, Tensor], Tensor]


def norm_formula(spec: Norm) -> str:
    if isinstance(spec, LayerNormSpec):
        return f"(x − mean x) / √(var x + {spec.eps:g}) · w" + (" + b" if spec.bias else "")
    return f"x / √(mean x² + {spec.eps:g}) · " + (f"({spec.offset:g} + w)" if spec.offset else "w")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stack of a model, what was read of its forward, and what of it is followed: a layer, a head, a row."""

    module: nn.Transformer
    trace: Trace
    name: str  # encoder or decoder
    labels: Sequence[str]  # its tokens
    ids: Sequence[int]
    layer: int
    head: int
    focus: int
    source: Stack | None = None  # the encoder that a decoder reads
    first: int = 0  # the position of its first token

    @property
    def spec(self) -> Any:
        return self.module.spec.stacks[self.name]

    @property
    def stack(self) -> nn.Stack:
        stack = self.module.get_submodule(self.name)
        assert isinstance(stack, nn.Stack)
        return stack

    @property
    def places(self) -> Tensor:
        """The position of each token."""
        return torch.arange(self.first, self.first + len(self.ids))

    @property
    def prefix(self) -> str:
        """Of its sites."""
        return f"{self.name}." if self.module.spec.layout == "encoder-decoder" else ""

    def part(self, name: str) -> str:
        """The title of a part of the walk, with the stack's name where there are two."""
        return f"{self.name.capitalize()}: {name}" if self.prefix else name[0].upper() + name[1:]

    @property
    def block(self) -> str:
        return f"blocks.{self.layer}"

    @property
    def device(self) -> torch.device:
        return self.module.device

    def read(self, site: str) -> Tensor:
        return self.trace[self.prefix + site][0].cpu()

    def shown(self, site: str, symbol: str, letters: str = "N D", value: Tensor | None = None) -> Shown:
        """A site, a row a token."""
        return self.row_each(self.prefix + site, symbol, self.read(site) if value is None else value, letters)

    def row_each(self, name: str, symbol: str, value: Tensor, letters: str = "N D") -> Shown:
        """Any tensor with a row a token, or with heads first and then a row a token."""
        return Shown(name, symbol, letters, value, self.labels, focus=self.focus)

    def parameter(self, name: str, symbol: str, letters: str) -> Shown:
        value = self.module.get_parameter(f"{self.name}.{name}").detach().cpu()
        return Shown(f"{self.name}.{name}", symbol, letters, value)

    def linear(self, name: str, spec: LinearSpec, symbol: str, letters: str) -> Applied:
        """x Wᵀ + b"""
        uses = [self.parameter(f"{name}.weight", f"W_{symbol}", letters)]
        if spec.bias:
            uses.append(self.parameter(f"{name}.bias", f"b_{symbol}", letters.split()[0]))
        weight, bias = uses[0].name, uses[1].name if spec.bias else None
        formula = f"W_{symbol}ᵀ" + (f" + b_{symbol}" if spec.bias else "")
        return Applied(uses, formula, lambda g, x: again.linear(x, g[weight], None if bias is None else g[bias]))

    def norm(self, name: str, spec: Norm | ScaleSpec, width: str = "D") -> Applied:
        """LayerNorm or RMSNorm, or a factor in the place of one"""
        if isinstance(spec, ScaleSpec):
            return Applied([], f"{spec.factor:g} · x", lambda g, x: x * spec.factor)
        biased = isinstance(spec, LayerNormSpec) and spec.bias
        uses = [self.parameter(f"{name}.weight", "w", width)]
        uses += [self.parameter(f"{name}.bias", "b", width)] if biased else []
        weight, bias = uses[0].name, uses[1].name if biased else None
        return Applied(
            uses,
            norm_formula(spec),
            lambda g, x: again.norm(x, spec, g[weight], None if bias is None else g[bias]),
        )

    @property
    def final(self) -> str:
        """The name under which the stack's output was printed."""
        normed = self.spec.final_norm is not None
        return self.prefix + ("final" if normed else f"blocks.{len(self.spec.blocks) - 1}.resid_post")


def leaving(
    at: Stack, part: str, title: str, symbol: str, x: str, down: Applied, sub: str, norms: NormsSpec, why: str
) -> Step:
    """The projection that ends a sublayer, and the norm after it where there is one."""
    formula, uses, after = f"o = {symbol} {down.formula}", down.uses, None
    if norms.out is not None:
        after = at.norm(f"{at.block}.{sub}_norm.out", norms.out)
        f = "scale" if isinstance(norms.out, ScaleSpec) else "norm"
        formula, uses = f"o = {f}({symbol} {down.formula}),  {f}(x) = {after.formula}", [*uses, *after.uses]

    def once_more(g: Given) -> Tensor:
        made = down.run(g, g[x])
        return made if after is None else after.run(g, made)

    return Step(part, title, formula, why, [at.shown(f"{at.block}.{sub}.out", "o")], once_more, uses)
