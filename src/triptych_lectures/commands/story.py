"""`triptych story`: ten programs, from counts of letters to the three layouts, each run on the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from triptych.cli import options, screen
from triptych.errors import InputError

if TYPE_CHECKING:
    from triptych import page
    from triptych_lectures.story import Step, StepRun

ALL = "all"
SAMPLE = 12  # lines of what a program printed that are shown
HELD_OUT = 10  # of a text of one's own, one in so many letters is held out
COLOURS = 5  # of the curves on a page
POINTS = 40  # of a curve on the page: each is the mean of a part of the training
LOSSES = ("step", "what it adds", "held-out loss", "at other seeds")
TITLE = "From counts of letters to the transformer"


@options.command
def story(
    names: list[str] | None = None,
    *,
    seed: options.Seed = 0,
    data: options.NamedPath | None = None,
    show: bool = False,
    report: options.NamedPath | None = None,
    out: options.NamedPath | None = None,
    as_json: options.Json = False,
) -> None:
    """Ten small programs, each a few lines more than the one before: from counts of letters to three layouts.

    [STEP]...: Steps to run, as in 4 5, or all; without one, list them.
    --seed: Seed of the random numbers.
    --data FILE: Text to use instead of Shakespeare; its last tenth is held out.
    --show: Print the programs as differences to those before them, and run none.
    --report FILE: Write programs, losses, curves and samples to an offline .html page.
    --out DIR: Write the programs and both texts to a new folder, to change and run; of step 8 the model too.
    """
    from triptych_lectures import story as told

    chosen = [told.step(number) for number in _numbers(names or [ALL])]
    if show:
        _show_programs(chosen, as_json=as_json)
        return
    if not names:
        for option, value in {"--data": data, "--report": report, "--out": out}.items():
            if value is not None:
                raise BadParameter(f"{option} needs steps, as in 4 5, or {ALL}")
        _list(chosen, as_json=as_json)
        return
    screen.check_suffix(report, option="--report")
    if report is not None:
        from triptych.page.render import check_place

        check_place(report)
    train, held_out = _texts(data)
    if out is not None:
        _write_programs(out, chosen, train, held_out)
    runs = []
    for step in chosen:
        with screen.stages() as stage:
            done = told.run(step.number, train, held_out, seed=seed, on_line=_progress(step, stage))
        if out is not None and step.number == told.DECODER:
            told.decoder_of(done).save(out / "model")
        runs.append(replace(done, names={}))  # the texts and the model are large
        if not as_json:
            _show(runs[-1])
    if not as_json:
        header, rows = _losses(runs, ours=data is None)
        screen.show_rows(header, rows, right=header[2:])
    if report is not None:
        screen.write_page(report, _page(runs, seed, ours=data is None))
    if out is not None:
        screen.note(f"wrote the programs to {out}; run one there: python {told.file_of(chosen[0].number).name} {RUN}")
    if as_json:
        screen.result({"seed": seed, "steps": list(map(_data, runs))})


RUN = "train.txt held-out.txt 0"  # the arguments of a program: two texts and a seed


def _numbers(names: Sequence[str]) -> list[int]:
    """The numbers of the steps, each once."""
    from triptych_lectures.story import COUNT

    numbers = list(range(1, COUNT + 1))
    of_name = {str(number): [number] for number in numbers} | {ALL: numbers}
    for name in names:
        if name not in of_name:
            raise InputError(f"no step {name!r}; the story has steps 1 to {COUNT}, and {ALL}")
    return list(dict.fromkeys(number for name in names for number in of_name[name]))


def _texts(data: Path | None) -> tuple[str, str]:
    """The text to train on, and the held-out one."""
    if data is None:
        from triptych.text import shakespeare

        return shakespeare.split()
    from triptych.text.corpus import read_text

    text = read_text(data)
    cut = len(text) - len(text) // HELD_OUT
    return text[:cut], text[cut:]


def _write_programs(out: Path, chosen: Sequence[Step], train: str, held_out: str) -> None:
    """The programs and their texts in a new folder, so that nothing that was changed there is lost."""
    from triptych_lectures.story import file_of

    if out.exists():
        raise InputError(f"{out} exists; --out takes a folder that is not there yet")
    out.mkdir(parents=True)
    for step in chosen:
        (out / file_of(step.number).name).write_text(step.source, "utf-8")
    for name, text in (("train.txt", train), ("held-out.txt", held_out)):
        (out / name).write_text(text, "utf-8", newline="")


def _progress(step: Step, stage: Callable[[str], None]) -> Callable[[str], None]:
    stage(f"step {step.number}")
    return lambda line: stage(f"step {step.number}: {line}") if line.startswith("step ") else None


def _loss(run: StepRun) -> str:
    return "–" if run.loss is None else f"{run.loss:.3f}"


def _losses(runs: Sequence[StepRun], *, ours: bool) -> tuple[Sequence[str], list[list[str]]]:
    """The held-out loss of each step up to the last one that ran, beside those recorded at other seeds.

    A text that is not `ours` has only the steps that ran.
    """
    from triptych_lectures.story import recorded, step

    of_step = {run.step.number: run for run in runs}
    if not ours:
        return LOSSES[:3], [[str(number), run.step.title, _loss(run)] for number, run in of_step.items()]
    rows = []
    for number in range(1, max(of_step) + 1):
        now = _loss(of_step[number]) if number in of_step else "–"
        other = recorded().get(number, {}).values()
        spread = f"{min(other):.3f}–{max(other):.3f}" if other else "–"
        rows.append([str(number), step(number).title, now, spread])
    return LOSSES, rows


def _show(run: StepRun) -> None:
    out = screen.console()
    loss = "" if run.loss is None else f" {run.loss:.3f} nats for each held-out letter"
    out.print(f"Step {run.step.number}. {run.step.title}{loss}", style="bold", soft_wrap=True)
    lines = [line for line in run.lines if line.strip()]
    for line in lines[:SAMPLE]:
        out.print(f"    {screen.plain(line)}", soft_wrap=True)


def _show_programs(chosen: Sequence[Step], *, as_json: bool) -> None:
    if as_json:
        screen.result([{"step": one.number, "title": one.title, "difference": one.difference()} for one in chosen])
        return
    for one in chosen:
        screen.console().print(f"Step {one.number}. {one.title}", style="bold", soft_wrap=True)
        screen.write("\n".join(one.difference()) + "\n\n")


def _list(chosen: Sequence[Step], *, as_json: bool) -> None:
    if as_json:
        screen.result([_counted(one) for one in chosen])
        return
    rows = [tuple(map(str, _counted(one).values())) for one in chosen]
    screen.show_rows(("step", "what it adds", "lines", "added", "removed"), rows, right=("lines", "added", "removed"))
    screen.note("run some: triptych story 4 5; all, with a page: triptych story all --report story.html")


def _counted(one: Step) -> dict[str, object]:
    added, removed = one.changed()
    lines = len(one.source.splitlines())
    return {"step": one.number, "title": one.title, "lines": lines, "added": added, "removed": removed}


def _data(run: StepRun) -> dict[str, object]:
    return {
        "step": run.step.number, "title": run.step.title, "loss": run.loss, "seconds": round(run.seconds, 1),
        "curve": run.curve, "lines": run.lines,
    }  # fmt: skip


def _page(runs: Sequence[StepRun], seed: int, *, ours: bool) -> str:
    """The whole story: its losses, its curves, and for each step its program and what it printed."""
    from triptych import page
    from triptych_lectures.story import DECODER, step

    header, rows = _losses(runs, ours=ours)
    named = [[step(int(number)).name, *rest] for number, _, *rest in rows]
    sections: list[page.Section] = [page.TableSection("Losses", ("step", "loss", *header[3:]), named)]
    held_out = [run for run in runs if run.loss is not None]
    if len(held_out) > 1:
        falling = {"held-out loss": [(run.step.number, run.loss or 0.0) for run in held_out]}
        sections.append(page.Curve("From step to step", "step", "loss", falling, {}))
    if trained := {run.step.name: _smooth(run.curve) for run in held_out if run.curve and run.step.number <= DECODER}:
        last = dict(list(trained.items())[-COLOURS:])
        sections.append(page.Curve("Training", "batches", "loss of the batches", last, {}))
    for run in runs:
        one = run.step
        whole = "" if one.number == 1 else one.source
        printed = "\n".join(run.printed).strip("\n")
        sections.append(page.ProgramSection(one.name, one.title, one.difference(context=1), whole, printed))
    about = "Ten programs, each a few lines more than the one before. Losses are in nats for each letter"
    return page.render(TITLE, sections, subtitle=f"{about}; seed {seed}.")


def _smooth(curve: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """The mean of each part of a curve, because single batches differ by more than the steps of the story."""
    size = -(-len(curve) // POINTS)
    parts = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
