"""What a run read: for each site one tensor a row of the batch, over absolute positions."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.errors import ProbeError, nearest
from triptych.probe.sites import CONTEXT_SITES

SHOWN = 24  # sites that `repr` lists


@dataclass
class Record:
    """One row's pieces at one site, in the order in which they were read."""

    positions: list[tuple[int, ...]] = field(default_factory=list)  # queries' absolute positions of each piece
    pieces: list[Tensor] = field(default_factory=list)

    def joined(self, leaf: str) -> Tensor:
        if len(self.pieces) == 1 and not self.pieces[0].is_inference():
            return self.pieces[0]  # itself: a tensor read with its gradient
        if leaf in ("scores", "pattern"):  # [h, t, S] with S growing from step to step
            longest = max(piece.shape[-1] for piece in self.pieces)
            fill = float("-inf") if leaf == "scores" else 0.0
            pad = torch.nn.functional.pad
            return torch.cat([pad(p, (0, longest - p.shape[-1]), value=fill) for p in self.pieces], dim=1)
        return torch.cat(self.pieces)

    def at(self) -> tuple[int, ...]:
        return tuple(p for piece in self.positions for p in piece)


class Trace:
    """`trace[site]` is a list with one tensor a row: `[t, ...]` over the read positions, or `[h, t, S]` for scores
    and pattern (keys in order of position).  `trace.positions(site)` are the absolute positions of `t`.

    A generation in which a row outgrows the original length of LongRoPE computes the whole row again with the other
    factors.  The trace then holds what this last pass computed, as one forward over the row would, and each position
    once; `logits` alone are those that chose each token, so that those before the crossing come from the first factors.
    """

    def __init__(self) -> None:
        self.records: dict[str, dict[int, Record]] = {}
        self.logits: list[Tensor] = []
        self.fired: dict[str, int] = {}  # site -> how often an edit changed something there

    def keep(self, site: str, item: int, positions: tuple[int, ...], value: Tensor) -> None:
        """Add what row `item` had at `site`.  `k_ctx` and `v_ctx` hold the whole context each time: the last counts."""
        record = self.records.setdefault(site, {}).setdefault(item, Record())
        if site.rpartition(".")[2] in CONTEXT_SITES:
            record.positions.clear()
            record.pieces.clear()
        record.positions.append(positions)
        record.pieces.append(value)

    def forget(self, item: int) -> None:
        """Drop what row `item` had, its logits excepted: it is about to be computed again from its first token."""
        for site in [site for site, rows in self.records.items() if item in rows and site != "logits"]:
            del self.records[site][item]
            if not self.records[site]:
                del self.records[site]

    def __getitem__(self, site: str) -> list[Tensor]:
        rows = self._rows(site)
        return [rows[item].joined(site.rpartition(".")[2]) for item in sorted(rows)]

    def positions(self, site: str) -> list[tuple[int, ...]]:
        """The absolute positions of each row's vectors (queries, for scores and pattern)."""
        rows = self._rows(site)
        return [rows[item].at() for item in sorted(rows)]

    def items(self, site: str) -> list[int]:
        """Which rows of the batch the tensors of `site` belong to."""
        return sorted(self._rows(site))

    def keys(self) -> KeysView[str]:
        """The sites that were read."""
        return self.records.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, site: object) -> bool:
        return site in self.records

    def __repr__(self) -> str:
        rows = len({item for of in self.records.values() for item in of}) or len(self.logits)
        lines = [f"Trace of {rows} row{'s' * (rows != 1)}, {len(self)} sites, {self.nbytes:,} bytes"]
        for site in list(self)[:SHOWN]:
            values = self[site]
            shapes = ", ".join(str(list(value.shape)) for value in values[:4]) + ", ..." * (len(values) > 4)
            lines.append(f"  {site}  {shapes}  {str(values[0].dtype).removeprefix('torch.')}")
        if len(self) > SHOWN:
            lines.append(f"  ... and {len(self) - SHOWN} more; trace.keys() has them all")
        return "\n".join(lines)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in it."""
        rows = (record for rows in self.records.values() for record in rows.values())
        return sum(piece.nbytes for record in rows for piece in record.pieces)

    def _rows(self, site: str) -> dict[int, Record]:
        if site not in self.records:
            raise ProbeError(f"nothing was read at {site!r}{nearest(site, self.records)}")
        return self.records[site]
