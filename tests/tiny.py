"""Tiny random models made from specs alone: three layouts, every position part, windows; sizes all differ."""

from __future__ import annotations

from collections.abc import Sequence

from triptych import nn
from triptych.generate import Engine, Executor, Request
from triptych.nn import Row
from triptych.probe import Session
from triptych.spec import (
    AdditiveSpec,
    AlibiSpec,
    BlockSpec,
    DisentangledSpec,
    EmbedSpec,
    KindSpec,
    LayerNormSpec,
    LearnedSpec,
    LinearKernelSpec,
    LinearSpec,
    LMHeadSpec,
    MaskedLMHeadSpec,
    ModelSpec,
    NormsSpec,
    ParallelBlockSpec,
    RMSNormSpec,
    RopeSpec,
    SinusoidalSpec,
    SpecialIds,
    StackSpec,
    T5BucketsSpec,
    TransformSpec,
    attention,
    causal,
    full,
    glu,
    mlp,
    moe,
    window,
)

D, H, G, K, F, V = 24, 6, 3, 10, 37, 41
POSITIONS = {
    "rope": RopeSpec(width=K),
    "rope-partial-interleaved": RopeSpec(width=4, pairing="interleaved"),
    "alibi": AlibiSpec(heads=H),
    "disentangled": DisentangledSpec(width=D, span=6, max_distance=9),
    "t5": T5BucketsSpec(heads=H, buckets=8, max_distance=11, bidirectional=False),
    "learned": LearnedSpec(length=64, width=D),
    "sinusoidal": SinusoidalSpec(width=D),
    "none": None,
}
MASKS = {"causal": causal(), "window": causal() & window(4)}


def _embed(position: object) -> EmbedSpec:
    absolute = position if isinstance(position, LearnedSpec | SinusoidalSpec) else None
    return EmbedSpec(vocab=V, width=D, position=absolute)


def _kind(mask: object, position: object) -> KindSpec:
    inside = None if isinstance(position, LearnedSpec | SinusoidalSpec) else position
    return KindSpec(mask=mask, position=inside)  # type: ignore[arg-type]


MECHANISMS = {"dot": None, "additive": AdditiveSpec(width=K), "linear": LinearKernelSpec()}


def decoder(
    position: str = "rope", mask: str = "causal", blocks: int = 2, seed: int = 0, mechanism: str = "dot"
) -> nn.Transformer:
    """Pre-norm, grouped heads, SwiGLU; the last block always sees everything so that windows sit beside full layers."""
    norm, part = RMSNormSpec(width=D), POSITIONS[position]
    kinds = {"self": _kind(MASKS[mask], part), "all": _kind(causal(), part)}
    made = tuple(
        BlockSpec(
            attn=attention(
                D,
                H,
                kv_heads=G,
                head_width=K,
                kind="all" if i == blocks - 1 else "self",
                mechanism=MECHANISMS[mechanism],
                scale=1.0 if mechanism == "additive" else None,
            ),
            mlp=glu(D, F, "silu"),
            attn_norm=NormsSpec(pre=norm),
            mlp_norm=NormsSpec(pre=norm),
        )
        for i in range(blocks)
    )
    stack = StackSpec(embed=_embed(part), kinds=kinds, blocks=made, final_norm=norm)
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    return nn.new(ModelSpec(family="tiny", decoder=stack, head=head, context=64, init_std=0.3), seed)


def engine(
    module: nn.Transformer,
    rows: Sequence[Sequence[int]],
    sources: Sequence[Row] | None = None,
    chunk: int | None = None,
    probe: Session | None = None,
    executor: Executor = "auto",
) -> Engine:
    """An engine with these rows, for `logits`: their ids are appended by the test."""
    made = Engine(module, chunk=chunk, executor=executor)
    every = [None] * len(rows) if sources is None else sources
    made.add(
        *(
            Request(prompt=row, source=source, max_new_tokens=0, number=i, probe=probe)
            for i, (row, source) in enumerate(zip(rows, every, strict=True))
        )
    )
    return made


