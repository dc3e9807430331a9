"""`triptych ablate`, `patch`, `lens` and `generate --steer`: what the library gives, and what they refuse."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cli_models
from cli_models import Captured, answered, refused, said
from triptych.errors import InputError
from triptych.model import load
from triptych.page.interventions import lens_page, patch_page
from triptych.probe.sites import typed_head

PATCH = ["patch", "--clean", "abc", "--corrupt", "axc"]
GENERATE = ["generate", "abc", "--max-new-tokens", "2"]
NASTY = "</script><img onerror=x>\x1b[31m"


@pytest.fixture(scope="module")
def decoder() -> str:
    return str(cli_models.checkpoint("decoder"))


@pytest.fixture(scope="module")
def both() -> str:
    return str(cli_models.checkpoint("encoder-decoder"))


def test_a_head_as_it_is_typed(decoder: str, both: str) -> None:
    one, two = load(decoder).spec, load(both).spec
    for text in ("L2H5", "2.5", " l2h5", "decoder 2.5"):
        assert typed_head(one, text) == ("blocks.2.attn", 5)
    assert typed_head(two, "cross.L2H1") == ("decoder.blocks.2.cross", 1)
    assert typed_head(two, "encoder 1.0") == ("encoder.blocks.1.attn", 0)
    for spec, text, line in (
        (one, "L3H0", "there are layers 0..2 and heads 0..5; the nearest is L2H0"),
        (one, "L0H9", "the nearest is L0H5"),
        (one, "head 3", "write L4H2, layer and head counted from 0"),
        (one, "", "is not a head"),
        (one, "encoder.L0H0", "is decoder alone"),
        (two, "L0H0", "write encoder.L4H2, decoder.L4H2 or cross.L4H2"),
        (two, "encoder.L2H9", "the nearest is encoder.L1H5"),
    ):
        with pytest.raises(InputError, match=line):
            typed_head(spec, text)


# ---------------------------------------------------------------- ablate


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_heads_by_name(kind: str, decoder: str, capsys: Captured) -> None:
    printed = answered(["ablate", decoder, "abc", "xyz", "--heads", "L1H4,L0H2", "--kind", kind], capsys)
    expected = load(decoder).ablate(["abc", "xyz"], how=kind, heads=[(1, 4), (0, 2)])
    assert printed["units"] == ["blocks.0.attn.z head 2", "blocks.1.attn.z head 4"]
    assert printed["effect"] == pytest.approx(expected.effect.tolist(), abs=1e-5)
    every = load(decoder).ablate(["abc", "xyz"], how=kind)
    of_name = dict(zip([unit.name for unit in every.units], every.effect.tolist(), strict=True))
    assert printed["effect"] == pytest.approx([of_name[name] for name in printed["units"]], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        (["--part", "neurons", "--within", "blocks.1.*", "--unit", "7"], "blocks.1.mlp.act neuron 7"),
        (["--part", "blocks", "--answer", "d", "--other", "e"], "blocks.2"),
        (["--part", "positions", "--position", "1", "--at", "2"], "1 b"),
        (["--part", "mlp", "--kind", "mean", "--reference", "another text"], "blocks.2.mlp.out"),
        (["--part", "attention", "--metric", "kl"], "blocks.0.attn.out"),
    ],
)
def test_parts(options: list[str], unit: str, decoder: str, capsys: Captured) -> None:
    out, err = said(["ablate", decoder, "abc", *options], capsys)
    assert not err
    assert unit in out
    assert "values " in out
    assert "in nats, at the last token" in out or "in the whole model" in out or "--at" in options


def test_an_encoder_decoder_and_few_lines(both: str, capsys: Captured) -> None:
    assert "2 of " in said(["ablate", both, "abc", "--target", "de", "--top", "2"], capsys)[1]
    out, _ = said(["ablate", both, "abc", "--target", "de", "--heads", "cross.L2H3"], capsys)
    assert "decoder.blocks.2.cross.z head 3" in out


@pytest.mark.parametrize(
    ("path", "senders", "receivers", "into"),
    [
        ("L0H1,L0H2:L1H4.k", [(0, 1), (0, 2)], [(1, 4)], "k"),
        ("0.1:L1H4.v,L2H0.v", [(0, 1)], [(1, 4), (2, 0)], "v"),
        ("L2H1:logits", [(2, 1)], "logits", "q"),
    ],
)
def test_paths(
    path: str, senders: list[tuple[int, int]], receivers: object, into: str, decoder: str,
    capsys: Captured,
) -> None:  # fmt: skip
    printed = answered(["patch", decoder, *PATCH[1:], "--answer", "d", "--path", path], capsys)
    expected = load(decoder).path_patch("abc", "axc", senders, receivers, into=into, answer="d")  # type: ignore[arg-type]
    assert printed["rows"] == list(expected.rows)
    assert printed["columns"] == list(expected.columns)
    values = [value for row in printed["values"] for value in row]
    assert values == pytest.approx(expected.values.flatten().tolist(), abs=1e-4)
    frozen = answered(["patch", decoder, *PATCH[1:], "--answer", "d", "--path", path, "--freeze-mlps"], capsys)
    assert frozen["values"] != printed["values"]


# ---------------------------------------------------------------- generate --steer


def test_steering_is_that_of_the_library(decoder: str, tmp_path: Path, capsys: Captured) -> None:
    model, pair = load(decoder), ["--toward", "abc", "--away", "xyz"]
    edit = model.steer("abc", "xyz", site="blocks.1.resid_post", scale=6.0)
    plain = model.generate(["Mill"], max_new_tokens=8)[0].text
    expected = model.generate(["Mill"], max_new_tokens=8, edit=edit)[0].text
    assert expected != plain
    file = tmp_path / "vector.safetensors"
    rows = model.trace(["abc", "xyz"], read=["blocks.1.resid_post"])["blocks.1.resid_post"]
    save_file({"vector": (rows[0][-1] - rows[1][-1]).contiguous()}, file)
    for steer in (["--steer", "1:6", *pair], ["--steer", "blocks.1.resid_post:6", *pair], ["--steer", f"{file}@1:6"]):
        how = ["--max-new-tokens", "8", *steer]
        assert said(["generate", decoder, "Mill", *how], capsys)[0] == expected + "\n"
        results = answered(["generate", decoder, "Mill", "Mill", *how], capsys)["results"]
        assert [one["text"] for one in results] == [expected] * 2


def test_beams_and_guesses_are_steered(decoder: str, capsys: Captured) -> None:
    model = load(decoder)
    edit = model.steer("abc", "xyz", site="blocks.1.resid_post", scale=6.0)
    steer = ["--max-new-tokens", "8", "--steer", "1:6", "--toward", "abc", "--away", "xyz"]
    for options, how in ((["--beams", "3"], {"beams": 3}), (["--draft", "ngram"], {})):
        (expected,) = model.generate(["Mill"], max_new_tokens=8, edit=edit, **how)
        assert said(["generate", decoder, "Mill", *steer, *options], capsys)[0] == expected.text + "\n"


@pytest.mark.parametrize("site", ["encoder.blocks.1.resid_post", "2", "decoder.blocks.0.resid_mid"])
def test_both_stacks_are_steered(site: str, both: str, tmp_path: Path, capsys: Captured) -> None:
    vector, file = torch.linspace(-1, 1, 24), tmp_path / "v.safetensors"
    save_file({"v": vector}, file)
    name = "decoder.blocks.2.resid_post" if site == "2" else site
    model = load(both)
    (expected,) = model.generate(["abc"], max_new_tokens=3, edit=model.steer(site=name, vector=vector, scale=30.0))
    found = answered(["generate", both, "abc", "--max-new-tokens", "3", "--steer", f"{file}@{site}:30"], capsys)
    assert found["results"][0]["ids"] == expected.ids


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({"a": torch.zeros(24), "b": torch.zeros(24)}, "holds 2 tensors"),
        ({"a": torch.zeros(2, 24)}, "holds a tensor [2, 24]"),
        ({"a": torch.ones(23)}, "it must be 24 finite numbers"),
        ({"a": torch.full((24,), torch.nan)}, "it must be 24 finite numbers"),
    ],
)
def test_files_that_hold_no_vector(
    tensors: dict[str, torch.Tensor], line: str, decoder: str, tmp_path: Path, capsys: Captured
) -> None:
    save_file(tensors, tmp_path / "v.safetensors")
    assert line in refused(["generate", decoder, "abc", "--steer", f"{tmp_path / 'v.safetensors'}@1"], capsys)


# ---------------------------------------------------------------- grids and lenses


def test_a_grid_in_json_is_that_of_the_library(decoder: str, capsys: Captured) -> None:
    printed = answered(
        ["patch", decoder, "--clean", "abc", "--corrupt", "axc", "--answer", "d", "--other", "e"], capsys
    )
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
def test_tables(options: list[str], columns: str, decoder: str, capsys: Captured) -> None:
    out, err = said(["patch", decoder, "--clean", "abc", "--corrupt", "axc", *options], capsys)
    assert not err
    assert "share restored" in out
    assert columns in out


def test_an_encoder_decoder_and_a_masked_encoder(capsys: Captured) -> None:
    both, encoder = (str(cli_models.checkpoint(layout)) for layout in ("encoder-decoder", "encoder"))
    out, _ = said(["patch", both, "--clean", "abc", "--corrupt", "axc", "--target", "de"], capsys)
    assert "target 1 d" in out
    texts = ("the old [MASK] stands", "the new [MASK] stands")
    assert not said(["patch", encoder, "--clean", texts[0], "--corrupt", texts[1], "--answer", "mill"], capsys)[1]
    assert "sum to" in said(["lens", encoder, texts[0], "--attribution"], capsys)[1]
    out, _ = said(["lens", both, "abc", "--stack", "encoder", "--top", "2", "--position", "1"], capsys)
    assert "encoder.blocks.1.resid_post" in out


@pytest.mark.weights
def test_which_weights_multiply_is_said(smollm2_gguf: Path, capsys: Captured) -> None:
    """One text has other digits with packed weights."""
    packed, full = "weights: packed", "weights: full, unpacked from the file"
    for argv, note in (
        (["lens", str(smollm2_gguf), "She sat"], packed),
        (["lens", str(smollm2_gguf), "She sat", "--quantize", "none"], full),
        (["explain", str(smollm2_gguf), "She sat"], full),
    ):
        assert said(argv, capsys)[1].startswith(note)


def test_lenses(decoder: str, capsys: Captured) -> None:
    out, err = said(["lens", decoder, "abc"], capsys)
    assert not err
    assert "blocks.2.resid_post" in out
    shown = said(["lens", decoder, "abc", "--top", "3"], capsys)[0]
    assert len(re.findall(r"\d%", shown)) == 3 * len(re.findall(r"\d%", out))
    printed = answered(["lens", decoder, "abc", "--top", "2", "--position", "1", "--position", "2"], capsys)
    assert printed["positions"] == [1, 2]
    assert len(printed["names"][0][0]) == 2
    parts = answered(["lens", decoder, "abc", "--attribution", "--answer", "d", "--other", "e"], capsys)
    assert sum(parts["values"]) == pytest.approx(parts["logit"], abs=1e-4)
    assert "the last 10 of" in said(["lens", decoder, "a long text of letters"], capsys)[1]


def test_control_characters_do_not_reach_the_terminal(decoder: str, capsys: Captured) -> None:
    assert "\x1b" not in "".join(said(["lens", decoder, NASTY], capsys))
    assert "\x1b" not in refused(["patch", decoder, "--clean", NASTY, "--corrupt", f"{NASTY} "], capsys)
    assert "\x1b" not in said(["patch", decoder, "--clean", "a\x1bb", "--corrupt", "c\x1bb"], capsys)[0]


def test_pages_hold_any_text_as_text(decoder: str, tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "page.html"
    argv = ["patch", decoder, "--clean", NASTY + "a", "--corrupt", NASTY + "b", "--heads", "--save", str(page)]
    out, err = said(argv, capsys)
    assert not out
    assert "open it in a browser" in err
    for argv in (["lens", decoder, NASTY], ["lens", decoder, NASTY, "--attribution"]):
        assert "<img" not in page.read_text("utf-8")
        assert len(re.findall("<script", page.read_text("utf-8"))) == 2
        page.unlink()
        said([*argv, "--save", str(page)], capsys)


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
        (["ablate", "abc", "--heads", "L9H1"], 1, "the nearest is L2H1"),
        (["ablate", "abc", "--heads", "L1H6"], 1, "the nearest is L1H5"),
        (["ablate", "abc", "--heads", "L1H1,,"], 1, "is not a head"),
        (["ablate", "abc", "--heads", "L1H1", "--part", "mlp"], 2, "--heads is for --part heads"),
        (["ablate", "abc", "--heads", "L1H1", "--within", "blocks.0.*"], 1, "leaves out blocks.1.attn"),
        (["ablate", "abc", "--unit", "3"], 2, "--unit is for --part neurons"),
        (["ablate", "abc", "--part", "neurons", "--unit", "37"], 1, "has neurons 0..36, not 37"),
        (["ablate", "abc", "--reference", "x"], 2, "--reference is for --kind"),
        (["ablate", "abc", "--kind", "meen"], 2, "meen"),
        (["ablate", "abc", "--position", "9"], 1, "9"),
        (["ablate", "abc", "--other", "d"], 2, "--other needs an --answer"),
        (["ablate", "a", "--kind", "mean", "--heads", "L0H1"], 1, "no ablation changed a value"),
        (["ablate", "abc", "--kind", "resample"], 1, "nothing to resample from"),
        (["ablate"], 2, "no text given"),
        ([*PATCH, "--path", "L0H1"], 2, "must be heads that give and heads that read"),
        ([*PATCH, "--path", "L0H1:"], 2, "must be heads that give and heads that read"),
        ([*PATCH, "--path", "L0H1:L1H4"], 2, "end in .q, .k or .v"),
        ([*PATCH, "--path", "L0H1:L1H4.k,L1H5.v"], 2, "all in the same"),
        ([*PATCH, "--path", "L0H1:L1H4.z"], 2, "end in .q, .k or .v"),
        ([*PATCH, "--path", "L0H7:logits"], 1, "the nearest is L0H5"),
        ([*PATCH, "--path", "L1H1:L0H4.k"], 1, "no path leads from"),
        ([*PATCH, "--path", "L0H1:logits", "--heads"], 2, "leave out --heads"),
        ([*PATCH, "--path", "L0H1:logits", "--gradient"], 2, "leave out --gradient"),
        ([*PATCH, "--freeze-mlps"], 2, "--freeze-mlps is for --path"),
        ([*GENERATE, "--steer", "1:nan", "--toward", "a", "--away", "b"], 2, "a scale other than 0"),
        ([*GENERATE, "--steer", "1:0", "--toward", "a", "--away", "b"], 2, "a scale other than 0"),
        ([*GENERATE, "--steer", "1:x", "--toward", "a", "--away", "b"], 2, "a scale other than 0"),
        ([*GENERATE, "--steer", ":2", "--toward", "a", "--away", "b"], 2, "must be a site"),
        ([*GENERATE, "--steer", "1"], 2, "needs --toward TEXT and --away TEXT"),
        ([*GENERATE, "--steer", "1", "--toward", "a"], 2, "needs --toward TEXT and --away TEXT"),
        ([*GENERATE, "--toward", "a"], 2, "--toward and --away are for --steer"),
        ([*GENERATE, "--steer", "f@1", "--toward", "a", "--away", "b"], 2, "not from both"),
        ([*GENERATE, "--steer", "1", "--toward", "a", "--away", "a"], 1, "the two prompts are the same"),
        ([*GENERATE, "--steer", "7", "--toward", "a", "--away", "b"], 1, "blocks.7.resid_post"),
        ([*GENERATE, "--steer", "blocks.1.attn.z", "--toward", "a", "--away", "b"], 1, "choose resid_post"),
        ([*GENERATE, "--steer", "none.safetensors@1"], 1, "none.safetensors"),
    ],
)
def test_what_is_refused_is_one_line(
    argv: list[str], code: int, says: str, decoder: str, unchecked: None, capsys: Captured
) -> None:
    assert says in refused([argv[0], decoder, *argv[1:]], capsys, code)
