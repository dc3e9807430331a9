"""`triptych story`: its losses on Shakespeare, what the command prints and writes, and its page."""

import json
import math
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

import triptych
from browser import CHROMIUM, Browser
from cli_models import Captured, refused, said
from programs import program
from story_texts import HELD_OUT, TEXT, chain, training_loss
from triptych.cli import main
from triptych.errors import FetchError
from triptych.text import shakespeare
from triptych_lectures import story
from triptych_lectures.commands import story as command

STEPS = range(1, story.COUNT + 1)


# ---------------------------------------------------------------- Shakespeare


@pytest.fixture(scope="module")
def plays() -> tuple[str, str]:
    try:
        return shakespeare.split()
    except FetchError as problem:
        pytest.skip(str(problem))


@pytest.mark.heavy
@pytest.mark.weights
def test_the_table_of_gradients_ends_where_the_counts_are(plays: tuple[str, str]) -> None:
    """Within 0.002 nats on the text of training, at a seed that is not recorded."""
    counts, gradients = (story.run(number, *plays, seed=77) for number in (1, 2))
    assert abs(training_loss(gradients) - training_loss(counts)) < 0.002
    assert counts.loss is not None
    assert gradients.loss is not None
    assert abs(gradients.loss - counts.loss) < 0.02


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.weights
def test_losses_fall_from_step_to_step(plays: tuple[str, str]) -> None:
    """At a seed that is not recorded."""
    losses = [story.run(number, *plays, seed=77).loss or math.inf for number in range(2, story.DECODER + 1)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.usefixtures("unchecked")
@pytest.mark.weights
def test_step_eight_ends_where_the_recipe_of_the_quickstart_does(plays: tuple[str, str]) -> None:
    """Within 0.02 nats after as many steps, at a seed that is not recorded."""
    loss = story.run(story.DECODER, *plays, seed=77).loss
    assert loss is not None
    assert abs(loss - program("tools/story.py").loss_of_recipe(77)) < 0.02


def test_the_recipe_of_the_quickstart_has_the_sizes_of_step_eight() -> None:
    recipe = tomllib.loads((Path(triptych.__file__).parent / "train" / "recipes" / "decoder.toml").read_text("utf-8"))
    model, run = recipe["model"], recipe["run"]
    names = {"T": run["length"], "ROWS": run["rows"], "D": model["hidden_size"], "HEADS": model["num_attention_heads"]}
    expected = [*names.values(), model["num_hidden_layers"]]
    sizes = "V, T, ROWS, D, HEADS, LAYERS = len(letters), " + ", ".join(map(str, expected))
    assert sizes in story.step(story.DECODER).source
    assert f"(D, {model['intermediate_size']})" in story.step(story.DECODER).source


def test_recorded_losses_fall_at_every_seed() -> None:
    """Of each seed at which two steps that follow each other are recorded."""
    recorded = story.recorded()
    assert {*range(2, story.DECODER + 1)} <= {*recorded}
    for number in range(3, story.DECODER + 1):
        for seed, loss in recorded[number].items():
            assert loss < recorded[number - 1].get(seed, math.inf), (number, seed)


def test_the_page_of_the_story_has_the_recorded_figures() -> None:
    """What tools/story.py writes; another loss is another page."""
    tool = program("tools/story.py")
    page, data = tool.PAGE.read_text("utf-8"), tomllib.loads(tool.RECORDED.read_text("utf-8"))
    assert tool.written(data) == tool.RECORDED.read_text("utf-8")
    assert tool.page_with_figures(page, data) == page
    seeds = dict.fromkeys(data["recipe"], 9.0)
    for changed in ({"loss": data["loss"] | {"5": {"1": 9.0}}}, {"layouts": {"1": [9.0] * 4}}, {"recipe": seeds}):
        assert tool.page_with_figures(page, data | changed) != page


# ---------------------------------------------------------------- the command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of training, on a short text."""
    monkeypatch.setattr(story, "run", partial(story.run, steps=1))
    monkeypatch.setattr(command, "_texts", lambda data: (TEXT, HELD_OUT))


def test_without_steps_they_are_listed(capsys: Captured) -> None:
    listed = said(["story"], capsys)[0]
    assert all(story.step(number).title in listed for number in STEPS)
    counted = json.loads(said(["story", "--json"], capsys)[0])
    assert [one["lines"] for one in counted] == [len(story.step(n).source.splitlines()) for n in STEPS]
    assert (counted[4]["added"], counted[4]["removed"]) == story.step(5).changed()


def test_a_difference_is_shown(capsys: Captured) -> None:
    shown = said(["story", "8", "--show"], capsys)[0].splitlines()
    assert shown[1:-1] == story.step(8).difference()
    assert sum(line[:1] in ("+", "-") for line in shown) == sum(story.step(8).changed())
    assert json.loads(said(["story", "8", "--show", "--json"], capsys)[0])[0]["difference"] == shown[1:-1]


@pytest.mark.usefixtures("quick")
def test_a_loss_stands_beside_those_of_the_steps_before(tmp_path: Path, capsys: Captured) -> None:
    out = said(["story", "1", "3", "1"], capsys)[0]
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert rows[1][-2] == "–", "step 2 was not run"
    recorded = story.recorded()[2].values()
    assert rows[1][-1] == f"{min(recorded):.3f}–{max(recorded):.3f}"
    assert out.count("Step 1. ") == 1
    result = json.loads(said(["story", "2", "--seed", "3", "--json", "--data", str(tmp_path)], capsys)[0])
    assert result["seed"] == 3
    assert [len(one["curve"]) for one in result["steps"]] == [1]


@pytest.mark.usefixtures("quick")
def test_programs_are_written_to_change_and_run(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "mine"
    said(["story", "1", "8", "--out", str(out)], capsys)
    assert {path.name for path in out.iterdir()} == {"step01.py", "step08.py", "train.txt", "held-out.txt", "model"}
    assert triptych.load(out / "model").spec.family == "llama"
    assert "exists; --out takes a folder that is not there yet" in refused(["story", "1", "--out", str(out)], capsys)


@pytest.mark.heavy
@pytest.mark.usefixtures("quick")
def test_a_written_program_runs_by_itself(tmp_path: Path, capsys: Captured) -> None:
    said(["story", "4", "--out", str(tmp_path / "mine")], capsys)
    command_line = [sys.executable, "-I", "step04.py", "train.txt", "held-out.txt", "0", "2"]
    ran = subprocess.run(command_line, cwd=tmp_path / "mine", capture_output=True, text=True, check=False)
    assert "step 2 of 2: loss" in ran.stdout, ran.stderr
    assert "held-out loss: " in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["0"], "no step '0'; the story has steps 1 to 10, and all", 1),
        (["11"], "no step '11'", 1),
        (["five"], "no step 'five'", 1),
        (["1", "--data", "missing.txt"], "no file or folder missing.txt", 1),
        (["1", "--data", "empty.txt"], "empty.txt holds no text", 1),
        (["1", "--data", "binary"], "binary is not UTF-8 at byte 0", 1),
        (["1", "--data", "short.txt"], "needs 16,384 letters to train on and 2,048 held out", 1),
        (["10", "--data", "no-vowels.txt"], "step 10 hides the letters AEIOUaeiou, and this text has none", 1),
        (["1", "--report", "page.txt"], "--report page.txt must end in .html", 2),
        (["1", "--report", "none/page.html"], "No such directory", 1),
        (["--out", "mine"], "--out needs steps, as in 4 5, or all", 2),
        (["1", "--data", ""], "the path is empty", 2),
    ],
)
def test_what_cannot_be_run(
    arguments: list[str], says: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"empty.txt": b"", "binary": b"\xff\x00\x01" * 99, "short.txt": b"To be, or not to be.\n" * 9}
    for name, content in (files | {"no-vowels.txt": chain("\n bcdf", 1 << 15, 0).encode()}).items():
        Path(name).write_bytes(content)
    assert says in refused(["story", *arguments], capsys, code)
    assert {path.name for path in tmp_path.iterdir()} == {*files, "no-vowels.txt"}


