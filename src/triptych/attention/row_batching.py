"""How rows of a flat batch become batches that a kernel takes, `[B, H, T, K]`, and the results rows again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.attention.rows import Rows


@runtime_checkable
class Batching(Protocol):
    """How some rows of the flat batch become `[B, H, T, K]` and back."""

    def batch(self, x: Tensor) -> Tensor: ...
    def flat(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class KeyBatching(Protocol):
    """How the keys and values of some rows become `[B, G, S, K]` and `[B, G, S, Kv]`."""

    def batch(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Single:
    """One token a row."""

    def batch(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)

    def flat(self, x: Tensor) -> Tensor:
        return x.squeeze(2)


@dataclass(frozen=True, eq=False)
class Even:
    """Rows of one length: views."""

    rows: int
    length: int

    def batch(self, x: Tensor) -> Tensor:
        return x.view(self.rows, self.length, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Padded:
    """Rows padded on the right with zeros to the longest; `places` [N] is where each token stands in them."""

    rows: int
    longest: int
    places: Tensor

    def batch(self, x: Tensor) -> Tensor:
        room = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_copy(0, self.places, x)
        return room.view(self.rows, self.longest, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True, eq=False)
class Parts:
    """The rows of a flat batch in several groups: `order` [N] is where each token stands, one group after another,
    `back` [N] its inverse, and `sizes` are the tokens of each group.

    All groups are gathered at once, because the gradient of a gather is as large as the whole batch.
    """

    order: Tensor
    back: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def of(rows: Rows, groups: Sequence[Sequence[int]], device: torch.device) -> Parts:
        tokens = [rows.tokens(group) for group in groups]
        order = torch.cat(tokens)
        return Parts(order.to(device), order.argsort().to(device), tuple(map(len, tokens)))

    def split(self, x: Tensor) -> list[Tensor]:
        return list(torch.split(x.index_select(0, self.order), list(self.sizes)))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).index_select(0, self.back)


@dataclass(frozen=True, eq=False)
class KeysOf:
    """Keys that lie in a flat batch."""

    inner: Batching

    def batch(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.batch(k), self.inner.batch(v)


@dataclass(eq=False)
class KeysIn:
    """Keys that lie in cache slots, the first `end` places of each; neighbouring slots are a view."""

    slots: slice | Tensor
    end: int

    def batch(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k[self.slots, :, : self.end], v[self.slots, :, : self.end]


def batched(rows: Rows, device: torch.device) -> Batching:
    if not rows.equal:
        return Padded(len(rows), rows.longest, rows.padded_places(device))
    return Single() if rows.longest == 1 else Even(len(rows), rows.longest)
