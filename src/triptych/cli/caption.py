"""`triptych caption`: a text for each image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model
from triptych.errors import InputError

if TYPE_CHECKING:
    from triptych.model import Model


MOST_TOKENS = 64


@options.opens
def caption(
    checkpoint: options.Checkpoint,
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", help="Image files, prepared as the checkpoint says.")
    ],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            show_default=False,
            help=f"Stop after N tokens; by default {MOST_TOKENS}, or fewer with a shorter decoder.",
        ),
    ] = None,
    beams: Annotated[int, typer.Option("--beams", metavar="N", min=0, help="Beam search with N beams; 0 is none.")] = 0,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of sampling.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Write a text for each image, with an encoder of images and a decoder; token ids without a tokenizer."""
    model = load_model(checkpoint)
    _check_fits(model)
    if max_new_tokens is None:
        context = model.spec.context
        max_new_tokens = MOST_TOKENS if context is None else min(MOST_TOKENS, context - 1)  # one is the start token's
    generations = model.generate(
        images, max_new_tokens=max_new_tokens, beams=beams, temperature=temperature, seed=None if beams else seed
    )
    if as_json:
        rows = [
            {"image": str(image), "text": one.text, "ids": one.ids, "reason": one.reason}
            for image, one in zip(images, generations, strict=True)
        ]
        screen.result({"results": rows})
        return
    for image, one in zip(images, generations, strict=True):
        name = f"{screen.plain(str(image))}: " if len(images) > 1 else ""
        text = " ".join(map(str, one.ids)) if model.tokenizer is None else one.text.strip()
        screen.write(f"{name}{text}\n")


def _check_fits(model: Model) -> None:
    """Raise InputError for a model that does not read images, or does not write."""
    from triptych.spec import PatchesSpec

    if not isinstance(model.spec.reads.embed, PatchesSpec):
        raise InputError(
            f"caption needs a model that reads images and writes text, of the type vision-encoder-decoder; this "
            f"{model.spec.family} model does not read images (of LLaVA, Gemma 3 and Mistral 3 the text model is read; "
            "what is missing is an input slot that puts the vectors of an image between tokens)"
        )
    if model.spec.layout != "encoder-decoder":
        raise InputError(
            f"caption needs a model with a decoder, of the type vision-encoder-decoder; this {model.spec.family} model "
            "has none: triptych classify gives the labels of an image"
        )
