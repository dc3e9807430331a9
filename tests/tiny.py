"""Tiny random models made from specs alone: three layouts, every position part, windows; sizes all differ."""

from collections.abc import Callable, Sequence
from functools import partial

from triptych import nn, spec
from triptych.generate import Engine, Executor, Request
from triptych.nn import InputRow
from triptych.probe import Session

D, H, G, K, F, V = 24, 6, 3, 10, 37, 41
POSITIONS = {
    "rope": spec.RopeSpec(width=K),
    "rope-partial-interleaved": spec.RopeSpec(width=4, pairing="interleaved"),
    "alibi": spec.AlibiSpec(heads=H),
    "disentangled": spec.DisentangledSpec(width=D, span=6, max_distance=9),
    "t5": spec.T5BucketsSpec(heads=H, buckets=8, max_distance=11, bidirectional=False),
    "learned": spec.LearnedSpec(length=64, width=D),
    "sinusoidal": spec.SinusoidalSpec(width=D),
    "none": None,
}
MASKS = {"causal": spec.causal(), "window": spec.causal() & spec.window(4)}


def _embed(position: object) -> spec.EmbedSpec:
    absolute = position if isinstance(position, spec.LearnedSpec | spec.SinusoidalSpec) else None
    return spec.EmbedSpec(vocab=V, width=D, position=absolute)


def _kind(mask: object, position: object) -> spec.KindSpec:
    inside = None if isinstance(position, spec.LearnedSpec | spec.SinusoidalSpec) else position
    return spec.KindSpec(mask=mask, position=inside)  # type: ignore[arg-type]


MECHANISMS = {"dot": None, "additive": spec.AdditiveSpec(width=K), "linear": spec.LinearKernelSpec()}


def decoder(
    position: str = "rope", mask: str = "causal", blocks: int = 2, seed: int = 0, mechanism: str = "dot"
) -> nn.Transformer:
    """Pre-norm, grouped heads, SwiGLU; the last block always sees everything so that windows sit beside full layers."""
    norm, part = spec.RMSNormSpec(width=D), POSITIONS[position]
    kinds = {"self": _kind(MASKS[mask], part), "all": _kind(spec.causal(), part)}
    made = tuple(
        spec.BlockSpec(
            attn=spec.attention(
                D,
                H,
                kv_heads=G,
                head_width=K,
                kind="all" if i == blocks - 1 else "self",
                mechanism=MECHANISMS[mechanism],
                scale=1.0 if mechanism == "additive" else None,
            ),
            mlp=spec.glu(D, F, "silu"),
            attn_norm=spec.NormsSpec(pre=norm),
            mlp_norm=spec.NormsSpec(pre=norm),
        )
        for i in range(blocks)
    )
    stack = spec.StackSpec(embed=_embed(part), kinds=kinds, blocks=made, final_norm=norm)
    head = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=D, outputs=V))
    return nn.new(spec.ModelSpec(family="tiny", decoder=stack, head=head, context=64, init_std=0.3), seed)


def engine(
    module: nn.Transformer,
    rows: Sequence[Sequence[int]],
    sources: Sequence[InputRow] | None = None,
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
    norm, attn = spec.LayerNormSpec(width=D), spec.attention(D, H, kv_heads=G, head_width=K)
    experts = spec.moe(D, F, "silu", experts=5, top_k=2)
    blocks = (
        spec.ParallelBlockSpec(attn=attn, mlp=experts, norm=norm),
        spec.ParallelBlockSpec(
            attn=attn, mlp=experts, attn_norm=spec.NormsSpec(pre=norm), mlp_norm=spec.NormsSpec(pre=norm)
        ),
    )
    stack = spec.StackSpec(
        embed=_embed(None), kinds={"self": _kind(MASKS[mask], POSITIONS["rope"])}, blocks=blocks, final_norm=norm
    )
    head = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=D, outputs=V))
    return nn.new(spec.ModelSpec(family="tiny", decoder=stack, head=head, context=64, init_std=0.3), seed)


