"""Ablation: what the output loses without a head, a layer, a neuron or a position.

The value there is replaced by 0, by its mean over reference texts, or by what another text has there (resampling; Chan
et al. 2022).  Zero is far from what a model meets where the values have a mean of their own; the other two stay near.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal

import torch
from torch import Tensor

from triptych.arguments import checked
from triptych.errors import InputError, ProbeError, shown
from .display import JsonResult, largest
from .metric import Answer, MetricFunction, MetricName, metric_of
from .patching import check_metric
from .prompts import (
    BATCH_TOKENS,
    EditedRun,
    Place,
    ProbedModel,
    Prompt,
    PromptInput,
    check_list,
    check_positions,
    indices_below,
    measured_at,
    prompt_of,
    resized,
    same_prompts,
    values_at,
)
from .sites import HeadName, Site, attention_head, match, sites
from .twin_runs import TwinRuns, margin_text

Replaced = Literal["zero", "mean", "resample"]
_PATTERNS: dict[str, tuple[str, ...]] = {
    "heads": ("*.attn.z", "*.cross.z"), "attention": ("*.attn.out", "*.cross.out"), "mlp": ("*.mlp.out",),
    "blocks": ("*.attn.out", "*.cross.out", "*.mlp.out", "*.branch.out"), "neurons": ("*.mlp.act",),
    "positions": ("embed", "*.embed"),
}  # fmt: skip
MAX_RUNS = 20_000


@dataclass(frozen=True)
class AblatedUnit:
    """The values that one ablation replaces: a place at one site, or of a whole block at several."""

    name: str
    sites: tuple[str, ...]
    place: Place


@dataclass(frozen=True, eq=False)
class Ablations(JsonResult):
    """The metric of each text with each unit ablated; made by `Model.ablate`.

    values   [U, B] of U units and B texts; NaN where a text does not have the position.
    before   [B], the texts as they are.
    fired    [U, B], whether the ablation changed a value: not where the replacement is what stands there already.
    moved    [U, B], whether it changed a logit at the measured position, by however little.
    margin   0 but in a mixture of experts, where a difference of up to so much of the largest value or logit is none.
    """

    in_json = ("metric", "how", "before", "units", "values", "effect", "unchanged", "dead", "margin")
    metric: str
    how: str
    units: tuple[AblatedUnit, ...]
    values: Tensor
    before: Tensor
    fired: Tensor
    moved: Tensor
    margin: float = 0.0

    @property
    def unchanged(self) -> tuple[str, ...]:
        """The units whose ablation changed no value in any text."""
        return self._names(~self.fired.any(-1))

    @property
    def dead(self) -> tuple[str, ...]:
        """The units whose ablation changed values and, in every text, not one logit: nothing that is measured reads
        what they give, as with output weights of 0, or at a position that the measured one does not see."""
        return self._names(self.fired.any(-1) & ~self.moved.any(-1))

    def _names(self, chosen: Tensor) -> tuple[str, ...]:
        return tuple(unit.name for unit, one in zip(self.units, chosen.tolist(), strict=True) if one)

    @property
    def effect(self) -> Tensor:
        """[U], by how much the ablation changes the metric, the mean over texts."""
        return (self.values - self.before).nanmean(-1)

    def largest(self, count: int = 10) -> list[tuple[str, float]]:
        """The units whose ablation changes the metric most, with the change."""
        return largest([unit.name for unit in self.units], self.effect, count)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; None where there is no value."""
        return super().to_dict() | {"units": [unit.name for unit in self.units]}

    def __repr__(self) -> str:
        title = f"{self.metric}, {self.how} ablation: before {float(self.before.mean()):.4g}{margin_text(self.margin)}"
        return "\n".join([title, *(f"{effect:+.4f}  {name}" for name, effect in self.largest(24))])


