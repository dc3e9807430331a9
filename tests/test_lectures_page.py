"""The pages of the lectures are complete and as new as what they report: each kind of neglect is shown to be noticed.

Command lines in all of the documentation are read with the command line's own parser, without being run.
"""

import ast
import copy
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import test_lectures
from cli_models import Captured
from programs import program
from triptych.cli.app import app
from triptych.explain import EXAMPLES, worked
from triptych_lectures.labs import LABS, corrections
from triptych_lectures.labs.lab import Check, Clause, LabResult, Setup
from triptych_lectures.labs.lookup_and_order import SoftVsHardLab

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ROOT / "src" / "triptych" / "page"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
IDS = {
    "concept": [
        "soft-lookup", "scaled-dot-product", "additive", "self-cross-masked", "heads", "masks", "order", "block",
        "families", "objectives", "generation", "kv-cache", "quadratic", "head-roles", "step-by-step", "recurrence",
        "not-explanation", "economy", "other-modalities", "backward",
        "norm-placement", "residual-scaling", "dropout-places", "embedding-scale",
        "trained-scale", "trained-heads", "capacity", "activations", "padding",
        "in-context", "exposure-bias", "trained-scores", "cosine-scores", "convolution", "probing", "reading",
        "positions", "masked-objectives", "subwords", "checkpointing",
    ],
    "example": [str(number) for number in test_lectures.EXAMPLES],
    "correction": [
        "tie", "missing-parameters", "sharp", "equivariant", "minus-1e9", "identical-tokens", "cross-mask",
        "layer-norm", "t5-scale", "gpt2", "mlp-width", "mask-order", "pre-norm", "attention-norms", "value-width",
        "gpt-bert", "exposure-bias", "bert-writes", "swiglu-width",
    ],
    "exercise": [f"{lecture}.{n}" for lecture, most in (("L0", 8), ("L2", 3), ("L4", 20)) for n in range(1, most + 1)],
}  # fmt: skip
Data = dict[str, Any]
# typer brings a click of its own, which it does not export
Exit, UsageError = typer.Exit, next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
NOTE = "<!-- Made by `make lectures` from lectures.toml and lectures.results.json. -->"
sys.path.append(str(ROOT / "tools"))  # where it finds `pictures`
lectures = program("tools/lectures.py")
STALE_NOTE = program("tools/lecture_pages.py").STALE_NOTE


@pytest.fixture
def data() -> Data:
    found: Data = lectures.read_data()
    return found


@pytest.fixture
def results() -> Data:
    found: Data = lectures.read_results()
    return found


# ---------------------------------------------------------------- what must hold


def unlisted(data: Data) -> list[str]:
    """Ids that are missing, or too many, or that point to nothing."""
    wrong = [f"{kind} {name}" for kind, names in IDS.items() for name in {*names} ^ {*data[kind]}]
    pointers = ("labs", "examples", "tests", "run", "answer")
    return wrong + [name for _, name, entry in lectures.entries(data) if not any(key in entry for key in pointers)]


def without_a_command(pages: dict[str, str]) -> list[str]:
    """The headings of entries of the pages that have no Run line."""
    of_lectures = [text for page, text in pages.items() if page.startswith("lectures/")]
    entries = [entry for text in of_lectures for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]]
    return [entry.partition(" {")[0] for entry in entries if "- **Run:** `" not in entry]


def words(pages: dict[str, str]) -> tuple[int, int]:
    """Words outside folds and inside them, on the index and the pages of the lectures."""
    text = "\n".join(text for page, text in pages.items() if page.startswith("lectures"))
    inside = sum(len(fold.split()) for fold in re.findall(r"<details.*?</details>", text, re.DOTALL))
    return len(text.split()) - inside, inside


def twice(pages: dict[str, str]) -> list[str]:
    """Lines of at least eight words that stand more than once on the pages of the lectures."""
    lines = [line for page, text in pages.items() if page.startswith("lectures/") for line in text.splitlines()]
    return [line for line, count in Counter(lines).items() if count > 1 and len(line.split()) >= 8 and line != NOTE]


def unknown_tests(data: Data) -> list[str]:
    """Node ids of which there is no such file or no such function."""
    wanted = {test for _, _, entry in lectures.entries(data) for test in entry.get("tests", [])}
    return sorted(test for test in wanted if not there(test))


def there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and (not name or name in functions(path))


@cache
def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """The tests of a file."""
    nodes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in nodes if node.name.startswith("test_")}


