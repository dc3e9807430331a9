"""The page of a text inside a model, in a real browser: drawn whole, used by keyboard alone, nothing on the console."""

import json
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from browser import CHROMIUM, READY, Browser, Tab
from cli_models import checkpoint
from test_page import NASTY, pattern
from test_page_browser import BUTTONS, SLOW, STATUS
from triptych.model import load
from triptych.page import AttentionMap, AttentionSection, MatrixSection, TableSection, TopMap, WordStates, render, write
from triptych.page.attention_page import inside_page
from triptych.page.inspect import inspect_text

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]

SHOWN = '[...document.querySelectorAll("main > section")].filter((one) => one.checkVisibility()).map((one) => one.id)'
# Files that the page saves arrive in `saved` instead.
SAVED = """
window.saved = [];
const objectUrl = URL.createObjectURL;
URL.createObjectURL = (blob) => {
  blob.text().then((text) => saved.push([blob.type, text]));
  return objectUrl.call(URL, blob);
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts in an encoder-decoder, whose page has every tab."""
    model = load(checkpoint("encoder-decoder"))
    texts = [inspect_text(model, text, target="ab") for text in ("the mill", "the hill")]
    path = tmp_path_factory.mktemp("page") / "page.html"
    write(path, inside_page(model, texts, "m"))
    return path


def press(tab: Tab, key: str) -> None:
    """A key as a reader presses it, in what has the focus."""
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def choose(tab: Tab, index: int) -> None:
    """Press a tab of the bar."""
    tab.evaluate(f'document.querySelectorAll("[role=tab]")[{index}].click()')


def click(tab: Tab, name: str, under: str = "") -> None:
    """Press the button that has this name."""
    tab.evaluate(
        f"""[...document.querySelectorAll("{under} button")].find((one) => one.textContent === "{name}").click()"""
    )


def long_page(folder: Path, length: int, layers: int = 2) -> Path:
    """A page of `length` tokens of which each query keeps two weights: itself and the token two before."""
    tokens = [f"t{i}" for i in range(length)]
    query = np.arange(length)
    keys = np.stack([query, np.maximum(query - 2, -1)], -1)[None].repeat(2, 0).astype(np.int32)
    weights = np.broadcast_to(np.float32([0.64, 0.25]), keys.shape).copy()
    weights[keys < 0] = 0
    maps = [TopMap("decoder", layer, tokens, tokens, keys, weights) for layer in range(layers)]
    write(folder / "page.html", render("t", [AttentionSection("t", "", maps)]))
    return folder / "page.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_bar_of_tabs_does_not_scroll_up_and_down(width: int, browser: Browser, page: Path) -> None:
    tab = browser.open(page, width=width).wait()
    high, inner = tab.evaluate("((bar) => [bar.scrollHeight, bar.clientHeight])(document.querySelector('nav'))")
    assert high <= inner


def test_a_long_cell_of_a_table_is_no_column_of_words(browser: Browser, tmp_path: Path) -> None:
    row = ["induction", "the token after the first occurrence of the present one (A B ... A reads B)", "11"]
    header = ["role", "reads", "heads", "without the best, nats", "without random heads"]
    write(tmp_path / "t.html", render("t", [TableSection("t", header, [[*row, "9.014", "0.567"]])]))
    tab = browser.open(tmp_path / "t.html", width=390).wait()
    cell = 'document.querySelectorAll("td")[1]'
    lines = tab.evaluate(f"{cell}.clientHeight / parseFloat(getComputedStyle({cell}).lineHeight)")
    assert lines < 5
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_every_tab_is_reached_and_read_by_keyboard(browser: Browser, page: Path) -> None:
    tab = browser.open(page).wait()
    assert tab.evaluate(SHOWN) == ["section-0"]
    tab.evaluate('document.querySelector("[role=tab]").focus()')
    count = tab.evaluate('document.querySelectorAll("[role=tab]").length')
    assert count == 7
    for index in range(1, count):
        press(tab, "ArrowRight")
        tab.wait()
        assert tab.evaluate(SHOWN) == [f"section-{index}"]
        assert tab.evaluate("document.activeElement.id") == f"tab-{index}"
        assert tab.evaluate('document.querySelector("main > section.shown").innerText.length') > 40
    press(tab, "Home")
    assert tab.evaluate(SHOWN) == ["section-0"]
    assert tab.console() == []


