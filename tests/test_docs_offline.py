"""The built documentation opened as files: every public name, links that open, a search that finds, no other host."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import triptych
from browser import CHROMIUM, Browser, Tab

ROOT = Path(__file__).parents[1]
PUBLIC = (Path(__file__).with_name("public_names.txt")).read_text("utf-8").split()
CLASSES = ("Model", "Generation", "Read", "Edit", "Trace", "Mask")
pytestmark = pytest.mark.heavy
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return out


def test_the_reference_has_every_name_and_every_method(site: Path) -> None:
    built = (site / "api.html").read_text("utf-8")
    anchors = set(re.findall(r'id="triptych\.([\w.]+)"', built))
    assert set(PUBLIC) - {"__version__"} <= anchors
    for name in CLASSES:
        members = inspect.getmembers(getattr(triptych, name))
        own = {one for one, value in members if not one.startswith("_") and (callable(value) or one != "__doc__")}
        assert {f"{name}.{one}" for one in own} <= anchors, name
    text = re.sub("<[^>]+>", "", built)
    assert {"load(", "Generation(", "max_new_tokens: int"} <= set(
        re.findall(r"max_new_tokens: int|load\(|Generation\(", text)
    )


def test_links_open_as_files(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'<a [^>]*href="([^"#?]+)', page.read_text("utf-8")):
            if not re.match(r"\w+:|/", link):
                assert (page.parent / link).is_file(), (page.name, link)  # a directory would not open as a file


def search(tab: Tab, words: str) -> None:
    tab.evaluate(f"""(() => {{
      const box = document.querySelector(".md-search__input");
      box.focus();
      box.value = {words!r};
      box.dispatchEvent(new KeyboardEvent("keyup", {{ bubbles: true }}));
      box.dispatchEvent(new InputEvent("input", {{ bubbles: true }}));
    }})()""")


@in_a_browser
def test_search_finds_pages(site: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        tab = browser.open(site / "index.html")
        search(tab, "LongRoPE")
        tab.wait('document.querySelector(".md-search-result__link") !== null')
        links = tab.evaluate('[...document.querySelectorAll(".md-search-result__link")].map((link) => link.href)')
        assert any(link.startswith((site / "where.html").as_uri()) for link in links)
        assert not tab.console()


@in_a_browser
def test_without_our_script_the_search_cannot_start(site: Path, tmp_path: Path) -> None:
    """The control: a browser refuses to start a worker from a file."""
    shutil.copytree(site, tmp_path / "site")
    (tmp_path / "site/assets/iframe-worker.js").write_text("")
    with Browser(tmp_path / "profile") as browser:
        tab = browser.open(tmp_path / "site/index.html")
        starts = "(() => { try { new Worker(%r); return 'started' } catch (error) { return error.name } })()"
        worker = next((tmp_path / "site").glob("**/workers/search*.js")).relative_to(tmp_path / "site")
        assert tab.evaluate(starts % str(worker)) == "SecurityError"
        assert browser.open(site / "index.html").evaluate(starts % str(worker)) == "started"


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(https?:[^" >]+)')
    pages = sorted(site.glob("**/*.html"))
    assert len(pages) > 15
    for page in pages:
        links = [link for link in loads.findall(page.read_text("utf-8")) if 'rel="canonical"' not in link]
        assert not links, (page.name, links)


@in_a_browser
@pytest.mark.parametrize("page", ["families.html", "concepts/sites.html"])
def test_names_in_tables_are_whole_on_a_narrow_screen(page: str, site: Path, tmp_path: Path) -> None:
    """Each is on one line, and the page itself does not scroll sideways: the table does."""
    with Browser(tmp_path / "profile") as browser:
        tab = browser.open(site / page, width=390)
        lines = tab.evaluate('[...document.querySelectorAll("td code")].map((name) => name.getClientRects().length)')
        assert len(lines) > 20
        assert set(lines) == {1}
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
