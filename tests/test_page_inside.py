"""The page of a text inside a model: what it is made of, what it refuses, and what notebooks show of it."""

import base64
import json
import re
import zlib
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from cli_models import Captured, checkpoint, said
from test_page import NASTY, Reader, pattern
from triptych.cli import main
from triptych.errors import InputError, ProbeError
from triptych.model import Model, load
from triptych.page import AttentionMap, AttentionSection, MatrixSection, PlanePoints, PlaneSection, TopMap, render
from triptych.page import inspect as inspection_module
from triptych.page.attention_maps import TOP_STEPS, pack_top
from triptych.page.attention_page import inside_page, planes
from triptych.page.drawing import svg
from triptych.page.inspect import inspect_text, names
from triptych.page.notebook import display, page_of
from triptych.page.render import check_replaced

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def decoder() -> Model:
    return load(checkpoint("decoder"))


def tabs(html: str) -> dict[str, list[dict[str, Any]]]:
    return {tab["title"]: tab["sections"] for tab in Reader(html).sections()}


# ---------------------------------------------------------------- what a page is made of


def test_a_page_has_all_that_two_texts_show(decoder: Model) -> None:
    texts = [inspect_text(decoder, text) for text in ("the mill", "the hill")]
    found = tabs(inside_page(decoder, texts, "m"))
    assert list(found) == ["Attention", "Roles", "Lens", "Two texts", "Patching", "Vectors", "Run"]
    lens = decoder.lens("the mill", top=1)
    assert found["Lens"][0]["cells"][-1][-1].startswith(lens.names[-1][-1][0])
    (plane,) = found["Vectors"][0]["stacks"]
    assert (plane["text"].count(0), plane["text"].count(1)) == (8, 8)
    assert list(tabs(inside_page(decoder, texts[:1], "m"))) == ["Attention", "Roles", "Lens", "Vectors", "Run"]


def test_what_a_model_has_no_place_for_is_left_out_with_the_reason(decoder: Model) -> None:
    texts = [inspect_text(decoder, text) for text in ("the mill", "the old hill")]
    found = tabs(inside_page(decoder, texts, "m"))
    assert "Patching" not in found
    facts = dict(map(tuple, found["Run"][0]["rows"]))
    assert "align" in facts["No patching"]


def test_an_encoder_decoder_has_its_three_places_and_two_planes() -> None:
    model = load(checkpoint("encoder-decoder"))
    found = tabs(inside_page(model, [inspect_text(model, "the mill", target="le moulin")], "m"))
    assert {one["stack"] for one in found["Attention"][0]["maps"]} == {"encoder", "decoder", "cross"}
    assert [one["stack"] for one in found["Vectors"][0]["stacks"]] == ["encoder", "decoder"]


def test_a_long_text_keeps_its_largest_weights(decoder: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = inspect_text(decoder, "the old mill stands")
    monkeypatch.setattr(inspection_module, "WHOLE_BYTES", 100)
    long = inspect_text(decoder, "the old mill stands", layer=1, head=2)
    assert (len(long.largest), len(long.maps)) == (3, 1)
    one, same = long.largest[1], whole.maps[1]
    best = np.sort(same.weights, axis=-1)[..., ::-1][..., :8]
    np.testing.assert_allclose(one.top_weights, best, atol=1e-5)
    np.testing.assert_allclose(long.maps[0].weights[0], same.weights[2], atol=1e-6)
    assert one.roles == same.roles  # names read from the largest weights are those read from all
    monkeypatch.setattr(inspection_module, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="choose fewer with --layer and --head"):
        inspect_text(decoder, "the old mill stands", layer=1)


def test_the_largest_weights_come_back() -> None:
    random = np.random.default_rng(0)
    keys = random.integers(-1, 4096, (3, 50, 4)).astype(np.int32)
    weights = random.random((3, 50, 4), dtype=np.float32)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(pack_top(keys, weights))), np.uint8).reshape(3, 3, 4, 50)
    places = np.cumsum(planes[0].astype(np.int64) << 8 | planes[1], axis=-1) & 0xFFFF
    np.testing.assert_array_equal(np.where(places == 0xFFFF, -1, places).transpose(0, 2, 1), keys)
    assert np.abs(((planes[2] / TOP_STEPS) ** 2).transpose(0, 2, 1) - weights).max() <= 0.004


