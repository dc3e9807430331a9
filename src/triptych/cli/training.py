"""Commands that train: quickstart, train."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Exit, Option

from triptych.cli import options, screen


class PanelName(StrEnum):
    """The three layouts."""

    decoder = "decoder"
    encoder = "encoder"
    encoder_decoder = "encoder-decoder"


def quickstart(
    panel: Annotated[PanelName, Option("--panel", help="Which layout to train.")] = PanelName.decoder,
    data: Annotated[
        Path | None,
        Option("--data", metavar="FILE", help="A UTF-8 file or folder instead of Shakespeare.", show_default=False),
    ] = None,
    seconds: Annotated[float, Option("--seconds", metavar="S", min=1, help="How long to train.")] = 90,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="DIR",
            help="Where the results go; runs/quickstart, or runs/quickstart-PANEL.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on where a run was stopped.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a small transformer on real text in a minute and a half, write with it, see its attention."""
    from triptych.cli.training_bar import TrainingBar

    with TrainingBar() as bar:
        bar.say("starting")
        from triptych import machine
        from triptych.quickstart import run
        from triptych.train import Interrupted

        machine.use_threads()
        try:
            found = run(panel=panel.value, data=data, seconds=seconds, out=out, resume=resume, watch=bar)
        except Interrupted as stop:
            screen.note(f"{stop}; continue with the same command and --resume")
            raise Exit(128 + stop.number) from None
    if as_json:
        screen.result(found.to_dict())
        return
    told = f"{found.steps:,} steps in {found.seconds:,.0f} s. {found.held_out.sentence}"
    screen.show(screen.facts([("model", str(found.model)), ("page", f"{found.report}, open it in a browser")]), told)


def train(
    recipe: Annotated[
        Path,
        Argument(
            metavar="RECIPE",
            help="What to train, on what, how: a .toml file, or decoder, encoder or encoder-decoder, the quickstart's.",
            show_default=False,
        ),
    ],
    changes: Annotated[
        list[str] | None, Option("--set", metavar="A.B=C", help="Change one value of the recipe. Repeatable.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on from the newest checkpoint under the run's directory.")
    ] = False,
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Where checkpoints go; run.out of the recipe unless given.")
    ] = None,
    show_batch: Annotated[bool, Option("--show-batch", help="Show the rows of the first step, and stop.")] = False,
    verify_resume: Annotated[
        int | None,
        Option(
            "--verify-resume", metavar="N", min=2, help="Show that N steps stopped half-way end in the same weights."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train what a recipe describes."""
    if resume and (show_batch or verify_resume):
        raise BadParameter("--resume goes on with a run; --show-batch and --verify-resume begin one")
    from triptych.cli import training_run

    if show_batch:
        training_run.show_batch(recipe, changes or (), as_json=as_json)
    elif verify_resume is not None:
        training_run.verify(recipe, changes or (), verify_resume, as_json=as_json)
    else:
        training_run.train(recipe, changes or (), out, resume=resume, as_json=as_json)
