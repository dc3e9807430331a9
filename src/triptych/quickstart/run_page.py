"""The page and the loss curve of a finished run."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

from triptych import page
from triptych.model import Model
from triptych.page.live import live_section
from triptych.page.plot import png
from triptych.quickstart.panels import HeldOutResult, Panel
from triptych.train import Job
from triptych.train.recipe import DataSettings
from triptych.train.sources import SHAKESPEARE

CURVE = "loss.png"


def curve(job: Job) -> page.Curve:
    """Nats per token against steps: training, smoothed over a hundredth of the run, and held out."""
    history = job.trainer.at.history
    window = max(1, len(history) // 100)
    losses = [entry.loss for entry in history]
    smoothed = [
        (float(history[i].step), sum(losses[max(0, i + 1 - window) : i + 1]) / min(window, i + 1))
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
        ("Vocabulary", f"{model.spec.vocab:,} tokens ({job.recipe.tokenizer})"),
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
    prompt = "My lord, " if panel.name == "decoder" and data.path == SHAKESPEARE else panel.prompts_for(data)[0]
    first = {
        "decoder": f"triptych generate {model} {shlex.quote(prompt)} --temperature 0.8",
        "encoder": f"triptych fill {model} {shlex.quote(prompt)}",
        "encoder-decoder": f"triptych generate {model} {shlex.quote(prompt)}",
    }[panel.name]
    return (
        "The model is a directory that other tools can load: config.json, model.safetensors and tokenizer.json.\n\n"
        f"    {first}\n    triptych inspect {model}\n    triptych check {model}\n    triptych count {model}"
    )
