"""Pictures as SVG: the same bytes for the same numbers, and the command that made each."""

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from cli_models import Captured, checkpoint, said
from triptych.errors import InputError
from triptych.explain import worked
from triptych.explain.page import maps
from triptych.page import AttentionMap, AttentionSection, Curve
from triptych.page.plot import png, svg

COMMAND = "triptych lab scaling --seed 3 --data 'a & b'"
SVG = "{http://www.w3.org/2000/svg}"


def sections() -> list[Curve | AttentionSection]:
    pattern = np.random.default_rng(0).dirichlet(np.ones(3), (2, 3)).astype(np.float32)
    words = ["She", "sat", "by"]
    return [
        Curve("Loss", "step", "nats", {"training": [(1.0, 2.0), (2.0, 1.0)]}, {"a guess": 1.5}),
        AttentionSection("Attention", "", [AttentionMap("decoder", 1, words, words, pattern)]),
    ]


@pytest.mark.parametrize("section", sections(), ids=["curve", "attention"])
def test_a_picture_names_its_command_and_is_the_same_again(section: Curve | AttentionSection, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        svg(tmp_path / name, section, COMMAND)
    drawn = (tmp_path / "one.svg").read_text("utf-8")
    assert drawn == (tmp_path / "two.svg").read_text("utf-8")
    said = [node.text for node in ElementTree.fromstring(drawn).iter() if node.tag.endswith(("desc", "description"))]
    assert said == [COMMAND]
    assert not re.search(r"<(dc:)?date|<script", drawn)
    svg(tmp_path / "two.svg", section, "triptych lab scaling")
    assert drawn != (tmp_path / "two.svg").read_text("utf-8")


def test_letters_of_a_curve_are_text(tmp_path: Path) -> None:
    """A teacher can search and change them."""
    pytest.importorskip("matplotlib")
    svg(tmp_path / "one.svg", sections()[0], COMMAND)
    texts = {node.text for node in ElementTree.parse(tmp_path / "one.svg").iter(f"{SVG}text")}
    assert {"Loss", "step", "nats", "training", "a guess"} <= texts


def test_a_png_is_still_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png(tmp_path / "one.png", sections()[0])
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- explain


def test_explain_draws_the_map_of_five_over_seven_tokens(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "map.svg"
    said(["explain", "--example", "L4.15", "--save", str(path)], capsys)
    root = ElementTree.parse(path).getroot()
    (image,) = root.iter(f"{SVG}image")
    assert float(image.attrib["width"]) / float(image.attrib["height"]) == 7 / 5
    assert [node.text for node in root.iter(f"{SVG}desc")] == [f"triptych explain --example L4.15 --save {path}"]
    (drawn,) = maps(worked("L4.15"))
    (pattern,) = [one.value for step in worked("L4.15").steps for one in step.makes if one.name == "pattern"]
    assert np.array_equal(drawn.weights[0], pattern.numpy().astype(np.float32))
    assert (drawn.stack, len(drawn.queries), len(drawn.keys)) == ("cross", 5, 7)


def test_explain_draws_the_head_of_each_attention(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "maps.svg"
    said(["explain", str(checkpoint("encoder-decoder")), "the old mill", "--head", "1", "--save", str(path)], capsys)
    titles = [node.text for node in ElementTree.parse(path).iter(f"{SVG}title")]
    assert titles == ["encoder layer 0, head 1", "decoder layer 0, head 1", "cross layer 0, head 1"]


def test_a_walk_without_a_map_says_so(capsys: Captured) -> None:
    with pytest.raises(InputError, match=r"no attention map to draw; save an \.html page"):
        maps(worked("L0.2.9"))
    assert ".svg" in said(["explain", "--example", "L2.1", "--save", "out.png"], capsys, 2)[1]


def test_the_screen_shades_a_map(capsys: Captured) -> None:
    """A fifth a shade: 0.45 is ▒, 0.27 ░, 0.05 blank."""
    rows = said(["explain", "--example", "L4.15"], capsys)[0].partition("Softmax")[2]
    cells = re.findall(r"([ ░▒▓█]) (0\.\d{4})", rows.partition("Weighted sum")[0])
    assert len(cells) == 35
    for shade, weight in cells:
        assert shade == " ░▒▓█"[min(4, int(float(weight) * 5))], weight
    assert {"▒", "░", " "} <= {shade for shade, _ in cells}
