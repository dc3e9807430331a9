"""Parameters, bytes and FLOPs of a model from its spec alone: no weights, no torch.

A multiply and an add are two FLOPs, so a matmul of `[m, k]` by `[k, n]` is `2 m n k`.  Only matmuls are counted: norms,
activations, softmax and lookups are a few operations an element.  Every query is counted against every key its window
leaves, masked by causality or not, which is what a dense kernel computes and how the field counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from triptych.errors import InputError, nearest
from triptych.mapping.gguf_types import TYPES
from triptych.spec import (
    AttentionSpec,
    ClassHeadSpec,
    DisentangledSpec,
    FramesSpec,
    Input,
    LayerNormSpec,
    LearnedSpec,
    LinearSpec,
    ModelSpec,
    MoESpec,
    Part,
    PatchesSpec,
    PoolingSpec,
    RMSNormSpec,
    StackSpec,
    T5BucketsSpec,
)
from triptych.spec.masks import And, Mask, Window
from triptych.spec.parts import BlockSpec, FeedForward

# Bytes of one number.  Packed formats store blocks with their scales: Q4_0 keeps 32 numbers in 18 bytes.
_PACKED = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0")
DTYPES: Mapping[str, Fraction] = {
    "fp32": Fraction(4), "bf16": Fraction(2), "fp16": Fraction(2), "fp8": Fraction(1), "int8": Fraction(1),
    **{name: TYPES[name.upper()].bytes_per_element for name in _PACKED},
}  # fmt: skip
PARTS = ("embedding", "position", "attention", "mlp", "norms", "head")


@dataclass(frozen=True)
class Count:
    """What a model costs.  `parameters` by part (`PARTS`), a tied one counted once, where it is stored."""

    spec: ModelSpec
    parameters: dict[str, int]

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def active(self) -> int:
        """Parameters one token goes through: all but the experts it does not go through."""
        mixtures = [part for _, part in self.spec.walk() if isinstance(part, MoESpec)]
        return self.total - sum((m.experts - m.top_k) * sum(map(prod, m.expert.shapes().values())) for m in mixtures)

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Bytes of all parameters in one `dtype` of `DTYPES`.  Raises InputError for another."""
        return _bytes(self.total, dtype)

    def cache_bytes(self, positions: int, *, batch: int = 1, dtype: str = "fp16", source: int = 0) -> int:
        """Bytes of the keys and values of `batch` rows of `positions` tokens: `positions * G * (K + Kv)` numbers a
        layer.  A layer with a window keeps no more than it sees; cross-attention keeps `source` positions; an
        encoder alone keeps nothing."""
        decoder, numbers = self.spec.decoder, 0
        for block in decoder.blocks if decoder is not None else ():
            span = visible(decoder.kinds[block.attn.kind].mask) if decoder is not None else None
            numbers += _kv_width(block.attn) * (positions if span is None else min(positions, span))
            numbers += _kv_width(block.cross) * source if block.cross is not None else 0
        return _bytes(numbers * batch, dtype)

    def flops(self, tokens: int, *, cached: int = 0, logits: int | None = None, source: int = 0) -> dict[str, int]:
        """Matmul FLOPs of one forward of a row: `tokens` new ones after `cached`, by part.

        `logits` is how many places the head runs on, all new ones when None.  An encoder-decoder with nothing cached
        also runs its encoder over `source` tokens and projects their keys and values once.
        """
        total: Counter[str] = Counter(projections=0, scores=0, mlp=0, head=0)
        spec = self.spec
        if spec.encoder is not None and not (spec.decoder is not None and cached):
            total.update(_stack_flops(spec.encoder, tokens if spec.decoder is None else source, 0, 0))
        if spec.decoder is not None:
            total.update(_stack_flops(spec.decoder, tokens, cached, source))
        total["head"] += _head_flops(spec, tokens if logits is None else logits)
        return dict(total)

    def prefill_flops(self, tokens: int, *, source: int = 0) -> int:
        """A prompt of `tokens`, logits at its end only."""
        return sum(self.flops(tokens, logits=1, source=source).values())

    def decode_flops(self, cached: int, *, source: int = 0) -> int:
        """One more token after `cached` ones (at least 1)."""
        return sum(self.flops(1, cached=cached, source=source).values())

    def training_flops(self, tokens: int, *, source: int = 0) -> int:
        """Forward and backward over a row of `tokens`: the backward has two matmuls for each of the forward's."""
        return 3 * sum(self.flops(tokens, source=source).values())

    def score_elements(self, tokens: int) -> int:
        """Numbers in the score matrices of one row of `tokens`, all layers and heads: what O(T^2) is about."""
        stacks = self.spec.stacks.values()
        return sum(
            block.attn.heads * tokens * _span(stack, block.attn.kind, tokens)
            for stack in stacks
            for block in stack.blocks
        )

    def to_dict(self, positions: int, *, batch: int = 1, source: int = 0) -> dict[str, Any]:
        """Everything at `positions` tokens, as plain data for JSON; bytes by dtype, FLOPs a row."""
        caches = {d: self.cache_bytes(positions, batch=batch, dtype=d, source=source) for d in ("fp32", "fp16", "q8_0")}
        return {
            "family": self.spec.family,
            "layout": self.spec.layout,
            "positions": positions,
            "batch": batch,
            "parameters": {**self.parameters, "total": self.total, "active": self.active},
            "weight_bytes": {dtype: self.weight_bytes(dtype) for dtype in DTYPES},
            "cache_bytes": caches,
            "flops": {
                "prefill": self.prefill_flops(positions, source=source),
                "decode": self.decode_flops(positions, source=source) if self.spec.decoder is not None else 0,
                "train": self.training_flops(positions, source=source),
                "forward": self.flops(positions, source=source),
            },
        }


