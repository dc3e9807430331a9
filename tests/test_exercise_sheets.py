"""`triptych exercise --class`: sheets that differ, solutions apart, a table, and a directory written whole."""

import csv
import html
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cli_models import Captured, said
from triptych.checkpoints.save import write_files
from triptych.cli import main
from triptych.errors import InputError
from triptych_lectures import exercises
from triptych_lectures.exercises.sheet import OWN, class_files

ROOT = Path(__file__).parents[1]
MARK = b"triptych exercise"


def table(files: dict[str, bytes]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(files["answers.csv"].decode())))


def text(page: bytes) -> str:
    return html.unescape(page.decode())


def test_the_exercises_of_a_lecture_are_those_of_its_path() -> None:
    path = tomllib.loads((ROOT / "docs" / "lectures.toml").read_text("utf-8"))["path"]["lecture"]
    on_path = {name: {one for step in of["steps"] for one in step.get("exercises", ())} for name, of in path.items()}
    assert {name: {*names} for name, names in exercises.LECTURES.items()} == on_path


def test_thirty_sheets_of_a_lecture_differ_and_have_their_solutions_apart() -> None:
    files = class_files(["L2"], 30)
    assert sorted(files) == [
        "answers.csv",
        *(f"{kind}-{i:02}.html" for kind in ("sheet", "solutions") for i in range(1, 31)),
    ]
    assert len({page for name, page in files.items() if name.startswith("sheet")}) == 30
    for number in range(1, 31):
        rows = [row for row in table(files) if row["sheet"] == str(number)]
        sheet, solved = text(files[f"sheet-{number:02}.html"]), text(files[f"solutions-{number:02}.html"])
        seed = int(rows[0]["seed"])
        drawn = [exercises.variant(name, seed) for name in ("L2.1", "L2.2", "L2.3")]
        assert [row["answer"] for row in rows] == [asked.answer_text for one in drawn for asked in one.questions]
        for one in drawn:
            assert one.statement in sheet
            for asked in one.questions:
                assert asked.text in sheet
                assert asked.solution not in sheet
                assert asked.solution in solved
        assert "<details" not in sheet
        assert f"Sheet {number}" in sheet
        assert f"sheet {number}." in solved
        assert re.findall("<title>.*</title>", sheet) == re.findall("<title>.*</title>", solved)
        assert "counted from 1" in sheet
        assert f"triptych exercise L2 --class 1 --seed {seed}" in sheet
        assert f"triptych exercise L2 --class 1 --seed {seed}" in solved


def test_a_sheet_is_made_again_by_the_command_that_it_names() -> None:
    files = class_files([], 3, seed=40)
    assert files == class_files([], 3, seed=40)
    for row in table(files):
        alone = class_files([], 1, seed=int(row["seed"]))
        same = files[f"sheet-{int(row['sheet']):02}.html"].replace(f"Sheet {row['sheet']}".encode(), b"Sheet 1")
        assert alone["sheet-01.html"] == same
        assert row["made by"] == f"triptych exercise --class 1 --seed {row['seed']}"
    names = [row["exercise"] for row in table(files) if row["sheet"] == "1"]
    assert len({*names}) == 5  # one of each lecture, and none twice


def test_too_few_variants_are_said() -> None:
    """L4.2 has 36: so many sheets differ, and not one more."""
    seen = {exercises.variant("L4.2", seed).statement for seed in range(600)}
    assert len({row["sheet"] for row in table(class_files(["L4.2"], len(seen)))}) == len(seen)
    with pytest.raises(InputError, match=rf"L4.2 has only {len(seen)} variants among \d+ seeds, too few for 60 sheets"):
        class_files(["L4.2"], 60)


# ---------------------------------------------------------------- the directory


