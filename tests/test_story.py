"""The story: ten short programs that differ by few lines and do what their titles say; broken ones are noticed."""

import ast
import io
import math
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from story_texts import HELD_OUT, TEXT, training_loss
from triptych.errors import InputError
from triptych_lectures import story

STEPS = range(1, story.COUNT + 1)
MOST_LINES, MOST_CHANGED = 80, 30


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
    with (
        redirect_stdout(io.StringIO()) as printed,
        patch.object(sys, "argv", list(map(str, arguments))),
        torch.enable_grad(),
    ):
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