def unheld(data: Data) -> list[str]:
    """Figures that are not numbers in the source of the entry's tests."""
    return [
        f"{name}: {figure}"
        for _, name, entry in lectures.entries(data)
        for figure in re.findall(r"(?<![\w.])-?\d[\d_.]*(?:e-?\d+)?", " ".join(quoted(entry)))
        if float(figure) not in numbers(entry["tests"])
    ]


def quoted(entry: Data) -> list[str]:
    return re.findall(r"`([^`]*)`", entry.get("figures", ""))


def numbers(tests: list[str]) -> set[float]:
    """Every literal number of these tests."""
    found = set()
    for test in tests:
        file, _, name = test.partition("::")
        for node in [functions(ROOT / file)[name]] if name else functions(ROOT / file).values():
            literals = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            found |= {float(value) for value in literals if type(value) in (int, float)}
    return found


def unparsed(commands: list[str]) -> list[str]:
    """Commands that would be refused as wrong usage, or that name a lab or an example that is not there."""
    return [command for command in commands if not parses(command)]


def parses(command: str) -> bool:
    program, *words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return all(word in targets for word in words if "=" not in word)
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    if program != "triptych" or words[0] not in known:
        return words == ["--help"]
    try:
        given = known[words[0]].make_context(words[0], words[1:]).params
    except Exit:  # --help
        return True
    except UsageError:
        return False
    lab = given["name"] if words[0] == "lab" else None
    return lab in {None, *LABS, "all", "NAME"} and given.get("example") in {None, *EXAMPLES, "NAME"}


def commands(data: Data) -> list[str]:
    return [command for _, _, entry in lectures.entries(data) for command in entry.get("run", [])]


def typed(page: str) -> Iterator[str]:
    """What a page's sessions give `triptych` and `make` to do: the part of a line that is theirs."""
    for block in CONSOLE.findall(page):
        for line in re.findall(r"^\$ (.*)", block.replace("\\\n", " "), re.MULTILINE):
            for command in re.split(r" [|<>#] ", line):
                if re.match(r"(triptych|make)\b", command) and "[...]" not in command:
                    yield command.strip()


def failed(results: Data) -> list[str]:
    return [name for kind in results.values() for name, one in kind.items() if not one["passed"]]


# ---------------------------------------------------------------- it does


def test_every_entry_is_there(data: Data) -> None:
    assert len(IDS["exercise"]) == 31
    assert len(IDS["correction"]) == len(test_lectures.CORRECTIONS)
    assert not unlisted(data)


def test_every_entry_has_a_command(data: Data, results: Data) -> None:
    assert not without_a_command(lectures.pages(data, results))


def test_the_tests_named_are_there(data: Data) -> None:
    assert not unknown_tests(data)
    told = {test.partition("::")[2] for _, _, entry in lectures.entries(data) for test in entry.get("tests", [])}
    for what, names in (test_lectures.EXAMPLES | test_lectures.CORRECTIONS).items():
        assert set(names) <= told, what


def test_figures_are_in_the_tests(data: Data) -> None:
    assert not unheld(data)


def test_shapes_beside_an_example_are_those_that_it_ends_in(data: Data) -> None:
    """Whoever runs the example sees the shapes that stand beside it, with their axes in the same order."""
    shape, compared = re.compile(r"\(\d+(?:, \d+)+\)|\d+×\d+"), 0
    for _, name, entry in lectures.entries(data):
        ends = " ".join(worked(example).outcome for example in entry.get("examples", []))
        for figure in filter(shape.fullmatch, quoted(entry) if ends else []):
            assert figure.replace(" ", "") in ends.replace(" ", ""), (name, figure)
            compared += 1
    assert compared > 10


def test_a_correction_stands_on_the_page_of_the_lecture_that_the_lab_names(data: Data) -> None:
    stated = tomllib.loads((Path(corrections.__file__).with_suffix(".toml")).read_text("utf-8"))["statements"]
    said = {name.replace("_", "-"): one["lecture"] for name, one in stated.items()}
    pages: dict[str, str] = {}  # the first lecture that lists a correction has it on its page
    for lecture, one in data["path"]["lecture"].items():
        pages = dict.fromkeys(one["corrections"], lecture) | pages
    both = pages.keys() & said
    assert len(both) > 7
    assert {name: pages[name] for name in both if pages[name] not in said[name]} == {}


def test_commands_parse(data: Data) -> None:
    assert not unparsed(commands(data))


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]), ids=lambda page: page.name)
def test_commands_of_the_documentation_parse(page: Path) -> None:
    assert not unparsed(list(typed(page.read_text("utf-8"))))


