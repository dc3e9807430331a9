"""The values that a run read: for each site one tensor a row of the batch, over absolute positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, KeysView, Sequence
from pathlib import Path

import torch
from torch import Tensor

from triptych.arguments import checked
from triptych.attention import AttentionStatistics
from triptych.checkpoints.safetensors import open_file
from triptych.checkpoints.save import replacing, write_safetensors
from triptych.checkpoints.source import fault
from triptych.errors import ProbeError, nearest, shown
from triptych.text import Tokenizer
from .display import Displayed
from .sites import CONTEXT_SITES, leaf_of
from .trace_values import Branches, DeferredPiece, How, Record, Records

SHOWN = 24  # sites that `repr` lists
MOST = 1 << 24  # positions of one row of a file


class Trace(Displayed):
    """The values that a run read, by the names of their sites: a mapping, made by `Model.trace` and others.

    `trace[site]` is a list with one tensor for each row: `[t, ...]` over the read positions, or `[h, t, S]` for scores
    and pattern (keys in order of position), in the dtype in which it was computed unless the read has a `dtype`.
    `trace.positions(site)` are the absolute positions of `t`.  `.float().cpu().numpy()` of a tensor is a NumPy array.

    logits   a list of `[T_i, V]`; of a generation, those that each new token was chosen from.
    tokens   the ids of each row; `texts` what was tokenized, `targets` the decoder's rows of an encoder-decoder.

    A generation in which a row outgrows the original length of LongRoPE computes the whole row again with the other
    factors.  The trace then holds what this last pass computed, as one forward over the row would, and each position
    once; `logits` alone are those that chose each token, so that those before that length come from the first factors.
    """

    @checked
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

    def __getstate__(self) -> dict[str, object]:
        """What is pickled: values that are computed when they are first used are computed now."""
        for rows in self.records.values():
            for record in rows.values():
                record.make()
        return vars(self) | {"_fill": None}

    def read_rows(self, rows: object, ids: Sequence[object], targets: Sequence[Sequence[int]] | None) -> None:
        """Set `texts`, `tokens` and `targets` from what a forward reads; called by `Model.trace`."""
        if isinstance(rows, Sequence):
            self.texts = [row for row in rows if isinstance(row, str)]
        self.tokens = [list(row) for row in ids if isinstance(row, list)]
        self.targets = [list(row) for row in targets or ()]

    @property
    def records(self) -> Records:
        """The pieces that were read, by site and by row of the batch; `trace[site]` joins them."""
        if self._fill is not None:
            self._fill(self)
        return self._records

    def reserve(self, site: str) -> None:
        """Reserve the place of a site in the order of the sites before a value of it is kept."""
        self._records.setdefault(site, {})

    def filled(self) -> list[str]:
        """The sites and measures of which values are kept, without those that are computed when they are first used."""
        return [site for site, rows in self._records.items() if rows]

    def keep(
        self, site: str, item: int, positions: tuple[int, ...], value: Tensor, how: How = "tokens",
        dtype: torch.dtype | str | None = None, *, more: bool = False,
    ) -> None:  # fmt: skip
        """Add what row `item`, or a key of `branches`, had at `site`, as `Record` says.  `k_ctx` and `v_ctx` hold the
        whole context each time: the last counts, unless this is `more` of it."""
        kept_as = dtype if isinstance(dtype, torch.dtype) else None
        record = self._records.setdefault(site, {}).setdefault(item, Record(how, dtype=kept_as))
        if leaf_of(site) in CONTEXT_SITES and not more:
            record.positions.clear()
            record.pieces.clear()
        record.add(positions, value, apart=item in self.branches.guessed)

    def keep_later(
        self, site: str, item: int, positions: tuple[int, ...], value: DeferredPiece, how: How = "tokens"
    ) -> None:
        """Add a piece, as `keep` does, that is computed when it is first used."""
        record = self._records.setdefault(site, {}).setdefault(item, Record(how))
        record.positions.append(positions)
        record.later.append(value)

    def keep_statistics(self, site: str, item: int, positions: tuple[int, ...], found: AttentionStatistics) -> None:
        """Each measure under a name of its own, `blocks.0.attn.pattern:entropy` for example."""
        for name, value in found.items():
            self.keep(f"{site}:{name}", item, positions, value, "sum" if name == "received" else "queries")

    @checked
    def statistics(self, site: str) -> list[AttentionStatistics]:
        """The statistics of each row at a pattern that was read with `reduce=Statistics()`, as by `Model.statistics`.

        Raises ProbeError for any other site.
        """
        names = [name for name in self.records if name.startswith(f"{site}:")]
        if not names:
            read = {name.partition(":")[0] for name in self.records if ":" in name}
            raise ProbeError(f"no statistics were read at {site!r}{nearest(site, read)}")
        columns = [self[name] for name in names]
        measures = [name.rpartition(":")[2] for name in names]
        return [AttentionStatistics(**dict(zip(measures, row, strict=True))) for row in zip(*columns, strict=True)]

    def gradients(self, site: str) -> list[Tensor]:
        """The gradient at a site that was read with `grad=True`, for each row in the shape of `trace[site]`, after
        `backward()` of a number computed from `.logits`.

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

    @checked
    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all: the values, logits, positions, and what was read.

        A saved trace that is there already is replaced.  Raises InputError for the ending of another format,
        CheckpointError where it cannot be written, and where another file is there.
        """
        from .trace_file import KEY, Contents, StoredRow, check_place, ranges

        check_place(Path(path))

        tensors: dict[str, Tensor] = {}
        names: dict[tuple[object, ...], str] = {}

        def named(value: Tensor) -> str:
            key = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (len(names),)
            if key not in names:
                names[key] = f"{len(names)}"
                tensors[names[key]] = value.detach()
            return names[key]

        sites: dict[str, list[StoredRow]] = {}
        for site in self.records:
            for item, record in sorted(self._rows(site).items()):
                how = "tokens" if record.how == "mean" else record.how  # a mean is divided by now
                tensor = named(record.joined(leaf_of(site)))
                row = StoredRow(item=item, tensor=tensor, positions=ranges(record.at()), how=how)
                sites.setdefault(site, []).append(row)
        contents = Contents(
            version=1, texts=self.texts, tokens=self.tokens, targets=self.targets, fired=self.fired,
            logits=[named(value) for value in self.logits], sites=sites,
        )  # fmt: skip
        with replacing(path) as file:
            write_safetensors(file, tensors, {"format": "pt", KEY: contents.model_dump_json()})

    @staticmethod
    @checked
    def load(path: str | Path) -> Trace:
        """Read a file that `save` wrote.  Raises CheckpointError for one that is damaged or holds something else."""
        from .trace_file import KEY, contents_of

        path, trace = Path(path), Trace()
        source = open_file(path)
        contents = contents_of(source.metadata.get(KEY), path)
        tensors = {name: source.read(name).clone() for name in source.names}
        missing = {*contents.logits, *(row.tensor for rows in contents.sites.values() for row in rows)} - {*tensors}
        if missing:
            name = min(missing)[:40]
            raise fault(path, f"its trace is damaged: it names a tensor {name!r} that the file does not hold")
        trace.texts, trace.tokens, trace.targets = contents.texts, contents.tokens, contents.targets
        trace.fired, trace.logits = contents.fired, [tensors[name] for name in contents.logits]
        for site, rows in contents.sites.items():
            for row in rows:
                if sum(max(0, end - first) for first, end in row.positions) > MOST:
                    raise fault(path, f"its trace is damaged: a row of more than {MOST:,} positions")
                positions = tuple(position for first, end in row.positions for position in range(first, end))
                trace.records.setdefault(site, {})[row.item] = Record(row.how, [positions], [tensors[row.tensor]])
        return trace

    def forget(self, item: int) -> None:
        """Drop the values of row `item` except its logits, before it is computed again from its first token."""
        for site in [site for site, rows in self.records.items() if item in rows and site != "logits"]:
            del self.records[site][item]
            if not self.records[site]:
                del self.records[site]

    def __getitem__(self, site: str) -> list[Tensor]:
        """The values at a site, one tensor for each row.  Raises ProbeError for a site that was not read."""
        rows = self._rows(site)
        return [rows[item].joined(leaf_of(site)) for item in sorted(rows)]

    def positions(self, site: str) -> list[tuple[int, ...]]:
        """The absolute positions of each row's vectors (of the queries, for scores and pattern).

        Raises ProbeError for a site that was not read.
        """
        rows = self._rows(site)
        return [rows[item].at() for item in sorted(rows)]

    def items(self, site: str) -> list[int]:
        """The rows of the batch of the tensors of `site`.  Raises ProbeError for a site that was not read."""
        return sorted(self._rows(site))

    def keys(self) -> KeysView[str]:
        """The sites that were read."""
        return self.records.keys()

    def __iter__(self) -> Iterator[str]:
        """The names of the sites that were read."""
        return iter(self.records)

    def __len__(self) -> int:
        """The number of sites that were read."""
        return len(self.records)

    def __contains__(self, site: object) -> bool:
        """Whether a site was read."""
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
        """The bytes of its tensors: one that several sites share counts once, and one that is computed when it is first
        used counts too."""
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
