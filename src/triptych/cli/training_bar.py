"""The live line of a training run: how far, loss, tokens a second, time left; notes and samples scroll above it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from triptych.cli import screen

if TYPE_CHECKING:
    from triptych.train import Event

TOLD = 10  # times a run reports itself where no terminal shows the bar


class TrainingBar:
    """`bar.step(event)` after every step.  Without a terminal, a line on stderr a tenth of the run."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.console = screen.console(notes=True)
        self.live = self.console.is_terminal
        columns = (BarColumn(28), TaskProgressColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.live)
        self.task = self.bar.add_task("", total=None)
        self.told = 0

    def __enter__(self) -> TrainingBar:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def say(self, what: str) -> None:
        """What goes on before the first step."""
        self.bar.update(self.task, description=what)
        if not self.live:
            screen.note(what)

    def step(self, event: Event) -> None:
        line = summary(event)
        self.bar.update(self.task, total=1.0, completed=event.progress, description=line)
        due = int(event.progress * TOLD) > self.told or event.progress >= 1.0
        if due or event.score is not None:
            self.told = int(event.progress * TOLD)
            if event.score is not None:
                self.bar.console.print(f"step {event.step:>6,}  held out {held_out(event.score)}", style="dim")
            elif not self.live:
                screen.note(line)

    def sample(self, label: str, text: str) -> None:
        """What the model writes by now."""
        self.bar.console.print(f"\n{label}", style="bold")
        self.bar.console.print(screen.plain(text), soft_wrap=True)


def summary(event: Event) -> str:
    minutes, seconds = divmod(round(event.seconds_left), 60)
    return (
        f"step {event.step:,}  loss {event.loss:.3f}  {event.tokens_per_second:,.0f} tokens/s  "
        f"{minutes}:{seconds:02} left"
    )


def held_out(score: Any) -> str:
    """An evaluation in words: nats, and how many tokens were right beside guessing the commonest."""
    each = f"{score.nats_per_token:.3f} nats a token"
    if score.nats_per_character is not None:
        each += f", {score.nats_per_character:.3f} a character"
    return f"{each}, {score.accuracy:.1%} right (always the commonest: {score.baseline:.1%})"
