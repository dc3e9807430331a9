"""The rows of a batch on the screen: their text with a colour for each state of a token, or a table where there are no
colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from triptych.cli import screen
from triptych.errors import counted

if TYPE_CHECKING:
    from triptych.train import ShownRow
    from triptych.train.objectives import State

ROWS, TOKENS, LINE_TOKENS = 3, 24, 200  # shown of a batch, of a row in a table, of a row as text
#: The states differ in more than colour, for terminals and eyes without it.
STYLES = {"trained": "bold green", "read": "dim", "hidden": "reverse magenta"}
LEGEND = {"trained": "trained: in the loss", "read": "read only", "hidden": "hidden, and in the loss"}


def to_dict(row: ShownRow) -> dict[str, Any]:
    """A row as plain values: inputs and targets, and the text with the state of each token."""
    return asdict(row) | {"text": [{"token": token, "state": state} for token, state in row.text]}


def show(rows: Sequence[ShownRow]) -> None:
    """Print the first rows."""
    coloured = screen.console().is_terminal
    if coloured:
        _print_legend()
    for i, row in enumerate(rows[:ROWS]):
        title = f"row {i + 1} of {len(rows)}: {counted(len(row.tokens), 'token')}, {row.trained:,} trained"
        if coloured:
            _print_text(row, title)
        else:
            _print_table(row, title)


def _print_legend() -> None:
    from rich.text import Text

    words = [Text(LEGEND[state], style) for state, style in STYLES.items()]
    screen.console().print(Text("   ").join(words))


def _print_text(row: ShownRow, title: str) -> None:
    from rich.text import Text

    out = screen.console()
    out.print(title, style="bold")
    source: list[tuple[str, State]] = [(token, "read") for token in row.source[:LINE_TOKENS]]
    for side in filter(None, (source, row.text[:LINE_TOKENS])):
        between = "" if any("\N{OPEN BOX}" in token for token, _ in side) else " "  # word pieces have no spaces
        pieces = [Text(screen.plain(_spaced(token)), STYLES[state]) for token, state in side]
        out.print(Text(between).join(pieces))
    _print_rest(len(row.tokens) - LINE_TOKENS)


def _print_table(row: ShownRow, title: str) -> None:
    if row.source:
        screen.console().print(f"source: {screen.plain(' '.join(row.source))}", soft_wrap=True)
    lines = [(one.token, one.target, "trained" if one.trained else "") for one in row.tokens[:TOKENS]]
    screen.show_rows(("input", "target", ""), lines, title)
    _print_rest(len(row.tokens) - TOKENS)


def _print_rest(tokens: int) -> None:
    """Say how many tokens of the row are not shown."""
    if tokens > 0:
        screen.console().print(f"and {counted(tokens, 'more token')}; --json has them all", style="dim")


def _spaced(token: str) -> str:
    """The name of a token as running text: with its spaces and line breaks in place of their marks."""
    return token.replace("\N{OPEN BOX}", " ").replace("\N{RETURN SYMBOL}", "\n")
