"""inspect, check, count and doctor as a user types them."""

import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import triptych
from cli_models import Captured, answered, checkpoint, said
from triptych.check import paths
from triptych.checkpoints.describe import describe
from triptych.cli import main
from triptych.cli.inspect import experts_in_one, numberless, ranges
from triptych.model import load
from triptych.spec import causal, full, same_document, window
from triptych.spec.masks import mask_text

ROOT = Path(__file__).parents[1]
QWEN3_4B = ROOT / "docs" / "examples" / "qwen3-4b"


# ---------------------------------------------------------------- a header


@pytest.mark.parametrize("layout", ["decoder", "encoder", "encoder-decoder"])
def test_inspect_tells_what_load_finds(layout: str, capsys: Captured) -> None:
    path = checkpoint(layout)
    model, found = load(path), answered(["inspect", str(path)], capsys)
    assert found["layout"] == layout
    assert found["parameters"] == sum(p.numel() for p in model.module.parameters())
    assert found["ties"] == model.report.ties
    assert {(one["name"], *one["becomes"]) for one in found["tensors"]} == {
        (*one.sources, one.ours) for one in model.report.tensors
    }
    assert found["stored_bytes"] == sum(prod(one["shape"]) * 4 for one in found["tensors"])
    assert found["tokenizer"]["tokens"] == model.spec.vocab
    assert found["tokenizer"]["chat_template"] == (layout == "decoder")


def test_inspect_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("triptych.checkpoints.safetensors.SafetensorsSource.read", read)
    assert describe(checkpoint("encoder")).tensors


def test_inspect_shows_a_calm_table(capsys: Captured) -> None:
    out = said(["inspect", str(checkpoint("decoder"))], capsys)[0]
    assert re.search(r"blocks\.0-2\s+Block", out)
    assert re.search(r"model\.layers\.0-2\.mlp\.up_proj\.weight\s+decoder\.blocks\.0-2\.mlp\.up\.weight\s+37 × 24", out)
    assert "eos <|endoftext|> = 256" in out
    assert "blocks.{i}.attn.pattern" in out


def test_equal_blocks_are_one_line_and_others_are_not() -> None:
    def names(line: Any) -> list[str]:
        return [line.name, *(name for below in line.below for name in names(below))]

    found = names(describe(checkpoint("encoder-decoder")).tree)
    assert "blocks.0-1" in found  # the encoder's
    assert "blocks.0-2" in found  # the decoder's
    assert {"q", "k", "v", "out"} <= set(found)  # equal too, but not a row of siblings


def test_numberless() -> None:
    assert numberless(("blk.7.q.weight", "decoder.blocks.7.attn.q.weight")) == (
        ("blk.{i}.q.weight", "decoder.blocks.{i}.attn.q.weight"),
        ("7",),
    )
    assert numberless(("a.1.b", "c.2.d")) == (("a.1.b", "c.2.d"), ())
    assert numberless(("embed.weight",)) == (("embed.weight",), ())
    mixture = ("l.4.experts.9.w", "b.4.e.9.gate.w")
    assert numberless(mixture) == (("l.{i}.experts.{e}.w", "b.{i}.e.{e}.gate.w"), ("4", "9"))
    deeper = ("block.1.layer.1.w", "blocks.1.attn.w")
    assert numberless(deeper) == (("block.{i}.layer.1.w", "blocks.{i}.attn.w"), ("1",))


def test_experts_in_one() -> None:
    assert experts_in_one(("b.2.experts.0.gate.w", "b.2.experts.1.gate.w")) == ("b.2.experts.0-1.gate.w",)
    apart = ("b.2.attn.q.w", "b.2.attn.k.w", "norm")
    assert experts_in_one(apart) == apart


def test_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([]) == ""


def test_masks_in_words() -> None:
    assert mask_text(causal() & window(512)) == "causal & window(back=512)"
    assert mask_text(causal() | same_document()) == "causal | same_document"
    assert mask_text(full()) == "full"


# ---------------------------------------------------------------- a text inside


