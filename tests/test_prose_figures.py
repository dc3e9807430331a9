"""Figures in prose are those of today, wherever they stand: each is compared with its source, and none is without one.

`prose_figures.toml` says which source a figure has.  What runs on real weights is marked so; the rest runs at once.
"""

import importlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import triptych
from cli_models import Captured
from test_commands import half_digit, value
from triptych.cli import main

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "lectures.toml"
GENERATED = {"path.md", "recipes.md"}  # from data that other tests hold
PAGES = [path for folder in ("learn", "concepts") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
SOURCES = ("lab", "run", "is", "constant", "call", "test", "why")
FIGURE = re.compile(  # decimals, percentages, and integers of five digits and more
    r"(?<![\w.,])(?:\d[\d,]*\.\d+(?:e-?\d+)?%?|\d+%|\d{2,3}(?:,\d{3})+|\d{1,3}(?:,\d{3}){2,})(?!\d)"
)
Entry = dict[str, Any]


def prose(text: str) -> str:
    """A page without code blocks, the targets of its links, and what a tool writes, its blanks made one."""
    text = re.sub(r"^```.*?^```|^<!-- generated.*?^<!-- end", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


@cache
def pages() -> dict[str, str]:
    """The prose of each page that is read, and of the answers of lectures.toml as one."""
    found = {path.relative_to(ROOT).as_posix(): prose(path.read_text("utf-8")) for path in PAGES}
    data = tomllib.loads(DATA.read_text("utf-8"))
    kinds = [data[kind].values() for kind in ("concept", "example", "correction", "exercise")]
    found["docs/lectures.toml"] = " ¶ ".join(prose(one.get("answer", "")) for kind in kinds for one in kind)
    return {page: text for page, text in found.items() if Path(page).name not in GENERATED}


@cache
def entries() -> list[tuple[str, Entry]]:
    data = tomllib.loads((ROOT / "tests" / "prose_figures.toml").read_text("utf-8"))
    return [(page, entry) for page, of_page in data.items() for entry in of_page]


def figures(text: str) -> list[str]:
    """The figures of a text, but for those in code of a line."""
    return FIGURE.findall(re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), text))


def places(text: str) -> Iterator[tuple[int, int, str]]:
    blank = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), text)
    for found in FIGURE.finditer(blank):
        yield found.start(), found.end(), found[0]


def without_a_source(page: str, text: str, of_page: list[Entry]) -> list[str]:
    """The figures of a page that no entry covers, each with the words around it."""
    covered = []
    for entry in of_page:
        start = text.find(entry["says"])
        while start >= 0:
            covered.append((start, start + len(entry["says"])))
            start = text.find(entry["says"], start + 1)
    return [
        f"{page}: {figure} in “{text[max(0, start - 60) : end + 30]}”"
        for start, end, figure in places(text)
        if not any(first <= start and end <= last for first, last in covered)
    ]


def differing(says: str, known: list[float]) -> list[str]:
    """The figures of `says` that none of the known numbers gives, to half a unit of the last digit."""
    wrong = []
    for figure in figures(says):
        plain = figure.rstrip("%")
        x, half = value(plain), half_digit(plain) or (0.5 if figure.endswith("%") else 0.0)
        scales = (1, 100) if figure.endswith("%") else (1,)
        if not any(abs(x - scale * one) <= 1.02 * half + 1e-12 for one in known for scale in scales):
            wrong.append(figure)
    return wrong


def recorded(entry: Entry, results: Entry) -> list[float]:
    """The measured values of the criteria that the entry names."""
    checks = [check for clause in results["labs"][entry["lab"]]["conclusion"] for check in clause["checks"]]
    found = []
    for phrase in entry["claim"].split("; "):
        chosen = [check for check in checks if phrase in check["claim"]]
        assert chosen, f"lab {entry['lab']} claims nothing about {phrase!r}"
        for check in chosen:
            found.append(value(check["measured"].split(" ")[0]))
    return found


def computed(entry: Entry) -> list[float]:
    """The values of the entry's expressions or constants."""
    known = {name: function for name, function in vars(math).items() if not name.startswith("_")}
    values = [eval(one, {"__builtins__": {}}, known) for one in entry.get("is", [])]
    for one in entry.get("constant", []):
        module, _, name = one.partition(":")
        values.append(getattr(importlib.import_module(module), name))
    return [float(one) for one in values]


@cache
def results() -> Entry:
    found: Entry = json.loads((ROOT / "docs" / "lectures.results.json").read_text("utf-8"))
    return found


def of(*sources: str) -> list[Any]:
    chosen = [(page, entry) for page, entry in entries() if any(source in entry for source in sources)]
    return [pytest.param(page, entry, id=entry["says"][:40]) for page, entry in chosen]


def printed_figures(text: str) -> list[float]:
    return [value(one) for one in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)]


