"""Curves and maps as files."""

import re
import sys
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from triptych.errors import InputError
from triptych.page import AttentionMap, AttentionSection, Curve, plot
from triptych.page.drawing import SHADES
from triptych.page.plot import png

matplotlib = pytest.importorskip("matplotlib")

CURVE = Curve(
    "loss of a $5 run",
    "step",
    "nats per character",
    {"training": [(step, 4 / (1 + step)) for step in range(60)], "held $out": [(0, 4.1), (59, float("nan"))]},
    {"guessing": 3.3},
)


def test_a_curve_becomes_a_picture_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.image import imread

    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # a backend for the whole process is not ours to choose
    png(tmp_path / "loss.png", CURVE)
    png(tmp_path / "empty.png", Curve("t", "x", "y", {}, {}))
    drawn, empty = imread(tmp_path / "loss.png"), imread(tmp_path / "empty.png")
    assert drawn.shape[:2] == empty.shape[:2] == (675, 1200)
    assert (drawn != empty).any()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install matplotlib"):
        png(tmp_path / "loss.png", CURVE)
    assert not (tmp_path / "loss.png").exists()


def drawn_axes(curve: Curve):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plot._draw_curve(axes, curve)
    return axes


def test_reference_lines_differ_and_are_named_in_the_legend_beside_the_axes():
    names = {"guessing": 3.3, "nearly the same": 3.31, "far $below": 0.5, "fourth": 2.0}
    axes = drawn_axes(Curve("t", "x", "y", {"a": [(0, 4.0), (9, 0.1)]}, names))
    drawn = [(line.get_color(), line._unscaled_dash_pattern) for line in axes.lines[1:]]
    assert len(set(map(str, drawn))) == len(names)
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.texts] == ["a", *(name.replace("$", r"\$") for name in names)]
    axes.figure.canvas.draw()
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1


def test_of_lines_that_coincide_the_lower_is_wider():
    flat, near, apart = ([(x, y) for x in range(9)] for y in (1.0, 1.001, 2.0))
    widths = [
        line.get_linewidth() for line in drawn_axes(Curve("t", "x", "y", {"a": flat, "b": apart, "c": near}, {})).lines
    ]
    assert widths[0] == 2 * widths[1] == 2 * widths[2]


@pytest.mark.parametrize(("xs", "whole"), [((1, 2, 3, 4), True), ((0.5, 1, 2, 4), False)])
def test_whole_numbers_have_ticks_at_whole_numbers(xs: tuple[float, ...], whole: bool):
    axes = drawn_axes(Curve("t", "layers", "share", {"a": [(x, x) for x in xs]}, {}))
    assert all(float(tick).is_integer() for tick in axes.get_xticks()) == whole


def test_no_two_of_many_lines_look_alike():
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    plot._draw_curve(axes, Curve("t", "x", "y", {f"line {i}": [(0, i), (1, i)] for i in range(12)}, {}))
    looks = [(line.get_color(), line.get_linestyle()) for line in axes.lines]
    assert len(set(looks)) == len(looks) == 12


def test_logarithmic_axes_are_marked_where_something_was_measured():
    series = {"a": [(4.0, 0.03), (8.0, 0.004)], "b": [(512.0, -1.0), (0.0, 0.1)]}
    axes = drawn_axes(Curve("t", "x", "y", series, {}, "xy"))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "8", "512"]
    assert np.isnan(axes.lines[1].get_ydata()).all()  # -1 leaves a gap; at x = 0 there is no place to leave it
    plain = drawn_axes(Curve("t", "x", "y", series, {}))
    assert (plain.get_xscale(), plain.get_yscale()) == ("linear", "linear")
    many = {"a": [(float(x), 1.0) for x in range(1, 40)]}
    assert len(drawn_axes(Curve("t", "x", "y", many, {}, "x")).get_xticks()) < 20


def test_what_a_logarithm_cannot_show_is_left_out(tmp_path: Path):
    png(tmp_path / "none.png", Curve("t", "x", "y", {"a": [(-1.0, 0.0)]}, {"floor": 0.0}, "xy"))
    assert (tmp_path / "none.png").exists()


def test_a_map_is_drawn_head_by_head(tmp_path: Path):
    from matplotlib.image import imread

    keys, queries = ["the", "$cat$", "sat"], ["le", "chat"]
    sure, unsure = np.eye(2, 3), np.full((2, 3), 1 / 3)
    maps = [
        AttentionMap("cross", 1, queries, keys, np.stack((sure, unsure))),
        AttentionMap("cross", 2, queries, keys, [sure]),
    ]
    png(tmp_path / "map.png", AttentionSection("t", "", maps))
    png(tmp_path / "other.png", AttentionSection("t", "", [AttentionMap("cross", 1, queries, keys, [unsure])]))
    shown, other = imread(tmp_path / "map.png"), imread(tmp_path / "other.png")
    darkest = [int(SHADES[-1][at : at + 2], 16) / 255 for at in (1, 3, 5)]
    assert np.isclose(shown[..., :3], darkest, atol=0.01).all(-1).any()
    assert not np.isclose(other[..., :3], darkest, atol=0.01).all(-1).all()


def svg_texts(section: AttentionSection, path: Path) -> list[str]:
    plot.svg(path, section, "command")
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert 24 + 9 * len(section.title) < float(root.attrib["width"])
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_drawing_of_a_few_heads_has_their_tokens_and_of_many_their_numbers(tmp_path: Path):
    def a_map(layer: int, *heads: int, role: str = "previous token") -> AttentionMap:
        return AttentionMap(
            "decoder", layer, "abc", "xyz", np.eye(3)[None].repeat(len(heads), 0), heads, [role] * len(heads)
        )

    few = svg_texts(AttentionSection("t" * 80, "", [a_map(2, 1, 5)]), tmp_path / "few.svg")
    assert [few.count(token) for token in "abcxyz"] == [2] * 6
    assert {"decoder layer 2, head 1: previous token", "decoder layer 2, head 5: previous token"} < set(few)
    many = svg_texts(
        AttentionSection("t", "", [a_map(2, 4), a_map(3, 1), a_map(5, 1, role="sink")]), tmp_path / "many.svg"
    )
    assert many[1:] == [
        "decoder 2",
        "head 4",
        "previous token",
        "decoder 3",
        "head 1",
        "previous token",
        "decoder 5",
        "sink",
    ]


def test_the_page_and_the_picture_share_their_colours():
    script = (resources.files("triptych.page") / "attention_colours.js").read_text(encoding="utf-8")
    scale = re.search(r"light: \[(.*?)\]", script)
    assert scale
    assert tuple(re.findall(r"#[0-9a-f]{6}", scale[1])) == SHADES