def test_arrow_keys_move_in_the_map_the_heads_and_the_lens(browser: Browser, page: Path) -> None:
    tab = browser.open(page).wait()
    tab.evaluate('document.querySelector(".gallery button[aria-pressed=true]").focus()')
    press(tab, "ArrowDown")
    assert "layer 1 · head 0" in tab.evaluate('document.querySelector(".large h3").textContent')
    press(tab, "ArrowRight")
    assert "layer 1 · head 1" in tab.evaluate('document.querySelector(".large h3").textContent')
    tab.evaluate('document.querySelector(".heat").focus()')
    press(tab, "Home")
    readout = tab.evaluate('document.querySelector(".readout").textContent')
    press(tab, "ArrowRight")
    assert tab.evaluate('document.querySelector(".readout").textContent') != readout
    choose(tab, 2)
    tab.evaluate('document.querySelector("#section-2 td[tabindex=\\"0\\"]").focus()')
    before = tab.evaluate('document.querySelector("#section-2 .reading h4").textContent')
    press(tab, "ArrowUp")
    assert tab.evaluate('document.querySelector("#section-2 .reading h4").textContent') != before
    assert tab.console() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_tab_is_wider_than_the_page(browser: Browser, page: Path, width: int, dark: bool) -> None:
    tab = browser.open(page, width=width, dark=dark).wait()
    for index in range(7):
        choose(tab, index)
        tab.wait()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.console() == []


def test_a_head_as_lines_and_in_groups(browser: Browser, tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "d"]
    eye = np.stack([np.eye(4), np.eye(4, k=-1)]).astype(np.float32)
    one = AttentionMap("decoder", 0, tokens, tokens, eye, roles=["self", "previous"])
    write(tmp_path / "page.html", render("t", [AttentionSection("t", "", [one])]))
    tab = browser.open(tmp_path / "page.html").wait()
    click(tab, "Lines")
    assert tab.evaluate('document.querySelectorAll(".lines path").length') == 4  # one from each token to itself
    click(tab, "By role")
    titles = tab.evaluate('[...document.querySelectorAll(".group h4")].map((one) => one.textContent)')
    assert titles == ["self1", "previous1"]
    tab.evaluate('document.querySelectorAll(".gallery button")[1].click()')
    assert tab.evaluate('document.querySelectorAll(".lines path").length') == 3  # the first token reads nothing
    assert tab.console() == []


def test_four_thousand_tokens_are_a_part_and_a_picture_of_the_whole(browser: Browser, tmp_path: Path) -> None:
    tab = browser.open(long_page(tmp_path, 4096)).wait()
    labels = tab.evaluate("[...document.querySelectorAll('.side bdi')].map((one) => one.title)")
    assert labels == [f"t{i}" for i in range(4096 - 48, 4096)]
    assert tab.evaluate('document.querySelector(".overview").checkVisibility()')
    tab.evaluate('document.querySelector(".heat").focus()')
    for _ in range(5):
        press(tab, "PageUp")  # leaves the part that is shown, so that another one is
    assert "t4045" in tab.evaluate("[...document.querySelectorAll('.side bdi')].map((one) => one.title)")
    items = tab.evaluate("[...document.querySelectorAll('.reading li')].map((one) => one.textContent)")
    assert items == ["t404540450.640", "t404340430.252"]  # the query's own place and two before, as they were stored
    assert tab.console() == []


