"""The story: ten short programs that differ by few lines and do what their titles say; broken ones are noticed."""

import ast
import io
import json
import math
import random
import runpy
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from browser import CHROMIUM, Browser
from cli_models import Captured, refused, said
from programs import program
from triptych.cli import main
from triptych.errors import FetchError, InputError
from triptych.text import shakespeare
from triptych_lectures import story
from triptych_lectures.commands import story as command

STEPS = range(1, story.COUNT + 1)
MOST_LINES, MOST_CHANGED = 80, 30


def chain(letters: str, length: int, seed: int) -> str:
    """Text in which each letter is followed by one of three others, so that counts of pairs know something."""
    noise = random.Random(seed)
    follow = {letter: noise.choices(letters, k=3) for letter in letters}
    text = [letters[0]]
    while len(text) < length:
        text.append(noise.choice(follow[text[-1]]))
    return "".join(text)


TEXT = chain("\n aeiounrst", 1 << 14, 0)
HELD_OUT = TEXT[-(1 << 11) :]


@pytest.fixture(scope="module")
def short() -> Callable[[int], story.StepRun]:
    """Steps after one batch of training; each runs once."""
    runs: dict[int, story.StepRun] = {}

    def of(number: int) -> story.StepRun:
        if number not in runs:
            runs[number] = story.run(number, TEXT, HELD_OUT, steps=1)
        return runs[number]

    return of


def replaced(number: int, *pairs: tuple[str, str]) -> str:
    """A program with some of its text replaced."""
    source = story.step(number).source
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def executed(source: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The names and the output of a program, with one batch of training."""
    file = folder / "program.py"
    file.write_text(source)
    for name, text in (("train.txt", TEXT), ("held-out.txt", HELD_OUT)):
        (folder / name).write_text(text, newline="")
    arguments = [file, folder / "train.txt", folder / "held-out.txt", 0, 1]
    with redirect_stdout(io.StringIO()) as printed, story._arguments(*arguments), torch.enable_grad():
        return runpy.run_path(str(file), run_name="__main__"), printed.getvalue()


def untrained(number: int, folder: Path, *pairs: tuple[str, str]) -> dict[str, Any]:
    """The names of a program that stops before its training, with weights at which everything reaches the logits."""
    names = executed(replaced(number, *pairs).partition("for step in range(STEPS)")[0], folder)[0]
    spread(names["model"])
    return names


# ---------------------------------------------------------------- the programs as texts


def test_programs_are_short_and_each_changes_few_lines_of_the_one_before() -> None:
    """A changed line is one that a diff adds; as many may be removed."""
    for number in STEPS:
        one = story.step(number)
        assert len(one.source.splitlines()) <= MOST_LINES, number
        assert max(one.changed()) <= MOST_CHANGED, number
        assert (sum(one.changed()) > 0) == (number > 1)
    kept = [line[1:] for line in story.step(5).difference() if line[0] != "-"]
    assert kept == story.step(5).source.splitlines()
    assert [line[1:] for line in story.step(5).difference() if line[0] != "+"] == story.step(4).source.splitlines()


def test_programs_are_formatted() -> None:
    files = [str(story.file_of(number)) for number in STEPS]
    for check in (["format", "--check"], ["check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *check, *files], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout


def imported(source: str) -> set[str]:
    """The packages that a program imports; a relative import counts as "."."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else str(node.module))
    return {name.split(".")[0] or "." for name in names}


def test_programs_import_torch_and_the_standard_library_only() -> None:
    for number in STEPS:
        assert imported(story.step(number).source) - sys.stdlib_module_names == {"torch"}
    assert imported("import numpy as np\nfrom . import tiny\nfrom triptych.model import load") == {
        "numpy", ".", "triptych",
    }  # fmt: skip


def test_each_title_is_a_name_and_what_the_program_does() -> None:
    titles = [story.step(number).title for number in STEPS]
    assert all(0 < title.find(": ") < 20 and title.endswith(".") and "\n" not in title for title in titles)
    assert story.step(4).name == "4. One head"


# ---------------------------------------------------------------- what they do


@pytest.mark.parametrize("number", STEPS)
def test_each_program_runs_to_its_end(number: int, short: Callable[[int], story.StepRun]) -> None:
    done = short(number)
    losses = story.layout_losses(done) if number == story.LAYOUTS else [done.loss]
    assert len(losses) == (4 if number == story.LAYOUTS else 1)
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
    assert [step for step, _ in done.curve] == ([] if number == 1 else [1])
    assert len("".join(done.lines)) > 100, "a sample"


def test_a_run_leaves_nothing_behind(short: Callable[[int], story.StepRun]) -> None:
    argv, state = list(sys.argv), torch.get_rng_state()
    story.run(1, TEXT, HELD_OUT)
    story.run(2, TEXT, HELD_OUT, steps=1)
    assert sys.argv == argv
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert not list(Path(tempfile.gettempdir()).glob("story-*/train.txt.*"))


def training_loss(done: story.StepRun) -> float:
    return float(next(line for line in done.lines if line.startswith("loss on the training")).split()[-1])


def test_gradients_find_the_table_of_counts() -> None:
    """Within 0.002 nats on the text of training; a table that is hardly trained is not there."""
    counts = training_loss(story.run(1, TEXT, HELD_OUT))
    assert abs(training_loss(story.run(2, TEXT, HELD_OUT, steps=200)) - counts) < 0.002
    assert training_loss(story.run(2, TEXT, HELD_OUT, steps=5)) - counts > 0.002


def spread(model: torch.nn.Module) -> None:
    """Weights at which everything that a model computes reaches its logits."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=noise) * 0.1 + (parameter.dim() == 1))


def sees_the_future(logits: Callable[[torch.Tensor], torch.Tensor], letters: int, length: int = 24) -> bool:
    """Whether other letters from the middle on change what is predicted before it."""
    ids = torch.arange(length)[None] % letters
    others = ids.clone()
    others[:, length // 2 :] = (others[:, length // 2 :] + 1) % letters
    before, after = (logits(one)[:, : length // 2] for one in (ids, others))
    return not torch.allclose(before, after, atol=1e-5)


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 8])
def test_no_letter_is_predicted_from_later_ones(number: int, tmp_path: Path) -> None:
    names = untrained(number, tmp_path)
    assert not sees_the_future(names["model"], names["V"])
    names = untrained(number, tmp_path, (".masked_fill(future, -torch.inf)", ""))
    assert sees_the_future(names["model"], names["V"]), "the mask was left out"


@pytest.mark.parametrize(("number", "matters"), [(3, False), (4, False), (5, True)])
def test_positions_are_what_step_five_adds(number: int, matters: bool, tmp_path: Path) -> None:
    """Without them, the last letter's logits do not depend on the order of the letters before it."""
    model, ids = untrained(number, tmp_path)["model"], torch.arange(9)[None]
    turned = model(torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), 1))
    assert torch.allclose(model(ids)[:, -1], turned[:, -1], atol=1e-5) != matters


