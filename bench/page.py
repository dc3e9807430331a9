"""How fast the pages are in a real browser: `python bench/page.py`, with the network blocked.

The live page of decoders with about one and ten million parameters (random weights): the time from opening until the
reader can act and sees numbers, then medians of `--repeat` runs of an edit that changes the first of 64 tokens, so that
all are computed again, and of a head taken out, each until the changed numbers are drawn.  Then pages with the baked
trace of a text: the browser's first contentful paint, and when everything is drawn.

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
    for what, seconds, wanted in rows:
        goal = "" if wanted != wanted else f"  wanted below {wanted:g}: {'met' if seconds < wanted else 'missed'}"
        print(f"{what:48} {seconds:7.3f} s{goal}")


if __name__ == "__main__":
    main()
