"""The types of a lab: its sizes, its settings, its criteria with what was measured, and its result.

A lab is a subclass of `Lab` in a file beside this one.  It runs the library's own parts - `attend`, the modules, the
training loop - so that breaking one of them makes its lab FAIL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import le, lt
from statistics import fmean, stdev
from typing import Any, ClassVar, TypeVar, dataclass_transform

from triptych.arguments import checked_methods, integer
from triptych.errors import InputError, nearest, shown
from triptych.page import Section
from triptych.page.sections import section_data
from .texts import TEXTS

L = TypeVar("L", bound="Lab")
Ints = tuple[int, ...]
Sections = Iterable[Section]
Size = int | float | str | Ints | tuple[float, ...]


def _no_progress(text: str) -> None:
    """The default of `Setup.progress`: shows nothing."""


@dataclass(frozen=True)
class Limits:
    """What a value of `--set` must keep to beside its type; of a size with several values each of them must.

    most, below and multiple may be another size, by its name and with all its values.

    below       what each value must be less than.
    multiple    what each value must be a multiple of.
    values      how many values there must be at least.
    ascending   each value must be above the one before it.
    blank       whether a text may be empty.
    """

    least: float = -math.inf
    most: float | str = math.inf
    multiple: int | str | None = None
    below: str | None = None
    values: int = 1
    ascending: bool = False
    blank: bool = False

    def check(self, name: str, value: Size, sizes: Mapping[str, Size]) -> None:
        """Raise InputError, which names the size, for a value outside these limits; `sizes` are all of the lab."""
        if isinstance(value, str):
            if not (self.blank or value.strip()):
                raise InputError(f"size {name}: an empty text; give one with words")
            return
        several, shown = _several(value), shown_size(value)
        if len(several) < self.values:
            raise InputError(f"size {name}: {shown} is too few; give {self.values} values or more")
        if self.ascending and any(a >= b for a, b in pairwise(several)):
            raise InputError(f"size {name}: {shown} must be in ascending order, and all different")
        bounds: tuple[tuple[Any, str, Callable[[Any, Any], bool]], ...] = (
            (self.most, "at most", le), (self.below, "below", lt),
            (self.multiple, "a multiple of", lambda number, divisor: number % divisor == 0),
        )  # fmt: skip
        for number in several:
            if number < self.least:
                raise InputError(f"size {name}: {number} must be {self.least:,} or more")
            for bound, words, kept in bounds:
                named = f"{bound}, " if isinstance(bound, str) else ""
                for value in _several(sizes[bound] if named else bound):
                    if value is not None and not kept(number, value):
                        raise InputError(f"size {name}: {number} must be {words} {named}{value:,}")


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def size(default: Any, about: str, *, full: Size | None = None, **limits: Any) -> Any:
    """A field of a lab: its default, one line that says what it is, with its unit, its value in a full run where that
    is another, and its `Limits`."""
    return field(default=default, metadata={"about": about, "full": full, "limits": Limits(**limits)})


@checked_methods
@dataclass(frozen=True)
class Setup:
    """Settings of a run.  `model` replaces the checkpoint a lab would use, `data` the text it would train on; `sizes`
    replaces values of the lab's sizes by name; with `full`, the others are those of a full run.  `progress` is called
    with a line of text whenever a new part of the work begins."""

    seed: int = 0
    model: str | None = None
    data: str | None = None
    progress: Callable[[str], None] = _no_progress
    sizes: Mapping[str, Size] = field(default_factory=dict)
    full: bool = False

    def __post_init__(self) -> None:
        integer("seed", self.seed, 0)

    def within(self, task: str) -> Setup:
        """The same run, whose lines of progress begin with the name of this task."""
        return replace(self, progress=lambda text: self.progress(f"{task}: {text}"))


def _converted(base: object, name: str, value: Size) -> Any:
    """`value` in the type of the field `name` of `base`; a tuple's numbers are separated by commas.  Text is any; a
    number must be finite and above 0."""
    sizes = vars(base)
    if name not in sizes:
        raise InputError(f"this lab has no size {shown(name)}{nearest(str(name), sizes)}; it has: {', '.join(sizes)}")
    default, whole = sizes[name], shown_size(value)
    kind = type(_several(default)[0])
    if kind is str and not isinstance(value, str):
        raise InputError(f"size {name}: {shown(value)} is not of type str")
    numbers = []
    for text in whole.split(",") if isinstance(default, tuple) else [whole]:
        try:
            numbers.append(kind(text))
        except ValueError:
            raise InputError(f"size {name}: {text!r} is not of type {kind.__name__}; give it as 8 or 8,16") from None
        if kind is not str and not 0 < numbers[-1] < (math.inf if kind is float else 1e9):
            form = "finite" if kind is float else "an integer below 10**9"
            raise InputError(f"size {name}: {shown(text)} must be above 0 and {form}")
    return tuple(numbers) if isinstance(default, tuple) else numbers[0]


@dataclass(frozen=True)
class Check:
    """One criterion: `claim` in words, the number measured for it, and the bounds it must lie in.

    A bound of None is open; a criterion has one or two bounds.  A measured NaN fails every criterion.
    """

    claim: str
    measured: float
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        if self.least is None and self.most is None:
            raise ValueError(f"the criterion {self.claim!r} has no bound; show the number in a table instead")

    @property
    def passed(self) -> bool:
        above = self.least is None or self.measured >= self.least
        return bool(above and (self.most is None or self.measured <= self.most))  # of NumPy's numbers too

    @property
    def criterion(self) -> str:
        """The bounds in words."""
        least, most = ("" if bound is None else number(bound) for bound in (self.least, self.most))
        if least and most:
            return f"exactly {least}" if self.least == self.most else f"{least} to {most}"
        return f"at least {least}" if least else f"at most {most}"

    @property
    def shown(self) -> str:
        """The measured number as it is printed."""
        return number(self.measured)

    @property
    def word(self) -> str:
        """Whether it is met, as it is printed."""
        return "ok" if self.passed else "FAILED"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        bounds = {"least": self.least, "most": self.most}
        return {"claim": self.claim, "measured": finite(self.measured), **bounds, "passed": self.passed}

    @property
    def missed(self) -> str:
        """What was measured in place of what is asked for, as a part of a sentence."""
        return f"{self.claim} is {self.shown}, and the claim asks for {self.criterion}"


Checks = tuple[Check, ...]


@dataclass(frozen=True)
class Clause:
    """One statement of a conclusion, and the criteria that decide it.

    statement   what was found; it may be printed only where all of `checks` are met.
    instead     what is said where one is not met, before the numbers that show it.
    """

    statement: str
    checks: Checks
    instead: str = ""

    def __post_init__(self) -> None:
        if not self.checks:
            raise ValueError(f"no criterion decides {self.statement!r}; make it a remark of the result")

    @property
    def held(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def text(self) -> str:
        """The statement, or what was seen instead of it."""
        if self.held:
            return self.statement
        missed = "; ".join(check.missed for check in self.checks if not check.passed)
        return f"{self.instead.removesuffix('.') or 'Not so in this run'}: {missed}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"text": self.text, "held": self.held, "checks": [check.to_dict() for check in self.checks]}


Conclusion = tuple[Clause, ...]
Clauses = Iterable[Clause]
Findings = Iterator[Clause | Section]


def clause(statement: str, *checks: Check, instead: str = "") -> Clause:
    """The statement that all of `checks` decide; see `Clause`."""
    return Clause(statement, checks, instead)


def finite(x: float) -> float | None:
    """JSON has no NaN and no infinity: None stands for them."""
    return x if math.isfinite(x) else None


def number(x: float) -> str:
    """Integers in full, other numbers to four significant digits."""
    return f"{x:,.0f}" if float(x).is_integer() and abs(x) < 1e15 else f"{x:.4g}"


def ratio(a: float, b: float) -> float:
    """a / b; NaN, which fails every criterion, where b is 0."""
    return a / b if b else math.nan


def rate_interval(held: int, count: int) -> tuple[float, float]:
    """The 95% interval of a rate, from 0 to 1, of which `held` of `count` independent cases were seen (Wilson 1927)."""
    z = 1.959964
    rate, spread = held / count, z * z / count
    half = z * math.sqrt((rate * (1 - rate) + spread / 4) / count)
    return max(0.0, (rate + spread / 2 - half) / (1 + spread)), min(1.0, (rate + spread / 2 + half) / (1 + spread))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the mean of which `values`, two or more, are independent cases: Student's, whose quantile is
    approximated from the normal one (Abramowitz & Stegun 1964, 26.7.5; within 0.2% from 9 values on)."""
    z, free = 1.959964, len(values) - 1
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    half = quantile * stdev(values) / math.sqrt(len(values)) if free else math.nan
    return fmean(values) - half, fmean(values) + half


