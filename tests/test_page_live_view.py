"""The page that runs a model, as a reader uses it: typing, cutting, writing, the keyboard; and nothing leaves it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import parity
from browser import CHROMIUM, Browser, Tab
from live_pages import in_python
from test_page import NASTY, Reader
from triptych.model import Model, create
from triptych.page import write
from triptych.page.live import live_page
from triptych.page.live_export import export
from triptych.text import character_tokenizer, word_tokenizer
from triptych.text.specials import SEQ2SEQ
from triptych.train import read_recipe

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")]
TEXT = "She sat by the river bank, and the king is long live! I loue haue heauen giuen\n"
VIEW = 'document.querySelector("section.live").live'


@cache
def quickstart(panel: str) -> Model:
    """An untrained model of a panel's shape, its weights made larger so that its predictions are not even."""
    made = {"decoder": character_tokenizer(TEXT), "encoder": word_tokenizer([TEXT], 2000)}
    tokenizer = made.get(panel) or character_tokenizer(TEXT, SEQ2SEQ)
    ids = {
        "decoder_start_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    config = read_recipe(panel).model | {"vocab_size": tokenizer.vocab_size}
    torch.manual_seed(0)
    model = create(config | (ids if panel == "encoder-decoder" else {}), tokenizer)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.dim() == 2 and panel != "encoder-decoder":
                parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    made = {panel: folder / f"{panel}.html" for panel in ("decoder", "encoder", "encoder-decoder")}
    for panel, path in made.items():
        write(path, live_page(quickstart(panel), panel))
    return made


def opened(browser: Browser, page: Path, **options: Any) -> Tab:
    return browser.open(page, **options).wait()


def press(tab: Tab, key: str, code: int = 0) -> None:
    text = {"Enter": "\r", " ": " "}.get(key, "")
    for kind in ("keyDown", "keyUp"):
        tab.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key=key,
            windowsVirtualKeyCode=code,
            text=text if kind == "keyDown" else "",
        )


def typed(tab: Tab, text: str, field: int = 0) -> None:
    """As if a reader replaced the text of a field."""
    area = f'document.querySelectorAll("textarea")[{field}]'
    tab.evaluate(f"({area}.value = {json.dumps(text)}, {area}.dispatchEvent(new Event('input')))")
    tab.evaluate(f"{VIEW}.update()")


def act(tab: Tab, code: str) -> None:
    """Run a statement in the page, and wait until it shows what comes of it."""
    tab.evaluate(f"({code}, {VIEW}.refreshing)")


def bars(tab: Tab) -> list[tuple[str, str]]:
    shown = '[...document.querySelectorAll(".bars li")].filter((one) => one.checkVisibility())'
    texts = '[one.querySelector("bdi").title, one.querySelector("b").textContent]'
    return [tuple(one) for one in tab.evaluate(f"{shown}.map((one) => {texts})")]


@pytest.mark.parametrize("panel", ["decoder", "encoder", "encoder-decoder"])
def test_the_three_quickstart_models_compute_what_python_computes(
    panel: str, browser: Browser, pages: dict[str, Path]
) -> None:
    model, tab = quickstart(panel), opened(browser, pages[panel])
    tokens = tab.evaluate(f"{VIEW}.read()")
    text = tab.evaluate('document.querySelector("textarea").value')
    assert model.tokenizer is not None
    assert (tokens.get("source") or tokens["ids"]) == model.ids([text])[0]
    target = tokens["ids"] if "source" in tokens else None
    expected = in_python(model, export(model), model.ids([text])[0], target)
    rows = tab.evaluate(f"{VIEW}.rowsOf({json.dumps(tokens['ids'])})")
    answer = f'{VIEW}.engine.call("compute", {{ ...{json.dumps(tokens)}, rows: {json.dumps(rows)} }})'
    found = tab.evaluate(f"{answer}.then(({{ logits }}) => logits.map((row) => [...row]))")
    assert float((torch.tensor(found) - expected[rows]).abs().max()) <= 1e-3
    assert pages[panel].stat().st_size < 3_000_000
    assert tab.console() == []


def test_the_bars_are_the_model_s_and_move_while_typing(browser: Browser, pages: dict[str, Path]) -> None:
    model, tab = quickstart("decoder"), opened(browser, pages["decoder"])
    before = bars(tab)
    typed(tab, "She sat by the rive")
    after = bars(tab)
    assert before != after
    logits = in_python(model, export(model), model.ids(["She sat by the rive"])[0])[-1]
    chances = (logits.double() / 0.8).softmax(-1)
    assert after[0] == (model.tokenizer.decode([int(chances.argmax())]), f"{100 * float(chances.max()):.1f}%")


