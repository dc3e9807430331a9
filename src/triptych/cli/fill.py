"""`triptych fill`: candidates for the mask tokens of texts."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_texts


@options.opens
def fill(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Candidates shown for each mask.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Predict the words at the mask tokens of texts."""
    inputs = read_texts(texts)
    masks_of_texts = load_model(checkpoint).fill(inputs, top=top)
    if as_json:
        rows = [
            {"text": text, "masks": [[{"token": t, "probability": p} for t, p in mask] for mask in masks]}
            for text, masks in zip(inputs, masks_of_texts, strict=True)
        ]
        screen.result({"results": rows})
        return
    for text, masks in zip(inputs, masks_of_texts, strict=True):
        for i, mask in enumerate(masks):
            number = f"  (mask {i + 1} of {len(masks)})" if len(masks) > 1 else ""
            table = screen.table("token", "probability", "", right=["probability"])
            for token, p in mask:
                table.add_row(screen.plain(token), f"{p:.1%}", "━" * round(p * 24))
            screen.show(table, screen.plain(text) + number)
