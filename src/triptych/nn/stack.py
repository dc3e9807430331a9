"""The blocks and Stack: the residual stream from the input slot to the final norm, on the flat batch `[N, D]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triptych.attention import Cache, CrossCache, LayerSpec, NullCache, Rows
from triptych.attention.lowering import window_of
from triptych.nn.attention import Attention, CrossView, SelfView
from triptych.nn.inputs import Conv, Embed, Frames, Patches
from triptych.nn.linear import ACTIVATIONS, GLU, MLP, MoE, Norms
from triptych.nn.part import Module
from triptych.nn.positions import Position, unbiased
from triptych.nn.taps import NO_TAPS, Taps
from triptych.spec import parts


@dataclass(frozen=True)
class Context:
    """What a forward knows beside its vectors, made once: the rows, what was cached of them, the encoder's keys.

    `kinds` holds, for each kind of attention, the mask, rotation and bias its layers share.
    """

    rows: Rows
    kinds: dict[str, dict[str, Any]]
    cache: Any = field(default_factory=NullCache)
    cross: CrossCache | None = None

    def own(self, kind: str, layer: int) -> SelfView:
        return SelfView(rows=self.rows, cache=self.cache, layer=layer, **self.kinds[kind])

    def other(self, layer: int) -> CrossView:
        assert self.cross is not None
        return CrossView(self.rows, self.cross.keys(layer))


class Kind(Module, of=parts.Kind):
    """What the layers of one kind share."""

    position: Position | None

    def state(self, rows: Rows, x: Tensor) -> dict[str, Any]:
        if self.position is None:
            return {"mask": self.spec.mask, "rotate": _same, "bias": unbiased}
        rotate, bias = self.position.rotation(rows, x), self.position.bias(rows)
        return {"mask": self.spec.mask, "rotate": rotate, "bias": bias}


class Branch(Module, of=parts.Branch):
    """`norm(made + act(conv(x)))`, no row seeing its neighbour in the batch."""

    conv: Conv
    norm: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, made: Tensor, rows: Rows, taps: Taps) -> Tensor:
        h = torch.cat([self.conv(row) for row in rows.split(x)])
        h = ACTIVATIONS[self.spec.act](F.dropout(h, self.spec.dropout, self.training))
        return self.norm(made + taps("out", h, rows))


class Block(Module, of=parts.Block):
    """Self-attention, cross-attention if the slot is filled, MLP if it is, a convolution beside them if it is."""

    attn: Attention
    attn_norm: Norms
    cross: Attention | None
    cross_norm: Norms
    mlp: MLP | GLU | MoE | None
    mlp_norm: Norms
    branch: Branch | None

    def forward(self, x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
        rows = ctx.rows
        x = entered = taps("resid_pre", x, rows)

        h = taps("attn.in", self.attn_norm.pre(x), rows)
        h = self.attn_norm.out(self.attn(h, ctx.own(self.spec.attn.kind, layer), taps.at("attn")))
        x = self.attn_norm.post(x + self.drop(taps("attn.out", h, rows)))

        if self.cross is not None:
            h = taps("cross.in", self.cross_norm.pre(x), rows)
            h = self.cross_norm.out(self.cross(h, ctx.other(layer), taps.at("cross")))
            x = self.cross_norm.post(x + self.drop(taps("cross.out", h, rows)))

        x = taps("resid_mid", x, rows)
        if self.mlp is not None:
            h = taps("mlp.in", self.mlp_norm.pre(x), rows)
            h = self.mlp_norm.out(self.mlp(h, rows, taps.at("mlp")))
            x = self.mlp_norm.post(x + self.drop(taps("mlp.out", h, rows)))

        if self.branch is not None:
            x = self.branch(entered, x, rows, taps.at("branch"))
        return taps("resid_post", x, rows)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.spec.dropout, self.training)


class ParallelBlock(Module, of=parts.ParallelBlock):
    """Attention and MLP side by side on the same stream; there is no stream between them, so no `resid_mid`."""

    norm: Callable[[Tensor], Tensor]
    attn: Attention
    attn_norm: Norms
    cross: None = None
    mlp: MLP | GLU | MoE
    mlp_norm: Norms

    def __init__(self, spec: parts.ParallelBlock) -> None:
        super().__init__(spec)
        if spec.norm is None:
            self.norm = _same

    def forward(self, x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
        rows = ctx.rows
        x = taps("resid_pre", x, rows)
        seen = self.norm(x)

        h = taps("attn.in", self.attn_norm.pre(seen), rows)
        h = self.attn_norm.out(self.attn(h, ctx.own(self.spec.attn.kind, layer), taps.at("attn")))
        attended = self.drop(taps("attn.out", h, rows))

        h = taps("mlp.in", self.mlp_norm.pre(seen), rows)
        h = self.mlp_norm.out(self.mlp(h, rows, taps.at("mlp")))
        x = x + attended + self.drop(taps("mlp.out", h, rows))
        return taps("resid_post", x, rows)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.spec.dropout, self.training)


class Stack(Module, of=parts.Stack):
    """Embedding, blocks, final norm.

    `recompute` drops each block's activations in training and computes them again in the backward pass
    (Chen et al. 2016): less memory, one more forward.
    """

    embed: Embed | Frames | Patches
    kinds: Mapping[str, Kind]
    blocks: Sequence[Block | ParallelBlock]
    final_norm: Callable[[Tensor], Tensor] | None
    recompute: bool = False

    def cache(self, slots: int, *, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `slots` rows, each layer's by its kind: a ring where a window bounds what it sees."""
        layers = []
        for block in self.blocks:
            attn = block.attn.spec
            band = window_of(self.kinds[attn.kind].spec.mask)
            back = None if band is None else band[0]
            layers.append(
                LayerSpec(groups=attn.kv_heads, width=attn.head_width, value_width=attn.value_width, window=back)
            )
        return Cache(layers, slots, dtype=dtype or self.dtype, device=self.device)

    def remember(self, memory: Tensor, rows: Rows, taps: Taps = NO_TAPS) -> CrossCache:
        """The keys and values of an encoder's output [M, D] for every layer: all a decoder needs of it."""
        held = CrossCache()
        for i, block in enumerate(self.blocks):
            assert block.cross is not None
            under = taps.at(f"blocks.{i}.cross")
            k, v = block.cross.project(memory, rows, under)
            held.fill(i, under("k_rot", k, rows), v, rows)
        return held

    def forward(
        self,
        source: Tensor,
        rows: Rows,
        *,
        cache: Any = None,
        cross: CrossCache | None = None,
        token_types: Tensor | None = None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        """What the input slot reads, [N] token ids of `rows` most often -> [N, D] after the final norm.  With a cache,
        the ids continue what it holds."""
        x = self.embed(source, rows, token_types)
        ctx = Context(rows, self._shared(rows, x), NullCache() if cache is None else cache, cross)
        ctx.cache.begin(rows, taps.provenance)
        x = taps("embed", x, rows)
        for i, block in enumerate(self.blocks):
            if self.recompute and self.training:
                x = checkpoint(self._apart, block, x, ctx, i, taps.at(f"blocks.{i}"), use_reentrant=False)
            else:
                x = block(x, ctx, i, taps.at(f"blocks.{i}"))
        ctx.cache.advance(rows)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return taps("final", F.dropout(x, self.spec.dropout, self.training), rows)

    def _shared(self, rows: Rows, x: Tensor) -> dict[str, dict[str, Any]]:
        """What the layers of each kind share."""
        return {name: kind.state(rows, x) for name, kind in self.kinds.items()}

    def _apart(self, block: Block, x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
        """A block that shares nothing: computed again, it must not find there what it made the first time."""
        return block(x, replace(ctx, kinds=self._shared(ctx.rows, x)), layer, taps)  # type: ignore[no-any-return]


def _same(x: Tensor) -> Tensor:
    return x
