"""The command that changes a checkpoint's format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli import options, screen


class Format(StrEnum):
    """What a checkpoint can be written as."""

    hf = "hf"
    gguf = "gguf"


class Stored(StrEnum):
    """What its matrices can be written in."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"


def convert(
    model: options.ModelPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory, or a .gguf file.", show_default=False)],
    to: Annotated[
        Format | None, typer.Option("--to", help="The format; told by OUT's ending unless given.", show_default=False)
    ] = None,
    dtype: Annotated[
        Stored | None,
        typer.Option(
            "--dtype", help="What to store matrices in; as they are unless given. q* for gguf.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at OUT.")] = False,
    offline: options.Offline = False,
    ignore: options.Ignore = None,
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint as an HF directory or as one GGUF file, which llama.cpp opens."""
    with screen.waiting(f"converting {model}"):
        from triptych import machine
        from triptych.checkpoints.convert import convert as run

        machine.use_threads()
        done = run(
            model,
            out,
            to=None if to is None else "gguf" if to is Format.gguf else "hf",
            dtype=dtype and dtype.value,
            force=force,
            offline=offline,
            ignore=ignore or (),
        )
    if as_json:
        screen.result(done.to_dict())
        return
    for note in done.notes:
        screen.note(note)
    kinds = ", ".join(f"{count} {name}" for name, count in done.tensors.items())
    rows = [("wrote", done.path), ("format", f"{done.format}, {done.family}"), ("tensors", kinds)]
    screen.show(screen.facts([*rows, ("size", screen.mib(done.nbytes))]))