def unmarked(pages: dict[str, str]) -> dict[str, str]:
    """Pages without the marks of stale results: a result does not have to be recorded again after every change."""
    return {page: text.replace(", stale", "").replace(STALE_NOTE, "") for page, text in pages.items()}


def test_results_are_recorded_for_all_labs(data: Data, results: Data) -> None:
    assert {kind: sorted(told) for kind, told in results.items()} == lectures.wanted(data), "run `make lectures`"
    assert {*results["labs"]} == {*LABS}


def test_recorded_results_passed(results: Data) -> None:
    assert not failed(results), "mend it, and record it again"


def test_the_pages_are_what_the_generator_makes(data: Data, results: Data) -> None:
    made = lectures.pages(data, results)
    assert {str(page.relative_to(DOCS)) for page in DOCS.glob("lectures/*")} == {*made} - {
        "lectures.md",
        "learn/path.md",
    }
    assert unmarked({page: (DOCS / page).read_text("utf-8") for page in made}) == unmarked(made), "run `make lectures`"


def test_nothing_stands_twice_and_most_is_folded(data: Data, results: Data) -> None:
    pages = lectures.pages(data, results)
    outside, inside = words(pages)
    assert outside <= 12_000
    assert inside <= 12_000
    assert not twice(pages)


def off_path(data: Data) -> list[str]:
    """What the path through the lectures names and does not exist, and concepts and exercises that it leaves out."""
    steps = [step["concept"] for content in data["path"]["lecture"].values() for step in content["steps"]]
    wrong = [f"no lecture has {name}" for name in data["concept"] if name not in steps]
    chapters = re.findall(r'^    title: "(.*)"', (PAGES / "live_chapters.js").read_text("utf-8"), re.MULTILINE)
    wrong += [f"path.read {name}" for name in data["path"]["read"] if name not in data["concept"]]
    for lecture, content in data["path"]["lecture"].items():
        steps = content["steps"]
        named = {"concept": [step["concept"] for step in steps], "correction": content["corrections"]}
        named |= {kind: [one for step in steps for one in step.get(f"{kind}s", [])] for kind in ("example", "exercise")}
        wrong += [f"{lecture} {name}" for kind, names in named.items() for name in names if name not in data[kind]]
        own = {name for name in data["exercise"] if name.startswith(f"{lecture}.")}
        wrong += sorted(own - {*named["exercise"]})
        wrong += [f"{lecture} chapter {title}" for title in content["live"] if title not in chapters]
        if not (ROOT / "docs" / "notebooks" / f"{content['notebook']}.ipynb").is_file():
            wrong.append(f"{lecture} notebook {content['notebook']}")
    return wrong


def test_the_path_has_every_lecture_and_names_what_exists(data: Data) -> None:
    assert [*data["path"]["lecture"]] == ["L0", "L1", "L2", "L3", "L4"]
    assert not off_path(data)


def test_answers_of_exercises_are_folded(data: Data, results: Data) -> None:
    pages = lectures.pages(data, results)
    text = "".join(pages.values())
    assert text.count("<details") == text.count("</details>") == len(data["exercise"]) + len(results["labs"])
    for name, entry in data["exercise"].items():
        own = entry_of(pages, f"exercise-{name.lower().replace('.', '-')}")
        shown, _, hidden = own.partition("<summary>Answer")
        assert entry["asks"].strip() in shown
        assert entry["answer"].split("](")[0].strip() in hidden
        assert not set(entry.get("figures", "").split("; ")) & set(shown.split("; "))


def entry_of(pages: dict[str, str], anchor: str) -> str:
    """An entry as it stands on its page."""
    [text] = [text for page, text in pages.items() if page.startswith("lectures/") and f"{{ #{anchor} }}" in text]
    return text.partition(f"{{ #{anchor} }}")[2].partition("\n### ")[0]


def test_every_lab_stands_under_one_entry(data: Data, results: Data) -> None:
    text = "".join(lectures.pages(data, results).values())
    assert {name: text.count(f'id="lab-{name}"') for name in LABS} == dict.fromkeys(LABS, 1)


# ---------------------------------------------------------------- and each neglect would be noticed


def test_a_missing_entry_is_noticed(data: Data) -> None:
    del data["exercise"]["L4.20"]
    data["concept"]["heads"] = {"title": "points to nothing"}
    assert unlisted(data) == ["exercise L4.20", "heads"]


