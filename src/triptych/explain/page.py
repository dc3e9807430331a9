"""The steps of a forward as sections of the offline page, one for each part of the model."""

from __future__ import annotations

from triptych.explain.steps import Shown, Walk, name_of, number
from triptych.page import Facts, Grid, Section, Steps, Unfolding


def sections(walk: Walk) -> list[Section]:
    """The sections: what was run, then each part of the model with its steps."""
    parts: dict[str, list[Unfolding]] = {}
    for place, (step, error) in enumerate(zip(walk.steps, walk.errors, strict=True), 1):
        grids = [_grid(one) for one in (*step.uses, *step.makes)]
        difference = f"largest difference {error:.1e}" if error else "no difference"
        shown = Unfolding(
            place,
            step.title,
            step.formula,
            step.meaning,
            grids,
            f"Recomputed from the tensors above: {difference}.",
            open=place == 1,
        )
        parts.setdefault(step.part, []).append(shown)
    facts = [*walk.facts, ("Result", walk.outcome), ("Check", walk.verdict)]
    return [Facts("What was run", facts), *(Steps(part, items) for part, items in parts.items())]


def _grid(shown: Shown) -> Grid:
    """A tensor as a page prints it."""
    part = shown.excerpt()
    shade = part.values if shown.name.endswith("pattern") else None
    rows = [(label, [number(x) for x in row]) for label, row in zip(part.rows, part.values, strict=True)]
    named = bool(shown.columns)
    return Grid(
        name_of(shown), shown.shape, shown.name, part.columns, rows, part.left_out, named, part.focus, part.gap, shade
    )
