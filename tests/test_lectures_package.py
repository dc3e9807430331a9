"""The lectures are a package of their own: in the same wheel, found by entry points, and not needed by the library."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
COMMANDS = PROJECT["project"]["entry-points"]["triptych.commands"]
ABSENT = "import sys\nsys.modules['triptych_lectures'] = None\n"  # every import of it then fails
UNDECLARED = ABSENT + "import importlib.metadata\nimportlib.metadata.entry_points = lambda **group: ()\n"


def triptych(before: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`triptych ARGUMENTS` in a new process, after some statements."""
    program = f"{before}from triptych.cli import main\nsys.exit(main({arguments!r}))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("before", [ABSENT, UNDECLARED], ids=["cannot be imported", "not declared"])
def test_the_library_works_without_the_lectures(before: str) -> None:
    ran = triptych(before, "count", "docs/examples/qwen3-4b", "--json")
    assert ran.returncode == 0, ran.stderr
    assert '"total": 4022468096' in ran.stdout


def test_without_the_lectures_there_is_no_such_command() -> None:
    ran = triptych(UNDECLARED, "--help")
    assert ran.returncode == 0
    assert not {word for line in ran.stdout.splitlines() for word in line.split()[:2]} & {*COMMANDS}
    ran = triptych(UNDECLARED, "lab")
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_cannot_be_imported_says_so_in_one_line(name: str) -> None:
    ran = triptych(ABSENT, name)
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1
    assert f"`triptych {name}` is {COMMANDS[name]}" in ran.stderr


def test_both_packages_and_all_their_folders_are_in_the_wheel() -> None:
    packages = set(find_packages(PROJECT["tool"]["setuptools"]["packages"]["find"]["where"][0]))
    assert {name.split(".")[0] for name in packages} == {"triptych", "triptych_lectures"}
    folders = {path.parent.relative_to(ROOT / "src") for path in (ROOT / "src").glob("triptych*/**/*.py")}
    assert {".".join(folder.parts) for folder in folders} == packages


def test_the_files_of_the_lectures_that_are_not_python_are_in_the_wheel() -> None:
    folder = ROOT / "src" / "triptych_lectures"
    files = {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".py"}
    listed = PROJECT["tool"]["setuptools"]["package-data"]["triptych_lectures"]
    assert {path for path in files if "__pycache__" not in path.parts} == {
        *chain.from_iterable(map(folder.glob, listed))
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_an_entry_point_leads_to_its_command(name: str) -> None:
    assert EntryPoint(name, COMMANDS[name], "triptych.commands").load().__name__ == name
