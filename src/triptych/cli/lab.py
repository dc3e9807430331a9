"""`triptych lab`: run the experiments of the lectures and show their tables, criteria and verdicts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Exit, Option

from triptych import __version__
from triptych.cli import options, screen

if TYPE_CHECKING:
    from triptych import page
    from triptych.labs.report import LabRun

ALL, SHAKESPEARE = "all", "shakespeare"
PAGE = (".html", ".htm")


def lab(
    name: Annotated[
        str | None,
        Argument(metavar="[NAME]", help="Name of a lab, or all; without it, list the labs.", show_default=False),
    ] = None,
    out: Annotated[Path, Option("--out", metavar="DIR", parser=options.path, help="Directory for the plots.")] = Path(
        "runs/labs"
    ),
    report: Annotated[
        Path | None,
        Option("--report", metavar="FILE", help="Write the results to an offline .html page.", show_default=False),
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the random numbers.")] = 0,
    model: Annotated[
        str | None,
        Option("--model", metavar="MODEL", help="Model to use instead of the lab's own.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        Option("--data", metavar="FILE", help="Text to train on instead of the lab's own.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Run an experiment of the lectures: tables, a plot and a verdict; exit 1 if a criterion fails."""
    if name is None:
        need_name = {"--report": report, "--model": model, "--data": data}
        if alone := [option for option, value in need_name.items() if value is not None]:
            raise BadParameter(f"{alone[0]} needs the NAME of a lab, or {ALL}")
        _list(as_json=as_json)
        return
    if report is not None:
        screen.check_suffix(report, PAGE, "--report")
    if data is not None and data != SHAKESPEARE and not Path(data).exists():
        raise BadParameter(f"--data {data}: no such file; give a UTF-8 text file, or {SHAKESPEARE}")
    if not _run(name, out=out, report=report, seed=seed, model=model, data=data, as_json=as_json):
        raise Exit(1)


def _list(*, as_json: bool) -> None:
    from triptych.labs import LABS

    if as_json:
        screen.result([{"name": name, "about": about} for name, about in LABS.items()])
        return
    table = screen.table("lab", "what it shows")
    for name, about in LABS.items():
        table.add_row(name, about)
    screen.show(table)
    screen.note(f"run one with: triptych lab NAME; all with: triptych lab {ALL} --report labs.html")


def _run(
    name: str, *, out: Path, report: Path | None, seed: int, model: str | None, data: str | None, as_json: bool
) -> bool:
    """Run one lab, or all -> whether every one passed."""
    from triptych.labs import LABS, check_inputs, known

    names = list(LABS) if name == ALL else [known(name)]
    if name != ALL:
        check_inputs(name, model=model, data=data)
    draws = importlib.util.find_spec("matplotlib") is not None
    for folder in ([out] if draws else []) + ([report.parent] if report is not None else []):
        folder.mkdir(parents=True, exist_ok=True)  # fails before minutes of work, not after

    outcomes: list[LabRun] = []
    plots: dict[str, list[Path]] = {}
    with _progress(len(names)) as (say, done):
        say("loading torch")
        from triptych import machine
        from triptych.labs import report as reporting
        from triptych.labs.lab import Setup

        machine.use_threads()
        setup = Setup(seed=seed, progress=say, model=model, data=data)
        for outcome in reporting.attempts(names, setup) if name == ALL else [reporting.timed(name, setup)]:
            outcomes.append(outcome)
            plots[outcome.name] = reporting.draw(outcome, out) if draws else []
            done(outcome)

    if report is not None:
        reporting.write(report, outcomes, f"Seed {seed}, triptych {__version__}.")
    if as_json:
        results = [outcome.to_dict() | {"plots": list(map(str, plots[outcome.name]))} for outcome in outcomes]
        screen.result(results if name == ALL else results[0])
    elif name == ALL:
        _show_all(outcomes, report)
    else:
        _show_one(outcomes[0], plots[name], report)
    if not draws:
        screen.note("plots need matplotlib, which is not installed; run: pip install 'triptych[plot]'")
    return all(outcome.passed for outcome in outcomes)


@contextmanager
def _progress(labs: int) -> Iterator[tuple[Callable[[str], None], Callable[[LabRun], None]]]:
    """A progress bar -> (a function that names the current task, one that reports a finished lab)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    notes = screen.console(notes=True)
    counted = (MofNCompleteColumn(),) if labs > 1 else ()
    columns = (TextColumn("{task.description}"), BarColumn(24), *counted, TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=labs if labs > 1 else None)

        def say(text: str) -> None:
            bar.update(task, description=text)
            if not notes.is_terminal:
                screen.note(text)

        def done(outcome: LabRun) -> None:
            bar.advance(task)
            if labs > 1:
                bar.console.print(
                    f"{'ok    ' if outcome.passed else 'FAILED'}  {outcome.name}  {outcome.seconds:.1f} s"
                )

        yield say, done


def _show_one(outcome: LabRun, plots: Sequence[Path], report: Path | None) -> None:
    finding = outcome.result
    assert finding is not None
    out = screen.console()
    out.print(finding.question, style="bold", soft_wrap=True)
    out.print()
    for section in finding.sections:
        _show_section(section)
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


def _show_section(section: page.Section) -> None:
    """Print a section; curves and attention maps are in the plots instead."""
    from triptych import page

    match section:
        case page.TableSection():
            right = [name for name, numeric in zip(section.header, section.numeric, strict=True) if numeric]
            table = screen.table(*section.header, right=right)
            for row in section.rows:
                table.add_row(*map(screen.plain, row))
            screen.show(table, section.title)
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


def _show_all(outcomes: Sequence[LabRun], report: Path | None) -> None:
    from triptych.labs.report import summary

    table = screen.table("lab", "", "seconds", "reason", right=("seconds",))
    for one in outcomes:
        word, _, why = one.verdict.partition(": ")
        table.add_row(one.name, word, f"{one.seconds:.1f}", "" if one.passed else why)
    screen.show(table)
    if report is not None:
        screen.show(screen.facts([("page", str(report))]))
    passed = all(one.passed for one in outcomes)
    verdict = f"{'PASS' if passed else 'FAIL'}: {summary(outcomes)}"
    screen.console().print(verdict, style="bold green" if passed else "bold red", soft_wrap=True)