def test_a_cut_is_shown_beside_the_whole_model_and_can_be_undone(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    whole = bars(tab)
    assert tab.evaluate('document.querySelector(".effect").textContent') == ""
    act(tab, """document.querySelector('.board [aria-label="layer 0, MLP"]').click()""")
    assert bars(tab) != whole
    assert "KL divergence" in tab.evaluate('document.querySelector(".effect").textContent')
    assert tab.evaluate('[...document.querySelectorAll(".track s")].some((one) => !one.hidden)')
    act(tab, """[...document.querySelectorAll(".board button")].at(-1).click()""")
    assert bars(tab) == whole
    assert tab.evaluate('document.querySelector(".effect").textContent') == ""
    for name in ("Mask", "1/√d"):
        switch = f'[...document.querySelectorAll(".switches button")].find((one) => one.textContent === "{name}")'
        act(tab, f"{switch}.click()")
        assert "KL divergence" in tab.evaluate('document.querySelector(".effect").textContent')
        act(tab, f"{switch}.click()")
        assert bars(tab) == whole
    assert tab.console() == []


def test_it_writes_what_one_full_forward_each_would(browser: Browser, pages: dict[str, Path]) -> None:
    """At temperature 0 the page's text is that of the greedy choice of Python on the same weights."""
    model, tab = quickstart("decoder"), opened(browser, pages["decoder"])
    tab.evaluate('(document.querySelector("input[type=range]").value = 0)')
    tab.evaluate(f"{VIEW}.generate(12)")
    ids = model.ids([TEXT[:25]])[0]
    exported = export(model)
    for _ in range(12):
        chosen = int(in_python(model, exported, ids)[-1].argmax())
        if chosen in model.tokenizer.stop_ids:
            break
        ids = [*ids, chosen]
    assert tab.evaluate('document.querySelector("textarea").value') == model.tokenizer.decode(ids)
    status = tab.evaluate('document.querySelector(".kv p").textContent')
    assert status.startswith(f"{len(ids) - 1} of 512 positions")
    assert "keys and values of 1 token " in status
    tab.evaluate(f"{VIEW}.toggle()")  # "Write", then "Stop"
    tab.wait(f"{VIEW}.running").evaluate(f"{VIEW}.toggle()")
    tab.wait(f"!{VIEW}.running")
    assert tab.console() == []


def test_an_encoder_fills_the_tokens_that_are_masked(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["encoder"])
    shown = '[...document.querySelectorAll(".prediction")].filter((one) => one.checkVisibility())'
    titles = f'{shown}.map((one) => one.querySelector("h4").textContent)'
    assert tab.evaluate(titles) == ["Token 4, masked"]
    act(tab, 'document.querySelectorAll("button.chip")[2].click()')
    assert tab.evaluate(titles) == ["Token 2, masked", "Token 4, masked"]
    assert tab.evaluate('document.querySelectorAll("button.chip")[2].title')
    act(tab, 'document.querySelectorAll("button.chip")[2].click()')
    assert tab.evaluate(titles) == ["Token 4, masked"]
    assert tab.console() == []


def test_an_encoder_decoder_shows_its_alignment(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["encoder-decoder"])
    typed(tab, "I haue", 1)
    assert tab.evaluate('document.querySelector(".large h3").textContent').startswith("Alignment")
    rows = tab.evaluate("[...document.querySelectorAll('.side bdi')].map((one) => one.title)")
    assert rows[1:] == list("I␣haue")
    columns = tab.evaluate("[...document.querySelectorAll('.top bdi')].map((one) => one.title)")
    assert columns == [*"I␣loue", "</s>"]
    assert tab.console() == []


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_text(text: str, browser: Browser, tmp_path: Path) -> None:
    """In the file, without zero bytes, and typed: no element and no script comes of it, and nothing is asked for."""
    stored = text.replace("\0", "")
    write(tmp_path / "page.html", live_page(quickstart("decoder"), stored or "a page", stored))
    tab = opened(browser, tmp_path / "page.html")
    typed(tab, text)
    reader = Reader(tab.html())
    assert "img" not in [tag for tag, _ in reader.tags]
    assert len(reader.inside("script")) == 3
    requests = 'performance.getEntriesByType("resource").filter(({ name }) => !/^(data|blob):/.test(name))'
    assert tab.evaluate(f"{requests}.length") == 0
    assert tab.console() == []


def test_a_page_cannot_ask_for_anything_and_evaluates_no_text(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    refused = "fetch('https://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
    assert tab.evaluate(refused) == "refused"
    made = tab.call("Runtime.evaluate", expression="new Function('return 1')()", allowUnsafeEvalBlockedByCSP=False)
    assert "EvalError" in made["exceptionDetails"]["exception"]["description"]
    policy = tab.evaluate('document.querySelector("meta[http-equiv]").content')
    assert "default-src 'none'" in policy
    assert "'unsafe-eval'" not in policy
    assert any("Content Security Policy" in line for line in tab.console())


def test_the_keyboard_alone_reaches_everything(browser: Browser, pages: dict[str, Path]) -> None:
    """Tab to the board, an arrow to its second head, a space to cut it; the focus stays."""
    tab = opened(browser, pages["decoder"])
    label = 'document.activeElement.getAttribute("aria-label") ?? document.activeElement.textContent'
    reached = []
    for _ in range(80):
        press(tab, "Tab", 9)
        reached.append(tab.evaluate(label))
        if str(reached[-1]).startswith("layer 0, attention"):
            break
    assert {"Write", "One token", "Temperature", "Top-p"} <= set(reached)
    press(tab, "ArrowRight", 39)
    assert tab.evaluate(label) == "layer 0, attention head 1"
    press(tab, " ", 32)
    assert tab.evaluate(f"[...{VIEW}.board.cuts]") == ["blocks.0.attn:1"]
    assert tab.evaluate(label) == "layer 0, attention head 1"
    press(tab, "Tab", 9)
    assert tab.evaluate("document.activeElement.textContent") == "Put all back"
    press(tab, "Enter", 13)
    tab.wait()
    assert tab.evaluate(f"{VIEW}.board.cuts.size") == 0
    assert tab.evaluate(label) == "layer 0, attention head 0"  # and not nowhere, as that button is disabled


@pytest.mark.parametrize("panel", ["decoder", "encoder", "encoder-decoder"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_nothing_is_wider_than_the_page(
    panel: str, width: int, dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    tab = opened(browser, pages[panel], width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.console() == []
    cut = '[...document.querySelectorAll(".picture .box")].filter((box) => box.scrollWidth > box.clientWidth)'
    assert tab.evaluate(f"{cut}.map((box) => box.textContent)") == []


def test_without_webassembly_the_page_runs_in_javascript(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    without = """const Whole = Blob;
      window.Blob = function (parts, kind) { return new Whole(["delete globalThis.WebAssembly;", ...parts], kind); };"""
    plain = opened(browser, pages["decoder"], before=without)
    assert plain.evaluate(f"{VIEW}.engine.kernel") == "JavaScript"
    assert bars(plain) == bars(tab)
    assert plain.console() == []


def test_a_text_that_is_too_long_is_cut_and_the_page_says_so(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["encoder"])
    typed(tab, "king " * 300)
    assert "has 302 tokens; this page computes 128" in tab.evaluate(
        'document.querySelector("[role=status]").textContent'
    )
    typed(tab, "")
    assert tab.console() == []


def test_an_empty_text_has_one_message(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    write(path, live_page(quickstart("decoder"), "t", ""))
    tab = opened(browser, path)
    assert tab.evaluate(f"{VIEW}.warning.textContent") == "There are no tokens yet; type something."
    assert tab.evaluate(f"{VIEW}.speed.textContent") == ""
    typed(tab, "I")
    assert tab.evaluate(f"{VIEW}.warning.textContent") == ""
    assert "1 token in" in tab.evaluate(f"{VIEW}.speed.textContent")
    shown = '[".strips .chip", ".prediction:not([hidden])"].map((one) => document.querySelectorAll(one).length)'
    assert min(tab.evaluate(shown)) > 0
    numbers = (
        '["lessons", "live-walk", "flow", "maps"].map((one) => document.querySelector(`.${one}`).checkVisibility())'
    )
    assert tab.evaluate(numbers) == [True] * 4
    typed(tab, "")
    assert tab.evaluate(shown) == [0, 0]
    assert tab.evaluate(numbers) == [False] * 4
    typed(tab, "I")
    assert min(tab.evaluate(shown)) > 0
    assert tab.evaluate(numbers) == [True] * 4


OTHERS = ("gpt2-base", "bert-classes", "bert-tokens", "bert-spans", "bart-classes", "electra", "mixtral", "t5-encoder")


@pytest.mark.parametrize("name", OTHERS)
def test_any_head_has_a_page(name: str, browser: Browser, tmp_path: Path) -> None:
    """Models without a head over words, mixtures, encoders: the page opens, and a part can be cut."""
    model = Model(parity.ours(name).module, character_tokenizer("She sat by the river bank"))
    write(tmp_path / "page.html", live_page(model, name))
    tab = opened(browser, tmp_path / "page.html")
    assert tab.evaluate('document.querySelectorAll(".gallery button").length') > 0
    act(tab, """document.querySelector('.board .rows button[aria-label*="head 1"]').click()""")
    act(tab, """document.querySelector('.board .rows button[aria-label$="MLP"]').click()""")
    assert tab.evaluate(f"{VIEW}.board.cuts.size") == 2
    assert tab.evaluate('[...document.querySelectorAll(".desk .quiet")].at(-1).textContent').endswith("SIMD.")
    assert tab.console() == []


def test_the_switches_are_those_that_the_model_has(browser: Browser, pages: dict[str, Path]) -> None:
    """An encoder has no causal mask, and T5 does not scale its scores; what is there moves the prediction."""
    names = 'return [...document.querySelectorAll(".switches button")].map((one) => one.textContent)'
    patterns = f"Object.values({VIEW}.now.runs).flatMap((run) => [...run.patterns.values()])"
    read = f"[...{VIEW}.now.logits[0], ...{patterns}.flatMap(({{ data }}) => [...data])]"
    for panel, expected in (("decoder", ["Mask", "1/√d"]), ("encoder", ["1/√d"]), ("encoder-decoder", ["Mask"])):
        tab = opened(browser, pages[panel])
        assert tab.evaluate(f"(() => {{ {names} }})()") == expected
        if panel == "encoder-decoder":
            typed(tab, "I haue", 1)
        for at in range(len(expected)):
            runs = [torch.tensor(tab.evaluate(read))]
            act(tab, f'document.querySelectorAll(".switches button")[{at}].click()')
            # With one decoder layer the last token, which saw everything before, predicts the same; others do not.
            runs.append(torch.tensor(tab.evaluate(read)))
            assert float((runs[0] - runs[1]).abs().max()) > 1e-3
            act(tab, f'document.querySelectorAll(".switches button")[{at}].click()')


@pytest.mark.parametrize("panel", ["decoder", "encoder-decoder"])
def test_temperature_and_top_p_move_the_bars(panel: str, browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages[panel])
    seen = [bars(tab)]
    for name, value in (("Temperature", 2), ("Temperature", 0.2), ("Top-p", 0.05)):
        one = f'document.querySelector("input[aria-label={name}]")'
        tab.evaluate(f"({one}.value = {value}, {one}.dispatchEvent(new Event('input')), {VIEW}.update())")
        out = 'document.querySelectorAll(".bars li.out").length'
        seen.append([*bars(tab), ("out", str(tab.evaluate(out)))])
    first = [float(rows[0][1].rstrip("%")) for rows in seen[:3]]
    assert first[1] < first[0] < first[2]
    assert int(seen[3][-1][1]) > int(seen[1][-1][1])


def test_the_picture_of_the_cache_follows_the_theme(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    tab.evaluate(f"{VIEW}.generate(3)")
    pixel = '[...document.querySelector(".cache").getContext("2d").getImageData(0, 0, 1, 1).data]'
    light = tab.evaluate(pixel)
    tab.evaluate('[...document.querySelectorAll("#tools button")].find((one) => one.textContent === "Dark").click()')
    assert tab.evaluate(pixel) != light
    assert tab.evaluate(pixel)[:3] == [0x8D, 0xB4, 0xEE]


def test_the_bar_of_the_cache_is_as_long_as_what_is_stored(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    typed(tab, "She sat by the river bank, " * 3)  # more than 64 tokens
    tab.evaluate(f"{VIEW}.generate(1)")
    filled, capacity = tab.evaluate(f"{VIEW}.cachePicture.last.filter((_, i) => i !== 1)")
    assert 64 < filled < 0.6 * capacity
    row = 'document.querySelector(".cache").getContext("2d").getImageData(0, 0, canvas.width, 1).data'
    painted = f'((canvas) => [{row}, canvas.width])(document.querySelector(".cache"))'
    pixels, width = tab.evaluate(f"(([data, width]) => [[...data], width])({painted})")
    share = sum(alpha > 0 for alpha in pixels[3::4]) / width
    assert abs(share - filled / capacity) < 0.02


def test_chapters_have_visible_names(browser: Browser, pages: dict[str, Path]) -> None:
    names = f"[...{VIEW}.lessons.chooser.children].map((one) => one.innerText)"
    for width in (1280, 390):
        shown = opened(browser, pages["decoder"], width=width).evaluate(names)
        assert shown[1] == "2 Positions"
        assert len(shown) == 11


def test_the_page_shows_before_its_weights_are_unpacked(browser: Browser, pages: dict[str, Path]) -> None:
    """What is typed in the meantime is what the model reads."""
    slow = """const { postMessage } = Worker.prototype;
      Worker.prototype.postMessage = function (message) { globalThis.release = () => postMessage.call(this, message); };
      globalThis.restore = () => (Worker.prototype.postMessage = postMessage);"""
    tab = browser.open(pages["decoder"], before=slow)
    tab.wait('"release" in globalThis')
    assert tab.evaluate(f"{VIEW}.engine === null")
    text = 'document.querySelector("textarea")'
    tab.evaluate(f"({text}.value = 'the king', {text}.dispatchEvent(new Event('input')))")
    assert "Unpacking" in tab.evaluate('[...document.querySelectorAll(".desk .quiet")].at(-1).textContent')
    tab.evaluate("(restore(), release())")
    tab.wait()
    assert tab.evaluate(f"{VIEW}.tokens.ids.length") == len("the king")
    assert tab.console() == []


def test_typing_never_waits_for_a_forward(browser: Browser, pages: dict[str, Path]) -> None:
    """While the worker computes one text, others are typed: of these the last alone is asked for, and shown."""
    tab = opened(browser, pages["decoder"])
    counted = f"""(() => {{
      const view = {VIEW}, {{ call }} = view.engine;
      globalThis.asked = [];
      globalThis.drawn = [];
      view.engine.call = async (name, given) => {{
        asked.push(given.ids.length);
        await globalThis.hold;
        return call(name, given);
      }};
      const {{ show }} = view;
      view.show = (tokens, ...rest) => (drawn.push(tokens.ids.length), show.call(view, tokens, ...rest));
      globalThis.hold = new Promise((done) => (globalThis.release = done));
    }})()"""
    tab.evaluate(counted)
    field = 'document.querySelector("textarea")'
    for text in ("t", "th", "the", "the king"):
        tab.evaluate(f"({field}.value = {text!r}, {VIEW}.update(), 0)")
    tab.wait("asked.length === 1")
    tab.evaluate("release()")
    tab.wait()
    assert tab.evaluate("asked") == [1, 8]
    assert tab.evaluate("drawn") == [8]
    assert tab.console() == []


@pytest.mark.parametrize(
    "refusal", ["delete window.Worker;", "window.Worker = function () { throw new Error('no'); };"]
)
def test_without_a_worker_the_page_runs_the_model_itself(
    refusal: str, browser: Browser, pages: dict[str, Path]
) -> None:
    tab, plain = opened(browser, pages["decoder"]), opened(browser, pages["decoder"], before=refusal)
    status = '[...document.querySelectorAll(".desk .quiet")].at(-1).textContent'
    assert "starts no worker" in plain.evaluate(status)
    assert "worker" not in tab.evaluate(status)
    assert bars(plain) == bars(tab)
    typed(plain, "the king")
    typed(tab, "the king")
    assert bars(plain) == bars(tab)
    assert plain.console() == []


def test_a_model_that_cannot_be_run_is_reported(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    tab.evaluate(f"({VIEW}.engine.call = () => Promise.reject(new Error('out of memory')))")
    typed(tab, "the")
    warning = 'document.querySelector("[role=status]").textContent'
    assert tab.evaluate(warning) == "The model could not be run: out of memory."
    tab.evaluate(f"{VIEW}.generate(3)")
    assert tab.evaluate(warning) == "The model could not write: out of memory."
    assert tab.evaluate(f"{VIEW}.write.textContent") == "Write"
    assert tab.console() == []


def test_the_model_writes_in_a_tab_that_gets_no_frames(browser: Browser, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["decoder"])
    before = tab.evaluate(f"{VIEW}.source.input.value.length")
    browser.open(pages["encoder"])
    assert tab.evaluate("document.visibilityState") == "hidden"
    tab.evaluate(f"{VIEW}.generate(3)")
    assert tab.evaluate(f"{VIEW}.source.input.value.length") > before
