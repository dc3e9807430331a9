"""Small models for experiments, made from a spec alone: nothing is loaded and nothing has been learned."""

from __future__ import annotations

from triptych.spec import (
    Block,
    Embed,
    Kind,
    Learned,
    Linear,
    LMHead,
    Mask,
    Model,
    Norms,
    RMSNorm,
    Sinusoidal,
    Stack,
    attention,
    glu,
)
from triptych.spec.positions import Absolute, Position


def untrained(
    mask: Mask,
    position: Absolute | Position | None = None,
    *,
    width: int,
    heads: int,
    blocks: int,
    vocab: int = 64,
    hidden: int | None = None,
    init_std: float = 0.02,
) -> Model:
    """A pre-norm stack with RMSNorm, SwiGLU of width F = `hidden` (2 D unless given) and a head; `mask` decides
    whether it reads both ways.  A position part goes through the door it opens."""
    norm = RMSNorm(width=width)
    absolute = position if isinstance(position, Learned | Sinusoidal) else None
    inside = None if isinstance(position, Learned | Sinusoidal) else position
    block = Block(
        attn=attention(width, heads),
        mlp=glu(width, hidden or 2 * width, "silu"),
        attn_norm=Norms(pre=norm),
        mlp_norm=Norms(pre=norm),
    )
    stack = Stack(
        embed=Embed(vocab=vocab, width=width, position=absolute),
        kinds={"self": Kind(mask=mask, position=inside)},
        blocks=(block,) * blocks,
        final_norm=norm,
    )
    head = LMHead(proj=Linear(inputs=width, outputs=vocab))
    return Model(family="triptych", decoder=stack, head=head, init_std=init_std)
