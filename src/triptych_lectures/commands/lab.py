"""`triptych lab`: run the experiments of the lectures and show their tables, criteria and verdicts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import BadParameter, Exit

from triptych import __version__
from triptych.cli import options, screen
from triptych.cli.loading import check_file
from triptych.errors import InputError, nearest

if TYPE_CHECKING:
    from triptych import page
    from triptych_lectures.labs.lab import Setup
    from triptych_lectures.labs.report import LabRun

ALL, SHAKESPEARE = "all", "shakespeare"
LONGEST_VERDICT = 160  # characters of the last line of a lab that passed, whose table has the criteria


@options.command
def lab(
    name: str | None = None,
    *,
    out: options.NamedPath = Path("runs/labs"),
    report: Path | None = None,
    seed: options.Seed = 0,
    model: str | None = None,
    data: str | None = None,
    set_: list[str] | None = None,
    full: bool = False,
    seeds: options.Positive | None = None,
    sizes: bool = False,
    as_json: options.Json = False,
) -> None:
    """Run an experiment of the lectures: tables, a plot and a verdict; exit 1 if a criterion fails.

    [NAME]: Name of a lab, or all; without it, list the labs.
    --out DIR: Directory for the plots.
    --report FILE: Write the results to an offline .html page.
    --seed: Seed of the random numbers.
    --model MODEL: Model to use instead of the lab's own.
    --data FILE: Text to train on instead of the lab's own.
    --set NAME=VALUE: Replace a size of the lab; repeatable.
    --full: Use the full sizes.
    --seeds N: Run N seeds, from --seed on, and store each.
    --sizes: Show the sizes, and what would falsify the claim, and stop.
    """
    if name is None:
        need_name = {"--report": report, "--model": model, "--data": data, "--set": set_, "--seeds": seeds}
        need_name |= {"--full": full or None, "--sizes": sizes or None}
        for option, value in need_name.items():
            if value is not None:
                raise BadParameter(f"{option} needs the NAME of a lab, or {ALL}")
        _list(as_json=as_json)
        return
    if seeds is not None and seed + seeds - 1 > options.LAST_SEED:
        raise BadParameter(f"--seeds {seeds} from --seed {seed} on goes beyond {options.LAST_SEED}")
    if report is not None:
        check_file(report, screen.PAGE, "--report")
    if data is not None and data != SHAKESPEARE and not Path(data).exists():
        raise BadParameter(f"--data {data}: no such file; give a UTF-8 text file, or {SHAKESPEARE}")
    from triptych_lectures.labs import LABS, check_inputs, checked_name
    from triptych_lectures.labs.lab import Setup

    setup = Setup(seed, model, data, sizes=_sizes(set_ or []), full=full)
    names = list(LABS) if name == ALL else [checked_name(name)]
    if sizes:
        _show_sizes(names, setup, as_json=as_json)
        return
    if name != ALL:
        check_inputs(name, model=model, data=data)
    if not _run(names, setup, seeds, out, report, as_json=as_json):
        raise Exit(1)


def _settings(setup: Setup, seeds: int | None) -> str:
    """One line for the page."""
    seeds_run = f"Seed {setup.seed}" if seeds is None else f"Seeds {setup.seed} to {setup.seed + seeds - 1}"
    parts = [seeds_run, *["full sizes"] * setup.full, *(f"{name}={size}" for name, size in setup.sizes.items())]
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


def own_sizes(names: Sequence[str], sizes: Mapping[str, Any], *, full: bool = False) -> dict[str, Mapping[str, Any]]:
    """For each lab, those of `sizes` that it has.  A single lab must have all of them, of several at least one each.

    Raises InputError for a size that no lab has, and for a value that a lab cannot use.
    """
    from triptych_lectures.labs import lab_class
    from triptych_lectures.labs.lab import Setup, size_rows

    own = dict.fromkeys(names, sizes)
    if sizes and len(names) > 1:
        owned = {name: vars(lab_class(name)()) for name in names}
        every = sorted(set().union(*owned.values()))
        for size in sizes:
            if size not in every:
                hint = f"{nearest(size, every)}; `triptych lab all --sizes` lists them"
                raise InputError(f"no lab has a size {size!r}{hint}")
        own = {name: {size: sizes[size] for size in sizes if size in has} for name, has in owned.items()}
    for name, values in own.items():
        if values:
            size_rows(lab_class(name), Setup(sizes=values, full=full))
    return own


def _list(*, as_json: bool) -> None:
    from triptych_lectures.labs import LABS

    if as_json:
        screen.result([{"name": name, "about": about} for name, about in LABS.items()])
        return
    screen.show_rows(("lab", "what it shows"), LABS.items())
    screen.note(f"run one with: triptych lab NAME; all with: triptych lab {ALL} --report labs.html")
    screen.note("its sizes, which --set replaces: triptych lab NAME --sizes")


def _show_sizes(names: Sequence[str], setup: Setup, *, as_json: bool) -> None:
    """The sizes of labs, with their values under these settings, and what would falsify each claim."""
    with screen.waiting("loading torch"):
        from triptych_lectures.labs import LABS, lab_class
        from triptych_lectures.labs.lab import shown_size, size_rows

        own = own_sizes(names, setup.sizes, full=setup.full)
        sizes = {name: size_rows(lab_class(name), replace(setup, sizes=own[name])) for name in names}
    if as_json:
        results = [
            {"name": name, "falsified_by": lab_class(name).falsified_by, "recorded_seeds": lab_class(name).seeds}
            | {"sizes": [asdict(row) for row in rows]}
            for name, rows in sizes.items()
        ]
        screen.result(results if len(results) > 1 else results[0])
        return
    for name, rows in sizes.items():
        title, numbers = f"{name}: {LABS[name]}", ("default", "full", "this run")
        cells = [[row.name, *map(shown_size, (row.default, row.full, row.value)), row.about] for row in rows]
        if cells:
            screen.show_rows(("size", *numbers, "what it is"), cells, title, right=numbers)
        else:
            screen.show(screen.facts([("sizes", "none")]), title)
        screen.show(screen.facts([("falsified by", lab_class(name).falsified_by)]))
        screen.console().print()


def _run(
    names: Sequence[str], setup: Setup, seeds: int | None, out: Path, report: Path | None, *, as_json: bool
) -> bool:
    """Run labs -> whether none failed."""
    draws = importlib.util.find_spec("matplotlib") is not None
    if draws or seeds is not None:  # fails before minutes of work, not after
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out} is a file; give a directory for the plots")
        out.mkdir(parents=True, exist_ok=True)

    outcomes: list[LabRun] = []
    with _progress(len(names)) as (say, done):
        say("loading torch")
        from triptych import machine
        from triptych_lectures.labs import report as reporting

        machine.use_threads()
        for outcome in _outcomes(names, replace(setup, progress=say), seeds, out):
            outcomes.append(reporting.draw(outcome, out, screen.COMMAND.get()) if draws else outcome)
            done(outcome)

    if report is not None:
        reporting.write(report, outcomes, _settings(setup, seeds))
    if as_json:
        results = [outcome.to_dict() for outcome in outcomes]
        screen.result(results if len(results) > 1 else results[0])
    elif len(outcomes) > 1:
        _show_all(outcomes, report)
    else:
        _show_one(outcomes[0], report)
    if setup.sizes and any(outcome.failed for outcome in outcomes):
        screen.note("the criteria are meant for the sizes of the lab, which --set has replaced")
    if not draws:
        screen.note("plots need matplotlib, which is not installed; run: pip install matplotlib")
    return not any(outcome.failed for outcome in outcomes)


def _outcomes(names: Sequence[str], setup: Setup, seeds: int | None, out: Path) -> Iterator[LabRun]:
    """The runs of the labs, one after the other: one seed each, or several of which the finished ones are kept."""
    from triptych_lectures.labs import report as reporting
    from triptych_lectures.labs.kept_results import KeptResults, package_digest
    from triptych_lectures.labs.seeds import over_seeds

    run_one: Callable[[str, Setup], LabRun] = reporting.timed
    if seeds is not None:
        run_one = partial(over_seeds, count=seeds, kept=KeptResults(out, package_digest(), screen.note))
    try:
        for name, sizes in own_sizes(names, setup.sizes, full=setup.full).items():
            own = replace(setup, sizes=sizes)
            yield reporting.attempt(name, own, run_one) if len(names) > 1 else run_one(name, own)
    except KeyboardInterrupt:
        if seeds is not None:
            screen.note(f"finished seeds are kept in {out}; the same command continues after them")
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


def _show_one(outcome: LabRun, report: Path | None) -> None:
    finding = outcome.result
    assert finding is not None
    out = screen.console()
    out.print(finding.question, style="bold", soft_wrap=True)
    out.print()
    for section in finding.sections:
        _show_section(section)
    for clause in finding.conclusion:
        out.print(clause.text, soft_wrap=False)
        rows = [(check.word, check.claim, check.shown, check.criterion) for check in clause.checks]
        screen.show_rows(("", "criterion", "measured", "must be"), rows, right=("measured",))
        out.print()
    if finding.remarks:
        out.print(finding.remarks, soft_wrap=False)
        out.print()
    files = [*(("plot", str(plot)) for plot in outcome.plots), *([("page", str(report))] if report is not None else [])]
    if files:
        out.print(screen.facts(files))
        out.print()
    verdict = outcome.verdict
    if outcome.passed and len(verdict) > LONGEST_VERDICT:
        verdict = f"PASS: each of the {len(finding.checks)} criteria is met"
    _show_verdict(verdict, passed=outcome.passed)


def _show_verdict(line: str, *, passed: bool) -> None:
    screen.console().print(line, style="bold green" if passed else "bold red", soft_wrap=True)


def _show_section(section: page.Section) -> None:
    """Print a section; curves and attention maps are in the plots instead."""
    from triptych import page

    match section:
        case page.TableSection():
            right = [name for name, numeric in zip(section.header, section.numeric, strict=True) if numeric]
            screen.show_rows(section.header, section.rows, section.title, right)
            screen.console().print()
            return
        case page.Facts():
            rows = [(name, screen.plain(value)) for name, value in section.rows]
        case page.Samples():
            rows = [(sample.label, screen.plain(sample.text)) for sample in section.items]
        case page.Prose():
            rows = [("", text) for _, text in section.blocks]
        case _:
            return
    screen.show(screen.facts(rows), section.title)
    screen.console().print()


def _show_all(outcomes: Sequence[LabRun], report: Path | None) -> None:
    from triptych_lectures.labs.report import summary

    rows = []
    for one in outcomes:
        word, _, why = one.verdict.partition(": ")
        rows.append((one.name, word, f"{one.seconds:.1f}", "" if one.passed else why))
    screen.show_rows(("lab", "", "seconds", "reason"), rows, right=("seconds",))
    if report is not None:
        screen.show(screen.facts([("page", str(report))]))
    passed = not any(one.failed for one in outcomes)
    _show_verdict(f"{'PASS' if passed else 'FAIL'}: {summary(outcomes)}", passed=passed)
