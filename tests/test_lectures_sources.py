"""The sources of a recorded result: all files that its lab imports, directly or not, and no others."""

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from triptych_lectures.labs import kept_results

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

import lecture_sources  # noqa: E402  # of tools/

FILES = {
    "triptych/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from triptych.core import attend",
    "triptych/core.py": "from importlib import import_module\ndef attend():\n    import_module('triptych.by_name')",
    "triptych/by_name.py": "",
    "triptych/parts/__init__.py": "from . import inner",
    "triptych/parts/inner.py": "from ..late import x",
    "triptych/late.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triptych.types",
    "triptych/types.py": "",
    "triptych/unused.py": "",
    "triptych/native/__init__.py": "from triptych.native.loader import library",
    "triptych/native/loader.py": "",
    "triptych/native/step.c": "",
    "triptych/native/step.h": "",
    "triptych/families/__init__.py": "",
    "triptych/families/registry.py": "",
    "triptych/families/llama.py": "from triptych import late",
    "triptych_lectures/__init__.py": "",
    "triptych_lectures/first.py": "import torch\nfrom triptych import attend",
    "triptych_lectures/second.py": "import triptych\nprint(triptych.attend)",
    "triptych_lectures/third.py": "def run():\n    from triptych import parts",
    "triptych_lectures/fourth.py": "import triptych.native as native",
    "triptych_lectures/fifth.py": "from triptych_lectures import third as other",
    "triptych_lectures/sixth.py": "from triptych.families import registry",
}
CORE = {"triptych/core.py", "triptych/by_name.py"}
PARTS = {"triptych/parts/__init__.py", "triptych/parts/inner.py", "triptych/late.py"}
FAMILIES = {"triptych/late.py", *(path for path in FILES if path.startswith("triptych/families/"))}
NATIVE = {path for path in FILES if path.startswith("triptych/native/")}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "uses"),
    [
        ("first", CORE),  # a name that `__init__` imports only when it is used
        ("second", CORE),  # the same as an attribute
        ("third", PARTS),  # a late import, relative ones, and none of a type
        ("fourth", NATIVE),  # with its C
        ("fifth", {"triptych_lectures/third.py", *PARTS}),  # of both packages
        ("sixth", FAMILIES),  # files that are imported by their names, and what these import
    ],
)
def test_all_that_is_imported_counts(src: Path, module: str, uses: set[str]) -> None:
    always = {"triptych/__init__.py", "triptych_lectures/__init__.py", f"triptych_lectures/{module}.py"}
    name = f"triptych_lectures.{module}"
    assert {path.relative_to(src).as_posix() for path in lecture_sources.sources(name, src=src)} == always | uses
    before = lecture_sources.digest(name, src=src)
    (src / "triptych" / "unused.py").write_text("changed", "utf-8")
    (src / "triptych" / "types.py").write_text("changed", "utf-8")
    assert lecture_sources.digest(name, src=src) == before
    for path in uses:
        text = (src / path).read_text("utf-8")
        (src / path).write_text(f"{text}\nchanged = 1", "utf-8")
        assert lecture_sources.digest(name, src=src) != before, path
        (src / path).write_text(text, "utf-8")
    assert lecture_sources.digest(name, src=src) == before


def test_of_a_lab_only_what_its_run_enters_counts(src: Path) -> None:
    files = {
        "triptych_lectures/lab.py": "from triptych import unused\nfrom triptych.used import Pair, run\n"
        "from triptych.limits import MOST\nfrom triptych.native import library",
        "triptych/used.py": "from triptych.unused import at_import\nat_import()\ndef run():\n    pass",
        "triptych/limits.py": "MOST = 3",
        "triptych/unused.py": "def at_import():\n    pass",
        "triptych/native/loader.py": "def library():\n    pass",
    }
    for name, text in files.items():
        (src / name).write_text(text, "utf-8")

    def digest(*entered: str) -> str:
        return lecture_sources.digest("triptych_lectures.lab", src=src, entered=entered)

    for changed, counts in (
        ("triptych/used.py", True), ("triptych/limits.py", True), ("triptych/unused.py", False),
        ("triptych/native/loader.py", False), ("triptych/native/step.c", False),
    ):  # fmt: skip
        before, text = digest("triptych.used"), (src / changed).read_text("utf-8")
        with_native = digest("triptych.used", "triptych.native.loader")
        (src / changed).write_text(f"{text}\nchanged = 1", "utf-8")
        assert (digest("triptych.used") != before) is counts, changed
        assert (digest("triptych.used", "triptych.native.loader") != with_native) is (counts or "native" in changed)
        (src / changed).write_text(text, "utf-8")


