"""One lab over several seeds: each is a run of its own, and the result has the spread of every criterion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from triptych.page import TableSection
from triptych_lectures.labs.kept import KeptResults, SeedRun
from triptych_lectures.labs.lab import Check, LabResult, Setup, number
from triptych_lectures.labs.report import LabRun, prefixed, timed


@dataclass(frozen=True)
class SpreadCheck(Check):
    """One criterion over several seeds: `measured` is the median of `values`, NaN where one of them is; `bounds` are
    the bounds in words, and `held` is how many seeds lie within theirs."""

    values: tuple[float, ...] = ()
    held: int = 0
    bounds: str = ""

    @property
    def passed(self) -> bool:
        return self.held == len(self.values) > 0

    @property
    def criterion(self) -> str:
        return self.bounds

    @property
    def shown(self) -> str:
        """The median, and the smallest and largest value where they differ."""
        middle, least, most = (number(x) for x in (self.measured, self.smallest, self.largest))
        return middle if least == middle == most else f"{middle} ({least} to {most})"

    @property
    def word(self) -> str:
        return f"{self.held} of {len(self.values)}"

    @property
    def smallest(self) -> float:
        return min(_numbers(self.values), default=math.nan)

    @property
    def largest(self) -> float:
        return max(_numbers(self.values), default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        spread = {"smallest": self.smallest, "largest": self.largest}
        finite = {name: x if math.isfinite(x) else None for name, x in spread.items()}
        values = [x if math.isfinite(x) else None for x in self.values]
        return {**super().to_dict(), "criterion": self.bounds, **finite, "values": values, "held": self.held}


@dataclass(frozen=True, eq=False)
class SeedsResult(LabResult):
    """The result of a lab over several seeds; its meaning and sections are those of the first."""

    runs: tuple[SeedRun, ...] = field(default=(), repr=False)

    @property
    def held(self) -> int:
        """How many seeds pass."""
        return sum(run.result.passed for run in self.runs)

    @property
    def passed(self) -> bool:
        return self.held == len(self.runs) > 0

    @property
    def verdict(self) -> str:
        failed = [f"{c.claim}: {c.shown}, {c.criterion} in {c.word}" for c in self.spread if not c.passed]
        head = f"{'PASS' if self.passed else 'FAIL'}: {self.held} of {len(self.runs)} seeds pass"
        return "; ".join([head, *failed])

    @property
    def spread(self) -> tuple[SpreadCheck, ...]:
        return tuple(check for check in self.checks if isinstance(check, SpreadCheck))

    def to_dict(self) -> dict[str, Any]:
        seeds = [
            {"seed": run.seed, "passed": run.result.passed, "seconds": round(run.seconds, 3), "kept": run.kept}
            for run in self.runs
        ]
        return super().to_dict() | {"seeds": seeds}


def over_seeds(name: str, setup: Setup, *, count: int, kept: KeptResults) -> LabRun:
    """Run a lab with `count` seeds from `setup.seed` on.  A seed that is kept does not run again; the others are kept
    as soon as they are finished.  Raises what the lab raises."""
    runs = []
    for place in range(count):
        seed = setup.seed + place
        progress = partial(prefixed, f"seed {seed}, {place + 1} of {count}", setup.progress)
        runs.append(_one(name, replace(setup, seed=seed, progress=progress), kept))
    return LabRun(name, sum(run.seconds for run in runs), combined(runs))


def _one(name: str, setup: Setup, kept: KeptResults) -> SeedRun:
    old = kept.read(name, setup)
    if old is not None:
        setup.progress(f"kept in {kept.path(name, setup)}")
        return old
    run = timed(name, setup)
    assert run.result is not None
    new = SeedRun(setup.seed, run.seconds, run.result)
    kept.write(name, setup, new)
    return new


def combined(runs: Sequence[SeedRun]) -> SeedsResult:
    """The spread of each criterion over the seeds, a table of all values, and the sections of the first seed."""
    first = runs[0]
    checks = tuple(_spread(checks) for checks in _by_criterion(runs))
    header = ("criterion", *(f"seed {run.seed}" for run in runs))
    rows = [[c.claim, *map(number, c.values)] for c in checks if len(c.values) == len(runs)]
    table = TableSection("What each seed measured", header, rows)
    meaning = f"Of seed {first.seed}: {first.result.meaning}" if len(runs) > 1 else first.result.meaning
    return SeedsResult(first.result.question, meaning, checks, (table, *first.result.sections), tuple(runs))


def _by_criterion(runs: Sequence[SeedRun]) -> list[list[Check]]:
    """The same criterion of every seed.  Where seeds have different numbers of criteria, the same claim."""
    lists = [run.result.checks for run in runs]
    if len({len(checks) for checks in lists}) == 1:
        return [list(checks) for checks in zip(*lists, strict=True)]
    groups: dict[str, list[Check]] = {}
    for checks in lists:
        for check in checks:
            groups.setdefault(check.claim, []).append(check)
    return list(groups.values())


def _spread(checks: Sequence[Check]) -> SpreadCheck:
    values = tuple(check.measured for check in checks)
    middle = math.nan if any(map(math.isnan, values)) else median(values)
    return SpreadCheck(
        claim=_common([check.claim for check in checks]),
        measured=middle,
        least=checks[0].least,
        most=checks[0].most,
        values=values,
        held=sum(check.passed for check in checks),
        bounds=_common([check.criterion for check in checks]),
    )


def _common(texts: Sequence[str]) -> str:
    """Texts of several seeds as one: a word that is not the same in all of them becomes "…"."""
    rows = [text.split() for text in texts]
    if len({len(row) for row in rows}) > 1:
        return f"{texts[0]} (other seeds: {'; '.join(dict.fromkeys(text for text in texts if text != texts[0]))})"
    return " ".join(words[0] if len(set(words)) == 1 else "…" for words in zip(*rows, strict=True))


def _numbers(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]
