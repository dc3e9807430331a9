"""The cells of a patching grid: which sites, heads and positions are patched, and which clean position corresponds to
each position of the corrupt prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from triptych.errors import InputError, ProbeError, shown
from .prompts import (
    Place,
    ProbedModel,
    Prompt,
    check_list,
    check_position,
    check_positions,
    indices_below,
    of_source,
    token_names,
)
from .sites import Site, match, matrix, sites

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Cells:
    """The names of a grid's rows and columns, and for each cell that exists its site and place."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: dict[tuple[int, int], tuple[Site, Place]]

    def empty(self) -> tuple[Tensor, Tensor]:
        """Values [R, C] of NaN, and where patching fired [R, C]."""
        shape = len(self.rows), len(self.columns)
        return torch.full(shape, math.nan, dtype=torch.float32), torch.zeros(shape, dtype=torch.bool)


@dataclass(frozen=True)
class Alignment:
    """The clean position for each corrupt position: `pairs[True]` of the texts, `pairs[False]` of the targets."""

    model: ProbedModel
    broken: Prompt
    pairs: dict[bool, dict[int, int]]

    @staticmethod
    def of(
        model: ProbedModel, intact: Prompt, broken: Prompt, wanted: Sequence[Site], align: Pairs | None,
        target_align: Pairs | None,
    ) -> Alignment:  # fmt: skip
        needed = {of_source(one, model.spec) for one in wanted}
        maps = {}
        for source, given, what in ((True, align, "align"), (False, target_align, "target_align")):
            lengths = intact.positions(source), broken.positions(source)
            if given is None and lengths[0] != lengths[1] and source in needed:
                raise InputError(
                    f"the clean and the corrupt {'texts' if source else 'targets'} have {lengths[0]} and {lengths[1]} "
                    f"tokens; state which positions correspond, {what}=[(clean, corrupt), ...]"
                )
            maps[source] = _pairs(given, lengths, what)
        over_keys = next((one.name for one in wanted if one.per_key), None)
        if over_keys is not None and (align, target_align) != (None, None):
            raise ProbeError(f"{over_keys} is over keys too, which have no alignment; choose another site")
        if over_keys is not None and intact.lengths != broken.lengths:
            raise ProbeError(f"{over_keys} is over keys too; the prompts must have the same numbers of tokens")
        return Alignment(model, broken, maps)

    def clean(self, at: int) -> int:
        """The clean position of a corrupt one whose logits are measured.  Raises InputError where it has none."""
        source = not self.broken.lengths[1]
        check_position(at, self.broken.positions(source), "at")
        if at not in self.pairs[source]:
            raise InputError(f"at={at} has no clean position; add it to the alignment")
        return self.pairs[source][at]

    def of_site(self, site: Site) -> dict[int, int]:
        return self.pairs[of_source(site, self.model.spec)]

    def clean_place(self, site: Site, place: Place) -> Place:
        """Where the clean prompt has what corresponds to a place of the corrupt one."""
        if matrix(site.name) or place.positions is None:
            return place
        pairs = self.of_site(site)
        return replace(place, positions=tuple(pairs[position] for position in place.positions))

    def moved(self, value: Tensor, site: Site) -> Tensor:
        """The clean value of a site at the corrupt prompt's positions; 0 at those that correspond to none."""
        if matrix(site.name):
            return value
        pairs = self.of_site(site)
        out = value.new_zeros((self.broken.length(site, self.model.spec), *value.shape[1:]))
        out[list(pairs)] = value[list(pairs.values())]
        return out


def _pairs(pairs: Pairs | None, lengths: tuple[int, int], what: str) -> dict[int, int]:
    if pairs is None:
        return {i: i for i in range(min(lengths))}
    check_list(pairs, what)
    out: dict[int, int] = {}
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"{what}: {shown(pair)} is not a pair (clean position, corrupt position)")
        clean = check_position(pair[0], lengths[0], f"{what}, clean position")
        corrupt = check_position(pair[1], lengths[1], f"{what}, corrupt position")
        if corrupt in out:
            raise InputError(f"{what}: corrupt position {corrupt} is given twice")
        out[corrupt] = clean
    return out


def patched_sites(model: ProbedModel, site: str | Sequence[str] | None, *, heads: bool) -> list[Site]:
    """The sites that are patched.  Raises ProbeError for those that are not there, and for the logits."""
    known = sites(model.spec)
    if site is None:
        site = "*.z" if heads else "*resid_pre"
    patterns = [site] if isinstance(site, str) else site
    check_list(patterns, "site")
    names = [one.name for pattern in patterns for one in match(pattern, model.spec, known)]
    if "logits" in patterns:
        raise ProbeError("logits are what is measured; patch a site before them")
    wanted = [known[name] for name in known if name in set(names) and name != "logits"]
    without = next((one.name for one in wanted if one.heads is None), None)
    if heads and without is not None:
        raise ProbeError(f"{without} has no heads; leave heads= out, or choose a site like *.z")
    return wanted


def cells_of(
    aligned: Alignment, wanted: Sequence[Site], heads: bool | Sequence[int],
    positions: Literal["all"] | Sequence[int] | None,
) -> Cells:  # fmt: skip
    """Rows are sites; columns positions, or heads where all positions are patched at once; with both, each head of a
    site has a row."""
    model, broken = aligned.model, aligned.broken
    rows = [(one, head) for one in wanted for head in _heads_of(one, heads)]
    places: dict[tuple[int, int], tuple[Site, Place]] = {}
    if positions is None:
        columns = sorted({head for _, head in rows if head is not None})
        for one, head in rows:
            r, c = wanted.index(one), 0 if head is None else columns.index(head)
            places[r, c] = one, Place(tuple(aligned.of_site(one)), None if head is None else (head,))
        names = tuple(f"head {head}" for head in columns) or ("all positions",)
        return Cells(tuple(one.name for one in wanted), names, places)
    columns_at = _columns(aligned, {of_source(one, model.spec) for one in wanted}, positions)
    for r, (one, head) in enumerate(rows):
        for c, (source, position) in enumerate(columns_at):
            if source == of_source(one, model.spec):
                places[r, c] = one, Place((position,), None if head is None else (head,))
    named = {source: token_names(model, broken, source) for source in {source for source, _ in columns_at}}
    marks = {True: "text ", False: "target "} if len(named) > 1 else {True: "", False: ""}
    return Cells(
        tuple(one.name if head is None else f"{one.name} head {head}" for one, head in rows),
        tuple(f"{marks[source]}{position} {named[source][position]}" for source, position in columns_at),
        places,
    )


def _columns(
    aligned: Alignment, sources: set[bool], positions: Literal["all"] | Sequence[int]
) -> list[tuple[bool, int]]:
    """Whether a column is a position of the text (or of the target), and which."""
    if isinstance(positions, str):
        return [(source, i) for source in sorted(sources, reverse=True) for i in sorted(aligned.pairs[source])]
    if len(sources) > 1:
        raise InputError("positions of which row? the sites are of texts and of targets; choose sites of one stack")
    (source,) = sources
    chosen = check_positions(positions, aligned.broken.positions(source))
    for position in chosen:
        if position not in aligned.pairs[source]:
            raise InputError(f"position {position} has no clean position; add it to the alignment")
    return [(source, position) for position in chosen]


def _heads_of(site: Site, heads: bool | Sequence[int]) -> Sequence[int | None]:
    if isinstance(heads, bool):
        return range(site.heads or 1) if heads else [None]
    check_list(heads, "heads")
    return indices_below(site.heads or 1, heads, f"{site.name} has heads")
