"""Images to text: a ViT read by a decoder of another family, from the checkpoint to the caption."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import references
import triptych
from cli_models import Captured, said
from triptych import families
from triptych.cli import main
from triptych.errors import ConfigError, InputError
from triptych.mapping.config_keys import METADATA
from triptych.text import word_tokenizer

NAMES = sorted(references.NESTED)
# What may have any value: it describes a head, a training or a pooled vector that is not built.
FREE = {"pooler_act", "pooler_output_size", "classifier_dropout", "encoder_stride"}


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 2, 20, 20, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", NAMES)
def test_it_writes_what_the_reference_writes(name: str) -> None:
    reference, path = references.saved(name)
    model = triptych.load(path)
    pixels = images()
    with torch.no_grad():
        theirs = reference.generate(pixel_values=pixels, max_new_tokens=9, do_sample=False, num_beams=1)
    for row, one in zip(theirs.tolist(), model.generate(list(pixels), max_new_tokens=9), strict=True):
        written = row[1:]
        end = written.index(2) if 2 in written else len(written)
        assert one.ids[:end] == written[:end]
    assert len({tuple(one.ids) for one in model.generate(list(pixels), max_new_tokens=9)}) > 1  # images matter


@pytest.mark.parametrize("name", NAMES)
def test_beams_and_both_executors_agree(name: str) -> None:
    model = triptych.load(references.saved(name)[1])
    pixels = list(images())
    fast = model.generate(pixels, max_new_tokens=7, logprobs=2)
    beams = model.generate(pixels, max_new_tokens=7, beams=3)
    model.executor = "modules"
    slow = model.generate(pixels, max_new_tokens=7, logprobs=2)
    assert [one.ids for one in fast] == [one.ids for one in slow]
    for a, b in zip(fast, slow, strict=True):
        assert [x.logprob for x in a.logprobs or ()] == pytest.approx([x.logprob for x in b.logprobs or ()], abs=1e-4)
    assert [one.ids for one in beams] == [one.ids for one in model.generate(pixels, max_new_tokens=7, beams=3)]


@pytest.mark.parametrize("name", NAMES)
def test_what_it_saves_is_what_the_reference_opens(name: str, tmp_path: Path) -> None:
    import transformers

    reference, path = references.saved(name)
    triptych.load(path).save(tmp_path / "model")
    theirs, report = transformers.VisionEncoderDecoderModel.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    # Only the pooler, whose result no decoder reads.
    assert {key.partition(".pooler.")[0] for key in report["missing_keys"]} <= {
        "encoder"
    }  # the pooler, which none reads
    assert not report["unexpected_keys"]
    ids = torch.tensor([[1, 5, 9], [1, 7, 3]])
    with torch.no_grad():
        got = theirs.eval()(pixel_values=images(2), decoder_input_ids=ids).logits
        expected = reference(pixel_values=images(2), decoder_input_ids=ids).logits
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_both_configs_is_checked(name: str, side: str) -> None:
    hf, tensors = references.stored(name)
    ignored = families.find(hf[side]["model_type"]).ignore
    checked = hf[side].keys() - METADATA - FREE - ignored | {"model_type"}
    assert len(checked) > 7
    for key in sorted(checked):
        with pytest.raises(ConfigError, match=f"config.json: .*{side}"):
            families.read_config(hf | {side: hf[side] | {key: ["a", -1]}}, stored=tensors)
    unknown = hf | {side: hf[side] | {"attn_sauce": 1}}
    with pytest.raises(ConfigError, match=rf"{side}: 'attn_sauce' .* is not understood"):
        families.read_config(unknown, stored=tensors)
    assert families.read_config(unknown, stored=tensors, ignore=["attn_sauce"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"encoder": None}, "encoder is missing or empty"),
        ({"encoder": {"model_type": "swin"}}, "'swin' is not one of 'vit'"),
        ({"decoder": {"model_type": "trocr"}}, "'trocr' is not one of 'gpt2', 'bert'"),
        ({"add_cross_attention": False}, "add_cross_attention must be true"),
        ({"cross_attention_hidden_size": 18}, "cross_attention_hidden_size is 18"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is false"),
    ],
)
def test_what_it_cannot_be_is_refused_in_one_line(change: dict[str, Any], problem: str) -> None:
    hf, tensors = references.stored("vision-gpt2")
    inner = {key: value for key, value in change.items() if key.endswith(("_attention", "_hidden_size"))}
    hf = hf | ({"decoder": hf["decoder"] | inner} if inner else change)
    with pytest.raises(ConfigError, match=problem) as refused:
        families.read_config(hf, stored=tensors)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("config.json")


def test_a_bert_that_sees_later_tokens_is_refused() -> None:
    hf, tensors = references.stored("vision-bert")
    with pytest.raises(ConfigError, match="is_decoder must be true"):
        families.read_config(hf | {"decoder": hf["decoder"] | {"is_decoder": False}}, stored=tensors)


def test_special_tokens_are_the_outer_config_s_before_the_decoder_s() -> None:
    hf, _ = references.stored("vision-gpt2")
    assert families.read_config(hf).ids.start == 1
    outer = {key: value for key, value in hf.items() if not key.endswith("_token_id")}
    inner = {"bos_token_id": 5, "eos_token_id": 6, "decoder_start_token_id": 7}
    ids = families.read_config(outer | {"decoder": hf["decoder"] | inner}).ids
    assert (ids.bos, ids.eos, ids.start) == (5, (6,), 7)
    assert families.read_config(outer | {"decoder": hf["decoder"] | inner, "eos_token_id": 8}).ids.eos == (8,)


# ---------------------------------------------------------------- captions


@pytest.fixture
def captioner(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image", reason="images need Pillow")
    tokenizer = word_tokenizer(["a red square left of a blue circle"], 60)
    encoder = {"model_type": "vit", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1,
               "num_attention_heads": 3, "image_size": 20, "patch_size": 5}  # fmt: skip
    decoder = {"model_type": "gpt2", "n_embd": 30, "n_layer": 2, "n_head": 3, "n_positions": 40, "is_decoder": True,
               "add_cross_attention": True, "vocab_size": tokenizer.vocab_size}  # fmt: skip
    hf = {"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": decoder, "decoder_start_token_id": 1}
    triptych.create(hf, tokenizer, seed=3).save(tmp_path / "model")
    for name, shade in (("a.png", 30), ("b.png", 220)):
        image.fromarray(np.full((31, 17, 3), shade, np.uint8)).save(tmp_path / name)
    return tmp_path


def test_the_command_writes_a_text_for_each_image(captioner: Path, capsys: Captured) -> None:
    files = [str(captioner / name) for name in ("a.png", "b.png")]
    arguments = ["caption", str(captioner / "model"), *files, "--max-new-tokens", "5"]
    rows = json.loads(said([*arguments, "--json"], capsys)[0])["results"]
    written = triptych.load(captioner / "model").generate(files, max_new_tokens=5)
    assert [(row["image"], row["text"]) for row in rows] == list(zip(files, [one.text for one in written], strict=True))
    shown = said(arguments, capsys)[0].splitlines()
    assert shown == [f"{file}: {one.text.strip()}" for file, one in zip(files, written, strict=True)]


def test_the_command_stops_where_a_short_decoder_has_no_more_positions(captioner: Path, capsys: Captured) -> None:
    assert main(["caption", str(captioner / "model"), str(captioner / "a.png"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert len(row["ids"]) == 39


def test_the_command_refuses_what_does_not_fit(captioner: Path, capsys: Captured) -> None:
    vit = {"model_type": "vit", "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 1,
           "num_attention_heads": 3, "image_size": 20, "patch_size": 5}  # fmt: skip
    triptych.create(vit).save(captioner / "vit")
    triptych.load(references.saved("gpt2")[1]).save(captioner / "gpt2")
    for model, file, problem in (
        ("vit", "a.png", "triptych classify"),
        ("gpt2", "a.png", "does not read images"),
        ("model", "absent.png", "No such file"),
    ):
        error = said(["caption", str(captioner / model), str(captioner / file)], capsys, 1)[1]
        assert error.count("\n") == 1
        assert problem in error


def test_text_is_no_image() -> None:
    model = triptych.load(references.saved("vision-gpt2")[1])
    with pytest.raises(InputError, match="pixels"):
        model.generate([[5, 6, 7]], max_new_tokens=5)


def test_what_is_missing_for_blip_2_is_named_in_one_line() -> None:
    with pytest.raises(ConfigError, match="'blip-2' needs a part that is missing here: a Q-Former") as refused:
        families.read_config({"model_type": "blip-2"})
    assert "\n" not in str(refused.value)
