"""A stack of attention alone, without norms and MLPs: what circuits are written into by hand."""

from collections.abc import Sequence

from triptych.spec import BlockSpec, EmbedSpec, KindSpec, LearnedSpec, Mask, NormsSpec, StackSpec, attention
from triptych.spec.positions import PositionSpec


def bare_stack(
    vocab: int, places: int, width: int, head_width: int, heads: Sequence[int], mask: Mask, *,
    cross: Sequence[int] = (), scale: float | None = None, position: PositionSpec | None = None, share: int = 1,
) -> StackSpec:  # fmt: skip
    """One block for each number of `heads`, with `cross` as many heads of cross-attention in each; learned places.
    `position` acts in attention; `share` heads read one key."""
    blocks = []
    for layer, count in enumerate(heads):
        blocks.append(
            BlockSpec(
                attn=attention(width, count, kv_heads=count // share, head_width=head_width, scale=scale),
                mlp=None,
                attn_norm=NormsSpec(),
                mlp_norm=None,
                cross=attention(width, cross[layer], head_width=head_width, scale=scale) if cross else None,
                cross_norm=NormsSpec() if cross else None,
            )
        )
    embed = EmbedSpec(vocab=vocab, width=width, position=LearnedSpec(length=places, width=width))
    return StackSpec(embed=embed, kinds={"self": KindSpec(mask=mask, position=position)}, blocks=tuple(blocks))
