"""Every command printed in README.md, docs/ and docs/lectures.md runs, and prints the figures quoted beside it.

A command is run as it is printed, in a directory where the names that the documentation uses stand for small random
models (`MODELS`).  Fast ones run with the other tests; what trains or measures is marked `heavy`.  `NOT_RUN` lists
those that cannot run here, each with the reason, and `SHORTER` what is appended to bound a training run.
"""

import importlib.util
import io
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cli_models
import triptych
from cli_models import Captured
from triptych.cli import main

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "docs" / "tasks.md"  # whose commands tests/test_docs_tasks.py runs: they name real checkpoints
PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md")} - {TASKS})
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?")

NOT_RUN = {  # the beginning of a command -> why it is not run
    "make quickstart": "installs the package; `triptych quickstart` is run",
    "make test": "runs these tests",
    "make wheel": "builds in an environment of its own, for which it needs the network",
    "pip install dist/": "installs the wheel above it",
    ".venv/bin/jupyter": "serves until it is stopped",
    "python3 -m venv": "installs from the network",
    ".venv/bin/python": "installs from the network, or runs these tests",
    "triptych lab all": "each lab is run by itself",
    "triptych story all": "tests/test_story.py runs each program",
    "triptych story 8 --out story": "tests/test_story_command.py runs it with less training",
    "triptych generate story/model": "needs the model above it",
    "triptych tag ner/": "needs a tagger with its tokenizer; tests/test_tasks.py runs such commands",
    "triptych answer squad2/": "needs a model of answers; tests/test_tasks.py runs such commands",
    "triptych summarize bart-cnn/": "needs a BART; tests/test_tasks.py runs such commands",
    "triptych translate t5/": "needs a T5 with settings of languages; tests/test_tasks.py runs such commands",
    "triptych transcribe": "needs a Whisper with its tokenizer; tests/test_hearing.py runs the command on one",
    "triptych train docs/examples/captions.toml": "needs the drawn pictures; tests/test_train_images.py runs it",
    "triptych train docs/examples/shapes.toml": "needs the drawn pictures; tests/test_train_images.py runs it",
    "triptych caption runs/captions/": "needs the model trained before; tests/test_train_images.py runs such commands",
    "triptych classify runs/shapes/": "needs the model trained before; tests/test_train_images.py runs such commands",
    'python -c "from triptych_lectures.data import scenes': "tests/test_train_images.py calls it",
    "triptych convert model-awq/": "needs a checkpoint packed with AWQ; tests/test_packed.py converts one",
    "triptych patch $SMOLLM2": "its answers are single tokens of SmolLM2's; tests/test_path_patching.py patches these",
    "triptych generate runs/adapter": "needs a run that trained an adapter; tests/test_train_adapters.py runs them",
    'triptych generate MODEL.gguf "Once upon a time" --adapter': "needs that run too",
    "triptych convert MODEL.gguf merged.gguf --adapter": "needs that run too",
    "triptych train --new mood.toml": "needs records; tests/test_train_new_recipe.py runs such commands",
    "triptych train mood.toml": "needs the recipe above it",
    "triptych classify runs/mood": "needs the run above it",
    "triptych train notes.toml": "trains for minutes; tests/test_train_further.py runs the three of the page on a text",
    "triptych generate runs/notes": "needs the run above it",
    "triptych train docs/examples/folio.toml": "trains for twenty minutes",
    "triptych train docs/examples/folio-lines.toml": "needs the run above it",
    "triptych lab modernize --model runs/folio-lines": "needs the run above it; see tests/test_labs_translation.py",
    "triptych chat runs/notes": "needs the run above it",
    "triptych train --new notes.toml --from model.gguf --data notes.txt --adapter": "see tests/test_train_further.py",
    "triptych convert model.gguf notes.gguf --adapter runs/notes": "needs the run above it",
    "triptych serve": "serves until it is stopped; tests/test_docs_serving.py does",
    "triptych data inspect tokens": "needs the shards above it; tests/test_cli_data.py runs such commands",
    "triptych chat --url": "needs the server; tests/test_docs_serving.py runs it",
    "triptych eval model.gguf --tasks": "needs lm-eval; tests/test_lm_eval.py runs such commands",
    "triptych eval translator --tasks": "needs lm-eval; tests/test_lm_eval.py runs such commands",
    "triptych batch": "needs its requests; tests/test_docs_serving.py runs it",
    "triptych encode minilm/ --records": "needs its records; tests/test_records.py and test_ray_batches.py run such",
    "curl -s http://127.0.0.1": "needs the server; tests/test_docs_serving.py runs it",
    "docker ": "builds from the network",
    "torchrun --nnodes 2": "needs two machines; tests/test_train_parallel_runs.py starts processes",
    "triptych train run.toml": "needs a recipe; tests/test_train_parallel_runs.py runs such commands",
    "SMOLLM2=": "sets the shell variable of the two commands below it",
}
HEAVY = (
    "triptych lab ",
    "triptych quickstart",
    "triptych train ",
    "triptych bench ",
    "triptych story 2",  # the text needs the network once
)  # but for the LIGHT labs; most need the network once
LIGHT = ("scaling", "permutation", "soft-vs-hard", "gradients", "paged-cache", "speculation", "linear-state")
SHORTER = {  # a run as printed takes minutes
    "triptych bench": "--repeat 1",
    "triptych quickstart": "--seconds 3 --force",  # several pages run it
    "triptych train decoder --out runs/mine --set": "--set run.steps=20 --set run.rows=2",
}