def attention_only(blocks: int = 2, seed: int = 0) -> nn.Transformer:
    """A decoder whose blocks have no MLP."""
    norm = spec.NormsSpec(pre=spec.RMSNormSpec(width=D))
    block = spec.BlockSpec(attn=spec.attention(D, H, kv_heads=G, head_width=K), mlp=None, attn_norm=norm, mlp_norm=None)
    stack = spec.StackSpec(
        embed=_embed(None), kinds={"self": _kind(spec.causal(), spec.RopeSpec(width=K))}, blocks=(block,) * blocks
    )
    head = spec.LMHeadSpec(proj=spec.LinearSpec(inputs=D, outputs=V))
    return nn.new(spec.ModelSpec(family="tiny", decoder=stack, head=head, context=64, init_std=0.3), seed)


def encoder(position: str = "learned", seed: int = 0) -> nn.Transformer:
    """Post-norm, GELU, biases everywhere, token types, a masked-LM head."""
    norm, part = spec.LayerNormSpec(width=D), POSITIONS[position]
    if isinstance(part, spec.T5BucketsSpec):
        part = spec.T5BucketsSpec(heads=H, buckets=8, max_distance=11)
    block = spec.BlockSpec(
        attn=spec.attention(D, H, head_width=K, bias=True),
        mlp=spec.mlp(D, F, "gelu", bias=True),
        attn_norm=spec.NormsSpec(post=norm),
        mlp_norm=spec.NormsSpec(post=norm),
    )
    absolute = part if isinstance(part, spec.LearnedSpec | spec.SinusoidalSpec) else None
    embed = spec.EmbedSpec(vocab=V, width=D, position=absolute, token_types=2, norm=norm)
    stack = spec.StackSpec(embed=embed, kinds={"self": _kind(spec.full(), part)}, blocks=(block, block))
    dense, proj = spec.LinearSpec(inputs=D, outputs=D, bias=True), spec.LinearSpec(inputs=D, outputs=V, bias=True)
    head = spec.MaskedLMHeadSpec(transform=spec.TransformSpec(dense=dense, act="gelu", norm=norm), proj=proj)
    return nn.new(spec.ModelSpec(family="tiny", encoder=stack, head=head, context=64, init_std=0.3), seed)


def encoder_decoder(seed: int = 0) -> nn.Transformer:
    """T5 in small: relative buckets shared by the layers, no score scale, cross-attention."""
    norm = spec.RMSNormSpec(width=D)

    def stack(mask: object, both_ways: bool) -> spec.StackSpec:
        buckets = spec.T5BucketsSpec(heads=H, buckets=8, max_distance=11, bidirectional=both_ways)
        cross = None if both_ways else spec.attention(D, H, head_width=K, kind="cross", scale=1.0)
        block = spec.BlockSpec(
            attn=spec.attention(D, H, head_width=K, scale=1.0),
            cross=cross,
            mlp=spec.mlp(D, F, "relu"),
            attn_norm=spec.NormsSpec(pre=norm),
            cross_norm=None if cross is None else spec.NormsSpec(pre=norm),
            mlp_norm=spec.NormsSpec(pre=norm),
        )
        embed = spec.EmbedSpec(vocab=V, width=D)
        return spec.StackSpec(embed=embed, kinds={"self": _kind(mask, buckets)}, blocks=(block, block), final_norm=norm)

    model = spec.ModelSpec(
        family="tiny",
        encoder=stack(spec.full(), True),
        decoder=stack(spec.causal(), False),
        head=spec.LMHeadSpec(proj=spec.LinearSpec(inputs=D, outputs=V), scale=D**-0.5),
        ties={
            "decoder.embed.tokens.weight": "encoder.embed.tokens.weight",
            "head.proj.weight": "encoder.embed.tokens.weight",
        },
        ids=spec.SpecialIds(pad=0, eos=(1,), start=0),
        init_std=0.3,
    )
    return nn.new(model, seed)


MODELS: dict[str, Callable[[], nn.Transformer]] = {
    "decoder": partial(decoder, mask="window"),
    "learned": partial(decoder, "learned"),
    "alibi": partial(decoder, "alibi"),
    "additive": partial(decoder, mechanism="additive"),
    "linear": partial(decoder, mechanism="linear"),
    "disentangled": partial(decoder, "disentangled", "window"),
    "mixture": mixture,
    "encoder": encoder,
    "encoder-decoder": encoder_decoder,
    "attention only": attention_only,
}
