"""What a run kept: for each site one tensor a row of the batch, over absolute positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.errors import ProbeError, nearest
from triptych.probe.sites import CONTEXT_SITES


@dataclass
class Record:
    """One row's pieces at one site, in the order they fired."""

    positions: list[tuple[int, ...]] = field(default_factory=list)  # queries' absolute positions of each piece
    pieces: list[Tensor] = field(default_factory=list)

    def joined(self, leaf: str) -> Tensor:
        if leaf in CONTEXT_SITES:  # every firing sees the whole context: the last one has it all
            return self.pieces[-1]
        if leaf in ("scores", "pattern"):  # [h, t, S] with S growing from step to step
            longest = max(piece.shape[-1] for piece in self.pieces)
            fill = float("-inf") if leaf == "scores" else 0.0
            pad = torch.nn.functional.pad
            return torch.cat([pad(p, (0, longest - p.shape[-1]), value=fill) for p in self.pieces], dim=1)
        return torch.cat(self.pieces)

    def at(self, leaf: str) -> tuple[int, ...]:
        if leaf in CONTEXT_SITES:
            return self.positions[-1]
        return tuple(p for piece in self.positions for p in piece)


class Trace:
    """`trace[site]` is a list with one tensor a row: `[t, ...]` over the kept positions, or `[h, t, S]` for scores
    and pattern (keys in order of position).  `trace.positions(site)` are the absolute positions of `t`."""

    def __init__(self) -> None:
        self.records: dict[str, dict[int, Record]] = {}
        self.logits: list[Tensor] = []
        self.fired: dict[str, int] = {}  # site -> how often an edit changed something there

    def keep(self, site: str, item: int, positions: tuple[int, ...], value: Tensor) -> None:
        record = self.records.setdefault(site, {}).setdefault(item, Record())
        record.positions.append(positions)
        record.pieces.append(value)

    def __getitem__(self, site: str) -> list[Tensor]:
        rows = self._rows(site)
        return [rows[item].joined(site.rpartition(".")[2]) for item in sorted(rows)]

    def positions(self, site: str) -> list[tuple[int, ...]]:
        """The absolute positions of each row's kept vectors (queries, for scores and pattern)."""
        rows = self._rows(site)
        return [rows[item].at(site.rpartition(".")[2]) for item in sorted(rows)]

    def items(self, site: str) -> list[int]:
        """Which rows of the batch the tensors of `site` belong to."""
        return sorted(self._rows(site))

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __contains__(self, site: object) -> bool:
        return site in self.records

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        rows = (record for rows in self.records.values() for record in rows.values())
        return sum(piece.nbytes for record in rows for piece in record.pieces)

    def _rows(self, site: str) -> dict[int, Record]:
        if site not in self.records:
            raise ProbeError(f"nothing was read at {site!r}{nearest(site, self.records)}")
        return self.records[site]
