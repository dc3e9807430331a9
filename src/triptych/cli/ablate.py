"""`triptych ablate`: what the output loses without a head, a layer, a neuron or a position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from triptych.cli import options, screen
from triptych.cli.options import option
from triptych.cli.patch import MetricOption, answers_of

if TYPE_CHECKING:
    from triptych.probe import Ablations


Part = Literal["heads", "attention", "mlp", "blocks", "neurons", "positions"]
Kind = Literal["zero", "mean", "resample"]


@options.opens
def ablate(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    part: Annotated[Part, option("What is ablated, one at a time.")] = "heads",
    heads: Annotated[
        str | None,
        option("Only these heads, as in L4H2,L5H0; of two stacks encoder.L4H2, decoder.L4H2 or cross.L4H2.", "HEADS"),
    ] = None,
    kind: Annotated[
        Kind, option("What replaces its values: zero, the mean over texts, or another text's values.")
    ] = "zero",
    within: Annotated[str, option("Only at these sites, as in blocks.3.*", "GLOB")] = "*",
    unit: Annotated[list[int] | None, option("With --part neurons: only this one. Repeatable.", "N")] = None,
    position: Annotated[list[int] | None, option("Only at this position. Repeatable.", "P")] = None,
    reference: Annotated[
        list[str] | None, option("Text whose values --kind mean or resample takes. Repeatable.", "TEXT")
    ] = None,
    answer: Annotated[str | None, option("The right next token.", "TOKEN")] = None,
    other: Annotated[str | None, option("A token to compare it with.", "TOKEN")] = None,
    metric: Annotated[MetricOption | None, option("What is measured; by default as with patch.")] = None,
    at: options.MeasuredAt = None,
    target: options.DecoderInput = None,
    seed: Annotated[int, option("Seed of --kind resample.", "N", min=0, max=options.LAST_SEED)] = 0,
    top: Annotated[int, option("Units listed, largest effect first.", "N", min=1)] = 24,
    as_json: options.Json = False,
) -> None:
    """Run texts without one head, layer, neuron or position at a time, and show what the output loses."""
    if heads is not None and part != "heads":
        raise typer.BadParameter(f"--heads is for --part heads, not {part}")
    if unit and part != "neurons":
        raise typer.BadParameter(f"--unit is for --part neurons, not {part}")
    if reference and kind == "zero":
        raise typer.BadParameter("--reference is for --kind mean or resample")
    answers = answers_of(answer, other)
    from triptych.cli.loading import load_measured, read_texts
    from triptych.probe.head_names import typed_head

    rows = read_texts(texts)
    model = load_measured(checkpoint)
    model.check_words("ablate")
    chosen = None if heads is None else [typed_head(model.spec, one) for one in heads.split(",")]
    with screen.waiting("ablating"):
        result = model.ablate(
            rows, part, how=kind, within=within, heads=chosen, units=unit or None,
            positions=position or None, reference=reference or None, answer=answers, metric=metric, at=at,
            target=target, seed=seed,
        )  # fmt: skip
    if as_json:
        screen.result({"model": checkpoint.model, "texts": rows} | result.to_dict())
    else:
        _show(result, top)


def _show(result: Ablations, top: int) -> None:
    from triptych.probe.twins import margin_text

    largest = result.largest(top)
    title = f"{result.metric}: {float(result.before.mean()):.4f} as it is; {result.how} ablation"
    lines = [(name, "" if effect != effect else f"{effect:+.4f}") for name, effect in largest]
    screen.show_rows(("without", "changes it by"), lines, title + margin_text(result.margin), right=["changes it by"])
    if len(largest) < len(result.units):
        screen.note(f"{len(largest)} of {len(result.units):,} are shown; --top N or --json shows more")
    for names, why in (
        (result.unchanged, "what was put there stood there already"),
        (result.dead, "no logit that is measured depends on what stands there"),
    ):
        if names:
            screen.note(f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}: {why}")