def test_a_path_that_leads_nowhere_is_noticed(data: Data) -> None:
    content = data["path"]["lecture"]["L2"]
    content["steps"][0] |= {"exercises": ["L2.9"], "concept": "lookup"}
    content["live"] = ["Tokens"]
    content["notebook"] = "lecture-9"
    assert off_path(data) == ["L2 lookup", "L2 L2.9", "L2.1", "L2 chapter Tokens", "L2 notebook lecture-9"]


def test_a_concept_that_the_path_leaves_out_is_noticed(data: Data) -> None:
    steps = data["path"]["lecture"]["L2"]["steps"]
    steps[:] = [step for step in steps if step["concept"] != "padding"]
    assert off_path(data) == ["no lecture has padding"]


def test_an_entry_has_the_statement_and_the_command_of_its_number(data: Data, results: Data) -> None:
    """The lab `corrections` has fourteen statements; a number of `--full` stands beside a command with it."""
    pages = lectures.pages(data, results)
    assert "Without the division softmax is too sharp" in entry_of(pages, "correction-sharp").partition("<details")[0]
    recorded = results["labs"]["depth"] | {"command": "triptych lab depth --full --seeds 10"}
    results["labs"]["depth"] = recorded
    block = entry_of(lectures.pages(data, results), "concept-block")
    assert "- **Run:** `triptych lab depth --full`," in block


def test_a_concept_of_no_lecture_is_noticed(data: Data, results: Data) -> None:
    data["concept"]["states"] = {"title": "Other than attention"}
    with pytest.raises(SystemExit, match="concept states is on no page"):
        lectures.pages(data, results)
    data["concept"]["states"]["lecture"] = "L1"
    assert "### Other than attention" in lectures.pages(data, results)["lectures/l1.md"]


def test_a_missing_test_is_noticed(data: Data) -> None:
    wrong = ["tests/test_lectures.py::test_of_nothing", "tests/test_of_nothing.py"]
    data["concept"]["heads"]["tests"] += wrong
    assert unknown_tests(data) == wrong


def test_a_figure_nobody_holds_is_noticed(data: Data) -> None:
    entry = data["example"]["2"]
    entry["figures"] = entry["figures"].replace("2.33952", "2.33951")
    assert unheld(data) == ["2: 2.33951"]


