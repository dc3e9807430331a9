"""What `triptych lab` shows: a bar while labs run, their tables and criteria, and the verdict as the last line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych import __version__
from triptych.cli import screen
from triptych.cli.labbing import ALL
from triptych.labs import LABS, known

if TYPE_CHECKING:
    from triptych import page
    from triptych.labs.report import LabRun


def run(name: str, *, out: Path, report: Path | None, seed: int, as_json: bool, **given: Any) -> bool:
    """Run one lab, or all; -> whether every one passed."""
    names = list(LABS) if name == ALL else [known(name)]
    draws = importlib.util.find_spec("matplotlib") is not None
    for folder in ([out] if draws else []) + ([report.parent] if report is not None else []):
        folder.mkdir(parents=True, exist_ok=True)  # now: minutes of work are not to end at a folder that cannot be

    outcomes: list[LabRun] = []
    plots: dict[str, list[Path]] = {}
    with _progress(len(names)) as (say, done):
        say("loading torch")
        from triptych import machine
        from triptych.labs import report as reporting
        from triptych.labs.lab import Setup

        machine.use_threads()
        setup = Setup(seed=seed, progress=say, **given)
        for outcome in reporting.attempts(names, setup) if name == ALL else [reporting.timed(name, setup)]:
            outcomes.append(outcome)
            plots[outcome.name] = reporting.draw(outcome, out) if draws else []
            done(outcome)

    if report is not None:
        reporting.write(report, outcomes, f"Seed {seed}, triptych {__version__}.")
    if as_json:
        told = [outcome.to_dict() | {"plots": list(map(str, plots[outcome.name]))} for outcome in outcomes]
        screen.result(told if name == ALL else told[0])
    elif name == ALL:
        _all(outcomes, report)
    else:
        _one(outcomes[0], plots[name], report)
    if not draws:
        screen.note("no plots were drawn: that needs matplotlib; run: pip install 'triptych[plot]'")
    return all(outcome.passed for outcome in outcomes)


@contextmanager
def _progress(labs: int) -> Iterator[tuple[Callable[[str], None], Callable[[LabRun], None]]]:
    """(say what is being done, say that a lab is done).  Several labs share a bar, and leave a line each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    notes = screen.console(notes=True)
    counted = (MofNCompleteColumn(),) if labs > 1 else ()
    columns = (TextColumn("{task.description}"), BarColumn(24), *counted, TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=labs if labs > 1 else None)

        def say(what: str) -> None:
            bar.update(task, description=what)
            if not notes.is_terminal:
                screen.note(what)

        def done(outcome: LabRun) -> None:
            bar.advance(task)
            if labs > 1:
                bar.console.print(
                    f"{'ok    ' if outcome.passed else 'FAILED'}  {outcome.name}  {outcome.seconds:.1f} s"
                )

        yield say, done


def _one(outcome: LabRun, plots: Sequence[Path], report: Path | None) -> None:
    finding = outcome.result
    assert finding is not None
    out = screen.console()
    out.print(finding.question, style="bold", soft_wrap=True)
    out.print()
    for section in finding.sections:
        _section(section)
    out.print(finding.meaning, soft_wrap=False)
    out.print()
    criteria = screen.table("", "criterion", "measured", "must be", right=("measured",))
    for check in finding.checks:
        criteria.add_row("ok" if check.passed else "FAILED", check.claim, check.shown, check.criterion)
    out.print(criteria)
    files = [*(("plot", str(plot)) for plot in plots), *([("page", str(report))] if report is not None else [])]
    if files:
        out.print(screen.facts(files))
        out.print()
    out.print(outcome.verdict, style="bold green" if outcome.passed else "bold red", soft_wrap=True)


def _section(section: page.Section) -> None:
    """What a terminal can show of a section; curves and maps are in the plots."""
    from triptych import page

    match section:
        case page.Table():
            right = [name for name, numeric in zip(section.header, section.numeric, strict=True) if numeric]
            made = screen.table(*section.header, right=right)
            for row in section.rows:
                made.add_row(*map(screen.plain, row))
            screen.show(made, section.title)
        case page.Facts():
            screen.show(screen.facts([(name, screen.plain(value)) for name, value in section.rows]), section.title)
        case page.Samples():
            rows = [(sample.label, screen.plain(sample.text)) for sample in section.ordered]
            screen.show(screen.facts(rows), section.title)
        case page.Prose():
            screen.show(screen.facts([("", text) for _, text in section.blocks]), section.title)
        case _:
            return
    screen.console().print()


def _all(outcomes: Sequence[LabRun], report: Path | None) -> None:
    from triptych.labs.report import summary

    made = screen.table("lab", "", "seconds", "what decided", right=("seconds",))
    for one in outcomes:
        word, _, why = one.verdict.partition(": ")
        made.add_row(one.name, word, f"{one.seconds:.1f}", "" if one.passed else why)
    screen.show(made)
    if report is not None:
        screen.show(screen.facts([("page", str(report))]))
    passed = all(one.passed for one in outcomes)
    said = f"{'PASS' if passed else 'FAIL'}: {summary(outcomes)}"
    screen.console().print(said, style="bold green" if passed else "bold red", soft_wrap=True)
