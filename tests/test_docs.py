"""The examples in the documentation give what they show."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SESSION = re.compile(r"^```pycon\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if SESSION.search(page.read_text("utf-8"))
]


QUOTE = re.compile(r'^```python title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
QUOTES = [
    (page.name, path, code)
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for path, code in QUOTE.findall(page.read_text("utf-8"))
]


def failures(text: str, name: str) -> list[str]:
    """What a reader would see differ, typing in every session of a page from top to bottom."""
    source = "\n".join(SESSION.findall(text))
    test = doctest.DocTestParser().get_doctest(source, {}, name, name, 0)
    told: list[str] = []
    doctest.DocTestRunner().run(test, out=told.append)
    return told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_give_what_they_show(page: Path) -> None:
    assert not failures(page.read_text("utf-8"), page.name)


@pytest.mark.parametrize(("page", "path", "code"), QUOTES, ids=[f"{page}-{i}" for i, (page, *_) in enumerate(QUOTES)])
def test_code_that_names_its_file_stands_in_it(page: str, path: str, code: str) -> None:
    assert code in (ROOT / path).read_text("utf-8")


def test_a_wrong_example_is_noticed() -> None:
    assert failures("```pycon\n>>> 1 + 1\n3\n\n```\n", "wrong")
