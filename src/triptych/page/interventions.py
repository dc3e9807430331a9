"""Patching grids, lenses and logit attributions as sections of the offline page."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from triptych.probe import Lens, LogitAttribution, PatchGrid
from triptych.probe.patching import ROUGH
from . import Facts, MatrixSection, Section, TableSection, render

LARGEST = 40  # parts of a logit that are listed

RESTORED = (
    "Each cell is a run of the corrupt prompt with the clean prompt's value at one site and position: 0 is the corrupt "
    "prompt's metric, 1 the clean prompt's. The stronger the colour, the larger the magnitude."
)
SAME = "The metric is the same for both prompts, so that no share of a difference can be computed."
ESTIMATED = (
    "All cells are estimated by one backward pass, to first order; single cells may differ much from those of a run."
)
LENS = (
    "The logit lens: the final norm and the head applied to the vector after each block. The last row is the model's "
    "prediction. Choose a cell to see its candidates."
)
DIRECT = (
    "What each part adds to the logit through the residual stream, the final norm and the head, with the scale of "
    "every norm fixed at its value in this run. Effects through later parts are counted as those of the later parts."
)


def patch_page(grid: PatchGrid, facts: Sequence[tuple[str, str]]) -> str:
    """A patching grid as one offline HTML page; `facts` are names and values of what was run."""
    return render("Activation patching", patch_sections(grid, facts))


def patch_sections(grid: PatchGrid, facts: Sequence[tuple[str, str]]) -> list[Section]:
    """The grid, the places that move the metric most, and what was run."""
    restored, values = grid.restored.tolist(), grid.values.tolist()
    shade = [[min(abs(x), 1.0) if math.isfinite(x) else 0.0 for x in row] for row in restored]
    cells = [["" if math.isnan(x) else f"{round(x, 2) + 0.0:.2f}" for x in row] for row in restored]
    details = [
        [[("share restored", a), (grid.metric, b)] if math.isfinite(a + b) else [] for a, b in zip(*both, strict=True)]
        for both in zip(restored, values, strict=True)
    ]
    best = grid.best(12)
    measured = [
        ("Metric", grid.metric), ("Metric, clean", f"{grid.clean:.4g}"), ("Metric, corrupt", f"{grid.corrupt:.4g}")
    ]  # fmt: skip
    measured += [("Margin of no difference", f"{grid.margin:.1g} of the largest number")] if grid.margin else []
    chosen = (grid.rows.index(best[0][0]), list(grid.columns).index(best[0][1])) if best else None
    meaning = (RESTORED if grid.tells_apart else SAME) + (f" {ESTIMATED}" if grid.estimated else "")
    meaning += f" Note: {ROUGH}." if grid.rough else ""
    about = "(patched - corrupt) / (clean - corrupt)"
    largest = [(row, column, f"{value:.4g}") for row, column, value in best]
    rows = _short_names(grid.rows)
    return [
        MatrixSection("Patching by site", meaning, rows, grid.columns, cells, shade, details, about, chosen),
        TableSection("The largest effects on the metric", ("site", "position or head", "metric"), largest),
        Facts("What was patched", [*facts, *measured]),
    ]


def lens_page(lens: Lens | None, parts: LogitAttribution | None, facts: Sequence[tuple[str, str]]) -> str:
    """A lens, a logit attribution or both as one offline HTML page."""
    lens_sections = [] if lens is None else [lens_matrix(lens, "Logit lens", LENS)]
    attribution = [] if parts is None else attribution_sections(parts)
    title = "Logit lens" if lens_sections else "Logit attribution"
    return render(title, [*lens_sections, *attribution, Facts("What was run", facts)])


def lens_matrix(lens: Lens, title: str, note: str) -> MatrixSection:
    """The likeliest token of each layer and position, each cell with its candidates."""
    chances = lens.probabilities.tolist()
    details = [
        [list(zip(*cell, strict=True)) for cell in zip(*both, strict=True)]
        for both in zip(lens.names, chances, strict=True)
    ]
    cells = [[f"{best[0][0]} {best[0][1]:.0%}" for best in row] for row in details]
    columns = [f"{at} {token}" for at, token in zip(lens.positions, lens.tokens, strict=True)]
    shade = [[p[0] for p in row] for row in chances]
    return MatrixSection(title, note, _short_names(lens.layers), columns, cells, shade, details, "Probabilities.")


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


def attribution_sections(parts: LogitAttribution) -> list[Section]:
    """What each part adds to a logit, layer by layer, and the largest of them."""
    of = " - ".join(parts.answers)
    capped = " (before the softcap)" if parts.softcapped else ""
    facts = [
        (f"Logit of {of}{capped}", f"{parts.logit:.4f}"),
        ("Sum of all parts", f"{float(parts.values.sum()):.4f}"),
        ("Position", str(parts.position)),
    ]
    rows = [(name, f"{value:+.4f}") for name, value in parts.largest(LARGEST)]
    table = TableSection(f"The {len(rows)} largest of {len(parts.parts)} parts", ("part", "contribution"), rows)
    return [_layers(parts), table, Facts("Direct logit attribution", facts)]


def _layers(parts: LogitAttribution) -> MatrixSection:
    """Attention layers by heads, with the MLPs as a column."""
    cells = defaultdict[str, dict[str, float]](dict)
    for name, value in zip(parts.parts, parts.values.tolist(), strict=True):
        where, _, head = name.partition(" head ")
        if head and where.endswith((".attn", ".cross")):
            cells[where][f"head {head}"] = value
        elif name.endswith(".mlp"):
            cells[f"{name.removesuffix('.mlp')}.attn"]["MLP"] = value
    heads = sorted({column for row in cells.values() for column in row if column != "MLP"}, key=lambda c: int(c[5:]))
    columns = [*heads, "MLP"]
    most = max((abs(value) for row in cells.values() for value in row.values()), default=0.0) or 1.0
    texts = [[f"{row[c]:+.2f}" if c in row else "" for c in columns] for row in cells.values()]
    shade = [[abs(row.get(c, 0.0)) / most for c in columns] for row in cells.values()]
    return MatrixSection("Heads and MLPs, layer by layer", DIRECT, list(cells), columns, texts, shade)
