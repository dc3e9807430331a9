"""Applies the reads and edits of a plan: taps that are passed to one forward or to all steps of one generation.

Reading never changes a bit: a value is kept as it passes, and scores and pattern are computed again beside the
fused kernel from the same q and keys.  Editing scores or pattern, or reading them with `grad`, sends that layer, and no
other, through `attend_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from triptych.attention import AttendPlan, ContentBias, FlatKeys, KeyLayout, RowPlan, Rows, SumPlan
from triptych.errors import ProbeError, first_line, shown
from triptych.nn import NO_TAPS, Taps
from triptych.program.native_reads import StepReads
from .reads_and_edits import Edit, Plan, Read, Where
from .sites import CONTEXT_SITES, MATRIX_SITES, matrix
from .trace import Trace
from .trace_recording import Attended, Notes, PassedValues, index_of, positions_of, read_scores, split
from .trace_values import How, Statistics


class Session:
    """One run under a plan: the trace it fills, and which row of the batch each row of a forward is.

    Close it with `close()`, which raises ProbeError - the trace attached as `.trace` - when a read never fired or,
    unless `allow_null`, when an edit never changed anything.
    """

    def __init__(self, plan: Plan, *, allow_null: bool = False) -> None:
        self.plan, self.allow_null = plan, allow_null
        self.passed_values = PassedValues(plan)
        self.trace = Trace(self.passed_values.fill)
        self.trace.mixed = {name for name, reads in plan.reads.items() if len(reads) > 1 and _mixed(reads)}
        self.keys: Sequence[int] | None = None  # what each row of the next forward is kept under; None: its number
        self.changes = {name: [0] * len(edits) for name, edits in plan.edits.items()}  # how often each changed a value

        self.below: dict[str, Taps] = {}  # the taps under each prefix that a forward came to

    @property
    def taps(self) -> Taps:
        """The taps of the next forward."""
        self.passed_values.begin_forward(self.trace)
        return self.taps_under("")

    def taps_under(self, prefix: str) -> Taps:
        """The taps of a forward that has begun, under a dotted prefix."""
        if prefix not in self.below:
            self.below[prefix] = ProbeTaps(self, prefix) if prefix in self.plan.prefixes else NO_TAPS
        return self.below[prefix]

    def native_reads(self, slots: Sequence[int]) -> StepReads | None:
        """Where a native step of rows in these slots, which have `keys`, leaves what is read; None where it is nothing.
        The plan has no `why_modules`."""
        return self.passed_values.begin_step(slots, self.keys or range(len(slots)), self.trace)

    # -- rows of a generation ---------------------------------------------------------------------------------------

    def begin(self, keys: Sequence[int], guessed: Collection[int] = ()) -> None:
        """The rows of the next forward: the key of each, which is its number in the batch or one that `branch` made,
        and the keys of those with guesses, of which `cut` drops the wrong ones."""
        self.keys, self.trace.branches.guessed = keys, guessed

    def key(self, row: int) -> int:
        return row if self.keys is None else self.keys[row]

    def branch(self, item: int) -> int:
        """A key for what row `item` of the batch reads from now on, beside other continuations of it."""
        return self.trace.branches.new(item)

    def keep_only(self, paths: Iterable[Sequence[int]]) -> None:
        """Drop what is kept already and belongs to none of these paths: keys, from the first token of a row on."""
        self.trace.branches.keep_only(paths)

    def settle(self, paths: Mapping[int, Sequence[int]]) -> None:
        """A search has ended: what row i of the batch read is what stands under the keys of `paths[i]`."""
        self.passed_values.fill(self.trace, {key for path in paths.values() for key in path})
        self.trace.branches.settle(paths)

    def cut(self, key: int, length: int) -> None:
        """Drop what a row with guesses read at positions from `length` on."""
        self.passed_values.fill(self.trace)
        self.trace.branches.cut(key, length, self.plan.of_row)

    def close(self) -> Trace:
        self.below.clear()  # taps refer to their session; without them a trace is freed as soon as nobody has it
        fired = self.passed_values.fired(self.trace)
        unread = [site for site in self.plan.reads if site not in fired]
        null = [name for name, changes in self.changes.items() if 0 in changes and not self.allow_null]
        if not unread and not null:
            return self.trace
        problem = f"never fired: {', '.join(unread)}; nothing passed there that the read selects"
        if not unread:
            problem = f"the edit at {null[0]} changed nothing; check its items=, at= and fn, or pass allow_null=True"
        error = ProbeError(problem)
        error.trace = self.trace
        raise error

    def passed(
        self, name: str, value: Tensor, row: int, positions: Sequence[int], source: Tensor | None = None
    ) -> Tensor:
        """One row's value at a site, `[t, ...]` or `[H, t, S]`, edited and read: what the forward goes on with.

        `source` is the tensor of the forward that the value is a part of.  What is read of it is kept without a copy,
        since no forward writes to a tensor that passed a site, and once for all sites that pass the same tensor.
        """
        key = self.key(row)
        item = self.trace.branches.item(key)
        edits, reads = self.plan.edits.get(name, ()), self.plan.reads.get(name, ())
        for number, edit in enumerate(edits):
            value = self._edited(name, number, edit, value, item, positions)
        for read in reads:
            if read.grad:
                value = self._in_graph(name, read, value, item, positions)
            else:
                self.passed_values.record(self.trace, name, read, value, key, positions, None if edits else source)
        return value

    def _edited(self, name: str, number: int, edit: Edit, value: Tensor, item: int, positions: Sequence[int]) -> Tensor:
        index = index_of(name, edit, value, item, positions)
        if index is None:
            return value
        chosen, places = index
        old = value[places].clone()  # the function may write to it
        where = Where(name, item, tuple(positions[i] for i in chosen))
        try:
            new = edit.fn(old, where)
        except TypeError as error:  # of torch.relu and others written in C, whose arguments nothing tells before
            raise ProbeError(
                f"the edit at {name} fails when called with (value, where): {first_line(error)}"
            ) from error
        plain = isinstance(new, Tensor) and new.is_floating_point() and new.layout == old.layout
        if not plain or new.shape != old.shape or new.device != old.device:
            raise ProbeError(
                f"the edit at {name} returned {shown(new)}, not floating numbers {list(old.shape)} on {old.device}"
            )
        new = new.to(value.dtype)
        self._check_finite(name, number, new, value[places], item)
        if not torch.equal(new, value[places]):
            self.changes[name][number] += 1
            self.trace.fired[name] = self.trace.fired.get(name, 0) + 1
        value = value.clone()
        value[places] = new
        return value

    def _check_finite(self, name: str, number: int, new: Tensor, old: Tensor, item: int) -> None:
        """Raise ProbeError where an edit returned NaN, or inf for finite numbers, and what came did not have it.

        Every result after it would be NaN, and blamed on the weights.  -inf is what hides a key from the softmax, or a
        token from a choice.
        """
        infinite = new.isinf() & old.isfinite()
        if name.endswith(("scores", "logits")):
            infinite &= new > 0
        broken = infinite | (new.isnan() & ~old.isnan())
        if bool(broken.any()):
            which = f" (number {number + 1} of those there)" if len(self.plan.edits[name]) > 1 else ""
            raise ProbeError(
                f"the edit at {name}{which} returned {int(broken.sum())} numbers that are NaN or inf for row {item}; "
                "its function must return finite ones"
            )

    def _in_graph(self, name: str, read: Read, value: Tensor, item: int, positions: Sequence[int]) -> Tensor:
        """Keep a part of the value that goes on, so that gradients reach it."""
        index = index_of(name, read, value, item, positions)
        if index is None:
            return value
        if not torch.is_grad_enabled():
            raise ProbeError(f"{name}: grad=True needs trace(); a generation has no autograd graph")
        chosen, places = index
        part = value[places].clone()
        part = part if part.requires_grad else part.requires_grad_()
        part.retain_grad()
        how: How = "queries" if matrix(name) else "tokens"
        self.trace.keep(name, item, tuple(positions[i] for i in chosen), part, how)
        value = value.clone()
        value[places] = part
        return value


class ProbeTaps(Taps):
    """Taps under one dotted prefix; where the plan has nothing below, the null taps are used."""

    def __init__(self, session: Session, prefix: str) -> None:
        self.session, self.prefix, self.plan = session, prefix, session.plan
        self.provenance = session.plan.provenance
        self.notes: dict[str, Notes | None] = {}  # of each site that was reached and is only noted
        self.under: dict[str, Taps] = {}  # the taps of sub-modules that were reached
        inside = [f"{self.prefix}{leaf}" for leaf in (*CONTEXT_SITES, *MATRIX_SITES)]
        self.attends = not self.plan.touched.isdisjoint(inside)

    def at(self, name: str) -> Taps:
        if not name:
            return self
        if name not in self.under:
            self.under[name] = self.session.taps_under(f"{self.prefix}{name}.")
        return self.under[name]

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        if site in self.notes:
            notes, keys = self.notes[site], self.session.keys
            if notes is not None and keys is not None:
                notes.add(value, rows, keys)
            elif notes is not None:
                self.session.passed_values.note(notes, value, rows)
            return value
        name = self.prefix + site
        if name in self.plan.kept_as_passed or name not in self.plan.touched:
            noted = name in self.plan.kept_as_passed
            self.notes[site] = self.session.passed_values.notes_of(name, self.session.trace) if noted else None
            return self(site, value, rows)
        pieces = []
        for row, part in enumerate(split(value, rows)):
            pieces.append(self.session.passed(name, part, row, positions_of(rows, row, part.shape[0]), value))
        return torch.cat(pieces) if self._changes(name) else value

    def computed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        value = function(*inputs)
        if self.session.keys is None:  # no generation, which keeps every value
            self.session.passed_values.computations.add(value, function, inputs)
        return value

    def attend(
        self, plan: AttendPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, content: ContentBias | None
    ) -> Tensor:
        if not self.attends:
            return plan.run(q, k, v, sinks, content)
        if isinstance(plan, SumPlan):
            for leaf in CONTEXT_SITES:
                if (name := f"{self.prefix}{leaf}") in self.plan.touched:
                    problem = "the cache of linear attention keeps sums, no keys and values; trace the text without it"
                    raise ProbeError(f"{name}: {problem}")
            return plan.run(q, k, v, sinks, content)
        assert isinstance(plan, RowPlan)
        k, v = self._context("k_ctx", k, plan.keys), self._context("v_ctx", v, plan.keys)
        names = [self.prefix + leaf for leaf in MATRIX_SITES]

        def hook(leaf: str, value: Tensor, row: int) -> Tensor:
            """[H, T, S] of one row; a key's column is its position."""
            positions = positions_of(plan.rows, row, value.shape[1])
            return self.session.passed(self.prefix + leaf, value, row, positions)

        if any(self._changes(name) for name in names):  # the layer goes on with what the reads and edits made of it
            return plan.run_hooked(q, k, v, hook, sinks, content)
        z = plan.run(q, k, v, sinks, content)
        if any(name in self.plan.reads for name in names):
            kept_under = [self.session.key(row) for row in range(len(plan.rows))]
            layer = Attended(plan, q, k, sinks, content)
            read_scores(layer, self.prefix, self.plan.reads, self.session.trace, kept_under)
        return z

    def _changes(self, name: str) -> bool:
        """Whether the forward goes on with another tensor: an edited one, or one with parts in the graph."""
        return name in self.plan.edits or any(read.grad for read in self.plan.reads.get(name, ()))

    def _context(self, site: str, value: Tensor, keys: KeyLayout) -> Tensor:
        """All keys (or values) that a forward reads, row by row as [S, G, K]; an edit works on a copy."""
        name = self.prefix + site
        if name not in self.plan.touched:
            return value
        if isinstance(keys, FlatKeys):
            return self(site, value, keys.rows)
        value = value.clone() if name in self.plan.edits else value
        for row, (slot, length) in enumerate(zip(keys.slots, keys.lengths, strict=True)):
            live: slice | Tensor = slice(0, length)
            positions = list(range(length))
            if keys.positions is not None:
                stored = keys.positions[row]
                live = stored.argsort(stable=True)[(stored < 0).sum() :]
                positions = stored[live].tolist()
            part = self.session.passed(name, value[slot, :, live].transpose(0, 1), row, positions)
            if name in self.plan.edits:
                value[slot, :, live] = part.transpose(0, 1)
        return value


def _mixed(reads: Sequence[Read]) -> bool:
    """Whether reads of one site keep different things, or a position twice; statistics have names of their own."""
    kept = [read for read in reads if not isinstance(read.reduce, Statistics)]
    ways = {repr((read.heads, read.dtype, read.reduce)) for read in kept}
    where = [(read.items, read.at) for read in kept]
    return len(kept) > 1 and (len(ways) > 1 or (None, None) in where)
