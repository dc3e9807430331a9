"""`triptych ablate`: what the output loses without a head, a layer, a neuron or a position."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.patch import MetricOption
from triptych.cli.screen import plain

if TYPE_CHECKING:
    from triptych.probe import Ablations
    from triptych.probe.metric import MetricName


class PartOption(StrEnum):
    """What is ablated one at a time."""

    heads = "heads"
    attention = "attention"
    mlp = "mlp"
    blocks = "blocks"
    neurons = "neurons"
    positions = "positions"


class KindOption(StrEnum):
    """What stands in its place."""

    zero = "zero"
    mean = "mean"
    resample = "resample"


@options.opens
def ablate(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    part: Annotated[PartOption, typer.Option("--part", help="What is ablated, one at a time.")] = PartOption.heads,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            metavar="HEADS",
            help="Only these heads, as in L4H2,L5H0; of two stacks encoder.L4H2, decoder.L4H2 or cross.L4H2.",
            show_default=False,
        ),
    ] = None,
    kind: Annotated[
        KindOption,
        typer.Option("--kind", help="What stands in its place: zero, the mean over texts, or another text's values."),
    ] = KindOption.zero,
    within: Annotated[
        str, typer.Option("--within", metavar="GLOB", help="Only at these sites, as in blocks.3.*")
    ] = "*",
    unit: Annotated[
        list[int] | None,
        typer.Option("--unit", metavar="N", help="With --part neurons: only this one. Repeatable.", show_default=False),
    ] = None,
    position: Annotated[
        list[int] | None,
        typer.Option("--position", metavar="P", help="Only at this position. Repeatable.", show_default=False),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference", metavar="TEXT", help="Text whose values --kind mean or resample takes. Repeatable."
        ),
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", metavar="TOKEN", help="The right next token.", show_default=False)
    ] = None,
    other: Annotated[
        str | None, typer.Option("--other", metavar="TOKEN", help="A token to compare it with.", show_default=False)
    ] = None,
    metric: Annotated[
        MetricOption | None,
        typer.Option("--metric", help="What is measured; by default as with patch.", show_default=False),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option("--at", metavar="P", help="Measure here; by default at the last token, or at the mask."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TEXT", help="Input of an encoder-decoder's decoder, after its start token."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of --kind resample.")] = 0,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Units listed, largest effect first.")] = 24,
    as_json: options.Json = False,
) -> None:
    """Run texts without one head, layer, neuron or position at a time, and show what the output loses."""
    if heads is not None and part is not PartOption.heads:
        raise typer.BadParameter(f"--heads is for --part heads, not {part.value}")
    if unit and part is not PartOption.neurons:
        raise typer.BadParameter(f"--unit is for --part neurons, not {part.value}")
    if reference and kind is KindOption.zero:
        raise typer.BadParameter("--reference is for --kind mean or resample")
    if other is not None and answer is None:
        raise typer.BadParameter("--other needs an --answer to compare with")
    from triptych.cli.loading import load_model, read_texts
    from triptych.probe.head_names import typed_head

    rows = read_texts(texts)
    model = load_model(checkpoint)
    model.check_words("ablate")
    answers = [one for one in (answer, other) if one is not None]
    name: MetricName | None = None if metric is None else metric.value
    chosen = None if heads is None else [typed_head(model.spec, one) for one in heads.split(",")]
    with screen.waiting("ablating"):
        result = model.ablate(
            rows, part.value, how=kind.value, within=within, heads=chosen, units=unit or None,
            positions=position or None, reference=reference or None, answer=answers or None, metric=name, at=at,
            target=target, seed=seed,
        )  # fmt: skip
    if as_json:
        screen.result({"model": checkpoint.model, "texts": rows} | result.to_dict())
    else:
        _show(result, top)


def _show(result: Ablations, top: int) -> None:
    table = screen.table("without", "changes it by", right=["changes it by"])
    largest = result.largest(top)
    for name, effect in largest:
        table.add_row(name, "" if effect != effect else f"{effect:+.4f}")
    title = f"{result.metric}: {float(result.before.mean()):.4f} as it is; {result.how} ablation"
    screen.show(table, plain(title))
    if len(largest) < len(result.units):
        screen.note(f"{len(largest)} of {len(result.units):,} are shown; --top N or --json shows more")
    if result.unchanged:
        names = ", ".join(result.unchanged[:3]) + (", ..." if len(result.unchanged) > 3 else "")
        screen.note(f"{names}: what was put there stood there already")
