"""Reuse of what a cache holds: a row whose prompt begins like another row takes over that row's keys and values, and a
row with the same source what was encoded of it.

Keys and values of a position depend on the ids up to it, on the weights and on what changes a forward (hooks, edits,
training mode, LongRoPE's factors).  Rows with a probe and rows beside an encoder neither give nor take.  Any change of
the weights or of the modules ends the reuse of everything computed before.  To see every change, even one through
`.data` that torch does not count, all weights are read when rows join after other code has run (`checksums`): for each
text of a conversation once, which takes about as long as one decoding step.  What changes while a row runs and is
changed back before the next one joins is not seen.

Where tokens of prompts are multiplied in bf16 and generated ones are not (`StepRunner.prompts_use_bf16`), only tokens
that were computed as parts of prompts are taken over: as in a prompt that is computed anew, so that no text depends on
reuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from triptych.attention import CrossCache
from triptych.errors import InputError
from triptych.nn import InputRow
from triptych.program.module_changes import ModuleFingerprint, ModuleGuard, checksums, equal, refusal, unseen_changes
from .request import LiveRow
from .step_runner import StepRunner

LEAST = 8  # ids; fewer are computed again, which takes less time than to copy the page that they are in


class Prefixes:
    """The contents of the slots of an engine's cache, of rows that run and of rows that have left.

    idle_slots  the ids that each slot of a row that has left still holds for others, least recently used first.  These
                slots are given up as soon as rows need them, so that keeping them takes no memory of its own.
    reused      ids that were taken over instead of computed, since the engine was made.
    """

    def __init__(self, runner: StepRunner, reused: int = 0) -> None:
        self.runner, self.cache = runner, runner.cache
        self.fingerprint, self.visits = ModuleFingerprint(runner.module), runner.guard.visits
        self.sums: list[Tensor] | None = None  # of all weights; None before the first row
        self.idle_slots: dict[int, list[int]] = {}
        self.reused = reused
        self.outdated: WeakSet[LiveRow] = WeakSet()  # rows that were computed before a change

    def keep(self, row: LiveRow) -> bool:
        """Keep the slot of a row that leaves; False where nobody could use it."""
        reusable = self._reusable_ids(row)
        usable = self._serves(row) and row.cached == self.cache.lengths[row.slot] and len(reusable) >= LEAST
        if usable:
            self.cache.give_up_room(row.slot)
            self.idle_slots[row.slot] = reusable
        return usable

    def _reusable_ids(self, row: LiveRow, upto: int | None = None) -> list[int]:
        """The ids of a row that others may take over once the first `upto` are computed, by default those that are."""
        count = row.cached if upto is None else upto
        return row.ids[: min(count, len(row.request.prompt)) if self.runner.prompts_use_bf16 else count]

    def slot(self, row: LiveRow, running: Iterable[LiveRow]) -> int:
        """A slot for a new row: one whose ids the row continues, a free one, or a kept one that is given up.

        A kept slot is taken over where the row uses at least half of what it holds, or where no other is free.
        """
        self.check(running)
        slot, length = self._best(row, self.idle_slots.items()) if self._takes(row) else (-1, 0)
        if length >= LEAST and (2 * length >= len(self.idle_slots[slot]) or not self.cache.free_slots):
            del self.idle_slots[slot]
            self.cache.trim(slot, length)
            self._take(row, length)
            return slot
        if not self.cache.free_slots and self.idle_slots:
            self.give_up(1)
        return self.cache.add(1)[0]

    def give_up(self, count: int) -> None:
        """Free up to `count` kept slots, least recently used first."""
        oldest = list(self.idle_slots)[:count]
        for slot in oldest:
            del self.idle_slots[slot]
        self.cache.free(oldest)

    def fill(self, row: LiveRow, running: Sequence[LiveRow]) -> bool:
        """Let an empty row share what another slot holds of its prompt's beginning.  False where it is better to wait:
        a row before it in `running` is about to compute more of it."""
        if not self._takes(row):
            return True
        others = [peer for peer in running if peer is not row and self._serves(peer)]
        live = {peer.slot: self._reusable_ids(peer) for peer in others if peer.cached >= LEAST}
        slot, length = self._best(row, [*live.items(), *self.idle_slots.items()])
        ahead = [peer for peer in running[: running.index(row)] if peer in others and peer.cached < len(peer.ids) - 1]
        if any(
            min(common(self._reusable_ids(peer, len(peer.ids)), row.ids), row.most_reused + 1)
            >= max(length, peer.cached) + LEAST
            for peer in ahead
        ):
            return False
        if length >= LEAST:
            self.check(running)
        if length >= LEAST and self._takes(row):  # not where that forgot all that was held
            self.cache.share_prefix(slot, row.slot, length)
            if slot in self.idle_slots:
                self.idle_slots[slot] = self.idle_slots.pop(slot)  # now the most recently used
            self._take(row, length)
        return True

    def check(self, running: Iterable[LiveRow]) -> None:
        """Forget all that was computed before a change of the model."""
        module, before, visits = self.runner.module, self.sums, self.runner.guard.visits
        same = self.fingerprint.same(module)
        if before is not None and same and self.visits == visits:
            return
        self.sums, self.visits = checksums(module), visits
        if before is None or not same:
            self.fingerprint = ModuleFingerprint(module)
            self.plain = refusal(module) is None and unseen_changes(module) is None  # whether the modules say all
        if before is not None and not (same and equal(before, self.sums)):
            self.give_up(len(self.idle_slots))
            self.outdated.update(running)

    def _take(self, row: LiveRow, length: int) -> None:
        row.cached = row.reused = length
        self.reused += length

    def _takes(self, row: LiveRow) -> bool:
        return not row.cached and not row.request.all_logits and self._serves(row) and self.plain

    def _serves(self, row: LiveRow) -> bool:
        return row.request.probe is None and row.request.source is None and row not in self.outdated

    def _best(self, row: LiveRow, slots: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, int]:
        """The slot, of some with the ids that they hold, that has most of the row's prompt; and how much of it can be
        used: not the ids whose logits are wanted."""
        best = -1, 0
        for slot, ids in slots:
            length = min(common(ids, row.ids), row.most_reused)
            if length > best[1] and self._usable(slot, length, self.cache.lengths[slot], len(row.ids)):
                best = slot, length
        return best

    def _usable(self, slot: int, length: int, cached_length: int, row_length: int) -> bool:
        """Whether rings still hold the prefix, and LongRoPE's factors are the same for both rows."""
        switch = self.runner.switch
        if (length <= switch) if cached_length > switch else (row_length > switch):
            return False
        try:
            self.cache.check_trim(slot, length)
        except InputError:
            return False
        return True


