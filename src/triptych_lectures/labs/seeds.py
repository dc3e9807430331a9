"""One lab over several seeds: each is a run of its own, and the result has the spread of every criterion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from triptych.page import TableSection
from .kept_results import KeptResults, SeedRun
from .lab import Check, Checks, Clause, Conclusion, LabResult, Setup, finite, number, rate_interval
from .report import LabRun, timed


@dataclass(frozen=True)
class SpreadCheck(Check):
    """One criterion over several seeds, and its check in each; `measured` is the median, NaN where one is NaN."""

    of_seeds: Checks = ()

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(check.measured for check in self.of_seeds)

    @property
    def held(self) -> int:
        """How many seeds lie within their bounds."""
        return sum(check.passed for check in self.of_seeds)

    @property
    def passed(self) -> bool:
        return self.held == len(self.of_seeds) > 0

    @property
    def criterion(self) -> str:
        return _common([check.criterion for check in self.of_seeds])

    @property
    def shown(self) -> str:
        """The median, and the smallest and largest value where they differ."""
        middle, least, most = map(number, (self.measured, *self.extremes))
        return middle if least == middle == most else f"{middle} ({least} to {most})"

    @property
    def word(self) -> str:
        return f"{self.held} of {len(self.of_seeds)}"

    @property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        numbers = [value for value in self.values if not math.isnan(value)]
        return min(numbers, default=math.nan), max(numbers, default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        smallest, largest, *values = map(finite, (*self.extremes, *self.values))
        spread = {"criterion": self.criterion, "smallest": smallest, "largest": largest}
        return super().to_dict() | spread | {"values": values, "held": self.held}


@dataclass(frozen=True)
class SeedsClause(Clause):
    """One statement over several seeds, which are `seeds`, as each of them has it."""

    seeds: tuple[int, ...] = ()
    of_seeds: Conclusion = ()

    @property
    def spread(self) -> tuple[SpreadCheck, ...]:
        """Its criteria over the seeds."""
        return tuple(check for check in self.checks if isinstance(check, SpreadCheck))

    @property
    def held_in(self) -> int:
        """How many seeds it holds in."""
        return sum(clause.held for clause in self.of_seeds)

    @property
    def held(self) -> bool:
        return self.held_in == len(self.of_seeds) > 0

    @property
    def text(self) -> str:
        """The statement of the first seed; where it does not hold in all seeds its rate, and one seed of each kind."""
        first, count = self.of_seeds[0], len(self.of_seeds)
        if self.held:
            return first.text
        low, high = rate_interval(self.held_in, count)
        shown = [f"In {self.held_in} of {count} seeds (95% interval of the rate: {low:.2f} to {high:.2f}) this held."]
        for wanted in (True, False):
            seen = [(seed, one) for seed, one in zip(self.seeds, self.of_seeds, strict=True) if one.held is wanted]
            shown += [f"Seed {seed}: {one.text}" for seed, one in seen[:1]]
        return " ".join(shown)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"held_in": self.held_in}


@dataclass(frozen=True, eq=False)
class SeedsResult(LabResult):
    """The result of a lab over several seeds; the figures of its statements and its sections are those of the first."""

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
    runs: list[SeedRun] = []
    for seed in range(setup.seed, setup.seed + count):
        own = replace(setup, seed=seed).within(f"seed {seed}, {len(runs) + 1} of {count}")
        run = kept.read(name, own)
        if run is not None:
            own.progress(f"kept in {kept.path(name, own)}")
        else:
            new = timed(name, own)
            assert new.result is not None
            run = SeedRun(seed, new.seconds, new.result)
            kept.write(name, own, run)
        runs.append(run)
    return LabRun(name, sum(run.seconds for run in runs), combined(runs))


def combined(runs: Sequence[SeedRun]) -> SeedsResult:
    """The spread of each criterion over the seeds, a table of all values, and the sections of the first seed.

    Raises ValueError where the seeds have different numbers of statements.
    """
    first = runs[0].result
    seeds = tuple(run.seed for run in runs)
    conclusion = tuple(
        SeedsClause(of_seeds[0].statement, _spreads(of_seeds), seeds=seeds, of_seeds=of_seeds)
        for of_seeds in zip(*(run.result.conclusion for run in runs), strict=True)
    )
    of_first = f"The figures in these sentences are of seed {seeds[0]}. " if len(runs) > 1 else ""
    rows = [[c.claim, *map(number, c.values)] for one in conclusion for c in one.spread if len(c.values) == len(runs)]
    table = TableSection("What each seed measured", ("criterion", *(f"seed {seed}" for seed in seeds)), rows)
    return SeedsResult(
        first.question, conclusion, (table, *first.sections), (of_first + first.remarks).strip(), tuple(runs)
    )


def _spreads(clauses: Conclusion) -> tuple[SpreadCheck, ...]:
    """The same criterion of every seed.  Where seeds have different numbers of criteria, the same claim."""
    lists = [clause.checks for clause in clauses]
    if len({len(checks) for checks in lists}) == 1:
        return tuple(map(_spread, zip(*lists, strict=True)))
    groups: dict[str, list[Check]] = {}
    for checks in lists:
        for check in checks:
            groups.setdefault(check.claim, []).append(check)
    return tuple(map(_spread, groups.values()))


def _spread(checks: Sequence[Check]) -> SpreadCheck:
    values = [check.measured for check in checks]
    middle = math.nan if any(map(math.isnan, values)) else median(values)
    claim = _common([check.claim for check in checks])
    return SpreadCheck(claim, middle, checks[0].least, checks[0].most, tuple(checks))


def _common(texts: Sequence[str]) -> str:
    """Texts of several seeds as one: a word that is not the same in all of them becomes "…"."""
    rows = [text.split() for text in texts]
    if len({len(row) for row in rows}) > 1:
        return f"{texts[0]} (other seeds: {'; '.join(dict.fromkeys(text for text in texts if text != texts[0]))})"
    return " ".join(words[0] if len(set(words)) == 1 else "…" for words in zip(*rows, strict=True))
