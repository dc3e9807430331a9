"""How the budget of ids of the next step is shared among its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triptych.generate.prefixes import Prefixes
from triptych.generate.request import LiveRow
from triptych.generate.step_runner import StepRunner


def shares(
    rows: Sequence[LiveRow], runner: StepRunner, prefixes: Prefixes | None, *, chunk: int, budget: int
) -> dict[LiveRow, int]:
    """How many ids each row runs in the next step, of about `budget`; rows that wait are left out.

    Rows that decode come first, then the oldest prompts, of each at most `chunk` ids.
    """
    running: dict[LiveRow, int] = {}
    reading: list[LiveRow] = []
    left = budget
    for row in rows:
        if len(row.ids) - row.cached == 1 and row.source is None:
            running[row] = 1
            left -= 1 + len(row.draft)
        else:
            reading.append(row)
    for row in reading:
        if left <= 0 and running:
            break
        if not row.cached and prefixes is not None and not prefixes.fill(row, rows):
            continue
        rest = len(row.ids) - row.cached
        most = min(rest, chunk, max(left, 1))
        running[row] = most if runner.in_pieces else rest
        left -= running[row] + (0 if row.source is None else runner.module.length(row.source))
    return running


def parts(members: Sequence[LiveRow], running: Mapping[LiveRow, int], runner: StepRunner) -> list[list[LiveRow]]:
    """The rows of one group that run now; rows that decode and rows that read prompts run apart where padding would
    copy rings: with a sliding-window cache, modules would copy every ring and pad it to the longest piece."""
    now = [row for row in members if row in running]
    if not runner.pads:
        return [now] if now else []
    apart = [row for row in now if running[row] == 1], [row for row in now if running[row] > 1]
    return [part for part in apart if part]
