"""The page of tasks: what its commands print, its options and names, and its figures."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import triptych
from programs import program
from triptych.checkpoints.locate import parse_name

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
FROZEN = (Path(__file__).with_name("cli_surface.txt")).read_text("utf-8").splitlines()
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
RULES = re.compile("[─━\\s]+")


def recorded(page: str) -> list[tuple[str, str]]:
    """Each command that the page shows with its output, and that output."""
    pairs = []
    for block in BLOCK.findall(page):
        command, _, output = block.partition("\n")
        if output.strip() and not output.startswith("$ "):
            pairs.append((command.removeprefix("$ "), output))
    return pairs


def words(output: str) -> str:
    """An output without the lines and spaces that set tables."""
    return RULES.sub(" ", output).strip()


def printed(command: str, minilm: Path, smollm2: Path, cache: Path) -> str:
    """stdout of a command of the page, run from the root of the repository."""
    script = f'triptych() {{ {shlex.quote(sys.executable)} -m triptych "$@"; }}; {command}'
    names = {"MINILM": str(minilm), "SMOLLM2": str(smollm2), "XDG_CACHE_HOME": str(cache)}
    path = os.pathsep.join(sys.path)
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, env={**os.environ, **names, "PYTHONPATH": path},
                         capture_output=True, text=True, timeout=900)  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.heavy
@pytest.mark.parametrize(("command", "output"), recorded(PAGE), ids=[pair[0].split()[1] for pair in recorded(PAGE)])
def test_commands_print_what_the_page_shows(
    command: str, output: str, minilm_dir: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    assert words(printed(command, minilm_dir, smollm2_gguf, tmp_path)) == words(output)


def test_the_page_has_recordings() -> None:
    assert {command.split("triptych ")[1].split()[0] for command, _ in recorded(PAGE)} == {
        "search", "encode", "chat", "summarize", "answer",
    }  # fmt: skip
    assert recorded("```console\n$ triptych encode m x\nthe output\n```\n") == [("triptych encode m x", "the output\n")]
    assert recorded("```console\n$ triptych encode m x\n$ triptych encode m y\n```\n") == []


def wrong_options(page: str) -> list[str]:
    """Commands and options of a page that the command line does not have."""
    wrong = []
    for line in page.splitlines():
        for name, rest in re.findall(r"\btriptych (\w+) (.*)", line) if line.startswith("$ ") else ():
            own = {option for one in FROZEN if one.split()[0] == name for option in one.split()[1:]}
            wrong += [f"{name} {option}" for option in re.findall(r"(?<!\S)--[a-z-]+", rest) if option not in own]
            wrong += [] if own else [name]
    return wrong


def test_commands_and_options_exist() -> None:
    assert wrong_options(PAGE) == []
    assert wrong_options("$ triptych answer m --contexts x\n$ triptych ask m") == ["answer --contexts", "ask"]


def test_names_of_checkpoints_are_well_formed() -> None:
    names = set(re.findall(r"hub:[^\s`]+", PAGE))
    assert len(names) > 10
    for name in names - {"hub:"}:
        assert str(parse_name(name)) == name


@pytest.mark.heavy
def test_the_recall_of_folio_lines(minilm_dir: Path) -> None:
    """The figures of the page; shuffled pairs are at chance, so that the measure can fail."""
    retrieval = program("bench/retrieval.py")
    found = retrieval.measured(triptych.load(minilm_dir), 500, 0)
    rows = {"MiniLM": "recall", "words in common": "words in common", "MiniLM, pairs shuffled": "shuffled",
            "chance": "chance"}  # fmt: skip
    for row, name in rows.items():
        (figures,) = re.findall(rf"^\| {row} \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
        assert [float(x) for x in figures] == pytest.approx([found[name][1], found[name][10]], abs=0.0025), row
    assert found["shuffled"][10] < 3 * found["chance"][10]
    assert found["recall"][1] > 0.9
    pieces = retrieval.measured(triptych.load(minilm_dir), 500, 0, 3)
    for row, name in {"MiniLM, before": "recall", "words in common, pieces": "words in common"}.items():
        (figures,) = re.findall(rf"^\| {row} \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
        assert [float(x) for x in figures] == pytest.approx([pieces[name][1], pieces[name][10]], abs=0.0025), row
