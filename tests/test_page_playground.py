"""The playground in a real browser: its numbers are those of `attend_reference`, bad input is named beside its cell."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from browser import CHROMIUM, Browser, Tab
from triptych import attend_reference, causal, full
from triptych.attention.mechanisms import additive
from triptych.explain.page import playground
from triptych.page import write

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "play.html"
    write(path, playground())
    return path


def shown(tab: Tab, name: str) -> Tensor:
    """The numbers of a table, with all their digits: what is written in its inputs, or its results."""
    rows = tab.evaluate(f"""[...document.querySelectorAll('table[data-name="{name}"] tr')].map((row) =>
      [...row.querySelectorAll("td")].map((td) => (td.querySelector("input") ?? td).dataset.value))""")
    return torch.tensor([[float(x.replace("Infinity", "inf")) for x in row] for row in rows], dtype=torch.float64)


def write_in(tab: Tab, label: str, text: str) -> None:
    tab.evaluate(f"""(() => {{ const input = document.querySelector('input[aria-label="{label}"]');
      input.value = "{text}"; input.dispatchEvent(new Event("input")); }})()""")


def press(tab: Tab, text: str) -> None:
    tab.evaluate(f"""[...document.querySelectorAll("button")].find((one) => one.textContent === "{text}").click()""")


def check(tab: Tab, *, mask: object, scale: float, temperature: float) -> None:
    q, k, v, w_q, w_k, w = (shown(tab, name) for name in ("Q", "K", "V", "W_q", "W_k", "w"))
    z = attend_reference(q, k, v, mask=mask, scale=scale / temperature)
    torch.testing.assert_close(shown(tab, "dot output"), z, atol=1e-5, rtol=0)
    z = additive(q, k, v, w_q=w_q, w_k=w_k, w_v=w[0] / temperature, mask=mask)
    torch.testing.assert_close(shown(tab, "additive output"), z, atol=1e-5, rtol=0)


@pytest.mark.parametrize("example", range(5))
def test_every_example_with_every_setting(browser: Browser, page: Path, example: int):
    tab = browser.open(page).wait()
    tab.evaluate(f"""(() => {{ const one = document.querySelector("select"); one.value = {example};
      one.dispatchEvent(new Event("change")); }})()""")
    root = shown(tab, "Q").shape[1] ** -0.5
    write_in(tab, "K, row 0, column 0", "-1.75")
    write_in(tab, "w, row 0, column 0", "0.3")
    press(tab, "1/√d")
    check(tab, mask=full(), scale=root, temperature=1)
    press(tab, "no scale")
    check(tab, mask=full(), scale=1, temperature=1)
    write_in(tab, "temperature", "0.5")
    press(tab, "causal")
    check(tab, mask=causal(), scale=1, temperature=0.5)
    with pytest.raises(AssertionError):  # the comparison can fail
        check(tab, mask=causal(), scale=root * 1.5, temperature=0.5)
    assert tab.console() == []


@pytest.mark.parametrize("text", ["x", "", "1e999", "1e7", "--1", "NaN"])
def test_bad_input_is_named_beside_its_cell_and_the_last_number_stays(browser: Browser, page: Path, text: str):
    tab = browser.open(page).wait()
    before = shown(tab, "dot output")
    write_in(tab, "Q, row 1, column 1", text)
    cell = """document.querySelector('input[aria-label="Q, row 1, column 1"]')"""
    assert tab.evaluate(f"{cell}.getAttribute('aria-invalid')") == "true"
    assert tab.evaluate(f"{cell}.nextSibling.textContent").endswith("1 is still used.")
    assert torch.equal(shown(tab, "dot output"), before)
    write_in(tab, "Q, row 1, column 1", "2")
    assert tab.evaluate(f"{cell}.getAttribute('aria-invalid')") is None
    assert not torch.equal(shown(tab, "dot output"), before)
    write_in(tab, "temperature", "0")
    assert torch.isfinite(shown(tab, "dot output")).all()


def test_the_keyboard_alone_reaches_every_control(browser: Browser, page: Path):
    tab = browser.open(page).wait()
    focusable = tab.evaluate("""[...document.querySelectorAll("input, select, .choice button, summary")].every(
      (one) => one.tabIndex === 0)""")
    assert focusable
    tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
    tab.evaluate("""(() => { const input = document.querySelector('input[aria-label="Q, row 0, column 1"]');
      input.focus(); input.select(); })()""")
    before = shown(tab, "dot output")
    tab.call("Input.insertText", text="3")
    assert not torch.equal(shown(tab, "dot output"), before)


# ---------------------------------------------------------------- attention over a text, with random weights

TEXT = 'document.querySelector("section.textattention").attention'


def of_text(tab: Tab, name: str) -> Tensor:
    data = f"(({{ rows, columns, data }}) => [rows, columns, ...[...data].map(String)])({TEXT}.a.{name})"
    rows, columns, *numbers = tab.evaluate(data)
    flat = [float(x.replace("Infinity", "inf")) for x in numbers]
    return torch.tensor(flat, dtype=torch.float64).reshape(int(rows), int(columns))


def slide(tab: Tab, name: str, value: float) -> None:
    tab.evaluate(f"""(() => {{ const input = document.querySelector('.textattention input[aria-label="{name}"]');
      input.value = {value}; input.dispatchEvent(new Event("input")); }})()""")


def check_text(tab: Tab, *, seen: Tensor, scale: float) -> None:
    """Every matrix of the chosen head from those before it, and the result of torch's attention."""
    a = {
        name: of_text(tab, name) for name in ("X", "Y", "WQ", "WK", "WV", "Q", "K", "V", "weights", "z", "concat", "WO")
    }
    near = {"atol": 1e-4, "rtol": 0}
    for name, x in (("Q", a["X"]), ("K", a["Y"]), ("V", a["Y"])):
        torch.testing.assert_close(a[name], x @ a[f"W{name}"], **near)
    z = attend_reference(a["Q"], a["K"], a["V"], mask=seen, scale=scale)
    torch.testing.assert_close(a["z"], z, **near)
    assert float(a["weights"][~seen].abs().sum()) == 0
    torch.testing.assert_close(a["weights"].sum(-1), seen.any(-1).double(), **near)
    width, head = a["z"].shape[1], tab.evaluate(f"{TEXT}.head")
    torch.testing.assert_close(a["concat"][:, head * width : (head + 1) * width], a["z"], **near)
    torch.testing.assert_close(of_text(tab, "out"), a["concat"] @ a["WO"], **near)


