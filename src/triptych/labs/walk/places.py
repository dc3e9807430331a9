"""Where positions enter attention: the angles of RoPE, and what T5's buckets and ALiBi add to the scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.attention import alibi_slopes, rope_angles, t5_bucket
from triptych.labs.walk.attending import Bias
from triptych.labs.walk.stack import Stack
from triptych.labs.walk.steps import Shown
from triptych.spec import Alibi, Rope, T5Buckets


def angles(at: Stack, under: str, rope: Rope) -> list[Shown]:
    """cos and sin of every token's place."""
    values = rope_angles(rope, at.places, torch.full_like(at.places, at.first + len(at.ids)))
    names = zip(("cos", "sin"), values, strict=True)
    return [at.row_each(f"{at.prefix}{under}.{name}", name, value, "N K/2") for name, value in names]


def relative(at: Stack, keys: Sequence[str], k_pos: Tensor, position: object, kind: str) -> Bias | None:
    """What a relative position part adds to the scores."""
    name, apart = f"{at.name}.kinds.{kind}.position", k_pos[None, :] - at.places[:, None]

    def matrix(what: str, symbol: str, value: Tensor) -> Shown:
        return Shown(f"{name}.{what}", symbol, "T S", value, at.labels, keys, focus=at.focus)

    if isinstance(position, T5Buckets):
        table = Shown(f"{name}.weight", "R", "buckets H", at.module.get_parameter(f"{name}.weight").detach().cpu())
        near, far = position.buckets, position.max_distance
        bucket = matrix(
            "bucket", "β", t5_bucket(apart, buckets=near, max_distance=far, bidirectional=position.bidirectional)
        )
        added: Tensor = at.module.get_submodule(name).bias()(at.places, k_pos)  # type: ignore[operator]
        return Bias(
            added.detach().cpu(),
            "s ← s + b,  b = R[β(key − query)]",
            "Positions enter here: one learned number for each head and distance, near ones apart, far ones together.",
            [table, bucket],
            lambda g: g[table.name][g[bucket.name]].permute(2, 0, 1),
        )
    if isinstance(position, Alibi):
        slopes, distance = (
            Shown(f"{name}.slopes", "a", "H", alibi_slopes(position.heads)),
            matrix("distance", "|Δ|", apart.abs()),
        )
        return Bias(
            -slopes.value[:, None, None] * apart.abs(),
            "s ← s + b,  b = −a · |key − query|",
            "Positions enter here: the further a key, the lower its score, by a slope of the head's own.",
            [slopes, distance],
            lambda g: -g[slopes.name][:, None, None] * g[distance.name],
        )
    return None
