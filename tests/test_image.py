"""Images: files prepared as the reference prepares them, and what they become in a model."""

import io
import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import references
import triptych
from cli_models import Captured, answered, said
from triptych.errors import ConfigError, InputError
from triptych.media.audio import read_wav
from triptych.media.image import Preparation, read_image
from triptych.text import word_tokenizer


def picture(width: int = 61, height: int = 43, mode: str = "RGB") -> Image.Image:
    random = np.random.default_rng(0)
    smooth = Image.fromarray(random.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize((width, height))
    return smooth.convert(mode)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
@pytest.mark.parametrize("resample", [2, 3])
def test_pixels_are_the_reference_s(mode: str, resample: int, tmp_path: Path) -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    how = {"size": {"height": 20, "width": 20}, "image_mean": [0.4, 0.5, 0.3], "image_std": [0.2, 0.3, 0.6]}
    picture(mode=mode).save(tmp_path / "a.png")
    processor = ViTImageProcessorPil(**how, resample=resample)
    expected = processor(picture(mode=mode).convert("RGB"), return_tensors="np")["pixel_values"][0]
    found = read_image(tmp_path / "a.png", Preparation.of({**how, "resample": resample}, (32, 32)))
    assert found.shape == expected.shape == (3, 20, 20)
    assert np.abs(found - expected).max() <= 1e-5
    other = read_image(tmp_path / "a.png", Preparation.of({**how, "resample": 5 - resample}, (32, 32)))
    assert np.abs(other - expected).max() > 0.01


@pytest.mark.parametrize(
    "how",
    [
        {"size": 20},
        {"size": [20, 20], "image_mean": 0.4, "image_std": [0.2, 0.3, 0.6]},
        {"size": {"height": 26, "width": 28}, "do_center_crop": True, "crop_size": {"height": 20, "width": 20}},
        {"size": {"shortest_edge": 24}, "do_center_crop": True, "crop_size": 20},
        {"size": 20, "rescale_factor": 1 / 127.5, "do_normalize": False},
    ],
)
@pytest.mark.parametrize("width", [61, 31])
def test_every_spelling_of_a_size_is_the_reference_s(how: dict, width: int, tmp_path: Path) -> None:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    picture(width).save(tmp_path / "a.png")
    expected = ViTImageProcessorPil(**how)(picture(width), return_tensors="np")["pixel_values"][0]
    found = read_image(tmp_path / "a.png", Preparation.of(how, (20, 20)))
    assert found.shape == expected.shape == (3, 20, 20)
    assert np.abs(found - expected).max() <= 1e-5
    plain = read_image(tmp_path / "a.png", Preparation(height=20, width=20))
    assert how == {"size": 20} or np.abs(plain - expected).max() > 0.01


def test_a_picture_is_turned_as_it_was_taken(tmp_path: Path) -> None:
    held = Image.Exif()
    held[0x0112] = 6  # the camera lay on its side
    picture().save(tmp_path / "a.png")
    picture().rotate(90, expand=True).save(tmp_path / "b.png", exif=held)
    how = Preparation(height=20, width=20)
    assert np.array_equal(read_image(tmp_path / "a.png", how), read_image(tmp_path / "b.png", how))


def test_what_is_not_resized_must_fit(tmp_path: Path) -> None:
    how = Preparation.of({"do_resize": False}, (20, 20))
    picture(20, 20).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", how).shape == (3, 20, 20)
    picture().save(tmp_path / "a.png")
    with pytest.raises(InputError, match="is 61 x 43; its model takes 20 x 20, unresized"):
        read_image(tmp_path / "a.png", how)


def test_what_a_config_leaves_out_is_vit_s() -> None:
    assert Preparation.of({}, (32, 32)) == Preparation(height=32, width=32)
    assert Preparation.of({}, (32, 24)) == Preparation(height=32, width=24)
    assert Preparation.of({"size": 16}, (32, 32)).height == 16
    raw = Preparation.of({"do_resize": False, "do_rescale": False, "do_normalize": False, "size": 9}, (32, 32))
    assert (raw.height, raw.scale, raw.mean, raw.std) == (32, 1.0, (0.0,) * 3, (1.0,) * 3)
    for bad in ({"size": "big"}, {"size": -1}, {"size": {"height": 3, "width": 0}}, {"image_std": [1, 0, 1]},
                {"image_mean": [1]}, {"resample": 9}, {"size": {"shortest_edge": 9}}, {"image_mean": "x"},
                {"size": 9, "do_center_crop": True}, {"size": 8, "crop_size": [9, 8], "do_center_crop": True},
                {"rescale_factor": 1e400},
                {"image_std": 1e-320}, {"image_std": 1e-30}, {"rescale_factor": 1e300},
                {"image_mean": float("nan")}, {"size": 10**30}):  # fmt: skip
        with pytest.raises(ConfigError, match="preprocessor_config"):
            Preparation.of(bad, (32, 32))


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    held = io.BytesIO()
    picture().save(held, "PNG")
    how, path = Preparation(height=8, width=8), tmp_path / "a.png"
    for raw in (b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", held.getvalue()[:90], b"RIFF....WAVEfmt "):
        path.write_bytes(raw)
        with pytest.raises(InputError, match="image") as refused:
            read_image(path, how)
        assert str(path) in str(refused.value)
    head = bytearray(held.getvalue())
    head[16:24] = (60_000).to_bytes(4, "big") * 2
    path.write_bytes(bytes(head))
    with pytest.raises(InputError):
        read_image(path, how)


def png(width: int, height: int, rows: int, *, interlaced: bool = False) -> bytes:
    """A grey PNG of this size, with the pixels of its first `rows` rows alone (of an interlaced one, all or none)."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    grid = [(0, 8, 0, 8), (4, 8, 0, 8), (0, 4, 4, 8), (2, 4, 0, 4), (0, 2, 2, 4), (1, 2, 0, 2), (0, 1, 1, 2)]
    row = b"\0" + bytes(width)
    if interlaced:
        sizes = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, dx, y, dy in grid]
        pixels = b"".join((b"\0" + bytes(w)) * h for w, h in sizes if w > 0 and h > 0)[: None if rows else 0]
    else:
        pixels = b"".join(row for _ in range(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, int(interlaced))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels))
            + chunk(b"IEND", b""))  # fmt: skip


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("width", "height"), [(10, 100), (1, 1), (3, 2), (9, 9)])
def test_a_png_with_fewer_rows_than_its_header_gives_is_refused(
    width: int, height: int, interlaced: bool, tmp_path: Path
) -> None:
    path, small = tmp_path / "a.png", Preparation(height=8, width=8)
    path.write_bytes(png(width, height, height, interlaced=interlaced))
    assert read_image(path, small).shape == (3, 8, 8)
    path.write_bytes(png(width, height, 0 if interlaced else height * 5 // 100, interlaced=interlaced))
    with pytest.raises(InputError, match=r"cut short|truncated"):
        read_image(path, small)


def test_a_png_with_5_of_100_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(10, 100, 5))
    with pytest.raises(InputError, match="fewer rows of pixels than its header gives"):
        read_image(tmp_path / "a.png", Preparation(height=8, width=8))


@pytest.mark.parametrize(
    ("size", "problem"),
    [((1, 10_000), "resizing it to 224 x 2240000 takes 501,760,000 pixels"), ((100_000, 1), "takes 5,017,600,000")],
)
def test_a_thin_image_is_refused_before_it_is_resized(size: tuple[int, int], problem: str, tmp_path: Path) -> None:
    crop = {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
    Image.new("L", size).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=problem) as refused:
        read_image(tmp_path / "a.png", Preparation.of(crop, (224, 224)))
    assert "\n" not in str(refused.value)
    Image.new("L", (10, 200)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", Preparation.of(crop, (224, 224))).shape == (3, 224, 224)


def test_what_lies_between_the_two_passes_of_resizing_is_bounded_too(tmp_path: Path) -> None:
    """1 x 100,000 to 4,096 x 4,096 passes through 4,096 x 100,000."""
    Image.new("L", (1, 100_000)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match="takes 409,600,000 pixels"):
        read_image(tmp_path / "a.png", Preparation(height=4096, width=4096))


def test_pillow_s_own_limit_warns_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns above its limit and refuses above its double; warnings are errors in these tests."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2_000)
    Image.new("1", (50, 60)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", Preparation(height=8, width=8)).shape == (3, 8, 8)
    monkeypatch.setattr("triptych.media.image.MAX_PIXELS", 2_999)
    with pytest.raises(InputError, match="50 x 60 pixels are more than 2,999"):
        read_image(tmp_path / "a.png", Preparation(height=8, width=8))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 << 30)
    problems = {"pipe": "is a pipe or a device", "loop": "cannot be read", "zeros": "is a pipe or a device",
                ".": "is a directory", "absent": "No such file", "sparse": "10,737,418,240 bytes",
                "a\0b": "a path"}  # fmt: skip
    for name, problem in problems.items():
        for read in (lambda path: read_image(path, Preparation(height=8, width=8)), read_wav):
            with pytest.raises(InputError, match=problem) as refused:
                read(tmp_path / name)
            assert "\n" not in str(refused.value)


VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 24, "intermediate_size": 37,
       "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 20, "patch_size": 5,
       "id2label": {"0": "cat", "1": "dog", "2": "owl"}}  # fmt: skip


def test_a_file_is_read_as_its_pixels(tmp_path: Path) -> None:
    """A model of colours, from the file to labels; the preparation beside it travels with it."""
    triptych.create(VIT).save(tmp_path / "model")
    told = {"size": {"height": 20, "width": 20}, "image_mean": [0.1, 0.2, 0.3]}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(told))
    picture().save(tmp_path / "a.png")
    model = triptych.load(tmp_path / "model")
    pixels = torch.from_numpy(read_image(tmp_path / "a.png", Preparation.of(told, (20, 20))))
    (scores,) = model.logits([pixels])
    assert torch.equal(model.logits([tmp_path / "a.png"])[0], scores)
    (labels,) = model.classify([str(tmp_path / "a.png")])
    assert {name: pytest.approx(p) for name, p in labels} == dict(
        zip(["cat", "dog", "owl"], scores.softmax(-1).tolist(), strict=True)
    )
    assert [p for _, p in labels] == sorted((p for _, p in labels), reverse=True)
    trace = model.trace([pixels, pixels], read=["embed", "blocks.0.attn.pattern"])
    assert [x.shape for x in trace["embed"]] == [(17, 24)] * 2
    assert trace["blocks.0.attn.pattern"][0].shape == (3, 17, 17)
    model.save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "preprocessor_config.json").read_text()) == told


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (torch.zeros(2, 20, 19), r"not \[2, 20, 19\]"),
        (torch.zeros(20, 20), r"not \[20, 20\]"),
        (torch.full((2, 20, 20), torch.nan), "finite"),
        (torch.zeros(2, 20, 20, dtype=torch.long), "float tensor"),
        ([1, 2], "not list"),
    ],
)
def test_rows_of_another_form_are_refused(row: torch.Tensor, problem: str) -> None:
    model = triptych.load(references.saved("vit")[1])
    with pytest.raises(InputError, match=f"row 1: .*{problem}"):
        model.logits([torch.zeros(2, 20, 20), row])
    with pytest.raises(InputError, match="list of files"):
        model.logits("a.png")
    with pytest.raises(InputError, match="mask is for token ids"):
        model.logits([torch.zeros(2, 20, 20)], mask=torch.ones(1, 1))


def test_grey_levels_of_16_bits_are_those_of_8(tmp_path: Path) -> None:
    """Pillow's own conversion makes all levels above 255 white."""
    grey = np.arange(400, dtype=np.uint16).reshape(20, 20) % 251
    Image.fromarray(grey.astype(np.uint8)).save(tmp_path / "8.png")
    Image.fromarray(grey * 257).save(tmp_path / "16.png")
    how = Preparation(height=20, width=20)
    np.testing.assert_array_equal(read_image(tmp_path / "16.png", how), read_image(tmp_path / "8.png", how))
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "32.tif")
    with pytest.raises(InputError, match=r"32\.tif: has grey levels of 32 bits"):
        read_image(tmp_path / "32.tif", how)


def test_an_image_is_no_half_of_a_pair() -> None:
    model = triptych.load(references.saved("vit")[1])
    with pytest.raises(InputError, match="pairs of texts, and this vit model reads images"):
        model.classify([torch.zeros(2, 20, 20)], second=["a text"])


def test_classify_labels_images_and_texts(tmp_path: Path, capsys: Captured) -> None:
    triptych.create(VIT).save(tmp_path / "vit")
    tokenizer = word_tokenizer(["the old mill stands"], 60)
    bert = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 24,
            "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 3, "max_position_embeddings": 40,
            "vocab_size": tokenizer.vocab_size, "id2label": {"0": "good", "1": "bad"}}  # fmt: skip
    triptych.create(bert, tokenizer).save(tmp_path / "bert")
    picture().save(tmp_path / "a.png")
    for model, given in (("vit", str(tmp_path / "a.png")), ("bert", "the mill")):
        (row,) = answered(["classify", str(tmp_path / model), given, "--top", "2"], capsys)["results"]
        expected = triptych.load(tmp_path / model).classify([given])[0][:2]
        assert [(one["label"], one["score"]) for one in row["labels"][:2]] == [
            (a, pytest.approx(b)) for a, b in expected
        ]
        assert expected[0][0] in said(["classify", str(tmp_path / model), given], capsys)[0]
    for argv, code, problem in ((["vit", "no.png"], 1, "No such file"), (["vit"], 2, "no text given")):
        error = said(["classify", str(tmp_path / argv[0]), *argv[1:]], capsys, code)[1]
        assert error.count("\n") == 1
        assert problem in error