def mixture(seed: int = 0, mask: str = "causal") -> nn.Transformer:
    """Attention and MLP in parallel, the MLP a mixture: in the first block one norm for both, then each its own."""
    norm, attn = LayerNormSpec(width=D), attention(D, H, kv_heads=G, head_width=K)
    experts = moe(D, F, "silu", experts=5, top_k=2)
    blocks = (
        ParallelBlockSpec(attn=attn, mlp=experts, norm=norm),
        ParallelBlockSpec(attn=attn, mlp=experts, attn_norm=NormsSpec(pre=norm), mlp_norm=NormsSpec(pre=norm)),
    )
    stack = StackSpec(
        embed=_embed(None), kinds={"self": _kind(MASKS[mask], POSITIONS["rope"])}, blocks=blocks, final_norm=norm
    )
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    return nn.new(ModelSpec(family="tiny", decoder=stack, head=head, context=64, init_std=0.3), seed)


def attention_only(blocks: int = 2, seed: int = 0) -> nn.Transformer:
    """A decoder whose blocks have no MLP."""
    norm = NormsSpec(pre=RMSNormSpec(width=D))
    block = BlockSpec(attn=attention(D, H, kv_heads=G, head_width=K), mlp=None, attn_norm=norm, mlp_norm=None)
    stack = StackSpec(embed=_embed(None), kinds={"self": _kind(causal(), RopeSpec(width=K))}, blocks=(block,) * blocks)
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    return nn.new(ModelSpec(family="tiny", decoder=stack, head=head, context=64, init_std=0.3), seed)


def encoder(position: str = "learned", seed: int = 0) -> nn.Transformer:
    """Post-norm, GELU, biases everywhere, token types, a masked-LM head."""
    norm, part = LayerNormSpec(width=D), POSITIONS[position]
    if isinstance(part, T5BucketsSpec):
        part = T5BucketsSpec(heads=H, buckets=8, max_distance=11)
    block = BlockSpec(
        attn=attention(D, H, head_width=K, bias=True),
        mlp=mlp(D, F, "gelu", bias=True),
        attn_norm=NormsSpec(post=norm),
        mlp_norm=NormsSpec(post=norm),
    )
    absolute = part if isinstance(part, LearnedSpec | SinusoidalSpec) else None
    embed = EmbedSpec(vocab=V, width=D, position=absolute, token_types=2, norm=norm)
    stack = StackSpec(embed=embed, kinds={"self": _kind(full(), part)}, blocks=(block, block))
    dense, proj = LinearSpec(inputs=D, outputs=D, bias=True), LinearSpec(inputs=D, outputs=V, bias=True)
    head = MaskedLMHeadSpec(transform=TransformSpec(dense=dense, act="gelu", norm=norm), proj=proj)
    return nn.new(ModelSpec(family="tiny", encoder=stack, head=head, context=64, init_std=0.3), seed)


def encoder_decoder(seed: int = 0) -> nn.Transformer:
    """T5 in small: relative buckets shared by the layers, no score scale, cross-attention."""
    norm = RMSNormSpec(width=D)

    def stack(mask: object, both_ways: bool) -> StackSpec:
        buckets = T5BucketsSpec(heads=H, buckets=8, max_distance=11, bidirectional=both_ways)
        cross = None if both_ways else attention(D, H, head_width=K, kind="cross", scale=1.0)
        block = BlockSpec(
            attn=attention(D, H, head_width=K, scale=1.0),
            cross=cross,
            mlp=mlp(D, F, "relu"),
            attn_norm=NormsSpec(pre=norm),
            cross_norm=None if cross is None else NormsSpec(pre=norm),
            mlp_norm=NormsSpec(pre=norm),
        )
        embed = EmbedSpec(vocab=V, width=D)
        return StackSpec(embed=embed, kinds={"self": _kind(mask, buckets)}, blocks=(block, block), final_norm=norm)

    model = ModelSpec(
        family="tiny",
        encoder=stack(full(), True),
        decoder=stack(causal(), False),
        head=LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V), scale=D**-0.5),
        ties={
            "decoder.embed.tokens.weight": "encoder.embed.tokens.weight",
            "head.proj.weight": "encoder.embed.tokens.weight",
        },
        ids=SpecialIds(pad=0, eos=(1,), start=0),
        init_std=0.3,
    )
    return nn.new(model, seed)
