"""Patching grids, lenses and logit attributions as sections of the offline page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from triptych.page import Facts, Grid, Section, Steps, TableSection, Unfolding, render
from triptych.probe import Lens, LogitAttribution, PatchGrid

OPENABLE = 64  # positions whose candidates have a table of their own
LARGEST = 40  # parts of a logit that are listed

RESTORED = (
    "Each cell is a run of the corrupt prompt with what the clean prompt has at one place: 0 leaves the corrupt "
    "prompt's metric, 1 brings the clean prompt's back. The stronger its colour, the larger its share, whatever "
    "its sign."
)
ESTIMATED = (
    "All cells are estimated by one backward pass, to first order; single cells may be far from what a run gives."
)
READ_OUT = (
    "The vectors that leave a block, read through the final norm and the head. The last row is what the model answers."
)
DIRECT = (
    "What each part writes to the residual stream, as the final norm and the head turn it into a logit, with the scale "
    "of every norm held as it was in this run. What later parts make of it counts as theirs."
)


def patch_page(grid: PatchGrid, facts: Sequence[tuple[str, str]]) -> str:
    """A patching grid as one offline HTML page; `facts` are names and values of what was run."""
    restored = grid.restored.tolist()
    shade = [[0.0 if math.isnan(x) else min(abs(x), 1.0) for x in row] for row in restored]
    cells = [["" if math.isnan(x) else f"{x:.2f}" for x in row] for row in restored]
    table = Grid(
        "share restored", f"{len(grid.rows)} x {len(grid.columns)}", grid.metric, grid.columns,
        list(zip(_short_names(grid.rows), cells, strict=True)), named=True, shade=shade,
    )  # fmt: skip
    meaning = RESTORED + (f" {ESTIMATED}" if grid.estimated else "")
    step = Unfolding(
        1, "Patching, place by place", "(patched - corrupt) / (clean - corrupt)", meaning, [table], "", True
    )
    best = [(row, column, f"{value:.4f}") for row, column, value in grid.best(12)]
    measured = [
        ("Metric", grid.metric),
        ("Metric, clean", f"{grid.clean:.4f}"),
        ("Metric, corrupt", f"{grid.corrupt:.4f}"),
    ]
    sections: list[Section] = [
        Facts("What was run", [*facts, *measured]),
        Steps("Activation patching", [step]),
        TableSection("The places that move the metric most", ("site", "position or head", "metric"), best),
    ]
    return render("Activation patching", sections)


def lens_page(seen: Lens | None, parts: LogitAttribution | None, facts: Sequence[tuple[str, str]]) -> str:
    """A lens, a logit attribution or both as one offline HTML page."""
    sections: list[Section] = [Facts("What was run", facts)]
    if seen is not None:
        sections.append(Steps("Logit lens", _lens_steps(seen)))
    if parts is not None:
        sections += _attribution(parts)
    return render("Logit lens" if seen is not None else "Logit attribution", sections)


def _lens_steps(seen: Lens) -> list[Unfolding]:
    """The likeliest token of each layer and position, then the candidates of each position."""
    p = seen.probabilities.tolist()
    columns = [f"{at} {token}" for at, token in zip(seen.positions, seen.tokens, strict=True)]
    every, layers = range(len(columns)), _short_names(seen.layers)
    shape = f"{len(seen.layers)} x {len(columns)}"
    rows = [(layer, [f"{seen.names[i][t][0]} {p[i][t][0]:.0%}" for t in every]) for i, layer in enumerate(seen.layers)]
    shade = [[p[i][t][0] for t in every] for i in range(len(rows))]
    whole = Grid("likeliest token", shape, "softmax(head(final_norm(x)))", columns, rows, named=True, shade=shade)
    steps = [Unfolding(1, "The likeliest token after each layer", "head(final_norm(x))", READ_OUT, [whole], "", True)]
    ranks = [str(k + 1) for k in range(seen.ids.shape[-1])]
    for t, column in enumerate(columns[:OPENABLE] if len(ranks) > 1 else []):
        cells = [
            (layer, [f"{name} {x:.1%}" for name, x in zip(seen.names[i][t], p[i][t], strict=True)])
            for i, layer in enumerate(layers)
        ]
        shape = f"{len(cells)} x {len(ranks)}"
        one = Grid("candidates", shape, "", ranks, cells, named=True, shade=[p[i][t] for i in range(len(cells))])
        steps.append(Unfolding(t + 2, f"Candidates at position {column}", "", "", [one], ""))
    return steps


def _short_names(names: Sequence[str]) -> list[str]:
    """Sites as a narrow column shows them: "block 3" where all sites in blocks are the same part, else "3 attn.out"."""
    parts = [re.fullmatch(r"(?:(encoder|decoder)\.)?blocks\.(\d+)\.(\S+)(.*)", name) for name in names]
    same = len({part[3] for part in parts if part}) == 1
    short = []
    for name, part in zip(names, parts, strict=True):
        if part is None:
            short.append(name)
            continue
        stack, block, leaf, head = part.groups()
        before = stack or ("block" if same else "")
        short.append(" ".join(piece for piece in (before, block, "" if same else leaf, head.strip()) if piece))
    return short


def _attribution(parts: LogitAttribution) -> list[Section]:
    of = " - ".join(parts.answers)
    capped = " (before the softcap)" if parts.softcapped else ""
    facts = [
        (f"Logit of {of}{capped}", f"{parts.logit:.4f}"),
        ("Sum of all parts", f"{float(parts.values.sum()):.4f}"),
        ("Position", str(parts.position)),
    ]
    rows = [(name, f"{value:+.4f}") for name, value in parts.largest(LARGEST)]
    table = TableSection(f"The {len(rows)} largest of {len(parts.parts)} parts", ("part", "contribution"), rows)
    steps = [
        Unfolding(1, "Heads and MLPs, layer by layer", "W_U[answer] · part / scale", DIRECT, [_layers(parts)], "", True)
    ]
    return [Facts("Direct logit attribution", facts), Steps("Contributions", steps), table]


def _layers(parts: LogitAttribution) -> Grid:
    """Attention layers by heads, with the MLPs as a column."""
    cells: dict[str, dict[str, float]] = {}
    for name, value in zip(parts.parts, parts.values.tolist(), strict=True):
        where, _, head = name.partition(" head ")
        if head and where.endswith((".attn", ".cross")):
            cells.setdefault(where, {})[f"head {head}"] = value
        elif name.endswith(".mlp"):
            cells.setdefault(f"{name.removesuffix('.mlp')}.attn", {})["MLP"] = value
    heads = sorted({column for row in cells.values() for column in row if column != "MLP"}, key=lambda c: int(c[5:]))
    columns = [*heads, "MLP"]
    most = max((abs(value) for row in cells.values() for value in row.values()), default=0.0) or 1.0
    rows = [(name, [f"{row[c]:+.2f}" if c in row else "" for c in columns]) for name, row in cells.items()]
    shade = [[abs(row.get(c, 0.0)) / most for c in columns] for row in cells.values()]
    shape = f"{len(rows)} x {len(columns)}"
    return Grid("contribution", shape, "to the logit", columns, rows, named=True, shade=shade)