def test_heads_are_named_by_what_they_read() -> None:
    from triptych.attention.statistics import pattern_statistics

    length = 12
    eye = torch.eye(length)
    previous = torch.cat([eye[:1], eye[:-1]])
    first = torch.zeros(length, length)
    first[:, 0] = 1
    even = torch.ones(length, length).tril()
    even = even / even.sum(-1, keepdim=True)
    ids = [*range(6), *range(6)]
    induction = eye.clone()
    for t in range(6, length):
        induction[t] = eye[t - 5]
    heads = torch.stack([previous, first, even, induction, eye])
    found = names(pattern_statistics(heads, torch.arange(length), top=12), ids, ids, cross=False, causal=True)
    assert found == ["previous", "first", "diffuse", "induction", "self"]
    one_after_another = list(range(length))  # no token occurs again, so that nothing is an induction head
    alone = pattern_statistics(heads[3:4], torch.arange(length), top=12)
    assert names(alone, one_after_another, one_after_another, cross=False, causal=True) != ["induction"]


def test_planes_keep_the_distances_of_points_that_lie_in_a_plane() -> None:
    """Vectors of length 1 on a circle stay on it in every layer, and a turned copy of a layer does not move."""
    angle = torch.linspace(0, 5, 9, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    lift, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    first = circle @ lift[:2]
    at, share = planes([first, 3 * first @ lift], torch.ones(9, dtype=torch.bool))
    torch.testing.assert_close(torch.cdist(at[0], at[0]), torch.cdist(circle, circle))
    torch.testing.assert_close(at[1], at[0])
    assert share == pytest.approx([1.0, 1.0])
    far = torch.cat([first, 50 * torch.ones(1, 7, dtype=torch.float64)])
    _, without = planes([far], torch.arange(10) < 9)
    assert without == pytest.approx([1.0])  # the last vector does not decide the plane


@pytest.mark.usefixtures("unchecked")
def test_sections_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="cells must be 1 rows of 2"):
        MatrixSection("t", "", ["r"], ["a", "b"], [["x"]], [[0, 0]])
    with pytest.raises(InputError, match="not finite"):
        MatrixSection("t", "", ["r"], ["a"], [["x"]], [[float("nan")]])
    keys, weights = np.zeros((1, 2, 3), np.int32), np.zeros((1, 2, 3), np.float32)
    with pytest.raises(InputError, match=r"both must be \[H, T, K\]"):
        TopMap("decoder", 0, ["a"], ["a"], keys, weights)
    with pytest.raises(InputError, match="positions below 2"):
        TopMap("decoder", 0, ["a", "b"], ["a", "b"], keys + 5, weights)
    points = PlanePoints("decoder", ["l"], ["a", "b"], [0, 0], [0, 1], np.zeros((1, 3, 2)), [1.0])
    with pytest.raises(InputError, match="points of the decoder"):
        PlaneSection("t", "", ["x"], [points])


# ---------------------------------------------------------------- text that is nobody's markup


def test_nasty_tokens_and_texts_stay_text(decoder: Model) -> None:
    text = "a</script><img src=x onerror=alert(1)>\x00\x1b"
    reader = Reader(inside_page(decoder, [inspect_text(decoder, text)], text))
    assert "img" not in [tag for tag, _ in reader.tags]
    assert len(reader.inside("script")) == 2
    drawn = svg([AttentionMap("decoder", 0, NASTY, NASTY, pattern(1, 7, 7))], NASTY[0])
    root = ElementTree.fromstring(drawn)
    assert next(node.text for node in root.iter(f"{SVG}text")) == NASTY[0]
    assert not list(root.iter(f"{SVG}script"))


def test_a_picture_has_each_weight_as_a_shade() -> None:
    weights = np.array([[[1.0, 0.0], [0.25, 0.75]]], np.float32)
    one = AttentionMap("decoder", 3, ["a", "b"], ["a", "b"], weights, heads=[5])
    root = ElementTree.fromstring(svg([one], "t"))
    (image,) = root.iter(f"{SVG}image")
    import io

    from PIL import Image

    data = base64.b64decode(image.attrib["href"].partition(",")[2])
    light = np.asarray(Image.open(io.BytesIO(data)).convert("L")).astype(int)
    assert light[0, 0] < light[1, 1] < light[1, 0] < light[0, 1]  # the larger, the darker
    texts = [node.text for node in root.iter(f"{SVG}text")]
    assert texts == ["t", *"abab", "decoder layer 3, head 5", "0 to 1.000"]
    assert len(list(ElementTree.fromstring(svg([one, one], "t")).iter(f"{SVG}image"))) == 2


# ---------------------------------------------------------------- the command line