AFTER = {  # a command -> the one that it continues
    "triptych train decoder --out runs/mine --resume": (
        "triptych train decoder --out runs/mine --set run.seconds=600 --set optimizer.lr=0.002"
    ),
}

# What a page says beside a command, in the page's words; the numbers in it must be printed.
QUOTED = {
    ("docs/learn/cache.md", "triptych count docs/examples/qwen3-4b --context 4096"): [
        "that is 603,979,776 bytes, 576 MiB",
    ],
    ("docs/learn/attention.md", "triptych explain --example L2.example-1"): ["0.3302, 0.6698", "2.3395, 3.3395"],
}


# ---------------------------------------------------------------- what is printed


def commands_of(page: str) -> Iterator[str]:
    """The command lines of a page's console blocks, continued lines joined and comments removed."""
    for block in CONSOLE.findall(page):
        for line in re.findall(r"^\$ (.*)", block.replace("\\\n", " "), re.MULTILINE):
            command = re.sub(r"\s+#.*", "", line).strip()
            if "[...]" not in command:  # a form, not a command
                yield re.sub(r"\s+", " ", command)


@cache
def lectures() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs" / "lectures.toml").read_text("utf-8"))


def entries() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("concept", "example", "correction", "exercise"):
        for name, entry in lectures()[kind].items():
            yield f"{kind} {name}", entry


def commands_of_entry(entry: dict[str, Any]) -> list[str]:
    return [*entry.get("run", []), *(f"triptych explain --example {name}" for name in entry.get("examples", []))]


def all_commands() -> list[str]:
    """Each once, in the order in which the pages print them."""
    pages = [command for page in PAGES for command in commands_of(page.read_text("utf-8"))]
    return list(dict.fromkeys(pages + [command for _, entry in entries() for command in commands_of_entry(entry)]))


def is_heavy(command: str) -> bool:
    lab = re.match(r"triptych lab (\S+)", command)
    return command.startswith(HEAVY) and not (lab and lab[1] in LIGHT)


