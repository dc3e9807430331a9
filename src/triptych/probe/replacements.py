"""What stands in place of the values that an ablation takes out, at the place of each run in its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.probe.prompts import Change, Place, ProbedModel, Prompt, resized, same_prompts
from triptych.probe.sites import sites
from triptych.probe.twins import TwinRuns


@dataclass(frozen=True)
class AblatedUnit:
    """What one ablation replaces: a place at one site, or of a whole block at several."""

    name: str
    sites: tuple[str, ...]
    place: Place


@dataclass(frozen=True, eq=False)
class Replacements:
    """What stands in place of the values of units: numbers of other texts, or 0.

    others   the reference texts.
    sums     for a mean, of each of them and each site the sum over positions, in float64, and how many these are.
    seed     of which text another one resamples.
    """

    model: ProbedModel
    how: str
    others: Sequence[Prompt]
    sums: Sequence[tuple[dict[str, Tensor], dict[str, int]]]
    seed: int

    @staticmethod
    def of(
        model: ProbedModel, how: str, others: Sequence[Prompt], values: dict[str, list[Tensor]], seed: int
    ) -> Replacements:
        """Of a mean, `values` are what each reference text has at each site."""
        of_texts = [{site: rows[i] for site, rows in values.items()} for i in range(len(others))]
        sums = [
            (
                {site: rows.double().sum(0) for site, rows in of_text.items()},
                {site: len(rows) for site, rows in of_text.items()},
            )
            for of_text in of_texts
        ]
        return Replacements(model, how, others, sums, seed)

    def put(self, runs: TwinRuns, units: Sequence[AblatedUnit], number: int) -> list[dict[str, Change]]:
        """Run the twin of text `number`, and give the changes of each unit's run."""
        places: list[dict[str, Place]] = [dict.fromkeys(unit.sites, unit.place) for unit in units]
        if self.how == "mean":
            new = self._means(runs, places)
        else:
            runs.twin()
            new = [dict.fromkeys(of_unit, torch.zeros(())) for of_unit in places]
        if self.how == "resample":
            new = self._resampled(runs, places, number)
        return [
            {site: place.put(site, of_unit[site]) for site, place in of_sites.items()}
            for of_sites, of_unit in zip(places, new, strict=True)
        ]

    def _resampled(self, runs: TwinRuns, places: Sequence[dict[str, Place]], number: int) -> list[dict[str, Tensor]]:
        """What the text that was drawn for text `number` has at the place of each run."""
        prompt, known = runs.prompt, sites(self.model.spec)
        other = self.others[_another(prompt, self.others, self.seed, number)]
        if runs.at is not None:
            other = resized(self.model, other, prompt.lengths)

        def part(site: str, place: Place, value: Tensor) -> Tensor:
            return place.part(site, value[: prompt.length(known[site], self.model.spec)])

        return runs.observe(other, runs.at, [_by_site(part, of_unit) for of_unit in places])[0]

    def _means(self, runs: TwinRuns, places: Sequence[dict[str, Place]]) -> list[dict[str, Tensor]]:
        """The means at the place of each run.  Where the text itself is one of the references, its own values are those
        that it has there, so that the mean of one value is this value."""
        same = [same_prompts(other, runs.prompt) for other in self.others]
        counts = {site: sum(positions[site] for _, positions in self.sums) for site in self.sums[0][0]}
        of_others = {site: torch.zeros_like(total) for site, total in self.sums[0][0].items()}
        for (sums, _), own in zip(self.sums, same, strict=True):
            for site in sums if not own else ():
                of_others[site] += sums[site]

        def part(site: str, place: Place, value: Tensor) -> Tensor:
            return replace(place, positions=None).part(site, value.double().sum(0, keepdim=True))

        taken = runs.twin([_by_site(part, of_unit) for of_unit in places])
        return [
            {
                site: (part(site, place, of_others[site][None]) + sum(same) * of_unit[site]) / counts[site]
                for site, place in of_sites.items()
            }
            for of_sites, of_unit in zip(places, taken, strict=True)
        ]


def _by_site(part: Callable[[str, Place, Tensor], Tensor], places: dict[str, Place]) -> dict[str, Change]:
    return {site: partial(part, site, place) for site, place in places.items()}


def _another(prompt: Prompt, others: Sequence[Prompt], seed: int, number: int) -> int:
    """The reference row that text `number` gets values of: another one, as long as it or longer."""
    fit = [i for i, other in enumerate(others) if _covers(other, prompt) and not same_prompts(other, prompt)]
    if not fit:
        raise InputError(
            f"text {number}: no other reference text is as long ({prompt.lengths[0]} tokens), so there is nothing to "
            "resample from; give longer ones with reference="
        )
    return Random(f"{seed} {number}").choice(fit)


def _covers(other: Prompt, prompt: Prompt) -> bool:
    """Whether each row of the one is as long as that of the other, or longer."""
    return all(theirs >= own for theirs, own in zip(other.lengths, prompt.lengths, strict=True))
