"""`/v1/audio/transcriptions` and `/v1/audio/translations`: the text of a WAV file, by a model that reads sound.

A recording is written window by window, 30 s each, and other requests for the model have their turn between two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from starlette.datastructures import UploadFile
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from triptych.errors import InputError, shown
from triptych.media.audio import RATE, Samples, decode_wav
from triptych.tasks.transcribe import TEMPERATURES, Segment, Transcript, transcribed_windows
from .abilities import require
from .calls import ClientLeft, called, prepared
from .fields import ApiError, Fields, read, table
from .worker import ModelWorker

if TYPE_CHECKING:
    from .app import Server

LONGEST = 3600.0  # seconds of a recording
NAME = "file"


def routes(server: Server) -> list[Route]:
    def route(task: str, kind: str) -> Route:
        async def answer(request: HttpRequest) -> Response:
            fields, content = await form(request, kind)
            await server.ready(fields.get("model"))
            worker = server.worker_of(fields)
            require(worker, "transcriptions")
            sound = await asyncio.to_thread(sound_of, content)
            transcript = await transcribed(request, worker, fields, sound, task)
            return response(fields, task, transcript, len(sound) / RATE)

        return Route(f"/v1/audio/{kind}", answer, methods=["POST"], name=kind)

    return [route("transcribe", "transcriptions"), route("translate", "translations")]


async def form(request: HttpRequest, kind: str) -> tuple[Fields, bytes]:
    """The fields of a form, and the content of its file.  Raises ApiError for what is no such form."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "send the recording as multipart/form-data, with the WAV file as its field file")
    body: dict[str, Any] = {}
    content: bytes | None = None
    async with request.form(max_files=1, max_fields=32, max_part_size=1 << 16) as parts:
        for name, value in parts.multi_items():
            if isinstance(value, UploadFile) != (name == NAME):
                raise ApiError(400, f"{shown(name)} must {'' if name == NAME else 'not '}be a file", name)
            if name in body or (name == NAME and content is not None):
                raise ApiError(400, f"{shown(name)} is there twice", name)
            if isinstance(value, UploadFile):
                content = await value.read()
            else:
                body[name] = _typed(value, table(kind).get(name, {}).get("type", "string"), name)
    fields = read(body, kind)
    if content is None:
        raise ApiError(400, "file is missing: the recording, a WAV file", NAME)
    return fields, content


def _typed(text: str, kind: str, name: str) -> object:
    """The value of a form's field, which is a text, in the type of the table."""
    try:
        return {"number": float, "integer": int}.get(kind, str)(text)
    except ValueError:
        raise ApiError(400, f"{name} must be of type {kind}, not {shown(text)}", name) from None


def sound_of(content: bytes) -> Samples:
    """The sound of a WAV file.  Raises ApiError: 415 for anything else, 413 for a recording that is too long."""
    try:
        return decode_wav(content, "the recording", longest=LONGEST)
    except InputError as error:
        status = 413 if "are the limit" in str(error) else 415
        raise ApiError(status, str(error), NAME) from None


async def transcribed(
    request: HttpRequest, worker: ModelWorker, fields: Fields, sound: Samples, task: str
) -> Transcript:
    """The transcript of a recording, whose windows are written between the work for others.

    A `temperature` of 0 is raised where a text repeats itself or is unlikely, as in OpenAI's own.  Raises ApiError for
    a language or a task that the model does not know.
    """
    temperature = fields.get("temperature", 0.0)
    settings = {
        "language": fields.get("language"),
        "task": task,
        "temperatures": (temperature,) if temperature else TEMPERATURES,
        "seed": fields.get("seed", 0),
    }
    windows = await prepared(worker, partial(transcribed_windows, worker.model, sound, **settings), "language")
    language, segments = settings["language"], list[Segment]()
    while (window := await called(worker, partial(_next, windows))) is not None:
        language = window.language
        segments += window.segments
        if await request.is_disconnected():
            raise ClientLeft
    return Transcript(language, tuple(segments))


@torch.inference_mode()
def _next(windows: Iterator[Transcript]) -> Transcript | None:
    return next(windows, None)


def response(fields: Fields, task: str, transcript: Transcript, seconds: float) -> Response:
    """The transcript in the form that was asked for."""
    kind = fields.get("response_format", "json")
    segments = transcript.segments
    if kind == "text":
        return PlainTextResponse(transcript.text + "\n")
    if kind == "srt":
        blocks = [f"{i}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{one.text.strip()}\n"
                  for i, one in enumerate(segments, 1)]  # fmt: skip
        return PlainTextResponse("\n".join(blocks))
    if kind == "vtt":
        blocks = [f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{one.text.strip()}\n" for one in segments]
        return PlainTextResponse("\n".join(["WEBVTT\n", *blocks]))
    if kind == "json":
        return JSONResponse({"text": transcript.text})
    return JSONResponse({
        "task": task, "language": transcript.language or "english", "duration": seconds, "text": transcript.text,
        "segments": [
            {"id": i, "start": one.start, "end": one.end, "text": one.text, "tokens": list(one.ids)}
            for i, one in enumerate(segments)
        ],
    })  # fmt: skip


def _time(seconds: float, point: str) -> str:
    """hh:mm:ss and milliseconds, as subtitles have it."""
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"
