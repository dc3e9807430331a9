"""Runs the programs of the story on Shakespeare at several seeds; writes `recorded.toml` beside them and the figures of
docs/learn/story.md.

`python tools/story.py 2-4 1-10` runs steps 2 to 4 at seeds 1 to 10, one after another; what is recorded stays, and
so an interrupted call goes on where it was.  After a change of a program, delete its losses first.
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from triptych.text import shakespeare
from triptych_lectures import story

RECORDED = Path(story.__file__).with_name("recorded.toml")
PAGE = Path(__file__).parents[1] / "docs" / "learn" / "story.md"
TOP = """\
# Losses of the programs on Shakespeare, in nats for each held-out letter: step -> seed -> loss.  Of step 10 (layouts)
# those of the encoder and of the decoder with a row's own source, then with another row's.  Made by tools/story.py.
"""


def written(losses: Mapping[str, Mapping[str, object]], layouts: Mapping[str, object]) -> str:
    """The whole of recorded.toml."""
    parts = [TOP]
    for number in sorted(losses, key=int):
        rows = [f"{seed} = {losses[number][seed]}" for seed in sorted(losses[number], key=int)]
        parts.append("\n".join([f"[loss.{number}]", *rows, ""]))
    parts.append("\n".join(["[layouts]", *(f"{seed} = {layouts[seed]}" for seed in sorted(layouts, key=int)), ""]))
    return "\n".join(parts)


def page_with_figures(page: str, losses: Mapping[str, Mapping[str, float]], layouts: Mapping[str, list[float]]) -> str:
    """The text of the page with the recorded figures between its comments."""
    rows = [
        "| | program | seeds | held-out loss | lines | added | removed |",
        "| ---: | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for number in range(1, story.COUNT + 1):
        one, own = story.step(number), [*losses.get(str(number), {}).values()]
        spread = (
            f"{median(own):.3f} ({min(own):.3f} to {max(own):.3f})"
            if len(own) > 1
            else "".join(map("{:.3f}".format, own))
        )
        cells = [number, one.title, len(own) or "", spread, len(one.source.splitlines()), *one.changed()]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    fill, write, fill_other, write_other = (f"{median(column):.3f}" for column in zip(*layouts.values(), strict=True))
    count = f"{len(layouts)} seed{'s' * (len(layouts) > 1)}"
    seen = (
        f"Over {count}, the encoder's loss is {fill} and the decoder's {write}; with another row's source they are "
        f"{fill_other} and {write_other}."
    )
    page = re.sub(
        r"(?s)(<!-- table -->\n).*(<!-- end -->)",
        lambda found: found[1] + "\n" + "\n".join(rows) + "\n\n" + found[2],
        page,
    )
    return re.sub(
        r"(?s)(<!-- layouts -->\n).*(<!-- end layouts -->)",
        lambda found: found[1] + "\n" + seen + "\n\n" + found[2],
        page,
    )


def numbers(words: str) -> range:
    """`"2-4"` or `"3"`."""
    first, _, last = words.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    steps, seeds = map(numbers, sys.argv[1:3])
    texts = shakespeare.split()
    for seed in seeds:
        for number in steps:
            data = tomllib.loads(RECORDED.read_text("utf-8"))
            own = data["layouts"] if number == story.LAYOUTS else data["loss"].setdefault(str(number), {})
            if str(seed) not in own:
                done = story.run(number, *texts, seed=seed)
                own[str(seed)] = done.loss if done.loss is not None else story.layout_losses(done)
                RECORDED.write_text(written(data["loss"], data["layouts"]), "utf-8")
                PAGE.write_text(page_with_figures(PAGE.read_text("utf-8"), data["loss"], data["layouts"]), "utf-8")
                print(f"step {number}, seed {seed}: {own[str(seed)]}", flush=True)


if __name__ == "__main__":
    main()