@checked
def ablate(
    model: ProbedModel,
    texts: Sequence[PromptInput],
    part: Literal["heads", "attention", "mlp", "blocks", "neurons", "positions"] = "heads",
    *,
    how: Literal["zero", "mean", "resample"] = "zero",
    within: str = "*",
    heads: Sequence[int | HeadName] | None = None,
    units: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    reference: Sequence[PromptInput] | None = None,
    answer: Answer | Sequence[Answer] | None = None,
    metric: MetricName | MetricFunction | None = None,
    at: int | None = None,
    target: PromptInput = None,
    seed: int = 0,
    max_runs: int = MAX_RUNS,
    batch_tokens: int = BATCH_TOKENS,
    max_bytes: int = 1 << 30,
) -> Ablations:
    """Run each text once without each unit, and measure it (by default the KL divergence, in nats, from the whole
    model's distribution at the last position; see `Metric`).

    part        "heads": one head's output (z); "attention", "mlp": what one sublayer adds to the residual stream;
                "blocks": all that one block adds, so that a pre-norm block passes its input on; "neurons": one number
                of the MLP's hidden layer (act); "positions": the embedding at one position.
    how         what stands in its place: "zero"; "mean", over all positions of the `reference` texts (by default the
                texts); "resample", what one other reference text, drawn with `seed`, has at the same positions
                (resample ablation, Chan et al. 2022).
    within      a glob over site names that restricts the units, for example "blocks.3.*" or "decoder.*".
    heads, units, positions   these heads, neurons and positions only.  A head is a number, of every attention, or one
                head by name as in `path_patch`: (block, head).  `positions` elsewhere than with "positions" replaces
                the values at these positions and no others.
    at, target  as in `patch`; `target` is what the decoder beside an encoder reads with every text.

    Each run is compared in bits with a twin, the same row of a batch of the same shape without the change: one forward
    more a text, two to resample, and in a mixture of experts one more.

    Raises InputError for positions out of range, answers of several tokens, more than `max_runs` runs and nothing to
    resample from; ProbeError for parts the model does not have, and heads or neurons out of range.
    """
    check_list(texts, "texts")
    if reference is not None:
        check_list(reference, "reference")
        if how == "zero":
            raise InputError("reference= gives what 'mean' and 'resample' put there; leave it out, or give how= too")
    measure = metric_of(model, answer, metric)
    prompts = [prompt_of(model, text, target) for text in texts]
    places = [measured_at(model, prompt, at) for prompt in prompts]
    known, ablated = _units(model, part, within, prompts, heads, units, positions)
    if len(ablated) * len(prompts) > max_runs:
        raise InputError(
            f"{len(ablated):,} units and {len(prompts)} texts are {len(ablated) * len(prompts):,} runs, over "
            f"max_runs={max_runs:,}; choose fewer with within=, heads= or units=, or raise max_runs"
        )
    others = prompts if reference is None else [prompt_of(model, text, target) for text in reference]
    sums = [] if how != "mean" else values_at(model, others, list(known), max_bytes, batch_tokens)
    sums = [{name: value.double().sum(0) for name, value in of_one.items()} for of_one in sums]
    replacements = _Replacements(how, known, others, sums, seed)
    values = torch.full((len(ablated), len(prompts)), math.nan, dtype=torch.float32)
    before = values.new_zeros(len(prompts))
    fired, moved = (torch.zeros(values.shape, dtype=torch.bool) for _ in range(2))
    margin = 0.0
    for b, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        lengths = {name: prompt.length(site, model.spec) for name, site in known.items()}
        present = [
            u for u, unit in enumerate(ablated)
            if max(unit.place.positions or (-1,)) < min(lengths[site] for site in unit.sites)
        ]  # fmt: skip
        removed = [ablated[u] for u in present]
        runs = TwinRuns(model, EditedRun(prompt, place), [unit.sites for unit in removed], batch_tokens)
        changes = [
            {site: unit.place.put(site, value) for site, value in of_unit.items()}
            for unit, of_unit in zip(removed, replacements.beside_twin(runs, removed, b), strict=True)
        ]
        margin = max(margin, runs.margin)
        plain = runs.twin_logits[:1]
        measured, before[b], _ = check_metric(measure, plain, plain)
        for piece in runs.compare(changes, foreign=how != "zero"):
            rows = [present[i] for i in piece.numbers]
            values[rows, b] = before[b] + piece.effect(measured)
            fired[rows, b], moved[rows, b] = piece.fired, piece.moved
    if not bool(fired.any()):
        raise ProbeError("no ablation changed a value: what is put there stands there already; choose another how=")
    return Ablations(str(measure), how, tuple(ablated), values, before, fired, moved, margin)


