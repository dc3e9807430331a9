"""What a person sees: notes, tables and bars on stderr or stdout, in one calm style.  rich is imported when used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

WIDE = 160  # columns, where no terminal says how many there are: nothing in a pipe should be cut


def console(*, notes: bool = False) -> Console:
    """stdout for results, stderr for notes and progress."""
    from rich.console import Console

    stream = sys.stderr if notes else sys.stdout
    width = None if stream.isatty() else WIDE
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width, soft_wrap=False)


def note(text: str) -> None:
    """One dim line on stderr."""
    console(notes=True).print(text, style="dim", soft_wrap=True)


def result(data: Any) -> None:
    """The result of a command as JSON on stdout."""
    print(json.dumps(data, ensure_ascii=False, indent=2))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers.  Cells are shown as they are."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", header_style="dim")
    return made


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and their values."""
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def show(made: Table, title: str = "") -> None:
    """A table on stdout, under a title that may be wider than it."""
    out = console()
    if title:
        out.print(title, style="bold", soft_wrap=True)
    out.print(made)


def plain(text: str) -> str:
    """Text of a model as a terminal may show it: no control characters but line breaks and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def write(text: str) -> None:
    """Text of a model to stdout, at once; as it is into a pipe or a file, `plain` on a terminal."""
    sys.stdout.write(plain(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def shape(sizes: Sequence[int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes) or "scalar"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A moving bar with the time passed, on a terminal only, while something of unknown length goes on."""
    with stages() as stage:
        stage(what)
        yield


def counting() -> Progress:
    """A bar over a known number of tokens, with their rate and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    show = console(notes=True)
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=show, transient=True, disable=not show.is_terminal)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """As `waiting`, for work that says what it is at."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    show = console(notes=True)
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, console=show, transient=True, disable=not show.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what: bar.update(task, description=what)
