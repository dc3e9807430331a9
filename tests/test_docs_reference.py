"""The API reference lists every public name, and the page of places names code that exists."""

import ast
import re
from pathlib import Path
from pkgutil import resolve_name

ROOT = Path(__file__).parents[1]
PUBLIC = (Path(__file__).with_name("public_names.txt")).read_text("utf-8").split()
CLASSES = ("Model", "Generation", "Read", "Edit", "Trace", "Mask")
PLACE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def symbols(path: Path) -> set[str]:
    """Functions, classes and constants of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def missing(text: str) -> list[str]:
    """The places that a page names and that do not exist."""
    places = PLACE.findall(text)
    return [
        f"{path}::{name}"
        for path, name in places
        if not (ROOT / path).is_file() or name not in symbols(ROOT / path)
    ]  # fmt: skip


def test_every_place_of_the_page_exists() -> None:
    assert not missing((ROOT / "docs" / "where.md").read_text("utf-8"))


def test_a_place_that_does_not_exist_is_noticed() -> None:
    assert missing("`src/triptych/errors.py::nearest`, `src/triptych/errors.py::farthest`, `src/none.py::nearest`") == [
        "src/triptych/errors.py::farthest",
        "src/none.py::nearest",
    ]


def test_each_question_takes_at_most_two_files() -> None:
    rows = [
        line for line in (ROOT / "docs" / "where.md").read_text("utf-8").splitlines() if "::" in line and "|" in line
    ]
    assert len(rows) >= 10
    for row in rows:
        assert 1 <= len({path for path, _ in PLACE.findall(row)}) <= 2, row


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = set(re.findall(r"^::: triptych\.(\w+)$", page, re.M))
    assert listed == set(PUBLIC) - {"__version__"}
    assert "`triptych.__version__`" in page


INLINE = re.compile(r"(?<!`)`triptych\s+([a-z]+)\b([^`]*)`")
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")} - {ROOT / "docs" / "log.md"})


def unknown_options(text: str) -> list[str]:
    """Options of commands within a sentence that the command line does not have; console blocks are run elsewhere."""
    surface = [line.split() for line in (ROOT / "tests" / "cli_surface.txt").read_text("utf-8").splitlines()]
    known = {(name, option) for name, *options in surface for option in (*options, "--help")}
    return [
        f"{name} {option}"
        for name, rest in INLINE.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest)
        if (name, option) not in known
    ]


def test_commands_within_sentences_have_options_that_exist() -> None:
    wrong = {page.name: unknown_options(page.read_text("utf-8")) for page in PAGES}
    assert not {page: options for page, options in wrong.items() if options}
    assert unknown_options("read `triptych inspect MODEL --sites` and `triptych inspect M --site x`") == [
        "inspect --sites"
    ]


IMPORT = re.compile(r"\bfrom (triptych[\w.]*) import (\w+)")


def imports_that_fail(text: str) -> list[str]:
    """The first name of each import from our packages that does not exist."""
    failed = []
    for module, name in IMPORT.findall(text):
        try:
            resolve_name(f"{module}.{name}")
        except (ImportError, AttributeError):
            failed.append(f"{module}.{name}")
    return failed


def test_what_pages_and_recipes_import_exists() -> None:
    pages = {*PAGES, *ROOT.glob("docs/examples/*.toml")} - {ROOT / "docs" / "add-an-operation.md"}  # it adds the name
    wrong = {page.name: imports_that_fail(page.read_text("utf-8")) for page in pages}
    assert not {page: names for page, names in wrong.items() if names}
    assert imports_that_fail("from triptych.media import scenes") == ["triptych.media.scenes"]