class SharedSources:
    """Sources of rows beside an encoder: those that rows have alike are encoded once, for all that wait then, and for
    those that join while one of them runs and no other code has run.  Rows with a probe are left out."""

    def __init__(self, cross: CrossCache, guard: ModuleGuard) -> None:
        self.cross, self.guard = cross, guard
        self.encoded: WeakKeyDictionary[LiveRow, int] = WeakKeyDictionary()  # the guard's visits then

    def join(self, row: LiveRow, running: Iterable[LiveRow]) -> None:
        """Let a new row, which has its slot, read the source of a row that runs."""
        self.share([peer for peer in running if self.encoded.get(peer) == self.guard.visits], [row])

    def fill(self, row: LiveRow, running: Sequence[LiveRow]) -> bool:
        """False where a row before it in `running` is about to encode the same source."""
        return not any(_alike(peer, row) for peer in running[: running.index(row)])

    def share(self, encoded: Collection[LiveRow], running: Iterable[LiveRow]) -> None:
        """Let the rows of `running` whose source waits read what these rows have `encoded` of it."""
        waiting = [row for row in running if row.source is not None]
        for row in waiting:
            peer = next((peer for peer in encoded if _alike(row, peer, peer.request.source)), None)
            if peer is not None:
                self.cross.share([peer.slot], [row.slot])
                row.source = None
                self.encoded[row] = self.encoded.get(peer, self.guard.visits)
        for row in encoded:
            self.encoded.setdefault(row, self.guard.visits)


def _alike(row: LiveRow, other: LiveRow, source: InputRow | None = None) -> bool:
    """Whether what a row has to encode is the source of another: the same tensor or list, or equal ids."""
    own, source = row.source, other.source if source is None else source
    if own is None or source is None or row.request.probe is not None or other.request.probe is not None:
        return False
    return own is source or (isinstance(own, Sequence) and isinstance(source, Sequence) and own == source)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of first ids that two rows share."""
    least, most = 0, min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    while most - least > 1:  # a[:least] == b[:least] and a[:most] != b[:most]
        middle = (least + most) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle
    return least


def share_a_beginning(prompts: Iterable[Iterable[int]]) -> bool:
    """Whether some of these prompts begin alike, so that a row can take over what another computed."""
    ordered = sorted(map(list, prompts))
    return any(common(a, b) >= LEAST for a, b in pairwise(ordered))
