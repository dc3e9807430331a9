"""The page: nothing in it can act as markup, nothing is loaded, and the numbers come back as they went in."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from triptych.errors import InputError, TriptychError
from triptych.page import (
    AttentionMap,
    AttentionSection,
    Chapter,
    Criterion,
    Curve,
    Facts,
    Grid,
    ProgramSection,
    Prose,
    Sample,
    Samples,
    Statement,
    StepsSection,
    TableSection,
    Unfolding,
    VerdictSection,
    render,
    write,
)
from triptych.page.attention_maps import MAX_BYTES, STEPS, pack

NASTY = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "&lt;b&gt; \"double\" 'single' `tick`",
    "]]>{{ 7 * 7 }}{% raw %}${1}",
    "\u2028\u2029\u202e\x00",
    "שלום 日本語 🏳️‍🌈",
    "",
]


def pattern(heads: int, queries: int, keys: int) -> np.ndarray:
    scores = np.random.default_rng(heads * queries + keys).normal(size=(heads, queries, keys)) * 3
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def every_section(text: str, texts: list[str]) -> list:
    """One of each kind, with `text` where one text goes and `texts` where several do."""
    return [
        *(Facts(one, [(one, one)]) for one in texts),
        Prose(text, text),
        VerdictSection(text, True, [Statement(text, [Criterion(False, one, one, one) for one in texts])], text),
        Chapter(text, text, False, [Facts(one, [(one, one)]) for one in texts]),
        ProgramSection(text, text, [*texts, "@@", "+", "-"], text, text),
        Samples(text, [Sample(None, one, one) for one in texts]),
        Curve(text, text, text, {one: [(1, 2)] for one in texts}, dict.fromkeys(texts, 3)),
        TableSection(text, texts, [texts]),
        StepsSection(
            text, [Unfolding(1, text, text, text, [Grid(text, text, text, texts, [(text, texts)], text, True)], text)]
        ),
        AttentionSection(text, text, [AttentionMap("cross", 3, texts, [*texts, text, text], pattern(2, 7, 9))]),
    ]


class Reader(HTMLParser):
    """What a browser would make of the page: its tags with attributes, and each text with the tag before it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags:
            self.texts.append((self.tags[-1][0], data))

    def inside(self, tag: str) -> list[str]:
        return [text for owner, text in self.texts if owner == tag and text.strip()]

    def sections(self) -> list[dict]:
        block = json.loads(self.inside("script")[0], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        return block["sections"]


def test_no_text_becomes_markup():
    tame = Reader(render("t", every_section("t", ["t"] * 7), subtitle="t"))
    for text in NASTY[:-1]:
        wild = Reader(render(text, every_section(text, NASTY), subtitle=text))
        shown, plain = ([one for one in reader.tags if one[0] != "code"] for reader in (wild, tame))  # for backticks
        assert [tag for tag, _ in shown] == [tag for tag, _ in plain]
        assert [list(attrs) for _, attrs in shown] == [list(attrs) for _, attrs in plain]


def test_nasty_text_is_still_readable():
    reader = Reader(render("t", every_section("t", NASTY)))
    shown = [text for tag, text in reader.texts if tag == "bdi"]
    assert set(filter(None, NASTY)) <= set(shown)
    *_, samples, _, table, _, attention = reader.sections()
    assert [item["text"] for item in samples["items"]] == NASTY
    assert table["rows"] == [NASTY]
    assert attention["tokens"][attention["maps"][0]["queries"]] == NASTY


def test_the_data_block_has_nothing_to_break_out_with():
    block = render("t", every_section("t", NASTY)).split('id="data">')[1].split("</script>")[0]
    assert json.loads(block)["sections"][0]["title"] == NASTY[0]
    assert block.isascii()
    assert not set("<>&'") & set(block)


def test_nothing_is_loaded():
    reader = Reader(render("t", every_section("t", NASTY)))
    for tag, attrs in reader.tags:
        assert not {"src", "srcset", "action", "style", "onclick"} & set(attrs), tag
        assert (attrs.get("href") or "#").startswith(("#", "data:")), tag
    assert not re.search(r"url\(|@import|@font-face", reader.inside("style")[0])
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", reader.inside("script")[1])


def test_scripts_never_make_markup_or_code_from_text():
    folder = resources.files("triptych.page")
    scripts = [item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith(".js")]
    assert len(scripts) >= 15
    for script in scripts:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)


