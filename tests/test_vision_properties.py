"""Images to text of random sizes, GPT-2 and BERT reading a ViT: logits, texts written by the likeliest token and by
beams, and directories written back, beside transformers."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import triptych
from training_cases import vision_reference
from triptych import nn
from triptych.model import Model
from triptych.nn import flat

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("quiet_transformers")]

SEEDS = 12
WITHIN = 1e-4  # of log-probabilities in fp32, as everywhere
LENGTHS = (7, 3, 5)
MOST = 6  # tokens that are written


def made(seed: int) -> tuple[Any, Model, Tensor, list[list[int]]]:
    """The reference, the same model here, images and ragged texts."""
    reference = vision_reference(seed).eval()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = triptych.load(folder, dtype="float32")
    encoder, decoder = reference.config.encoder, reference.config.decoder
    sides = encoder.image_size if isinstance(encoder.image_size, list | tuple) else [encoder.image_size] * 2
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randn(len(LENGTHS), encoder.num_channels, *sides, generator=random)
    ids = [torch.randint(3, decoder.vocab_size, (n,), generator=random).tolist() for n in LENGTHS]
    return reference, model, pixels, ids


@torch.no_grad()
def scores(model: Any, pixels: Tensor, ids: list[list[int]]) -> list[Tensor]:
    """[T, V] of each text beside its image, alone."""
    if isinstance(model, Model):
        inputs, rows = flat(ids, torch.device("cpu"))
        batch = nn.Batch(inputs=inputs, rows=rows, source=model.module.flat(list(pixels)))
        return [one.log_softmax(-1) for one in rows.split(model.module.logits(batch))]
    each = [model(pixel_values=pixels[i : i + 1], decoder_input_ids=torch.tensor([row])) for i, row in enumerate(ids)]
    return [one.logits[0].log_softmax(-1) for one in each]


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def texts_of(reference: Any, pixels: Tensor, beams: int, penalty: float) -> list[tuple[list[int], float]]:
    """What the reference writes for each image, without start and end, and how likely the whole is."""
    settings = {"num_beams": beams, "length_penalty": penalty} if beams > 1 else {"num_beams": 1}
    written = reference.generate(pixel_values=pixels, max_new_tokens=MOST, do_sample=False, **settings)
    end = reference.config.eos_token_id
    rows = [row[1:] for row in written.tolist()]
    cut = [row[: row.index(end)] if end in row else row for row in rows]
    return [(row, likelihood(reference, pixels[i : i + 1], row, end in rows[i])) for i, row in enumerate(cut)]


def likelihood(reference: Any, pixels: Tensor, row: list[int], ended: bool) -> float:
    config = reference.config
    whole = [*row, *([config.eos_token_id] if ended else [])]
    table = scores(reference, pixels, [[config.decoder_start_token_id, *whole[:-1]]])[0]
    return float(table[range(len(whole)), whole].sum()) if whole else 0.0


def own_texts(
    model: Model, reference: Any, pixels: Tensor, beams: int, penalty: float
) -> list[tuple[list[int], float]]:
    end = reference.config.eos_token_id
    settings: dict[str, Any] = {"beams": beams, "length_penalty": penalty} if beams > 1 else {}
    results = model.generate(list(pixels), max_new_tokens=MOST, **settings)
    rows = [list(one.ids) for one in results]
    cut = [row[: row.index(end)] if end in row else row for row in rows]
    ended = [len(row) < MOST or end in full for row, full in zip(cut, rows, strict=True)]
    return [(row, likelihood(reference, pixels[i : i + 1], row, ended[i])) for i, row in enumerate(cut)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_computes_what_the_reference_computes_and_both_open_the_other_s_file(seed: int, tmp_path: Path) -> None:
    import transformers

    reference, model, pixels, ids = made(seed)
    expected = scores(reference, pixels, ids)
    assert apart(scores(model, pixels, ids), expected) < WITHIN
    assert apart(scores(model, pixels.flip(0), ids), expected) > WITHIN  # images matter
    model.save(tmp_path / "ours")
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "ours").eval()
    assert apart(scores(theirs, pixels, ids), expected) < WITHIN
    theirs.save_pretrained(tmp_path / "theirs")
    assert apart(scores(triptych.load(tmp_path / "theirs"), pixels, ids), expected) < WITHIN


@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_writes_what_the_reference_writes(seed: int) -> None:
    """Where two texts are equally likely but for rounding, either may be written."""
    reference, model, pixels, _ = made(seed)
    for beams, penalty in ((1, 1.0), (3, 1.0), (4, 0.0)):
        expected = texts_of(reference, pixels, beams, penalty)
        found = own_texts(model, reference, pixels, beams, penalty)
        for (row, score), (wanted, best) in zip(found, expected, strict=True):
            assert row == wanted or abs(score - best) < WITHIN, (beams, penalty)
