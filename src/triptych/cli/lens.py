"""`triptych lens`: what a model would answer after each layer, and which parts its answer is made of."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.patch import answers_of
from triptych.cli.screen import plain

if TYPE_CHECKING:
    from triptych.probe import Lens, LogitAttribution
    from triptych.probe.lenses import StackName

PAGE = (".html", ".htm")
WIDEST = 10  # positions in a table; of more the last ones are shown
LISTED = 20  # parts of a logit


class StackOf(StrEnum):
    """The stacks of an encoder-decoder."""

    encoder = "encoder"
    decoder = "decoder"


TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="Text to run the model on.", show_default=False)]
Top = Annotated[int, typer.Option("--top", metavar="K", min=1, help="Tokens for each layer and position.")]
Positions = Annotated[
    list[int] | None,
    typer.Option("--position", metavar="P", help="Show only this position. Repeatable.", show_default=False),
]
Attribution = Annotated[
    bool, typer.Option("--attribution", help="Show what each head and MLP adds to the answer's logit instead.")
]
Answer = Annotated[
    str | None,
    typer.Option("--answer", metavar="TOKEN", help="The answer of --attribution; by default the likeliest token."),
]
OtherToken = Annotated[
    str | None, typer.Option("--other", metavar="TOKEN", help="Attribute the difference to this token's logit.")
]
Stack = Annotated[
    StackOf | None,
    typer.Option("--stack", help="Stack of an encoder-decoder; by default the decoder.", show_default=False),
]
Save = Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the tables to an offline .html page.")]


@options.opens
def lens(
    checkpoint: options.Checkpoint,
    text: TextArgument,
    top: Top = 5,
    position: Positions = None,
    attribution: Attribution = False,
    answer: Answer = None,
    other: OtherToken = None,
    stack: Stack = None,
    target: options.DecoderInput = None,
    save: Save = None,
    as_json: options.Json = False,
) -> None:
    """Show the likeliest tokens after each layer (the logit lens), or what each part adds to the answer's logit."""
    if save is not None:
        screen.check_suffix(save, PAGE, "--save")
    _check_options(attribution, other if answer is None else answer, position, stack)
    answers = answers_of(answer, other)
    from triptych.cli.loading import load_model

    model = load_model(checkpoint)
    model.check_words("lens")
    result: Lens | LogitAttribution
    predictions: Lens | None = None
    parts: LogitAttribution | None = None
    if attribution:
        result = parts = model.attribute_logit(text, answers, at=position[0] if position else None, target=target)
    else:
        name: StackName | None = None if stack is None else stack.value
        result = predictions = model.lens(text, top=top, positions=position or None, stack=name, target=target)
    if save is not None:
        from triptych.page import write
        from triptych.page.interventions import lens_page

        write(save, lens_page(predictions, parts, [("Model", checkpoint.model), ("Text", text)]))
        screen.note(f"wrote {save}; open it in a browser")
    if as_json:
        screen.result({"model": checkpoint.model, "text": text} | result.to_dict())
    elif save is None and predictions is not None:
        _show_lens(predictions)
    elif save is None and parts is not None:
        _show_parts(parts)


def _check_options(attribution: bool, answer: str | None, position: list[int] | None, stack: StackOf | None) -> None:
    """Raise BadParameter for options that do not go together."""
    if not attribution and answer is not None:
        raise typer.BadParameter("--answer and --other are for --attribution; add that option")
    if attribution and len(position or ()) > 1:
        raise typer.BadParameter("--attribution takes one --position; run it once for each")
    if attribution and stack is not None:
        raise typer.BadParameter("--attribution reads the stack under the head; leave out --stack")


def _show_lens(predictions: Lens) -> None:
    """Layers by positions with the likeliest token; of one position, layers by ranks."""
    p = predictions.probabilities.tolist()
    if len(predictions.positions) == 1:
        ranks = [str(k + 1) for k in range(predictions.ids.shape[-1])]
        table = screen.table("layer", *ranks)
        for i, layer in enumerate(predictions.layers):
            candidates = zip(predictions.names[i][0], p[i][0], strict=True)
            table.add_row(layer, *(f"{plain(name)} {chance:.1%}" for name, chance in candidates))
        screen.show(table, f"position {predictions.positions[0]}, {plain(predictions.tokens[0])}")
        return
    shown = range(max(0, len(predictions.positions) - WIDEST), len(predictions.positions))
    table = screen.table("layer", *(f"{predictions.positions[t]} {plain(predictions.tokens[t])}" for t in shown))
    for i, layer in enumerate(predictions.layers):
        table.add_row(layer, *(f"{plain(predictions.names[i][t][0])} {p[i][t][0]:.0%}" for t in shown))
    screen.show(table, "the likeliest token after each layer")
    if len(shown) < len(predictions.positions):
        last = f"the last {WIDEST} of {len(predictions.positions)} positions"
        screen.note(f"{last}; choose others with --position, or --save")


def _show_parts(parts: LogitAttribution) -> None:
    capped = ", before the softcap" if parts.softcapped else ""
    of = plain(" - ".join(parts.answers))
    table = screen.table("part", "adds", right=["adds"])
    for name, value in parts.largest(LISTED):
        table.add_row(name, f"{value:+.4f}")
    screen.show(table, f"logit of {of} at position {parts.position}: {parts.logit:.4f}{capped}")
    screen.note(
        f"{len(parts.parts)} parts sum to {float(parts.values.sum()):.4f}, "
        f"within {parts.error:.1e} of the logit; the {min(LISTED, len(parts.parts))} largest are shown"
    )
