"""The bounds of each row of the flat batch, and the batches `[B, H, T, K]` of rows that a kernel takes.

N tokens of all rows stand in one `[N, ...]` tensor without padding; `Rows` holds the lengths as host integers, so that
no forward waits for a device to learn them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from triptych.errors import InputError

PerToken = Int[Tensor, " N"]
KeysAndValues = tuple[Tensor, Tensor]
FlatBatch = tuple[Tensor, "Rows"]
"""What stands in a flat batch, [N, ...], and its rows."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one forward.

    lengths     tokens of each row in this batch.
    past        absolute position of each row's first token: how many of its tokens a cache holds already; 0 by default.
    slots       the cache slot that each row lives in; row i in slot i by default.
    documents   [N] document of each token, for `same_document()` masks over packed rows.
    """

    lengths: tuple[int, ...]
    past: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    documents: Tensor | None = None
    symbolic: ClassVar[bool] = False  # whether positions are values without numbers (`triptych.program`)

    starts: tuple[int, ...] = field(init=False)  # where each row begins in the flat batch
    ends: tuple[int, ...] = field(init=False)  # absolute position after each row's last token
    end: int = field(init=False)  # the largest of these, 0 without rows
    total: int = field(init=False)  # N, the tokens of all rows
    longest: int = field(init=False)  # the length of the longest row
    equal: bool = field(init=False)  # all rows have one length
    even: bool = field(init=False)  # all rows have one length and one past: one slice of positions holds them

    def __post_init__(self) -> None:
        """Everything that follows from the lengths, computed at once: every forward reads all of it."""
        lengths, count = self.lengths, len(self.lengths)
        past, slots = self.past or (0,) * count, self.slots or tuple(range(count))
        if len(past) != count or len(slots) != count:
            raise InputError(f"{count} rows but {len(past)} past lengths and {len(slots)} cache slots")
        *starts, total = accumulate(lengths, initial=0)
        ends, equal = tuple(map(add, past, lengths)), len(set(lengths)) <= 1
        self.__dict__.update(
            past=past, slots=slots, starts=tuple(starts), ends=ends, end=max(ends, default=0), total=total,
            longest=max(lengths, default=0), equal=equal, even=equal and len(set(past)) <= 1,
        )  # fmt: skip
        if self.documents is not None and self.documents.shape != (self.total,):
            raise InputError(f"documents {list(self.documents.shape)}: give one for each of {self.total} tokens")

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        """Equal lengths, pasts and slots; documents are compared by identity, without reading the tensor."""
        if not isinstance(other, Rows):
            return NotImplemented
        same = (self.lengths, self.past, self.slots) == (other.lengths, other.past, other.slots)
        return same and self.documents is other.documents

    def __hash__(self) -> int:
        return hash((self.lengths, self.past, self.slots))

    def row_of(self, device: torch.device | str = "cpu") -> PerToken:
        """The row of each token."""
        return self._labels(device)[0]

    def positions(self, device: torch.device | str = "cpu") -> PerToken:
        """The absolute position of each token."""
        return self._labels(device)[1]

    def ends_of_tokens(self, device: torch.device | str = "cpu") -> PerToken:
        """The present length of the row of each token."""
        return torch.tensor(self.ends, device=device)[self.row_of(device)]

    def split(self, x: Tensor) -> list[Tensor]:
        """`[N, ...]` as one view per row."""
        return list(torch.split(x, list(self.lengths)))

    def take(self, rows: Sequence[int]) -> Rows:
        """Some of the rows, in this order, without their documents."""
        lengths, past, slots = (
            tuple(numbers[row] for row in rows) for numbers in (self.lengths, self.past, self.slots)
        )
        return Rows(lengths, past, slots)

    def place(self, row: int) -> slice:
        """The places of a row's tokens in the flat batch."""
        return slice(self.starts[row], self.starts[row] + self.lengths[row])

    def tokens(self, rows: Sequence[int], device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
        """The places of some rows' tokens in the flat batch, row after row."""
        ranges = [torch.arange(self.starts[row], self.starts[row] + self.lengths[row]) for row in rows]
        return torch.cat(ranges).to(device)

    def padded_places(self, device: torch.device | str = "cpu") -> PerToken:
        """The place of each token in a batch `[B * longest]` that is padded on the right."""
        return torch.cat([torch.arange(n) + i * self.longest for i, n in enumerate(self.lengths)]).to(device)

    def _labels(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Computed once per device, outside inference mode so that training may use what a sampling step computed."""
        labels: dict[str, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_labels_by_device", {})
        key = str(device)
        if key not in labels:
            with torch.inference_mode(False):
                lengths = torch.tensor(self.lengths, dtype=torch.long)
                row = torch.arange(len(self)).repeat_interleave(lengths)
                shift = torch.tensor(self.past, dtype=torch.long) - torch.tensor(self.starts, dtype=torch.long)
                labels[key] = (row.to(device), (torch.arange(self.total) + shift[row]).to(device))
        return labels[key]


@dataclass(frozen=True, eq=False)
class SingleTokenRows:
    """One token a row."""

    def batch(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)

    def flat(self, x: Tensor) -> Tensor:
        return x.squeeze(2)


@dataclass(frozen=True, eq=False)
class EqualRows:
    """Rows of one length: views."""

    rows: int
    length: int

    def batch(self, x: Tensor) -> Tensor:
        return x.view(self.rows, self.length, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """Rows padded on the right with zeros to the longest; `places` [N] is where each token stands in them."""

    rows: int
    longest: int
    places: Tensor

    def batch(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self.rows * self.longest, *x.shape[1:]).index_copy(0, self.places, x)
        return padded.view(self.rows, self.longest, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


Batching = SingleTokenRows | EqualRows | PaddedRows
"""How some rows of the flat batch become `[B, H, T, K]` and back."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """The rows of a flat batch in several groups: `order` [N] is where each token stands, one group after another,
    `back` [N] its inverse, and `sizes` are the tokens of each group.

    All groups are gathered at once, because the gradient of a gather is as large as the whole batch.
    """

    order: Tensor
    back: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def of(rows: Rows, groups: Sequence[Sequence[int]], device: torch.device) -> RowGroups:
        tokens = [rows.tokens(group) for group in groups]
        order = torch.cat(tokens)
        return RowGroups(order.to(device), order.argsort().to(device), tuple(map(len, tokens)))

    def split(self, x: Tensor) -> list[Tensor]:
        return list(torch.split(x.index_select(0, self.order), list(self.sizes)))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).index_select(0, self.back)


@dataclass(frozen=True, eq=False)
class FlatBatchKeys:
    """Keys that lie in a flat batch."""

    inner: Batching

    def batch(self, k: Tensor, v: Tensor) -> KeysAndValues:
        return self.inner.batch(k), self.inner.batch(v)


@dataclass(eq=False)
class CacheKeys:
    """Keys that lie in cache slots, the first `end` places of each; neighbouring slots are a view."""

    slots: slice | Tensor
    end: int

    def batch(self, k: Tensor, v: Tensor) -> KeysAndValues:
        return k[self.slots, :, : self.end], v[self.slots, :, : self.end]


KeyBatching = FlatBatchKeys | CacheKeys
"""How the keys and values of some rows become `[B, G, S, K]` and `[B, G, S, Kv]`."""


def batched(rows: Rows, device: torch.device) -> Batching:
    if not rows.equal:
        return PaddedRows(len(rows), rows.longest, rows.padded_places(device))
    return SingleTokenRows() if rows.longest == 1 else EqualRows(len(rows), rows.longest)


def neighbours(slots: tuple[int, ...]) -> slice | None:
    """These slots as a slice; None where they do not follow one another."""
    first = slots[0] if slots else 0
    return slice(first, first + len(slots)) if slots == tuple(range(first, first + len(slots))) else None