def test_inspect_a_text(capsys: Captured) -> None:
    path = checkpoint("decoder")
    model = load(path)
    found = answered(["inspect", str(path), "Mill", "--layer", "1", "--head", "4"], capsys)
    expected = model.trace(["Mill"], read=["blocks.1.attn.pattern"])["blocks.1.attn.pattern"][0][4:5]
    (one,) = found["maps"]
    assert (one["stack"], one["layer"], one["heads"]) == ("decoder", 1, [4])
    assert one["queries"] == one["keys"] == ["M", "i", "l", "l"]
    np.testing.assert_allclose(one["pattern"], expected.numpy())


def test_inspect_shows_where_a_token_draws_from(capsys: Captured) -> None:
    out = said(["inspect", str(checkpoint("decoder")), "Mill", "--layer", "0", "--head", "0"], capsys)[0]
    assert "decoder layer 0, head 0" in out
    assert re.search(r"M\s+M 100%", out)


def test_inspect_another_site(capsys: Captured) -> None:
    path = checkpoint("decoder")
    found = answered(["inspect", str(path), "Mill", "--site", "blocks.*.mlp.out"], capsys)
    site = load(path).trace(["Mill"], read=["blocks.2.mlp.out"])["blocks.2.mlp.out"][0]
    assert [one["site"] for one in found["values"]] == [f"blocks.{i}.mlp.out" for i in range(3)]
    assert found["values"][2]["shape"] == [4, 24]
    assert found["values"][2]["norm"] == pytest.approx(float(site.norm(dim=1).mean()))


def test_inspect_an_encoder_decoder_in_all_three_places(capsys: Captured) -> None:
    argv = ["inspect", str(checkpoint("encoder-decoder")), "Mill", "--target", "ab"]
    found = answered(argv, capsys)
    assert [(one["stack"], one["layer"]) for one in found["maps"]] == [
        ("encoder", 0), ("encoder", 1), *((stack, i) for i in range(3) for stack in ("decoder", "cross"))
    ]  # fmt: skip
    cross = found["maps"][-1]
    assert cross["queries"] == ["<pad>", "a", "b", "</s>"]
    assert cross["keys"] == ["M", "i", "l", "l", "</s>"]


