"""What a training run shows: its progress line, with notes and samples above it, and the rows of its first batch.

These have a colour for each state of a token, or are a table where there are no colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from triptych.errors import counted
from . import screen

if TYPE_CHECKING:
    from triptych.train import Event, ShownRow
    from triptych.train.evaluate import Score
    from triptych.train.objectives import State

REPORTS = 10  # lines a run prints where no terminal shows the bar
ROWS, TOKENS, LINE_TOKENS = 3, 24, 200  # shown of a batch, of a row in a table, of a row as text
#: The states differ in more than colour, for terminals and eyes without it.
STYLES = {"trained": "bold green", "read": "dim", "hidden": "reverse magenta"}
LEGEND = {"trained": "trained: in the loss", "read": "read only", "hidden": "hidden, and in the loss"}


class TrainingProgress:
    """Call `step(event)` after every step.  Without a terminal, it prints a line on stderr every tenth of the run."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.console = screen.console(notes=True)
        self.live = self.console.is_terminal
        columns = (BarColumn(28), TaskProgressColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.live)
        self.task = self.bar.add_task("", total=None)
        self.reported = 0

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """Describe what happens before the first step; during the steps, print a note above their line."""
        if self.live and self.bar.tasks[self.task].total is not None:
            self.bar.console.print(screen.plain(text), style="dim")
            return
        self.bar.update(self.task, description=text)
        if not self.live:
            screen.note(text)

    def step(self, event: Event) -> None:
        line = summary(event)
        self.bar.update(self.task, total=1.0, completed=event.progress, description=line)
        due = int(event.progress * REPORTS) > self.reported or event.progress >= 1.0
        if due:
            self.reported = int(event.progress * REPORTS)
            if not self.live:
                screen.note(line)
        if event.score is not None:
            self.bar.console.print(f"step {event.step:>6,}  held out {held_out(event.score)}", style="dim")

    def sample(self, label: str, text: str) -> None:
        """Show a sample of the current model."""
        self.bar.console.print(f"\n{label}", style="bold")
        self.bar.console.print(screen.plain(text), soft_wrap=True)


def summary(event: Event) -> str:
    minutes, seconds = divmod(round(event.seconds_left), 60)
    return (
        f"step {event.step:,}  loss {event.loss:.3f}  {event.tokens_per_second:,.0f} tokens/s  "
        f"{minutes}:{seconds:02} left"
    )


def held_out(score: Score) -> str:
    """An evaluation in words: metrics beside those of simple guesses where the objective has some; else nats, and the
    accuracy next to that of the most frequent token."""
    if score.metrics:
        first = next(iter(score.metrics))  # the baselines are values of it
        shown = ", ".join(f"{name} {metric(name, value)}" for name, value in score.metrics.items())
        guesses = ", ".join(f"{name} {metric(first, value)}" for name, value in score.baselines.items())
        return f"{shown} ({guesses}), {score.nats_per_token:.3f} nats"
    each = f"{score.nats_per_token:.3f} nats per token"
    if score.nats_per_character is not None:
        each += f", {score.nats_per_character:.3f} per character"
    return f"{each}, {score.accuracy:.1%} right (most frequent token: {score.baseline:.1%})"


def metric(name: str, value: float) -> str:
    """The value of a metric: a share in percent, or a number."""
    from triptych.train.metrics import DECIMALS

    return f"{value:.{DECIMALS[name]}f}" if name in DECIMALS else f"{value:.1%}"


def batch_row(row: ShownRow) -> dict[str, Any]:
    """A row as plain values: inputs and targets, and the text with the state of each token."""
    return asdict(row) | {"text": [{"token": token, "state": state} for token, state in row.text]}


def show_batch(rows: Sequence[ShownRow]) -> None:
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
