"""`triptych transcribe`: the words spoken in recordings."""

from __future__ import annotations

from enum import StrEnum
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model

if TYPE_CHECKING:
    from triptych.tasks import Segment


class Task(StrEnum):
    """Write the spoken words, or their English translation."""

    transcript = "transcribe"
    english = "translate"


class TranscriptFormat(StrEnum):
    """Text with times, without times, or as subtitles."""

    times = "times"
    text = "text"
    srt = "srt"
    vtt = "vtt"


@options.opens
def transcribe(
    checkpoint: options.Checkpoint,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE.wav...", help="WAV files, PCM or float, of any sample rate and length."),
    ],
    language: Annotated[
        str | None,
        typer.Option("--language", metavar="CODE", help="en, de, ...; by default detected from the first 30 seconds."),
    ] = None,
    task: Annotated[Task, typer.Option("--task", help="Transcribe, or translate to English.")] = (Task.transcript),
    form: Annotated[
        TranscriptFormat, typer.Option("--format", help="Format of the transcript.")
    ] = TranscriptFormat.times,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of sampling where greedy decoding fails.")] = 0,
    previous: Annotated[
        bool,
        typer.Option(
            "--previous", help="Condition each 30 seconds on the previous text: more consistent, but errors spread."
        ),
    ] = False,
    cache: options.Cache = options.CacheForm.auto,
    as_json: options.Json = False,
) -> None:
    """Transcribe WAV files segment by segment, with times."""
    from triptych.media.audio import RATE, read_wav

    if len(files) > 1 and form in (TranscriptFormat.srt, TranscriptFormat.vtt) and not as_json:
        raise typer.BadParameter(
            f"{form.value} describes one file; give one FILE.wav, or --format times", param_hint="--format"
        )
    model, results = None, []
    for file in files:
        sound = read_wav(file)  # fails before the model is loaded
        model = model or load_model(checkpoint)
        if not as_json:
            screen.write("WEBVTT\n\n" if form is TranscriptFormat.vtt else f"{file}:\n" if len(files) > 1 else "")
        writer = _SegmentWriter(None if as_json else form)
        transcript = model.transcribe(
            sound, language=language, task=task.value, seed=seed, previous=previous, cache=cache.value,
            on_segment=writer,
        )  # fmt: skip
        rows = [{"start": s.start, "end": s.end, "text": s.text.strip()} for s in transcript.segments]
        seconds = round(len(sound) / RATE, 3)
        results.append({"language": transcript.language, "seconds": seconds, "text": transcript.text, "segments": rows})
        detected = "" if transcript.language is None else f", language {transcript.language}"
        screen.note(f"{seconds:.1f} s of sound, {writer.count} segments{detected}")
    if as_json:
        several = [{"file": str(file), **result} for file, result in zip(files, results, strict=True)]
        screen.result(results[0] if len(files) == 1 else {"results": several})


class _SegmentWriter:
    """Writes each segment in the given format, or none of them without one, and counts them."""

    def __init__(self, form: TranscriptFormat | None) -> None:
        self.form, self.count = form, 0

    def __call__(self, segment: Segment) -> None:
        self.count += 1
        if self.form is not None:
            screen.write(_formatted(segment, self.count, self.form))


def _formatted(segment: Segment, number: int, form: TranscriptFormat) -> str:
    text = " ".join(segment.text.split("\n")).strip()  # an empty line would end a subtitle
    match form:
        case TranscriptFormat.text:
            return f"{text}\n"
        case TranscriptFormat.times:
            return f"[{_clock(segment.start)} -> {_clock(segment.end)}]  {text}\n"
        case TranscriptFormat.srt:
            begin, end = (_clock(t, hours=True).replace(".", ",") for t in (segment.start, segment.end))
            return f"{number}\n{begin} --> {end}\n{text.replace('-->', '->')}\n\n"
    begin, end = (_clock(t, hours=True) for t in (segment.start, segment.end))
    return f"{begin} --> {end}\n{escape(text, quote=False)}\n\n"  # WebVTT, section 4.2.2: "&" and "<" are markup


def _clock(seconds: float, *, hours: bool = False) -> str:
    """`01:02.340`; with the hours if there are any, or if `hours`."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    whole_hours, minutes = divmod(minutes, 60)
    prefix = f"{whole_hours:02d}:" if whole_hours or hours else ""
    return f"{prefix}{minutes:02d}:{milliseconds // 1000:02d}.{milliseconds % 1000:03d}"