@dataclass(frozen=True, eq=False)
class _Replacements:
    """What is put in the place of each unit of a text.

    known    the sites of the units, by name.
    others   the reference texts, and for "mean" the `sums` over the positions of each.
    """

    how: Replaced
    known: dict[str, Site]
    others: Sequence[Prompt]
    sums: Sequence[dict[str, Tensor]]
    seed: int

    def beside_twin(self, runs: TwinRuns, units: Sequence[AblatedUnit], number: int) -> list[dict[str, Tensor]]:
        """Run the twin, and give the values that replace each unit of text `number`, by site."""
        if self.how == "mean":
            return self._means(runs, units)
        runs.twin()
        if self.how == "resample":
            return self._resampled(runs, units, _another(runs.run.prompt, self.others, self.seed, number))
        return [dict.fromkeys(unit.sites, torch.zeros(())) for unit in units]

    def _means(self, runs: TwinRuns, units: Sequence[AblatedUnit]) -> list[dict[str, Tensor]]:
        """The means over the reference texts at the place of each run.

        Where the text itself is one of these, its values are those that it has in the twin, so that the mean of one
        value is this value.
        """
        own = [same_prompts(other, runs.run.prompt) for other in self.others]
        counts = {
            name: sum(other.length(site, runs.model.spec) for other in self.others) for name, site in self.known.items()
        }
        of_others = {
            site: sum(
                (one[site] for one, is_own in zip(self.sums, own, strict=True) if not is_own), torch.zeros_like(first)
            )
            for site, first in self.sums[0].items()
        }

        def part(site: str, place: Place, value: Tensor) -> Tensor:
            return replace(place, positions=None).part(site, value.double().sum(0, keepdim=True))

        taken = runs.twin([_by_site(unit, part) for unit in units])
        return [
            {
                site: (part(site, unit.place, of_others[site][None]) + sum(own) * value) / counts[site]
                for site, value in of_unit.items()
            }
            for unit, of_unit in zip(units, taken, strict=True)
        ]

    def _resampled(self, runs: TwinRuns, units: Sequence[AblatedUnit], other: Prompt) -> list[dict[str, Tensor]]:
        """The other text's values at the place of each run."""
        prompt, spec = runs.run.prompt, runs.model.spec
        if runs.run.at is not None:
            other = resized(runs.model, other, prompt.lengths)

        def part(site: str, place: Place, value: Tensor) -> Tensor:
            return place.part(site, value[: prompt.length(self.known[site], spec)])

        return runs.observe(replace(runs.run, prompt=other), [_by_site(unit, part) for unit in units])[0]


