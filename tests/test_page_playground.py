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


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_scrolls_sideways_and_nothing_is_loaded(browser: Browser, page: Path, width: int, dark: bool):
    tab = browser.open(page, width=width, dark=dark).wait()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("performance.getEntriesByType('resource').length") == 0
    assert tab.console() == []
