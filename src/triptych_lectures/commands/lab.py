"""`triptych lab`: run the experiments of the lectures and show their tables, criteria and verdicts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Exit, Option

from triptych import __version__
from triptych.cli import options, screen
from triptych.errors import InputError, nearest

if TYPE_CHECKING:
    from triptych import page
    from triptych_lectures.labs.report import LabRun

ALL, SHAKESPEARE = "all", "shakespeare"
PAGE = (".html", ".htm")
LONGEST_VERDICT = 160  # characters of the last line of a lab that passed, whose table has the criteria


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
    seed: Annotated[int, Option("--seed", min=0, max=options.LAST_SEED, help="Seed of the random numbers.")] = 0,
    model: Annotated[
        str | None,
        Option("--model", metavar="MODEL", help="Model to use instead of the lab's own.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        Option("--data", metavar="FILE", help="Text to train on instead of the lab's own.", show_default=False),
    ] = None,
    sets: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="Replace a size of the lab; repeatable.", show_default=False),
    ] = None,
    full: Annotated[bool, Option("--full", help="Use the full sizes, those of `make lectures`.")] = False,
    seeds: Annotated[
        int | None,
        Option("--seeds", metavar="N", min=1, help="Run N seeds, from --seed on, and store each.", show_default=False),
    ] = None,
    show_sizes: Annotated[
        bool, Option("--sizes", help="Show the sizes, and what would falsify the claim, and stop.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Run an experiment of the lectures: tables, a plot and a verdict; exit 1 if a criterion fails."""
    if name is None:
        need_name = {"--report": report, "--model": model, "--data": data, "--set": sets, "--seeds": seeds}
        need_name |= {"--full": full or None, "--sizes": show_sizes or None}
        if alone := [option for option, value in need_name.items() if value is not None]:
            raise BadParameter(f"{alone[0]} needs the NAME of a lab, or {ALL}")
        _list(as_json=as_json)
        return
    if seeds is not None and seed + seeds - 1 > options.LAST_SEED:
        raise BadParameter(f"--seeds {seeds} from --seed {seed} on goes beyond {options.LAST_SEED}")
    if report is not None:
        screen.check_suffix(report, PAGE, "--report")
    if data is not None and data != SHAKESPEARE and not Path(data).exists():
        raise BadParameter(f"--data {data}: no such file; give a UTF-8 text file, or {SHAKESPEARE}")
    settings = LabSettings(out, report, seed, seeds, model, data, _sizes(sets or []), full)
    if show_sizes:
        _show_sizes(name, settings, as_json=as_json)
        return
    if not _run(name, settings, as_json=as_json):
        raise Exit(1)


@dataclass(frozen=True)
class LabSettings:
    """The options of a run, by their names on the command line; `sizes` are those of --set."""

    out: Path
    report: Path | None
    seed: int
    seeds: int | None
    model: str | None
    data: str | None
    sizes: dict[str, str]
    full: bool

    @property
    def shown(self) -> str:
        """One line for the page."""
        seeds = f"Seed {self.seed}" if self.seeds is None else f"Seeds {self.seed} to {self.seed + self.seeds - 1}"
        parts = [
            seeds,
            *(["full sizes"] if self.full else []),
            *(f"{name}={size}" for name, size in self.sizes.items()),
        ]
        return f"{', '.join(parts)}, triptych {__version__}."


def _sizes(sets: Sequence[str]) -> dict[str, str]:
    """`name=value` of each --set."""
    sizes: dict[str, str] = {}
    for one in sets:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise BadParameter(f"--set {one}: write NAME=VALUE; `triptych lab LAB --sizes` lists the names")
        if name in sizes:
            raise BadParameter(f"--set {name} is given twice: {sizes[name]} and {value}")
        sizes[name] = value
    return sizes


