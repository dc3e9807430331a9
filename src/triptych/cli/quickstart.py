"""`triptych quickstart`: train a small transformer in 90 seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import BadParameter, Exit, Option

from triptych.cli import options, screen
from triptych.cli.failure import ReportedExit


def quickstart(
    *,
    panel: Literal["decoder", "encoder", "encoder-decoder"] = "decoder",
    data: options.NamedPath | None = None,
    seconds: Annotated[float, Option(min=1)] = 90,
    out: options.NamedPath | None = None,
    resume: bool = False,
    force: bool = False,
    as_json: options.Json = False,
) -> None:
    """Train a small transformer on real text in 90 seconds, sample from it, and write a page that runs it.

    --panel: The layout to train.
    --data FILE: UTF-8 file or directory to train on instead of Shakespeare.
    --seconds S: Training time.
    --out DIR: Output directory; by default runs/quickstart or runs/quickstart-PANEL.
    --resume: Continue an interrupted run.
    --force: Delete the run that the output directory holds, and start over.
    """
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
