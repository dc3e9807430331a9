"""`triptych count`: parameters, bytes and FLOPs of a model that is not loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.screen import mib

DEFAULT_POSITIONS = 4096  # for models without a context limit


def count(
    model: options.ModelPath,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="N", min=1, help="Positions in the cache; by default the model's context."),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, help="Number of sequences that run together.")
    ] = 1,
    dtype: Annotated[options.DType, typer.Option("--dtype", help="Dtype of weights and cache.")] = options.DType.fp16,
    offline: options.Offline = False,
    ignore: options.Ignore = None,
    as_json: options.Json = False,
) -> None:
    """Count the parameters of each part, the cache's bytes and the FLOPs, from the config or header alone."""
    from triptych.checkpoints.header import read_header
    from triptych.count import count as count_model

    spec = read_header(model, ignore or (), offline=offline, weights=False).spec
    counts, positions = count_model(spec), context or spec.context or DEFAULT_POSITIONS
    source = positions if spec.layout == "encoder-decoder" else 0
    weights, cache = counts.weight_bytes(dtype), counts.cache_bytes(positions, batch=batch, dtype=dtype, source=source)
    if as_json:
        chosen = {"dtype": dtype, "weight_bytes": weights, "cache_bytes": cache}
        screen.result(counts.to_dict(positions, batch=batch, source=source) | {"chosen": chosen})
        return
    numbers = ["parameters", "share"]
    parts = screen.table("part", *numbers, right=numbers)
    for name, number in counts.parameters.items():
        if number:
            parts.add_row(name, f"{number:,}", f"{number / counts.total:.1%}")
    parts.add_row("total", f"{counts.total:,}", "", style="bold")
    if counts.active != counts.total:
        parts.add_row("used by one token", f"{counts.active:,}", f"{counts.active / counts.total:.1%}")
    size = f"{batch:,} × {positions:,} positions"
    rows = [(f"bytes of weights, {dtype}", f"{weights:,}", mib(weights))]
    if spec.decoder is not None:
        rows += [(f"bytes of cache, {dtype}, {size}", f"{cache:,}", mib(cache))]
    rows += [(f"FLOPs to read {size}", f"{batch * counts.prefill_flops(positions, source=source):,}", "")]
    if spec.decoder is not None:
        rows += [
            ("FLOPs to generate one more token each", f"{batch * counts.decode_flops(positions, source=source):,}", "")
        ]
    rows += [(f"FLOPs to train on {size}", f"{batch * counts.training_flops(positions, source=source):,}", "")]
    costs = screen.table("cost", "number", "size", right=["number", "size"])
    for row in rows:
        costs.add_row(*row)
    screen.show(parts, f"{spec.family}, {spec.layout}")
    screen.show(costs)
