"""What all labs share: the catalogue, the command, its files, and a page that holds them all."""

import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cli_models import Captured, checkpoint, refused, said
from test_page import Reader
from triptych.cli import main
from triptych.errors import InputError, MissingExecutableError
from triptych.page import AttentionMap, AttentionSection, Curve, Facts, Prose, Sample, Samples, TableSection
from triptych_lectures import labs
from triptych_lectures.commands import lab as lab_command
from triptych_lectures.labs import LABS
from triptych_lectures.labs.lab import Check, Clause, Lab, LabResult, Setup, rate_interval, size

Run = Callable[[Setup], LabResult]


def good(setup: Setup) -> LabResult:
    setup.progress("counting")
    sections = (
        TableSection("numbers", ("n", "square"), [["2", "4"], ["3", "9"]]),
        Facts("facts", [("seed", str(setup.seed)), ("model", str(setup.model)), ("data", str(setup.data))]),
        Curve("a curve", "n", "n²", {"squares": [(2.0, 4.0), (3.0, 9.0)]}, {}, "xy"),
        AttentionSection("a map", "", [AttentionMap("decoder", 0, ["a", "b"], ["a", "b"], np.eye(2)[None])]),
        Samples("texts", [Sample(None, "said", "hello \x1b[31m")]),
        Prose("words", "Some words."),
    )
    return LabResult("Are squares square?", (Clause("They are.", (Check("two squared", 4.0, 4.0, 4.0),)),), sections)


def bad(setup: Setup) -> LabResult:
    checks = (Check("a thing that holds", 1.0, most=2.0), Check("a thing that does not", math.nan, least=0.5))
    return LabResult("Does it?", (Clause("It does not.", checks),), (TableSection("t", ("x",), [["1"]]),))


def broken(setup: Setup) -> LabResult:
    raise InputError("the text is empty; give another")


