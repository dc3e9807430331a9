"""Position parts as modules: the arithmetic is `triptych.attention.positions`, the parameters live here.

A part has three doors - `embed`, `rotation`, `bias` - and opens the one it needs; the others let everything pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.attention.positions import (
    alibi_bias,
    disentangled_bias,
    distance_row,
    rope_angles,
    rotate,
    sinusoidal,
    t5_bias,
)
from triptych.errors import InputError
from triptych.nn.part import Module
from triptych.spec import positions as spec

Rotation = Callable[[Tensor], Tensor]
Bias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LayerBias = Callable[[Any], Bias | None]
Places = Callable[[Tensor, Tensor], Tensor]  # of q_pos and k_pos alone


class Position(Module):
    """No position at all; the base of the parts below."""

    def embed(self, positions: Tensor) -> Tensor:
        """[N] absolute positions -> [N, D] to add to the token embedding."""
        raise NotImplementedError(f"{type(self).__name__} has no embed door")

    def rotation(self, rows: Rows, x: Tensor) -> Rotation:
        """What turns queries and keys `[N, H, K]` of these rows; `x` says on which device and how exactly."""
        return _same

    def bias(self, rows: Rows) -> LayerBias:
        """What is added to the scores of these rows, asked by each attention layer once: a function of its q, k and
        their positions (`triptych.attention.rows.Bias`), or None."""
        return unbiased


class Learned(Position, of=spec.Learned):
    weight: Tensor

    def embed(self, positions: Tensor) -> Tensor:
        return self.weight[positions + self.spec.offset]


class Sinusoidal(Position, of=spec.Sinusoidal):
    def embed(self, positions: Tensor) -> Tensor:
        return sinusoidal(positions, self.spec)


class Rope(Position, of=spec.Rope):
    def rotation(self, rows: Rows, x: Tensor) -> Rotation:
        length, device = None, x.device
        if isinstance(self.spec.scaling, spec.LongRope):  # its factors depend on how long the row has become
            length = torch.tensor(rows.ends, device=device)[rows.row_of(device)]
        exact = torch.promote_types(x.dtype, torch.float32)
        cos, sin = rope_angles(self.spec, rows.positions(device), length, exact)
        return lambda x: rotate(x, cos, sin, self.spec.pairing)


class Alibi(Position, of=spec.Alibi):
    def bias(self, rows: Rows) -> LayerBias:
        return _for_all(lambda q_pos, k_pos: alibi_bias(self.spec.heads, q_pos, k_pos))


class T5Buckets(Position, of=spec.T5Buckets):
    weight: Tensor

    def bias(self, rows: Rows) -> LayerBias:
        far, both = self.spec.max_distance, self.spec.bidirectional
        return _for_all(lambda q_pos, k_pos: t5_bias(self.weight, q_pos, k_pos, max_distance=far, bidirectional=both))


class Disentangled(Position, of=spec.Disentangled):
    weight: Tensor
    norm: Callable[[Tensor], Tensor] | None

    def bias(self, rows: Rows) -> LayerBias:
        table, row = self.reached(rows)

        def of(layer: Any) -> Bias:
            vectors = self.vectors(table, layer)
            return lambda q, k, q_pos, k_pos: disentangled_bias(q, k, row(q_pos, k_pos), **vectors)

        return of

    def reached(self, rows: Rows) -> tuple[Tensor, Places]:
        """The part of the table [R, D] that these rows can reach, and where in it a query finds each key: [T, S]."""

        def row(distance: Tensor) -> Tensor:  # padding and empty slots may be further, and nobody sees them
            distance = distance.clamp(-furthest, furthest)
            return distance_row(distance, span=self.spec.span, max_distance=self.spec.max_distance)

        furthest = max(rows.ends, default=1) - 1
        first, last = row(torch.tensor([-furthest, furthest])).tolist()
        table = self.weight[first : last + 1]
        table = table if self.norm is None else self.norm(table)
        return table, _once(lambda q_pos, k_pos: row(q_pos[..., :, None] - k_pos[..., None, :]) - first)

    def vectors(self, table: Tensor, layer: Any) -> dict[str, Tensor]:
        """What a layer makes of a table [R, D]: `pos_k` [R, G, K] for queries to meet and `pos_q` [R, H, K] for keys,
        by its scale already."""
        spec, table = layer.spec, F.dropout(table, self.spec.dropout, self.training)
        scale = spec.head_width**-0.5 if spec.scale is None else spec.scale
        maps = {"c2p": ("pos_k", layer.pos_k or layer.k), "p2c": ("pos_q", layer.pos_q or layer.q)}
        chosen = [maps[term] for term in self.spec.terms]
        return {name: scale * mapped(table).unflatten(-1, (-1, spec.head_width)) for name, mapped in chosen}


def _same(x: Tensor) -> Tensor:
    return x


def unbiased(layer: Any) -> None:
    """The scores stay as they are."""


def _for_all(bias: Places) -> LayerBias:
    """A bias that asks for positions alone: one for all layers of a kind."""
    known = _once(bias)
    return lambda layer: lambda q, k, q_pos, k_pos: known(q_pos, k_pos)


def _once(places: Places) -> Places:
    """Layers of one kind are given the same positions: answer once a forward.

    Positions are told apart by where they lie, not by their values, for which a GPU would have to be waited for; what
    is kept here stays alive, so that nothing else can come to lie there.
    """
    known: dict[tuple[Hashable, Hashable], tuple[Tensor, Tensor, Tensor]] = {}

    def remembered(q_pos: Tensor, k_pos: Tensor) -> Tensor:
        key = _place(q_pos), _place(k_pos)
        if key not in known:
            known[key] = q_pos, k_pos, places(q_pos, k_pos)
        return known[key][2]

    return remembered


def _place(x: Tensor) -> Hashable:
    """Equal for two living tensors only where they are views of the same numbers."""
    return x.device, x.dtype, x.data_ptr(), x.shape, x.stride()


def check_context(rows: Rows, limit: int | None, what: str) -> None:
    """Refuse a row that ends past the positions the model has.  Raises InputError naming the row."""
    if limit is None:
        return
    for i, (past, length) in enumerate(zip(rows.past, rows.lengths, strict=True)):
        if past + length > limit:
            raise InputError(
                f"{what}: row {i} needs {past + length} positions and the model has {limit}; shorten the row"
            )
