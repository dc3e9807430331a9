"""The command that experiments: lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Exit, Option

from triptych.cli import options, screen

ALL = "all"


def lab(
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="Which lab, or all; none lists them.", show_default=False)
    ] = None,
    out: Annotated[Path, Option("--out", metavar="DIR", help="Where the plots go.")] = Path("runs/labs"),
    report: Annotated[
        Path | None, Option("--report", metavar="FILE", help="Write one offline HTML page.", show_default=False)
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Where its random numbers begin.")] = 0,
    model: Annotated[
        str | None,
        Option("--model", metavar="MODEL", help="A checkpoint instead of the one it would use.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        Option("--data", metavar="FILE", help="A text instead of the one it would train on.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """The lectures' experiments: each a table, a plot and a verdict; exit 1 where one fails."""
    if name is None:
        given = {"--report": report, "--model": model, "--data": data}
        if alone := [option for option, value in given.items() if value is not None]:
            raise BadParameter(f"{alone[0]} needs the NAME of a lab, or {ALL}")
        _list(as_json=as_json)
        return
    from triptych.cli.lab_run import run

    if not run(name, out=out, report=report, seed=seed, model=model, data=data, as_json=as_json):
        raise Exit(1)


def _list(*, as_json: bool) -> None:
    from triptych.labs import LABS

    if as_json:
        screen.result([{"name": name, "about": about} for name, about in LABS.items()])
        return
    made = screen.table("lab", "what it shows")
    for name, about in LABS.items():
        made.add_row(name, about)
    screen.show(made)
    screen.note(f"triptych lab NAME runs one, triptych lab {ALL} --report labs.html all of them")