def run(command: str, capsys: Captured, model: Path | None = None) -> str:
    words = shlex.split(command if model is None else command.replace("$SMOLLM2", str(model)))
    capsys.readouterr()
    assert main(words[1:]) == 0, command
    return capsys.readouterr().out


# ---------------------------------------------------------------- what must hold


@pytest.mark.parametrize("page", pages())
def test_every_figure_has_a_source(page: str) -> None:
    missing = without_a_source(page, pages()[page], [entry for name, entry in entries() if name == page])
    assert not missing, "\n".join(["enter them into tests/prose_figures.toml:", *missing])


def test_every_source_is_of_words_that_stand_there() -> None:
    for page, entry in entries():
        assert entry["says"] in pages()[page], f"{page} no longer says {entry['says']!r}"
        assert figures(entry["says"]), f"{page}: {entry['says']!r} has no figure"
        assert sum(source in entry for source in SOURCES) == 1, entry
        file, _, name = entry.get("test", "").partition("::")
        assert not file or f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), entry


@pytest.mark.parametrize(("page", "entry"), of("lab"))
def test_prose_says_what_a_lab_recorded(page: str, entry: Entry) -> None:
    assert not differing(entry["says"], recorded(entry, results())), recorded(entry, results())


@pytest.mark.parametrize(("page", "entry"), of("is", "constant"))
def test_prose_says_what_its_arithmetic_gives(page: str, entry: Entry) -> None:
    assert not differing(entry["says"], computed(entry)), computed(entry)


LIGHT = [one for one in of("run") if "explain --example" in one.values[1]["run"]]
HEAVY = [one for one in of("run") if "explain --example" not in one.values[1]["run"]]


@pytest.mark.parametrize(("page", "entry"), LIGHT)
def test_prose_says_what_is_printed(page: str, entry: Entry, capsys: Captured, unchecked: None) -> None:
    text = run(entry["run"], capsys)
    assert not differing(entry["says"], printed_figures(text)), text


@pytest.mark.heavy
@pytest.mark.weights
@pytest.mark.parametrize(("page", "entry"), HEAVY)
def test_prose_says_what_real_weights_give(
    page: str, entry: Entry, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured,
    unchecked: None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    text = run(entry["run"], capsys, smollm2_gguf)
    assert not differing(entry["says"], printed_figures(text)), text


def four_roles_of_smollm2(model: Path) -> list[float]:
    """Names of heads and effects of the table in docs/concepts/heads.md."""
    table = triptych.load(model).heads(roles=["previous", "first", "induction", "delimiter"], ablate=1)
    names = [float(f"{row.layer}.{row.head}") for rows in table.roles.values() for row in rows[:4]]
    return names + [x for one in table.together for x in (one.effect, *one.random)]


@pytest.mark.heavy
@pytest.mark.weights
def test_prose_says_what_the_library_gives(smollm2_gguf: Path) -> None:
    for name in {entry["call"] for _, entry in entries() if "call" in entry}:
        known = globals()[name](smollm2_gguf)
        for page, entry in entries():
            if entry.get("call") == name:
                assert not differing(entry["says"], known), (page, known)


# ---------------------------------------------------------------- and each neglect is noticed


def test_a_figure_without_a_source_is_noticed() -> None:
    page, text = "docs/learn/attention.md", pages()["docs/learn/attention.md"]
    assert not without_a_source(page, text, [])
    assert len(without_a_source(page, text + " The median is 0.88, that is 88% of it.", [])) == 2
    entry = {"says": "The median is 0.88"}
    assert [one[:28] for one in without_a_source(page, text + " The median is 0.88, or 88%.", [entry])] == [
        f"{page}: 88%"
    ]


def test_a_figure_of_an_older_run_is_noticed() -> None:
    """L4.3 once quoted medians of 0.88, 0.02 and 0.0001; the lab printed others."""
    entry = {"lab": "scaling", "claim": "median gradient at a query, d 2048, without"}
    check = {"claim": entry["claim"], "measured": "0.000257 (0.0001 to 0.0003)"}
    then = {"labs": {"scaling": {"conclusion": [{"checks": [check]}]}}}
    assert differing("the median is 0.0001", recorded(entry, then)) == ["0.0001"]
    assert not differing("the median is 0.0003", recorded(entry, then))
    with pytest.raises(AssertionError, match="claims nothing about 'mode'"):
        recorded(entry | {"claim": "mode"}, then)
    assert differing("ln 80 = 4.39", computed({"is": ["log(80)"]})) == ["4.39"]
    assert not differing("with 93% of it", [0.934])
    assert differing("with 92% of it", [0.934]) == ["92%"]
    assert differing("388,956,161 of 3,243,704,320", computed({"is": ["151936 * 2560"]})) == [
        "388,956,161",
        "3,243,704,320",
    ]
