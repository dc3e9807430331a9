"""What holds of every control of a page that runs a model, and of the playground: names, focus, the keyboard, widths,
themes, no error and no request; the chapters by their names; and the chapter on one word in many sentences."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser, Tab
from test_page_live_view import VIEW, act, press, quickstart
from test_word_states import STATES, stack
from triptych.explain.page import playground
from triptych.page import write
from triptych.page.live import live_page

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]
PAGES = ("decoder", "encoder", "encoder-decoder", "playground")
LIVE = 'document.querySelector("section.live")?.live'
WALK = f'({LIVE}?.walk.walk ?? document.querySelector("section.textattention").attention.walk)'


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {name: folder / f"{name}.html" for name in PAGES}
    for name, path in made.items():
        write(path, playground() if name == "playground" else live_page(quickstart(name), name))
    return made


def states(tab: Tab) -> Iterator[str]:
    """The page with each step of the walk open, then with each chapter."""
    for step in range(tab.evaluate(f"{WALK}.steps.length")):
        tab.evaluate(f"({WALK}.open({WALK}.steps[{step}].title), {LIVE}?.refreshing)")
        yield f"step {step}"
    for chapter in range(tab.evaluate(f"{LIVE}?.lessons.chooser.children.length ?? 0")):
        tab.evaluate(f"({LIVE}.lessons.open({chapter}), {LIVE}.refreshing)")
        yield f"chapter {chapter}"


def nameless(tab: Tab) -> list[str]:
    """What the keyboard can reach and a screen reader could not name, by its role."""
    found = []
    for node in tab.call("Accessibility.getFullAXTree")["nodes"]:
        properties = {one["name"]: one["value"].get("value") for one in node.get("properties", [])}
        if (
            not node.get("ignored")
            and properties.get("focusable")
            and not node.get("name", {}).get("value", "").strip()
        ):
            found.append(node["role"]["value"])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_control_has_a_name(page: str, browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages[page]).wait()
    for place in states(tab):
        assert nameless(tab) == [], place
    tab.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert nameless(tab) == ["button"]  # the test sees one that has none


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_scrolls_sideways_fails_or_is_loaded(
    page: str, dark: bool, width: int, browser: Browser, pages: dict[str, Path]
) -> None:
    """Without a network, in every step and chapter."""
    tab = browser.open(pages[page], width=width, dark=dark).wait()
    tab.call("Network.enable")
    tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    for place in states(tab):
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, place
        empty = f"[...{WALK}.cell.querySelectorAll('b.number')].filter((one) => !Number.isFinite(+one.dataset.value))"
        assert tab.evaluate(f"{empty}.length") == 0, place
    requests = 'performance.getEntriesByType("resource").filter(({ name }) => !/^(data|blob):/.test(name))'
    assert tab.evaluate(f"{requests}.length") == 0
    assert tab.console() == []


@pytest.mark.parametrize("page", PAGES)
def test_the_keyboard_alone_reaches_every_control_and_shows_where_it_is(
    page: str, browser: Browser, pages: dict[str, Path]
) -> None:
    """By the tab key, or in a group that arrow keys move in; each element that has the focus is marked."""
    tab = browser.open(pages[page]).wait()
    tab.evaluate(f"{WALK}.open('masked')")
    tab.evaluate("""(globalThis.reached = new Set(), globalThis.unmarked = [], globalThis.note = () => {
      const one = document.activeElement;
      const style = getComputedStyle(one);
      if (style.outlineStyle === "none" && style.boxShadow === "none") unmarked.push(one.outerHTML.slice(0, 200));
      reached.add(one);
      return one === document.body;
    })""")
    for _ in range(400):
        press(tab, "Tab", 9)
        if tab.evaluate("note()"):
            break
    controls = """[...document.querySelectorAll("button, input, textarea, select, a[href], [tabindex]")]
      .filter((one) => one.checkVisibility() && !one.disabled)"""
    # A control without a tab stop of its own stands in a group one of whose members has been reached.
    missed = f"""{controls}.filter((one) => !reached.has(one)
      && !(one.tabIndex < 0 && [...(one.closest("[role=group], [role=grid]")?.querySelectorAll("*") ?? [])]
        .some((other) => reached.has(other)))).map((one) => one.outerHTML.slice(0, 200))"""
    assert tab.evaluate(missed) == []
    assert tab.evaluate("unmarked.filter((one) => !one.startsWith('<body'))") == []


# ---------------------------------------------------------------- chapters by name


def test_a_chapter_is_opened_by_its_name_in_the_address(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["decoder"]).wait()
    assert tab.evaluate("location.hash") == ""
    act(tab, f"{VIEW}.lessons.chooser.children[4].click()")
    assert tab.evaluate("location.hash") == "#who-sees-whom"
    tab.evaluate("(location.hash = '#queries-keys-and-values')")
    title = f'{VIEW}.lessons.card.querySelector("h4").textContent'
    tab.wait(f'{title} === "3. Queries, keys and values"')
    assert tab.evaluate(f"{VIEW}.lessons.chooser.children[2].ariaPressed") == "true"
    for address in ("about:blank", f"{pages['decoder'].as_uri()}#queries-keys-and-values"):
        tab.call("Page.navigate", url=address)
    tab.wait()
    assert tab.evaluate(title) == "3. Queries, keys and values"
    tab.evaluate("(location.hash = '#section-0')")  # no chapter: the open one stays
    assert tab.evaluate(title) == "3. Queries, keys and values"
    assert tab.console() == []


# ---------------------------------------------------------------- one word in many sentences

CHAPTER = 8
NUMBERS = f"[...{VIEW}.lessons.text.querySelectorAll('b.number')].map(({{ dataset }}) => [dataset.name, dataset.value])"


def mean(numbers: list[float]) -> float:
    return sum(numbers[1:]) / len(numbers[1:])


def test_the_chapter_on_one_word_says_what_was_measured(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["decoder"]).wait()
    act(tab, f"{VIEW}.lessons.open({CHAPTER})")
    shown = {name: float(value) for name, value in tab.evaluate(NUMBERS)}
    bank, cut, table = stack("bank"), stack("bank, deciding word cut"), stack("table")
    expected = {
        "sentences": len(bank["tokens"]), "between": mean(bank["between"]), "chance": mean(bank["chance"]),
        "cut": mean(cut["between"]), "control": mean(table["between"]), "shown": mean(bank["share"]),
    }  # fmt: skip
    assert shown == pytest.approx(expected)
    assert "less, so the topic" in tab.evaluate(f"{VIEW}.lessons.text.textContent")
    # A control that separates as much turns the sentence.
    tab.evaluate(f"""(() => {{ const all = {VIEW}.section.word_states.stacks;
      const [bank, table] = ["bank", "table"].map((name) => all.find(({{ stack }}) => stack === name));
      table.between = bank.between; }})()""")
    act(tab, f"{VIEW}.lessons.open({CHAPTER})")
    assert "as much, so the picture shows the topic" in tab.evaluate(f"{VIEW}.lessons.text.textContent")


def test_the_picture_of_one_word_has_its_points_sentences_and_shares(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["decoder"]).wait()
    act(tab, f"{VIEW}.lessons.open({CHAPTER})")
    card = f"{VIEW}.lessons.card"
    for place, one in enumerate(STATES["stacks"]):
        tab.evaluate(f"{card}.querySelectorAll('.plane-of-words .choice button')[{place}].click()")
        layer = f"((one) => (one.value = 12, one.dispatchEvent(new Event('input'))))({card}.querySelector('input'))"
        tab.evaluate(layer)
        circles = f"[...{card}.querySelectorAll('circle')]"
        points = f"{circles}.map((one) => [+one.getAttribute('cx'), -one.getAttribute('cy')])"
        at = one["at"][12]
        assert sorted(map(tuple, tab.evaluate(points))) == sorted(zip(at[::2], at[1::2], strict=True))
        assert f"{round(100 * one['share'][12])}%" in tab.evaluate(f"{card}.querySelector('.layer-name').textContent")
        note = f"{card}.querySelector('.plane-of-words > .quiet').textContent"
        assert f"{100 * one['between'][12]:.1f}%" in tab.evaluate(note)
        word = f"{card}.querySelector('.words button')"
        tab.evaluate(f"{word}.click()")
        sentence = one["sentences"][one["tokens"].index(tab.evaluate(f"{word}.dataset.word"))]
        assert sentence in tab.evaluate(note)
        tab.evaluate(f"{word}.click()")
    assert tab.console() == []
