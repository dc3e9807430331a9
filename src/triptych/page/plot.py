"""Curves and attention maps as PNG and SVG files (extra `plot`)."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from triptych.errors import InputError
from . import drawing
from .attention_maps import AttentionMap, AttentionSection
from .sections import Curve

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]

LINES = ("-", "--", ":")  # for the first lines, for those that have the colours again, and so on
COLOURS = ("#2b5ea7", "#c4561a", "#117a5c", "#8b4c8c", "#8a6d0b")
# Colour and dashes of each reference line.
REFERENCES = (("#777777", (5, 3)), ("#222222", (1, 2)), ("#777777", (9, 2, 2, 2)), ("#222222", (11, 4)))
LINE_WIDTH = 1.6  # points
LEGEND_WIDTH = 24  # letters
MOST_TICKS = 12  # measured values that a logarithmic axis marks one by one
MOST_TOKENS = 40  # along a side; more would be illegible


def png(path: str | os.PathLike[str], section: Curve | AttentionSection) -> None:
    """Draw a curve, or every head of an attention section, as a PNG; no display is needed.

    Raises InputError where matplotlib is not installed, and for a layer that has its largest weights alone.
    """
    if isinstance(section, AttentionSection) and not all(isinstance(one, AttentionMap) for one in section.maps):
        raise InputError(
            f"drawing {os.fspath(path)} needs all weights of each head; save an .svg or .html file instead"
        )
    with drawn(path) as figure:
        if isinstance(section, Curve):
            _draw_curve(figure.add_subplot(), section)
        else:
            _draw_maps(figure, section)


def svg(path: str | os.PathLike[str], section: Curve | AttentionSection, command: str) -> None:
    """Draw a curve, or the heads of an attention section, as an SVG that names the command that made it.

    The same numbers and command give the same bytes.  Raises InputError where a curve needs matplotlib and it is not
    installed.
    """
    if isinstance(section, AttentionSection):
        Path(path).write_text(drawing.svg(section.maps, section.title, command), "utf-8")
        return
    with drawn(path, command) as figure:
        _draw_curve(figure.add_subplot(), section)


@contextmanager
def drawn(path: str | os.PathLike[str], command: str = "") -> Iterator[Figure]:
    """An empty figure, which is saved as a PNG, or as an SVG by the ending of `path`.  Raises InputError where
    matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"drawing {os.fspath(path)} needs matplotlib, which is not installed; run: pip install matplotlib"
        ) from error
    # Figure and canvas are made directly: pyplot would choose a backend for the whole process.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    if Path(path).suffix != ".svg":
        figure.savefig(path, format="png", metadata={"Software": "Triptych, matplotlib"})
        return
    about = {"Creator": "Triptych, matplotlib", "Date": None, "Description": command}
    with rc_context({"svg.hashsalt": "triptych", "svg.fonttype": "none"}):  # ids that are not random, letters as text
        figure.savefig(path, format="svg", metadata=about)


