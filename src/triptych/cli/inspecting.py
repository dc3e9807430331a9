"""Commands that look: inspect, check, count, doctor."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli import options, screen


class Peer(StrEnum):
    """Whose numbers to compare with."""

    transformers = "transformers"
    none = "none"


@options.opens
def inspect(
    checkpoint: options.Checkpoint,
    text: Annotated[
        str | None, typer.Argument(metavar="[TEXT]", help="A text to run, to see its attention.", show_default=False)
    ] = None,
    site: Annotated[
        str | None, typer.Option("--site", metavar="GLOB", help="What to read, for example blocks.0.attn.pattern.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="I", min=0, help="One layer of it.", show_default=False)
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="I", min=0, help="One head of it.", show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="TEXT", help="What an encoder-decoder's decoder reads.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the attention as one offline HTML page.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """What is in a checkpoint, from its header alone; with TEXT, what its attention does."""
    from triptych.cli import describing

    if text is None:
        given = {"--site": site, "--layer": layer, "--head": head, "--target": target, "--save": save}
        if alone := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter(f"{alone[0]} needs a TEXT to run")
        describing.header(checkpoint.model, ignore=checkpoint.ignore or (), offline=checkpoint.offline, as_json=as_json)
        return
    from triptych.cli.models import opened
    from triptych.page.inspect import inspect_text

    loaded = opened(checkpoint)
    found = inspect_text(loaded, text, target=target, site=site, layer=layer, head=head)
    describing.inside(found, checkpoint.model, save=save, as_json=as_json)


def check(
    model: options.ModelPath,
    against: Annotated[
        Peer | None,
        typer.Option("--against", help="Compare with this; transformers where it is installed.", show_default=False),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", min=0, help="How far log-probabilities may differ.")
    ] = 1e-4,
    offline: options.Offline = False,
    ignore: options.Ignore = None,
    as_json: options.Json = False,
) -> None:
    """Every fast path against the plain one, and the model against transformers; exit 1 if one differs."""
    from triptych.cli.describing import report

    with screen.stages() as stage:
        stage("loading torch")
        from triptych import machine
        from triptych.check import check as run

        machine.use_threads()
        found = run(model, against=against, threshold=threshold, offline=offline, ignore=ignore or (), progress=stage)
    report(found, as_json=as_json)
    if not found.passed:
        raise typer.Exit(1)


def count(
    model: options.ModelPath,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="N", min=1, help="Positions in the cache; the model's own unless given."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Rows that run together.")] = 1,
    dtype: Annotated[options.DType, typer.Option("--dtype", help="Of weights and cache.")] = options.DType.fp16,
    offline: options.Offline = False,
    ignore: options.Ignore = None,
    as_json: options.Json = False,
) -> None:
    """Parameters by part, cache bytes and FLOPs, from a config or header alone."""
    from triptych.cli.describing import costs

    costs(model, context=context, batch=batch, dtype=dtype, offline=offline, ignore=ignore or (), as_json=as_json)


def doctor(as_json: options.Json = False) -> None:
    """This machine as triptych sees it: cores, instructions, memory, torch, GPU, what is installed."""
    from triptych.cli.describing import machine

    machine(as_json=as_json)
