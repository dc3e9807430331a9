"""`triptych generate`: continue prompts, or run an encoder-decoder on sources."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import typer

from triptych.cli import options, screen
from triptych.cli.loading import check_generates, load_draft, load_model, read_texts
from triptych.cli.steering import Away, Steer, Toward, parse_steer, steering_edit

if TYPE_CHECKING:
    from triptych.attention import CacheType
    from triptych.generate import QueueProgress
    from triptych.model import Model
    from triptych.probe import Edit


class GenerateSettings(options.SamplingSettings):
    """Those of `chat`, and what only `generate` takes."""

    decoder_prefix: str
    stop_ids: tuple[int, ...]
    edit: tuple[Edit, ...]


class DraftSettings(TypedDict):
    """What guesses tokens, how prompts are read, and what the cache keeps."""

    chunk: int | None
    draft: Model | str | None
    draft_tokens: int
    matmul: Literal["auto", "bf16", "stored"]
    cache: CacheType


Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PROMPT]...", help="Prompts, or - to read one from stdin."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="The same seed gives the same text; 0 if omitted.", show_default=False),
]
StopId = Annotated[list[int] | None, typer.Option("--stop-id", metavar="ID", help="Stop at this token id. Repeatable.")]
Beams = Annotated[int, typer.Option("--beams", metavar="N", min=0, help="Beam search with N beams; 0 is none.")]
DecoderPrefix = Annotated[
    str, typer.Option("--decoder-prefix", metavar="TEXT", help="Start of an encoder-decoder's output.")
]


@options.opens
def generate(
    checkpoint: options.Checkpoint,
    prompts: Prompts = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.Penalty = 1.0,
    seed: Seed = None,
    stop: options.Stop = None,
    stop_id: StopId = None,
    beams: Beams = 0,
    decoder_prefix: DecoderPrefix = "",
    chunk: options.Chunk = None,
    draft: options.Draft = None,
    draft_tokens: options.DraftTokens = 4,
    matmul: options.Matmul = options.Products.AUTO,
    cache: options.Cache = options.CacheForm.auto,
    steer: Steer = None,
    toward: Toward = None,
    away: Away = None,
    as_json: options.Json = False,
) -> None:
    """Continue prompts, or run an encoder-decoder on sources; a single prompt is streamed."""
    steered = parse_steer(steer, toward, away)
    texts = read_texts(prompts, "prompt")
    model = load_model(checkpoint)
    check_generates(model, checkpoint.model)
    settings = GenerateSettings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop or ()), decoder_prefix=decoder_prefix,
        stop_ids=tuple(stop_id or ()), edit=() if steered is None else (steering_edit(model, steered, toward, away),),
    )  # fmt: skip
    drafts = DraftSettings(
        chunk=chunk, draft=load_draft(checkpoint, draft), draft_tokens=draft_tokens, matmul=matmul.value,
        cache=cache.value,
    )  # fmt: skip
    from triptych.tasks import note_on_prompts

    if model.executor == "auto" and (note := note_on_prompts(model.module, matmul.value)):
        screen.note(note)
    if len(texts) == 1 and not beams and not as_json:
        _stream(model, texts[0], settings, drafts)
    else:
        _generate_batch(model, texts, settings, drafts, beams=beams, as_json=as_json)


def _stream(model: Model, prompt: str, settings: GenerateSettings, drafts: DraftSettings) -> None:
    ids: list[int] = []
    engine = model.engine(**drafts)
    start = time.perf_counter()
    if sys.stdout.isatty() and model.spec.layout == "decoder":
        screen.console().print(screen.plain(prompt), style="dim", end="", soft_wrap=True)
    for piece in model.stream(prompt, on_token=lambda _, token: ids.append(token), engine=engine, **settings):
        screen.write(piece)
    screen.write("\n")
    screen.note(_speed(len(ids), time.perf_counter() - start))
    if len(ids) > 1 and model.executor != "modules" and engine.why_modules is not None:
        screen.note(f"steps ran as modules: {engine.why_modules}")
    if engine.speculation is not None:
        note_guesses(engine.speculation.drafted, engine.speculation.accepted)


def _generate_batch(
    model: Model, prompts: list[str], settings: GenerateSettings, drafts: DraftSettings, *, beams: int, as_json: bool
) -> None:
    start = time.perf_counter()
    with screen.counting() as bar:
        task = bar.add_task("prompts", total=len(prompts))

        def show(progress: QueueProgress) -> None:
            bar.update(task, completed=progress.done, description=f"prompts, {progress.tokens:,} tokens")

        generations = model.generate(prompts, on_progress=show, beams=beams, **settings, **drafts)
    seconds = time.perf_counter() - start
    counted = [(len(one.ids), one.reused, one.drafted, one.accepted) for one in generations]
    tokens, reused, drafted, accepted = map(sum, zip(*counted, strict=True))
    if as_json:
        rows = [
            {"prompt": prompt, "text": generation.text, "ids": generation.ids, "reason": generation.reason}
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
        counts = {"tokens": tokens, "reused": reused, "drafted": drafted, "accepted": accepted}
        screen.result({"results": rows, "seed": settings["seed"] or 0, **counts, "seconds": round(seconds, 3)})
    else:
        for i, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
            if len(generations) > 1:
                screen.write(f"{'' if i == 0 else chr(10)}[{i + 1}] {prompt}\n")
            screen.write(f"{generation.text}\n")
    screen.note(_speed(tokens, seconds))
    if reused:
        screen.note(f"{reused:,} tokens of prompts that begin alike were computed once")
    if drafts["draft"] is not None:
        note_guesses(drafted, accepted)


def note_guesses(drafted: int, accepted: int) -> None:
    """How many guessed tokens were right."""
    screen.note(f"{accepted:,} of {drafted:,} guessed tokens were right, {accepted / max(drafted, 1):.0%}")


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"