def test_an_interruption_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    file = tmp_path / "step.py"
    file.write_text(
        '"""Stopped: by Ctrl-C."""\nimport torch\n\ntorch.set_grad_enabled(False)\nraise KeyboardInterrupt\n'
    )
    monkeypatch.setattr(story, "file_of", lambda number: file)
    monkeypatch.setattr(command, "_texts", lambda data: (TEXT, HELD_OUT))
    argv = list(sys.argv)
    assert main(["story", "2", "--report", str(tmp_path / "page.html")]) == 130
    assert capsys.readouterr().err.splitlines() == ["error: interrupted"]
    assert (sys.argv, torch.is_grad_enabled()) == (argv, True)
    assert not (tmp_path / "page.html").exists()


# ---------------------------------------------------------------- the page


def page_of(path: Path, capsys: Captured, *steps: str) -> str:
    said(["story", *steps, "--report", str(path)], capsys)
    return path.read_text("utf-8")


@pytest.mark.usefixtures("quick")
def test_the_page_has_programs_losses_curves_and_samples(tmp_path: Path, capsys: Captured) -> None:
    data = page_of(tmp_path / "story.html", capsys, "1", "2", "4").split('id="data">')[1].split("</script>")[0]
    losses, falling, training, *programs = json.loads(data)["sections"]
    assert [row[0] for row in losses["rows"]] == [story.step(n).name for n in (1, 2, 3, 4)]
    assert [x for x, _ in falling["series"]["held-out loss"]] == [1, 2, 4]
    assert [*training["series"]] == [story.step(n).name for n in (2, 4)]
    assert [one["title"] for one in programs] == [story.step(n).name for n in (1, 2, 4)]
    assert programs[2]["whole"] == story.step(4).source
    assert sum(line[0] == "+" for line in programs[2]["changes"]) == story.step(4).changed()[0]
    assert all("held-out loss: " in one["printed"] for one in programs)
    first = programs[0]["printed"]  # in the order in which the program prints
    assert first.index("loss on the training text: ") < first.index("held-out loss: ")


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
@pytest.mark.usefixtures("quick")
def test_only_programs_scroll_sideways_on_a_telephone(tmp_path: Path, capsys: Captured) -> None:
    page_of(tmp_path / "story.html", capsys, "all")
    wide = "[...document.querySelectorAll('main *')].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
    with Browser(tmp_path / "profile") as browser:
        for width in (390, 1280):
            tab = browser.open(tmp_path / "story.html", width=width).wait()
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            outside = f"{wide}.filter((e) => !e.closest('pre') && getComputedStyle(e).overflowX !== 'visible')"
            assert tab.evaluate(f"{outside}.map((e) => e.outerHTML.slice(0, 200))") == []
            assert tab.console() == []