@dataclass(frozen=True, eq=False)
class LabResult:
    """The result of a lab.  `sections` are its tables, curves and maps in reading order; `conclusion` says what the
    numbers show, and `remarks` what holds whatever they are: the premises, and what the lab does not cover."""

    question: str
    conclusion: Conclusion
    sections: tuple[Section, ...] = field(repr=False)
    remarks: str = ""

    @property
    def checks(self) -> Checks:
        """All criteria, in the order of their clauses."""
        return tuple(check for clause in self.conclusion for check in clause.checks)

    @property
    def meaning(self) -> str:
        """The conclusion and the remarks as one text."""
        return " ".join([*(clause.text for clause in self.conclusion), *([self.remarks] if self.remarks else [])])

    @property
    def passed(self) -> bool:
        return bool(self.conclusion) and all(clause.held for clause in self.conclusion)

    @property
    def verdict(self) -> str:
        """One line: PASS or FAIL, then the failed criteria, or all of them where none failed."""
        deciding = [check for check in self.checks if not check.passed] or list(self.checks)
        reasons = "; ".join(f"{check.claim}: {check.shown} ({check.criterion})" for check in deciding)
        return f"{'PASS' if self.passed else 'FAIL'}: {reasons}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "passed": self.passed,
            "question": self.question,
            "conclusion": [clause.to_dict() for clause in self.conclusion],
            "remarks": self.remarks,
            "sections": [section_data(section) for section in self.sections],
        }


