"""How many keys a query sees, and what a cache keeps of one position, from the spec."""

from __future__ import annotations

from triptych.spec import AttentionSpec, StackSpec
from triptych.spec.masks import And, Mask, Window


def visible(mask: Mask) -> int | None:
    """How many keys a query can see at most under a window, None when nothing bounds it."""
    if isinstance(mask, Window):
        return mask.back + mask.ahead
    if isinstance(mask, And):
        return min((span for part in mask.parts if (span := visible(part)) is not None), default=None)
    return None


def span_of(stack: StackSpec, kind: str, keys: int) -> int:
    """How many of `keys` a query of this kind of layer sees at most."""
    span = visible(stack.kinds[kind].mask)
    return keys if span is None else min(keys, span)


def kv_width(attn: AttentionSpec) -> int:
    """Numbers in the keys and values of one position."""
    return attn.kv_heads * (attn.head_width + attn.value_width)
