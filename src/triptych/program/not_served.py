"""`NotServed`, for what an executor does not serve, and the checks of programs and calls that all of them share.

The native executor's own refusals are in `native_plan.py` (of a program), `native_executor.py` (of a call) and, for
reads and edits, `Plan.why_modules` of `probe/reads_and_edits.py`.
"""

from collections.abc import Sequence

from triptych.attention import CrossCache, Rows
from triptych.errors import ConfigError
from .program import Program


class NotServed(ConfigError):
    """A program, or a call of it, has something that an executor does not serve; the message says what."""


def check_rows(ids: Sequence[int], rows: Rows, vocab: int, limit: int | None, cross: CrossCache | None = None) -> None:
    """What must hold before an executor writes anything: `ids` (all, or the smallest and the largest) are below
    `vocab`, rows end by `limit`, and their sources are projected.  Raises NotServed."""
    if limit is not None and rows.end > limit:
        raise NotServed("a row is longer than the model's context")
    if min(ids) < 0 or max(ids) >= vocab:
        raise NotServed("an id lies outside the vocabulary")
    if rows.documents is not None:
        raise NotServed("rows of several documents")
    if cross is not None and (cross.pending is not None or any(slot not in cross.lengths for slot in rows.slots)):
        raise NotServed("the source is not projected yet")


def check_lowered(program: Program) -> None:
    """Raises NotServed where a block of the program runs as a module."""
    if program.unlowered:
        name, reason = next(iter(program.unlowered.items()))
        raise NotServed(f"{name} runs as a module: {reason}")
