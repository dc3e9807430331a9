"""`triptych generate`: continue prompts, or run an encoder-decoder on sources."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import options, screen
from .loading import check_generates, load_draft, load_model, read_constraint, read_texts

if TYPE_CHECKING:
    from triptych.generate import QueueProgress
    from triptych.model import Model
    from triptych.probe import Edit


def generate(
    checkpoint: options.Checkpoint,
    prompts: list[str] | None = None,
    *,
    max_new_tokens: options.Positive = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.Natural = 0,
    top_p: options.Share = 1.0,
    min_p: options.Share = 0.0,
    repetition_penalty: float = 1.0,
    seed: options.Natural | None = None,
    stop: list[str] | None = None,
    stop_id: list[int] | None = None,
    schema: options.NamedPath | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    beams: options.Natural = 0,
    decoder_prefix: str = "",
    chunk: options.Positive | None = None,
    draft: str | None = None,
    draft_tokens: options.Positive = 4,
    matmul: options.Matmul = "auto",
    cache: options.CacheOption = "auto",
    steer: str | None = None,
    toward: str | None = None,
    away: str | None = None,
    as_json: options.Json = False,
) -> None:
    """Continue prompts, or run an encoder-decoder on sources; a single prompt is streamed.

    [PROMPT]...: Prompts, or - to read one from stdin.
    --seed N: The same seed gives the same text; 0 if omitted.
    --stop-id ID: Stop at this token id. Repeatable.
    --beams N: Beam search with N beams; 0 is none.
    --decoder-prefix TEXT: Start of an encoder-decoder's output.
    --chunk N: Process prompts N tokens at a time.
    --steer SITE[:SCALE]: Add a vector to every token at a site, or at the output of block SITE: that of --toward
        minus that of --away, or the one in a file (FILE@SITE).
    --toward TEXT: Text whose value --steer adds.
    --away TEXT: Text whose value --steer subtracts.
    """
    steered = _parse_steer(steer, toward, away)
    texts, constraint = read_texts(prompts, "prompt"), read_constraint(schema, regex, choice)
    model = load_model(checkpoint)
    check_generates(model, checkpoint.model)
    edits = () if steered is None else (_steering_edit(model, steered, toward, away),)
    settings = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or (), "decoder_prefix": decoder_prefix,
        "stop_ids": stop_id or (), "edit": edits, "constraint": constraint,
    }  # fmt: skip
    drafts = {
        "chunk": chunk, "draft": load_draft(checkpoint, draft), "draft_tokens": draft_tokens, "matmul": matmul,
        "cache": cache,
    }  # fmt: skip
    from triptych.tasks import note_on_prompts

    if model.executor == "auto" and (note := note_on_prompts(model.module, matmul)):
        screen.note(note)
    if len(texts) == 1 and not beams and not as_json:
        _stream(model, texts[0], settings, drafts)
    else:
        _generate_batch(model, texts, settings, drafts, beams=beams, as_json=as_json)


def _stream(model: Model, prompt: str, settings: dict[str, Any], drafts: dict[str, Any]) -> None:
    ids: list[int] = []
    engine = model.engine(**drafts)
    start = time.perf_counter()
    if sys.stdout.isatty() and model.spec.layout == "decoder":
        screen.console().print(screen.plain(prompt), style="dim", end="", soft_wrap=True)
    try:
        for piece in model.stream(prompt, on_token=lambda _, token: ids.append(token), engine=engine, **settings):
            screen.write(piece)
    except KeyboardInterrupt:
        screen.write("\n")  # the message stands on a line of its own
        raise
    screen.write("\n")
    screen.note(_speed(len(ids), time.perf_counter() - start))
    if len(ids) > 1 and model.executor != "modules" and engine.why_modules is not None:
        screen.note(f"steps ran as modules: {engine.why_modules}")
    if engine.speculation is not None:
        note_guesses(engine.speculation.drafted, engine.speculation.accepted)


def _generate_batch(
    model: Model, prompts: list[str], settings: dict[str, Any], drafts: dict[str, Any], *, beams: int, as_json: bool
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


def _parse_steer(steer: str | None, toward: str | None, away: str | None) -> tuple[Path | None, str, float] | None:
    """The file, site and scale of --steer; None without it.  Raises BadParameter for what does not go together."""
    if steer is None:
        if toward is not None or away is not None:
            raise typer.BadParameter("--toward and --away are for --steer SITE")
        return None
    file, at, place = steer.rpartition("@")
    site, colon, number = place.partition(":")
    try:
        scale = float(number) if colon else 1.0
    except ValueError:
        scale = math.nan
    if not site or not math.isfinite(scale) or scale == 0 or (at and not file):
        raise typer.BadParameter(
            f"--steer {steer} must be a site or the number of a block and a scale other than 0, as in 10:4 or "
            "vector.safetensors@10:4"
        )
    if file and (toward is not None or away is not None):
        raise typer.BadParameter("--steer takes its vector from the file or from --toward and --away, not from both")
    if not file and (toward is None or away is None):
        raise typer.BadParameter("--steer needs --toward TEXT and --away TEXT, or a vector: FILE@SITE:SCALE")
    return (Path(file) if file else None), site, scale


def _steering_edit(model: Model, parsed: tuple[Path | None, str, float], toward: str | None, away: str | None) -> Edit:
    """The edit that --steer asks for."""
    from triptych.probe.patching import read_vector

    file, site, scale = parsed
    if site.isdecimal():
        site = f"{'decoder.' if len(model.spec.stacks) > 1 else ''}blocks.{int(site)}.resid_post"
    return model.steer(toward, away, site=site, scale=scale, vector=None if file is None else read_vector(file))