def test_the_sliders_change_the_sizes_and_every_number_follows(browser: Browser, page: Path):
    tab = browser.open(page).wait()
    words = of_text(tab, "X").shape[0]
    check_text(tab, seen=torch.ones(words, words, dtype=torch.bool), scale=1 / 4)
    slide(tab, "Head width d", 6)
    slide(tab, "Heads", 5)
    slide(tab, "Length", 4)
    slide(tab, "Temperature", 2)
    sizes = {name: tuple(of_text(tab, name).shape) for name in ("X", "WQ", "Q", "weights", "concat", "WO")}
    assert sizes == {
        "X": (4, 64), "WQ": (64, 64), "Q": (4, 64), "weights": (4, 4), "concat": (4, 320), "WO": (320, 64)
    }  # fmt: skip
    seen = torch.ones(4, 4, dtype=torch.bool)
    tab.evaluate(f"(() => [...{TEXT}.headChoice.querySelectorAll('button')].at(-1).click())()")
    check_text(tab, seen=seen, scale=1 / 16)
    with pytest.raises(AssertionError):  # the comparison can fail
        check_text(tab, seen=seen, scale=1 / 8)
    before = of_text(tab, "weights")
    press(tab, "Other random weights")
    assert not torch.allclose(of_text(tab, "weights"), before, atol=1e-3)
    check_text(tab, seen=seen, scale=1 / 16)
    tab.evaluate("[...document.querySelectorAll('.textattention button')]"
                 ".find((one) => one.textContent === 'no scale').click()")  # fmt: skip
    check_text(tab, seen=seen, scale=1 / 2)
    assert tab.console() == []