def _draw_curve(axes: Axes, curve: Curve) -> None:
    """The lines and, in a legend beside the axes, where no line crosses them, their names."""
    series = {name: _plottable(points, curve.log) for name, points in curve.series.items()}
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*points, strict=True) if points else ((), ())
        again, colour = divmod(number, len(COLOURS))
        style, marker = LINES[again % len(LINES)], "o" if len(points) <= 40 else ""
        axes.plot(xs, ys, label=_legend(name), color=COLOURS[colour], linestyle=style, marker=marker, ms=3)
    shown = [(name, y) for name, y in curve.lines.items() if y > 0 or "y" not in curve.log]
    for number, (name, y) in enumerate(shown):
        grey, dashes = REFERENCES[number % len(REFERENCES)]
        axes.axhline(y, label=_legend(name), color=grey, linewidth=1.1, linestyle=(0, dashes))
    axes.set(title=_plain(curve.title), xlabel=_plain(curve.x_label), ylabel=_plain(curve.y_label))
    _scale(axes, series, curve.log)
    for line, above in zip(axes.lines, _lines_above(axes, list(series.values())), strict=False):
        line.set(linewidth=LINE_WIDTH * (1 + above), markersize=3 + LINE_WIDTH * above)
    axes.grid(color="#e4e0d7", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _lines_above(axes: Axes, series: Sequence[Line]) -> list[int]:
    """For each line, how many of those drawn over it would hide half of it or more: it is drawn wider by as many."""
    to_points = 72 / axes.figure.dpi
    heights = [
        {x: to_points * float(axes.transData.transform((x, y))[1]) for x, y in points if math.isfinite(y)}
        for points in series
    ]

    def hidden(under: Mapping[float, float], over: Mapping[float, float]) -> bool:
        near = sum(abs(y - over.get(x, math.inf)) < LINE_WIDTH for x, y in under.items())
        return near > 1 and 2 * near >= len(under)

    return [sum(hidden(under, over) for over in heights[at + 1 :]) for at, under in enumerate(heights)]


def _legend(name: str) -> str:
    return textwrap.fill(_plain(name), LEGEND_WIDTH)


def _plottable(points: Line, log: str) -> Line:
    """The points that the axes can show: a logarithmic axis has no zero and no negative values."""
    shown = [(x, y) for x, y in points if x > 0 or "x" not in log]
    return [(x, y if y > 0 else math.nan) for x, y in shown] if "y" in log else shown


def _scale(axes: Axes, series: Mapping[str, Line], log: str) -> None:
    """Logarithmic axes with ticks at round numbers, on the x axis at the measured values where those are few.  Whole
    numbers, such as those of layers, have ticks at whole numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    stops = sorted({x for points in series.values() for x, _ in points})

    if "y" in log:
        axes.set_yscale("log")
        heights = [y for points in series.values() for _, y in points if math.isfinite(y)]
        if heights and max(heights) < 1000 * min(heights):
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
    if "x" in log:
        axes.set_xscale("log")
        if len(stops) <= MOST_TICKS:
            axes.set_xticks(stops, [f"{x:,.10g}" for x in stops])
            axes.set_xticks([], minor=True)
    elif all(float(x).is_integer() for x in stops):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_maps(figure: Figure, section: AttentionSection) -> None:
    """A row of heads for each layer, with the tokens where they are few enough to be legible."""
    maps = [layer_map for layer_map in section.maps if isinstance(layer_map, AttentionMap)]
    columns = max(len(layer_map.head_names) for layer_map in maps)
    side = 5.0 if columns == 1 else 2.4
    figure.set_size_inches(max(4.0, side * columns), side * len(maps) + 0.6)
    grid = figure.subplots(len(maps), columns, squeeze=False)
    for row, layer_map in zip(grid, maps, strict=True):
        for axes, name, weights in zip(row, layer_map.head_names, layer_map.weights, strict=False):
            _draw_head(axes, layer_map, name, weights)
        for axes in row[len(layer_map.head_names) :]:
            axes.set_axis_off()
    figure.suptitle(_plain(section.title))


def _draw_head(axes: Axes, layer_map: AttentionMap, name: int, weights: npt.NDArray[np.float32]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    axes.imshow(weights, cmap=LinearSegmentedColormap.from_list("weights", drawing.SHADES), vmin=0, aspect="auto")
    axes.set_title(f"{layer_map.stack} layer {layer_map.layer}, head {name}", fontsize=8)
    across = 0 if all(len(token) == 1 for token in layer_map.keys) else 90  # single letters are not turned
    for tokens, mark, turned in ((layer_map.keys, axes.set_xticks, across), (layer_map.queries, axes.set_yticks, 0)):
        few = len(tokens) <= MOST_TOKENS
        mark(range(len(tokens)) if few else [], [_plain(t) for t in tokens] if few else [], rotation=turned, fontsize=6)


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib reads as the start of a formula."""
    return text.replace("$", r"\$")