def reason_not_run(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


RUN = [command for command in all_commands() if reason_not_run(command) is None]
FAST = [command for command in RUN if not is_heavy(command)]
SLOW = [command for command in RUN if is_heavy(command)]


# ---------------------------------------------------------------- running it


@dataclass(frozen=True)
class Printed:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the documentation's commands name."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "docs").symlink_to(ROOT / "docs")
    tokenizer, config = cli_models._decoder()
    config = dict(config)
    del config["head_dim"]  # which transformers does not read from a GGUF
    deep = config | {"num_hidden_layers": 8, "max_position_embeddings": 2048, "vocab_size": tokenizer.vocab_size}
    deep |= {"eos_token_id": tokenizer.eos_id}
    triptych.create(deep, tokenizer).save(desk / "llama")
    assert main(["convert", str(desk / "llama"), str(desk / "model.gguf"), "--json"]) == 0
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 24,
           "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 20,
           "patch_size": 5, "id2label": {"0": "cat", "1": "dog"}}  # fmt: skip
    triptych.create(vit).save(desk / "vit")
    gpt2 = {"model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 96, "is_decoder": True,
            "add_cross_attention": True, "vocab_size": tokenizer.vocab_size}  # fmt: skip
    both = {"model_type": "vision-encoder-decoder", "encoder": vit, "decoder": gpt2, "decoder_start_token_id": 0}
    triptych.create(both, tokenizer).save(desk / "vit-gpt2")
    (desk / "runs").mkdir()
    layouts = {"decoder": "llama", "encoder": "bert", "encoder-decoder": "t5"}
    for layout, name in layouts.items():
        if name != "llama":
            shutil.copytree(cli_models.checkpoint(layout), desk / name)  # some commands write there
        run = desk / "runs" / ("quickstart" if layout == "decoder" else f"quickstart-{layout}")
        run.mkdir()
        (run / "model").symlink_to(desk / name)
    (desk / "minilm").symlink_to(desk / "bert")
    (desk / "MODEL").symlink_to(desk / "llama")
    (desk / "MODEL.gguf").symlink_to(desk / "model.gguf")
    (desk / "mine.toml").write_text((ROOT / "src" / "triptych" / "train" / "recipes" / "decoder.toml").read_text())
    if importlib.util.find_spec("PIL") is not None:
        from PIL import Image

        Image.fromarray(np.full((30, 40, 3), 90, np.uint8)).save(desk / "photo.png")
    (desk / "translator").symlink_to(desk / "t5")
    (desk / "bert-base").symlink_to(desk / "bert")
    (desk / "text.txt").write_text("the old mill stands where the river bends\n")
    (desk / "english.txt").write_text("good morning\nthe ship\n")
    (desk / "german.txt").write_text("guten Morgen\ndas Schiff\n")
    (desk / "prompt.txt").write_text("Once upon a time")
    (desk / "sentences.txt").write_text("She sat by the river bank\nHe fished from the shore\n")
    (desk / "notes").mkdir()
    (desk / "notes" / "a.txt").write_text("the old mill stands where the river bends .\n" * 400)
    return desk


