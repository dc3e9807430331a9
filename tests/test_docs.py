"""The examples in the documentation give what they show."""

import doctest
import re
from pathlib import Path

import pytest
import torch

from triptych import families
from triptych.cli.options import SHARED
from triptych.families.named_configs import NAMED
from triptych.generate import Sampling
from triptych.generate.sampling import filter_top
from triptych.probe import sites

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


def test_the_sites_beside_hooks_of_transformerlens_exist() -> None:
    """Every site in the table is one of a decoder with a plain or a gated MLP, and no such site is left out."""
    page = (ROOT / "docs" / "concepts" / "from-transformerlens.md").read_text(encoding="utf-8")
    page = page.partition("| there | here |")[0]
    rows = re.findall(r"^\| (`[^|]*|the logits) \| `([^`]+)` \|", page, re.M)
    named = {site.replace("blocks.i", "blocks.0") for _, site in rows}
    more = {site.replace("blocks.i", "blocks.0") for site in re.findall(r"`(blocks\.i\.attn\.\w_ctx)`", page)}
    specs = [families.read_config(dict(NAMED[name])) for name in ("gpt2", "llama-7b")]
    there = {site for spec in specs for site in sites(spec) if "blocks" not in site or "blocks.0." in site}
    assert named | more == there


def test_the_answer_on_formats_names_options_that_exist() -> None:
    page = (ROOT / "docs" / "questions.md").read_text("utf-8")
    (answer,) = re.findall(r"force a format\?\*\*(.*?)\n\n", page, re.DOTALL)
    named = set(re.findall(r"`--(\w+)`", answer))
    assert named == {name for name in ("schema", "regex", "choice") if f"\n--{name} " in SHARED}
    assert named
    assert "not supported" not in answer


def test_the_help_says_that_top_p_is_reached_and_may_be_passed() -> None:
    """0.4 + 0.3 are below 0.8, and the third token brings them to 0.85."""
    kept = filter_top(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log(), Sampling(temperature=1.0, top_p=0.8))
    assert kept.isfinite().tolist() == [True, True, True, False, False]
    assert "whose probabilities sum to P or more." in SHARED


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    """The package is installed from a clone or a wheel: `pip install triptych` would take whatever an index has."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("bench/*.py")]
    named = re.compile(r"pip install (-\S+ )*['\"]?triptych\b(?!-\d)")
    assert [path.name for path in texts if named.search(path.read_text("utf-8"))] == []
    assert named.search("run: pip install 'triptych[image]'"), "the control"


def test_the_glossary_is_short_and_its_places_exist() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
    assert 10 < len(rows) <= 15
    assert len({noun for noun, *_ in rows}) == len(rows)
    places = [place for row in rows for place in re.findall(r"`([a-z_/]+(?:/|\.py))`", row[-1])]
    assert [place for place in places if not (ROOT / "src" / "triptych" / place).exists()] == []
    for suffix in re.findall(r"`\.\.\.(\w+)`", page):
        named = re.compile(rf"^class \w+{suffix}\b", re.MULTILINE)
        assert any(named.search(path.read_text("utf-8")) for path in ROOT.glob("src/triptych/**/*.py"))


def test_no_page_denies_that_several_gpus_train() -> None:
    """As `docs/concepts/parallel.md` says how they do, and `[parallel]` is a table of recipes."""
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = " ".join(page.read_text("utf-8").split())
        assert "GPUs is not supported" not in text, page.name
