"""The types of a lab: its settings, its criteria with what was measured, and its result.

Each lab is one file beside this one, with one function `run(setup) -> LabResult`.  It runs the library's own parts -
`attend`, the modules, the training loop - so that breaking one of them makes its lab FAIL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych.page import Section


def _no_progress(text: str) -> None:
    """The default of `Setup.progress`: shows nothing."""


@dataclass(frozen=True)
class Setup:
    """Settings of a run.  `model` replaces the checkpoint a lab would use, `data` the text it would train on;
    `progress` is called with a line of text whenever a new part of the work begins."""

    seed: int = 0
    model: str | None = None
    data: str | None = None
    progress: Callable[[str], None] = _no_progress


@dataclass(frozen=True)
class Check:
    """One criterion: `claim` in words, the number measured for it, and the bounds it must lie in.

    A bound of None is open.  A measured NaN fails every criterion.
    """

    claim: str
    measured: float
    least: float | None = None
    most: float | None = None

    @property
    def passed(self) -> bool:
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        return least <= self.measured <= most

    @property
    def criterion(self) -> str:
        """The bounds in words."""
        if self.least is None:
            return "anything" if self.most is None else f"at most {number(self.most)}"
        if self.most is None:
            return f"at least {number(self.least)}"
        if self.least == self.most:
            return f"exactly {number(self.least)}"
        return f"{number(self.least)} to {number(self.most)}"

    @property
    def shown(self) -> str:
        """The measured number as it is printed."""
        return number(self.measured)


def number(x: float) -> str:
    """Integers in full, other numbers to four significant digits."""
    return f"{x:,.0f}" if float(x).is_integer() and abs(x) < 1e15 else f"{x:.4g}"


@dataclass(frozen=True, eq=False)
class LabResult:
    """The result of a lab.  `sections` are its tables, curves and maps in reading order; `meaning` says in a few
    sentences what the numbers show."""

    question: str
    meaning: str
    checks: tuple[Check, ...]
    sections: tuple[Section, ...] = field(repr=False)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line: PASS or FAIL, then the failed criteria, or all of them where none failed."""
        deciding = [check for check in self.checks if not check.passed] or list(self.checks)
        reasons = "; ".join(f"{check.claim}: {check.shown} ({check.criterion})" for check in deciding)
        return f"{'PASS' if self.passed else 'FAIL'}: {reasons}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON.  JSON has no NaN and no infinity: a measurement of those is None."""
        checks = [
            {
                "claim": c.claim,
                "measured": c.measured if math.isfinite(c.measured) else None,
                "least": c.least,
                "most": c.most,
                "passed": c.passed,
            }
            for c in self.checks
        ]
        sections = [{"kind": section.kind, "title": section.title, **section.data()} for section in self.sections]
        return {"passed": self.passed, "question": self.question, "meaning": self.meaning} | {
            "checks": checks,
            "sections": sections,
        }
