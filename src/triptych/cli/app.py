"""The commands, in the order of the help.  Other packages add commands by entry points of the group
`triptych.commands`, as the lectures do."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from triptych import __version__
from triptych.cli import failure, options
from triptych.cli.ablate import ablate
from triptych.cli.bench import bench
from triptych.cli.chat import chat
from triptych.cli.check import check
from triptych.cli.count import count
from triptych.cli.doctor import doctor
from triptych.cli.explain import explain
from triptych.cli.files import convert, page
from triptych.cli.generate import generate
from triptych.cli.heads import heads
from triptych.cli.inspect import inspect
from triptych.cli.lens import lens
from triptych.cli.patch import patch
from triptych.cli.quickstart import quickstart
from triptych.cli.reading import classify, encode, fill, tag
from triptych.cli.search import search
from triptych.cli.train import train
from triptych.cli.transcribe import transcribe
from triptych.cli.writing import answer, caption, summarize, translate
from triptych.errors import MissingProgramError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, run and inspect transformers. MODEL is a model directory, a run directory, a .gguf file or "
    "hub:org/name; every command takes --json.",
)


def _version(requested: bool) -> bool:
    if requested:
        print(f"triptych {__version__}")
        raise typer.Exit
    return requested


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `triptych` itself."""


GROUPS = {
    "Train": (quickstart, train),
    "Run": (
        generate, chat, fill, encode, search, classify, caption, tag, answer, summarize, translate, transcribe, convert,
    ),
    "Inspect": (explain, inspect, heads, lens, patch, ablate, page, check, count, bench, doctor),
}  # fmt: skip
failure.application = app
for _title, _commands in GROUPS.items():
    for _command in _commands:
        app.command(rich_help_panel=_title)(options.command(_command))


def _entry_command(entry: EntryPoint) -> Callable[..., object]:
    """The command of another package; one that names the reason where it cannot be imported."""
    try:
        command: Callable[..., object] = entry.load()
        return command
    except ImportError as problem:
        reason = f"`triptych {entry.name}` is {entry.value}, which cannot be imported: {problem}"

    def missing() -> None:
        """A command whose package cannot be imported."""
        raise MissingProgramError(reason)

    return missing


for _entry in sorted(entry_points(group="triptych.commands"), key=lambda entry: entry.name):
    app.command(_entry.name, rich_help_panel="Lectures")(_entry_command(_entry))
