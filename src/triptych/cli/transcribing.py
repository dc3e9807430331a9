"""transcribe: what is said in recordings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.models import opened

if TYPE_CHECKING:
    from triptych.tasks import Segment


class Task(StrEnum):
    """What is written of what is said."""

    said = "transcribe"
    english = "translate"


class Form(StrEnum):
    """How a transcript is written: with times, without, or as subtitles."""

    times = "times"
    text = "text"
    srt = "srt"
    vtt = "vtt"


@options.opens
def transcribe(
    checkpoint: options.Checkpoint,
    files: Annotated[list[Path], typer.Argument(metavar="FILE.wav...", help="PCM or float, of any rate and length.")],
    language: Annotated[
        str | None,
        typer.Option("--language", metavar="CODE", help="en, de, ...; heard in the first 30 seconds unless given."),
    ] = None,
    task: Annotated[Task, typer.Option("--task", help="Write what is said, or translate it to English.")] = (Task.said),
    form: Annotated[Form, typer.Option("--format", help="How the transcript is written.")] = Form.times,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of what is drawn where the likeliest is poor.")] = 0,
    previous: Annotated[
        bool, typer.Option("--previous", help="Tell each 30 seconds what was said before: steadier, so mistakes too.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write down what is said in WAV files, sentence by sentence as it comes, with times."""
    from triptych.media.audio import RATE, read_wav

    if len(files) > 1 and form in (Form.srt, Form.vtt) and not as_json:
        raise typer.BadParameter(f"{form.value} is of one file; give one, or --format times", param_hint="--format")
    loaded, results = None, []
    for file in files:
        sound = read_wav(file)  # what is no sound is refused before the model is loaded
        loaded = loaded or opened(checkpoint)
        if not as_json:
            screen.write("WEBVTT\n\n" if form is Form.vtt else f"{file}:\n" if len(files) > 1 else "")
        told = _Teller(None if as_json else form)
        found = loaded.transcribe(
            sound, language=language, task=task.value, seed=seed, previous=previous, on_segment=told
        )
        rows = [{"start": s.start, "end": s.end, "text": s.text.strip()} for s in found.segments]
        seconds = round(len(sound) / RATE, 3)
        results.append({"language": found.language, "seconds": seconds, "text": found.text, "segments": rows})
        known = "" if found.language is None else f", language {found.language}"
        screen.note(f"{seconds:.1f} s of sound, {told.shown} segments{known}")
    if as_json:
        several = [{"file": str(file), **result} for file, result in zip(files, results, strict=True)]
        screen.result(results[0] if len(files) == 1 else {"results": several})


class _Teller:
    """Writes each segment as it comes, in a form or not at all, and counts them."""

    def __init__(self, form: Form | None) -> None:
        self.form, self.shown = form, 0

    def __call__(self, segment: Segment) -> None:
        self.shown += 1
        if self.form is not None:
            screen.write(_written(segment, self.shown, self.form))


def _written(segment: Segment, number: int, form: Form) -> str:
    text = segment.text.strip()
    match form:
        case Form.text:
            return f"{text}\n"
        case Form.times:
            return f"[{_clock(segment.start)} -> {_clock(segment.end)}]  {text}\n"
        case Form.srt:
            begin, end = (_clock(t, hours=True).replace(".", ",") for t in (segment.start, segment.end))
            return f"{number}\n{begin} --> {end}\n{text}\n\n"
    return f"{_clock(segment.start, hours=True)} --> {_clock(segment.end, hours=True)}\n{text}\n\n"


def _clock(seconds: float, *, hours: bool = False) -> str:
    """`01:02.340`, with the hours where there are some or where they are asked for."""
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    over, minutes = divmod(minutes, 60)
    before = f"{over:02d}:" if over or hours else ""
    return f"{before}{minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"