def own_sizes(names: Sequence[str], sizes: Mapping[str, Any], *, full: bool = False) -> dict[str, dict[str, Any]]:
    """For each lab, those of `sizes` that it has.  A single lab must have all of them, of several at least one each.

    Raises InputError for a size that no lab has, and for a value that a lab cannot use.
    """
    from triptych_lectures.labs import lab_class
    from triptych_lectures.labs.lab import Setup, size_rows, size_values

    if not sizes:
        return {name: {} for name in names}
    labs = [lab_class(name) for name in names]
    if len(labs) == 1:
        size_values(labs[0], Setup(sizes=sizes, full=full))
        return {labs[0].name: dict(sizes)}
    owned = {kind.name: {row.name for row in size_rows(kind)} for kind in labs}
    every = sorted(set().union(*owned.values()))
    for name in sizes:
        if name not in every:
            raise InputError(f"no lab has a size {name!r}{nearest(name, every)}; `triptych lab all --sizes` lists them")
    own = {of: {name: value for name, value in sizes.items() if name in has} for of, has in owned.items()}
    for kind in labs:
        size_values(kind, Setup(sizes=own[kind.name], full=full))
    return own


def _list(*, as_json: bool) -> None:
    from triptych_lectures.labs import LABS

    if as_json:
        screen.result([{"name": name, "about": about} for name, about in LABS.items()])
        return
    table = screen.table("lab", "what it shows")
    for name, about in LABS.items():
        table.add_row(name, about)
    screen.show(table)
    screen.note(f"run one with: triptych lab NAME; all with: triptych lab {ALL} --report labs.html")
    screen.note("its sizes, which --set replaces: triptych lab NAME --sizes")


def _show_sizes(name: str, settings: LabSettings, *, as_json: bool) -> None:
    """The sizes of a lab, or of all, with their values under these settings, and what would falsify the claim."""
    from triptych_lectures import labs
    from triptych_lectures.labs import LABS, known

    names = list(LABS) if name == ALL else [known(name)]
    with screen.waiting("loading torch"):
        from triptych_lectures.labs.lab import Setup, shown_size, size_rows, size_values

        own = own_sizes(names, settings.sizes, full=settings.full)
        kinds = [labs.lab_class(lab) for lab in names]
    results = []
    for kind in kinds:
        values = size_values(kind, Setup(sizes=own[kind.name], full=settings.full))
        rows = [
            {"name": row.name, "default": row.quick, "full": row.full, "value": values[row.name], "about": row.about}
            for row in size_rows(kind)
        ]
        about = {"name": kind.name, "falsified_by": kind.falsified_by, "recorded_seeds": kind.seeds}
        results.append(about | {"sizes": rows})
        if as_json:
            continue
        table = screen.table("size", "default", "full", "this run", "what it is", right=("default", "full", "this run"))
        for row in size_rows(kind):
            shown = map(shown_size, (row.quick, row.full, values[row.name]))
            table.add_row(row.name, *map(screen.plain, shown), row.about)
        screen.show(table if rows else screen.facts([("sizes", "none")]), f"{kind.name}: {LABS[kind.name]}")
        screen.show(screen.facts([("falsified by", kind.falsified_by)]))
        screen.console().print()
    if as_json:
        screen.result(results if name == ALL else results[0])


