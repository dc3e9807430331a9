"""`triptych page`: one offline HTML file that runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych.cli import options, screen


@options.opens
def page(
    checkpoint: options.Checkpoint,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Write the page to this .html file.", show_default=False)
    ],
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="The text that the page begins with.", show_default=False),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write one offline HTML page that runs a small model: type, remove heads, generate."""
    screen.check_suffix(out, (".html", ".htm"), "--out")
    from triptych.page.render import check_place

    check_place(out)
    from triptych.checkpoints.header import read_header
    from triptych.cli.loading import base_of, load_model
    from triptych.page import write
    from triptych.page.live import live_page
    from triptych.page.live_export import check_size

    ignore = checkpoint.ignore or ()
    check_size(read_header(base_of(checkpoint.model), ignore=ignore, offline=checkpoint.offline).spec)
    model = load_model(checkpoint)
    name = Path(checkpoint.model).name or checkpoint.model
    write(out, live_page(model, name, text))
    size = out.stat().st_size
    screen.note(f"wrote {out}, {screen.mib(size)}; open it in a browser")
    if as_json:
        screen.result({"out": str(out), "bytes": size})
