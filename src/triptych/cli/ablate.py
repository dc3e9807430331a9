"""`triptych ablate`: what the output loses without a head, a layer, a neuron or a position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import typer

from . import options, screen
from .patch import MetricOption, answers_of

if TYPE_CHECKING:
    from triptych.model import Model
    from triptych.probe import Ablations


AblatedPart = Literal["heads", "attention", "mlp", "blocks", "neurons", "positions"]
Replacement = Literal["zero", "mean", "resample"]
PUT = {"zero": "values set to 0", "mean": "values replaced by their mean", "resample": "values of another text"}


def ablate(
    checkpoint: options.Checkpoint,
    texts: options.Texts = None,
    *,
    part: AblatedPart = "heads",
    heads: str | None = None,
    kind: Replacement = "zero",
    within: str = "*",
    unit: list[int] | None = None,
    position: list[int] | None = None,
    reference: list[str] | None = None,
    answer: str | None = None,
    other: str | None = None,
    metric: MetricOption | None = None,
    at: int | None = None,
    target: str | None = None,
    seed: options.Seed = 0,
    top: options.Positive = 24,
    as_json: options.Json = False,
) -> None:
    """Run texts without one head, layer, neuron or position at a time, and show what the output loses.

    --part: What is ablated, one at a time.
    --heads HEADS: Only these heads, as in L4H2,L5H0 or 4.2,5.0; of two stacks encoder.L4H2, decoder.L4H2 or cross.L4H2.
    --kind: What replaces its values: zero, the mean over texts, or another text's values.
    --within GLOB: Only at these sites, as in blocks.3.*
    --unit N: With --part neurons: only this one. Repeatable.
    --position P: Only at this position. Repeatable.
    --reference TEXT: Text whose values --kind mean or resample takes. Repeatable.
    --answer TOKEN: The right next token.
    --other TOKEN: A token to compare it with.
    --metric: What is measured; by default as with patch.
    --seed N: Seed of --kind resample.
    --top N: Units listed, largest effect first.
    """
    if heads is not None and part != "heads":
        raise typer.BadParameter(f"--heads is for --part heads, not {part}")
    if unit and part != "neurons":
        raise typer.BadParameter(f"--unit is for --part neurons, not {part}")
    if reference and kind == "zero":
        raise typer.BadParameter("--reference is for --kind mean or resample")
    answers = answers_of(answer, other)
    from triptych.probe.sites import typed_head
    from .loading import load_measured, read_texts

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
        where = "at the mask" if model.spec.layout == "encoder" else "at the last token"
        named = _tokens(model, result, rows[0], target) if part == "positions" and len(rows) == 1 else {}
        _show(result, top, named, where if at is None else f"at position {at}")


def _tokens(model: Model, result: Ablations, text: str, target: str | None) -> dict[str, str]:
    """The position and the token of each unit of a text, as in `2 ␣by`, with the stack where there are two."""
    from triptych.probe.prompts import prompt_of, token_names

    prompt, named = prompt_of(model, text, target), dict[str, str]()
    for one in result.units:
        stack, place = one.sites[0].rpartition(".")[0], (one.place.positions or (0,))[0]
        named[one.name] = f"{stack} {place} {token_names(model, prompt, stack != 'decoder')[place]}".strip()
    return named


def _show(result: Ablations, top: int, named: Mapping[str, str], where: str) -> None:
    """The units with the largest effect, those in `named` by these; `where` the metric was measured."""
    from triptych.probe.twin_runs import margin_text

    largest = [(named.get(name, name), effect) for name, effect in result.largest(top)]
    measured = f"{result.metric}, {float(result.before.mean()):.4f} in the whole model,"
    if result.metric == "kl":
        measured = "KL divergence from the whole model, in nats,"
    title = f"{measured} {where}; {PUT[result.how]}"
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