def cached_and_not(lines: list[str]) -> tuple[list[str], list[int]]:
    """Both texts and both counts of FLOPs that step 9 prints."""
    heads = [i for i, line in enumerate(lines) if "FLOPs" in line]
    texts = ["\n".join(lines[heads[0] + 1 : heads[1]]), "\n".join(lines[heads[1] + 1 :])]
    return [text.strip("\n") for text in texts], [int(lines[i].split()[0].replace(",", "")) for i in heads]


def test_with_a_cache_the_same_letters_take_fewer_flops(short: Callable[[int], story.StepRun], tmp_path: Path) -> None:
    """Without one, 1 + 2 + ... + 127 letters go through the linear maps instead of 127, 64 times as many; the scores of
    all pairs are (2 · 127 + 1) / 3 = 85 times those of the new letter."""
    texts, flops = cached_and_not(list(short(9).lines))
    assert texts[0] == texts[1]
    assert 64 <= flops[0] / flops[1] <= 85
    small = [("std=0.02", "std=0.2"), ("len(letters), 128,", "len(letters), 16,")]
    places = (" + (0 if self.cache is None else self.cache.shape[3])", "")
    for pairs, same in ((small, True), ([*small, places], False)):
        texts = cached_and_not(executed(replaced(9, *pairs), tmp_path)[1].splitlines())[0]
        assert (texts[0] == texts[1]) == same, "in the broken one, each new letter has the first place"


@pytest.fixture
def decoder(short: Callable[[int], story.StepRun]) -> story.StepRun:
    """Step 8 with weights at which its logits are far from equal."""
    done = short(story.DECODER)
    spread(done.names["model"])
    return done


def library_difference(done: story.StepRun) -> float:
    """max |Δ log-softmax| of step 8 and of its weights in the library."""
    names, model = done.names, story.decoder_of(done)
    text = TEXT[500:600]
    assert model.tokenizer is not None
    (theirs,) = model.logits([model.tokenizer.encode(text)])
    with torch.no_grad():
        ours = names["model"](torch.tensor([[names["number"][letter] for letter in text]]))[0]
    order = [model.tokenizer.encode(letter)[0] for letter in names["letters"]]
    assert ours.std() > 0.5
    return float((ours.log_softmax(-1) - theirs[:, order].log_softmax(-1)).abs().max())


def test_step_eight_is_a_decoder_of_this_library(
    decoder: story.StepRun, monkeypatch: pytest.MonkeyPatch, short: Callable[[int], story.StepRun]
) -> None:
    assert library_difference(decoder) <= 1e-5
    monkeypatch.setattr(story, "NAMES", story.NAMES | {"q": "attn.k", "k": "attn.q"})
    assert library_difference(decoder) > 1e-3, "queries and keys were exchanged"
    with pytest.raises(InputError, match="step 8 of the story is a decoder"):
        story.decoder_of(short(7))


Rows = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def layouts_see(names: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether the encoder sees later letters of its source, the decoder later ones of its own, and the source."""
    predicted: Rows = names["predicted"]
    rows = torch.arange(25)[None] % (names["V"] - 1)
    encoder = sees_the_future(lambda ids: predicted(rows, torch.cat((ids[:, :1], ids), 1))[0], names["V"] - 1)
    decoder = sees_the_future(lambda ids: predicted(torch.cat((ids, ids[:, :1]), 1), rows)[1], names["V"] - 1)
    both = [predicted(rows, others)[1] for others in (rows, rows.flip(1))]
    return encoder, decoder, not torch.allclose(*both, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("source = block(source, source)", "source = block(source, source)", (True, False, True)),
        ("source = block(source, source)", "source = block(source)", (False, False, True)),  # a mask in the encoder
        ("model[3](x)", "model[3](x, x)", (True, True, True)),  # none in the decoder
        ("model[4](model[3](x), source)", "model[4](model[3](x))", (True, False, False)),  # no second input
    ],
)
def test_the_encoder_sees_all_and_the_decoder_its_past_and_the_source(
    old: str, new: str, seen: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    """The program itself, and three that are broken."""
    assert layouts_see(untrained(story.LAYOUTS, tmp_path, (old, new))) == seen


@pytest.mark.heavy
def test_the_decoder_learns_to_read_its_source() -> None:
    """Another row's source is worse for both; a decoder that gets no source does not know whose it is."""
    encoder, decoder, encoder_other, decoder_other = story.layout_losses(story.run(10, TEXT, HELD_OUT, steps=100))
    assert encoder < encoder_other
    assert decoder < decoder_other


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
