"""The page in a real browser: its scripts run, the console stays empty, and it shows the numbers it was given."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from browser import CHROMIUM, READY, Browser, Tab
from test_page import NASTY, Reader, every_section, pattern
from triptych import page
from triptych.explain import worked
from triptych.explain.page import sections

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]


def opened(browser: Browser, folder: Path, *shown: page.Section, title: str = "t", **how: Any) -> Tab:
    """A page of sections after its scripts ran, which put nothing on the console."""
    page.write(folder / "page.html", page.render(title, shown))
    tab = browser.open(folder / "page.html", **how).wait()
    assert tab.console() == []
    return tab


def classes(reader: Reader) -> list[str]:
    return [attrs.get("class") or "" for _, attrs in reader.tags]


def test_nasty_text_runs_nothing_and_breaks_nothing(browser: Browser, tmp_path: Path):
    reader = Reader(opened(browser, tmp_path, *every_section(NASTY[0], NASTY), title=NASTY[0]).html())
    assert "img" not in [tag for tag, _ in reader.tags]
    assert len(reader.inside("script")) == 2
    assert "plot" in classes(reader)
    assert "heat" in classes(reader)


def test_the_console_is_read(browser: Browser, tmp_path: Path):
    html = page.render("t", []).replace(
        "<body>", "<body><script>alert(1)</script><img src='https://127.0.0.1:9/x.png'>"
    )
    page.write(tmp_path / "page.html", html)
    console = browser.open(tmp_path / "page.html").wait().console()
    assert sum("Content Security Policy" in line for line in console) == 2  # neither ran nor loaded


def test_the_map_reads_out_the_weight_it_was_given(browser: Browser, tmp_path: Path):
    queries, keys = [f"q{t}" for t in range(5)], [f"k{s}" for s in range(7)]
    weights = pattern(3, 5, 7)
    maps = [page.AttentionMap("cross", layer, queries, keys, np.roll(weights, layer, axis=0)) for layer in (2, 1)]
    reader = Reader(opened(browser, tmp_path, page.AttentionSection("t", "", maps)).html())
    thumbs = [attrs["aria-label"] for tag, attrs in reader.tags if tag == "button" and "aria-label" in attrs]
    assert thumbs == [f"layer {layer}, head {head}" for layer in (1, 2) for head in range(3)]
    start = classes(reader).index("readout")
    query, key = [str(attrs["title"]) for tag, attrs in reader.tags[start:] if tag == "bdi"][:2]
    shown = float(next(text for tag, text in reader.texts if tag == "b" and re.fullmatch(r"0\.\d{3}", text)))
    first = np.roll(weights, 1, axis=0)[0]
    assert shown == round(float(first[queries.index(query), keys.index(key)]), 3)
    assert keys.index(key) == first[queries.index(query)].argmax()


def test_logarithmic_axes_space_powers_evenly(browser: Browser, tmp_path: Path):
    series = {"a": [(4.0, 1e-6), (16.0, 1e-3), (64.0, 1.0), (0.0, 5.0), (16.0, -1.0)]}
    curve = page.Curve("t", "x", "y", series, {"never": 0.0, "one": 1.0}, "xy")
    reader = Reader(opened(browser, tmp_path, page.Chapter("c", "", True, [curve])).html())
    ticks = [float(str(attrs["x"])) for tag, attrs in reader.tags if tag == "text" and attrs.get("class") == "tick"]
    assert len(ticks) == 3
    assert ticks[1] - ticks[0] == pytest.approx(ticks[2] - ticks[1])
    texts = [text for tag, text in reader.texts if tag == "text"]
    assert {"4", "16", "64", "one · 1"} <= set(texts)
    assert not any(text.startswith("never") for text in texts)
    [line] = [str(attrs["d"]) for tag, attrs in reader.tags if attrs.get("class") == "line stroke-0"]
    heights = [float(height) for height in re.findall(r"[ML][\d.]+,([\d.]+)", line)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize(("start", "marks"), [(1, "1 2 3 4"), (0.5, "0.5 1 1.5 2 2.5 3 3.5")])
def test_an_axis_of_layers_has_no_half_layers(start: float, marks: str, browser: Browser, tmp_path: Path):
    line = page.Curve("t", "layers", "y", {"a": [(start, 1), (start + 3, 2)]}, {})
    ticks = '[...document.querySelectorAll("text.tick")].map((one) => one.textContent).join(" ")'
    assert opened(browser, tmp_path, line).evaluate(ticks) == marks


def test_steps_open_all_at_once(browser: Browser, tmp_path: Path):
    items = [page.Unfolding(i, f"step {i}", "y = x", "", [], "", open=i == 1) for i in (1, 2, 3)]
    sections = page.StepsSection("part", items), page.StepsSection("opened", items[:1])
    reader = Reader(opened(browser, tmp_path, *sections).html())
    assert ["open" in attrs for tag, attrs in reader.tags if tag == "details"] == [True, False, False, True]
    assert [text for tag, text in reader.texts if tag == "button" and text.strip()][-2:] == ["Open all", "Close all"]


def test_a_walk_in_the_browser(browser: Browser, tmp_path: Path):
    walk = worked("L4.12.3")
    reader = Reader(opened(browser, tmp_path, *sections(walk), title=walk.title).html())
    assert sum(tag == "details" for tag, _ in reader.tags) == len(walk.steps)
    assert "0.3010" in [text for tag, text in reader.texts if tag == "td"]  # the lecture's first weight


def test_reference_lines_differ_and_carry_their_names(browser: Browser, tmp_path: Path):
    curve = page.Curve("c", "x", "y", {"a": [(0, 4.0), (9, 0.1)]}, {"guessing": 3.3, "nearly": 3.31})
    reader = Reader(opened(browser, tmp_path, curve).html())
    dashes = [name.removeprefix("reference ") for name in classes(reader) if name.startswith("reference dash-")]
    assert dashes == ["dash-0", "dash-1", "dash-1", "dash-0"]  # the lines, then beside the names from above
    labels = [attrs for tag, attrs in reader.tags if tag == "text" and attrs.get("class") == "reference"]
    assert float(labels[1]["y"]) - float(labels[0]["y"]) == 16


# What a browser does that unpacks slowly: nothing is unpacked until `release()` is called.
SLOW = """
const unpacking = Response.prototype.arrayBuffer;
const held = new Promise((release) => (window.release = release));
Response.prototype.arrayBuffer = async function () { await held; return unpacking.call(this); };
"""
BUTTONS = '[...document.querySelectorAll("section button")].filter((one) => one.checkVisibility()).length'
STATUS = '[...document.querySelectorAll("[role=status]")].map((one) => one.textContent).join("")'


def two_stacks(folder: Path) -> Path:
    tokens = ["a", "b", "c"]
    maps = [page.AttentionMap(stack, 0, tokens, tokens, pattern(2, 3, 3)) for stack in ("encoder", "cross")]
    page.write(folder / "page.html", page.render("t", [page.AttentionSection("t", "", maps)]))
    return folder / "page.html"


def test_a_page_that_still_unpacks_its_weights_says_so_and_shows_no_controls(browser: Browser, tmp_path: Path):
    tab = browser.open(two_stacks(tmp_path), before=SLOW)
    assert not tab.evaluate(READY)
    assert tab.evaluate(STATUS) == "Unpacking the attention weights …"
    assert tab.evaluate(BUTTONS) == 2  # the choice of the stack alone
    tab.evaluate("release()")
    tab.wait()
    assert tab.evaluate(STATUS) == ""
    assert tab.evaluate(BUTTONS) == 2 + 2 + 2 + 3 + 3 + 3  # and the heads, map or lines, scales, sizes, three files
    assert tab.console() == []


def test_the_stack_picked_last_is_shown_whichever_is_unpacked_first(browser: Browser, tmp_path: Path):
    tab = browser.open(two_stacks(tmp_path), before=SLOW)
    tab.evaluate('[...document.querySelectorAll(".choice button")][1].click()')
    tab.evaluate("release()")
    tab.wait()
    assert tab.evaluate('document.querySelector(".large h3").textContent').startswith("Alignment")


def test_weights_that_cannot_be_unpacked_are_reported_on_the_page(browser: Browser, tmp_path: Path):
    tab = browser.open(two_stacks(tmp_path), before="delete window.DecompressionStream;").wait()
    assert re.match("The attention weights could not be unpacked .*Open this file in a browser", tab.evaluate(STATUS))
    assert tab.evaluate(BUTTONS) == 2
    assert tab.console() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_thirty_layers_lie_beside_their_map_without_a_sideways_scroll(
    browser: Browser, tmp_path: Path, width: int, dark: bool
):
    tokens = ["She", "sat", "by", "the", "river", "bank"]
    maps = [page.AttentionMap("decoder", layer, tokens, tokens, pattern(9, 6, 6)) for layer in range(30)]
    tab = opened(browser, tmp_path, page.AttentionSection("t", "", maps), width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    place = 'document.querySelector(".{}").getBoundingClientRect().toJSON()'
    boxes = {name: tab.evaluate(place.format(name)) for name in ("gallery", "heat", "reading")}
    assert boxes["heat"]["width"] >= 200
    assert tab.evaluate('getComputedStyle(document.querySelector(".gallery canvas")).imageRendering') == "pixelated"
    if width == 1280:
        gallery = 'document.querySelector(".gallery")'
        assert tab.evaluate(f"{gallery}.scrollHeight - {gallery}.clientHeight") <= 0  # every layer is visible
        assert 0 < boxes["heat"]["left"] - boxes["gallery"]["right"] < 200  # the labels of the queries between
        assert 0 < boxes["reading"]["left"] - boxes["heat"]["right"] < 100


def test_no_label_covers_the_map(browser: Browser, tmp_path: Path):
    tab = browser.open(two_stacks(tmp_path)).wait()
    covering = """[...document.querySelectorAll(".heat > *")].filter(
      (one) => !one.matches("canvas, svg, .band") && one.getBoundingClientRect().width > 0).length"""
    assert tab.evaluate(covering) == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_letters_over_a_map_are_not_turned(width: int, browser: Browser, tmp_path: Path) -> None:
    """Words are, where they are wider than their columns: on a narrow page."""
    maps = {}
    for name, tokens in (("letters", list("She sat by the river")), ("words", ["counterexample", "the", "mill"] * 4)):
        maps[name] = [page.AttentionMap("decoder", 0, tokens, tokens, pattern(2, len(tokens), len(tokens)))]
    shown = [page.AttentionSection(name, "", one) for name, one in maps.items()]
    tab = opened(browser, tmp_path, *shown, width=width)
    modes = tab.evaluate("""[...document.querySelectorAll(".grid .top")].map(
      (top) => [...top.children].map((label) => getComputedStyle(label).writingMode))""")
    assert set(modes[0]) == {"horizontal-tb"}
    assert set(modes[1]) == {"vertical-rl"}
    labels = "[...document.querySelectorAll('.top.upright span')]"
    assert tab.evaluate(f"{labels}.filter((one) => one.scrollWidth > one.clientWidth).length") == 0


def test_what_scrolls_sideways_shows_a_shadow_where_it_is_cut(browser: Browser, tmp_path: Path) -> None:
    """Pixels of the right edge of a table, of its last row, before and after it is scrolled to its end."""
    header = ["name", *(f"column {i}" for i in range(9))]
    table = page.TableSection("t", header, [["row", *map(str, range(9))]] * 4)
    tab = opened(browser, tmp_path, table, page.TableSection("narrow", ["a"], [["1"]]), width=390)
    wide = 'document.querySelectorAll(".wide")'
    assert tab.evaluate(f"[...{wide}].map((one) => one.scrollWidth > one.clientWidth)") == [True, False]

    def edges() -> list[tuple[int, int]]:
        """The lightness of each table's frame just inside its left and right edge, above the text."""
        tab.screenshot(tmp_path / "page.png")
        picture = np.asarray(Image.open(tmp_path / "page.png").convert("L"))
        frames = tab.evaluate(f"[...{wide}].map((one) => one.getBoundingClientRect().toJSON())")
        ends = [(int(one["top"]) + 4, int(one["left"]) + 2, int(one["right"]) - 2) for one in frames]
        return [(int(picture[row, left]), int(picture[row, right])) for row, left, right in ends]

    (left, right), narrow = edges()
    paper = narrow[0]
    assert narrow == (paper, paper)
    assert left == paper
    assert right < paper - 15
    tab.evaluate(f"{wide}[0].scrollLeft = 1e6")
    (left, right), _ = edges()
    assert right == paper
    assert left < paper - 15