def test_what_a_run_enters_is_noted_and_what_an_import_runs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "triptych_lectures_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "late.py").write_text(
        "from dataclasses import dataclass\nfrom .helper import at_import\nat_import()\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "def run():\n    from . import deeper\n    deeper.run()\n    return Point(3)"
    )
    (package / "helper.py").write_text("def at_import():\n    pass")
    (package / "deeper.py").write_text("class Unused:\n    def method(self): pass\ndef run():\n    pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lecture_sources, "PACKAGES", (package.name,))
    with lecture_sources.EnteredModules() as entered:
        module = importlib.import_module(f"{package.name}.late")
        thread = threading.Thread(target=module.run)
        thread.start()
        thread.join()
    assert entered.names == {f"{package.name}.late", f"{package.name}.deeper"}
    with lecture_sources.EnteredModules() as entered:
        module.Point(4)  # a method whose code has no file
    assert entered.names == {f"{package.name}.late"}


def test_words_may_change(src: Path) -> None:
    """A comment and a docstring compute nothing; a text that is no docstring may."""
    name, path = "triptych_lectures.second", src / "triptych" / "core.py"
    digests = []
    for code in (
        '"""Old."""\ndef attend():\n    """Old."""\n    return "text"  # old\n',
        '"""New,\n\nlonger."""\n\n# new\ndef attend():\n    """New."""\n    return "text"\n',
        '"""Old."""\ndef attend():\n    """Old."""\n    return "another"  # old\n',
        '"""Old."""\ndef attend(): """Old."""; return "text"\n',
    ):
        path.write_text(code, "utf-8")
        digests.append(lecture_sources.digest(name, src=src))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_module_without_a_file_is_refused(src: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"triptych_lectures\.seventh"):
        lecture_sources.sources("triptych_lectures.seventh", src=src)


SMALL: dict[str, dict[str, int]] = {
    "paged_cache": {},
    "parameters": {},
    "mask_leak": {"width": 8, "hidden": 8, "steps": 2, "rows": 2, "length": 8, "held_out": 64, "written": 4},
}


@pytest.mark.parametrize("lab", SMALL)
def test_what_a_lab_has_loaded_is_among_its_sources(lab: str) -> None:
    """The control: what Python itself loads while the lab runs."""
    program = (
        "import sys\n"
        "from triptych_lectures import labs\n"
        "from triptych_lectures.labs.lab import Setup\n"
        f"labs.run({lab.replace('_', '-')!r}, Setup(sizes={SMALL[lab]!r}))\n"
        "files = [getattr(m, '__file__', None) for n, m in sys.modules.items() if n.startswith('triptych')]\n"
        "print(*filter(None, files), sep='\\n')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {Path(line) for line in ran.stdout.split()}
    found = lecture_sources.sources(f"triptych_lectures.labs.{lab}")
    assert ROOT / "src" / "triptych" / "attention" / "dispatch.py" in loaded
    assert loaded <= found, loaded - found
    assert not {path for path in found if "cli" in path.parts}, "no lab imports the command line"


def test_results_of_seeds_follow_the_files_of_both_packages() -> None:
    """`triptych lab --seeds` uses no result that other files have given."""
    files = {path.relative_to(ROOT / "src").as_posix() for path in kept_results.package_files()}
    assert {"triptych/attention/dispatch.py", "triptych/native/matmul.h", "triptych_lectures/labs/depth.py"} <= files
