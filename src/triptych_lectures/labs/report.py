"""Running labs one after the other, and writing what they gave: plots as PNG files, results as one offline page."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triptych import page
from triptych.errors import MissingExecutableError, TriptychError
from . import LABS, run
from .lab import Check, LabResult, Setup


@dataclass(frozen=True, eq=False)
class LabRun:
    """One run of a lab: its result, or the error that ended it; `seconds` of wall time; the files of its plots.
    `skipped` where a program that it needs is not installed, so that nothing was measured."""

    name: str
    seconds: float
    result: LabResult | None = None
    error: str = ""
    skipped: bool = False
    plots: Sequence[Path] = ()

    @property
    def failed(self) -> bool:
        """It was not skipped, and did not pass."""
        return not (self.passed or self.skipped)

    @property
    def passed(self) -> bool:
        return self.result is not None and self.result.passed

    @property
    def verdict(self) -> str:
        """One line, beginning with PASS, FAIL or SKIP."""
        if self.result is not None:
            return self.result.verdict
        return f"{'SKIP' if self.skipped else 'FAIL'}: {self.error}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        head = {"name": self.name, "seconds": round(self.seconds, 3), "passed": self.passed, "skipped": self.skipped}
        head["verdict"] = self.verdict
        result = {"error": self.error} if self.result is None else self.result.to_dict()
        return head | result | {"plots": list(map(str, self.plots))}


def timed(name: str, setup: Setup) -> LabRun:
    """Run one lab.  Raises what the lab raises."""
    start = time.perf_counter()
    result = run(name, setup)
    return LabRun(name, time.perf_counter() - start, result)


def attempt(name: str, setup: Setup, run_one: Callable[[str, Setup], LabRun]) -> LabRun:
    """Run one of several labs by `run_one`.  One that raises has failed, or is skipped where a program that it needs is
    not installed."""
    start = time.perf_counter()
    setup.progress(name)
    try:
        return run_one(name, setup.within(name))
    except Exception as error:  # any kind: one lab's bug must not lose the results of the others
        skipped = isinstance(error, MissingExecutableError)
        return LabRun(name, time.perf_counter() - start, error=_line(error), skipped=skipped)


def _line(error: Exception) -> str:
    """The message of a TriptychError; of any other error its type too, since its message may be empty."""
    if isinstance(error, TriptychError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    return f"unexpected {type(error).__name__}: {first or 'no message'}"


def draw(run: LabRun, folder: Path, command: str) -> LabRun:
    """Write the plots of a lab as NAME.png, NAME-2.png ... into `folder`, which is created, and as SVG with the command
    that makes them.  -> the run with its files.

    Raises InputError where matplotlib is not installed.
    """
    from triptych.page.plot import png, svg

    folder.mkdir(parents=True, exist_ok=True)
    sections = run.result.sections if run.result is not None else ()
    shown = [section for section in sections if isinstance(section, page.Curve | page.AttentionSection)]
    plots = [folder / f"{run.name}{f'-{number}' if number > 1 else ''}.png" for number in range(1, len(shown) + 1)]
    vectors = [plot.with_suffix(".svg") for plot in plots]
    for plot, vector, section in zip(plots, vectors, shown, strict=True):
        png(plot, section)
        svg(vector, section, command)
    return replace(run, plots=[*plots, *vectors])


def write(path: Path, runs: Sequence[LabRun], settings: str) -> None:
    """One page: the sections of a single lab, or a chapter for each of several under a list of contents.

    `settings` is printed under the title, such as the seed and the version.  Raises TriptychError where the file
    cannot be written.
    """
    if len(runs) == 1:
        [only] = runs
        question = only.result.question if only.result is not None else LABS[only.name]
        subtitle = f"Triptych lab {only.name}: {LABS[only.name]}. {settings}"
        page.write(path, page.render(question, _sections(only, "Result"), subtitle=subtitle))
        return
    chapters = [
        page.Chapter(one.name, LABS[one.name], None if one.skipped else one.passed, _sections(one)) for one in runs
    ]
    page.write(path, page.render("The lectures, running", chapters, subtitle=f"{summary(runs)}. {settings}"))


def summary(runs: Sequence[LabRun]) -> str:
    """How many labs passed of those that ran, in what time, and which failed and were skipped."""
    failed = [one.name for one in runs if one.failed]
    skipped = [one.name for one in runs if one.skipped]
    ran = len(runs) - len(skipped)
    parts = [f"{ran - len(failed)} of {ran} labs pass, in {clock(sum(one.seconds for one in runs))}"]
    parts += [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"{len(skipped)} skipped: {', '.join(skipped)}"] if skipped else []
    return "; ".join(parts)


def _sections(run: LabRun, title: str = "") -> list[page.Section]:
    """The verdict under `title`, or under the lab's question, then the lab's own sections."""
    result = run.result
    if result is None:
        return [page.Prose("Skipped", run.error) if run.skipped else page.VerdictSection("Error", False, [], run.error)]
    statements = [page.Statement(clause.text, [*map(_criterion, clause.checks)]) for clause in result.conclusion]
    verdict = page.VerdictSection(title or result.question, result.passed, statements, result.remarks)
    return [verdict, *result.sections]


def _criterion(check: Check) -> page.Criterion:
    return page.Criterion(check.passed, check.claim, check.shown, check.criterion)


def clock(seconds: float) -> str:
    """`12.3 s`, or `2 min 05 s` from a minute on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"
