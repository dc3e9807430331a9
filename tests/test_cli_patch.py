"""`triptych patch` and `triptych lens`: tables, JSON and pages that agree with the library, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import cli_models
from cli_models import run
from triptych.model import load
from triptych.page.interventions import lens_page, patch_page

NASTY = "</script><img onerror=x>\x1b[31m"


@pytest.fixture(scope="module")
def decoder() -> str:
    return str(cli_models.checkpoint("decoder"))


def test_a_grid_in_json_is_that_of_the_library(decoder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "patch", decoder, "--clean", "abc", "--corrupt", "axc", "--answer", "d", "--other", "e", "--json"
    )
    assert code == 0
    printed = json.loads(out)
    grid = load(decoder).patch("abc", "axc", answer=("d", "e"))
    assert printed["rows"] == list(grid.rows)
    assert printed["clean"] == pytest.approx(grid.clean, abs=1e-4)
    for row, expected in zip(printed["restored"], grid.restored.tolist(), strict=True):
        assert row == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        (["--heads"], "head 5"),
        (["--heads", "--position", "1", "--site", "*.z"], "1 x"),
        (["--gradient", "--metric", "kl"], "0 a"),
        (["--position", "1", "--at", "2", "--answer", "d"], "1 x"),
        (["--align", "0:0,1:1"], "1 x"),
    ],
)
def test_tables(options: list[str], columns: str, decoder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "patch", decoder, "--clean", "abc", "--corrupt", "axc", *options)
    assert (code, err) == (0, "")
    assert "share restored" in out
    assert columns in out


def test_an_encoder_decoder_and_a_masked_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    both, encoder = (str(cli_models.checkpoint(layout)) for layout in ("encoder-decoder", "encoder"))
    code, out, _ = run(capsys, "patch", both, "--clean", "abc", "--corrupt", "axc", "--target", "de")
    assert code == 0
    assert "target 1 d" in out
    texts = ("the old [MASK] stands", "the new [MASK] stands")
    code, out, err = run(capsys, "patch", encoder, "--clean", texts[0], "--corrupt", texts[1], "--answer", "mill")
    assert (code, err) == (0, "")
    code, out, err = run(capsys, "lens", encoder, texts[0], "--attribution")
    assert (code, "sum to" in err) == (0, True)
    code, out, err = run(capsys, "lens", both, "abc", "--stack", "encoder", "--top", "2", "--position", "1")
    assert (code, "encoder.blocks.1.resid_post" in out) == (0, True)


def test_lenses(decoder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "lens", decoder, "abc")
    assert (code, err) == (0, "")
    assert "blocks.2.resid_post" in out
    code, out, _ = run(capsys, "lens", decoder, "abc", "--json", "--top", "2", "--position", "1", "--position", "2")
    printed = json.loads(out)
    assert printed["positions"] == [1, 2]
    assert len(printed["names"][0][0]) == 2
    code, out, _ = run(capsys, "lens", decoder, "abc", "--attribution", "--answer", "d", "--other", "e", "--json")
    parts = json.loads(out)
    assert sum(parts["values"]) == pytest.approx(parts["logit"], abs=1e-4)
    code, out, err = run(capsys, "lens", decoder, "a long text of letters")
    assert "the last 10 of" in err


def test_control_characters_do_not_reach_the_terminal(decoder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["lens", decoder, NASTY], ["patch", decoder, "--clean", NASTY, "--corrupt", f"{NASTY} "]):
        _, out, err = run(capsys, *argv)
        assert "\x1b" not in out + err
    _, out, _ = run(capsys, "patch", decoder, "--clean", "a\x1bb", "--corrupt", "c\x1bb")
    assert "\x1b" not in out


def test_pages_hold_any_text_as_text(decoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(
        capsys, "patch", decoder, "--clean", NASTY + "a", "--corrupt", NASTY + "b", "--heads", "--save", str(page)
    )
    assert (code, out) == (0, "")
    assert "open it in a browser" in err
    for argv in (["lens", decoder, NASTY], ["lens", decoder, NASTY, "--attribution"]):
        assert "<img" not in page.read_text("utf-8")
        assert len(re.findall("<script", page.read_text("utf-8"))) == 2
        page.unlink()
        assert run(capsys, *argv, "--save", str(page))[0] == 0


def test_a_page_shows_the_numbers_of_the_result(decoder: str) -> None:
    model = load(decoder)
    grid = model.patch("abc", "axc", answer=("d", "e"))
    html = patch_page(grid, [])
    assert f"{float(grid.restored[1, 1]):.2f}" in html
    assert "block 1" in html
    seen, parts = model.lens("abc", top=2), model.attribute_logit("abc")
    html = lens_page(seen, parts, [("Model", "m")])
    assert f"{float(seen.probabilities[-1, -1, 0]):.0%}" in html
    assert f"{parts.logit:.4f}" in html


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["patch", "--clean", "a", "--corrupt", "a"], 1, "are the same"),
        (["patch", "--clean", "ab", "--corrupt", "abc"], 1, "align"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--answer", "no"], 1, "is 2 tokens"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--other", "x"], 2, "--other needs an --answer"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--align", "0-1"], 2, "CLEAN:CORRUPT"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--site", "blocks.1.rest"], 1, "did you mean"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--position", "7"], 1, "positions 0 to 1"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--save", "x.png"], 2, "must end in .html"),
        (["patch", "--clean", "ab", "--corrupt", "cb", "--metric", "loss"], 2, "'loss'"),
        (["patch", "--clean", "ab"], 2, "--corrupt"),
        (["lens", "ab", "--position", "9"], 1, "positions 0 to 1"),
        (["lens", "ab", "--top", "0"], 2, "--top"),
        (["lens", "ab", "--stack", "encoder"], 1, "this decoder model has decoder"),
        (["lens", "ab", "--answer", "x"], 2, "are for --attribution"),
        (["lens", "ab", "--attribution", "--other", "x"], 2, "--other needs an --answer"),
        (["lens", "ab", "--attribution", "--stack", "decoder"], 2, "leave out --stack"),
        (["lens", ""], 1, "token"),
    ],
)
def test_what_is_refused_is_one_line(
    argv: list[str], code: int, says: str, decoder: str, unchecked: None, capsys: pytest.CaptureFixture[str]
) -> None:
    result, out, err = run(capsys, argv[0], decoder, *argv[1:])
    assert (result, out) == (code, "")
    assert err.startswith("error: ")
    assert says in err
    assert len(err.splitlines()) == 1
