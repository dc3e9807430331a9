"""What the commands do for many records: functions that load a model and give a function of lines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from threading import Thread
from typing import Any

from triptych import machine
from triptych.checkpoints.save import sync_directory
from triptych.media.audio import RATE, Samples, read_wav
from triptych.model import Model, load
from triptych.quantize import packing_arguments
from triptych.shards.inputs import InputPart
from triptych.shards.manifest import TOKENIZER, ShardManifest
from triptych.shards.shard_file import shard_name
from triptych.shards.tokenize_worker import ShardWork, make_shard
from triptych.tasks.search import embedded_files, embedder_of
from triptych.tasks.search_index import Embedded
from triptych.tasks.transcribe import Transcript
from triptych.text import from_directory
from triptych.text.corpus import TextFile
from .records import Answers, Row, WorkFunction, each_record


def load_checkpoint(
    *,
    model: str,
    dtype: str | None = None,
    quantize: str | None = None,
    adapter: str | Path | None = None,
    device: str = "cpu",
    offline: bool = False,
    ignore: Sequence[str] | None = None,
) -> Model:
    """The model of MODEL and the options for loading it, as the command line has them.  Raises as `load`."""
    form, plain = packing_arguments(quantize)
    return load(
        model, dtype=dtype, device=machine.device(device), ignore=ignore or (), offline=offline, quantize=form,
        dequantize=plain, adapter=adapter,
    )  # fmt: skip


def encoding(checkpoint: Mapping[str, Any], **settings: Any) -> WorkFunction:
    """The `vector` of each `text`; `settings` as of `Model.encode`."""
    model = load_checkpoint(**checkpoint)

    def encode(rows: list[Row]) -> list[dict[str, Any]]:
        vectors = model.encode([row["text"] for row in rows], **settings).float().cpu()
        return [{"vector": vector} for vector in vectors.tolist()]

    return each_record(encode)


def tagging(checkpoint: Mapping[str, Any], **settings: Any) -> WorkFunction:
    """The `entities` in each `text`; `settings` as of `Model.entities`."""
    model = load_checkpoint(**checkpoint)

    def tag(rows: list[Row]) -> list[dict[str, Any]]:
        found = model.entities([row["text"] for row in rows], **settings)
        return [{"entities": [asdict(one) for one in named]} for named in found]

    return each_record(tag)


def transcribing(checkpoint: Mapping[str, Any], **settings: Any) -> WorkFunction:
    """What is said in each WAV file `file`; `settings` as of `Model.transcribe`."""
    model = load_checkpoint(**checkpoint)

    def transcribe(rows: list[Row]) -> list[dict[str, Any]]:
        sounds = [read_wav(row["file"]) for row in rows]
        return [transcription(model.transcribe(sound, **settings), sound) for sound in sounds]

    return each_record(transcribe)


def transcription(transcript: Transcript, sound: Samples) -> dict[str, Any]:
    """A transcript of `sound` in plain values: the language, the seconds, the text and the segments."""
    rows = [{"start": s.start, "end": s.end, "text": s.text.strip()} for s in transcript.segments]
    seconds = round(len(sound) / RATE, 3)
    return {"language": transcript.language, "seconds": seconds, "text": transcript.text, "segments": rows}


def answering(models: Mapping[str, str], max_rows: int) -> WorkFunction:
    """The routes' answer to each request, as many at one time as the limits of a server let in, over all calls."""
    from triptych.serve.app import Server
    from triptych.serve.limits import ServerLimits
    from triptych.serve.loading import Loader
    from .requests import record_of

    loader, limits = Loader(max_rows), ServerLimits(requests=2 * max_rows)
    app = Server({name: loader.worker(name, path) for name, path in models.items()}, limits=limits).app()
    loop, entered = asyncio.new_event_loop(), asyncio.Semaphore(limits.requests)
    Thread(target=loop.run_forever, daemon=True).start()

    async def one(line: bytes) -> tuple[int, dict[str, Any]]:
        async with entered:
            return await record_of(app, line)

    async def every(lines: Sequence[bytes]) -> Answers:
        return [*await asyncio.gather(*map(one, lines))]

    def answer(lines: Sequence[bytes]) -> Answers:
        answers: Answers = asyncio.run_coroutine_threadsafe(every(lines), loop).result()
        return answers

    return answer


def embedding(checkpoint: Mapping[str, Any], tokens: int, overlap: int, width: int) -> WorkFunction:
    """The passages of each `text` and their vectors, as `EmbedFiles` has them."""
    embedder = embedder_of(load_checkpoint(**checkpoint))

    def embed(rows: list[Row]) -> list[dict[str, Any]]:
        files, parts = [TextFile(row["id"], row["text"]) for row in rows], dict[str, Embedded]()
        for _, some in embedded_files(files, embedder, tokens, overlap, width):
            parts |= some
        every = [parts[one.digest] for one in files]
        return [{"spans": [*map(astuple, one.spans)], "vectors": one.vectors.tolist()} for one in every]

    return each_record(embed)


def tokenizing(directory: str, plan: Mapping[str, Any]) -> WorkFunction:
    """The shard of each `part` of the inputs, in `directory`; one that is there stays."""
    shared = ShardManifest.model_validate(plan)
    tokenizer = from_directory(Path(directory) / TOKENIZER)
    work = ShardWork(Path(directory), shared.run, shared.field, shared.separator, tokenizer, shared.tokenizer)

    def make(rows: list[Row]) -> list[dict[str, Any]]:
        for row in rows:
            shard = work.out / shard_name(row["id"])
            if not shard.exists():
                os.replace(make_shard(work, row["id"], InputPart.from_json(row["part"]), lambda read: None), shard)
                sync_directory(work.out)
        return [{} for _ in rows]

    return each_record(make)
