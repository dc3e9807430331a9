"""The random numbers of dropout, which follow from (seed, row, layer, site) and not from the order of drawing.

The row is its number in the training step, so that it is trained with the same numbers in any micro-batch and in any of
several processes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

DECODER, ENCODER, HEAD = range(3)  # what draws
BEFORE, AFTER = -1, -2  # the layer of what comes before the first block, and after the last
SELF, CROSS = -1, -2  # the sites of the patterns of attention
ALL_ROWS = -1  # the row of numbers that all rows share


@runtime_checkable
class Noise(Protocol):
    """What dropout draws from."""

    def kept(self, x: Tensor, rate: float) -> Tensor:
        """`1 / (1 - rate)` for each number of `x` that is kept, 0 for each that is dropped."""
        ...


@dataclass(eq=False)
class RowNoise:
    """The numbers for the rows of one forward.

    seed      that of the step.
    rows      the number of each row in its step.
    part      which part of the model draws.
    lengths   of each row in the flat batch that the numbers are for.
    divided   which of how many processes this is that divide each layer: the numbers are drawn for all heads and for
              all hidden numbers of a layer, of which each process takes its own.
    """

    seed: int
    rows: Sequence[int]
    part: int = DECODER
    lengths: Sequence[int] = ()
    divided: tuple[int, int] = (0, 1)
    layer: int = field(default=BEFORE, init=False)
    site: int = field(default=0, init=False)
    inside: bool = field(default=False, init=False)

    def of(self, part: int, lengths: Sequence[int]) -> RowNoise:
        """For the same rows in a flat batch where they have these lengths."""
        return replace(self, part=part, lengths=lengths)

    def begin(self, layer: int) -> None:
        """To be called before a layer runs, each time that it does."""
        self.layer, self.site = layer, 0

    @contextmanager
    def inside_layer(self) -> Iterator[None]:
        """Inside, the last dimension of what is dropped is divided among processes."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def kept(self, x: Tensor, rate: float) -> Tensor:
        """Of x [N, ...]; where that is no flat batch of these rows, the numbers are those of all rows together."""
        self.site += 1
        index, count = self.divided if self.inside else (0, 1)
        own = x.shape[-1]
        noise = self._whole(torch.empty(*x.shape[:-1], own * count, dtype=x.dtype, device=x.device), rate)
        return noise if count == 1 else noise.narrow(-1, index * own, own)

    def _whole(self, noise: Tensor, rate: float) -> Tensor:
        if len(noise) != sum(self.lengths):
            return self.draw(noise, rate, ALL_ROWS, self.site)
        for row, own in zip(self.rows, noise.split(list(self.lengths)), strict=True):
            self.draw(own, rate, row, self.site)
        return noise

    def draw(self, noise: Tensor, rate: float, row: int, site: int) -> Tensor:
        """Fill `noise` with the numbers of a row."""
        key = struct.pack("<5q", self.seed, row, self.part, self.layer, site)
        number = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1
        generator = torch.Generator(noise.device).manual_seed(number)
        return noise.bernoulli_(1.0 - rate, generator=generator).div_(1.0 - rate)

    def of_all(self) -> SharedNoise:
        """For a tensor that all rows read."""
        return SharedNoise(self)

    def of_patterns(self, members: Sequence[int], queries: Sequence[int], keys: Sequence[int], site: int) -> Noise:
        """For patterns [B, H, T, S] of some of the rows, padded on the right from these numbers of queries and keys."""
        return PatternNoise(self, tuple(self.rows[i] for i in members), queries, keys, site)


@dataclass(frozen=True, eq=False)
class SharedNoise:
    """See `RowNoise.of_all`."""

    noise: RowNoise

    def kept(self, x: Tensor, rate: float) -> Tensor:
        self.noise.site += 1
        return self.noise.draw(torch.empty(x.shape, dtype=x.dtype, device=x.device), rate, ALL_ROWS, self.noise.site)


@dataclass(frozen=True, eq=False)
class PatternNoise:
    """See `RowNoise.of_patterns`."""

    noise: RowNoise
    rows: Sequence[int]
    queries: Sequence[int]
    keys: Sequence[int]
    site: int

    def kept(self, x: Tensor, rate: float) -> Tensor:
        index, count = self.noise.divided
        heads = x.shape[1]
        kept = torch.ones(len(x), heads * count, *x.shape[2:], dtype=x.dtype, device=x.device)
        for own, row, queries, keys in zip(kept, self.rows, self.queries, self.keys, strict=True):
            if own.shape[1:] == (queries, keys):
                self.noise.draw(own, rate, row, self.site)
            else:
                part = torch.empty(len(own), queries, keys, dtype=x.dtype, device=x.device)
                own[:, :queries, :keys] = self.noise.draw(part, rate, row, self.site)
        return kept if count == 1 else kept.narrow(1, index * heads, heads)
