"""The loss curve as a picture file, for those who want it outside the page (extra `plot`)."""

from __future__ import annotations

import os

from triptych.errors import InputError

from .sections import Curve

COLOURS = ("#2b5ea7", "#c4561a", "#117a5c", "#8b4c8c", "#8a6d0b")


def loss_png(path: str | os.PathLike[str], curve: Curve) -> None:
    """Draw `curve` into a PNG without a display.  Raises InputError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "drawing loss.png needs matplotlib, which is not installed; run: pip install 'triptych[plot]'"
        ) from error
    # Figure and canvas are made directly: pyplot would choose a backend for the whole process.
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curve.series.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        marker = "o" if len(points) <= 40 else ""
        axes.plot(xs, ys, label=_plain(name), color=COLOURS[number % len(COLOURS)], linewidth=1.6, marker=marker, ms=3)
    for name, y in curve.lines.items():
        axes.axhline(y, label=_plain(name), color="#777777", linewidth=1, linestyle=(0, (4, 3)))
    axes.set(title=_plain(curve.title), xlabel=_plain(curve.x_label), ylabel=_plain(curve.y_label))
    axes.grid(color="#e4e0d7", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if curve.series or curve.lines:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")


def _plain(text: str) -> str:
    """A dollar sign in a name is a dollar sign, not the start of a formula."""
    return text.replace("$", r"\$")
