"""Runs the programs of the story on Shakespeare at several seeds; writes `recorded.toml` beside them and the figures of
docs/learn/story.md.

`python tools/story.py 2-4 1-10` runs steps 2 to 4 at seeds 1 to 10, one after another; `recipe` in the place of the
steps trains the quickstart's recipe as long as step 8.  What is recorded stays, and so an interrupted call goes on
where it was.  After a change of a program, delete its losses first.
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F

import triptych
from triptych.cli import main as command_line
from triptych.text import shakespeare
from triptych_lectures import story

RECORDED = Path(story.__file__).with_name("recorded.toml")
PAGE = Path(__file__).parents[1] / "docs" / "learn" / "story.md"
TOP = """\
# Losses of the programs on Shakespeare, in nats for each held-out letter: step -> seed -> loss.  Of step 10 (layouts)
# those of the encoder and of the decoder with a row's own source, then with another row's; `recipe` is the quickstart's
# decoder after as many steps as step 8.  Made by tools/story.py.
"""
ROWS, LENGTH = 1000, 128  # that the programs are measured on
RECIPE = "recipe"


def loss_of_recipe(seed: int) -> float:
    """The held-out loss of decoder.toml after the steps of step 8, on the same rows."""
    steps = re.search(r"sys.argv\[4:\] else (\d+)", story.step(story.DECODER).source)
    assert steps is not None
    with TemporaryDirectory() as folder:
        never = ("run.evaluate_every=0", "run.sample_every=0", "run.seconds=1e6")
        changes = [word for one in (f"run.steps={steps[1]}", f"run.seed={seed}", *never) for word in ("--set", one)]
        assert command_line(["train", "decoder", "--out", f"{folder}/run", *changes]) == 0
        model = triptych.load(f"{folder}/run")
    train, held_out = shakespeare.split()
    assert model.tokenizer is not None
    number = {letter: model.tokenizer.encode(letter)[-1] for letter in set(train)}
    ids = [number[letter] for letter in held_out if letter in number]
    rows = torch.tensor(ids[: ROWS * (LENGTH + 1)]).view(-1, 50, LENGTH + 1)
    with torch.no_grad():
        of_rows = [torch.stack(model.logits(some[:, :-1].tolist())) for some in rows]
    losses = [F.cross_entropy(logits.mT, some[:, 1:]) for logits, some in zip(of_rows, rows, strict=True)]
    return round(float(sum(losses)) / len(losses), 3)


def written(data: Mapping[str, Any]) -> str:
    """The whole of recorded.toml."""
    tables = {f"loss.{number}": data["loss"][number] for number in sorted(data["loss"], key=int)}
    parts = [TOP]
    for name, own in (tables | {"layouts": data["layouts"], RECIPE: data[RECIPE]}).items():
        parts.append("\n".join([f"[{name}]", *(f"{seed} = {own[seed]}" for seed in sorted(own, key=int)), ""]))
    return "\n".join(parts)


def spread(losses: Sequence[float]) -> str:
    """`"2.494 (2.493 to 2.495)"`: the median, the smallest and the largest."""
    if len(losses) < 2:
        return "".join(f"{loss:.3f}" for loss in losses)
    return f"{median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


def page_with_figures(page: str, data: Mapping[str, Any]) -> str:
    """The text of the page with the recorded figures between its comments."""
    rows = [
        "| | program | seeds | held-out loss | lines | added | removed |",
        "| ---: | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for number in range(1, story.COUNT + 1):
        one, own = story.step(number), [*data["loss"].get(str(number), {}).values()]
        cells = [number, one.title, len(own) or "", spread(own), len(one.source.splitlines()), *one.changed()]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    fill, write, fill_other, write_other = (spread(own) for own in zip(*data["layouts"].values(), strict=True))
    layouts = (
        f"The encoder's loss is {fill} and the decoder's {write}; with another row's source they are {fill_other} and "
        f"{write_other}. Seeds: {len(data['layouts'])}."
    )
    step_8 = data["loss"][str(story.DECODER)]
    apart = max(abs(loss - step_8[seed]) for seed, loss in data[RECIPE].items())
    ends = f"{spread([*data[RECIPE].values()])}, at most {apart:.3f} from step 8 at the same seed"
    recipe = (
        f"Trained by the quickstart's recipe with as many steps and rows, such a decoder ends at {ends}. "
        f"Seeds: {len(data[RECIPE])}."
    )
    for name, text in {"losses": "\n".join(rows), "layouts": layouts, RECIPE: recipe}.items():
        block = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = block.sub(rf"\1\n{text}\n\n\2", page)
    return page


def numbers(words: str) -> range:
    """`"2-4"` or `"3"`."""
    first, _, last = words.partition("-")
    return range(int(first), int(last or first) + 1)


def measured(name: int | str, seed: int) -> float | list[float]:
    """The loss of a step or of the recipe; of step 10 all four."""
    if isinstance(name, str):
        return loss_of_recipe(seed)
    done = story.run(name, *shakespeare.split(), seed=seed)
    return story.layout_losses(done) if done.loss is None else done.loss


def main() -> None:
    what, seeds = sys.argv[1:3]
    for seed in numbers(seeds):
        for name in [RECIPE] if what == RECIPE else numbers(what):
            data = tomllib.loads(RECORDED.read_text("utf-8"))
            table = {RECIPE: data[RECIPE], story.LAYOUTS: data["layouts"]}
            own = table[name] if name in table else data["loss"].setdefault(str(name), {})
            if str(seed) not in own:
                own[str(seed)] = measured(name, seed)
                RECORDED.write_text(written(data), "utf-8")
                PAGE.write_text(page_with_figures(PAGE.read_text("utf-8"), data), "utf-8")
                print(f"{name}, seed {seed}: {own[str(seed)]}", flush=True)


if __name__ == "__main__":
    main()
