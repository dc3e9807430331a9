"""Commands that train: quickstart, train."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from triptych.cli import options, screen


class Panel(StrEnum):
    """The three layouts."""

    decoder = "decoder"
    encoder = "encoder"
    encoder_decoder = "encoder-decoder"


def quickstart(
    panel: Annotated[Panel, Option("--panel", help="Which layout to train.")] = Panel.decoder,
    data: Annotated[
        Path | None, Option("--data", metavar="FILE", help="A UTF-8 file or folder instead of Shakespeare.")
    ] = None,
    seconds: Annotated[float, Option("--seconds", min=1, help="How long to train.")] = 90,
    out: Annotated[Path, Option("--out", metavar="DIR", help="Where the results go.")] = Path("runs/quickstart"),
    resume: Annotated[bool, Option("--resume", help="Go on where a run was stopped.")] = False,
    as_json: options.Json = False,
) -> None:
    """Train a small transformer on real text in a minute and a half, write with it, see its attention."""


def train(
    recipe: Annotated[Path, Argument(metavar="RECIPE.toml", help="What to train, on what, how.", show_default=False)],
    set_: Annotated[
        list[str] | None, Option("--set", metavar="A.B=C", help="Change one value of the recipe. Repeatable.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint.")] = False,
    out: Annotated[Path | None, Option("--out", metavar="DIR", help="Where the results go.", show_default=False)] = None,
    show_batch: Annotated[bool, Option("--show-batch", help="Show the first batch as text, and stop.")] = False,
    verify_resume: Annotated[
        int | None,
        Option("--verify-resume", metavar="N", min=1, help="Prove that N steps, stopped and resumed, are the same N."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train what a recipe describes."""
