"""`triptych explain`: the forward pass of a text, step by step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, screen
from .options import argument

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from triptych.explain import ShownTensor, Walk, WalkStep
    from triptych.model import Model

PICTURE = (*screen.PAGE, ".svg")
SHADES = " ░▒▓█"  # of a weight: each stands for a fifth
INDENT, CELL, LABEL, GAP = 4, 10, 14, 3  # columns on the screen
BRIEF = 4  # numbers shown of a parameter


def explain(
    model: Annotated[str | None, argument(options.MODEL, "[MODEL]")] = None,
    text: options.Text = None,
    *,
    layer: int = 0,
    head: int = 0,
    row: int | None = None,
    cache: bool = False,
    pair: str | None = None,
    probability: bool = False,
    example: str | None = None,
    save: Path | None = None,
    playground: Path | None = None,
    device: str = "cpu",
    offline: bool = False,
    ignore: list[str] | None = None,
    as_json: options.Json = False,
) -> None:
    """Explain the forward pass of a text: the formula, shapes and numbers of each step, each recomputed.

    --layer I: The block to explain.
    --head I: The head to show.
    --row I: The token to follow; by default the one that determines the output.
    --cache: Explain one decoding step with the KV cache: what is computed and what is reused.
    --pair WORD:WORD: Show the score of the first word for the second beside that of the second for the first.
    --probability: The probability of TEXT: that of each token after those before it, and their product.
    --example NAME: A worked example of the lectures: L0.2, L0.2.6, L0.2.7, L0.3, L0.softmax, L0.2.9, L1.sat, L1.tie,
        L2.example-1, L2.example-2, L2.example-3, L2.1, L2.2, L4.6, L4.9, L4.11, L4.12.3, L4.14, L4.15, L4.pairs or
        L4.shapes.
    --save FILE: Write the steps to an offline .html page, or the attention maps to an .svg picture.
    --playground FILE: Write an .html page where Q, K and V are edited by hand.
    """
    if playground is not None:
        if model is not None or example is not None or cache or pair or probability or save is not None:
            raise typer.BadParameter("--playground is a page without a model; omit all but FILE")
        from triptych.explain.page import playground as page

        screen.check_suffix(playground, option="--playground")
        screen.write_page(playground, page())
        return
    screen.check_suffix(save, PICTURE)
    if example is not None and (model is not None or cache or pair or probability):
        raise typer.BadParameter("--example has its own numbers; omit MODEL, TEXT, --cache, --pair and --probability")
    if cache and row is not None:
        raise typer.BadParameter("--cache follows the newest token; omit --row")
    if probability and (layer or head or row is not None):
        raise typer.BadParameter("--probability is of the whole model; omit --layer, --head and --row")
    if pair is not None and row is not None:
        raise typer.BadParameter("--pair shows both words; omit --row")
    if sum((cache, pair is not None, probability)) > 1:
        raise typer.BadParameter("give one of --cache, --pair and --probability")
    words = _words(pair)
    if example is not None:
        from triptych.explain import worked

        walk = worked(example)
    elif model is None or text is None:
        raise typer.BadParameter("give MODEL and TEXT, --example NAME, or --playground FILE")
    else:
        from triptych import explain as walks
        from .loading import load_measured

        # In half precision, or with activations rounded to 8 bits, the recomputation could not agree to 1e-5.
        opened = load_measured(options.Checkpoint(
            model=model, dtype="fp32", quantize="none", device=device, offline=offline, ignore=ignore
        ))  # fmt: skip
        if cache:
            walk = walks.explain_cache(opened, text, layer=layer, head=head)
        elif words is not None:
            walk = walks.explain_pair(opened, text, *words, layer=layer, head=head)
        elif probability:
            walk = walks.explain_probability(opened, text)
        else:
            walk = walks.explain(opened, text, layer=layer, head=head, row=row)
        _say_letters(opened, text)
    _show(walk, save=save, as_json=as_json)


def _words(pair: str | None) -> tuple[str, str] | None:
    """The two words of --pair.  Raises BadParameter for anything else."""
    if pair is None:
        return None
    first, colon, second = pair.partition(":")
    if not (colon and first.strip() and second.strip()) or ":" in second:
        raise typer.BadParameter(f"--pair {pair} must be two words, as bank:river")
    return first.strip(), second.strip()


def _say_letters(model: Model, text: str) -> None:
    """A note where the tokens of a text are its letters, so that a word is not one row, and where none is known."""
    from triptych.probe.prompts import name_tokens

    if model.tokenizer is None:
        return
    words = [name.lower() for name in name_tokens(model, model.ids([text])[0])]
    if {"[unk]", "<unk>"} & {*words} and all(name.startswith(("<", "[")) for name in words):
        screen.note("warning: no token of this text is in the vocabulary; all of them are unknown, and look alike")
        return
    if not re.search(r"\w\w", text):
        return
    names = name_tokens(model, model.ids([text])[0])
    if all(len(name) <= 1 for name in names if not name.startswith(("<", "["))):
        screen.note(
            "the tokens of this model are letters, so that a word is several rows; a model of words (the 2,000 "
            'commonest of the plays) is runs/quickstart-encoder, made by: make quickstart ARGS="--panel encoder"'
        )


def _show(walk: Walk, *, save: Path | None, as_json: bool) -> None:
    """Show the steps on the screen, as JSON or as a page; exit 1 if the recomputation of a step disagrees."""
    if save is not None and save.suffix.lower() == ".svg":
        from triptych.explain.page import maps
        from triptych.page.drawing import svg

        screen.write_page(save, svg(maps(walk), walk.title, screen.COMMAND.get()))
    elif save is not None:
        from triptych.explain.page import sections
        from triptych.page import render

        screen.write_page(save, render(walk.title, sections(walk), subtitle=dict(walk.facts).get("Text", "")))
    if as_json:
        screen.result(walk.to_dict())
    elif save is None:
        _print_steps(walk)
    if not walk.agrees:
        raise typer.Exit(1)


def _print_steps(walk: Walk) -> None:
    out, part = screen.console(), ""
    screen.show(screen.facts(walk.facts), walk.title)
    for number, (step, error) in enumerate(zip(walk.steps, walk.errors, strict=True), 1):
        if step.part != part:
            part = step.part
            out.print()
            out.rule(part, align="left", style="dim")
        _print_step(out, number, step, error)
    out.print()
    out.print(screen.plain(walk.outcome), style="bold")
    out.print(walk.verdict, style="dim" if walk.agrees else "bold red")


def _print_step(out: Console, number: int, step: WalkStep, error: float) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from triptych.explain import TOLERANCE

    out.print()
    out.print(Text.assemble((f"{number:>2}  ", "dim"), (step.title, "bold"), "   ", (step.formula, "cyan")))
    body: list[RenderableType] = [Text(screen.plain(step.meaning), style="dim")] if step.meaning else []
    for tensor in step.uses:
        body += _matrix(out, tensor) if tensor.labels else [_brief(tensor)]
    for tensor in step.makes:
        body += _matrix(out, tensor)
    if not error <= TOLERANCE:
        body.append(Text(f"the recomputation differs by {error:.1e}", style="bold red"))
    for item in body:
        out.print(Padding(item, (0, 0, 0, INDENT), expand=False))


def _brief(tensor: ShownTensor) -> Text:
    """A parameter in one line."""
    from rich.text import Text

    from triptych.explain.steps import number

    flat = tensor.value.flatten()
    first = "  ".join(number(float(x)) for x in flat[:BRIEF])
    more = f"  … {len(flat) - BRIEF:,} more" if len(flat) > BRIEF else ""
    return Text.assemble(tensor.symbol, " ", (tensor.shape, "dim"), f"  {first}", (f"{more}   {tensor.name}", "dim"))


def _matrix(out: Console, tensor: ShownTensor) -> list[RenderableType]:
    """A title, and a table of the part of a tensor that fits the screen."""
    from rich.table import Table
    from rich.text import Text

    from triptych.explain.steps import SQUARE, name_of, number

    room = out.width - INDENT - 2
    few = room - CELL * len(tensor.columns or range(SQUARE))  # what so many columns leave for the labels
    label = min(max(LABEL, few), max((len(label) for label in tensor.labels), default=0))
    fitting = (room - label) // CELL
    columns = max(2, min(SQUARE, (room - label - GAP) // CELL))
    part = tensor.excerpt(columns, max(columns, min(SQUARE + 1, fitting)))
    table = Table(box=None, show_header=bool(tensor.columns), pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=label, no_wrap=True, overflow="ellipsis", style="dim")
    for at, name in enumerate(part.with_gap(part.columns, "…")):
        width = 1 if at == part.column_gap else CELL - 2
        table.add_column(Text(_short(name, width)), justify="right", min_width=width, header_style="dim")
    pattern = tensor.name.endswith("pattern")
    for i, (name, row) in enumerate(zip(part.rows, part.values, strict=True)):
        if i == part.gap:
            table.add_row("⋮")
        cells = [f"{_shade(x)} {number(x)}" if pattern else number(x) for x in row]
        table.add_row(_short(name, label), *part.with_gap(cells, "…"), style="bold" if i == part.focus else "")
    head = Text.assemble(name_of(tensor), " ", (tensor.shape, "dim"), ("   " + part.left_out, "dim"))
    return [head, table]


def _shade(weight: float) -> str:
    """A weight as a cell of a map."""
    return SHADES[min(len(SHADES) - 1, int(weight * len(SHADES)))]


def _short(name: str, width: int) -> str:
    name = screen.plain(name)
    return name if len(name) <= width else name[: max(width - 1, 0)] + "…"
