"""The commands, in the order of the help."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych import __version__
from triptych.cli import converting, explaining, inspecting, labbing, labelling, running, training, transcribing
from triptych.cli.options import LEARN, LOOK, RUN

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One transformer, three panels: train it, run it, look inside. MODEL is a directory, a .gguf file or "
    "hub:org/name everywhere; every command takes --json.",
)


def _version(asked: bool) -> bool:
    if asked:
        print(f"triptych {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Nothing of its own: what every command shares would stand here."""


for _panel, _commands in {
    LEARN: (training.quickstart, training.train),
    RUN: (
        running.generate,
        running.chat,
        running.fill,
        running.encode,
        labelling.classify,
        transcribing.transcribe,
        converting.convert,
    ),
    LOOK: (explaining.explain, labbing.lab, inspecting.inspect, inspecting.check, inspecting.count, inspecting.doctor),
}.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
