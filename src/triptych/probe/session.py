"""The taps that read and edit, handed to one forward or to all steps of one generation.

Reading never changes a bit: a value is copied as it passes, and scores and pattern are computed again beside the
fused kernel from the same q and keys.  Editing scores or pattern sends that layer, and no other, through
`attend_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triptych.attention import FlatKeys, Rows, SlotKeys
from triptych.errors import ProbeError
from triptych.nn import NO_TAPS, Taps
from triptych.probe.plan import At, Edit, Plan, Where, matrix, select
from triptych.probe.trace import Trace


class Session:
    """One run under a plan: the trace it fills, and which row of the batch each live row is.

    Close it with `close()`, which raises ProbeError - the trace attached as `.trace` - when a read never fired or an
    edit never changed anything.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.trace = Trace()
        self.items: list[int] | None = None  # live row -> row of the batch; None while nothing was dropped
        self.hits: dict[int, int] = {id(edit): 0 for edits in plan.edits.values() for edit in edits}

    @property
    def taps(self) -> Taps:
        return ProbeTaps(self, "") if self.plan.touches("") else NO_TAPS

    def keep_rows(self, live: Sequence[int]) -> None:
        """Generation goes on with these of its live rows."""
        old = self.items if self.items is not None else list(range(max(live, default=-1) + 1))
        self.items = [old[i] for i in live]

    def item(self, row: int) -> int:
        return row if self.items is None else self.items[row]

    def close(self) -> Trace:
        unread = [site for site in self.plan.reads if site not in self.trace]
        if unread:
            raise _attached(f"never fired: {', '.join(unread)}; nothing passed there that the read selects", self.trace)
        for name, edits in self.plan.edits.items():
            for edit in edits:
                if not self.hits[id(edit)]:
                    raise _attached(f"the edit at {name} changed nothing; check its items=, at= and fn", self.trace)
        return self.trace

    def edit(self, name: str, edit: Edit, value: Tensor, item: int, positions: Sequence[int]) -> Tensor:
        """One row's value with `edit` applied: `[t, ...]`, or `[H, t, S]` for scores and pattern."""
        if not _has(edit.items, item):
            return value
        chosen = select(edit.at, positions)
        heads = _heads(edit.heads, value, name)
        if not chosen or not heads:
            return value
        index = _index(name, value, chosen, heads if edit.heads is not None else None)
        old = value[index]
        new = edit.fn(old, Where(name, item, tuple(positions[i] for i in chosen)))
        if new.shape != old.shape:
            raise ProbeError(f"the edit at {name} returned {tuple(new.shape)} for {tuple(old.shape)}")
        if not torch.equal(new, old):
            self.hits[id(edit)] += 1
            self.trace.fired[name] = self.trace.fired.get(name, 0) + 1
        value = value.clone()
        value[index] = new.to(value.dtype)
        return value

    def read(self, name: str, value: Tensor, item: int, positions: Sequence[int]) -> None:
        """Keep what the reads of `name` select of one row's value."""
        for read in self.plan.reads.get(name, ()):
            if not _has(read.items, item):
                continue
            chosen = select(read.at, positions)
            if not chosen:
                continue
            heads = _heads(read.heads, value, name) if read.heads is not None else None
            kept = value[_index(name, value, chosen, heads)]
            kept = kept.clone() if read.grad else kept.detach().clone()
            self.trace.keep(name, item, tuple(positions[i] for i in chosen), kept)


