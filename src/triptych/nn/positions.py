"""Position parts as modules: the arithmetic is `triptych.attention.positions`, the parameters live here.

A part has three doors - `embed`, `rotation`, `bias` - and opens the one it needs; the others let everything pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.attention.positions import alibi_bias, rope_angles, rotate, sinusoidal, t5_bias
from triptych.errors import InputError
from triptych.nn.part import Module
from triptych.spec import positions as spec

Rotation = Callable[[Tensor], Tensor]
Bias = Callable[[Tensor, Tensor], Tensor]


class Position(Module):
    """No position at all; the base of the parts below."""

    def embed(self, positions: Tensor) -> Tensor:
        """[N] absolute positions -> [N, D] to add to the token embedding."""
        raise NotImplementedError(f"{type(self).__name__} has no embed door")

    def rotation(self, rows: Rows, x: Tensor) -> Rotation:
        """What turns queries and keys `[N, H, K]` of these rows; `x` says on which device and how exactly."""
        return _same

    def bias(self) -> Bias | None:
        """What `(q_pos, k_pos)` add to the scores: [T] and [S] -> [H, T, S], batched alike."""
        return None


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
    def bias(self) -> Bias:
        return _once(lambda q_pos, k_pos: alibi_bias(self.spec.heads, q_pos, k_pos))


class T5Buckets(Position, of=spec.T5Buckets):
    weight: Tensor

    def bias(self) -> Bias:
        far, both = self.spec.max_distance, self.spec.bidirectional
        return _once(lambda q, k: t5_bias(self.weight, q, k, max_distance=far, bidirectional=both))


def _same(x: Tensor) -> Tensor:
    return x


def _once(bias: Bias) -> Bias:
    """Layers of one kind are given the same positions: compute their bias once a forward.

    Positions are told apart by where they lie, not by their values, for which a GPU would have to be waited for; what
    is kept here stays alive, so that nothing else can come to lie there.
    """
    known: dict[tuple[Hashable, Hashable], tuple[Tensor, Tensor, Tensor]] = {}

    def remembered(q_pos: Tensor, k_pos: Tensor) -> Tensor:
        key = _place(q_pos), _place(k_pos)
        if key not in known:
            known[key] = q_pos, k_pos, bias(q_pos, k_pos)
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
