"""`triptych quickstart`: train a small transformer in 90 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import BadParameter, Exit

from triptych.cli import options, screen
from triptych.cli.failure import ReportedExit
from triptych.cli.options import flag, fraction, option


def quickstart(
    panel: Annotated[Literal["decoder", "encoder", "encoder-decoder"], option("The layout to train.")] = "decoder",
    data: Annotated[
        Path | None,
        option("UTF-8 file or directory to train on instead of Shakespeare.", "FILE", parser=options.path),
    ] = None,
    seconds: Annotated[float, fraction("Training time.", "S", min=1)] = 90,
    out: Annotated[
        Path | None,
        option("Output directory; by default runs/quickstart or runs/quickstart-PANEL.", "DIR", parser=options.path),
    ] = None,
    resume: Annotated[bool, flag("--resume", "Continue an interrupted run.")] = False,
    force: Annotated[bool, flag("--force", "Delete the run that the output directory holds, and start over.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a small transformer on real text in 90 seconds, sample from it, and write a page that runs it."""
    from triptych.cli.training_progress import TrainingProgress

    if resume and force:
        raise BadParameter("--resume continues the run that --force deletes; give one of the two")
    with TrainingProgress() as bar:
        bar.say("starting")
        from triptych import machine
        from triptych.quickstart import run
        from triptych.train import Interrupted

        machine.use_threads()
        try:
            result = run(panel=panel, data=data, seconds=seconds, out=out, resume=resume, force=force, watch=bar)
        except Interrupted as stop:
            screen.note(f"{stop}; continue with the same command and --resume")
            raise Exit(ReportedExit(128 + stop.number)) from None
    if as_json:
        screen.result(result.to_dict())
        return
    title = f"{result.steps:,} steps in {result.seconds:,.0f} s. {result.held_out.sentence}"
    page = f"{result.report}, open it in a browser: the model runs in it, offline"
    screen.show(screen.facts([("model", str(result.model)), ("page", page)]), title)