def _by_site(unit: AblatedUnit, part: Callable[[str, Place, Tensor], Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    return {site: partial(part, site, unit.place) for site in unit.sites}


def _another(prompt: Prompt, others: Sequence[Prompt], seed: int, number: int) -> Prompt:
    """The reference that text `number` gets values of: another one, no row of which is shorter than its own."""
    fit = [
        other for other in others
        if all(map(operator.ge, other.lengths, prompt.lengths)) and not same_prompts(other, prompt)
    ]  # fmt: skip
    if not fit:
        raise InputError(
            f"text {number}: no other reference text is as long ({prompt.lengths[0]} tokens), so there is nothing to "
            "resample from; give longer ones with reference="
        )
    return Random(f"{seed} {number}").choice(fit)


def _sites(model: ProbedModel, part: str, within: str) -> dict[str, Site]:
    """The sites whose values a part's ablation replaces.  Raises ProbeError where the model has none."""
    every = sites(model.spec)
    match(within, model.spec, every)  # refuses what names nothing, with the nearest name
    of_part = {n: s for n, s in every.items() if any(fnmatch.fnmatchcase(n, one) for one in _PATTERNS[part])}
    if not of_part:
        reason = "its MLPs are mixtures of experts" if part == "neurons" else "it has no such part"
        raise ProbeError(f"no {part} can be ablated in this {model.spec.family} model: {reason}")
    names = [within.removeprefix(f"{stack}.") if len(model.spec.stacks) == 1 else within for stack in model.spec.stacks]
    chosen = {name: site for name, site in of_part.items() if any(fnmatch.fnmatchcase(name, one) for one in names)}
    if not chosen:
        raise ProbeError(f"within={within!r} leaves no {part}; their sites are {', '.join(_PATTERNS[part])}")
    return chosen


def _units(
    model: ProbedModel, part: str, within: str, prompts: Sequence[Prompt],
    heads: Sequence[int | HeadName] | None, units: Sequence[int] | None, positions: Sequence[int] | None,
) -> tuple[dict[str, Site], list[AblatedUnit]]:  # fmt: skip
    """The sites whose values are replaced, and what is ablated one at a time."""
    known = _sites(model, part, within)
    if heads is not None and part != "heads":
        raise InputError(f"heads= is for the ablation of heads; this one is of {part}")
    numbers = _head_numbers(model, known, heads, within) if part == "heads" else {}
    known = {name: site for name, site in known.items() if name in numbers} if numbers else known
    if units is not None and part != "neurons":
        raise InputError(f"units= is for the ablation of neurons; this one is of {part}")
    if units is not None:
        check_list(units, "units")
    longest = {name: max(prompt.length(site, model.spec) for prompt in prompts) for name, site in known.items()}
    shortest = min(prompt.length(site, model.spec) for prompt in prompts for site in known.values())
    if part == "positions":
        shortest = max(longest.values())
    at = None if positions is None else tuple(check_positions(positions, shortest))
    if part in ("attention", "mlp"):
        return known, [AblatedUnit(name, (name,), Place(at)) for name in known]
    if part == "blocks":
        blocks: dict[str, list[str]] = {}
        for name in known:
            blocks.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
        return known, [AblatedUnit(block, tuple(names), Place(at)) for block, names in blocks.items()]
    ablated = []
    for name, site in known.items():
        if part == "positions":
            chosen = range(longest[name]) if at is None else at
            ablated += [AblatedUnit(f"{name} position {i}", (name,), Place((i,))) for i in chosen]
        elif part == "heads":
            ablated += [AblatedUnit(f"{name} head {head}", (name,), Place(at, (head,))) for head in numbers[name]]
        else:
            every = range(site.width) if units is None else indices_below(site.width, units, f"{name} has neurons")
            ablated += [AblatedUnit(f"{name} neuron {unit}", (name,), Place(at, None, (unit,))) for unit in every]
    return known, ablated


def _head_numbers(
    model: ProbedModel, known: dict[str, Site], heads: Sequence[int | HeadName] | None, within: str
) -> dict[str, Sequence[int]]:
    """The numbers of the heads at each site: numbers are of every site, names of one attention each."""
    if heads is None:
        return {name: range(site.heads or 1) for name, site in known.items()}
    check_list(heads, "heads")
    named = [head for head in heads if isinstance(head, tuple | list)]
    if not named:
        return {name: indices_below(site.heads or 1, heads, f"{name} has heads") for name, site in known.items()}
    if len(named) < len(heads):
        raise InputError(f"heads={shown(heads)} must be all numbers, or all names (block, head)")
    numbers: dict[str, list[int]] = {}
    for attention, number in (attention_head(model.spec, head) for head in named):
        if f"{attention}.z" not in known:
            raise ProbeError(f"within={within!r} leaves out {attention}, of which a head is to be ablated")
        numbers.setdefault(f"{attention}.z", []).append(number)
    return {name: list(dict.fromkeys(of_site)) for name, of_site in numbers.items()}