def test_the_policy_allows_exactly_our_style_and_script():
    reader = Reader(render("t", every_section("t", NASTY)))
    policy = next(attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert dict(rule.strip().split(" ", 1) for rule in policy.split(";")) == {
        **dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'"), "img-src": "data:",
        "style-src": digest(reader.inside("style")[0]), "script-src": digest(reader.inside("script")[1]),
    }  # fmt: skip


def unpack(text: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights that `pack` wrote."""
    high, low = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1).astype(np.uint16)
    return ((high << 8 | low) / STEPS).reshape(shape)


def test_weights_come_back_within_half_a_step():
    weights = pattern(3, 5, 7).astype(np.float32)
    weights[1, 2] = 0  # a query with nothing to see
    weights[2, 4] = np.eye(7)[6]
    back = unpack(pack(weights), weights.shape)
    assert np.abs(back - weights).max() <= 0.5 / STEPS + 1e-9
    assert np.array_equal(back[1, 2], weights[1, 2])
    assert np.array_equal(back[2, 4], weights[2, 4])


def test_layers_share_their_tokens_and_keep_their_names():
    source, target = ["a", "b", "c"], ["x", "y"]
    cross = AttentionMap("cross", 4, target, source, pattern(2, 2, 3), heads=[5, 11])
    data = AttentionSection("t", "", [cross, AttentionMap("encoder", 0, source, source, pattern(1, 3, 3))]).data()
    assert data["tokens"] == [target, source]
    first, second = data["maps"]
    weights = first.pop("weights")
    assert first == {"stack": "cross", "layer": 4, "heads": [5, 11], "queries": 0, "keys": 1}
    assert (second["heads"], second["queries"], second["keys"]) == ([0], 1, 1)
    assert np.abs(unpack(weights, (2, 2, 3)) - pattern(2, 2, 3)).max() < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decoder", 0, ["a"], ["b", "c"], pattern(2, 2, 1)), r"\[2, 2, 1\].* 1 queries, 2 keys"),
        (("decoder", 0, ["a"], ["b"], pattern(2, 1, 1)[0]), r"must be \[H, T, S\]"),
        (("decoder", 0, [], [], np.zeros((2, 0, 0))), "at least one head"),
        (("decoder", 0, ["a"], ["b", "c"], pattern(2, 1, 2), [3]), r"\[2, 1, 2\]"),
        (("decoder", 2, ["a"], ["b"], [[[1.5]]]), r"decoder layer 2: weights must lie in \[0, 1\]"),
        (("decoder", 0, ["a"], ["b"], [[[-0.5]]]), "after softmax"),
        (("decoder", 0, ["a"], ["b"], [[[np.nan]]]), "after softmax"),
        (("middle", 0, ["a"], ["b"], [[[1]]]), "encoder, decoder, cross"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_map_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        AttentionMap(*arguments)


def test_a_layer_given_twice_is_refused():
    one = AttentionMap("decoder", 1, ["a"], ["b"], [[[1]]])
    AttentionSection("t", "", [one, AttentionMap("cross", 1, ["a"], ["b"], [[[1]]])])
    with pytest.raises(InputError, match="decoder layer 1 appears twice"):
        AttentionSection("t", "", [one, one])


def test_a_page_that_would_not_open_is_refused_before_packing():
    tokens = ["t"] * 1024
    weights = np.broadcast_to(np.float32(0.5), (8, 1024, 1024))  # 16 MiB a layer
    layers = [AttentionMap("encoder", layer, tokens, tokens, weights) for layer in range(5)]
    assert 4 * 2 * weights.size == MAX_BYTES
    AttentionSection("t", "", layers[:4])
    with pytest.raises(InputError, match=r"5 layers of up to 8 heads x 1024 x 1024 weights take 80 MiB.*choose fewer"):
        AttentionSection("t", "", layers)


def test_samples_come_in_the_order_of_training():
    items = [Sample(None, "end", "e"), Sample(2000, "b", "b"), Sample(0, "a", "a"), Sample(None, "more", "f")]
    html = render("t", [Samples("s", items)])
    assert re.findall(r"<p dir=\"auto\">(\w)</p>", html) == ["a", "b", "e", "f"]
    assert re.findall(r"<b>step ([\d,]+)</b>", html) == ["0", "2,000"]


def test_a_loss_that_diverged_leaves_a_gap():
    series = {"train": [(0, 2.5), (1, float("nan")), (2, float("inf"))], "a": [(0, 1)], "m": [(0, 1)]}
    [data] = Reader(render("t", [Curve("loss", "step", "nats", series, {})])).sections()
    assert data["series"]["train"] == [[0, 2.5], [1, None], [2, None]]
    assert list(data["series"]) == ["train", "a", "m"]  # as they were given
    with pytest.raises(InputError, match="'train' has x = nan"):
        Curve("loss", "step", "nats", {"train": [(float("nan"), 1)]}, {})
    with pytest.raises(InputError, match="'floor' is inf"):
        Curve("loss", "step", "nats", {}, {"floor": float("inf")})


def test_series_keep_their_order():
    curve = Curve("loss", "step", "nats", {"z": [(0, 1)], "a": [(0, 1)], "m": [(0, 1)]}, {})
    [data] = Reader(render("t", [curve])).sections()
    assert list(data["series"]) == ["z", "a", "m"]


def test_a_table_sets_numbers_flush_right():
    rows = [["bert", "43.1 %", "-1,204 tok/s", "3"], ["t5", "7 %", "9e-3", "none"]]
    assert TableSection("t", ["name", "right", "speed", "mixed"], rows).numeric == [False, True, True, False]
    with pytest.raises(InputError, match="row 1 has 1 cells and there are 2 columns"):
        TableSection("t", ["a", "b"], [["1", "2"], ["3"]])


def test_what_stands_between_backticks_is_code():
    sections = [Prose("a", "the lab `bank`"), VerdictSection("b", True, [Statement("`<i>` and `", [])], "run `lens`")]
    shown = render("t", sections).split('id="data">')[0]
    assert re.findall("<code>(.*?)</code>", shown) == ["bank", "&lt;i&gt;", "lens"]


def test_a_verdict_is_more_than_a_colour():
    criteria = [Criterion(True, "a claim", "0.5", "at most 1"), Criterion(False, "another", "3", "at most 1")]
    statements = [Statement("It means.", criteria[:1]), Statement("It does not.", criteria[1:])]
    reader = Reader(render("t", [VerdictSection("came of it", False, statements, "Of small models.")]))
    assert reader.inside("i") == ["✗", "FAIL", "✓", "✗"]  # the badge, then the criteria
    labels = [attrs["aria-label"] for tag, attrs in reader.tags if tag == "i" and "aria-label" in attrs]
    assert labels == ["met", "not met"]
    [data] = reader.sections()
    assert data["statements"][1]["criteria"][0] == {
        "met": False,
        "claim": "another",
        "measured": "3",
        "bounds": "at most 1",
    }
    assert [one["text"] for one in data["statements"]] == ["It means.", "It does not."]
    assert (data["passed"], data["remarks"]) == (False, "Of small models.")


def test_chapters_are_listed_and_hold_their_sections():
    table, curve = TableSection("table", ["a"], [["1"]]), Curve("curve", "x", "y", {"s": [(0, 1)]}, {})
    chapters = [Chapter("first", "about one", True, [table, curve]), Chapter("second", "about two", False, [curve])]
    reader = Reader(render("t", chapters))
    ids = [(attrs["id"], attrs["class"]) for tag, attrs in reader.tags if tag == "section"]
    assert [name for name, _ in ids] == ["section-0", "section-0-0", "section-0-1", "section-1", "section-1-0"]
    assert [kind for _, kind in ids] == ["chapter", "table", "curve", "chapter", "curve"]
    links = [attrs["href"] for tag, attrs in reader.tags if tag == "a" and attrs.get("class") != "skip"]
    assert links == ["#section-0", "#section-1"]
    verdicts = [attrs["class"] for tag, attrs in reader.tags if (attrs.get("class") or "").startswith("badge")]
    assert verdicts == ["badge pass", "badge fail"] * 2  # in the contents, then over the chapters
    assert [one["kind"] for one in reader.sections()[0]["sections"]] == ["table", "curve"]


def test_prose_keeps_commands_as_typed():
    prose = Prose("t", "One\nparagraph.\n\n    run  this\n      then this\n\nTwo.\n")
    assert prose.blocks == [(False, "One paragraph."), (True, "run  this\n  then this"), (False, "Two.")]
    assert '<pre class="wide" tabindex="0">run  this\n  then this</pre>' in render("t", [prose])


def test_writing_replaces_the_page_whole(tmp_path: Path):
    place = tmp_path / "report.html"
    write(place, render("first", []))
    write(place, render("second", [Facts("t", [("half a pair", "\ud83d")])]))
    assert "<title>second</title>" in place.read_bytes().decode("utf-8")
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(TriptychError, match=r"cannot write the page .*missing.* No such directory"):
        write(tmp_path / "missing" / "report.html", "text")
    (tmp_path / "taken").mkdir()
    with pytest.raises(TriptychError, match="cannot write the page"):
        write(tmp_path / "taken", "text")
    assert [item.name for item in tmp_path.iterdir()] == ["taken"]


def interrupted_write(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    """A process that is stopped by `ending` when the page is on the disk but not in its place."""
    code = f"""
import os, pathlib, signal
from triptych.page import write

def stop(*_, **__):
    {ending}

os.replace = pathlib.Path.replace = pathlib.Path.rename = stop
write({str(folder / "report.html")!r}, "second")
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_ctrl_c_while_a_page_is_written_leaves_the_old_page_and_nothing_else(tmp_path: Path):
    write(tmp_path / "report.html", "first")
    done = interrupted_write(tmp_path, "raise KeyboardInterrupt")
    assert "KeyboardInterrupt" in done.stderr
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("report.html", "first")]


def test_the_next_write_removes_what_a_killed_process_left(tmp_path: Path):
    write(tmp_path / "report.html", "first")
    done = interrupted_write(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    write(tmp_path / "report.html", "third")
    assert [(item.name, item.read_text()) for item in tmp_path.iterdir()] == [("report.html", "third")]


def lightness(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.cbrt(np.dot(linear, [0.2126, 0.7152, 0.0722])))


@pytest.mark.parametrize(("theme", "sign"), [("light", -1), ("dark", 1)])
def test_lightness_alone_orders_the_colour_scale(theme: str, sign: int):
    script = (resources.files("triptych.page") / "attention_colours.js").read_text(encoding="utf-8")
    scale = re.search(rf"{theme}: \[(.*?)\]", script)
    assert scale
    levels = [lightness(colour) for colour in re.findall(r"#[0-9a-f]{6}", scale[1])]
    assert len(levels) >= 6
    assert (sign * np.diff(levels) > 0.03).all()


def test_importing_the_page_loads_neither_torch_nor_matplotlib():
    code = f"import sys; sys.path[:] = {sys.path!r}\nimport triptych.page.plot\nprint([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout
    assert "'triptych.page.plot'" in loaded
    assert "'torch'" not in loaded
    assert "'matplotlib'" not in loaded
