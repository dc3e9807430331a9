"""Labs over seeds and with other sizes: the spread, results that are kept and resume, and what each lab declares."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cli_models import Captured, said
from test_page import Reader
from triptych.cli import main
from triptych.errors import InputError
from triptych.page import AttentionMap, AttentionSection, Curve, Facts, MatrixSection, Prose, Sample, Samples
from triptych.page import TableSection as Table
from triptych_lectures import labs
from triptych_lectures.commands.lab import own_sizes
from triptych_lectures.labs import LABS
from triptych_lectures.labs.kept_results import KeptResults, SeedRun
from triptych_lectures.labs.lab import Check, Clause, Lab, LabResult, Setup, size, size_rows
from triptych_lectures.labs.seeds import combined


class Notes:
    """The runs of a lab; seeds in `fails` miss a criterion, a seed in `stops` is interrupted."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.fails: set[int] = set()
        self.stops: set[int] = set()


SHOWN = (
    Table("numbers", ("n", "square"), [["2", "4"]]),
    Facts("facts", [("a", "b")]),
    Curve("a curve", "n", "n²", {"squares": [(2.0, 4.0), (3.0, math.inf)]}, {"one": 1.0}, "xy"),
    AttentionSection("a map", "", [AttentionMap("decoder", 0, ["a", "b"], ["a", "b"], np.eye(2)[None])]),
    Samples("texts", [Sample(None, "written", "hello")]),
    Prose("words", "Some words."),
)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Notes:
    """The only two labs: `counts`, which has sizes, and `plain`, which has none."""
    monkeypatch.chdir(tmp_path)
    notes = Notes()

    class CountsLab(Lab):
        name = "counts"
        falsified_by = "If not. Or so."

        steps: int = size(100, "training steps", full=1000)
        rates: tuple[float, ...] = size((0.1, 0.2), "learning rates")

        def run(self, setup: Setup) -> LabResult:
            if setup.seed in notes.stops:
                raise KeyboardInterrupt
            notes.ran.append((setup.seed, self.steps))
            measured = -1.0 if setup.seed in notes.fails else float(setup.seed)
            checks = (
                Check(f"head {setup.seed} of {self.steps} steps reads", measured, least=0.0),
                Check("always", 1.0, 1.0, 1.0),
            )
            return LabResult("How much?", (Clause(f"It was {measured:g}.", checks),), SHOWN)

    class PlainLab(Lab):
        name = "plain"
        seeds = 1
        falsified_by = ""

        def run(self, setup: Setup) -> LabResult:
            return LabResult("Plain?", (Clause("Yes.", (Check("it holds", 1.0, least=0.0),)),), ())

    for name in list(LABS):
        monkeypatch.delitem(LABS, name)
    for kind in (CountsLab, PlainLab):
        module = ModuleType(f"triptych_lectures.labs.{kind.name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(LABS, kind.name, f"what {kind.name} is about")
    monkeypatch.setitem(labs.INPUTS, "counts", ("data",))
    return notes


def kept_files() -> list[Path]:
    return sorted(Path("runs/labs").glob("*.json"))


def last_line(capsys: Captured) -> str:
    return capsys.readouterr().out.splitlines()[-1]


# ---------------------------------------------------------------- sizes


def test_sizes_of_the_command_line_reach_the_lab(lab: Notes, capsys: Captured) -> None:
    assert main(["lab", "counts", "--full"]) == 0
    assert main(["lab", "counts", "--full", "--set", "steps=7", "--set", "rates=0.5"]) == 0
    assert "head 0 of 7 steps reads" in last_line(capsys)
    assert [steps for _, steps in lab.ran] == [1000, 7]


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["counts", "--set", "stepps=3"], 1, "this lab has no size 'stepps' (did you mean 'steps'?)"),
        (["counts", "--set", "steps=3", "--set", "steps=4"], 2, "--set steps is given twice: 3 and 4"),
        (["counts", "--set", "steps"], 2, "--set steps: write NAME=VALUE"),
        (["counts", "--set", "steps=few"], 1, "size steps: 'few' is not of type int"),
        (["counts", "--set", "rates="], 1, "size rates: '' is not of type float"),
        (["plain", "--set", "steps=3"], 1, "the lab plain has no sizes"),
        (["all", "--set", "stepps=3"], 1, "no lab has a size 'stepps' (did you mean 'steps'?)"),
        (["counts", "--seeds", "0"], 2, "--seeds"),
        (["counts", "--seed", str(10**20)], 2, "--seed"),
        (["counts", "--seed", str(2**31 - 1), "--seeds", "2"], 2, "goes beyond 2147483647"),
        (["--seeds", "2"], 2, "--seeds needs the NAME of a lab"),
        (["--sizes"], 2, "--sizes needs the NAME of a lab"),
        (["cuonts", "--sizes"], 1, "no lab 'cuonts' (did you mean 'counts'?)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_size_that_cannot_be_is_one_line(
    argv: list[str], status: int, says: str, lab: Notes, capsys: Captured
) -> None:
    out, err = said(["lab", *argv], capsys, status)
    assert not out
    assert says in " ".join(err.split())
    assert not lab.ran