def without_program(setup: Setup) -> LabResult:
    raise MissingExecutableError("the program speak-up is not installed; on Debian: apt-get install speak-up")


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the labs by these."""

    def put(**runs: Run) -> None:
        for name in list(LABS):
            monkeypatch.delitem(LABS, name)
        for name, run in runs.items():
            listed, module = name.replace("_", "-"), ModuleType(f"triptych_lectures.labs.{name}")
            type("AnyLab", (Lab,), {"name": listed, "run": lambda self, setup, run=run: run(setup)})
            monkeypatch.setitem(sys.modules, module.__name__, module)
            monkeypatch.setitem(LABS, listed, f"what {name} is about")
            monkeypatch.setitem(labs.INPUTS, listed, ("model", "data"))

    return put


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", LABS)
def test_every_lab_of_the_catalogue_is_there(name: str) -> None:
    assert labs.lab_class(name).name == name


@pytest.mark.parametrize("name", LABS)
def test_the_inputs_of_a_lab_are_those_its_file_reads(name: str) -> None:
    source = Path(inspect.getfile(labs.lab_class(name))).read_text("utf-8")
    reads = {"model": "setup.model" in source or "from .pretrained" in source, "data": "setup.data" in source}
    assert labs.INPUTS.get(name, ()) == tuple(kind for kind, read in reads.items() if read)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["scaling", "--model", "m.gguf"], "the lab scaling does not use --model; these do: kv-cache, "),
        (["bank", "--data", "shakespeare"], "the lab bank does not use --data; these do: mask-leak, alignment"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_input_that_a_lab_does_not_use_is_one_line(argv: list[str], says: str, capsys: Captured) -> None:
    assert refused(["lab", *argv], capsys).startswith(f"error: {says}")


def test_the_list_names_every_lab(capsys: Captured) -> None:
    shown = said(["lab"], capsys)[0]
    assert all(name in shown and about in shown for name, about in LABS.items())
    assert {one["name"]: one["about"] for one in json.loads(said(["lab", "--json"], capsys)[0])} == LABS


@pytest.mark.parametrize(("name", "says"), [("scalin", "did you mean 'scaling'"), ("zzz", "`triptych lab` lists them")])
def test_an_unknown_lab_is_one_line(name: str, says: str, capsys: Captured) -> None:
    error = refused(["lab", name], capsys)
    assert error.startswith(f"error: no lab '{name}'")
    assert says in error
    with pytest.raises(InputError, match=f"no lab '{name}'"):
        labs.run(name)
    assert not Path("runs").exists()


def test_a_lab_that_passes(catalogue: Callable[..., None], capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    catalogue(of_squares=good)
    Path("d.txt").write_text("words", encoding="utf-8")
    given = ["--seed", "7", "--model", "m.gguf", "--data", "d.txt", "--out", "pictures", "--report", "page.html"]
    out, err = said(["lab", "of-squares", *given], capsys)
    assert out.splitlines()[-1] == "PASS: two squared: 4 (exactly 4)"
    for text in ("Are squares square?", "square", "9", "7", "m.gguf", "d.txt", "hello", "Some words.", "They are."):
        assert text in out
    assert "\x1b" not in out
    assert "counting" in err
    plots = sorted(p.name for p in Path("pictures").iterdir())
    assert plots == ["of-squares-2.png", "of-squares-2.svg", "of-squares.png", "of-squares.svg"]
    for plot in Path("pictures").glob("*.svg"):
        assert f">triptych lab of-squares {' '.join(given)}<" in plot.read_text("utf-8")
    page = Reader(Path("page.html").read_text(encoding="utf-8"))
    assert [one["kind"] for one in page.sections()] == [
        "verdict", "table", "facts", "curve", "attention", "samples", "prose"
    ]  # fmt: skip


def test_a_lab_that_fails(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(worse=bad)
    assert main(["lab", "worse"]) == 1
    out, _ = capsys.readouterr()
    assert out.splitlines()[-1] == "FAIL: a thing that does not: nan (at least 0.5)"
    [held, missed] = [line.split()[0] for line in out.splitlines() if line.split()[:1] in (["ok"], ["FAILED"])][:2]
    assert (held, missed) == ("ok", "FAILED")


def test_a_lab_that_cannot_run_is_one_line(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(hopeless=broken)
    assert said(["lab", "hopeless"], capsys, 1)[1].splitlines()[-1] == "error: the text is empty; give another"


def test_the_word_of_the_bank_must_be_one_token() -> None:
    with pytest.raises(InputError, match=r"'bank' as one and the same token .* in a model of letters it is several"):
        labs.run("bank", Setup(model=str(checkpoint("decoder"))))


def test_a_failure_at_other_sizes_says_so(catalogue: Callable[..., None], capsys: Captured) -> None:
    sentence = "the criteria are meant for the sizes of the lab"
    assert sentence in said(["lab", "scaling", "--set", "widths=4,8"], capsys, 1)[1]
    assert sentence not in said(["lab", "scaling", "--set", "rows=9"], capsys)[1]
    catalogue(worse=bad)
    assert sentence not in said(["lab", "worse"], capsys, 1)[1]


def test_one_lab_as_json(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(worse=bad)
    out, err = said(["lab", "worse", "--json"], capsys, 1)
    result = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (result["name"], result["passed"], result["plots"]) == ("worse", False, [])
    assert [check["passed"] for check in result["conclusion"][0]["checks"]] == [True, False]
    assert [check["measured"] for check in result["conclusion"][0]["checks"]] == [1.0, None]
    assert result["sections"][0]["rows"] == [["1"]]
    assert "error" not in err


def test_all_goes_on_over_failures(catalogue: Callable[..., None], capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    catalogue(hopeless=broken, worse=bad, squares=good)
    out, err = said(["lab", "all", "--report", "labs.html"], capsys, 1)
    assert out.splitlines()[-1].startswith("FAIL: 1 of 3 labs pass, in ")
    assert out.splitlines()[-1].endswith("failed: hopeless, worse")
    assert "the text is empty" in out
    assert "squares: counting" in err
    plots = sorted(p.name for p in Path("runs/labs").iterdir())
    assert plots == ["squares-2.png", "squares-2.svg", "squares.png", "squares.svg"]
    page = Reader(Path("labs.html").read_text(encoding="utf-8"))
    sections = page.sections()
    assert [(one["title"], one["passed"]) for one in sections] == [
        ("hopeless", False), ("worse", False), ("squares", True)
    ]  # fmt: skip
    assert [inner["kind"] for inner in sections[2]["sections"]][:3] == ["verdict", "table", "facts"]
    assert sections[0]["sections"][0]["remarks"] == "the text is empty; give another"
    assert [text for text in page.inside("i") if text in ("PASS", "FAIL")] == ["FAIL", "FAIL", "PASS"] * 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ZeroDivisionError("division by zero\nand more"), "unexpected ZeroDivisionError: division by zero"),
        (AssertionError(), "unexpected AssertionError: no message"),
        (MemoryError(), "unexpected MemoryError: no message"),
    ],
)
def test_a_bug_in_one_lab_does_not_lose_the_others(
    error: Exception, line: str, catalogue: Callable[..., None], capsys: Captured
) -> None:
    def buggy(setup: Setup) -> LabResult:
        raise error

    catalogue(before=good, buggy=buggy, after=good)
    result = json.loads(said(["lab", "all", "--report", "labs.html", "--json"], capsys, 1)[0])
    assert [(one["name"], one["passed"]) for one in result] == [("before", True), ("buggy", False), ("after", True)]
    assert result[1]["verdict"] == f"FAIL: {line}"
    chapters = Reader(Path("labs.html").read_text(encoding="utf-8")).sections()
    assert [one["passed"] for one in chapters] == [True, False, True]
    assert chapters[1]["sections"][0]["remarks"] == line


def test_a_lab_whose_program_is_not_installed_is_skipped(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(spoken=without_program, squares=good)
    out, err = said(["lab", "all", "--report", "labs.html"], capsys)
    assert out.splitlines()[-1].startswith("PASS: 1 of 1 labs pass, in ")
    assert out.splitlines()[-1].endswith("; 1 skipped: spoken")
    assert "the program speak-up is not installed" in out
    assert re.search(r"^skipped  spoken  .*^ok       squares  ", err, re.DOTALL | re.MULTILINE)
    page = Reader(Path("labs.html").read_text(encoding="utf-8"))
    assert [one["passed"] for one in page.sections()] == [None, True]
    assert [text for text in page.inside("i") if text in ("PASS", "FAIL", "SKIP")] == ["SKIP", "PASS"] * 2
    assert "speak-up is not installed" in str(page.sections()[0]["sections"])
    result = json.loads(said(["lab", "all", "--json"], capsys)[0])
    assert [(one["passed"], one["skipped"]) for one in result] == [(False, True), (True, False)]
    assert result[0]["verdict"].startswith("SKIP: the program speak-up is not installed")


def test_a_skipped_lab_hides_no_failure(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(spoken=without_program, worse=bad, squares=good)
    last = said(["lab", "all"], capsys, 1)[0].splitlines()[-1]
    assert last.startswith("FAIL: 1 of 2 labs pass, in ")
    assert last.endswith("; failed: worse; 1 skipped: spoken")


def test_a_lab_that_is_asked_for_by_name_is_not_skipped(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(spoken=without_program)
    assert main(["lab", "spoken"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the program speak-up is not installed")


def test_all_is_interrupted_as_a_whole(catalogue: Callable[..., None], capsys: Captured) -> None:
    def stopped(setup: Setup) -> LabResult:
        raise KeyboardInterrupt

    catalogue(before=good, stopped=stopped, after=bad)
    assert "worse" not in said(["lab", "all"], capsys, 130)[0]


def test_all_that_passes(catalogue: Callable[..., None], capsys: Captured) -> None:
    catalogue(squares=good, again=good)
    result = json.loads(said(["lab", "all", "--json"], capsys)[0])
    assert [(one["name"], one["passed"]) for one in result] == [("squares", True), ("again", True)]


def test_without_matplotlib_there_are_tables_and_a_note(
    catalogue: Callable[..., None], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    catalogue(squares=good)
    out, err = said(["lab", "squares"], capsys)
    assert out.splitlines()[-1].startswith("PASS: two squared")
    assert "pip install matplotlib" in err
    monkeypatch.setattr(lab_command, "LONGEST_VERDICT", 10)
    assert said(["lab", "squares"], capsys)[0].splitlines()[-1].startswith("PASS: each of the 1 criteria")
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_made_ends_it_before_the_work(catalogue: Callable[..., None], capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    Path("taken").write_text("", encoding="utf-8")
    catalogue(hopeless=broken)
    assert "--out taken is a file; give a directory" in said(["lab", "hopeless", "--out", "taken"], capsys, 1)[1]
    assert "/nowhere: No such directory" in said(["lab", "hopeless", "--report", "/nowhere/x.html"], capsys, 1)[1]


class StepsLab(Lab):
    steps: int = size(100, "training steps", full=1000)
    rate: float = size(0.1, "learning rate")
    depths: tuple[int, ...] = size((4, 16), "layers of each model")


def test_sizes_of_a_run_replace_those_of_the_lab() -> None:
    assert StepsLab.sized(Setup()) == StepsLab()
    assert StepsLab.sized(Setup(full=True)) == StepsLab(steps=1000)
    setup = Setup(sizes={"steps": "20", "rate": 1, "depths": "2,8,32"}, full=True)
    assert StepsLab.sized(setup) == StepsLab(steps=20, rate=1.0, depths=(2, 8, 32))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"step": 3}, r"no size 'step' \(did you mean 'steps'\?\); it has: steps, rate, depths"),
        ({"steps": 1.5}, "size steps: '1.5' is not of type int"),
        ({"steps": 0}, "size steps: '0' must be above 0"),
        ({"rate": "nan"}, "size rate: 'nan' must be above 0 and finite$"),
        ({"rate": -1}, "size rate: '-1' must be above 0 and finite$"),
        ({"depths": "4,,8"}, "size depths: '' is not of type int"),
    ],
)
def test_a_size_that_cannot_be_is_one_line(sizes: dict[str, int | float | str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        StepsLab.sized(Setup(sizes=sizes))


# ---------------------------------------------------------------- conclusions


def test_a_statement_is_said_only_where_its_criteria_are_met():
    met, missed = Check("the share copied", 0.93, least=0.8), Check("the share left", 0.93, most=0.25)
    assert Clause("It copies.", (met,)).text == "It copies."
    both = Clause("Without the head it copies nothing.", (met, missed))
    assert not both.held
    assert both.text == "Not so in this run: the share left is 0.93, and the claim asks for at most 0.25."
    instead = Clause("Nothing is left.", (missed,), "The head is not needed.")
    assert instead.text == "The head is not needed: the share left is 0.93, and the claim asks for at most 0.25."
    nan = Clause("It copies.", (Check("the share copied", math.nan, least=0.8),))
    assert "the share copied is nan" in nan.text


def test_a_statement_that_no_criterion_decides_is_refused():
    with pytest.raises(ValueError, match="no criterion decides 'It is so"):
        Clause("It is so.", ())


def test_the_meaning_of_a_result_follows_its_criteria():
    result = LabResult("?", (Clause("A.", (Check("a", 1, 1),)), Clause("B.", (Check("b", 0, 1),))), (), "All of one.")
    assert result.meaning == "A. Not so in this run: b is 0, and the claim asks for at least 1. All of one."
    assert [check.claim for check in result.checks] == ["a", "b"]
    assert not result.passed
    assert not LabResult("?", (), ()).passed


@pytest.mark.parametrize(
    ("held", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],  # Newcombe 1998
)
def test_the_interval_of_a_rate(held: int, count: int, low: float, high: float):
    assert rate_interval(held, count) == pytest.approx((low, high), abs=1e-4)
