"""Buffers into which native steps write the values of the sites that are read, and views of them as tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import prod

import torch
from torch import Tensor

from .native_plan import NativePlan, SitePlace

PIECE = 1 << 22  # numbers of one piece of memory, at least: 16 MiB


@dataclass(frozen=True, eq=False)
class SiteValue:
    """The value of one key's row at a site, `[t, ...]`, at t positions."""

    site: str
    key: int
    positions: tuple[int, ...]
    value: Tensor


@dataclass(frozen=True, eq=False)
class _ReadCall:
    """One call of a plan, whose numbers begin at `start` in `memory`.

    rows        (key, first, end): which tokens are those of one row.
    positions   of each token.
    """

    memory: Tensor
    start: int
    numbers: int
    sites: Mapping[str, SitePlace]
    rows: tuple[tuple[int, int, int], ...]
    positions: Sequence[int]

    def continues(self, other: _ReadCall) -> bool:
        """Whether both are of one token each of the same rows, this one right behind the other."""
        return (
            self.memory is other.memory
            and self.start == other.start + other.numbers
            and self.sites is other.sites
            and self.rows == other.rows
            and len(self.rows) == len(self.positions)
        )


class StepReads:
    """Memory for what steps leave of some sites, which are names of the program's; `empty(n)` gives n fp32 numbers of
    it."""

    def __init__(self, sites: Sequence[str], empty: Callable[[int], Tensor]) -> None:
        self.sites, self.empty = tuple(sites), empty
        self.calls: list[_ReadCall] = []
        self.keys: dict[int, int] = {}
        self.memory, self.used_numbers = empty(0), 0
        self.unread_numbers = 0  # numbers that were left and not taken
        self.in_stored_dtype = True  # whether they are taken in the dtype in which they were left

    def begin(self, slots: Sequence[int], keys: Sequence[int]) -> None:
        """The rows of the next step: their cache slots, and the keys under which their values are taken later."""
        self.keys = dict(zip(slots, keys, strict=True))

    def reserve(self, plan: NativePlan, slots: Sequence[int], positions: Sequence[int]) -> int:
        """The address of memory for the tokens of one call, which stand at `positions` in `slots`."""
        numbers = plan.reads * len(slots)
        if self.used_numbers + numbers > len(self.memory):
            self.memory, self.used_numbers = self.empty(max(PIECE, numbers)), 0
        rows, first = [], 0
        for slot, tokens in groupby(slots):
            end = first + len(list(tokens))
            rows.append((self.keys[slot], first, end))
            first = end
        self.calls.append(_ReadCall(self.memory, self.used_numbers, numbers, plan.sites, tuple(rows), positions))
        self.used_numbers += numbers
        self.unread_numbers += numbers
        self.in_stored_dtype = all(place.dtype == torch.float32 for place in islice(plan.sites.values(), 1))
        return self.memory.data_ptr() + 4 * self.calls[-1].start

    def take(self, only: Collection[int] | None = None) -> Iterator[SiteValue]:
        """What was left since the last time, in order, of these keys or of all: parts of the memory, or in the dtype of
        the modules."""
        calls, self.calls, self.unread_numbers = self.calls, [], 0
        runs: list[list[_ReadCall]] = []
        for call in calls:
            if runs and call.continues(runs[-1][-1]):
                runs[-1].append(call)
            else:
                runs.append([call])
        for run in runs:
            for i, (key, first, end) in enumerate(run[0].rows):
                if only is not None and key not in only:
                    continue
                positions = tuple(run[0].positions[first:end])
                if len(run) > 1:
                    positions = tuple(call.positions[i] for call in run)
                for site, place in run[0].sites.items():
                    yield SiteValue(site, key, positions, _part(run, place, first, len(positions)))


def _part(run: Sequence[_ReadCall], place: SitePlace, first: int, count: int) -> Tensor:
    """[count, ...]: the values of one row, of several tokens of one call or of one token in each call."""
    call, width = run[0], prod(place.shape)
    strides = [prod(place.shape[i + 1 :]) for i in range(len(place.shape))]
    start = call.start + place.offset * len(call.positions) + first * width
    apart = width if len(run) == 1 else call.numbers
    return call.memory.as_strided((count, *place.shape), (apart, *strides), start).to(place.dtype)
