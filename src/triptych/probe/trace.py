"""What a run read: for each site one tensor a row of the batch, over absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, KeysView, Sequence
from pathlib import Path

import torch
from torch import Tensor

from triptych.attention import AttentionStatistics
from triptych.errors import ProbeError, nearest, shown
from triptych.probe.display import Displayed
from triptych.probe.records import Branches, How, Later, Record, Records
from triptych.probe.sites import CONTEXT_SITES
from triptych.text import Tokenizer

SHOWN = 24  # sites that `repr` lists


class Trace(Displayed):
    """`trace[site]` is a list with one tensor a row: `[t, ...]` over the read positions, or `[h, t, S]` for scores
    and pattern (keys in order of position).  `trace.positions(site)` are the absolute positions of `t`.

    A generation in which a row outgrows the original length of LongRoPE computes the whole row again with the other
    factors.  The trace then holds what this last pass computed, as one forward over the row would, and each position
    once; `logits` alone are those that chose each token, so that those before the crossing come from the first factors.
    """

    def __init__(self, fill: Callable[[Trace], None] | None = None) -> None:
        """`fill` is called with this trace before anything is looked up: it keeps what was only noted so far."""
        self._records: Records = {}
        self.branches = Branches(self._records)
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
    def records(self) -> Records:
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
        dtype: torch.dtype | str | None = None, *, more: bool = False,
    ) -> None:  # fmt: skip
        """Add what row `item`, or a key of `branches`, had at `site`, as `Record` says.  `k_ctx` and `v_ctx` hold the
        whole context each time: the last counts, unless this is `more` of it."""
        kept_as = dtype if isinstance(dtype, torch.dtype) else None
        record = self._records.setdefault(site, {}).setdefault(item, Record(how, dtype=kept_as))
        if site.rpartition(".")[2] in CONTEXT_SITES and not more:
            record.positions.clear()
            record.pieces.clear()
        record.add(positions, value, apart=item in self.branches.guessed)

    def keep_later(self, site: str, item: int, positions: tuple[int, ...], value: Later, how: How = "tokens") -> None:
        """Add what is made when somebody looks at it, a piece as in `keep`."""
        record = self._records.setdefault(site, {}).setdefault(item, Record(how))
        record.positions.append(positions)
        record.later.append(value)

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
        """Bytes of the tensors in it, those that several sites passed on once, and of those that are computed when they
        are looked at."""
        sizes: dict[Hashable, int] = {}
        for rows in self.records.values():
            for record in rows.values():
                sizes |= record.sizes()
        return sum(sizes.values())

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
