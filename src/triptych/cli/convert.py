"""`triptych convert`: write a checkpoint in another format."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from triptych.cli import options, screen


class CheckpointFormat(StrEnum):
    """The formats in which a checkpoint can be written."""

    hf = "hf"
    gguf = "gguf"


class MatrixType(StrEnum):
    """The dtypes and quantized types in which matrices can be written."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"


def convert(
    model: options.ModelPath,
    out: Annotated[str, typer.Argument(metavar="OUT", help="Output directory, or .gguf file.", show_default=False)],
    to: Annotated[
        CheckpointFormat | None,
        typer.Option("--to", help="Output format; by default from the ending of OUT.", show_default=False),
    ] = None,
    dtype: Annotated[
        MatrixType | None,
        typer.Option(
            "--dtype",
            help="Type of the matrices; by default the stored dtype, f32 for quantized ones. q* needs gguf.",
            show_default=False,
        ),
    ] = None,
    adapter: options.Adapter = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    offline: options.Offline = False,
    ignore: options.Ignore = None,
    as_json: options.Json = False,
) -> None:
    """Convert a checkpoint to a Hugging Face directory, or to one GGUF file for llama.cpp."""
    with screen.waiting(f"converting {model}"):
        from triptych import machine
        from triptych.checkpoints.convert import convert as run

        machine.use_threads()
        conversion = run(
            model,
            out,
            to=None if to is None else "gguf" if to is CheckpointFormat.gguf else "hf",
            dtype=dtype and dtype.value,
            force=force,
            offline=offline,
            ignore=ignore or (),
            adapter=adapter,
        )
    if as_json:
        screen.result(conversion.to_dict())
        return
    for note in conversion.notes:
        screen.note(note)
    kinds = ", ".join(f"{count} {name}" for name, count in conversion.tensors.items())
    rows = [("wrote", conversion.path), ("format", f"{conversion.format}, {conversion.family}"), ("tensors", kinds)]
    screen.show(screen.facts([*rows, ("size", screen.mib(conversion.nbytes))]))