def test_the_summary_is_computed_from_the_matrices(browser: Browser, page: Path):
    tab = browser.open(page).wait()
    numbers = f"[...{TEXT}.summary.querySelectorAll('b')].map(({{ dataset }}) => [dataset.name, +dataset.value])"
    for width in (2, 6):
        slide(tab, "Head width d", width)
        ratios = []
        for _ in range(12):
            press(tab, "Other random weights")
            shown = dict(tab.evaluate(numbers))
            dots, weights = of_text(tab, "dots"), of_text(tab, "weights")
            assert shown["spread of products"] == pytest.approx(float(dots.std(correction=0)))
            assert shown["entropy"] == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()))
            assert shown["root"] == 2 ** (width / 2)
            ratios.append(shown["spread of products"] / shown["root"])
        # A product of two vectors of d random numbers has a standard deviation of √d.
        assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.25)


def test_a_mask_is_painted_by_hand(browser: Browser, page: Path):
    tab = browser.open(page).wait()
    walk = f"{TEXT}.walk"
    words = of_text(tab, "X").shape[0]
    seen, before = torch.ones(words, words, dtype=torch.bool), of_text(tab, "weights")
    tab.evaluate(f"{walk}.open('masked')")
    at = """((heat) => { const { left, top } = heat.getBoundingClientRect(); return [left, top]; })"""
    tab.evaluate(f"{walk}.plot.heat.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
    left, top = tab.evaluate(f"{at}({walk}.plot.heat)")
    cell = tab.evaluate(f"{walk}.plot.cell")
    point = {"x": left + 2.5 * cell, "y": top + 4.5 * cell, "button": "left", "clickCount": 1}
    for kind in ("mousePressed", "mouseReleased"):
        tab.call("Input.dispatchMouseEvent", type=kind, **point)
    seen[4, 2] = False
    check_text(tab, seen=seen, scale=1 / 4)
    others = [row for row in range(words) if row != 4]
    assert torch.equal(of_text(tab, "weights")[others], before[others])  # and nothing else has changed
    tab.evaluate(f"[...{walk}.tools.children].find((one) => one.textContent.startsWith('Padding')).click()")
    seen[:, 2] = False
    seen[4, 2] = True  # its one cell is turned, so it is the other way round
    check_text(tab, seen=seen, scale=1 / 4)
    press(tab, "Causal")
    check_text(tab, seen=torch.ones_like(seen).tril(), scale=1 / 4)
    press(tab, "As it was")
    assert torch.equal(of_text(tab, "weights"), before)
    press(tab, "reads another text")
    read = of_text(tab, "Y").shape[0]
    assert of_text(tab, "weights").shape == (words, read)
    assert words != read
    tab.evaluate(f"({walk}.choose([0, 0]), {walk}.flip())")
    seen = torch.ones(words, read, dtype=torch.bool)
    seen[0, 0] = False
    check_text(tab, seen=seen, scale=1 / 4)
    assert tab.evaluate(f"[...{walk}.tools.children].map((one) => one.textContent)").count("Causal") == 0
    assert tab.console() == []


def test_an_empty_text_has_no_matrices(browser: Browser, page: Path):
    tab = browser.open(page).wait()
    field = f"{TEXT}.text.input"
    tab.evaluate(f"({field}.value = '', {field}.dispatchEvent(new Event('input')))")
    assert tab.evaluate(f"{TEXT}.walk.node.checkVisibility()") is False
    assert "no words yet" in tab.evaluate(f"{TEXT}.summary.textContent")
    tab.evaluate(f"({field}.value = 'one', {field}.dispatchEvent(new Event('input')))")
    check_text(tab, seen=torch.ones(1, 1, dtype=torch.bool), scale=1 / 4)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_scrolls_sideways_and_nothing_is_loaded(browser: Browser, page: Path, width: int, dark: bool):
    tab = browser.open(page, width=width, dark=dark).wait()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("performance.getEntriesByType('resource').length") == 0
    assert tab.console() == []