def test_inspect_saves_a_page(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "attention.html"
    assert not said(["inspect", str(checkpoint("encoder")), "the <b> mill", "--save", str(page)], capsys)[0]
    html = page.read_text(encoding="utf-8")
    assert "the &lt;b&gt; mill" in html
    assert "<b> mill" not in html


def test_inspect_saves_a_picture(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "attention.PNG"
    said(["inspect", str(checkpoint("encoder")), "the mill", "--layer", "0", "--save", str(picture)], capsys)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "endings"),
    [
        (["inspect", "m", "text", "--save", "out.pdf"], ".html or .htm or .svg or .png or .json"),
        (["explain", "--example", "L2.1", "--save", "out.png"], ".html or .htm"),
        (["lab", "scaling", "--report", "out.png"], ".html or .htm"),
    ],
)
def test_a_file_of_another_kind_is_not_written(
    argv: list[str], endings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{argv[-2]} {argv[-1]} must end in {endings}" in said(argv, capsys, 2)[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("site", ["blocks.99.attn.out", "blocks.99.attn.*"])
def test_a_block_that_is_not_there_is_no_spelling_mistake(site: str, capsys: Captured) -> None:
    error = said(["inspect", str(checkpoint("encoder")), "the mill", "--site", site], capsys, 1)[1]
    assert "did you mean" not in error
    assert "its blocks are 0 to 1" in error


# ---------------------------------------------------------------- check, count, doctor


def test_check_passes_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    argv = ["check", str(checkpoint("encoder")), "--against", "none"]
    assert said(argv, capsys)[0].splitlines()[-1] == "passed"
    monkeypatch.setattr(paths, "max_abs_diff", lambda *_: 0.5)
    assert said(argv, capsys, code=1)[0].splitlines()[-1] == "FAILED: over 0.0001"
    assert answered(argv, capsys, code=1)["passed"] is False
    assert said([*argv, "--threshold", "0.6"], capsys, code=1)[0].count("FAILED") == 3  # bit-equal stays bit-equal


def test_count_the_lectures_figures(capsys: Captured) -> None:
    found = answered(["count", str(QWEN3_4B), "--context", "4096", "--dtype", "fp16"], capsys)
    assert found["parameters"]["total"] == 4_022_468_096
    assert found["chosen"]["cache_bytes"] == 603_979_776
    assert answered(["count", str(QWEN3_4B), "--context", "4096", "--batch", "3"], capsys)["chosen"]["cache_bytes"] == (
        3 * 603_979_776
    )
    out = said(["count", str(QWEN3_4B), "--context", "4096"], capsys)[0]
    assert "4,022,468,096" in out
    assert re.search(r"cache, fp16, 1 × 4,096 positions\s+603,979,776\s+576\.0 MiB", out)


def test_count_is_headed_by_the_name_and_says_what_no_position_reads(capsys: Captured) -> None:
    out, err = said(["count", "gpt3-175b", "--context", "4096"], capsys)
    assert "gpt3-175b (gpt2, decoder)" in out
    assert "--context 4,096 is beyond the 2,048 positions" in err
    assert not said(["count", "gpt3-175b"], capsys)[1]


def test_count_an_encoder_has_no_cache(capsys: Captured) -> None:
    assert "cache" not in said(["count", str(checkpoint("encoder"))], capsys)[0]


@pytest.mark.parametrize("argv", [["count", "--help"], ["train", "--help"]], ids=["count-help", "train-help"])
def test_needs_no_torch(argv: list[str]) -> None:
    code = f"import sys; from triptych.cli import main; main({argv!r}); print('torch' in sys.modules, file=sys.stderr)"
    src = str(Path(triptych.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=src)
    assert done.stderr.split() == ["False"]
    assert done.stdout


def test_doctor(capsys: Captured) -> None:
    found = answered(["doctor"], capsys)
    assert found["torch"]["version"] == torch.__version__
    assert 1 <= found["cores"]["usable"] <= found["cores"]["online"]
    assert found["extras"]["transformers"]
    out = said(["doctor"], capsys)[0]
    assert f"{found['cores']['usable']} usable of {found['cores']['online']}" in out
    assert "GPU" in out
    assert found["kernels"] in " ".join(out.split())


def test_a_program_is_printed_from_a_header(capsys: Captured) -> None:
    """The example directory has a config and no weights."""
    from triptych.cli import main

    out = said(["inspect", "docs/examples/qwen3-4b", "--program"], capsys)[0]
    assert "blocks.35.attn.q [N, 32, 128] = site(" in out
    assert "linear(hidden, decoder.embed.tokens.weight)" in out
    assert main(["inspect", "docs/examples/qwen3-4b", "a text", "--program"]) == 2


# ---------------------------------------------------------------- the run of an adapter


def test_the_run_of_an_adapter_opens_its_base(tmp_path: Path, capsys: Captured) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    load(checkpoint("decoder")).save(base)
    model = load(base)
    model.add_adapter(rank=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.requires_grad
    model.save_adapter(run / "model")
    for command in (["inspect"], ["inspect", "--program"], ["inspect", "--draw"], ["count"]):
        out, err = said([command[0], str(run), *command[1:]], capsys)
        assert f"is an adapter of {base}, which is shown without it" in " ".join(err.split())
        assert said([command[0], str(base), *command[1:]], capsys)[0] == out
    values = [answered(["inspect", str(path), "the old mill", "--site", "logits"], capsys) for path in (run, base)]
    assert values[0] != values[1]  # with a text the adapter is there
    assert main(["page", str(run), "--out", str(tmp_path / "run.html")]) == 0
    said(["explain", str(run), "the old mill"], capsys)
    (base / "config.json").rename(tmp_path / "gone")
    base.rename(tmp_path / "moved")
    assert main(["count", str(run)]) == 1
    assert f"is an adapter, not a model; name its base, '{base}'," in " ".join(capsys.readouterr().err.split())