def count(spec: ModelSpec) -> Count:
    """Count `spec`."""
    total: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for name, part in spec.walk():
        for leaf, shape in part.tensors().items():
            if f"{name}.{leaf}" not in spec.ties:
                total[_part_of(name, part)] += prod(shape)
    return Count(spec, dict(total))


def _part_of(name: str, part: object) -> str:
    if isinstance(part, LayerNormSpec | RMSNormSpec):
        return "norms"
    if isinstance(part, LearnedSpec | T5BucketsSpec | DisentangledSpec):
        return "position"
    places = {"attn": "attention", "cross": "attention", "mlp": "mlp", "embed": "embedding", "head": "head"}
    places["branch"] = "mlp"
    return next(places[word] for word in name.split(".") if word in places)


def visible(mask: Mask) -> int | None:
    """How many keys a query can see at most under a window, None when nothing bounds it."""
    if isinstance(mask, Window):
        return mask.back + mask.ahead
    if isinstance(mask, And):
        return min((span for part in mask.parts if (span := visible(part)) is not None), default=None)
    return None


def _span(stack: StackSpec, kind: str, keys: int) -> int:
    span = visible(stack.kinds[kind].mask)
    return keys if span is None else min(keys, span)


def _kv_width(attn: AttentionSpec) -> int:
    return attn.kv_heads * (attn.head_width + attn.value_width)


def _stack_flops(stack: StackSpec, tokens: int, cached: int, source: int) -> Counter[str]:
    total: Counter[str] = Counter()
    total["projections"] += _input_flops(stack.embed, tokens)
    for block in stack.blocks:
        attn, cross = block.attn, block.cross
        total["projections"] += sum(_linear(part, tokens) for part in (attn.q, attn.k, attn.v, attn.out))
        total["scores"] += _scores(attn, tokens, _span(stack, attn.kind, cached + tokens))
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


def _head_flops(spec: ModelSpec, places: int) -> int:
    head = spec.head
    if head is None or (isinstance(head, PoolingSpec) and head.mode != "dense"):
        return 0
    rows = 1 if isinstance(head, ClassHeadSpec | PoolingSpec) else places
    return sum(_linear(part, rows) for _, part in head.walk() if isinstance(part, LinearSpec))


def _linear(part: LinearSpec, tokens: int) -> int:
    return 2 * tokens * part.inputs * part.outputs


def _scores(attn: AttentionSpec, queries: int, keys: int) -> int:
    """q against k, then the weights against v."""
    return 2 * queries * keys * attn.heads * (attn.head_width + attn.value_width)


def _bytes(numbers: int, dtype: str) -> int:
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    return -(-numbers * DTYPES[dtype].numerator // DTYPES[dtype].denominator)
