"""`triptych story`: ten programs, from counts of letters to the three layouts, each run on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from triptych.cli import options, screen

if TYPE_CHECKING:
    from triptych import page
    from triptych_lectures.story import StepRun

SAMPLE = 3  # lines of a text that are printed
HELD_OUT = 10  # of a text of one's own, one in so many letters is held out


@options.command
def story(
    steps: list[int] | None = None,
    *,
    seed: options.Seed = 0,
    data: Path | None = None,
    show: bool = False,
    report: Path | None = None,
    out: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Ten small programs, each a few lines more than the one before: from counts of letters to three layouts.

    [STEP]...: Steps from 1 to 10; without one, all.
    --seed: Seed of the random numbers.
    --data FILE: Text to use instead of Shakespeare; its last tenth is held out.
    --show: Print the programs, with what each changes, and run none.
    --report FILE: Write the programs, losses and samples to an offline .html page.
    --out DIR: Save the decoder of step 8 there, for `triptych generate` and the others.
    """
    from triptych_lectures import story as told

    numbers = steps or list(range(1, told.COUNT + 1))
    chosen = [told.step(number) for number in numbers]
    if show:
        for step in chosen:
            screen.console().print(f"Step {step.number}. {step.title}", style="bold", soft_wrap=True)
            screen.write("\n".join(step.difference() if step.number > 1 else step.source.splitlines()) + "\n\n")
        return
    if out is not None and told.DECODER not in numbers:
        raise BadParameter(f"--out saves the decoder of step {told.DECODER}; name that step too")
    screen.check_suffix(report, option="--report")
    texts = _texts(data)
    runs: list[StepRun] = []
    for step in chosen:
        with screen.stages() as say:
            say(f"step {step.number}: {step.title}")
            runs.append(told.run(step.number, *texts, seed=seed, on_line=lambda line: say(line) if line else None))
        if not as_json:
            _show(runs[-1])
        if out is not None and step.number == told.DECODER:
            told.decoder_of(runs[-1].names).save(out)
    if report is not None:
        screen.write_page(report, _page(runs, seed))
    if as_json:
        screen.result([_data(run) for run in runs])
        return
    rows = [(str(run.step.number), run.step.title, _loss(run), f"{run.seconds:.0f}") for run in runs]
    screen.show_rows(("step", "what it adds", "held-out loss", "seconds"), rows, right=("held-out loss", "seconds"))
    for name, path in (("page", report), ("model", out)):
        if path is not None:
            screen.note(f"{name}: {path}")


def _texts(data: Path | None) -> tuple[str, str]:
    """The text to train on, and the held-out one."""
    if data is None:
        from triptych.text import shakespeare

        return shakespeare.split()
    from triptych.text.corpus import read_text

    text = read_text(data)
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


def _loss(run: StepRun) -> str:
    return "" if run.loss is None else f"{run.loss:.3f}"


def _show(run: StepRun) -> None:
    out = screen.console()
    loss = "" if run.loss is None else f": {run.loss:.3f} nats for each held-out letter"
    out.print(f"Step {run.step.number}. {run.step.title.rstrip('.')}{loss}", style="bold", soft_wrap=True)
    for line in [line for line in run.lines if line.strip()][:SAMPLE]:
        out.print(f"  {screen.plain(line)}", soft_wrap=True, markup=False)


def _data(run: StepRun) -> dict[str, object]:
    return {
        "step": run.step.number, "title": run.step.title, "loss": run.loss, "seconds": run.seconds,
        "curve": run.curve, "lines": run.lines,
    }  # fmt: skip


def _page(runs: Sequence[StepRun], seed: int) -> str:
    """The whole story: its losses, its curves, and for each step its program and what it printed."""
    from triptych import page

    rows = [(str(run.step.number), run.step.title, _loss(run)) for run in runs]
    curves = {f"step {run.step.number}": run.curve for run in runs if run.curve and run.loss is not None}
    sections: list[page.Section] = [page.TableSection("Losses", ("step", "what it adds", "held-out loss"), rows)]
    if curves:
        sections.append(page.Curve("Training", "step of training", "loss of the batch", curves, {}))
    for run in runs:
        cards = [page.Sample(None, "program", "\n".join(run.step.difference()))]
        cards.append(page.Sample(None, "what it printed", "\n".join(run.lines)))
        sections.append(page.Samples(f"Step {run.step.number}. {run.step.title}", cards))
    subtitle = f"Loss is in nats for each held-out letter; seed {seed}.  Lines that a step adds begin with +."
    return page.render("From counts of letters to the transformer", sections, subtitle=subtitle)
