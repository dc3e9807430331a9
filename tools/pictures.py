"""Draws the pictures of docs/learn.

    python tools/pictures.py [NAME...]      all, or some, of those that are not plots of a lab

The plots of labs are drawn by `tools/lectures.py` whenever their results are recorded.  The rest comes from the three
quickstart runs in runs/ and from SmolLM2; screenshots of pages are taken with chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
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


def of_lab(name: str, finding: LabResult) -> None:
    """Draw the plot of a lab that the documentation shows, if it shows one."""
    from triptych.page import AttentionSection, Curve

    if name in OF_LABS:
        plots = [section for section in finding.sections if isinstance(section, Curve | AttentionSection)]
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


def screenshot(name: str, page: str, height: int) -> None:
    """A page as a browser shows it."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("screenshots of pages need chromium")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(page, "utf-8")
        image = Path(folder) / "page.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--virtual-time-budget=8000",
            "--blink-settings=preferredColorScheme=1",
        ]
        subprocess.run(
            [chromium, *options, f"--window-size={WIDTH},{height}", f"--screenshot={image}", f"file://{folder}/page.html"],
            check=True, capture_output=True,
        )  # fmt: skip
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
    from triptych.page import Steps, render

    steps = walk.explain(smollm2(), SENTENCE, layer=7, head=4)
    [part] = [one for one in sections(steps) if isinstance(one, Steps) and "attention" in one.title]
    items = [replace(item, open=item.title == "Softmax") for item in part.items]
    screenshot("explain", render(steps.title, [replace(part, items=items)], subtitle=SENTENCE), 1010)


def inspect() -> None:
    from triptych.page.inside import inside_page
    from triptych.page.inspect import inspect_text

    model = smollm2()
    page = inside_page(model, [inspect_text(model, SENTENCE, layer=1)], "SmolLM2-135M-Instruct")
    screenshot("inspect", page, 1010)


PICTURES: dict[str, Callable[[], None]] = {
    "decoder": lambda: maps("decoder", "quickstart", SENTENCE, "decoder", 1, [1, 2]),
    "encoder": lambda: maps("encoder", "quickstart-encoder", GAP, "encoder", 1, [1, 2]),
    "cross": lambda: maps("cross", "quickstart-encoder-decoder", "heauen hath", "cross", 0, [1, 0]),
    "loss": lambda: save("loss", RUNS / "quickstart" / "loss.png"),
    "explain": explain,
    "inspect": inspect,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