def run(command: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Printed:
    """Run a command line of ours, whose input may come from `printf ... |` or `< FILE`."""
    monkeypatch.chdir(desk)
    command = command.replace("$SMOLLM2", "model.gguf").replace(".venv/bin/triptych", "triptych")
    source, _, last = command.rpartition(" | ")
    line, _, file = last.partition(" < ")
    text = Path(file.strip()).read_bytes() if file else b""
    if source:
        text = subprocess.run(shlex.split(source), capture_output=True, check=True).stdout
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    program, *words = shlex.split(line)
    assert program == "triptych", f"{command}: not a command of ours, and not in NOT_RUN"
    if words[0] == "convert":  # two pages may write to one name
        target = Path(words[2])
        shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    more = next((more for start, more in SHORTER.items() if command.startswith(start)), "")
    capsys.readouterr()
    return Printed(main([*words, *more.split()]), *capsys.readouterr())


# ---------------------------------------------------------------- the figures beside it


def half_digit(figure: str) -> float:
    """Half a unit of the last digit of a printed number: 0.0005 for 0.123, half a percent of one in 1.2e-5."""
    mantissa, _, exponent = figure.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0


def value(figure: str) -> float:
    return float(re.sub("[,_]", "", figure))


def missing(quoted: str, printed: str) -> list[str]:
    """The numbers of `quoted` that are not among those printed, to the digits of the coarser of the two."""
    there = [(value(one), half_digit(one)) for one in NUMBER.findall(printed.replace("−", "-"))]

    def is_there(figure: str) -> bool:
        x, own = value(figure), half_digit(figure)
        return any(math.isclose(x, y, rel_tol=1e-12, abs_tol=1.02 * max(own, other)) for y, other in there)

    return [figure for figure in NUMBER.findall(quoted.replace("−", "-")) if not is_there(figure)]


def quoted_figures(entry: dict[str, Any]) -> str:
    return " ; ".join(re.findall(r"`([^`]*)`", entry.get("figures", "")))


WITH_FIGURES = {
    name: entry
    for name, entry in entries()
    if quoted_figures(entry) and any(reason_not_run(command) is None for command in commands_of_entry(entry))
}


# ---------------------------------------------------------------- the tests


def check_runs(command: str, printed: Printed) -> None:
    assert printed.code == 0, f"{command}\n{printed.out}\n{printed.err}"
    assert (printed.out + printed.err).strip(), f"{command} printed nothing"


@pytest.mark.parametrize("command", FAST)
def test_it_runs(command: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, unchecked: None) -> None:
    if "photo.png" in command:
        pytest.importorskip("PIL")
    check_runs(command, run(command, desk, monkeypatch, capsys))


def long_labs(command: str) -> Any:
    """A lab at full size takes minutes."""
    return pytest.param(command, marks=pytest.mark.long) if command.startswith("triptych lab ") else command


@pytest.mark.heavy
@pytest.mark.weights
@pytest.mark.parametrize("command", [long_labs(command) for command in SLOW])
def test_it_runs_for_longer(
    command: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, unchecked: None
) -> None:
    if command == "triptych lab spoken-digits" and shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    if command in AFTER and not (desk / "runs" / "mine").exists():  # another worker runs it
        check_runs(command, run(AFTER[command], desk, monkeypatch, capsys))
    check_runs(command, run(command, desk, monkeypatch, capsys))


def check_figures(entry: dict[str, Any], desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    text = ""
    for command in commands_of_entry(entry):
        if reason_not_run(command) is None:
            text += run(command, desk, monkeypatch, capsys).out
    assert not missing(quoted_figures(entry), text), text


def figures_are_heavy(entry: dict[str, Any]) -> bool:
    return any(map(is_heavy, commands_of_entry(entry)))


@pytest.mark.parametrize("name", [name for name, entry in WITH_FIGURES.items() if not figures_are_heavy(entry)])
def test_an_entry_of_the_lectures_quotes_what_is_printed(
    name: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, unchecked: None
) -> None:
    check_figures(WITH_FIGURES[name], desk, monkeypatch, capsys)


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.weights
@pytest.mark.parametrize("name", [name for name, entry in WITH_FIGURES.items() if figures_are_heavy(entry)])
def test_an_entry_with_a_lab_quotes_what_is_printed(
    name: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, unchecked: None
) -> None:
    check_figures(WITH_FIGURES[name], desk, monkeypatch, capsys)


@pytest.mark.parametrize(("page", "command"), QUOTED, ids=[command for _, command in QUOTED])
def test_a_page_quotes_what_is_printed(
    page: str,
    command: str,
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    unchecked: None,
) -> None:
    text = (ROOT / page).read_text("utf-8")
    printed = run(command, desk, monkeypatch, capsys).out
    for words in QUOTED[page, command]:
        assert words in " ".join(text.split()), f"{page} no longer says {words!r}"
        assert not missing(words, printed), printed


def test_what_is_not_run_is_printed_somewhere() -> None:
    """A reason for a command that no page prints any more is removed."""
    every = all_commands()
    unused = [start for start in (*NOT_RUN, *SHORTER) if not any(command.startswith(start) for command in every)]
    assert not unused
    for page, command in QUOTED:
        assert command in commands_of((ROOT / page).read_text("utf-8"))


def test_a_command_that_fails_is_noticed(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, unchecked: None
) -> None:
    command = "triptych inspect docs/examples/qwen3-4b-of-another-name"
    with pytest.raises(AssertionError, match="qwen3-4b-of-another-name"):
        check_runs(command, run(command, desk, monkeypatch, capsys))


@pytest.mark.parametrize(
    ("quoted", "printed", "wrong"),
    [
        ("0.93 and 0.69", "weights 0.934, 0.6901", []),
        ("0.93", "0.95", ["0.93"]),
        ("603_979_776 bytes", "603,979,776", []),
        ("603_979_776 bytes", "603,979,777", ["603_979_776"]),
        ("9.1e-7", "9.08e-07", []),
        ("-1.5", "1.5", ["-1.5"]),
        ("(16, 256)", "[N 16, D 256]", []),
    ],
)
def test_a_wrong_figure_is_noticed(quoted: str, printed: str, wrong: list[str]) -> None:
    assert missing(quoted, printed) == wrong


def test_commands_are_read_as_they_are_typed() -> None:
    page = (
        "```console\n$ triptych lab scaling   # a comment\nprinted\n$ triptych x \\\n    --y 1\n$ triptych Z [...]\n```"
    )
    page += "\n"
    assert list(commands_of(page)) == ["triptych lab scaling", "triptych x --y 1"]
