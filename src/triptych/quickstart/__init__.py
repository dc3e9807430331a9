"""Train a small transformer on real text, write with it, and show its attention: one call, three panels.

Each panel is the recipe of its name, what its samples are, how it is judged, and what its page shows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from triptych.checkpoints import atomic_write
from triptych.errors import InputError
from triptych.model import Model
from triptych.page import Sample
from triptych.quickstart.panels import PANELS, Panel, Verdict
from triptych.quickstart.report import write_report
from triptych.train import Event, Job, Trainer, prepare, read_recipe, resume

CHECKPOINTS, MODEL, SAMPLES, REPORT = "checkpoints", "model", "samples.json", "report.html"


@runtime_checkable
class Watch(Protocol):
    """Who is told of a run as it goes: the live line of the command line, or nobody."""

    def say(self, what: str) -> None: ...
    def step(self, event: Event) -> None: ...
    def sample(self, label: str, text: str) -> None: ...


class Nobody:
    """Tells nobody."""

    def say(self, what: str) -> None:
        pass

    def step(self, event: Event) -> None:
        pass

    def sample(self, label: str, text: str) -> None:
        pass


@dataclass(frozen=True)
class Result:
    """What a run left behind: the model's directory, the page, and how good the model became."""

    panel: str
    model: Path
    report: Path
    steps: int
    seconds: float
    verdict: Verdict
    samples: list[Sample] = field(repr=False)

    def facts(self) -> list[tuple[str, str]]:
        """For a person: name and value."""
        trained = f"{self.steps:,} steps in {self.seconds:,.0f} s"
        return [
            ("result", self.verdict.said),
            ("trained", trained),
            ("model", str(self.model)),
            ("page", str(self.report)),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        told = {"panel": self.panel, "model": str(self.model), "report": str(self.report)}
        return told | {"steps": self.steps, "seconds": round(self.seconds, 1)} | self.verdict.to_dict()


def run(
    *,
    panel: str = "decoder",
    data: Path | str | None = None,
    seconds: float = 90.0,
    out: Path | str | None = None,
    resume: bool = False,
    watch: Watch | None = None,
) -> Result:
    """Train the panel's model for `seconds` and write `model/`, `loss.png` and `report.html` under `out`, by default
    `runs/quickstart`, or `runs/quickstart-PANEL` for another panel than the decoder.

    A finished run under `out` is replaced; one that was stopped is gone on with by `resume`, and refused otherwise.
    Raises FetchError without a network and without `data`, TextError or InputError for data that cannot be used.
    """
    watch, chosen = watch or Nobody(), PANELS[panel]
    out = Path(out or "runs/quickstart" + (f"-{panel}" if panel != "decoder" else ""))
    job = _job(chosen, data, seconds, out, resume, watch)
    samples = _Samples(chosen, job, out, watch)
    job.run(on_step=watch.step, on_sample=samples.take)
    watch.say("judging it on text it has not seen")
    model = Model(job.trainer.module.eval(), job.tokenizer, job.hf)
    verdict = chosen.judge(model, job)
    model.save(out / MODEL)
    write_report(out, chosen, job, model, samples.items, verdict)
    at = job.trainer.at
    return Result(panel, out / MODEL, out / REPORT, at.step, at.elapsed, verdict, samples.items)


class _Samples:
    """The samples of a run so far, also those of the run it goes on with."""

    def __init__(self, panel: Panel, job: Job, out: Path, watch: Watch) -> None:
        self.panel, self.job, self.file, self.watch = panel, job, out / SAMPLES, watch
        begun = job.trainer.at.step
        kept = json.loads(self.file.read_text(encoding="utf-8")) if begun and self.file.is_file() else []
        self.items = [item for item in (Sample(**one) for one in kept) if (item.step or 0) <= begun]

    def take(self, trainer: Trainer) -> None:
        """What the model makes of the panel's prompts by now."""
        model, step = Model(trainer.module, self.job.tokenizer, self.job.hf), trainer.at.step
        new = [Sample(step, label, text) for label, text in self.panel.write(model)]
        for item in new[:1]:
            self.watch.sample(f"step {step:,}: {item.label}", item.text)
        self.items += new
        atomic_write(self.file, json.dumps([vars(item) for item in self.items], indent=1).encode())


def _job(panel: Panel, data: Path | str | None, seconds: float, out: Path, again: bool, watch: Watch) -> Job:
    checkpoints = out / CHECKPOINTS
    if again:
        watch.say(f"going on from {checkpoints}")
        job = resume(checkpoints, [f"run.seconds={float(seconds)}"])
        for reason in job.skipped:
            watch.say(f"passed over {reason}")
        return job
    if checkpoints.is_dir() and not (out / REPORT).is_file():
        raise InputError(f"{out} holds a run that was stopped; give --resume to go on, or another --out, or remove it")
    changes = [f"run.seconds={float(seconds)}", f"run.out={json.dumps(str(checkpoints))}"]
    if data is not None:
        changes.append(f"data.path={json.dumps(str(data))}")
    watch.say("reading the text")
    job = prepare(read_recipe(panel.name, changes))
    for old in (REPORT, CHECKPOINTS, SAMPLES):  # only now: a run that cannot start takes nothing away
        path = out / old
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return job


__all__ = ["PANELS", "Nobody", "Result", "Watch", "run"]
