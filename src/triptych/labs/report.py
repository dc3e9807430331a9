"""What is made of findings: attempts that survive a failure, picture files, and one offline page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from triptych import page
from triptych.errors import TriptychError
from triptych.labs import LABS, run
from triptych.labs.lab import Finding, Setup


@dataclass(frozen=True, eq=False)
class Outcome:
    """One lab that was run: what it found, or the line that says why it could not; `seconds` by the clock."""

    name: str
    seconds: float
    finding: Finding | None = None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.finding is not None and self.finding.passed

    @property
    def verdict(self) -> str:
        """One line, beginning with PASS or FAIL."""
        return self.finding.verdict if self.finding is not None else f"FAIL: {self.error}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        told = {"name": self.name, "seconds": round(self.seconds, 3), "passed": self.passed, "verdict": self.verdict}
        return told | ({"error": self.error} if self.finding is None else self.finding.to_dict())


def timed(name: str, setup: Setup) -> Outcome:
    """Run one lab.  Raises what the lab raises."""
    began = time.perf_counter()
    finding = run(name, setup)
    return Outcome(name, time.perf_counter() - began, finding)


def attempts(names: Sequence[str], setup: Setup) -> Iterator[Outcome]:
    """Run labs one after the other; one that raises has failed, and the next goes on."""
    for name in names:
        began = time.perf_counter()
        setup.say(name)
        try:
            yield timed(name, replace(setup, say=partial(_say_of, name, setup.say)))
        except Exception as error:  # of whatever kind: minutes of the others' work are not to be lost
            yield Outcome(name, time.perf_counter() - began, error=_line(error))


def _line(error: Exception) -> str:
    """Ours say what was wrong; of another the kind tells more than its text, which may be empty."""
    if isinstance(error, TriptychError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    return f"unexpected {type(error).__name__}: {first or 'no message'}"


def _say_of(name: str, say: Callable[[str], None], what: str) -> None:
    say(f"{name}: {what}")


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """The plots of a lab as NAME.png, NAME-2.png ... in `folder`, which is made.  -> where they are.

    Raises InputError where matplotlib is not installed.
    """
    from triptych.page.plot import png

    found = outcome.finding.sections if outcome.finding is not None else ()
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    for section in found:
        if isinstance(section, page.Curve | page.AttentionSection):
            drawn.append(folder / (f"{outcome.name}-{len(drawn) + 1}.png" if drawn else f"{outcome.name}.png"))
            png(drawn[-1], section)
    return drawn


def write(path: Path, outcomes: Sequence[Outcome], made_with: str) -> None:
    """One page: the sections of a single lab, or a chapter for each of several under a list of contents.

    `made_with` says how the numbers came about, such as the seed and the version.  Raises TriptychError where the
    file cannot be written.
    """
    if len(outcomes) == 1:
        [only] = outcomes
        question = only.finding.question if only.finding is not None else LABS[only.name]
        subtitle = f"Triptych lab {only.name}: {LABS[only.name]}. {made_with}"
        page.write(path, page.render(question, _sections(only, "What came of it"), subtitle=subtitle))
        return
    chapters = [page.Chapter(one.name, LABS[one.name], one.passed, _sections(one)) for one in outcomes]
    page.write(path, page.render("The lectures, running", chapters, subtitle=f"{summary(outcomes)}. {made_with}"))


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many passed, in what time, and which did not."""
    failed = [one.name for one in outcomes if not one.passed]
    seconds = sum(one.seconds for one in outcomes)
    told = f"{len(outcomes) - len(failed)} of {len(outcomes)} labs pass, in {clock(seconds)}"
    return f"{told}; failed: {', '.join(failed)}" if failed else told


def _sections(outcome: Outcome, title: str = "") -> list[page.Section]:
    """The verdict under `title`, or under the question it answers, then what it rests on."""
    finding = outcome.finding
    if finding is None:
        return [page.VerdictSection("What happened", False, outcome.error, [])]
    criteria = [page.Criterion(c.passed, c.claim, c.shown, c.criterion) for c in finding.checks]
    return [
        page.VerdictSection(title or finding.question, finding.passed, finding.meaning, criteria),
        *finding.sections,
    ]


def clock(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"
