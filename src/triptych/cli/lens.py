"""`triptych lens`: what a model would answer after each layer, and which parts its answer is made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from . import options, screen
from .patch import answers_of

if TYPE_CHECKING:
    from triptych.probe import Lens, LogitAttribution

WIDEST = 10  # positions in a table; of more the last ones are shown
LISTED = 20  # parts of a logit


def lens(
    checkpoint: options.Checkpoint,
    text: str,
    *,
    top: options.Positive | None = None,
    position: list[int] | None = None,
    attribution: bool = False,
    answer: str | None = None,
    other: str | None = None,
    stack: Literal["encoder", "decoder"] | None = None,
    target: str | None = None,
    save: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Show the likeliest tokens after each layer (the logit lens), or what each part adds to the answer's logit.

    TEXT: Text to run the model on.
    --top K: Tokens for each layer and position; by default 5 of one position, and 1 of several.
    --position P: Show only this position. Repeatable.
    --attribution: Show what each head and MLP adds to the answer's logit instead.
    --answer TOKEN: The answer of --attribution; by default the likeliest token.
    --other TOKEN: Attribute the difference to this token's logit.
    --stack: Stack of an encoder-decoder; by default the decoder.
    --save FILE: Write the tables to an offline .html page.
    """
    screen.check_suffix(save)
    if not attribution and not (answer is None and other is None):
        raise typer.BadParameter("--answer and --other are for --attribution; add that option")
    if attribution and len(position or ()) > 1:
        raise typer.BadParameter("--attribution takes one --position; run it once for each")
    if attribution and stack is not None:
        raise typer.BadParameter("--attribution reads the stack under the head; leave out --stack")
    answers = answers_of(answer, other)
    from .loading import load_measured

    model = load_measured(checkpoint)
    model.check_words("lens")
    result: Lens | LogitAttribution
    predictions: Lens | None = None
    parts: LogitAttribution | None = None
    if attribution:
        result = parts = model.attribute_logit(text, answers, at=position[0] if position else None, target=target)
    else:
        result = predictions = model.lens(text, top=top or 5, positions=position or None, stack=stack, target=target)
    if save is not None:
        from triptych.page.interventions import lens_page

        screen.write_page(save, lens_page(predictions, parts, [("Model", checkpoint.model), ("Text", text)]))
    if as_json:
        screen.result({"model": checkpoint.model, "text": text} | result.to_dict())
    elif save is None and predictions is not None:
        _show_lens(predictions, top or 1)
    elif save is None and parts is not None:
        _show_parts(parts)


def _show_lens(predictions: Lens, top: int) -> None:
    """Layers by positions with the `top` likeliest tokens; of one position, layers by ranks."""
    p, layers = predictions.probabilities.tolist(), enumerate(predictions.layers)
    if len(predictions.positions) == 1:
        ranks = [str(k + 1) for k in range(predictions.ids.shape[-1])]
        lines = [
            (layer, *(f"{name} {chance:.1%}" for name, chance in zip(predictions.names[i][0], p[i][0], strict=True)))
            for i, layer in layers
        ]
        screen.show_rows(("layer", *ranks), lines, f"position {predictions.positions[0]}, {predictions.tokens[0]}")
        return
    shown = range(max(0, len(predictions.positions) - WIDEST), len(predictions.positions))
    columns = [f"{predictions.positions[t]} {predictions.tokens[t]}" for t in shown]
    lines = []
    for i, layer in layers:
        cells = ([*zip(predictions.names[i][t], p[i][t], strict=True)][:top] for t in shown)
        lines.append((layer, *("\n".join(f"{name} {chance:.0%}" for name, chance in cell) for cell in cells)))
    likeliest = "token" if top == 1 else f"{top} tokens"
    screen.show_rows(("layer", *columns), lines, f"the likeliest {likeliest} after each layer")
    if len(shown) < len(predictions.positions):
        last = f"the last {WIDEST} of {len(predictions.positions)} positions"
        screen.note(f"{last}; choose others with --position, or --save")


def _show_parts(parts: LogitAttribution) -> None:
    capped = ", before the softcap" if parts.softcapped else ""
    title = f"logit of {' - '.join(parts.answers)} at position {parts.position}: {parts.logit:.4f}{capped}"
    lines = [(name, f"{value:+.4f}") for name, value in parts.largest(LISTED)]
    screen.show_rows(("part", "adds"), lines, title, right=["adds"])
    screen.note(
        f"{len(parts.parts)} parts sum to {float(parts.values.sum()):.4f}, "
        f"within {parts.error:.1e} of the logit; the {min(LISTED, len(parts.parts))} largest are shown"
    )
