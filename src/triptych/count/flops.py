"""FLOPs of the matrix products of a forward, read from the model's program with one block of each kind.

A multiply and an add are two FLOPs, so a product of `[m, k]` by `[k, n]` is `2 m n k`.  Norms, activations, softmax and
lookups are a few operations an element and are not counted.  Every query is counted against every key its window
leaves, masked by causality or not, which is what a dense kernel computes and how the field counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from triptych.spec import DisentangledSpec, FramesSpec, ModelSpec, StackSpec

if TYPE_CHECKING:
    from triptych.program.kinds import KindProgram

PARTS = ("projections", "scores", "mlp", "head")


def kinds_of(spec: ModelSpec) -> KindProgram:
    """The program that FLOPs are counted in.  Needs torch, and allocates nothing."""
    from triptych.program.kinds import lower_kinds

    return lower_kinds(spec)


def row_flops(kinds: KindProgram, tokens: int, cached: int, logits: int, source: int) -> dict[str, int]:
    """Of one forward of a row by part (`PARTS`): `tokens` new ones after `cached`, of which `logits` reach the head.

    An encoder-decoder with nothing cached also runs its encoder over `source` tokens, and projects these once.
    """
    total: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    spec = kinds.spec
    sizes = {"M": source, "B": 1}
    if spec.encoder is not None and not (spec.decoder is not None and cached):
        read = tokens if spec.decoder is None else source
        total.update(kinds.flops("encode", {"B": 1, "M": read, **_of_stack(spec.encoder, read, read)}))
    if spec.decoder is not None:
        sizes |= _of_stack(spec.decoder, tokens, cached + tokens)
        for entry in ("decode", *(("cross_kv",) if spec.encoder is not None and not cached else ())):
            total.update(kinds.flops(entry, sizes))
    if spec.head is not None:
        total.update(kinds.flops("unembed", {"N": logits, "B": 1}))
    return dict(total)


def _of_stack(stack: StackSpec, tokens: int, keys: int) -> dict[str, int]:
    """Numbers for the symbols of a stack's shapes.  All logarithmic buckets of distance are counted, as a row that is
    long enough needs them; of an image all tokens but the first are patches."""
    spans = [kind.position.span for kind in stack.kinds.values() if isinstance(kind.position, DisentangledSpec)]
    reached = max(0, min(2 * keys - 1, 2 * spans[0])) if spans else 0
    features = stack.embed.stride * tokens if isinstance(stack.embed, FramesSpec) else max(0, tokens - 1)
    return {"N": tokens, "S": keys, "P": features, "R": reached}