def test_a_directory_is_replaced_whole_and_other_files_stay(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "class"
    said(["exercise", "L4.7", "--class", "3", "--out", str(out)], capsys)
    (out / "notes.txt").write_text("mine")
    (out / "more").mkdir()
    (out / "more" / "sheet-01.html").write_text("mine too")
    shown = said(["exercise", "L4.8", "--class", "2", "--out", str(out)], capsys)[0]
    assert str(out) in shown
    names = {path.name for path in out.iterdir()}
    assert names == {
        "answers.csv",
        "sheet-01.html",
        "sheet-02.html",
        "solutions-01.html",
        "solutions-02.html",
        "more",
        "notes.txt",
    }
    assert "An induction head" in (out / "sheet-01.html").read_text("utf-8")
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "more" / "sheet-01.html").read_text() == "mine too"
    assert [path.name for path in tmp_path.iterdir()] == ["class"]


@pytest.mark.parametrize("name", ["answers.csv", "sheet-07.html", "solutions-01.html"])
def test_a_file_of_another_program_is_not_replaced(name: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / name).write_text("the marks of the last class")
    error = said(["exercise", "L4.7", "--class", "2", "--out", str(tmp_path)], capsys, 1)[1]
    assert f"{name} is not a file of an earlier run" in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "the marks of the last class"


def test_an_interrupted_writing_leaves_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "class"
    first = class_files(["L4.7"], 2)
    write_files(out, first, OWN, MARK)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("triptych.checkpoints.save.put_in_place", full)
    with pytest.raises(Exception, match="No space left on device"):
        write_files(out, class_files(["L4.8"], 2), OWN, MARK)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first
    assert [path.name for path in tmp_path.iterdir()] == ["class"]


@pytest.mark.heavy
def test_two_processes_write_one_directory(tmp_path: Path) -> None:
    """What is there at the end is wholly that of one of them."""
    out, program = tmp_path / "class", [sys.executable, "-m", "triptych", "exercise"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    for _ in range(3):
        running = [
            subprocess.Popen(
                [*program, name, "--class", "8", "--out", str(out)], env=environment, stderr=subprocess.PIPE
            )
            for name in ("L4.7", "L4.8")
        ]
        errors = [process.communicate()[1] for process in running]
        assert any(process.returncode == 0 for process in running)
        for process, error in zip(running, errors, strict=True):
            assert process.returncode in (0, 1)
            assert b"Traceback" not in error
        there = {path.name: path.read_bytes() for path in out.iterdir()}
        assert there in (class_files(["L4.7"], 8), class_files(["L4.8"], 8))
        assert [path.name for path in tmp_path.iterdir()] == ["class"]


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--class", "0"], 2, "0 is not in the range 1<=x<=1000"),
        (["--class", "-1"], 2, "-1 is not in the range"),
        (["--class", "abc"], 2, "'abc' is not an integer of 1 or more"),
        (["--class", "1000000"], 2, "1000000 is not in the range"),
        (["L4.7", "--class", "0"], 2, "0 is not in the range"),
        (["L4.7", "--class", "2", "--answer", "1"], 2, "leave --answer out"),
        (["L4.7", "--class", "2", "--solutions"], 2, "leave --solutions out"),
        (["L4.7", "--class", "2", "--save", "a.html"], 2, "leave --save out"),
        (["L4.7", "--out", "class"], 2, "--out is for --class"),
        (["--out", "class"], 2, "--out is for --class"),
        (["L7", "--class", "2"], 1, "no exercise 'L7'"),
        (["L4.7", "--class", "2", "--out", "file"], 1, "file is a file"),
        (["L4.7", "--class", "2", "--out", "."], 1, "holds the working directory"),
        (["L4.7", "--class", "2", "--out", "file/below"], 1, "cannot write"),
    ],
)
def test_misuses_are_one_line_and_write_nothing(
    arguments: list[str], code: int, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    error = said(["exercise", *arguments], capsys, code)[1]
    assert error.count("\n") == 1
    assert problem in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert Path("file").read_text() == "mine"


def test_a_lecture_is_a_name(tmp_path: Path, capsys: Captured) -> None:
    shown = said(["exercise", "l1", "L4.2"], capsys)[0]
    assert re.findall(r"^(L\d\.\d+): ", shown, re.MULTILINE) == [*exercises.LECTURES["L1"]]
    assert main(["exercise", "L3", "--save", str(tmp_path / "sheet.html")]) == 0
    page = (tmp_path / "sheet.html").read_text("utf-8")
    assert "L4.13: " in page
    assert "L4.12: " not in page
