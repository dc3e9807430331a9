"""Where positions enter attention: the angles of RoPE, and what buckets, slopes and distances add to the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triptych.attention import Rows, alibi_slopes, rope_angles, t5_bucket
from triptych.labs.walk import again
from triptych.labs.walk.attending import Bias
from triptych.labs.walk.stack import Stack
from triptych.labs.walk.steps import Given, Shown
from triptych.spec import AlibiSpec, DisentangledSpec, RopeSpec, T5BucketsSpec


def angles(at: Stack, under: str, rope: RopeSpec) -> list[Shown]:
    """cos and sin of every token's place."""
    values = rope_angles(rope, at.places, torch.full_like(at.places, at.first + len(at.ids)))
    names = zip(("cos", "sin"), values, strict=True)
    return [at.row_each(f"{at.prefix}{under}.{name}", name, value, "N K/2") for name, value in names]


def relative(at: Stack, q: Shown, k: Shown, k_pos: Tensor, position: object, kind: str) -> Bias | None:
    """What a relative position part adds to the scores of `q` [H, T, K] and `k` [G, S, K]."""
    name, apart = f"{at.name}.kinds.{kind}.position", k_pos[None, :] - at.places[:, None]

    def matrix(what: str, symbol: str, value: Tensor) -> Shown:
        return Shown(f"{name}.{what}", symbol, "T S", value, at.labels, k.labels, focus=at.focus)

    if isinstance(position, T5BucketsSpec):
        table = Shown(f"{name}.weight", "R", "buckets H", at.module.get_parameter(f"{name}.weight").detach().cpu())
        near, far = position.buckets, position.max_distance
        bucket = matrix(
            "bucket", "β", t5_bucket(apart, buckets=near, max_distance=far, bidirectional=position.bidirectional)
        )
        return Bias(
            table.value[bucket.value].permute(2, 0, 1),
            "s ← s + b,  b = R[β(key − query)]",
            "Positions enter here: one learned number for each head and distance, near ones apart, far ones together.",
            [table, bucket],
            lambda g: g[table.name][g[bucket.name]].permute(2, 0, 1),
        )
    if isinstance(position, AlibiSpec):
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
    if isinstance(position, DisentangledSpec):
        return _distances(at, q, k, k_pos, name, matrix)
    return None


def _distances(
    at: Stack, q: Shown, k: Shown, k_pos: Tensor, name: str, matrix: Callable[[str, str, Tensor], Shown]
) -> Bias:
    """Disentangled attention: distances that this layer has made queries and keys of, scored like words."""
    part: Any = at.module.get_submodule(name)
    layer: Any = at.stack.blocks[at.layer].attn
    table, row_of = part.reached(Rows((len(at.ids),), (at.first,)))
    row = matrix("row", "d", row_of(at.places, k_pos))
    vectors = {}
    for leaf, value in part.vectors(table, layer).items():
        shown = value.detach().cpu().transpose(0, 1)
        letters, head = ("H R K", at.head) if leaf == "pos_q" else ("G R K", k.head)
        vectors[leaf] = Shown(f"{name}.{leaf}", f"{leaf[-1]}ᴰ", letters, shown, head=head)
    read = {"pos_k": (q.name, "q · kᴰ[d]"), "pos_q": (k.name, "qᴰ[d] · k")}

    def once_more(g: Given) -> Tensor:
        found = []
        for leaf, placed in vectors.items():
            pairs = again.grouped(g[placed.name], layer.spec.heads)[:, g[row.name]]  # [H, T, S, K]
            words = again.grouped(g[read[leaf][0]], layer.spec.heads)
            found.append((pairs * (words[:, :, None] if leaf == "pos_k" else words[:, None])).sum(-1))
        return torch.stack(found).sum(0)

    content = part.prepare(Rows((len(at.ids),), (at.first,)), q.value).content(layer)
    added: Tensor = content(q.value[None].to(at.device), k.value[None].to(at.device), row_of(at.places, k_pos))
    return Bias(
        added[0].detach().cpu(),
        f"s ← s + b,  b = {' + '.join(read[leaf][1] for leaf in vectors)}",
        "Positions enter here: of each distance the layer has made a query and a key, which are scored against words.",
        [*vectors.values(), row],
        once_more,
    )