LAB_CLASSES: dict[str, type[Lab]] = {}  # those that are imported, by their names


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Lab:
    """A lab: its subclasses are frozen dataclasses whose fields, made by `size`, are its sizes.

    name          as on the command line.
    question      what it asks.
    remarks       those of its result, where they are the same for all sizes.
    falsified_by  what would have shown its claim false.
    seeds         how many seeds a recorded result has.
    full          the sizes of a full run that differ from the defaults.

    The three texts are those of `labs.toml`, where the class has none of its own.
    """

    name: ClassVar[str]
    question: ClassVar[str]
    remarks: ClassVar[str]
    falsified_by: ClassVar[str]
    seeds: ClassVar[int] = 10
    full: ClassVar[Mapping[str, Size]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        cls.full = {f.name: f.metadata["full"] for f in fields(cls) if f.metadata["full"] is not None}
        if "name" in vars(cls):
            LAB_CLASSES[cls.name] = cls
            for text in ("question", "remarks", "falsified_by"):
                if text not in vars(cls):
                    setattr(cls, text, TEXTS.get(cls.name, {}).get(text, ""))

    def run(self, setup: Setup) -> LabResult:
        """Measure, and compare with the criteria.  A lab whose remarks depend on its sizes has a `run` of its own."""
        findings = list(self.findings(setup))
        clauses = [one for one in findings if isinstance(one, Clause)]
        return self.result(clauses, [one for one in findings if not isinstance(one, Clause)])

    def findings(self, setup: Setup) -> Findings:
        """The clauses of the conclusion in their order, and the sections in theirs."""
        raise NotImplementedError

    def result(self, conclusion: Clauses, sections: Sections, remarks: str = "", *, small: bool = False) -> LabResult:
        """The result of a run; `remarks` are those of its sizes, where they depend on them, and where the run is a
        `small` one, what it leaves out is added."""
        less = [TEXTS[self.name]["small"]] if small else []
        remarks = " ".join([remarks or self.remarks, *less])
        return LabResult(self.question, tuple(conclusion), tuple(sections), remarks)

    @classmethod
    def sized(cls: type[L], setup: Setup) -> L:
        """The lab with the sizes of a run: the defaults, or those of a full run, with `setup.sizes` in place of the
        values of the same names.

        Raises InputError for a name that the lab does not have, with the nearest one, for a value of another type, for
        a number that is not above 0 and finite, for one outside the limits of its size, and for values that contradict
        each other.
        """
        base = cls(**cls.full) if setup.full else cls()
        sizes = vars(base) | {name: _converted(base, name, value) for name, value in setup.sizes.items()}
        for declared in fields(cls):
            declared.metadata["limits"].check(declared.name, sizes[declared.name], sizes)
        return cls(**sizes)


@dataclass(frozen=True)
class SizeRow:
    """One size of a lab: its default, its value in a full run and in this one, and what it is."""

    name: str
    default: Size
    full: Size
    value: Size
    about: str


def size_rows(kind: type[Lab], setup: Setup) -> list[SizeRow]:
    """The sizes of a lab in a run; it may have none.  Raises InputError for those that it cannot have."""
    if setup.sizes and not fields(kind):
        raise InputError(f"the lab {kind.name} has no sizes, so --set does not apply to it")
    default, full, own = (vars(kind.sized(one)) for one in (Setup(), Setup(full=True), setup))
    return [SizeRow(f.name, default[f.name], full[f.name], own[f.name], f.metadata["about"]) for f in fields(kind)]


def shown_size(value: Size) -> str:
    """A size as `--set` reads it: numbers of a tuple are separated by commas."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def shown_sizes(kind: type[Lab], setup: Setup) -> dict[str, str]:
    """The sizes of a run by name.  Raises InputError for those that the lab cannot have."""
    return {row.name: shown_size(row.value) for row in size_rows(kind, setup)}
