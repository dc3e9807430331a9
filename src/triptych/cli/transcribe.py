"""`triptych transcribe`: the words spoken in recordings."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from . import options, screen
from .loading import load_model
from .records import check_alone, check_without_records, cluster_of, work_on_records

if TYPE_CHECKING:
    from triptych.tasks import Segment


TranscriptFormat = Literal["times", "text", "srt", "vtt"]  # with times, without them, or subtitles


def transcribe(
    checkpoint: options.Checkpoint,
    files: list[Path] | None = None,
    *,
    language: str | None = None,
    task: Literal["transcribe", "translate"] = "transcribe",
    format_: TranscriptFormat = "times",
    seed: options.Natural = 0,
    previous: bool = False,
    cache: options.CacheOption = "auto",
    records: options.RecordFile = None,
    out: options.RecordFile = None,
    ray: options.Ray = None,
    actors: options.Actors = None,
    as_json: options.Json = False,
) -> None:
    """Transcribe WAV files segment by segment, with times.

    FILE.wav...: WAV files, PCM or float, of any sample rate and length.
    --language CODE: en, de, ...; by default detected from the first 30 seconds.
    --task: Transcribe, or translate to English.
    --format: Format of the transcript.
    --seed N: Seed of sampling where greedy decoding fails.
    --previous: Condition each 30 seconds on the previous text: more consistent, but errors spread.
    --records FILE: Work on the records of a .jsonl or .parquet file, each with an id and a file.
    --out FILE: With --records, the results: .jsonl or .parquet.
    """
    from triptych.batches.works import transcribing, transcription
    from triptych.media.audio import read_wav

    settings: dict[str, Any] = {"language": language, "task": task, "seed": seed, "previous": previous, "cache": cache}
    if records is not None:
        check_alone(files, "--records")
        work_on_records(
            transcribing, checkpoint, settings, records, out, field="file", at_once=4,
            cluster=cluster_of(ray, actors), as_json=as_json,
        )  # fmt: skip
        return
    check_without_records(out=out, ray=ray, actors=actors)
    if not files:
        raise typer.BadParameter("no file given; write WAV files after MODEL, or give --records FILE")
    if len(files) > 1 and format_ in ("srt", "vtt") and not as_json:
        raise typer.BadParameter(
            f"{format_} describes one file; give one FILE.wav, or --format times", param_hint="--format"
        )
    model, results = None, []
    for file in files:
        sound = read_wav(file)  # fails before the model is loaded
        model = model or load_model(checkpoint)
        if not as_json:
            screen.write("WEBVTT\n\n" if format_ == "vtt" else f"{file}:\n" if len(files) > 1 else "")
        numbers = count(1)

        def show(segment: Segment, numbers: Iterator[int] = numbers) -> None:
            screen.write(_formatted(segment, next(numbers), format_))

        transcript = model.transcribe(sound, **settings, on_segment=None if as_json else show)
        results.append(transcription(transcript, sound))
        detected = "" if transcript.language is None else f", language {transcript.language}"
        seconds, segments = results[-1]["seconds"], len(transcript.segments)
        screen.note(f"{seconds:.1f} s of sound, {segments} segments{detected}")
    if as_json:
        several = [{"file": str(file), **result} for file, result in zip(files, results, strict=True)]
        screen.result(results[0] if len(files) == 1 else {"results": several})


def _formatted(segment: Segment, number: int, form: TranscriptFormat) -> str:
    text = " ".join(segment.text.split("\n")).strip()  # an empty line would end a subtitle
    match form:
        case "text":
            return f"{text}\n"
        case "times":
            return f"[{_clock(segment.start)} -> {_clock(segment.end)}]  {text}\n"
        case "srt":
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
