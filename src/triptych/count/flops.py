"""FLOPs of the matmuls of each part, from its spec.

A multiply and an add are two FLOPs, so a matmul of `[m, k]` by `[k, n]` is `2 m n k`.  Only matmuls are counted: norms,
activations, softmax and lookups are a few operations an element.  Every query is counted against every key its window
leaves, masked by causality or not, which is what a dense kernel computes and how the field counts.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from triptych.spec import (
    AttentionSpec,
    ClassHeadSpec,
    DisentangledSpec,
    FramesSpec,
    Input,
    LinearKernelSpec,
    LinearSpec,
    ModelSpec,
    MoESpec,
    Part,
    PatchesSpec,
    PoolingSpec,
    StackSpec,
)
from triptych.spec.masks import And, Mask, Window
from triptych.spec.parts import BlockSpec, FeedForward


def visible(mask: Mask) -> int | None:
    """How many keys a query can see at most under a window, None when nothing bounds it."""
    if isinstance(mask, Window):
        return mask.back + mask.ahead
    if isinstance(mask, And):
        return min((span for part in mask.parts if (span := visible(part)) is not None), default=None)
    return None


def span_of(stack: StackSpec, kind: str, keys: int) -> int:
    span = visible(stack.kinds[kind].mask)
    return keys if span is None else min(keys, span)


def kv_width(attn: AttentionSpec) -> int:
    return attn.kv_heads * (attn.head_width + attn.value_width)


def stack_flops(stack: StackSpec, tokens: int, cached: int, source: int) -> Counter[str]:
    total: Counter[str] = Counter()
    total["projections"] += _input_flops(stack.embed, tokens)
    total["projections"] += 0 if stack.project is None else _linear(stack.project, tokens)
    for block in stack.blocks:
        attn, cross = block.attn, block.cross
        total["projections"] += sum(_linear(part, tokens) for part in (attn.q, attn.k, attn.v, attn.out))
        keys = tokens if stack.keeps_sums(attn) else span_of(stack, attn.kind, cached + tokens)
        total["scores"] += _scores(attn, tokens, keys)
        total.update(_distances(stack.kinds[attn.kind].position, attn, tokens, cached + tokens))
        if cross is not None:
            total["projections"] += sum(_linear(part, tokens) for part in (cross.q, cross.out))
            total["projections"] += 0 if cached else sum(_linear(part, source) for part in (cross.k, cross.v))
            total["scores"] += _scores(cross, tokens, source)
        total["mlp"] += sum(_linear(part, tokens) for part in _used(block.mlp))
        if isinstance(block, BlockSpec) and block.branch is not None:
            total["mlp"] += 2 * tokens * prod(block.branch.conv.tensors()["weight"])
    return total


def _distances(position: Part | None, attn: AttentionSpec, queries: int, keys: int) -> dict[str, int]:
    """What disentangled attention adds: the distances of a row mapped, and scored against all queries and keys.  Of
    logarithmic buckets, as many as there are when the row is long enough to need them all."""
    if not isinstance(position, DisentangledSpec):
        return {}
    reached = min(2 * keys - 1, 2 * position.span)
    meets = {"c2p": (attn.pos_k or attn.k, queries), "p2c": (attn.pos_q or attn.q, keys)}
    terms = [meets[term] for term in position.terms]
    return {
        "projections": sum(_linear(mapped, reached) for mapped, _ in terms),
        "scores": sum(2 * count * reached * attn.heads * attn.head_width for _, count in terms),
    }


def _used(mlp: FeedForward | None) -> list[LinearSpec]:
    """The matrices one token goes through: of a mixture, its router and `top_k` experts."""
    parts: list[Part | None] = [mlp.router, *(mlp.expert,) * mlp.top_k] if isinstance(mlp, MoESpec) else [mlp]
    return [part for whole in parts if whole is not None for _, part in whole.walk() if isinstance(part, LinearSpec)]


def _input_flops(embed: Input, positions: int) -> int:
    match embed:
        case FramesSpec():  # the first convolution runs on every frame, the second on every position
            first, second = prod(embed.conv1.tensors()["weight"]), prod(embed.conv2.tensors()["weight"])
            return 2 * positions * (embed.stride * first + second)
        case PatchesSpec():
            return 2 * (positions - 1) * prod(embed.tensors()["weight"])
    return sum(_linear(part, positions) for part in (embed.widen, embed.project) if part is not None)


def head_flops(spec: ModelSpec, places: int) -> int:
    head = spec.head
    if head is None or (isinstance(head, PoolingSpec) and head.mode != "dense"):
        return 0
    rows = 1 if isinstance(head, ClassHeadSpec | PoolingSpec) else places
    return sum(_linear(part, rows) for _, part in head.walk() if isinstance(part, LinearSpec))


def _linear(part: LinearSpec, tokens: int) -> int:
    return 2 * tokens * part.inputs * part.outputs


def _scores(attn: AttentionSpec, queries: int, keys: int) -> int:
    """q against k, then the weights against v; of linear attention, what each key adds to its sums and what each query
    reads of them."""
    if isinstance(attn.mechanism, LinearKernelSpec):
        return 2 * (keys * attn.kv_heads + queries * attn.heads) * attn.head_width * (attn.value_width + 1)
    return 2 * queries * keys * attn.heads * (attn.head_width + attn.value_width)
