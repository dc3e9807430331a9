"""Draws the pictures of docs/learn and README.md.

    python tools/pictures.py [NAME...]      all, or some, of those that are not plots of a lab

The plots of labs are drawn by `tools/lectures.py` whenever their results are recorded.  The rest comes from the three
quickstart runs in runs/ and from SmolLM2; screenshots of pages are taken with chromium.
"""

from __future__ import annotations

import base64
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.model import Model
    from triptych.page import AttentionSection, Curve
    from triptych_lectures.labs.lab import LabResult

ROOT = Path(__file__).resolve().parents[1]
FOLDER, RUNS = ROOT / "docs" / "pictures", ROOT / "runs"
OF_LABS = {  # which of a lab's plots
    "scaling": 0, "soft-vs-hard": 0, "depth": 0, "mask-leak": 0, "kv-cache": 0, "bank": 0, "induction": 0,
}  # fmt: skip
SENTENCE, GAP = "She sat by the river bank", "The king is [MASK] , long live the king !"
WIDTH, MOST = 880, 60_000  # pixels, bytes
COLUMNS = 96  # of the terminal
SESSION = (
    'triptych generate runs/quickstart "My lord, " --temperature 0.6 --seed 3 --max-new-tokens 120',
    'triptych lens runs/quickstart "My lord"',
)


def of_lab(name: str, finding: LabResult, command: str) -> None:
    """Draw the first plot of a lab as the lectures' pages show it, and that which the other pages show, if one does."""
    from triptych.page import AttentionSection, Curve
    from triptych.page.plot import svg

    plots = [section for section in finding.sections if isinstance(section, Curve | AttentionSection)]
    if plots:
        svg(FOLDER / f"{name}.svg", plots[0], command)
    if name in OF_LABS:
        draw(name, plots[OF_LABS[name]])


def draw(name: str, section: Curve | AttentionSection) -> None:
    from triptych.page.plot import png

    with tempfile.TemporaryDirectory() as folder:
        png(Path(folder) / "plot.png", section)
        save(name, Path(folder) / "plot.png")


def save(name: str, picture: Path) -> None:
    """Write a picture into docs/pictures, scaled and with 256 colours."""
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST:
        sys.exit(f"{path} has {path.stat().st_size:,} bytes, more than {MOST:,}")
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")


def maps(name: str, run: str, text: str, stack: str, layer: int, heads: list[int]) -> None:
    """Some heads of one layer of a quickstart model."""
    import numpy as np

    from triptych import load
    from triptych.page import AttentionSection
    from triptych.page.inspect import inspect_text

    [found] = [one for one in inspect_text(load(RUNS / run / "model"), text, layer=layer).maps if one.stack == stack]
    draw(name, AttentionSection("", "", [replace(found, pattern=np.asarray(found.pattern)[heads], heads=heads)]))


def screenshot(name: str, page: str, height: int, width: int = WIDTH) -> None:
    """A page as a browser of this width shows it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        (Path(folder) / "page.html").write_text(page, "utf-8")
        tab = browser.open(Path(folder) / "page.html", width=width, height=height).wait()
        image = Path(folder) / "page.png"
        image.write_bytes(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))
        frame(image)
        save(name, image)


def frame(picture: Path) -> None:
    """Draw a thin border, so that the screenshot of a page stands out on a page."""
    from PIL import Image, ImageDraw

    image = Image.open(picture).convert("RGB")
    ImageDraw.Draw(image).rectangle((0, 0, image.width - 1, image.height - 1), outline="#b8b3a6")
    image.save(picture)


def smollm2() -> Model:
    from triptych_lectures.labs.lab import Setup
    from triptych_lectures.labs.pretrained import decoder

    return decoder(Setup())


def explain() -> None:
    """The attention of one block, its softmax unfolded."""
    from triptych import explain as walk
    from triptych.explain.page import sections
    from triptych.page import StepsSection, render

    steps = walk.explain(smollm2(), SENTENCE, layer=7, head=4)
    [part] = [one for one in sections(steps) if isinstance(one, StepsSection) and "attention" in one.title]
    items = [replace(item, open=item.title == "Softmax") for item in part.items]
    screenshot("explain", render(steps.title, [replace(part, items=items)], subtitle=SENTENCE), 1010)


def inspect() -> None:
    from triptych.page.attention_page import inside_page
    from triptych.page.inspect import inspect_text

    model = smollm2()
    page = inside_page(model, [inspect_text(model, SENTENCE, layer=1)], "SmolLM2-135M-Instruct")
    screenshot("inspect", page, 1010)


def live() -> None:
    """The page that runs the model of the quickstart."""
    from triptych import load
    from triptych.page.live import live_page

    page = live_page(load(RUNS / "quickstart" / "model"), "The quickstart's model", "My lord, I know not wh")
    screenshot("live", page, 760, width=1240)


def words() -> None:
    """One word in many sentences: after three blocks, as it is, with the deciding word cut, and the control."""
    import json

    import numpy as np

    from triptych.page.plot import COLOURS, drawn

    states = json.loads((ROOT / "src" / "triptych" / "page" / "word_states.json").read_text("utf-8"))
    shown = [one for one in states["stacks"] if one["stack"] in ("bank", "bank, deciding word cut", "table")]
    blocks = (2, 9, 29)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.png"
        with drawn(path) as figure:
            figure.set_size_inches(9, 7.5)
            grid = figure.subplots(len(shown), len(blocks), sharex=True, sharey=True)
            for axes, (one, block) in zip(grid.flat, ((a, b) for a in shown for b in blocks), strict=True):
                x, y = np.array(one["at"][block + 1]).reshape(-1, 2).T
                axes.scatter(x, y, s=18, c=[COLOURS[topic] for topic in one["text"]])
                between, share = one["between"][block + 1], one["share"][block + 1]
                axes.set_title(f"{one['stack']}, block {block}", fontsize=9)
                axes.set_xlabel(f"{between:.0%} between topics; plane {share:.0%}", fontsize=8)
                axes.set(xticks=[], yticks=[])
        save("words", path)


def terminal() -> None:
    """Commands on the model of the quickstart as a terminal shows them, as SVG that loads no font."""
    import io

    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in SESSION:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(on_a_terminal(command)))
    drawn = re.sub(r"@font-face {.*?}", "", console.export_svg(title="triptych", unique_id="terminal"), flags=re.DOTALL)
    path = FOLDER / "terminal.svg"
    path.write_text(drawn, "utf-8")
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")


def on_a_terminal(command: str) -> str:
    """What a command prints on a terminal; notes and progress are left out."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    argv = [str(Path(sys.executable).with_name("triptych")), *shlex.split(command)[1:]]
    with subprocess.Popen(argv, stdout=theirs, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        os.close(theirs)
        written = b""
        with suppress(OSError):  # Linux ends the output of a terminal so
            while piece := os.read(ours, 1 << 16):
                written += piece
    os.close(ours)
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return written.decode().replace("\r\n", "\n").rstrip() + "\n"


PICTURES: dict[str, Callable[[], None]] = {
    "decoder": lambda: maps("decoder", "quickstart", SENTENCE, "decoder", 1, [1, 2]),
    "encoder": lambda: maps("encoder", "quickstart-encoder", GAP, "encoder", 1, [1, 2]),
    "cross": lambda: maps("cross", "quickstart-encoder-decoder", "heauen hath", "cross", 0, [1, 0]),
    "loss": lambda: save("loss", RUNS / "quickstart" / "loss.png"),
    "explain": explain,
    "inspect": inspect,
    "live": live,
    "words": words,
    "terminal": terminal,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
