"""classify: the labels of texts and images, or of tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.models import gathered, opened

if TYPE_CHECKING:
    from triptych.model import Model


@options.opens
def classify(
    checkpoint: options.Checkpoint,
    texts: options.Lines = None,
    pair: Annotated[
        str | None,
        typer.Option("--pair", metavar="TEXT", help="The other half of every text, for models of pairs."),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Labels to show for each text.")] = 5,
    as_json: options.Json = False,
) -> None:
    """The labels of each text or image file; of each token where the model labels those."""
    from triptych.spec import ReplacedHead, TokenHead

    given = gathered(texts, lines=True)
    loaded = opened(checkpoint)
    if isinstance(loaded.spec.head, TokenHead | ReplacedHead):
        _tokens(loaded, given, as_json)
        return
    found = loaded.classify(given, second=None if pair is None else [pair] * len(given))
    if as_json:
        rows = [
            {"text": text, "labels": [{"label": label, "score": p} for label, p in labels]}
            for text, labels in zip(given, found, strict=True)
        ]
        screen.result({"results": rows})
        return
    for text, labels in zip(given, found, strict=True):
        shown = screen.table("label", "score", "", right=["score"])
        for label, p in labels[:top]:
            shown.add_row(screen.plain(label), f"{p:.4f}", "━" * round(min(1.0, max(0.0, p)) * 24))
        screen.show(shown, screen.plain(text))


def _tokens(model: Model, texts: list[str], as_json: bool) -> None:
    from triptych.spec import TokenHead
    from triptych.tasks import entities

    names = isinstance(model.spec.head, TokenHead)  # a discriminator names nothing
    tagged = zip(texts, model.tag(texts), strict=True)
    found = [(text, tags, entities(tags, text) if names else []) for text, tags in tagged]
    if as_json:
        rows = [
            {"text": text, "tokens": [asdict(tag) for tag in tags], "entities": [asdict(one) for one in named]}
            for text, tags, named in found
        ]
        screen.result({"results": rows})
        return
    for text, tags, named in found:
        shown = screen.table("token", "label", "probability", right=["probability"])
        for tag in tags:
            shown.add_row(screen.plain(tag.token), screen.plain(tag.label), f"{tag.probability:.1%}")
        screen.show(shown, screen.plain(text))
        if any(tag.label.startswith(("B-", "I-")) for tag in tags):
            things = screen.table("entity", "label", "probability", right=["probability"])
            for one in named:
                things.add_row(screen.plain(one.text), screen.plain(one.label), f"{one.probability:.1%}")
            screen.show(things)
