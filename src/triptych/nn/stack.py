"""The blocks and Stack: the residual stream from the input slot to the final norm, on the flat batch `[N, D]`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from triptych import ops
from triptych.attention import (
    NULL_CACHE,
    Cache,
    CachedLayer,
    CacheStep,
    CacheType,
    CrossCache,
    CrossKeys,
    KVCache,
    Rows,
)
from triptych.attention.mask_lowering import window_of
from triptych.native.step import PAGE_POSITIONS
from triptych.ops.noise import AFTER
from triptych.spec import parts
from .attention import Attention, KindState
from .attention_states import Context, Kind, cross_state, shared_states, sharing_key
from .feedforward import GLU, MLP, MoE
from .inputs import Conv, Embed, Frames, Patches
from .linear import Linear, Norms
from .part import NO_TAPS, Module, Taps, VectorMap


class Branch(Module[parts.BranchSpec], of=parts.BranchSpec):
    """`norm(block + act(conv(x)))`, of what enters the block and what its other parts gave."""

    conv: Conv
    norm: VectorMap

    def forward(self, x: Tensor, block: Tensor, ctx: Context, taps: Taps) -> Tensor:
        h = ops.dropout(self.conv(x, ctx.rows.lengths), self.spec.dropout, self.training, ctx.random)
        return self.norm(block + taps("out", ops.ACTIVATIONS[self.spec.act](h), ctx.rows))


class Block(Module[parts.BlockSpec], of=parts.BlockSpec):
    """Self-attention, with optional cross-attention, MLP and convolution."""

    attn: Attention
    attn_norm: Norms
    cross: Attention | None
    cross_norm: Norms
    mlp: MLP | GLU | MoE | None
    mlp_norm: Norms
    branch: Branch | None

    def forward(self, x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
        rows = ctx.rows
        drop = partial(ops.dropout, rate=self.spec.dropout, training=self.training, random=ctx.random)
        x = entered = taps("resid_pre", x, rows)

        norms = self.attn_norm
        h = taps("attn.in", norms.pre(x), rows)
        h = norms.out(self.attn(h, ctx.own[layer], layer, taps.at("attn")))
        x = norms.post(taps.computed(add, x, drop(taps("attn.out", h, rows))))

        if self.cross is not None:
            norms = self.cross_norm
            h = taps("cross.in", norms.pre(x), rows)
            h = norms.out(self.cross(h, ctx.cross[layer], layer, taps.at("cross")))
            x = norms.post(taps.computed(add, x, drop(taps("cross.out", h, rows))))

        x = taps("resid_mid", x, rows)
        if self.mlp is not None:
            norms = self.mlp_norm
            h = taps("mlp.in", norms.pre(x), rows)
            h = norms.out(self.mlp(h, ctx, taps.at("mlp")))
            x = norms.post(taps.computed(add, x, drop(taps("mlp.out", h, rows))))

        if self.branch is not None:
            x = self.branch(entered, x, ctx, taps.at("branch"))
        return taps("resid_post", x, rows)


class ParallelBlock(Module[parts.ParallelBlockSpec], of=parts.ParallelBlockSpec):
    """Attention and MLP side by side on the same stream; there is no stream between them, so no `resid_mid`."""

    norm: VectorMap
    attn: Attention
    attn_norm: Norms
    cross: None = None
    mlp: MLP | GLU | MoE
    mlp_norm: Norms

    def __init__(self, spec: parts.ParallelBlockSpec) -> None:
        super().__init__(spec)
        if spec.norm is None:
            self.norm = nn.Identity()

    def forward(self, x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
        rows = ctx.rows
        drop = partial(ops.dropout, rate=self.spec.dropout, training=self.training, random=ctx.random)
        x = taps("resid_pre", x, rows)
        y = self.norm(x)

        h = taps("attn.in", self.attn_norm.pre(y), rows)
        h = self.attn_norm.out(self.attn(h, ctx.own[layer], layer, taps.at("attn")))
        attended = taps.computed(add, x, drop(taps("attn.out", h, rows)))

        h = taps("mlp.in", self.mlp_norm.pre(y), rows)
        h = self.mlp_norm.out(self.mlp(h, ctx, taps.at("mlp")))
        x = taps.computed(add, attended, drop(taps("mlp.out", h, rows)))
        return taps("resid_post", x, rows)


class Stack(Module[parts.StackSpec], of=parts.StackSpec):
    """Embedding, blocks, final norm.

    `recompute` drops each block's activations in training and computes them again in the backward pass
    (Chen et al. 2016): less memory, one more forward.
    """

    embed: Embed | Frames | Patches
    kinds: Mapping[str, Kind]
    blocks: Sequence[Block | ParallelBlock]
    final_norm: VectorMap | None
    project: Linear | None
    recompute: bool = False

    def __init__(self, spec: parts.StackSpec) -> None:
        super().__init__(spec)
        self.group()

    def group(self) -> None:
        """Group the layers that can share an attention state; call it again after replacing a block's attention."""
        self.own_groups: Groups = {}
        self.cross_groups: Groups = {}
        for layer, block in enumerate(self.blocks):
            self.own_groups.setdefault(sharing_key(block.attn.spec, layer), []).append(layer)
            if block.cross is not None:
                self.cross_groups.setdefault(sharing_key(block.cross.spec, layer), []).append(layer)

    def cache(self, slots: int = 0, cache_type: CacheType = "auto", *, page: int | None = PAGE_POSITIONS) -> Cache:
        """An empty cache for so many rows, each layer's by its kind: a ring where a window bounds what it sees, sums
        for causal linear attention, else pages of `page` tokens, or with None a strip for each slot.  Its numbers are
        of type `cache_type`.  Raises InputError for an unknown one."""
        return Cache(
            self.cached_layers(), slots, page=page, dtype=self.dtype, cache_type=cache_type, device=self.device
        )

    def cached_layers(self) -> list[CachedLayer]:
        """What a cache stores of each layer, as specs are now."""
        layers = []
        for block in self.blocks:
            attn = block.attn.spec
            band = window_of(self.kinds[attn.kind].spec.mask)
            window = None if band is None else band[0]
            layers.append(replace(_every_token(attn), window=window, sums=self.spec.keeps_sums(attn)))
        return layers

    def cross_cache(self, cache_type: CacheType = "auto") -> CrossCache:
        """An empty cache for the keys and values of encoder outputs; `cache_type` as in `cache`."""
        layers = [_every_token(block.cross.spec) for block in self.blocks if block.cross is not None]
        return CrossCache(layers, self.dtype, self.device, cache_type=cache_type)

    def forward(
        self,
        inputs: Tensor,
        rows: Rows,
        *,
        token_types: Tensor | None = None,
        cache: KVCache = NULL_CACHE,
        cross: CrossKeys | None = None,
        taps: Taps = NO_TAPS,
        random: ops.RowNoise | None = None,
    ) -> Tensor:
        """What the input slot reads, [N] token ids of `rows` most often -> [N, D] after the final norm.  With a cache,
        the ids continue what it holds."""
        x = self.embed(inputs, rows, token_types, random)
        step = cache.begin(rows, taps.provenance)
        ctx = step.context if taps is NO_TAPS else None
        if not isinstance(ctx, Context) or ctx.stack is not self or not ctx.try_advance(rows, x):
            ctx = self.context(x, rows, step, cross, random)
            step.context = ctx if ctx.moving else None  # a step of no cache is part of it: no cycle
        x = taps("embed", x, rows)
        for i, block in enumerate(self.blocks):
            run: Callable[..., Tensor] = block if random is None else partial(_with_noise, block)
            if self.recompute and self.training:
                run = partial(_recomputed, run)
            x = taps.at(f"blocks.{i}").run(run, x, ctx, i)
        step.finish()
        return self.finish(x, rows, taps, random)

    def context(
        self, x: Tensor, rows: Rows, step: CacheStep, cross: CrossKeys | None, random: ops.RowNoise | None = None
    ) -> Context:
        """The state that the blocks of one forward share, decided for each kind of layer."""

        def own_state(layer: int) -> KindState:
            attn = self.blocks[layer].attn
            return self.kinds[attn.spec.kind].state(attn, rows, x, step.of(layer), random)

        def cross_state_of(layer: int) -> KindState:
            attn = self.blocks[layer].cross
            assert attn is not None
            assert cross is not None
            return cross_state(attn, rows, x, cross, random)

        own = shared_states(self.own_groups, own_state)
        crossed = [] if cross is None else shared_states(self.cross_groups, cross_state_of)
        firsts = [self.blocks[layers[0]] for layers in self.own_groups.values()]
        return Context(rows, own, crossed, random, x.dtype, self, firsts, [*self.kinds.values()])

    def finish(self, x: Tensor, rows: Rows, taps: Taps = NO_TAPS, random: ops.RowNoise | None = None) -> Tensor:
        """The residual stream [N, D] after the last block -> what the head, or the decoder beside an encoder, reads."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.spec.dropout:
            if random is not None:
                random.begin(AFTER)
            x = ops.dropout(x, self.spec.dropout, self.training, random)
        if self.project is not None:
            x = self.project(x)
        return taps("final", x, rows)


Groups = dict[tuple[object, ...], list[int]]


def _every_token(attn: parts.AttentionSpec) -> CachedLayer:
    """A layer that stores the key and the value of every token."""
    return CachedLayer(groups=attn.kv_heads, width=attn.head_width, value_width=attn.value_width)


def _recomputed(run: Callable[..., Tensor], x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
    """Run a block without its activations; the backward pass runs it again, drawing the same random numbers."""
    out: Tensor = checkpoint(run, x, ctx, layer, taps, use_reentrant=False)
    return out


def _with_noise(block: Block | ParallelBlock, x: Tensor, ctx: Context, layer: int, taps: Taps) -> Tensor:
    """Run a block whose dropout draws the numbers of its layer."""
    if ctx.random is not None:
        ctx.random.begin(layer)
    return block(x, ctx, layer, taps)