def test_the_names_of_rows_hide_no_chosen_cell(browser: Browser, tmp_path: Path) -> None:
    """The names stay in view while a wide matrix scrolls: at first, and after every move."""
    columns = [f"column {c}" for c in range(20)]
    cells = [["" if c == 3 else f"{r} {c}" for c in range(20)] for r in range(3)]
    section = MatrixSection("m", "", ["a", "b", "c"], columns, cells, [[0.0] * 20] * 3, chosen=(1, 9))
    path = tmp_path / "matrix.html"
    write(path, render("m", [section]))
    tab = browser.open(path, width=390).wait()
    left, right = "getBoundingClientRect().left", "getBoundingClientRect().right"
    cell, name = 'document.querySelector("td.on")', 'document.querySelector("tbody tr th")'
    seen = f'{cell}.{left} >= {name}.{right} - 1 && {cell}.{right} <= document.querySelector(".wide").{right} + 1'
    corner = 'document.querySelector("thead td")'
    assert tab.evaluate(seen)
    assert tab.evaluate(f"{corner}.{right} >= {name}.{right} - 1 && {corner}.{left} === {name}.{left}")
    tab.evaluate(f"{cell}.focus()")
    for key in ["ArrowLeft"] * 9 + ["ArrowRight"] * 3:
        press(tab, key)
        assert tab.evaluate(seen), tab.evaluate(f"{cell}.textContent")
    assert tab.evaluate(f"{cell}.textContent") == ""
    assert tab.console() == []


def test_letters_beyond_counting_are_text(browser: Browser, tmp_path: Path) -> None:
    tokens = ["x" * 100_000, *NASTY[:4], "\x00\x07\x1b[31m"]
    one = AttentionMap("decoder", 0, tokens, tokens, pattern(2, 6, 6))
    write(tmp_path / "page.html", render(NASTY[0], [AttentionSection(NASTY[0], "", [one])]))
    tab = browser.open(tmp_path / "page.html", width=390).wait()
    assert "(100,000 letters)" in tab.evaluate("document.querySelector('.side').textContent")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate("document.images.length") == 0
    assert tab.console() == []


@pytest.mark.parametrize("index", range(6))
def test_what_each_tab_saves_can_be_read(browser: Browser, page: Path, index: int) -> None:
    tab = browser.open(page, before=SAVED).wait()
    choose(tab, index)
    tab.wait()
    for number, name in enumerate(("SVG", "JSON", "PNG"), start=1):
        click(tab, name, "section.shown")
        tab.wait(f"saved.length === {number}")
    files: list[Any] = tab.evaluate("saved")
    assert [kind for kind, _ in files] == ["image/svg+xml", "application/json", "image/png"]
    assert ElementTree.fromstring(files[0][1]).tag.endswith("svg")
    assert json.loads(files[1][1])
    assert "PNG" in files[2][1][:8]
    assert tab.console() == []


def test_what_a_notebook_shows_runs_in_its_frame_and_saves_files(browser: Browser, tmp_path: Path) -> None:
    """In the sandboxed frame itself, which the browser runs as a page of its own."""
    html = load(checkpoint("decoder")).trace(["the mill"], read=["*.pattern"])._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset='utf-8'>{html}", "utf-8")
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    outer = browser.open(tmp_path / "notebook.html")
    targets = browser.call("Target.getTargets")["targetInfos"]
    [frame] = [one["targetId"] for one in targets if one["type"] == "iframe"]
    inner = Tab(browser, browser.call("Target.attachToTarget", targetId=frame, flatten=True)["sessionId"])
    for domain in ("Runtime", "Log"):
        inner.call(f"{domain}.enable")
    inner.wait()
    assert inner.evaluate('document.querySelectorAll(".gallery button").length') == 18
    for name in ("PNG", "SVG", "JSON"):
        click(inner, name)
        for _ in range(1000):  # frames; the browser writes the file in the meantime
            if list(tmp_path.glob(f"*.{name.lower()}")):
                break
            inner.wait("true")
        assert list(tmp_path.glob(f"*.{name.lower()}")), name
    inner.evaluate('[...document.querySelectorAll("#tools button")][0].click()')
    assert inner.evaluate("document.documentElement.dataset.theme") == "dark"
    assert inner.console() == []
    assert outer.console() == []


