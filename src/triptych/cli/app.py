"""The commands, in the order of the help.  Other packages add commands by entry points of the group
`triptych.commands`, as the lectures do."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from triptych import __version__
from triptych.errors import MissingExecutableError
from . import (
    ablate,
    batch,
    bench,
    chat,
    check,
    convert_and_page,
    count,
    data,
    doctor,
    evaluate,
    explain,
    failure,
    generate,
    heads,
    inspect,
    lens,
    options,
    patch,
    reading,
    search,
    serve,
    train,
    transcribe,
    writing,
)  # fmt: skip

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


_COMMANDS: dict[str, list[Callable[..., None]]] = {
    "Train": [train.quickstart, train.train],
    "Run": [
        generate.generate, chat.chat, reading.fill, reading.encode, search.search, reading.classify, writing.caption,
        reading.tag, writing.answer, writing.summarize, writing.translate, transcribe.transcribe,
        convert_and_page.convert, serve.serve, batch.batch, evaluate.eval_,
    ],
    "Inspect": [
        explain.explain, inspect.inspect, heads.heads, lens.lens, patch.patch, ablate.ablate, convert_and_page.page,
        check.check, count.count, bench.bench, doctor.doctor,
    ],
}  # fmt: skip
failure.application = app
for _title, _functions in _COMMANDS.items():
    for _function in _functions:
        app.command(_function.__name__.rstrip("_"), rich_help_panel=_title)(options.command(_function))


_data = typer.Typer(help="Tokenize texts into shards on the disk, for data larger than memory, and show them.")
for _function in (data.tokenize, data.inspect):
    _data.command()(options.command(_function))
app.add_typer(_data, name="data", rich_help_panel="Train")


def _entry_command(entry: EntryPoint) -> Callable[..., object]:
    """The command of another package; one that names the reason where it cannot be imported."""
    try:
        command: Callable[..., object] = entry.load()
        return command
    except ImportError as problem:
        reason = f"`triptych {entry.name}` is {entry.value}, which cannot be imported: {problem}"

    def missing() -> None:
        """A command whose package cannot be imported."""
        raise MissingExecutableError(reason)

    return missing


for _entry in sorted(entry_points(group="triptych.commands"), key=lambda entry: entry.name):
    app.command(_entry.name, rich_help_panel="Lectures")(_entry_command(_entry))
