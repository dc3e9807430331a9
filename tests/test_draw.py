"""Drawings of models: what is drawn is what the spec has, for every family; no text lies on another."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import references
from browser import CHROMIUM, Browser
from cli_models import Captured, checkpoint, said
from triptych import families
from triptych.cli import main
from triptych.draw import Drawing, details, draw
from triptych.draw.graph import Box
from triptych.draw.models import fold, layers_text
from triptych.errors import TriptychError
from triptych.families.named_configs import NAMED
from triptych.model import load
from triptych.spec import AdditiveSpec, ModelSpec, causal, window

SVG = "{http://www.w3.org/2000/svg}"
LLAMA: dict[str, Any] = {**NAMED["llama-7b"], "hidden_size": 96, "num_attention_heads": 8, "num_hidden_layers": 6}
GEMMA = {"model_type": "gemma", "num_key_value_heads": 8, "head_dim": 12}
GEMMA2 = {**LLAMA, **GEMMA, "model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 12}
PARALLEL = {"model_type": "gptj", "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def spec_of(config: Any) -> ModelSpec:
    return families.read_config(dict(config), where="test")


def texts(spec: ModelSpec) -> list[str]:
    """The texts of a drawing, in the order of painting; the document is well-formed."""
    return ["".join(one.itertext()) for one in ElementTree.fromstring(draw(spec).svg).iter(f"{SVG}text")]


def drawn_parts(drawing: Drawing) -> dict[str, str]:
    """The names of the parts that are drawn, and their notes."""
    groups = ElementTree.fromstring(drawing.svg).iter(f"{SVG}g")
    return {name: str(one.findtext(f"{SVG}title")) for one in groups if (name := one.get("data-part"))}


def folded(name: str, spec: ModelSpec) -> str | None:
    """The name of a part in the drawing: that of an equal block's first layer, one expert for all; None where a part
    is drawn as a line of another."""
    found = re.match(r"(encoder|decoder)\.blocks\.(\d+)(.*)", name)
    if found:
        blocks = spec.stacks[found[1]].blocks
        first = next(i for i, block in enumerate(blocks) if block == blocks[int(found[2])])
        name = f"{found[1]}.blocks.{first}{found[3]}"
    name = re.sub(r"\.experts\.\d+\..*", ".experts", name)
    if re.search(r"\.kinds\.|\.mechanism$|\.(attn|cross)$", name) or name == "head.dense":
        return None
    return name


def check_parts(spec: ModelSpec) -> None:
    """Every part with weights is drawn, with the shape of its weight."""
    parts = drawn_parts(draw(spec))
    for name, part in spec.walk():
        place = folded(name, spec) if part.tensors() else None
        if place is None:
            continue
        assert place in parts, (place, sorted(parts))
        shape = part.tensors().get("weight", ())
        if len(shape) == 2:
            assert f"weight ({shape[0]:,}, {shape[1]:,})" in parts[place]


@pytest.mark.parametrize("name", NAMED)
def test_every_part_of_a_known_model_is_drawn(name: str) -> None:
    check_parts(spec_of(NAMED[name]))


@pytest.mark.heavy
@pytest.mark.parametrize("name", references.NAMES)
def test_every_part_of_every_family_is_drawn(name: str) -> None:
    pytest.importorskip("transformers")
    check_parts(references.read(name))


def test_a_part_that_is_left_out_or_has_another_shape_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, own = spec_of(NAMED["gpt2"]), details.Describer.details
    for change in ({"name": "other"}, {"note": "other: weight (1, 2)"}):

        def wrong(self: details.Describer, box: Box, change: Any = change) -> details.Details:
            return replace(own(self, box), **change)

        monkeypatch.setattr(details.Describer, "details", wrong)
        with pytest.raises(AssertionError):
            check_parts(spec)


@pytest.mark.parametrize(
    ("changes", "gone", "new"),
    [
        ({"num_key_value_heads": 2}, "8 heads of width 12", "8 heads of width 12, 4 to each of 2 key/value heads"),
        ({"num_key_value_heads": 1}, "8 heads of width 12", "8 heads of width 12, one key/value head for all"),
        ({"head_dim": 20}, "q·k / √12", "q·k / √20"),
        ({"hidden_act": "gelu"}, "SiLU", "GELU"),
        ({"rope_theta": 5000}, "base 10,000", "base 5,000"),
        ({"num_hidden_layers": 4}, "× 6", "× 4"),
        ({"intermediate_size": 99}, "[N, 11,008]", "[N, 99]"),
        ({"tie_word_embeddings": True}, None, "weight tied to decoder.embed.tokens"),
        ({"attention_bias": True}, None, "96 → 96 + bias"),
        ({"model_type": "mistral", "sliding_window": 7}, "mask: causal", "mask: causal & window(back=7)"),
        (GEMMA, "96", "96, weight + 1"),
        (GEMMA, None, "× √96"),
    ],
)
def test_another_config_is_another_drawing(changes: dict[str, Any], gone: str | None, new: str) -> None:
    before, after = texts(spec_of(LLAMA)), texts(spec_of({**LLAMA, **changes}))
    assert new not in before
    assert new in after
    assert gone is None or (gone in before and gone not in after)


def test_another_spec_is_another_drawing() -> None:
    spec = spec_of(LLAMA)
    first, *others = spec.decoder.blocks
    attn = replace(first.attn, scale=1.0, softcap=30.0, sinks=True, mechanism=AdditiveSpec(width=12))
    changed = replace(spec, decoder=replace(spec.decoder, blocks=(replace(first, attn=attn), *others)))
    found = texts(changed)
    assert {"w·tanh(q + k)", "scores capped at ± 30", "one learned sink a head"} <= set(found)
    assert {"block A, layer 0", "block B, layers 1-5", "× 5"} <= set(found)
    assert {"scores capped at ± 30", "× 5"}.isdisjoint(texts(spec))


def test_norms_stand_where_the_spec_puts_them() -> None:
    """From the top down: before the sublayer, after it, or after the sum; in a parallel block once for both."""

    def order(config: Any) -> list[str]:
        names = [name for name in drawn_parts(draw(spec_of(config))) if "blocks.0." in name]
        found = [name.split("blocks.0.")[1] for name in names]
        return [name for name in found if re.search(r"norm(\.|$)|^attn\.out$|^mlp\.\w*(down|fc2|out)$", name)]

    tiny = {"num_hidden_layers": 2}
    assert order(LLAMA) == ["attn_norm.pre", "attn.out", "mlp_norm.pre", "mlp.down"]
    assert order({**NAMED["bert-base"], **tiny}) == ["attn.out", "attn_norm.post", "mlp.down", "mlp_norm.post"]
    assert order(GEMMA2) == [
        "attn_norm.pre", "attn.out", "attn_norm.out", "mlp_norm.pre", "mlp.down", "mlp_norm.out"
    ]  # fmt: skip
    assert order(PARALLEL) == ["norm", "attn.out", "mlp.down"]


def test_kinds_of_layers_are_told_apart() -> None:
    found = texts(spec_of(GEMMA2))
    assert {"block A, 3 layers: 0, 2, 4", "block B, 3 layers: 1, 3, 5", "× 3"} <= set(found)
    assert found.count("mask: causal & window(back=4)") == found.count("mask: causal") == 2  # overview and detail
    spec = spec_of(GEMMA2)
    kinds = {name: replace(kind, mask=causal() & window(9)) for name, kind in spec.decoder.kinds.items()}
    both = texts(replace(spec, decoder=replace(spec.decoder, kinds=kinds)))
    assert both.count("mask: causal & window(back=9)") == 4


def test_three_layouts() -> None:
    decoder, encoder, both = (texts(spec_of(NAMED[name])) for name in ("gpt2", "bert-base", "t5-base"))
    assert "gpt2, decoder" in decoder
    assert {"Position embedding", "Unembedding"} <= set(decoder)
    assert {"bert, encoder", "Token type embedding", "Unembedding", "mask: full"} <= set(encoder)
    assert {"encoder block, layers 0-11", "decoder block, layers 0-11", "of the encoder's output"} <= set(both)
    assert "of the encoder's output" not in decoder
    assert any(text.startswith("32 buckets") for text in both)


def test_folding() -> None:
    assert fold("ABABAB") == [(("A", "B"), 3)]
    assert fold("CBBABBABBA") == [(("C",), 1), (("B", "B", "A"), 3)]
    assert fold("AAAB") == [(("A",), 3), (("B",), 1)]
    assert fold("") == []
    assert layers_text([3]) == "layer 3"
    assert layers_text([0, 1, 2]) == "layers 0-2"
    assert layers_text([0, 2, 4, 6, 8, 10]) == "6 layers: 0, 2, 4, … 10"


def test_more_kinds_than_are_drawn_are_named() -> None:
    spec = spec_of({**NAMED["gpt2"], "n_layer": 8, "scale_attn_by_inverse_layer_idx": True})
    found = texts(spec)
    assert any("of 8 kinds of blocks 6 are shown, not block G, block H" in text for text in found)
    assert "block F, layer 5" in found
    assert "block G, layer 6" not in found


def test_it_is_whole_in_itself_and_has_words_for_readers() -> None:
    drawing = draw(spec_of(NAMED["t5-base"]))
    root = ElementTree.fromstring(drawing.svg)
    assert root.get("role") == "img"
    assert "t5, encoder-decoder: 222,903,552 parameters" in str(root.get("aria-label"))
    assert root.findtext(f"{SVG}title") == "t5, encoder-decoder"
    assert all(one.find(f"{SVG}title") is not None for one in root.iter(f"{SVG}g"))
    assert not re.search(r"http(?!://www.w3.org/2000/svg)|url\(|@import|<script", drawing.svg)
    assert "prefers-color-scheme: dark" in drawing.svg
    assert drawing._repr_svg_() == drawing.svg


def test_a_file(tmp_path: Path) -> None:
    drawing = draw(spec_of(NAMED["gpt2"]))
    drawing.save(tmp_path / "gpt2.svg")
    assert (tmp_path / "gpt2.svg").read_text(encoding="utf-8") == drawing.svg
    with pytest.raises(TriptychError, match=r"cannot write the drawing .*; choose another"):
        drawing.save(tmp_path / "none" / "gpt2.svg")


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_the_command_draws_what_the_model_draws(layout: str, tmp_path: Path, capsys: Captured) -> None:
    path, file = checkpoint(layout), tmp_path / "out.svg"
    expected = load(path).draw().svg
    assert said(["inspect", str(path), "--draw"], capsys)[0] == expected
    assert said(["inspect", str(path / "config.json"), "--draw", "--save", str(file)], capsys)[0] == ""
    assert file.read_text(encoding="utf-8") == expected
    assert json.loads(said(["inspect", str(path), "--draw", "--json"], capsys)[0])["svg"] == expected


def test_a_known_model_has_no_weights_to_read(capsys: Captured) -> None:
    assert "174,604,259,328 parameters" in said(["inspect", "gpt3-175b", "--draw"], capsys)[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["gpt2", "a text", "--draw"], "--draw shows the model itself, of any text; leave out TEXT"),
        (["gpt2", "--draw", "--head", "1"], "leave out --head"),
        (["gpt2", "--draw", "--program"], "leave out --program"),
        (["gpt2", "--draw", "--save", "out.png"], "must end in .svg"),
        (["gpt22", "--draw"], "gpt2"),
        (["gpt2", "--draw", "--save", "no/such/folder/out.svg"], "cannot write the drawing"),
    ],
)
def test_what_cannot_be_drawn(arguments: list[str], line: str, capsys: Captured) -> None:
    assert main(["inspect", *arguments]) in (1, 2)
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


OVERLAPS = """[...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")], boxes = texts.map((one) => one.getBoundingClientRect());
  const bad = [];
  const whole = svg.getBoundingClientRect();
  boxes.forEach((a, i) => {
    const parent = texts[i].parentNode, rect = parent.tagName === "g" ? parent.querySelector("rect") : svg;
    const r = rect.getBoundingClientRect();
    if (a.left < r.left || a.right > r.right || a.top < r.top - 1 || a.bottom > r.bottom + 1)
      bad.push(`${texts[i].textContent} leaves its box`);
    boxes.slice(i + 1).forEach((b, j) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top + 3 < b.bottom - 3 && b.top + 3 < a.bottom - 3)
        bad.push(`${texts[i].textContent} lies on ${texts[i + 1 + j].textContent}`);
    });
  });
  return bad;
})"""


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser")
@pytest.mark.parametrize("font", ["", "DejaVu Sans"])
def test_no_text_lies_on_another(font: str, browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    specs = [*(spec_of(config) for config in NAMED.values()), *map(references.read, references.NAMES)]
    style = f"<style>.triptych-drawing {{ font-family: '{font}' !important }}</style>" if font else ""
    page = tmp_path / "all.html"
    bodies = "".join(draw(spec).svg.replace("max-width: 100%; height: auto;", "") for spec in specs)
    page.write_text(f"<!doctype html><meta charset=utf-8>{style}{bodies}", encoding="utf-8")
    tab = browser.open(page)
    assert tab.evaluate("document.querySelectorAll('svg').length") == len(specs)
    assert tab.evaluate(OVERLAPS) == []
    assert tab.console() == []
    tab.evaluate("document.querySelectorAll('g text')[0].textContent = 'x'.repeat(99)")  # the check can fail
    assert tab.evaluate(OVERLAPS) != []
