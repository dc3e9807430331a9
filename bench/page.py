"""How fast the pages are in a real browser: `python bench/page.py`, with the network blocked.

The live page of decoders with about one and ten million parameters (random weights): the time from opening until the
reader can act and sees numbers, then medians of `--repeat` runs of an edit that changes the first of 64 tokens, so that
all are computed again, and of a head taken out, each until the changed numbers are drawn.  Then pages with the baked
trace of a text: the browser's first contentful paint, and when everything is drawn.  Last, the slowest answer to one
control of the smaller live page and of the playground, at two widths: in each step of the walk and each chapter, one of
every kind (buttons, sliders, fields, lists) is used, but for those that write many tokens or save.  Cells of a map are
not pressed, which paint a mask.

The same browser and driver as the tests' (`tests/browser.py`); one thread computes in the page.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import CHROMIUM, READY, Browser, Tab
from triptych import create, machine
from triptych.explain.page import playground
from triptych.model import Model
from triptych.page import write
from triptych.page.attention_page import inside_page
from triptych.page.inspect import inspect_text
from triptych.page.live import live_page
from triptych.text import character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."
TEXT = "she sat by the river bank and saw the light go down over the hill."[:64]
# layers, heads, width D and MLP width F -> the seconds in which an edit or a cut must be drawn
SIZES = {"1M": ((5, 4, 128, 344), 0.2), "10M": ((8, 8, 320, 864), 0.7)}
OPENING, PAINT = 1.0, {512: 1.0, 4096: 2.0}
VIEW = 'document.querySelector("section.live").live'
FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
# Opened at -> when the model's numbers are there, on the page's own clock that starts with the navigation.
LOOK = f"""
window.readyAt = null;
const look = () => {{ if ({READY}) window.readyAt = performance.now(); else requestAnimationFrame(look); }};
document.addEventListener("DOMContentLoaded", look);
"""

INTERACTION, WIDTHS = 0.2, (1280, 390)
# The parts of a page that a reader opens: the steps of the walk, then the chapters.
PARTS = """
globalThis.live = document.querySelector("section.live")?.live;
globalThis.walk = live?.walk.walk ?? document.querySelector("section.textattention").attention.walk;
globalThis.texts = 0; // that the page has had
globalThis.parts = [
  ["page", document.querySelector("main"), () => {}],
  ...walk.steps.map(({ title }) => [`step ${title}`, walk.cell.parentElement, () => walk.open(title)]),
  ...[...(live?.lessons.chooser.children ?? [])]
    .map((_, i) => [`chapter ${i + 1}`, live.lessons.card, () => live.lessons.open(i)]),
];
parts.length"""
# Opens one part, changes the text, and uses the controls that the part shows, one of each kind (of a class, or inside a
# place of a class).  Resolves to [milliseconds, part, control] for each.
CONTROLS = """
(async ([title, place, open]) => {
  const drawn = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const settled = async () => { await drawn(); while (live?.refreshing) await live.refreshing; await drawn(); };
  const unlimited = /^(Write|Stop|Data|Save|Download)/;
  const kindOf = (one) => [one.type, one.closest("[class]").className, one.ariaPressed ?? one.ariaLabel ?? ""].join(" ")
    .replace(/[0-9]+/g, "#");
  const use = (one) => {
    if (one.tagName === "BUTTON" || ["checkbox", "radio"].includes(one.type)) return one.click();
    if (one.tagName === "SELECT") one.selectedIndex = (one.selectedIndex + 1) % one.options.length;
    else if (one.type === "range") one.value = +one.value + (+one.step || 1) * (+one.value < +one.max ? 1 : -1);
    else one.value = one.tagName === "TEXTAREA" ? "abcdefgh"[texts++ % 8] + one.value.slice(1) : 1;
    for (const name of ["input", "change"]) one.dispatchEvent(new Event(name, { bubbles: true }));
  };
  const answers = [], used = new Set();
  const timed = async (name, change) => {
    const start = performance.now();
    change();
    await settled();
    answers.push([performance.now() - start, title, name]);
  };
  await timed("opened", open);
  const text = document.querySelector("textarea");
  if (text) await timed("the text", () => use(text)); // from its first token on
  for (;;) {
    const shown = [...place.querySelectorAll("button, input, select, textarea")]
      .filter((one) => one.checkVisibility() && !one.disabled && !unlimited.test(one.textContent));
    const next = shown.find((one) => !used.has(kindOf(one)));
    if (!next) return answers;
    used.add(kindOf(next));
    await timed(kindOf(next), () => use(next));
  }
})"""


def decoder(layers: int, heads: int, width: int, hidden: int) -> Model:
    """A Llama of random weights over letters."""
    tokenizer = character_tokenizer(LETTERS)
    config = {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": hidden, "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    return create(config, tokenizer)


def timed(tab: Tab, change: str) -> float:
    """Seconds from a change until what comes of it is drawn."""
    start = "const start = performance.now()"
    code = f"(async () => {{ {start}; {change}; await {FRAME}; return performance.now() - start; }})()"
    return float(tab.evaluate(code)) / 1e3


def live(browser: Browser, folder: Path, name: str, repeat: int) -> list[tuple[str, float, float]]:
    """(what, seconds, seconds wanted) for the live page of one size."""
    shape, wanted = SIZES[name]
    model, path = decoder(*shape), folder / f"{name}.html"
    write(path, live_page(model, name, TEXT))
    parameters = sum(weight.numel() for weight in model.module.parameters())
    print(f"{name}: {parameters:,} parameters, page of {path.stat().st_size:,} bytes", file=sys.stderr)
    openings, edits, cuts = [], [], []
    for _ in range(repeat):
        tab = browser.open(path, before=LOOK).wait("window.readyAt !== null")
        openings.append(float(tab.evaluate("window.readyAt")) / 1e3)
    area = 'document.querySelector("textarea")'
    head = """document.querySelector('.board [aria-label="layer 0, attention head 0"]')"""
    for i in range(repeat + 1):  # a new text each time, since the page reuses what it computed before
        text = LETTERS[i] + TEXT[1:]
        change = f"{area}.value = {json.dumps(text)}; {area}.dispatchEvent(new Event('input')); await {VIEW}.update()"
        edits.append(timed(tab, change))
        cuts.append(timed(tab, f"{head}.click(); await {VIEW}.refreshing"))
        timed(tab, f"{head}.click(); await {VIEW}.refreshing")
    if tab.console():
        raise SystemExit(f"the page wrote on the console: {tab.console()}")
    medians = [statistics.median(one) for one in (openings, edits[1:], cuts[1:])]  # the first run compiles scripts
    names = ("until the reader can act", f"an edit of {len(TEXT)} tokens", "a head taken out")
    return [
        (f"live page, {name}, {what}", seconds, least)
        for what, seconds, least in zip(names, medians, (OPENING, wanted, wanted), strict=True)
    ]


def baked(browser: Browser, folder: Path, length: int, repeat: int) -> list[tuple[str, float, float]]:
    """The page of a text of `length` tokens inside the smaller model."""
    model, path = decoder(*SIZES["1M"][0]), folder / f"{length}.html"
    text = "".join(random.Random(0).choices(LETTERS, k=length))
    write(path, inside_page(model, [inspect_text(model, text)], "1M"))
    (tokens,) = model.ids([text])
    print(f"{len(tokens):,} tokens: page of {path.stat().st_size:,} bytes", file=sys.stderr)
    paints, whole = [], []
    for _ in range(repeat):
        tab = browser.open(path, before=LOOK).wait("window.readyAt !== null")
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
        tab.wait(f"({paint}) !== null")
        paints.append(float(tab.evaluate(paint)) / 1e3)
        whole.append(float(tab.evaluate("window.readyAt")) / 1e3)
    return [
        (f"baked trace, {length} tokens, first paint", statistics.median(paints), PAINT[length]),
        (f"baked trace, {length} tokens, all drawn", statistics.median(whole), float("nan")),
    ]


def interactions(browser: Browser, folder: Path) -> list[tuple[str, float, float]]:
    """The slowest answer to one control of each page, without a network, in the light at the first width and in the
    dark at the other."""
    rows = []
    pages = {"live page, 1M": live_page(decoder(*SIZES["1M"][0]), "1M", TEXT), "playground": playground()}
    for name, page in pages.items():
        write(folder / "controls.html", page)
        for dark, width in enumerate(WIDTHS):
            tab = browser.open(folder / "controls.html", width=width, dark=bool(dark)).wait()
            tab.call("Network.enable")
            tab.call(
                "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
            )
            parts = range(tab.evaluate(PARTS))
            answers = [answer for part in parts for answer in tab.evaluate(f"{CONTROLS}(parts[{part}])")]
            if tab.console():
                raise SystemExit(f"the page wrote on the console: {tab.console()}")
            for milliseconds, place, control in sorted(answers, reverse=True)[:3]:
                print(f"{name}, {width} px: {milliseconds:.0f} ms, {place}, {control}", file=sys.stderr)
            slow = f"{name}, {width} px, slowest of {len(answers)} controls"
            rows.append((slow, max(answers)[0] / 1e3, INTERACTION))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, whose median is printed")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit("error: this needs a Chromium browser; install Debian's package chromium, for example")
    look = machine.look()
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as name, Browser(Path(name) / "profile") as browser:
        version: dict[str, Any] = browser.call("Browser.getVersion")
        print(f"{look.processor}, {look.cores.usable} cores, {version['product']}, float32 activations, int8 weights")
        for size in SIZES:
            rows += live(browser, Path(name), size, arguments.repeat)
        for length in PAINT:
            rows += baked(browser, Path(name), length, arguments.repeat)
        rows += interactions(browser, Path(name))
    for what, seconds, wanted in rows:
        goal = "" if wanted != wanted else f"  wanted below {wanted:g}: {'met' if seconds < wanted else 'missed'}"
        print(f"{what:48} {seconds:7.3f} s{goal}")


if __name__ == "__main__":
    main()
