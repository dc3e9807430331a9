"""What an experiment is: a question, what was measured, and a verdict with the criterion that decided it.

Each lab is one file beside this one, with one function `run(setup) -> Finding`.  It runs the library's own parts -
`attend`, the modules, the training loop - so that breaking one of them turns its lab to FAIL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych.page import Section


@dataclass(frozen=True)
class Setup:
    """What a lab is run with.  `model` replaces the checkpoint it would use, `data` the text it would train on;
    `say` is told what is being done, for whoever waits."""

    seed: int = 0
    model: str | None = None
    data: str | None = None
    say: Callable[[str], None] = lambda what: None


@dataclass(frozen=True)
class Check:
    """One criterion: `claim` in words, the number measured for it, and the bounds it must lie in.

    A bound that is None is open.  A measured NaN lies in no bounds.
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
        """What was measured, as a person reads it."""
        return number(self.measured)


def number(x: float) -> str:
    """Whole numbers whole, others to four digits."""
    return f"{x:,.0f}" if float(x).is_integer() and abs(x) < 1e15 else f"{x:.4g}"


@dataclass(frozen=True, eq=False)
class Finding:
    """What came of a lab.  `sections` are tables, curves and maps in the order in which they are read; `meaning` says
    in a few sentences what the numbers show."""

    question: str
    meaning: str
    checks: tuple[Check, ...]
    sections: tuple[Section, ...] = field(repr=False)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line: PASS or FAIL, and the criteria that decided it - the failed ones where there are any."""
        deciding = [check for check in self.checks if not check.passed] or list(self.checks)
        said = "; ".join(f"{check.claim}: {check.shown} ({check.criterion})" for check in deciding)
        return f"{'PASS' if self.passed else 'FAIL'}: {said}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, which knows no NaN and no infinity: a measurement of those is None."""
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
        told = [{"kind": section.kind, "title": section.title, **section.data()} for section in self.sections]
        return {"passed": self.passed, "question": self.question, "meaning": self.meaning} | {
            "checks": checks,
            "sections": told,
        }
