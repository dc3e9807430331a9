"""`triptych classify`: labels of texts and images, or of tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.loading import load_model, read_texts

if TYPE_CHECKING:
    from triptych.model import Model


@options.opens
def classify(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    pair: Annotated[
        str | None,
        typer.Option("--pair", metavar="TEXT", help="Second text of each pair, for models of pairs."),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Labels shown for each text.")] = 5,
    as_json: options.Json = False,
) -> None:
    """Classify each text or image file, or each token where the model labels tokens."""
    from triptych.spec import ReplacedHeadSpec, TokenHeadSpec

    inputs = read_texts(texts, lines=True)
    model = load_model(checkpoint)
    if isinstance(model.spec.head, TokenHeadSpec | ReplacedHeadSpec):
        _classify_tokens(model, inputs, as_json)
        return
    scores = model.classify(inputs, second=None if pair is None else [pair] * len(inputs))
    if as_json:
        rows = [
            {"text": text, "labels": [{"label": label, "score": p} for label, p in labels]}
            for text, labels in zip(inputs, scores, strict=True)
        ]
        screen.result({"results": rows})
        return
    for text, labels in zip(inputs, scores, strict=True):
        table = screen.table("label", "score", "", right=["score"])
        for label, p in labels[:top]:
            table.add_row(screen.plain(label), f"{p:.4f}", "━" * round(min(1.0, max(0.0, p)) * 24))
        screen.show(table, screen.plain(text))


def _classify_tokens(model: Model, texts: list[str], as_json: bool) -> None:
    from triptych.spec import TokenHeadSpec
    from triptych.tasks import entities

    named_labels = isinstance(
        model.spec.head, TokenHeadSpec
    )  # a discriminator only tells replaced tokens from original ones
    tagged = zip(texts, model.tag(texts), strict=True)
    results = [(text, tags, entities(tags, text) if named_labels else []) for text, tags in tagged]
    if as_json:
        rows = [
            {"text": text, "tokens": [asdict(tag) for tag in tags], "entities": [asdict(one) for one in named]}
            for text, tags, named in results
        ]
        screen.result({"results": rows})
        return
    for text, tags, named in results:
        table = screen.table("token", "label", "probability", right=["probability"])
        for tag in tags:
            table.add_row(screen.plain(tag.token), screen.plain(tag.label), f"{tag.probability:.1%}")
        screen.show(table, screen.plain(text))
        if any(tag.label.startswith(("B-", "I-")) for tag in tags):
            entity_table = screen.table("entity", "label", "probability", right=["probability"])
            for one in named:
                entity_table.add_row(screen.plain(one.text), screen.plain(one.label), f"{one.probability:.1%}")
            screen.show(entity_table)
