"""Curves and attention maps as picture files, for those who want them outside the page (extra `plot`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from triptych.errors import InputError

from .sections import Attention, AttentionMap, Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2b5ea7", "#c4561a", "#117a5c", "#8b4c8c", "#8a6d0b")
SHADES = ("#f7f5ef", "#d3e2e4", "#9fc6d3", "#64a2c0", "#3a77a8", "#28508c", "#1d2d66", "#140f3c")  # those of heat.js
MARKED = 12  # measured places that a logarithmic axis marks each by its own value
READABLE = 40  # tokens along a side that can still be read


def png(path: str | os.PathLike[str], section: Curve | Attention) -> None:
    """Draw a curve, or every head of an attention section, into a PNG without a display.

    Raises InputError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"drawing {os.fspath(path)} needs matplotlib, which is not installed; run: pip install 'triptych[plot]'"
        ) from error
    # Figure and canvas are made directly: pyplot would choose a backend for the whole process.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(section, Curve):
        _draw_curve(figure.add_subplot(), section)
    else:
        _draw_maps(figure, section)
    figure.savefig(path, format="png")


def _draw_curve(axes: Axes, curve: Curve) -> None:
    for number, (name, points) in enumerate(curve.series.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        marker = "o" if len(points) <= 40 else ""
        axes.plot(xs, ys, label=_plain(name), color=COLOURS[number % len(COLOURS)], linewidth=1.6, marker=marker, ms=3)
    for name, y in curve.lines.items():
        axes.axhline(y, label=_plain(name), color="#777777", linewidth=1, linestyle=(0, (4, 3)))
    axes.set(title=_plain(curve.title), xlabel=_plain(curve.x_label), ylabel=_plain(curve.y_label))
    _scale(axes, curve)
    axes.grid(color="#e4e0d7", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if curve.series or curve.lines:
        axes.legend(frameon=False)


def _scale(axes: Axes, curve: Curve) -> None:
    """Logarithmic axes; what is not positive there leaves a gap."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if "y" in curve.log:
        axes.set_yscale("log", nonpositive="mask")
        heights = [y for points in curve.series.values() for _, y in points if y > 0]
        if heights and max(heights) < 1000 * min(heights):
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    if "x" in curve.log:
        axes.set_xscale("log", nonpositive="mask")
        stops = sorted({x for points in curve.series.values() for x, _ in points if x > 0})
        if len(stops) <= MARKED:  # they say more than powers of ten
            axes.set_xticks(stops, [f"{x:,.10g}" for x in stops])
            axes.set_xticks([], minor=True)


def _draw_maps(figure: Figure, section: Attention) -> None:
    """A row of heads for each layer; tokens are written where there are few enough to be read."""
    columns = max(len(one.head_names) for one in section.maps)
    side = 5.0 if columns == 1 else 2.4
    figure.set_size_inches(max(4.0, side * columns), side * len(section.maps) + 0.6)
    grid = figure.subplots(len(section.maps), columns, squeeze=False)
    for row, one in zip(grid, section.maps, strict=True):
        for axes, name, weights in zip(row, one.head_names, one.weights, strict=False):
            _draw_head(axes, one, name, weights)
        for axes in row[len(one.head_names) :]:
            axes.set_axis_off()
    figure.suptitle(_plain(section.title))


def _draw_head(axes: Axes, one: AttentionMap, name: int, weights: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    axes.imshow(weights, cmap=LinearSegmentedColormap.from_list("weights", SHADES), vmin=0, aspect="auto")
    axes.set_title(f"{one.stack} layer {one.layer}, head {name}", fontsize=8)
    for tokens, mark, turned in ((one.keys, axes.set_xticks, 90), (one.queries, axes.set_yticks, 0)):
        few = len(tokens) <= READABLE
        mark(range(len(tokens)) if few else [], [_plain(t) for t in tokens] if few else [], rotation=turned, fontsize=6)


def _plain(text: str) -> str:
    """A dollar sign in a name is a dollar sign, not the start of a formula."""
    return text.replace("$", r"\$")
