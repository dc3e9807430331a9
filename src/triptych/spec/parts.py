"""The parts a block is made of, as data.  A variant is a part put in a slot; an absent part is `None`.

Widths: D model, H heads, G key/value heads, K head width, F MLP width, V vocabulary.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from triptych.errors import ConfigError
from .inputs import ConvSpec, FramesSpec, PatchesSpec
from .masks import Causal, Mask
from .norms import Norm
from .part import Part, Shapes, check_widths
from .positions import Absolute, PositionSpec

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


class LinearSpec(Part):
    """`x @ weight.T + bias`."""

    inputs: int
    outputs: int
    bias: bool = False

    def tensors(self) -> Shapes:
        own: Shapes = {"weight": (self.outputs, self.inputs)}
        return own | {"bias": (self.outputs,)} if self.bias else own


class ScaleSpec(Part):
    """`factor * x`: a fixed number in the place of a norm (Granite's residual multiplier)."""

    factor: float


class NormsSpec(Part):
    """The norms around one sublayer: `x = post(x + out(sublayer(pre(x))))`.

    Pre-norm fills `pre` (GPT-2, Llama), post-norm `post` (the original, BERT), sandwich `pre` and `out` (Gemma 2).
    """

    pre: Norm | None = None
    out: Norm | ScaleSpec | None = None
    post: Norm | None = None


class AdditiveSpec(Part):
    """Bahdanau et al. 2015: queries and keys of width K are scored by `weight . tanh(q + k)`; ask for scale 1."""

    width: int

    def tensors(self) -> Shapes:
        return {"weight": (self.width,)}


class LinearKernelSpec(Part):
    """Katharopoulos et al. 2020: weights proportional to `phi(q) . phi(k)`, phi = elu + 1.  In O(T), without scores."""


class AttentionSpec(Part):
    """Multi-head attention: H query heads read G key/value heads, head h reading group h*G//H.

    `q` gives H*K, `k` G*K, `v` G*Kv, `out` takes H*Kv: the head width is free of D/H and the value width of the key
    width.  `q_norm` and `k_norm` act on each head's K dimensions before rotation.  `scale` is 1/sqrt(K) when None.
    `mechanism` is how a query scores a key: their dot product when None.  `pos_q` and `pos_k` are for a position part
    that is mapped by each layer (`Disentangled`): its distances as queries and as keys, by `q` and `k` when None.
    """

    heads: int
    kv_heads: int
    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    out: LinearSpec
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    mechanism: AdditiveSpec | LinearKernelSpec | None = None
    pos_q: LinearSpec | None = None
    pos_k: LinearSpec | None = None
    kind: str = "self"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0

    def _agree(self) -> None:
        if self.heads % self.kv_heads:
            raise ConfigError(f"attention: {self.heads} heads do not divide into {self.kv_heads} key/value heads")
        if self.q.outputs % self.heads or self.k.outputs != self.kv_heads * self.head_width:
            raise ConfigError(
                f"attention: q gives {self.q.outputs} and k {self.k.outputs} dimensions, "
                f"which {self.heads} heads and {self.kv_heads} key/value heads cannot share"
            )
        if self.v.outputs % self.kv_heads or self.out.inputs != self.heads * self.value_width:
            v = self.heads * self.value_width
            raise ConfigError(f"attention: out takes {self.out.inputs} dimensions, {self.heads} heads of v give {v}")

    @property
    def head_width(self) -> int:
        return self.q.outputs // self.heads

    @property
    def value_width(self) -> int:
        return self.v.outputs // self.kv_heads

    def tensors(self) -> Shapes:
        return {"sinks": (self.heads,)} if self.sinks else {}


def attention(
    width: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    head_width: int | None = None,
    value_width: int | None = None,
    kv_inputs: int | None = None,
    bias: bool = False,
    out_bias: bool | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    mechanism: AdditiveSpec | LinearKernelSpec | None = None,
    kind: str = "self",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dropout: float = 0.0,
) -> AttentionSpec:
    """An `Attention` from the numbers a config gives: `bias` is that of q, k and v, `out_bias` follows it."""
    if head_width is None and (heads < 1 or width % heads):
        raise ConfigError(f"attention: width {width} does not divide into {heads} heads and no head width is given")
    groups, inner = kv_heads or heads, head_width or width // heads
    values, source = value_width or inner, kv_inputs or width
    return AttentionSpec(
        heads=heads,
        kv_heads=groups,
        q=LinearSpec(inputs=width, outputs=heads * inner, bias=bias),
        k=LinearSpec(inputs=source, outputs=groups * inner, bias=bias),
        v=LinearSpec(inputs=source, outputs=groups * values, bias=bias),
        out=LinearSpec(inputs=heads * values, outputs=width, bias=bias if out_bias is None else out_bias),
        q_norm=q_norm, k_norm=k_norm, mechanism=mechanism, kind=kind, scale=scale, softcap=softcap, sinks=sinks,
        dropout=dropout,
    )  # fmt: skip


class MLPSpec(Part):
    """`down(act(up(x)))`."""

    up: LinearSpec
    down: LinearSpec
    act: Activation
    dropout: float = 0.0


class GLUSpec(Part):
    """Shazeer 2020: `down(act(gate(x)) * up(x))`; SwiGLU with silu, GeGLU with gelu."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    act: Activation
    dropout: float = 0.0


class MoESpec(Part):
    """Shazeer et al. 2017: each token goes through `top_k` of E experts, those with the largest router probabilities,
    and takes the sum of their outputs weighted by these.  `normalize` divides the weights by their sum.

    All experts are `expert`, each with weights of its own: `experts.0`, `experts.1`, ...
    """

    router: LinearSpec
    expert: GLUSpec
    experts: int
    top_k: int
    normalize: bool = False

    def _agree(self) -> None:
        if self.top_k > self.experts or self.router.outputs != self.experts:
            raise ConfigError(
                f"mixture of experts: {self.top_k} of {self.experts} experts, "
                f"with a router that scores {self.router.outputs}"
            )

    def children(self) -> Iterator[tuple[str, Part]]:
        yield "router", self.router
        yield from ((f"experts.{e}", self.expert) for e in range(self.experts))


FeedForward = MLPSpec | GLUSpec | MoESpec


def mlp(width: int, hidden: int, act: Activation, *, bias: bool = False, dropout: float = 0.0) -> MLPSpec:
    """An `MLP` of width D and hidden width F."""
    up, down = LinearSpec(inputs=width, outputs=hidden, bias=bias), LinearSpec(inputs=hidden, outputs=width, bias=bias)
    return MLPSpec(up=up, down=down, act=act, dropout=dropout)


def glu(width: int, hidden: int, act: Activation, *, bias: bool = False, dropout: float = 0.0) -> GLUSpec:
    """A `GLU` of width D and hidden width F."""
    plain = mlp(width, hidden, act, bias=bias)
    return GLUSpec(gate=plain.up, up=plain.up, down=plain.down, act=act, dropout=dropout)


def moe(width: int, hidden: int, act: Activation, *, experts: int, top_k: int, normalize: bool = False) -> MoESpec:
    """A `MoE` of width D whose experts are `GLU`s of hidden width F."""
    router = LinearSpec(inputs=width, outputs=experts)
    return MoESpec(router=router, expert=glu(width, hidden, act), experts=experts, top_k=top_k, normalize=normalize)


class BranchSpec(Part):
    """A convolution beside a whole block (DeBERTa-v2 xlarge): `norm(block(x) + act(conv(x)))`."""

    conv: ConvSpec
    act: Activation
    norm: Norm
    dropout: float = 0.0


class BlockSpec(Part):
    """Self-attention, cross-attention or none, an MLP or none, each on the residual stream through its norms; and
    beside it all a convolution or none."""

    attn: AttentionSpec
    mlp: FeedForward | None
    attn_norm: NormsSpec
    mlp_norm: NormsSpec | None
    cross: AttentionSpec | None = None
    cross_norm: NormsSpec | None = None
    branch: BranchSpec | None = None
    dropout: float = 0.0

    def _agree(self) -> None:
        if (self.cross is None) != (self.cross_norm is None):
            raise ConfigError("block: cross and cross_norm come together")
        if (self.mlp is None) != (self.mlp_norm is None):
            raise ConfigError("block: mlp and mlp_norm come together")


class ParallelBlockSpec(Part):
    """Attention and MLP side by side (Wang & Komatsuzaki 2021): `x + attn(y) + mlp(y)`, each through its norms, where
    `y = norm(x)`.  One norm for both is `norm` (GPT-J, Phi); each its own, `attn_norm` and `mlp_norm` (GPT-NeoX).
    """

    attn: AttentionSpec
    mlp: FeedForward
    norm: Norm | None = None
    attn_norm: NormsSpec = NormsSpec()
    mlp_norm: NormsSpec = NormsSpec()
    dropout: float = 0.0
    cross: ClassVar[None] = None  # there is no place for it

    def _agree(self) -> None:
        if self.attn_norm.post is not None or self.mlp_norm.post is not None:
            raise ConfigError("parallel block: one sum of two sublayers has no place for a norm after each")


class KindSpec(Part):
    """The settings that the layers of one kind share: who sees whom, and the position part inside attention."""

    mask: Mask
    position: PositionSpec | None = None


class TableSpec(Part):
    """One vector a row."""

    rows: int
    width: int

    def tensors(self) -> Shapes:
        return {"weight": (self.rows, self.width)}


class EmbedSpec(Part):
    """Token ids to vectors: `project(norm(widen(scale * tokens[id] + position + token_types[type])))`.

    `width` is that of the tables; where it is not the model's, `widen` takes it there before the norm (DeBERTa) or
    `project` after it (ELECTRA).
    """

    vocab: int
    width: int
    position: Absolute | None = None
    token_types: int = 0
    widen: LinearSpec | None = None
    norm: Norm | None = None
    scale: float | None = None
    project: LinearSpec | None = None
    dropout: float = 0.0

    @property
    def outputs(self) -> int:
        """D, the width of what it gives."""
        last = self.project or self.widen
        return self.width if last is None else last.outputs

    def children(self) -> Iterator[tuple[str, Part]]:
        yield "tokens", TableSpec(rows=self.vocab, width=self.width)
        if self.token_types:
            yield "token_types", TableSpec(rows=self.token_types, width=self.width)
        yield from super().children()


Input = EmbedSpec | FramesSpec | PatchesSpec


class StackSpec(Part):
    """Input, blocks, final norm.  `kinds` names the kinds of attention its blocks use; `cross` needs no entry.
    `project` takes an encoder's last vectors to the width of the decoder that reads them, where the two differ."""

    embed: Input
    kinds: dict[str, KindSpec]
    blocks: tuple[BlockSpec | ParallelBlockSpec, ...]
    final_norm: Norm | None = None
    project: LinearSpec | None = None
    dropout: float = 0.0

    def _agree(self) -> None:
        if not self.blocks:
            raise ConfigError("stack: has no blocks; give at least one")
        for i, block in enumerate(self.blocks):
            if block.attn.kind not in self.kinds:
                raise ConfigError(f"blocks.{i}.attn: kind {block.attn.kind!r} is not one of {sorted(self.kinds)}")
            self._check_widths(i, block)
        check_widths("embed", getattr(self.embed, "width", None), *dict(self.embed.children()).values())
        check_widths("stack", self.width, self.final_norm, self.project)

    def _check_widths(self, i: int, block: BlockSpec | ParallelBlockSpec) -> None:
        """Raise ConfigError for a sublayer that reads or writes another width than the residual stream's."""
        ends = {"attn": (block.attn.q.inputs, block.attn.out.outputs)}
        if block.cross is not None:
            ends["cross"] = (block.cross.q.inputs, block.cross.out.outputs)
        inner = block.mlp.expert if isinstance(block.mlp, MoESpec) else block.mlp
        if inner is not None:
            ends["mlp"] = (inner.up.inputs, inner.down.outputs)
        for name, (inputs, outputs) in ends.items():
            if (inputs, outputs) != (self.width, self.width):
                raise ConfigError(
                    f"blocks.{i}.{name}: reads {inputs} and writes {outputs} numbers a token, in a stack of width "
                    f"{self.width}; both must be {self.width}"
                )
        for name, part in block.children():
            if name not in ends:
                check_widths(f"blocks.{i}.{name}", self.width, *dict(part.walk()).values())

    def keeps_sums(self, attn: AttentionSpec) -> bool:
        """Whether a cache keeps sums of a layer's keys and values, of constant size: causal linear attention."""
        return isinstance(attn.mechanism, LinearKernelSpec) and isinstance(self.kinds[attn.kind].mask, Causal)

    @property
    def width(self) -> int:
        """D of the residual stream."""
        return self.embed.outputs

    @property
    def outputs(self) -> int:
        """The width of what the stack gives."""
        return self.width if self.project is None else self.project.outputs

    @property
    def words(self) -> EmbedSpec:
        """The input of a stack that reads token ids."""
        assert isinstance(self.embed, EmbedSpec)
        return self.embed