def test_sizes_are_listed(lab: Notes, capsys: Captured) -> None:
    shown = said(["lab", "counts", "--sizes", "--set", "steps=7"], capsys)[0]
    assert "If not. Or so." in shown
    assert re.search(r"steps +100 +1000 +7 +training steps", shown)
    assert re.search(r"rates +0\.1,0\.2 +0\.1,0\.2 +0\.1,0\.2 +learning rates", shown)
    counts, plain = json.loads(said(["lab", "all", "--sizes", "--json"], capsys)[0])
    assert (counts["name"], counts["recorded_seeds"], plain["recorded_seeds"], plain["sizes"]) == ("counts", 10, 1, [])
    assert counts["sizes"][0] == {
        "name": "steps", "default": 100, "full": 1000, "value": 100, "about": "training steps"
    }  # fmt: skip
    assert not lab.ran


def test_sizes_of_all_go_to_the_labs_that_have_them(lab: Notes, capsys: Captured) -> None:
    assert main(["lab", "all", "--set", "steps=3", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["counts", "plain"]
    assert lab.ran == [(0, 3)]


# ---------------------------------------------------------------- seeds


def test_seeds_show_the_spread_of_every_criterion(lab: Notes, capsys: Captured) -> None:
    out = said(["lab", "counts", "--seeds", "3", "--seed", "2", "--report", "page.html"], capsys)[0]
    assert out.splitlines()[-1] == "PASS: 3 of 3 seeds pass"
    assert lab.ran == [(2, 100), (3, 100), (4, 100)]
    assert re.search(r"3 of 3 +head … of 100 steps reads +3 \(2 to 4\) +at least 0", out)
    assert re.search(r"head … of 100 steps reads +2 +3 +4", out)
    assert "It was 2." in out
    assert "The figures in these sentences are of seed 2." in out
    page = Reader(Path("page.html").read_text(encoding="utf-8"))
    assert [one["kind"] for one in page.sections()][:3] == ["verdict", "table", "table"]
    assert "Seeds 2 to 4, triptych" in Path("page.html").read_text(encoding="utf-8")


def test_one_seed_that_fails_fails(lab: Notes, capsys: Captured) -> None:
    lab.fails = {1}
    assert main(["lab", "counts", "--seeds", "3"]) == 1
    expected = "FAIL: 2 of 3 seeds pass; head … of 100 steps reads: 0 (-1 to 2), at least 0 in 2 of 3"
    assert last_line(capsys) == expected
    counts, plain = json.loads(said(["lab", "all", "--seeds", "2", "--json"], capsys, 1)[0])
    assert [one["passed"] for one in counts["seeds"]] == [True, False]
    check = counts["conclusion"][0]["checks"][0]
    values = {name: check[name] for name in ("measured", "smallest", "largest", "values", "held", "passed")}
    assert values == {
        "measured": -0.5, "smallest": -1.0, "largest": 0.0, "values": [0.0, -1.0], "held": 1, "passed": False
    }  # fmt: skip
    assert plain["passed"]


def test_a_run_that_was_interrupted_continues(lab: Notes, capsys: Captured) -> None:
    lab.stops = {2}
    assert "the same command continues" in said(["lab", "counts", "--seeds", "4"], capsys, 130)[1]
    assert len(kept_files()) == 2
    lab.stops, lab.ran = set(), []
    assert main(["lab", "counts", "--seeds", "4", "--json"]) == 0
    assert lab.ran == [(2, 100), (3, 100)]
    again = json.loads(capsys.readouterr().out)
    assert [one["kept"] for one in again["seeds"]] == [True, True, False, False]


def test_a_result_is_kept_for_its_own_settings_only(
    lab: Notes, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    text = Path("text.txt")
    text.write_text("some words", encoding="utf-8")

    def runs_again(*options: str) -> bool:
        lab.ran.clear()
        assert main(["lab", "counts", "--seeds", "1", *options]) == 0
        return bool(lab.ran)

    assert runs_again()
    assert not runs_again()
    for options in (["--seed", "1"], ["--set", "steps=3"], ["--full"], ["--data", "text.txt"], ["--out", "other"]):
        assert runs_again(*options)
        assert not runs_again(*options)
    text.write_text("some other words", encoding="utf-8")
    assert runs_again("--data", "text.txt")
    monkeypatch.setattr("triptych_lectures.labs.kept_results.package_digest", lambda: "of a changed file")
    assert runs_again()
    capsys.readouterr()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: "null",
        lambda text: text.replace('"checks"', '"cheques"'),
        lambda text: text.replace('"measured": 0.0', '"measured": "many"'),
        lambda text: text.replace('"seed": 0', '"seed": 1'),
        lambda text: text.replace('"kind": "curve"', '"kind": "knot"'),
        lambda text: text.replace('"title": "a map"', '"name": "a map"'),
    ],
)
def test_a_damaged_file_runs_again_and_is_replaced(damage: Callable[[str], str], lab: Notes, capsys: Captured) -> None:
    assert main(["lab", "counts", "--seeds", "1"]) == 0
    [file] = kept_files()
    whole = file.read_text(encoding="utf-8")
    assert damage(whole) != whole
    file.write_text(damage(whole), encoding="utf-8")
    lab.ran.clear()
    assert main(["lab", "counts", "--seeds", "1"]) == 0
    assert lab.ran == [(0, 100)]
    note = " ".join(capsys.readouterr().err.split())
    assert "is damaged (" in note
    assert json.loads(file.read_text(encoding="utf-8"))["result"] == json.loads(whole)["result"]


def test_a_kept_result_is_the_result(lab: Notes, tmp_path: Path) -> None:
    """Also where numbers are not finite; a kind of section that is not kept says so."""
    kept, setup = KeptResults(tmp_path, "of these sources", pytest.fail), Setup(seed=3)
    checks = (Check("a", math.nan, most=1.0), Check("b", math.inf, least=0.0), Check("c", -0.5, most=0.0))
    result = LabResult("What?", (Clause("That.", checks),), SHOWN)
    kept.write("counts", setup, SeedRun(3, 1.5, result))
    again = kept.read("counts", setup)
    assert again.result.to_dict() == result.to_dict()
    assert [str(check.measured) for check in again.result.checks] == ["nan", "inf", "-0.5"]
    other = dataclasses.replace(result, sections=(MatrixSection("a matrix", "", ["x"], ["y"], [["1"]], [[1.0]]),))
    kept.write("counts", setup, SeedRun(3, 1.5, other))
    again = kept.read("counts", setup)
    assert [section.kind for section in again.result.sections] == ["prose"]


def test_two_processes_in_one_folder_write_whole_files(lab: Notes, tmp_path: Path) -> None:
    """The second to finish replaces the file of the first; no other file is left."""
    setup, run = Setup(), SeedRun(0, 1.0, labs.run("counts"))
    first, second = (KeptResults(tmp_path / "results", "of these sources", pytest.fail) for _ in range(2))
    first.write("counts", setup, run)
    second.write("counts", setup, run)
    assert first.read("counts", setup) is not None
    assert len(list((tmp_path / "results").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_one_line(lab: Notes, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    kept = KeptResults(tmp_path / "taken", "of these sources", pytest.fail)
    with pytest.raises(InputError, match="the result of seed 0 cannot be written"):
        kept.write("counts", Setup(), SeedRun(0, 1.0, labs.run("counts")))


def seed_run(seed: int, *checks: Check) -> SeedRun:
    return SeedRun(seed, 1.0, LabResult("?", (Clause("!", checks),), ()))


def test_criteria_that_not_all_seeds_have_are_matched_by_their_claims() -> None:
    common, other = Check("a", 1.0, least=0.0), Check("b", 2.0, least=3.0)
    result = combined([seed_run(0, common, other), seed_run(1, dataclasses.replace(common, measured=3.0))])
    assert [(check.claim, check.values, check.word) for check in result.spread] == [
        ("a", (1.0, 3.0), "2 of 2"), ("b", (2.0,), "0 of 1")
    ]  # fmt: skip
    assert not result.passed


def test_a_criterion_without_a_bound_is_refused() -> None:
    """It would be met by anything."""
    with pytest.raises(ValueError, match=r"'a' has no bound"):
        Check("a", 1.0)


def test_what_numpy_measured_is_plain_json() -> None:
    assert json.loads(json.dumps(Check("a", np.float64(1), least=np.float64(0)).to_dict()))["passed"] is True


def test_a_measurement_that_is_no_number_is_no_median() -> None:
    result = combined([seed_run(i, Check("a", x, least=0.0)) for i, x in enumerate((1.0, math.nan, 2.0))])
    assert math.isnan(result.spread[0].measured)
    assert not result.passed
    json.dumps(result.to_dict(), allow_nan=False)


def test_bounds_that_differ_between_seeds_are_those_of_each() -> None:
    result = combined([seed_run(0, Check("a", 1.0, most=2.0)), seed_run(1, Check("a", 3.0, most=4.0))])
    assert result.passed
    assert result.spread[0].criterion == "at most …"


# ---------------------------------------------------------------- what the labs declare

REAL = list(LABS)


@pytest.mark.parametrize("name", REAL)
def test_every_lab_declares_its_sizes_and_what_falsifies_it(name: str) -> None:
    kind = labs.lab_class(name)
    assert size_rows(kind, Setup()), "a lab has sizes"
    assert all(row.about and not row.about[0].isspace() for row in size_rows(kind, Setup()))
    assert len(re.findall(r"[.?!](?: |$)", kind.falsified_by)) >= 2, "two sentences"
    assert kind.seeds in (1, 10)


def test_sizes_that_do_not_fit_together_are_one_line() -> None:
    for name, sizes in {
        "scaling": {"widths": "4"},
        "additive-vs-dot": {"width": 8},
        "heads-vs-width": {"heads": "2,4"},
        "bottleneck": {"lengths": "1,40"},
        "depth": {"depths": "4"},
        "induction": {"vocab": 8},
        "mask-leak": {"length": 1000},
        "alignment": {"longest": 40},
        "bank": {"ambiguous": "spring"},
        "quadratic": {"long": "2048,16384"},
        "kv-cache": {"lengths": "64,100"},
        "gradients": {"heads": 5},
    }.items():
        with pytest.raises(InputError, match="size"):
            own_sizes([name], sizes)


def test_a_statement_that_fails_in_some_seeds_is_told_with_its_rate() -> None:
    fails = Check("a", 1.0, least=5.0)
    runs = [seed_run(3, Check("a", 7.0, least=5.0)), seed_run(4, fails), seed_run(5, fails)]
    result = combined(runs)
    assert result.meaning == (
        "In 1 of 3 seeds (95% interval of the rate: 0.06 to 0.79) this held. Seed 3: ! Seed 4: Not so in this run: a is"
        " 1, and the claim asks for at least 5. The figures in these sentences are of seed 3."
    )
    [clause] = result.to_dict()["conclusion"]
    assert (clause["held"], clause["held_in"]) == (False, 1)
    assert combined(runs[:1]).meaning == "!"
