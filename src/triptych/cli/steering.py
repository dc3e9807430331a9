"""The options of `triptych generate` that steer it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from triptych.model import Model
    from triptych.probe import Edit

Steer = Annotated[
    str | None,
    typer.Option(
        "--steer",
        metavar="SITE[:SCALE]",
        help="Add a vector to every token at a site, or at the output of block SITE: that of --toward minus that of "
        "--away, or the one in a file (FILE@SITE).",
        show_default=False,
    ),
]
Toward = Annotated[
    str | None,
    typer.Option("--toward", metavar="TEXT", help="Text whose value --steer adds.", show_default=False),
]
Away = Annotated[
    str | None,
    typer.Option("--away", metavar="TEXT", help="Text whose value --steer subtracts.", show_default=False),
]


def parse_steer(steer: str | None, toward: str | None, away: str | None) -> tuple[Path | None, str, float] | None:
    """The file, site and scale of --steer; None without it.  Raises BadParameter for what does not go together."""
    if steer is None:
        if toward is not None or away is not None:
            raise typer.BadParameter("--toward and --away are for --steer SITE")
        return None
    file, at, place = steer.rpartition("@")
    site, colon, number = place.partition(":")
    try:
        scale = float(number) if colon else 1.0
    except ValueError:
        scale = math.nan
    if not site or not math.isfinite(scale) or scale == 0 or (at and not file):
        raise typer.BadParameter(
            f"--steer {steer} must be a site or the number of a block and a scale other than 0, as in 10:4 or "
            "vector.safetensors@10:4"
        )
    if file and (toward is not None or away is not None):
        raise typer.BadParameter("--steer takes its vector from the file or from --toward and --away, not from both")
    if not file and (toward is None or away is None):
        raise typer.BadParameter("--steer needs --toward TEXT and --away TEXT, or a vector: FILE@SITE:SCALE")
    return (Path(file) if file else None), site, scale


def steering_edit(model: Model, parsed: tuple[Path | None, str, float], toward: str | None, away: str | None) -> Edit:
    """The edit that --steer asks for."""
    from triptych.probe.patching import read_vector

    file, site, scale = parsed
    if site.isdecimal():
        site = f"{'decoder.' if len(model.spec.stacks) > 1 else ''}blocks.{int(site)}.resid_post"
    return model.steer(toward, away, site=site, scale=scale, vector=None if file is None else read_vector(file))
