"""`triptych ablate`: what the output loses without a head, a layer, a neuron or a position."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli import options, screen
from triptych.cli.patch import MetricOption, answers_of
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
    """What replaces its values."""

    zero = "zero"
    mean = "mean"
    resample = "resample"


Part = Annotated[PartOption, typer.Option("--part", help="What is ablated, one at a time.")]
OnlyHeads = Annotated[
    str | None,
    typer.Option(
        "--heads",
        metavar="HEADS",
        help="Only these heads, as in L4H2,L5H0; of two stacks encoder.L4H2, decoder.L4H2 or cross.L4H2.",
        show_default=False,
    ),
]
Kind = Annotated[
    KindOption,
    typer.Option("--kind", help="What replaces its values: zero, the mean over texts, or another text's values."),
]
Within = Annotated[str, typer.Option("--within", metavar="GLOB", help="Only at these sites, as in blocks.3.*")]
Units = Annotated[
    list[int] | None,
    typer.Option("--unit", metavar="N", help="With --part neurons: only this one. Repeatable.", show_default=False),
]
Positions = Annotated[
    list[int] | None,
    typer.Option("--position", metavar="P", help="Only at this position. Repeatable.", show_default=False),
]
Reference = Annotated[
    list[str] | None,
    typer.Option("--reference", metavar="TEXT", help="Text whose values --kind mean or resample takes. Repeatable."),
]
RightToken = Annotated[
    str | None, typer.Option("--answer", metavar="TOKEN", help="The right next token.", show_default=False)
]
OtherToken = Annotated[
    str | None, typer.Option("--other", metavar="TOKEN", help="A token to compare it with.", show_default=False)
]
Metric = Annotated[
    MetricOption | None,
    typer.Option("--metric", help="What is measured; by default as with patch.", show_default=False),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, max=options.LAST_SEED, help="Seed of --kind resample.")
]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Units listed, largest effect first.")]


@options.opens
def ablate(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    part: Part = PartOption.heads,
    heads: OnlyHeads = None,
    kind: Kind = KindOption.zero,
    within: Within = "*",
    unit: Units = None,
    position: Positions = None,
    reference: Reference = None,
    answer: RightToken = None,
    other: OtherToken = None,
    metric: Metric = None,
    at: options.MeasuredAt = None,
    target: options.DecoderInput = None,
    seed: Seed = 0,
    top: Top = 24,
    as_json: options.Json = False,
) -> None:
    """Run texts without one head, layer, neuron or position at a time, and show what the output loses."""
    _check_options(part, heads, unit, kind, reference)
    answers = answers_of(answer, other)
    from triptych.cli.loading import load_measured, read_texts
    from triptych.probe.sites import typed_head

    rows = read_texts(texts)
    model = load_measured(checkpoint)
    model.check_words("ablate")
    name: MetricName | None = None if metric is None else metric.value
    chosen = None if heads is None else [typed_head(model.spec, one) for one in heads.split(",")]
    with screen.waiting("ablating"):
        result = model.ablate(
            rows, part.value, how=kind.value, within=within, heads=chosen, units=unit or None,
            positions=position or None, reference=reference or None, answer=answers, metric=name, at=at,
            target=target, seed=seed,
        )  # fmt: skip
    if as_json:
        screen.result({"model": checkpoint.model, "texts": rows} | result.to_dict())
    else:
        _show(result, top)


def _check_options(
    part: PartOption, heads: str | None, unit: list[int] | None, kind: KindOption, reference: list[str] | None
) -> None:
    """Raise BadParameter for options that do not go together."""
    if heads is not None and part is not PartOption.heads:
        raise typer.BadParameter(f"--heads is for --part heads, not {part.value}")
    if unit and part is not PartOption.neurons:
        raise typer.BadParameter(f"--unit is for --part neurons, not {part.value}")
    if reference and kind is KindOption.zero:
        raise typer.BadParameter("--reference is for --kind mean or resample")


def _show(result: Ablations, top: int) -> None:
    from triptych.probe.twins import margin_text

    table = screen.table("without", "changes it by", right=["changes it by"])
    largest = result.largest(top)
    for name, effect in largest:
        table.add_row(name, "" if effect != effect else f"{effect:+.4f}")
    title = f"{result.metric}: {float(result.before.mean()):.4f} as it is; {result.how} ablation"
    title += margin_text(result.margin)
    screen.show(table, plain(title))
    if len(largest) < len(result.units):
        screen.note(f"{len(largest)} of {len(result.units):,} are shown; --top N or --json shows more")
    if result.unchanged:
        names = ", ".join(result.unchanged[:3]) + (", ..." if len(result.unchanged) > 3 else "")
        screen.note(f"{names}: what was put there stood there already")
    if result.dead:
        names = ", ".join(result.dead[:3]) + (", ..." if len(result.dead) > 3 else "")
        screen.note(f"{names}: no logit that is measured depends on what stands there")