class ProbeTaps(Taps):
    """Taps under one dotted prefix; where the plan has nothing below, the ones that do nothing take over."""

    def __init__(self, session: Session, prefix: str) -> None:
        self.session, self.prefix, self.plan = session, prefix, session.plan
        self.provenance = session.plan.provenance

    def at(self, name: str) -> Taps:
        if not name:
            return self
        prefix = f"{self.prefix}{name}."
        return ProbeTaps(self.session, prefix) if self.plan.touches(prefix) else NO_TAPS

    def __call__(self, site: str, value: Tensor, rows: Rows) -> Tensor:
        name = self.prefix + site
        if name not in self.plan.reads and name not in self.plan.edits:
            return value
        pieces = []
        for row, part in enumerate(_split(name, value, rows)):
            pieces.append(self._pass(name, part, row, _positions(rows, row, part.shape[0])))
        return torch.cat(pieces) if name in self.plan.edits else value

    def keys(self, keys: FlatKeys | SlotKeys) -> FlatKeys | SlotKeys:
        if isinstance(keys, FlatKeys):
            return replace(keys, k=self("k_ctx", keys.k, keys.rows), v=self("v_ctx", keys.v, keys.rows))
        return replace(keys, k=self._slots("k_ctx", keys.k, keys), v=self._slots("v_ctx", keys.v, keys))

    def attend(self, call: Callable[..., Tensor], rows: Rows) -> Tensor:
        names = [self.prefix + leaf for leaf in ("scores", "pattern")]
        if any(name in self.plan.edits for name in names):
            return call(hook=lambda leaf, value, row: self._matrix(leaf, value, row, rows))
        z = call()
        if any(name in self.plan.reads for name in names):
            with torch.set_grad_enabled(any(r.grad for name in names for r in self.plan.reads.get(name, ()))):
                call(hook=lambda leaf, value, row: self._matrix(leaf, value, row, rows), dropout=0.0)
        return z

    def _matrix(self, leaf: str, value: Tensor, row: int, rows: Rows) -> Tensor:
        """[H, T, S] of one row; a key's column is its position."""
        return self._pass(self.prefix + leaf, value, row, _positions(rows, row, value.shape[1]))

    def _slots(self, site: str, value: Tensor, keys: SlotKeys) -> Tensor:
        """[B, G, S, K] of a cache, row by row as [S, G, K]; an edit works on a copy."""
        name = self.prefix + site
        if name not in self.plan.reads and name not in self.plan.edits:
            return value
        value = value.clone() if name in self.plan.edits else value
        for row, length in enumerate(keys.lengths):
            live, positions = slice(0, length), list(range(length))
            if keys.positions is not None:
                slots = keys.positions[row]
                live = slots.argsort(stable=True)[(slots < 0).sum() :]  # type: ignore[assignment]
                positions = slots[live].tolist()
            part = self._pass(name, value[row, :, live].transpose(0, 1), row, positions)
            if name in self.plan.edits:
                value[row, :, live] = part.transpose(0, 1)
        return value

    def _pass(self, name: str, value: Tensor, row: int, positions: Sequence[int]) -> Tensor:
        item = self.session.item(row)
        for edit in self.plan.edits.get(name, ()):
            value = self.session.edit(name, edit, value, item, positions)
        self.session.read(name, value, item, positions)
        return value


def _split(name: str, value: Tensor, rows: Rows) -> list[Tensor]:
    """Rows of the flat batch; a head that gives one vector a row (classes, pooling) has one position each."""
    if value.shape[0] == rows.total:
        return rows.split(value)
    return list(value.split(1))


def _positions(rows: Rows, row: int, length: int) -> list[int]:
    past = rows.past[row]
    return list(range(past, past + length))


def _has(at: At, item: int) -> bool:
    return bool(select(at, [item]))


def _heads(heads: At, value: Tensor, name: str) -> list[int]:
    return select(heads, range(value.shape[0 if matrix(name) else 1])) if heads is not None else [0]


def _index(name: str, value: Tensor, chosen: list[int], heads: list[int] | None) -> tuple[Tensor | slice, ...]:
    """Advanced index of the chosen positions and heads in `[t, H, ...]` or `[H, t, S]`."""
    t = torch.tensor(chosen, device=value.device)
    if heads is None:
        return (slice(None), t) if matrix(name) else (t,)
    h = torch.tensor(heads, device=value.device)
    return (h[:, None], t[None, :]) if matrix(name) else (t[:, None], h[None, :])


def _attached(message: str, trace: Trace) -> ProbeError:
    error = ProbeError(message)
    error.trace = trace  # type: ignore[attr-defined]
    return error
