"""Train a small transformer on real text, write with it, and make a page that runs it: one call, three panels.

A panel is one layout on one task: a recipe of the same name, the samples it writes, how it is evaluated, and the text
that its page begins with.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from triptych import page
from triptych.arguments import checked
from triptych.checkpoints import atomic_write
from triptych.errors import CheckpointError, InputError, nearest
from triptych.model import Model
from triptych.page import Sample
from triptych.page.live import live_section
from triptych.page.plot import png
from triptych.run_lock import RunLock
from triptych.train import Checkpoints, Event, Job, Trainer, prepare, read_recipe, resume
from triptych.train.recipe import DataSettings
from triptych.train.sources import SHAKESPEARE
from .panels import PANELS, HeldOutResult, Panel

CHECKPOINTS, MODEL, SAMPLES, PAGE, CURVE = "checkpoints", "model", "samples.json", "report.html", "loss.png"
FINISHED = (PAGE, CURVE, MODEL)  # what a run writes at its end


@runtime_checkable
class Watch(Protocol):
    """Receives the progress of a run, as the progress bar of the command line does."""

    def say(self, what: str) -> None:
        """A line about what happens now."""
        return

    def step(self, event: Event) -> None:
        """A finished training step."""
        return

    def sample(self, label: str, text: str) -> None:
        """What the model writes at present."""
        return


class Silent(Watch):
    """The `Watch` that shows nothing."""


@dataclass(frozen=True)
class Result:
    """The outcome of a run: the directory of the model, the page, steps and seconds of training, and the evaluation."""

    panel: str
    model: Path
    report: Path
    steps: int
    seconds: float
    held_out: HeldOutResult
    samples: list[Sample] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        run = {"panel": self.panel, "model": str(self.model), "report": str(self.report)}
        measured = {name: value for name, value in vars(self.held_out).items() if name != "sentence"}
        return run | {"steps": self.steps, "seconds": round(self.seconds, 1)} | measured


@checked
def run(
    *,
    panel: str = "decoder",
    data: Path | str | None = None,
    seconds: float = 90.0,
    out: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Train the panel's model for `seconds` and write `model/`, `loss.png` and `report.html` under `out`, by default
    `runs/quickstart`, or `runs/quickstart-PANEL` for another panel than the decoder.

    A run under `out` is continued with `resume`, and deleted with `force` before this one writes anything; without
    either, InputError is raised.  Raises FetchError without a network and without `data`, TextError or InputError for
    data that cannot be used, ConfigError while another process uses `out`, Interrupted (a KeyboardInterrupt) when
    stopped by a signal.
    """
    if panel not in PANELS:
        raise InputError(f"no panel {panel!r}{nearest(panel, PANELS)}; they are {', '.join(PANELS)}")
    watch, chosen = watch or Silent(), PANELS[panel]
    if not isinstance(watch, Watch):
        raise InputError(f"watch={watch!r} is no triptych.quickstart.Watch")
    out = Path(out or "runs/quickstart" + (f"-{panel}" if panel != "decoder" else ""))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be a run's directory ({error.strerror or error}); give another") from None
    with RunLock(out):
        job = _job(chosen, data, seconds, out, resume, force, watch)
        samples = _Samples(chosen, job, out, watch)
        job.run(on_step=watch.step, on_sample=samples.add, on_note=watch.say)
        watch.say("evaluating on held-out text")
        model = Model(job.trainer.module.eval(), job.tokenizer, job.hf)
        held_out = chosen.evaluate(model, job)
        model.save(out / MODEL)
        write_page(out, chosen, job, model, samples.items, held_out)
    at = job.trainer.at
    return Result(panel, out / MODEL, out / PAGE, at.step, at.elapsed, held_out, samples.items)


class _Samples:
    """The samples of a run so far, which are also in a file, so that a resumed run continues the list."""

    def __init__(self, panel: Panel, job: Job, out: Path, watch: Watch) -> None:
        self.panel, self.job, self.file, self.watch = panel, job, out / SAMPLES, watch
        self.prompts = panel.prompts_for(job.recipe.data)
        first = job.trainer.at.step
        stored = json.loads(self.file.read_text(encoding="utf-8")) if first and self.file.is_file() else []
        self.items = [item for item in (Sample(**fields) for fields in stored) if (item.step or 0) <= first]

    def add(self, trainer: Trainer) -> None:
        """Write on from the panel's prompts with the model as it is now."""
        model, step = Model(trainer.module, self.job.tokenizer, self.job.hf), trainer.at.step
        new = [Sample(step, label, text) for label, text in self.panel.write(model, self.prompts)]
        for item in new[:1]:
            self.watch.sample(f"step {step:,}: {item.label}", item.text)
        self.items += new
        atomic_write(self.file, json.dumps([vars(item) for item in self.items], indent=1).encode())


