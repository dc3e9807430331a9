"""`triptych heads` as a user types it, and its page in a browser."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import planted_heads as planted
from browser import CHROMIUM, Browser
from cli_models import Captured, checkpoint, refused, said
from triptych.cli.heads import _show, _show_link
from triptych.model import load
from triptych.page import AttentionMap, AttentionSection, render
from triptych.probe import HeadRole, HeadTable
from triptych.probe.links import LinkScore, LinkTable

BANK = ["--text", "She sat by the river bank"]


def run(argv: list[str], capsys: Captured, code: int = 0) -> tuple[str, str]:
    return said(["heads", str(checkpoint("decoder")), *argv], capsys, code)


@pytest.mark.heavy
def test_the_page_without_a_text_shows_one_that_the_model_can_read(capsys: Captured, tmp_path: Path) -> None:
    """The built-in sentence has more bytes than this model reads."""
    run(["--save", str(tmp_path / "heads.html")], capsys)
    page = (tmp_path / "heads.html").read_text("utf-8")
    assert "The dog that the boys had seen" in page
    assert "They called the dog" not in page


@pytest.mark.heavy
def test_the_table_and_the_page(capsys: Captured, tmp_path: Path) -> None:
    out, err = run(["The old mill, by the river.", "--save", str(tmp_path / "heads.html")], capsys)
    assert "no head of" in out
    assert "next was not measured: a causal model" in err
    page = (tmp_path / "heads.html").read_text("utf-8")
    assert "The best heads of each role" in page
    assert "http:" not in page.replace("http://www.w3.org", "")


@pytest.mark.heavy
def test_json_has_every_head_in_every_role(capsys: Captured) -> None:
    document = json.loads(run(["--json"], capsys)[0])
    heads = {(row["layer"], row["head"]) for row in document["heads"]}
    assert len(heads) == 3 * 6
    assert {"score", "even", "null", "threshold", "z", "p", "effect", "random_effect"} <= document["heads"][0].keys()


@pytest.mark.heavy
def test_a_link_of_words_of_several_tokens(capsys: Captured) -> None:
    document = json.loads(run(["--link", "bank:river", *BANK, "--json"], capsys)[0])
    assert [len(places) for places in document["places"]] == [4, 5]  # a token a letter
    assert len(document["heads"]) == 3 * 6
    assert "0 of 18 heads" in run(["--link", "bank:river", *BANK], capsys)[0]


def test_the_numbers_of_roles_have_a_legend(capsys: Captured) -> None:
    row = HeadRole("decoder", 3, 5, "previous", 0.9, 0.1, 0.1, 0.5, 12.0, 0.001)
    for stack, name in (("decoder", " 3.5 "), ("encoder", " encoder 3.5 ")):
        _show(HeadTable((replace(row, stack=stack),), (), {}, "nats", 0), "model")
        out, err = capsys.readouterr()
        assert name in out
        assert ("decoder" in out) is False
        assert "without it: nats lost without the head" in " ".join(err.split())


def test_a_threshold_that_no_weight_can_reach_is_said(capsys: Captured) -> None:
    row = LinkScore("decoder", 4, 2, weight=0.93, null=0.36, threshold=1.25, z=2.3, p=0.36)
    table = LinkTable("bank", "river", ("river", "bank"), ((1,), (0,)), (row,), 1.8, (0.1, 0.2), "nats", 120)
    for thresholds, said_so in (((1.25, 0.99), True), ((0.99, 0.5), False)):
        rows = tuple(replace(row, threshold=threshold) for threshold in thresholds)
        _show_link(replace(table, rows=rows))
        assert ("1 threshold above 1, which no weight can reach" in capsys.readouterr().out) is said_so


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--link", "bank", *BANK], 2, "two words"),
        (["--link", ":river", *BANK], 2, "two words"),
        (["--link", "bank:river"], 2, "needs the text"),
        (BANK, 2, "are for --link"),
        (["More", "--link", "bank:river", *BANK], 2, "leave out TEXT"),
        (["a" * 100_000], 1, "text 0 has 100000 tokens and the model reads 72; shorten it"),
        (["--save", "heads.png"], 2, "must end in .html"),
        (["--link", "river:bank", *BANK], 1, "write bank:river"),
        (["--link", "bank:rivers", *BANK], 1, "its words are She, sat, by, the, river, bank"),
        (["--link", "bank:the", "--text", "the river and the bank"], 1, "the@1 for the first"),
        (["--link", "bank:the@3", "--text", "the river and the bank"], 1, "2 times"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], code: int, message: str, capsys: Captured) -> None:
    assert message in refused(["heads", str(checkpoint("decoder")), *argv], capsys, code)


def test_an_encoder_decoder_takes_a_target(capsys: Captured) -> None:
    model = load(checkpoint("encoder-decoder"))
    table = model.link("the old mill", "moulin", "mill", "le vieux moulin")
    assert {row.stack for row in table.rows} == {"cross"}


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
def test_roles_are_colours_in_a_browser(tmp_path: Path) -> None:
    """A role is chosen in the legend: its first head opens and the others fade."""
    tokens = [str(i) for i in range(12)]
    model = planted.decoder()
    trace = model.trace([list(range(12))], read=["blocks.*.attn.pattern"])
    maps = [
        AttentionMap(
            "decoder", layer, tokens, tokens, trace[f"blocks.{layer}.attn.pattern"][0].numpy(),
            roles=[planted.NAMES.get((layer, head), "") for head in range(5)],
        )
        for layer in (0, 1)
    ]  # fmt: skip
    page = tmp_path / "page.html"
    page.write_text(render("Heads", [AttentionSection("Heads by role", "", maps)]), "utf-8")
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 390):
            tab = browser.open(page, width=width).wait()
            assert (
                tab.evaluate('document.querySelectorAll(".roles button").length')
                == len(set(planted.NAMES.values())) + 1
            )
            tab.evaluate(
                "[...document.querySelectorAll('.roles button')].find((one) => one.textContent === 'induction').click()"
            )
            assert "layer 1 · head 0 · induction" in tab.evaluate('document.querySelector(".large h3").textContent')
            assert tab.evaluate('document.querySelectorAll(".gallery button.dim").length') == 9
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert not tab.console()
            tab.screenshot(tmp_path / f"{width}.png")
