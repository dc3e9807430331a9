"""Output of commands: results on stdout, notes and progress on stderr.  rich is imported when it is first used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

COMMAND: ContextVar[str] = ContextVar("command", default="")
"""The command line that runs, as it was typed: what a picture says of how it was made."""
PAGE = (".html", ".htm")  # endings of a page
WIDE = 160  # columns when the output is not a terminal, so that tables in a pipe are not wrapped


def console(*, notes: bool = False) -> Console:
    """stdout for results, stderr for notes and progress."""
    from rich.console import Console

    stream = sys.stderr if notes else sys.stdout
    width = None if stream.isatty() else WIDE
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=width, soft_wrap=False)


def note(text: str) -> None:
    """A dim line on stderr."""
    console(notes=True).print(text, style="dim", soft_wrap=True)


def note_on_prompt(prompt: str, most: int = 240) -> None:
    """What a model is asked, on one line of stderr: of a long prompt its beginning and its end."""
    line = " ".join(plain(prompt).split())
    note(f"prompt: {line if len(line) <= most else f'{line[: most // 2]} ... {line[-most // 2 :]}'}")


def result(data: object) -> None:
    """Print the result of a command as JSON on stdout."""
    print(json.dumps(data, ensure_ascii=False, indent=2))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns named in `right` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", header_style="dim")
    return table


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and their values."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, plain(value))
    return table


def show(table: Table, title: str = "") -> None:
    """Print a table on stdout, under a title that may be wider than it."""
    out = console()
    if title:
        out.print(plain(title), style="bold", soft_wrap=True)
    out.print(table)


def show_rows(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", right: Sequence[str] = ()
) -> None:
    """Print rows of text as a table; the columns named in `right` are right-aligned."""
    lines = table(*map(plain, columns), right=[*map(plain, right)])
    for row in rows:
        lines.add_row(*map(plain, row))
    show(lines, title)


def plain(text: str) -> str:
    """Text that is safe on a terminal: control characters other than line breaks and tabs are replaced."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def write(text: str) -> None:
    """Write generated text to stdout and flush; unchanged into a pipe or file, `plain` on a terminal."""
    sys.stdout.write(plain(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def shape(sizes: Sequence[int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes) or "scalar"


@contextmanager
def waiting(task: str) -> Iterator[None]:
    """A progress bar with the elapsed time, on a terminal only, for a task of unknown length."""
    with stages() as stage:
        stage(task)
        yield


def counting() -> Progress:
    """A progress bar over a known number of tokens, with the time left."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    return _bar(MofNCompleteColumn(), TimeRemainingColumn())


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """As `waiting`, for a task of several stages; call the result with the name of each."""
    from rich.progress import TimeElapsedColumn

    with _bar(TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda stage: bar.update(task, description=stage)


def _bar(*columns: ProgressColumn) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    notes, first = console(notes=True), (TextColumn("{task.description}"), BarColumn(24))
    return Progress(*first, *columns, console=notes, transient=True, disable=not notes.is_terminal)


def check_suffix(path: Path | None, suffixes: Sequence[str] = PAGE, option: str = "--save") -> None:
    """Raises BadParameter unless the name of an output file, if there is one, ends in one of `suffixes`."""
    if path is not None and path.suffix.lower() not in suffixes:
        raise BadParameter(f"{option} {path} must end in {' or '.join(suffixes)}")


def write_page(path: Path, page: str) -> None:
    """Write a page and say so."""
    from triptych.page import write

    write(path, page)
    note(f"wrote {path}; open it in a browser")
