"""`triptych tag`: the entities that texts name."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_texts


class Grouping(StrEnum):
    """The choices of --strategy (`triptych.tasks.Strategy`)."""

    simple = "simple"
    first = "first"
    average = "average"
    max = "max"


@options.opens
def tag(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    strategy: Annotated[
        Grouping,
        typer.Option(
            "--strategy", help="Group tokens (simple), or words by their first token, mean or surest token (max)."
        ),
    ] = Grouping.simple,
    window: options.Window = None,
    overlap: options.Overlap = None,
    as_json: options.Json = False,
) -> None:
    """Find the entities in texts: names of people, places and whatever the checkpoint labels."""
    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    with screen.waiting(f"tagging {len(inputs):,} texts"):
        entities = model.entities(inputs, strategy=strategy.value, window=window, overlap=overlap)
    if as_json:
        rows = [
            {"text": text, "entities": [asdict(one) for one in named]}
            for text, named in zip(inputs, entities, strict=True)
        ]
        screen.result({"strategy": strategy.value, "results": rows})
        return
    for text, named in zip(inputs, entities, strict=True):
        table = screen.table("entity", "label", "probability", "characters", right=["probability", "characters"])
        for one in named:
            place = f"{one.begin:,}-{one.end:,}"
            table.add_row(screen.plain(one.text), screen.plain(one.label), f"{one.probability:.1%}", place)
        screen.show(table, screen.plain(text))