def _run(name: str, settings: LabSettings, *, as_json: bool) -> bool:
    """Run one lab, or all -> whether none failed."""
    from triptych_lectures.labs import LABS, check_inputs, known

    names = list(LABS) if name == ALL else [known(name)]
    if name != ALL:
        check_inputs(name, model=settings.model, data=settings.data)
    out, report = settings.out, settings.report
    draws = importlib.util.find_spec("matplotlib") is not None
    keeps = [out] if draws or settings.seeds is not None else []
    for folder in keeps + ([report.parent] if report is not None else []):
        folder.mkdir(parents=True, exist_ok=True)  # fails before minutes of work, not after

    outcomes: list[LabRun] = []
    plots: dict[str, list[Path]] = {}
    with _progress(len(names)) as (say, done):
        say("loading torch")
        from triptych import machine
        from triptych_lectures.labs import report as reporting

        machine.use_threads()
        for outcome in _outcomes(names, settings, say, alone=name != ALL):
            outcomes.append(outcome)
            plots[outcome.name] = reporting.draw(outcome, out) if draws else []
            done(outcome)

    if report is not None:
        reporting.write(report, outcomes, settings.shown)
    if as_json:
        results = [outcome.to_dict() | {"plots": list(map(str, plots[outcome.name]))} for outcome in outcomes]
        screen.result(results if name == ALL else results[0])
    elif name == ALL:
        _show_all(outcomes, report)
    else:
        _show_one(outcomes[0], plots[name], report)
    if not draws:
        screen.note("plots need matplotlib, which is not installed; run: pip install matplotlib")
    return not any(outcome.failed for outcome in outcomes)


def _outcomes(
    names: Sequence[str], settings: LabSettings, say: Callable[[str], None], *, alone: bool
) -> Iterator[LabRun]:
    """The runs of the labs, one after the other: one seed each, or several of which the finished ones are kept."""
    from triptych_lectures.labs import report as reporting
    from triptych_lectures.labs.kept import KeptResults, package_digest
    from triptych_lectures.labs.lab import Setup
    from triptych_lectures.labs.seeds import over_seeds

    sizes = own_sizes(names, settings.sizes, full=settings.full)
    setup = Setup(seed=settings.seed, progress=say, model=settings.model, data=settings.data, full=settings.full)
    run_one: Callable[[str, Setup], LabRun] = reporting.timed
    if settings.seeds is not None:
        results = KeptResults(settings.out, package_digest(), screen.note)
        run_one = partial(over_seeds, count=settings.seeds, kept=results)
    try:
        if alone:
            yield run_one(names[0], replace(setup, sizes=sizes[names[0]]))
        else:
            yield from reporting.attempts(names, setup, sizes, run_one)
    except KeyboardInterrupt:
        if settings.seeds is not None:
            screen.note(f"finished seeds are kept in {settings.out}; the same command continues after them")
        raise


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
                word = "skipped" if outcome.skipped else "ok" if outcome.passed else "FAILED"
                bar.console.print(f"{word:7}  {outcome.name}  {outcome.seconds:.1f} s")

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
        criteria.add_row(check.word, check.claim, check.shown, check.criterion)
    out.print(criteria)
    files = [*(("plot", str(plot)) for plot in plots), *([("page", str(report))] if report is not None else [])]
    if files:
        out.print(screen.facts(files))
        out.print()
    verdict = outcome.verdict
    if outcome.passed and len(verdict) > LONGEST_VERDICT:
        verdict = f"PASS: each of the {len(finding.checks)} criteria is met"
    out.print(verdict, style="bold green" if outcome.passed else "bold red", soft_wrap=True)


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
            rows = [(sample.label, screen.plain(sample.text)) for sample in section.items]
            screen.show(screen.facts(rows), section.title)
        case page.Prose():
            screen.show(screen.facts([("", text) for _, text in section.blocks]), section.title)
        case _:
            return
    screen.console().print()


def _show_all(outcomes: Sequence[LabRun], report: Path | None) -> None:
    from triptych_lectures.labs.report import summary

    table = screen.table("lab", "", "seconds", "reason", right=("seconds",))
    for one in outcomes:
        word, _, why = one.verdict.partition(": ")
        table.add_row(one.name, word, f"{one.seconds:.1f}", "" if one.passed else why)
    screen.show(table)
    if report is not None:
        screen.show(screen.facts([("page", str(report))]))
    passed = not any(one.failed for one in outcomes)
    verdict = f"{'PASS' if passed else 'FAIL'}: {summary(outcomes)}"
    screen.console().print(verdict, style="bold green" if passed else "bold red", soft_wrap=True)