def curve(job: Job) -> page.Curve:
    """Nats per token against steps: training, smoothed over a hundredth of the run, and held out."""
    history = job.trainer.at.history
    window = max(1, len(history) // 100)
    losses = [entry.loss for entry in history]
    smoothed = [
        (float(history[i].step), sum(losses[i + 1 - window : i + 1]) / window)
        for i in range(window - 1, len(history), window)
    ]
    held_out = [(float(entry.step), entry.held_out) for entry in history if entry.held_out is not None]
    return page.Curve("Loss", "step", "nats per token", {"training": smoothed, "held out": held_out}, {})


def write_page(
    out: Path, panel: Panel, job: Job, model: Model, samples: list[page.Sample], held_out: HeldOutResult
) -> None:
    """`loss.png` if matplotlib is installed, and `report.html`: one file that works offline and runs the model."""
    losses = curve(job)
    if importlib.util.find_spec("matplotlib") is not None:
        png(out / CURVE, losses)
    at = job.trainer.at
    parameters = sum(p.numel() for p in model.module.parameters())
    facts = [
        ("Result", held_out.sentence),
        ("Model", f"{model.spec.family}, {model.spec.layout}, {parameters:,} parameters"),
        ("Vocabulary", f"{model.spec.vocab:,} tokens ({str(job.recipe.tokenizer).partition(':')[0]})"),
        ("Training", f"{at.step:,} steps, {at.tokens:,} tokens, {at.elapsed:,.0f} s"),
        ("Text", str(job.recipe.data.path)),
    ]
    commands = _commands(panel, job.recipe.data, out / "model")
    sections: list[page.Section] = [
        page.Facts("Result", facts),
        live_section(model, panel.text_for(job.recipe.data), panel.description),
        page.Samples(panel.samples, samples),
        losses,
        page.Prose("Next commands", commands),
    ]
    page.write(out / "report.html", page.render(panel.title, sections, subtitle=f"Triptych: the {panel.name} panel"))


def _commands(panel: Panel, data: DataSettings, model: Path) -> str:
    decoder = panel.name == "decoder"
    prompt = "My lord, " if decoder and data.path == SHAKESPEARE else panel.prompts_for(data)[0]
    command, options = "fill" if panel.name == "encoder" else "generate", " --temperature 0.8" if decoder else ""
    return (
        "The model is a directory that other tools can load: config.json, model.safetensors and tokenizer.json.\n\n"
        f"    triptych {command} {model} {shlex.quote(prompt)}{options}\n    triptych inspect {model}\n"
        f"    triptych check {model}\n    triptych count {model}"
    )


def _job(
    panel: Panel, data: Path | str | None, seconds: float, out: Path, again: bool, force: bool, watch: Watch
) -> Job:
    """The job of a new run or, with `again`, of the one under `out`.  Files of an older run are deleted last, so that a
    run that cannot start deletes nothing, and a run that is stopped leaves no file of another one beside its own."""
    checkpoints = out / CHECKPOINTS
    if again:
        watch.say(f"resuming from {checkpoints}")
        job = resume(checkpoints, [f"run.seconds={float(seconds)}"])
        for reason in job.skipped:
            watch.say(f"skipped {reason}")
        if job.trainer.done < 1.0:
            _delete(out, FINISHED)
        return job
    _check_directory(out, force)
    values = {"run.seconds": float(seconds), "run.out": str(checkpoints)}
    values |= {} if data is None else {"data.path": str(data)}
    watch.say("reading the text")
    job = prepare(read_recipe(panel.name, values=values))
    job.check_memory()
    _delete(out, (*FINISHED, SAMPLES, CHECKPOINTS))
    return job


def _check_directory(out: Path, force: bool) -> None:
    """Raises InputError if `out` holds a run of `triptych train`, or one of the quickstart without `force`."""
    if Checkpoints(out).exist():
        raise InputError(f"{out} holds a run of `triptych train`; give another --out")
    present = [name for name in (*FINISHED, CHECKPOINTS, SAMPLES) if (out / name).exists()]
    if not present or force:
        return
    states = {PAGE: "a finished run", CHECKPOINTS: "a run that was stopped"}
    state = next((states[name] for name in states if name in present), f"{present[0]}, which a run would replace")
    raise InputError(
        f"{out} holds {state}; continue it with --resume, delete it and start over with --force, or give another --out"
    )


def _delete(out: Path, names: Sequence[str]) -> None:
    """Delete what a run wrote.  Each file and directory is first moved aside, so that none is half deleted in place.

    Raises CheckpointError.
    """
    aside = out / ".deleted"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a deletion that was interrupted
        aside.mkdir()
        for name in names:
            if (out / name).exists():
                (out / name).rename(aside / name)
        shutil.rmtree(aside)
    except OSError as error:
        raise CheckpointError(f"cannot delete the run in {out}: {error.strerror or error}") from None


__all__ = ["PANELS", "Result", "Silent", "Watch", "run"]
