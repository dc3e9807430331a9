"""What is kept of one row at one site, and of which rows: a search makes several rows of one, and the values of wrong
guesses are dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from triptych.probe.sites import CONTEXT_SITES, MATRIX_SITES

How = Literal["tokens", "queries", "sum", "mean"]


@dataclass(frozen=True, eq=False)
class Later:
    """A piece that is made when somebody looks at it, and its bytes then.  `place` is equal for pieces that are one
    tensor; None where it is no other's."""

    make: Callable[[], Tensor]
    nbytes: int
    place: Callable[[], Hashable] | None = None


@dataclass
class Record:
    """One row's pieces at one site, in the order in which they were read.

    how   what a piece is: "tokens" `[t, ...]`, "queries" `[h, t, ...]`, or the "sum" or "mean" of what was read so far,
          whose last dimension grows with the keys in a generation; of a mean the pieces hold the sum.  Behind the sum
          stand what may be dropped again, a piece for each position.
    dtype what a mean is given in: its sum is kept in fp32 or better, where it can neither overflow nor lose digits.
    """

    how: How = "tokens"
    positions: list[tuple[int, ...]] = field(default_factory=list)  # queries' absolute positions of each piece
    pieces: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype | None = None
    later: list[Later] = field(default_factory=list)  # behind the pieces

    def sizes(self) -> dict[Hashable, int]:
        """The bytes of each piece by where it lies, which several records may share."""
        pieces: dict[Hashable, int] = {(piece.data_ptr(), piece.nbytes): piece.nbytes for piece in self.pieces}
        return pieces | {id(one) if one.place is None else one.place(): one.nbytes for one in self.later}

    @property
    def sums(self) -> bool:
        return self.how in ("sum", "mean")

    def add(self, positions: tuple[int, ...], value: Tensor, *, apart: bool = False) -> None:
        """Add a piece; of a sum `apart` from what it will be added to."""
        self._make()
        self.positions.append(positions)
        self.pieces.append(value)
        if self.sums and not apart:
            self._add_up()

    def _make(self) -> None:
        self.pieces += [piece.make() for piece in self.later]
        self.later.clear()

    def _add_up(self) -> None:
        while len(self.pieces) > 1:
            last, before = self.pieces.pop(), self.pieces.pop()
            self.pieces.append(pad(before, (0, last.shape[-1] - before.shape[-1])) + last)

    def extend(self, later: Record) -> None:
        """Add what the same row had at later positions."""
        self._make()
        later._make()
        self.positions += later.positions
        self.pieces += later.pieces
        if self.sums:
            self._add_up()

    def cut(self, length: int, *, keys: bool) -> None:
        """Drop the newest values, those at positions from `length` on; with `keys` in the last dimension, the numbers
        of keys there too.  The positions of a sum that are dropped were added apart."""
        self._make()
        while self.positions and self.positions[-1][-1:] >= (length,):
            at, piece = self.positions.pop(), self.pieces.pop()
            left = sum(position < length for position in at)
            if left:
                self.positions.append(at[:left])
                self.pieces.append(piece[:, :left] if self.how == "queries" else piece[:left])
        if keys:
            self.pieces = [piece[..., :length] for piece in self.pieces]
        if self.sums:
            self._add_up()

    def joined(self, leaf: str) -> Tensor:
        self._make()
        if self.how == "mean":
            mean = self.pieces[0] / len(self.at())
            return mean if self.dtype is None else mean.to(self.dtype)
        if len(self.pieces) == 1 and not self.pieces[0].is_inference():
            return self.pieces[0]  # itself: a tensor read with its gradient
        if self.how != "queries":
            return torch.cat(self.pieces)
        if self.pieces[0].dim() == 2:
            return torch.cat(self.pieces, dim=1)
        longest = max(piece.shape[-1] for piece in self.pieces)  # [h, t, S] with S growing from step to step
        fill = float("-inf") if leaf == "scores" else 0.0
        return torch.cat([pad(p, (0, longest - p.shape[-1]), value=fill) for p in self.pieces], dim=1)

    def at(self) -> tuple[int, ...]:
        return tuple(p for piece in self.positions for p in piece)


Records = dict[str, dict[int, Record]]
"""For each site the records of its keys: a row of the batch is kept under its number."""


class Branches:
    """The keys under which a search keeps what its rows read, each a number below 0 that belongs to a row of the batch.

    A row that goes on in several ways is not copied: what each way reads from then on has a key of its own, and the
    path of a row is the list of keys from the first token on.

    guessed   keys whose newest values may be dropped again.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.items: dict[int, int] = {}
        self.guessed: Collection[int] = ()

    def item(self, key: int) -> int:
        """The row of the batch that a key belongs to."""
        return self.items.get(key, key)

    def new(self, item: int) -> int:
        """A new key for row `item` of the batch."""
        key = -1 - len(self.items)
        self.items[key] = item
        return key

    def keep_only(self, paths: Iterable[Sequence[int]]) -> None:
        """Drop what belongs to none of these paths, and all contexts (`k_ctx`, `v_ctx`) but the last of each."""
        paths = list(paths)
        alive = {key for path in paths for key in path}
        for site, rows in self.records.items():
            for key in [key for key in rows if key < 0 and key not in alive]:
                del rows[key]
            if rows and _leaf(site) in CONTEXT_SITES:
                kept = [[key for key in path if key in rows] for path in paths]
                last = {keys[-1] for keys in kept if keys}
                for key in {key for keys in kept for key in keys} - last:
                    del rows[key]

    def settle(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Make one record a site of the keys of each row's path, in a tensor of its own, and drop all other keys.
        Sites whose pieces are the same have one tensor."""
        joined: dict[tuple[tuple[int, torch.Size], ...], Tensor] = {}
        for site, rows in self.records.items():
            for item, path in paths.items():
                parts = [rows.pop(key) for key in path if key in rows]
                if not parts:
                    continue
                whole = parts[-1] if _leaf(site) in CONTEXT_SITES else parts[0]
                for later in parts[1:] if whole is parts[0] else ():
                    whole.extend(later)
                if not whole.sums:
                    same = tuple((piece.data_ptr(), piece.shape) for piece in whole.pieces)
                    if same not in joined:
                        joined[same] = whole.joined(_leaf(site))
                    whole.positions, whole.pieces = [whole.at()], [joined[same]]
                rows[item] = whole
            for key in [key for key in rows if key < 0]:
                del rows[key]

    def cut(self, key: int, length: int, sites: Collection[str]) -> None:
        """Drop what was read at `sites`, and of their measures, under a key at positions from `length` on."""
        for name, rows in self.records.items():
            site, _, measure = name.partition(":")
            if key not in rows or site not in sites:
                continue
            per_key = _leaf(site) in MATRIX_SITES and measure in ("", "received") and ".cross." not in site
            rows[key].cut(length, keys=per_key)
            if not rows[key].positions:
                del rows[key]


def _leaf(site: str) -> str:
    return site.rpartition(".")[2]