def test_what_a_notebook_frames_is_drawn_where_storage_is_refused(browser: Browser, tmp_path: Path) -> None:
    """As in a sandboxed frame, in which the page has no storage."""
    html = load(checkpoint("decoder")).trace(["the mill"], read=["*.pattern"])._repr_html_()
    (tmp_path / "page.html").write_text(unescape(html.partition('srcdoc="')[2].removesuffix('"></iframe>')), "utf-8")
    refuse = 'Object.defineProperty(window, "localStorage", { get() { throw new Error("refused"); } });'
    tab = browser.open(tmp_path / "page.html", before=refuse).wait()
    assert tab.evaluate('document.querySelectorAll(".gallery button").length') == 18
    assert tab.console() == []


def test_two_texts_show_no_controls_before_their_weights_are_unpacked(browser: Browser, page: Path) -> None:
    """A press on "PNG" at that moment found no head to draw."""
    tab = browser.open(page, before=SLOW)
    choose(tab, 3)
    assert tab.evaluate('document.querySelector("section.shown").textContent.trim()').startswith("Two texts")
    assert not tab.evaluate(READY)
    assert tab.evaluate(BUTTONS) == 3  # the choice of the stack alone
    assert "Unpacking" in tab.evaluate(STATUS)
    tab.evaluate("release()")
    tab.wait()
    assert tab.evaluate(BUTTONS) > 10
    assert tab.console() == []


def test_a_picture_is_saved_from_a_tab_that_gets_no_frames(browser: Browser, page: Path) -> None:
    """As in a tab behind another; one that cannot be made is reported beside the button."""
    tab = browser.open(page, before=SAVED).wait()
    browser.open(page)
    assert tab.evaluate("document.visibilityState") == "hidden"
    click(tab, "PNG", "section.shown")
    tab.wait("saved.length === 1")
    assert tab.evaluate("saved[0][0]") == "image/png"
    tab.evaluate("HTMLCanvasElement.prototype.toBlob = (done) => done(null)")
    click(tab, "PNG", "section.shown")
    png = '[...document.querySelectorAll("section.shown button")].find((one) => one.textContent === "PNG")'
    message = f"{png}.parentNode.querySelector('[role=status]').textContent"
    tab.wait(f"{message} !== ''")
    assert tab.evaluate(message) == "The PNG could not be made: the browser has no memory for it."


def test_a_wait_that_cannot_end_says_what_it_waited_for(
    browser: Browser, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tab = browser.open(page)
    monkeypatch.setattr("browser.PATIENCE", 0.5)
    with pytest.raises(TimeoutError, match=r"not yet: window\.never"):
        tab.wait("window.never")
    with pytest.raises(TimeoutError, match=r"the browser sent nothing.*waited for Runtime\.evaluate.*new Promise"):
        tab.evaluate("new Promise(() => {})")


LABELS = """(() => {
  const place = document.querySelector(".plane-of-words");
  const [slider, picture] = [place.querySelector("input[type=range]"), place.querySelector("svg.plane")];
  return [...place.querySelector(".choice").children].flatMap((stack) => {
    stack.click();
    return Array.from({ length: Number(slider.max) + 1 }, (_, layer) => {
      slider.value = layer;
      slider.dispatchEvent(new Event("input"));
      const boxes = [...picture.querySelectorAll("text")].map((one) => one.getBBox());
      const over = (a, b) => Math.min(a.x + a.width, b.x + b.width) > Math.max(a.x, b.x)
        && Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y) > 0.3 * a.height;
      const covered = boxes.filter((a, i) => boxes.slice(i + 1).some((b) => over(a, b))).length;
      return [stack.textContent, layer, boxes.length, covered];
    });
  });
})()"""


@pytest.mark.parametrize("width", [390, 1280])
def test_the_words_of_a_plane_cover_each_other_in_no_layer(browser: Browser, tmp_path: Path, width: int) -> None:
    page = tmp_path / "words.html"
    write(page, render("Words", [WordStates("One word")]))
    shown = browser.open(page, width=width).wait().evaluate(LABELS)
    assert len(shown) > 100
    assert [one for one in shown if one[3] > 0] == []
    assert min(count for *_, count, _ in shown) >= 8  # where all points are one, so many lines are near enough
    assert [count for stack, layer, count, _ in shown if (stack, layer) == ("bank", 30)] == [16]  # as the page opens
