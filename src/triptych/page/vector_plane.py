"""The vectors of a search as points in a plane: as a section of a page, as SVG, and (extra `plot`) as PNG."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.errors import InputError
from .drawing import document, escaped, shortened
from .inside_sections import PlanePoints, PlaneSection
from .plot import COLOURS, drawn
from .render import check_place, check_replaced, render, write
from .sections import Facts, TableSection

if TYPE_CHECKING:
    from triptych.tasks import SearchResult

FORMATS = (".svg", ".png", ".html", ".htm")
SIDE = 720  # units of the picture
GREY = "#9a968c"
NOTE = (
    "Each point is a passage, placed by the first two principal components of all their vectors. Distances in the "
    "plane show only these two components; the scores are computed with all."
)


def section(result: SearchResult) -> PlaneSection:
    """The query, the hits and the other passages as three groups of points."""
    at, passages, share = result.plane()
    hits = len(result.hits)
    names = ["query", *(f"{i + 1} {result.places[n]}" for i, n in enumerate(passages[:hits].tolist()))]
    names += [result.places[n].rpartition(":")[0] for n in passages[hits:].tolist()]  # those of one file alike
    groups = [0] + [1] * hits + [2] * (len(passages) - hits)
    count = len(names)  # the points are drawn in order, so that the query and the hits come last
    points = PlanePoints(
        "encoder", ["vectors"], names[::-1], groups[::-1], list(range(count)), at[None, ::-1], [share],
        range(count - hits - 1, count),
    )  # fmt: skip
    texts = [f"query: {result.query}", "hits", "other passages"]
    return PlaneSection("Passages and query", NOTE, texts, [points])


def save(path: Path, result: SearchResult, command: str = "") -> None:
    """Write the picture of a search to `path`: .svg, which names the `command` that made it, .png or .html.

    Raises InputError for another ending, and for .png without matplotlib; TriptychError where `path` cannot be written
    or is a file that Triptych did not write.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path} must end in {', '.join(FORMATS)}")
    check_place(path)
    check_replaced(path)
    if path.suffix.lower() == ".png":
        png(path, result)
    else:
        write(path, svg(result, command) if path.suffix.lower() == ".svg" else html(result))


def html(result: SearchResult) -> str:
    """One offline page with the hits and the plane."""
    facts = [("Query", result.query), ("Files", f"{result.files:,}"), ("Passages", f"{result.passages:,}")]
    rows = [(f"{hit.score:.4f}", f"{hit.file}:{hit.line}", hit.text) for hit in result.hits]
    table = TableSection("Nearest passages", ("score", "place", "text"), rows)
    return render("Search", [Facts("What was searched", facts), table, section(result)], subtitle=result.query)


def svg(result: SearchResult, command: str = "") -> str:
    """The plane as an SVG document, hits numbered and named, the query as a cross."""
    at, passages, share = result.plane()
    x, y = (at / max(np.abs(at).max(), 1e-12) * (SIDE / 2 - 30)).T
    x, y = x + SIDE / 2, SIDE / 2 + 50 - y
    parts = []
    hits = len(result.hits)
    for i in range(len(passages), 0, -1):  # the best hit is drawn last
        place = escaped(result.places[passages[i - 1]])
        hit = i <= hits
        colour, radius = (COLOURS[1], 6) if hit else (GREY, 3)
        parts.append(
            f'<circle cx="{x[i]:.1f}" cy="{y[i]:.1f}" r="{radius}" fill="{colour}"'
            f' fill-opacity="{0.9 if hit else 0.5}"><title>{place}</title></circle>'
        )
    for i in range(1, hits + 1):
        name = escaped(f"{i} {shortened(result.places[passages[i - 1]])}")
        parts.append(f'<text x="{x[i] + 9:.1f}" y="{y[i] + 4:.1f}">{name}</text>')
    left, top = x[0], y[0]
    parts.append(
        f'<path d="M{left - 8:.1f} {top:.1f}H{left + 8:.1f}M{left:.1f} {top - 8:.1f}V{top + 8:.1f}"'
        f' stroke="{COLOURS[0]}" stroke-width="3"><title>query</title></path>'
        f'<text x="{left + 11:.1f}" y="{top - 8:.1f}" fill="{COLOURS[0]}">query</text>'
    )
    parts.append(f'<text x="24" y="{SIDE + 70}">The plane shows {share:.0%} of the variance.</text>')
    return document(SIDE + 140, SIDE + 90, f"Passages nearest to: {shortened(result.query, 60)}", parts, command)


def png(path: str | os.PathLike[str], result: SearchResult) -> None:
    """The plane as a PNG file.  Raises InputError where matplotlib is not installed."""
    at, passages, share = result.plane()
    hits = len(result.hits)
    plain: dict[str, Any] = {"parse_math": False}
    with drawn(path) as figure:
        axes = figure.add_subplot()
        x, y = at.T
        axes.scatter(x[1 + hits :], y[1 + hits :], s=8, color=GREY, alpha=0.5, label="other passages")
        axes.scatter(x[1 : 1 + hits], y[1 : 1 + hits], s=36, color=COLOURS[1], label="hits")
        axes.scatter(x[:1], y[:1], s=80, marker="+", color=COLOURS[0], label="query")
        for i, passage in enumerate(passages[:hits].tolist(), 1):
            name = f"{i} {shortened(result.places[passage])}"
            axes.annotate(name, at[i], (5, 3), textcoords="offset points", fontsize=7, **plain)
        axes.set_title(f"Passages nearest to: {shortened(result.query, 60)}", fontsize=10, **plain)
        axes.set_xlabel(f"the plane shows {share:.0%} of the variance")
        axes.set_aspect("equal", "datalim")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
