"""The page in a real browser: it comes to life, says nothing on the console, and shows the numbers it was given."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from test_page import NASTY, Reader, every_section, pattern
from triptych.labs.walk import worked
from triptych.labs.walk.page import sections
from triptych.page import Attention, AttentionMap, Chapter, Curve, Steps, Unfolding, render, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]


def opened(page: Path) -> tuple[Reader, list[str]]:
    """The document after its scripts ran, and what they put on the console."""
    folder = f"--user-data-dir={page.parent / 'profile'}"
    command = [str(CHROMIUM), *QUIET, folder, "--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=120)
    return Reader(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def classes(reader: Reader) -> list[str]:
    return [attrs.get("class") or "" for _, attrs in reader.tags]


def test_nasty_text_runs_nothing_and_breaks_nothing(tmp_path: Path):
    write(tmp_path / "page.html", render(NASTY[0], every_section(NASTY[0], NASTY)))
    reader, console = opened(tmp_path / "page.html")
    assert console == []
    assert "img" not in [tag for tag, _ in reader.tags]
    assert len(reader.inside("script")) == 2
    assert "plot" in classes(reader)
    assert "heat" in classes(reader)


def test_the_console_is_heard(tmp_path: Path):
    html = render("t", []).replace("<body>", "<body><script>alert(1)</script><img src='https://127.0.0.1:9/x.png'>")
    write(tmp_path / "page.html", html)
    _, console = opened(tmp_path / "page.html")
    assert sum("Content Security Policy" in line for line in console) == 2  # neither ran nor loaded


def test_the_map_reads_out_the_weight_it_was_given(tmp_path: Path):
    queries, keys = [f"q{t}" for t in range(5)], [f"k{s}" for s in range(7)]
    weights = pattern(3, 5, 7)
    maps = [AttentionMap("cross", layer, queries, keys, np.roll(weights, layer, axis=0)) for layer in (2, 1)]
    write(tmp_path / "page.html", render("t", [Attention("t", "", maps)]))
    reader, console = opened(tmp_path / "page.html")
    assert console == []
    thumbs = [attrs["aria-label"] for tag, attrs in reader.tags if tag == "button" and "aria-label" in attrs]
    assert thumbs == [f"layer {layer}, head {head}" for layer in (1, 2) for head in range(3)]
    start = classes(reader).index("readout")
    query, key = [str(attrs["title"]) for tag, attrs in reader.tags[start:] if tag == "bdi"][:2]
    shown = float(next(text for tag, text in reader.texts if tag == "b" and re.fullmatch(r"0\.\d{3}", text)))
    first = np.roll(weights, 1, axis=0)[0]
    assert shown == round(float(first[queries.index(query), keys.index(key)]), 3)
    assert keys.index(key) == first[queries.index(query)].argmax()


def test_logarithmic_axes_space_powers_evenly(tmp_path: Path):
    series = {"a": [(4.0, 1e-6), (16.0, 1e-3), (64.0, 1.0), (0.0, 5.0), (16.0, -1.0)]}
    curve = Curve("t", "x", "y", series, {"never": 0.0, "one": 1.0}, "xy")
    write(tmp_path / "page.html", render("t", [Chapter("c", "", True, [curve])]))
    reader, console = opened(tmp_path / "page.html")
    assert console == []
    ticks = [float(str(attrs["x"])) for tag, attrs in reader.tags if tag == "text" and attrs.get("class") == "tick"]
    assert len(ticks) == 3
    assert ticks[1] - ticks[0] == pytest.approx(ticks[2] - ticks[1])
    texts = [text for tag, text in reader.texts if tag == "text"]
    assert {"4", "16", "64", "one · 1"} <= set(texts)
    assert not any(text.startswith("never") for text in texts)
    [line] = [str(attrs["d"]) for tag, attrs in reader.tags if attrs.get("class") == "line stroke-0"]
    heights = [float(height) for height in re.findall(r"[ML][\d.]+,([\d.]+)", line)]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


def test_steps_open_all_at_once(tmp_path: Path):
    items = [Unfolding(i, f"step {i}", "y = x", "", [], "", open=i == 1) for i in (1, 2, 3)]
    write(tmp_path / "page.html", render("t", [Steps("part", items), Steps("opened", items[:1])]))
    reader, console = opened(tmp_path / "page.html")
    assert console == []
    assert ["open" in attrs for tag, attrs in reader.tags if tag == "details"] == [True, False, False, True]
    assert [text for tag, text in reader.texts if tag == "button" and text.strip()][-2:] == ["Open all", "Close all"]


def test_a_walk_in_the_browser(tmp_path: Path):
    walk = worked("L4.12.3")
    write(tmp_path / "page.html", render(walk.title, sections(walk)))
    reader, console = opened(tmp_path / "page.html")
    assert console == []
    assert sum(tag == "details" for tag, _ in reader.tags) == len(walk.steps)
    assert "0.3010" in [text for tag, text in reader.texts if tag == "td"]  # the lecture's first weight


def test_reference_lines_differ_and_carry_their_names(tmp_path: Path):
    curve = Curve("c", "x", "y", {"a": [(0, 4.0), (9, 0.1)]}, {"guessing": 3.3, "nearly": 3.31})
    write(tmp_path / "page.html", render("t", [curve]))
    reader, console = opened(tmp_path / "page.html")
    assert console == []
    dashes = [name.removeprefix("reference ") for name in classes(reader) if name.startswith("reference dash-")]
    assert dashes == ["dash-0", "dash-1", "dash-1", "dash-0"]  # the lines, then beside the names from above
    labels = [attrs for tag, attrs in reader.tags if tag == "text" and attrs.get("class") == "reference"]
    assert float(labels[1]["y"]) - float(labels[0]["y"]) == 16
