"""The progress line of a training run: share done, loss, tokens/s, time left; notes and samples scroll above it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from triptych.cli import screen

if TYPE_CHECKING:
    from triptych.train import Event
    from triptych.train.evaluate import Score

REPORTS = 10  # lines a run prints where no terminal shows the bar


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
    """The value of a metric: a share in percent, or points."""
    from triptych.train.metrics import POINTS

    return f"{value:.1f}" if name in POINTS else f"{value:.1%}"