@pytest.mark.parametrize(
    "command",
    [
        "triptych lab scalin",
        "triptych lab scaling --sed 1",
        "triptych explain --example L9.1",
        "triptych explian MODEL text",
        "triptych count",
        "make lunch",
        "rm -rf site",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    assert unparsed([command, "triptych lab scaling --seed 1"]) == [command]
    if command.startswith(("triptych", "make")):
        assert list(typed(f"text\n```console\n$ echo | {command} > out\nsaid\n```\n$ triptych")) == [command]


def test_a_changed_page_is_noticed(data: Data, results: Data) -> None:
    other = copy.deepcopy(data)
    other["exercise"]["L4.2"]["answer"] += " And more."
    assert lectures.pages(other, results) != lectures.pages(data, results)


@pytest.fixture
def fresh(data: Data, results: Data) -> Data:
    """The recorded results as though no source file had changed since."""
    for kind, names in lectures.wanted(data).items():
        for name in names:
            results[kind][name]["sources"] = lectures.digest(kind, name, results[kind][name].get("entered"))
    return results


def test_a_result_of_other_sources_is_stale(
    data: Data, fresh: Data, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(lectures, "read_results", lambda: fresh)
    monkeypatch.setattr(sys, "argv", ["lectures.py", "--stale"])
    lectures.main()
    assert capsys.readouterr().out == "no result is stale\n"
    assert ", stale" not in "".join(lectures.pages(data, lectures.marked(fresh, lectures.stale(data, fresh))).values())
    fresh["labs"]["depth"]["sources"] = "of other files"
    lectures.main()
    assert capsys.readouterr().out == "labs depth\n"
    pages = lectures.pages(data, lectures.marked(fresh, lectures.stale(data, fresh)))
    text = "".join(pages.values())
    assert re.search(r"<summary>Lab depth: PASS[^<]*, stale</summary>", text)
    assert re.search(r"<summary>Lab scaling: PASS[^<,]*</summary>", text)
    assert unmarked(pages) == unmarked(lectures.pages(data, fresh))


def test_a_result_that_is_missing_is_noticed(data: Data, fresh: Data) -> None:
    del fresh["labs"]["scaling"]
    assert lectures.stale(data, fresh) == {"labs": ["scaling"], "examples": []}
    assert "lab `scaling` not recorded" in lectures.pages(data, fresh)["lectures/l0.md"]


def test_an_entry_without_a_command_is_noticed(data: Data, results: Data) -> None:
    del data["correction"]["sharp"]["run"]
    assert without_a_command(lectures.pages(data, results)) == ["Without √d softmax is too sharp, not too flat"]


def test_only_the_named_labs_run(data: Data, fresh: Data) -> None:
    results = fresh
    results["labs"]["depth"]["sources"] = results["labs"]["bank"]["sources"] = "of another file"
    assert lectures.chosen(data, results, ["depth", "scaling"], again=False) == {"labs": ["depth"], "examples": []}
    assert lectures.chosen(data, results, ["scaling"], again=True) == {"labs": ["scaling"], "examples": []}
    assert lectures.chosen(data, results, None, again=False)["labs"] == ["bank", "depth"]
    with pytest.raises(SystemExit, match="'scalin'"):
        lectures.chosen(data, results, ["scalin"], again=False)


def test_a_lab_is_recorded_over_its_seeds(
    results: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    """A recording that was interrupted continues; the page has the spread and what falsifies the claim."""
    ran: list[int] = []
    stops = [6002]

    def run(self: SoftVsHardLab, setup: Setup) -> LabResult:
        if setup.seed in stops:
            stops.clear()
            raise KeyboardInterrupt
        ran.append(setup.seed)
        return LabResult(
            "What?", (Clause("That.", (Check("seed | number", setup.seed / 10 + self.steps, least=0.0),)),), ()
        )

    for name, value in {"run": run, "full": {"steps": 1000}, "seeds": 3}.items():
        monkeypatch.setattr(SoftVsHardLab, name, value)
    monkeypatch.setattr(lectures, "SEEDS", tmp_path)
    monkeypatch.setattr(lectures, "RESULTS", tmp_path / "results.json")
    with pytest.raises(KeyboardInterrupt):
        lectures.record({"labs": ["soft-vs-hard"], "examples": []}, results, full=True)
    monkeypatch.setattr("pictures.of_lab", lambda name, result, command: None)
    lectures.record({"labs": ["soft-vs-hard"], "examples": []}, results, full=True)
    assert ran == [6000, 6001, 6002, 6000]  # the last run notes the modules whose functions it calls
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    recorded = results["labs"]["soft-vs-hard"]
    assert (recorded["seeds"], recorded["held"], recorded["sizes"]["steps"]) == (3, 3, "1000")
    assert "triptych_lectures.labs.lab" in recorded["entered"]
    assert recorded["conclusion"][0]["checks"][0]["seeds"] == ["1,600", "1600", "1600"]
    results["labs"]["soft-vs-hard"] = recorded
    page = lectures.LecturePages(lectures.read_data(), results, {}).lab("soft-vs-hard")
    assert "`triptych lab soft-vs-hard --full --seeds 3 --seed 6000`" in page
    assert "PASS (3/3 seeds)" in page
    assert "- seed | number: 1600 (1,600–1600), ≥ 0" in page
    assert "soft-vs-hard: PASS: 3 of 3 seeds pass" in capsys.readouterr().out


@pytest.mark.parametrize("off", [0.0, 0.01])
def test_a_result_is_confirmed_where_its_first_seed_measures_the_same(
    off: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(self: SoftVsHardLab, setup: Setup) -> LabResult:
        check = Check("number", setup.seed / 1e4 + changed * off, least=0.0)
        return LabResult("What?", (Clause(f"That, {('then', 'now')[changed]}.", (check,)),), ())

    changed = 0
    monkeypatch.setattr(SoftVsHardLab, "run", run)
    monkeypatch.setattr(lectures, "SEEDS", tmp_path)
    monkeypatch.setattr(lectures, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr("pictures.of_lab", lambda name, result, command: None)
    results: Data = {"labs": {}, "examples": {}}
    lectures.record({"labs": ["soft-vs-hard"], "examples": []}, results, seeds=3)
    before = copy.deepcopy(results["labs"]["soft-vs-hard"])
    results["labs"]["soft-vs-hard"]["sources"] = "of other files"
    changed = 1
    lectures.confirm(["soft-vs-hard"], results)
    after = results["labs"]["soft-vs-hard"]
    assert lectures.is_stale("labs", "soft-vs-hard", after) is bool(off)
    assert after["conclusion"][0]["text"] == ("That, then." if off else "That, now.")
    assert after["conclusion"][0]["checks"] == before["conclusion"][0]["checks"]


def test_a_failed_result_is_noticed(data: Data, results: Data) -> None:
    results["labs"]["depth"]["passed"] = False
    assert failed(results) == ["depth"]
    assert "Lab depth: FAIL" in "".join(lectures.pages(data, results).values())
