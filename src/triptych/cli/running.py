"""Commands that run a model: generate, chat, fill, encode."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from triptych.cli import options, screen
from triptych.cli.chatting import converse
from triptych.cli.models import gathered, opened

if TYPE_CHECKING:
    from triptych.model import Model


@options.opens
def generate(
    checkpoint: options.Checkpoint,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Texts to continue, or - to read one from stdin."),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.Penalty = 1.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed gives the same text.")] = 0,
    stop: options.Stop = None,
    beams: Annotated[
        int, typer.Option("--beams", metavar="N", min=0, help="Search with this many hypotheses; 0 samples.")
    ] = 0,
    decoder_prefix: Annotated[
        str, typer.Option("--decoder-prefix", metavar="TEXT", help="What an encoder-decoder's output begins with.")
    ] = "",
    chunk: options.Chunk = None,
    as_json: options.Json = False,
) -> None:
    """Continue prompts, or write the target of sources; a single one is shown as it comes."""
    texts = gathered(prompts, "prompt")
    loaded = opened(checkpoint)
    how: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "decoder_prefix": decoder_prefix,
        "chunk": chunk,
    }
    if len(texts) == 1 and not beams and not as_json:
        _streamed(loaded, texts[0], how)
    else:
        _batched(loaded, texts, how | {"beams": beams}, as_json)


def _streamed(model: Model, prompt: str, how: dict[str, Any]) -> None:
    ids: list[int] = []
    begun = time.perf_counter()
    if sys.stdout.isatty() and model.spec.layout == "decoder":
        screen.console().print(screen.plain(prompt), style="dim", end="", soft_wrap=True)
    for piece in model.stream(prompt, on_token=lambda _, token: ids.append(token), **how):
        screen.write(piece)
    screen.write("\n")
    screen.note(_speed(len(ids), time.perf_counter() - begun))


def _batched(model: Model, prompts: list[str], how: dict[str, Any], as_json: bool) -> None:
    begun = time.perf_counter()
    with screen.counting() as bar:
        task = bar.add_task("tokens", total=None if how["beams"] else how["max_new_tokens"] * len(prompts))
        found = model.generate(prompts, on_token=lambda *_: bar.advance(task), **how)
    seconds = time.perf_counter() - begun
    tokens = sum(len(generation.ids) for generation in found)
    if as_json:
        rows = [
            {"prompt": prompt, "text": got.text, "ids": got.ids, "reason": got.reason}
            for prompt, got in zip(prompts, found, strict=True)
        ]
        screen.result({"results": rows, "seed": how["seed"], "tokens": tokens, "seconds": round(seconds, 3)})
    else:
        for i, (prompt, got) in enumerate(zip(prompts, found, strict=True)):
            if len(found) > 1:
                screen.write(f"{'' if i == 0 else chr(10)}[{i + 1}] {prompt}\n")
            screen.write(f"{got.text}\n")
    screen.note(_speed(tokens, seconds))


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.1f} tokens/s"


@options.opens
def chat(
    checkpoint: options.Checkpoint,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="Instructions before the first turn.")] = "",
    show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Show the text and ids the model reads.")] = False,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.9,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.Penalty = 1.0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same seed gives the same answers; one is drawn and told."),
    ] = None,
    stop: options.Stop = None,
    as_json: options.Json = False,
) -> None:
    """Hold a conversation; /reset forgets it, /quit or ctrl-D ends it. Without a terminal, each line is a turn."""
    loaded = opened(checkpoint)
    how = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": tuple(stop or ()),
    }
    converse(loaded, how, system=system, seed=seed, show_prompt=show_prompt, as_json=as_json)


@options.opens
def fill(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Candidates for each mask.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Guess the words behind the mask tokens of texts."""
    given = gathered(texts)
    found = opened(checkpoint).fill(given, top=top)
    if as_json:
        rows = [
            {"text": text, "masks": [[{"token": t, "probability": p} for t, p in mask] for mask in masks]}
            for text, masks in zip(given, found, strict=True)
        ]
        screen.result({"results": rows})
        return
    for text, masks in zip(given, found, strict=True):
        for i, mask in enumerate(masks):
            which = f"  (mask {i + 1} of {len(masks)})" if len(masks) > 1 else ""
            shown = screen.table("token", "probability", "", right=["probability"])
            for token, p in mask:
                shown.add_row(screen.plain(token), f"{p:.1%}", "━" * round(p * 24))
            screen.show(shown, screen.plain(text) + which)


@options.opens
def encode(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    pooling: Annotated[
        str | None,
        typer.Option("--pooling", metavar="HOW", help="mean, first or dense; the checkpoint's own unless given."),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the vectors to a .npy or .safetensors file.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """One vector a text, and how alike they are."""
    from triptych.cli.vectors import FORMATS, save, show

    if out is not None and out.suffix not in FORMATS:
        raise typer.BadParameter(f"--out {out} must end in {' or '.join(FORMATS)}")
    given = gathered(texts, lines=True)
    loaded = opened(checkpoint)
    with screen.waiting(f"encoding {len(given):,} texts"):
        vectors = loaded.encode(given, pooling=pooling, normalize=normalize).float().cpu().numpy()
    if out is not None:
        save(vectors, out)
        screen.note(f"{out}: {screen.shape(vectors.shape)} vectors")
    if as_json:
        rows = [] if out else [{"text": t, "vector": v.tolist()} for t, v in zip(given, vectors, strict=True)]
        screen.result({"shape": list(vectors.shape), "out": None if out is None else str(out), "results": rows})
    elif out is None:
        show(given, vectors)
