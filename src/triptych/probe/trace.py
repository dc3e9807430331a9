"""What a run read: for each site one tensor a row of the batch, over absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from triptych.attention import AttentionStatistics
from triptych.errors import ProbeError, nearest, shown
from triptych.probe.display import Displayed
from triptych.probe.sites import CONTEXT_SITES
from triptych.text import Tokenizer

How = Literal["tokens", "queries", "sum", "mean"]
SHOWN = 24  # sites that `repr` lists


@dataclass
class Record:
    """One row's pieces at one site, in the order in which they were read.

    how   what a piece is: "tokens" `[t, ...]`, "queries" `[h, t, ...]`, or the "sum" or "mean" of what was read so far,
          whose last dimension grows with the keys in a generation; of a mean the pieces hold the sum.
    dtype what a mean is given in: its sum is kept in fp32 or better, where it can neither overflow nor lose digits.
    """

    how: How = "tokens"
    positions: list[tuple[int, ...]] = field(default_factory=list)  # queries' absolute positions of each piece
    pieces: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype | None = None

    def add(self, positions: tuple[int, ...], value: Tensor) -> None:
        self.positions.append(positions)
        if self.how in ("tokens", "queries") or not self.pieces:
            self.pieces.append(value)
            return
        before = self.pieces[0]
        self.pieces[0] = pad(before, (0, value.shape[-1] - before.shape[-1])) + value

    def joined(self, leaf: str) -> Tensor:
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


class Trace(Displayed):
    """`trace[site]` is a list with one tensor a row: `[t, ...]` over the read positions, or `[h, t, S]` for scores
    and pattern (keys in order of position).  `trace.positions(site)` are the absolute positions of `t`.

    A generation in which a row outgrows the original length of LongRoPE computes the whole row again with the other
    factors.  The trace then holds what this last pass computed, as one forward over the row would, and each position
    once; `logits` alone are those that chose each token, so that those before the crossing come from the first factors.
    """

    def __init__(self, fill: Callable[[Trace], None] | None = None) -> None:
        """`fill` is called with this trace before anything is looked up: it keeps what was only noted so far."""
        self._records: dict[str, dict[int, Record]] = {}
        self._fill = fill
        self.logits: list[Tensor] = []
        self.mixed: set[str] = set()  # sites of which reads keep different things under one name
        self.fired: dict[str, int] = {}  # site -> how often an edit changed something there
        self.texts: list[str] = []  # what was read, where it was text, and the ids
        self.tokens: list[list[int]] = []
        self.targets: list[list[int]] = []  # the decoder's rows beside a source
        self.tokenizer: Tokenizer | None = None  # names the tokens where a notebook shows the trace

    def read_rows(self, rows: object, ids: Sequence[object], targets: Sequence[Sequence[int]] | None) -> None:
        """Note what a forward reads: texts, where they are, ids, and the decoder's rows beside a source."""
        if isinstance(rows, Sequence):
            self.texts = [row for row in rows if isinstance(row, str)]
        self.tokens = [list(row) for row in ids if isinstance(row, list)]
        self.targets = [list(row) for row in targets or ()]

    @property
    def records(self) -> dict[str, dict[int, Record]]:
        """For each site and each row of the batch what was read."""
        if self._fill is not None:
            self._fill(self)
        return self._records

    def reserve(self, site: str) -> None:
        """Give a site its place among the others before anything of it is kept."""
        self._records.setdefault(site, {})

    def filled(self) -> list[str]:
        """The sites and measures of which something is kept, without what was only noted."""
        return [site for site, rows in self._records.items() if rows]

    def keep(
        self, site: str, item: int, positions: tuple[int, ...], value: Tensor, how: How = "tokens",
        dtype: torch.dtype | str | None = None,
    ) -> None:  # fmt: skip
        """Add what row `item` had at `site`, as `Record` says.  `k_ctx` and `v_ctx` hold the whole context each time:
        the last counts."""
        kept_as = dtype if isinstance(dtype, torch.dtype) else None
        record = self._records.setdefault(site, {}).setdefault(item, Record(how, dtype=kept_as))
        if site.rpartition(".")[2] in CONTEXT_SITES:
            record.positions.clear()
            record.pieces.clear()
        record.add(positions, value)

    def keep_statistics(self, site: str, item: int, positions: tuple[int, ...], found: AttentionStatistics) -> None:
        """Each measure under a name of its own, `blocks.0.attn.pattern:entropy` for example."""
        for name, value in found.items():
            self.keep(f"{site}:{name}", item, positions, value, "sum" if name == "received" else "queries")

    def statistics(self, site: str) -> list[AttentionStatistics]:
        """Of each row, at a pattern that was read with `reduce=Statistics()`.  Raises ProbeError for any other."""
        names = [name for name in self.records if name.startswith(f"{site}:")]
        if not names:
            read = {name.partition(":")[0] for name in self.records if ":" in name}
            raise ProbeError(f"no statistics were read at {site!r}{nearest(site, read)}")
        columns = [self[name] for name in names]
        measures = [name.rpartition(":")[2] for name in names]
        return [AttentionStatistics(**dict(zip(measures, row, strict=True))) for row in zip(*columns, strict=True)]

    def gradients(self, site: str) -> list[Tensor]:
        """What `backward()` of a number computed from the logits left at a site that was read with `grad=True`.

        Raises ProbeError where there was no such read, or no backward pass.
        """
        found = [value.grad for value in self[site]]
        if not all(value.requires_grad for value in self[site]):
            raise ProbeError(f"{site} was read without grad=True, so it has no gradient")
        if any(grad is None for grad in found):
            raise ProbeError(
                f"{site} has no gradient yet; call backward() on a number computed from trace.logits that depends on it"
            )
        return [grad for grad in found if grad is not None]

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all: the values, logits, positions, and what was read.

        Raises CheckpointError where it cannot be written.
        """
        from triptych.probe.trace_file import save

        save(self, path)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """What `save` wrote.  Raises CheckpointError for a file that is damaged or holds something else."""
        from triptych.probe.trace_file import load

        return load(path)

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
            if site in self.mixed:
                lines.append(f"  {site}  read in several ways")
                continue
            values = self[site]
            shapes = ", ".join(str(list(value.shape)) for value in values[:4]) + ", ..." * (len(values) > 4)
            lines.append(f"  {site}  {shapes}  {str(values[0].dtype).removeprefix('torch.')}")
        if len(self) > SHOWN:
            lines.append(f"  ... and {len(self) - SHOWN} more; trace.keys() has them all")
        return "\n".join(lines)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in it, those that several sites passed on once."""
        rows = (record for rows in self.records.values() for record in rows.values())
        pieces = [piece for record in rows for piece in record.pieces]
        return sum({(piece.data_ptr(), piece.nbytes): piece.nbytes for piece in pieces}.values())

    def _rows(self, site: str) -> dict[int, Record]:
        if not isinstance(site, str):
            raise ProbeError(
                f"a trace is indexed by the name of a site, not by {shown(site)}; trace.keys() are the names"
            )
        if site in self.mixed:
            raise ProbeError(
                f"{site} was read in several ways, which one trace cannot hold apart; read it in two traces"
            )
        if site not in self.records:
            raise ProbeError(f"nothing was read at {site!r}{nearest(site, self.records)}")
        return self.records[site]