def test_save_writes_each_kind(tmp_path: Path) -> None:
    model = str(checkpoint("decoder"))
    for name in ("a.html", "a.svg", "a.json"):
        assert main(["inspect", model, "the mill", "--save", str(tmp_path / name)]) == 0
        assert main(["inspect", model, "the mill", "--save", str(tmp_path / name)]) == 0  # its own file is replaced
    assert json.loads((tmp_path / "a.json").read_text("utf-8"))["maps"][0]["stack"] == "decoder"
    ElementTree.fromstring((tmp_path / "a.svg").read_text("utf-8"))


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([""], 2, "TEXT is empty"),
        (["a", "--beside", " ", "--save", "x.html"], 2, "--beside is empty"),
        (["a", "--beside", "b"], 2, "add --save FILE.html"),
        (["--beside", "b"], 2, "--beside needs a TEXT"),
        (["a", "--head", "6"], 1, "head"),
        (["a", "--layer", "3"], 1, "layers are 0 to 2"),
        (["a", "--save", "none/x.html"], 1, "No such directory"),
        (["a", "--save", "taken.html"], 1, "was not written by Triptych"),
        (["a", "--site", "embed", "--save", "x.html"], 1, "ends in .pattern"),
    ],
)
def test_bad_input_is_one_line_before_weights_are_read(
    argv: list[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:  # fmt: skip
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    model = str(checkpoint("decoder"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("triptych.checkpoints.safetensors.SafetensorsSource.read", read)
    (tmp_path / "taken.html").write_text("mine")
    out, err = said(["inspect", model, *argv], capsys, code)
    assert says in err
    assert (out, len(err.strip().splitlines())) == ("", 1)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["mine"]


def test_a_text_longer_than_the_model_reads_is_refused(capsys: Captured) -> None:
    error = said(["inspect", str(checkpoint("encoder")), "mill " * 100], capsys, 1)[1]
    assert "102 tokens and the model reads 72" in error
    assert len(error.splitlines()) == 1


def test_a_file_of_triptych_is_replaced_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "own.html").write_text(render("t", []))
    check_replaced(tmp_path / "own.html")
    check_replaced(tmp_path / "new.html")


# ---------------------------------------------------------------- notebooks


def framed(shown: Any) -> str:
    html = shown._repr_html_()
    found = re.fullmatch(r'<iframe sandbox="allow-scripts allow-downloads" [^>]*srcdoc="([^"]*)"></iframe>', html, re.S)
    assert found, html[:300]
    return unescape(found[1])


def test_results_show_themselves_as_pages(decoder: Model) -> None:
    trace = decoder.trace(["the mill"], read=["*.pattern", "*.resid_post", "*.mlp.out"])
    found = tabs(framed(trace))
    assert list(found) == ["Attention", "Vectors", "Values"]
    assert found["Attention"][0]["tokens"][0][:3] == ["t", "h", "e"]
    assert {one["stack"] for one in found["Attention"][0]["maps"]} == {"decoder"}
    statistics = decoder.statistics(["the mill"])
    assert all("top" in one for one in tabs(framed(statistics))["Attention"][0]["maps"])
    assert "share restored" in framed(decoder.patch("abc", "axc"))
    assert "Logit lens" in framed(decoder.lens("abc"))
    assert "Direct logit attribution" in framed(decoder.attribute_logit("abc"))
    assert "blocks.0.attn.pattern" in framed(decoder)


def test_a_trace_of_part_of_a_text_names_its_own_tokens(decoder: Model) -> None:
    from triptych.probe import Read

    trace = decoder.trace(["the mill"], read=[Read("blocks.1.attn.pattern", at=[2, 5], heads=[1])])
    (one,) = tabs(framed(trace))["Attention"][0]["maps"]
    section = tabs(framed(trace))["Attention"][0]
    assert section["tokens"][one["queries"]] == ["e", "i"]
    assert len(section["tokens"][one["keys"]]) == 8


def test_what_cannot_be_drawn_is_shown_as_text(decoder: Model) -> None:
    assert decoder.trace(["the mill"])._repr_html_().startswith("<pre>Trace of 1 row")
    assert page_of(3) is None
    assert display("<img>") == "<pre>&#x27;&lt;img&gt;&#x27;</pre>"


@pytest.mark.heavy
def test_a_table_of_heads_shows_every_role_of_a_head(decoder: Model) -> None:
    table = decoder.heads(["The old mill, by the river. The old mill."])
    found = Reader(framed(table)).sections()
    assert found[0]["kind"] == "matrix"
    assert len(found[0]["cells"]) == 3
    assert set(found[0]["names"]) == {row.role for row in table}


@pytest.mark.usefixtures("unchecked")
def test_a_head_that_is_not_there_is_refused_before_anything_runs(
    decoder: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "_forward", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ProbeError, match="head"):
        inspect_text(decoder, "the mill", head=9)
    with pytest.raises(InputError, match="empty"):
        inspect_text(decoder, "")
    assert AttentionSection("t", "", []).data()["maps"] == []
