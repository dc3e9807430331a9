"""The GGUF reader and every dequantizer against the `gguf` package."""

import struct
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import references
import triptych
from triptych import count, native
from triptych.checkpoints import gguf_blocks, open_source
from triptych.checkpoints.convert import convert
from triptych.checkpoints.gguf_blocks import FORMATS, GGUFBlockFormat, PackedBlocks, block_format
from triptych.checkpoints.gguf_reader import GGUFSource
from triptych.checkpoints.gguf_writer import GGUFTensor, write_gguf
from triptych.errors import CheckpointError, ConfigError
from triptych.families import read_gguf
from triptych.mapping.gguf_types import TYPES
from triptych.quantize import repack

SCALES = {  # where the fp16 numbers of a block are: random bits there would be NaN
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


#: Types whose numbers come from the package, with where their fp16 scales are; those of the others are in other forms.
BY_PACKAGE = {
    "Q2_K": (80, 82), "Q3_K": (108,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ3_XXS": (0,), "IQ1_S": (0,), "IQ4_NL": (0,),
    "IQ3_S": (0,), "IQ2_S": (0,), "IQ4_XS": (0,), "IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 3) -> np.ndarray:
    """`[rows, blocks * bytes of a block]` of random bits with finite scales."""
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    dice = np.random.default_rng(seed)
    raw = dice.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    for at in {**SCALES, **BY_PACKAGE}[kind]:
        raw[:, at : at + 2] = dice.normal(size=(rows * blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, blocks * nbytes)


def oracle(raw: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("chunk", [256, 768, 1 << 20])
def test_dequantize_is_bit_equal_to_ggml(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_READ_CHUNK", chunk)  # several chunks, the last one short
    raw = random_blocks(kind, rows=7, blocks=5)
    ours = block_format(kind).unpack(torch.from_numpy(raw))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, oracle(raw, kind))


@pytest.mark.parametrize("kind", SCALES)
def test_every_byte_of_a_block_counts(kind: str) -> None:
    """Negative control: whichever byte is damaged, the numbers change, as the oracle's do."""
    raw = random_blocks(kind, rows=1, blocks=1)
    sound = block_format(kind).unpack(torch.from_numpy(raw))
    for at in range(raw.shape[1]):
        damaged = raw.copy()
        damaged[0, at] ^= 0x11  # both nibbles, and no exponent bit of a scale
        ours = block_format(kind).unpack(torch.from_numpy(damaged))
        assert not torch.equal(ours, sound), at
        assert torch.equal(ours, oracle(damaged, kind)), at


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dequantize_to_another_dtype_rounds_the_float32(dtype: torch.dtype) -> None:
    raw = random_blocks("Q5_K", rows=3, blocks=2)
    ours = block_format("Q5_K").unpack(torch.from_numpy(raw), dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, oracle(raw, "Q5_K").to(dtype))


def test_dequantize_keeps_leading_dimensions_and_refuses_a_plain_type() -> None:
    raw = torch.from_numpy(random_blocks("Q6_K", rows=6, blocks=2))
    assert block_format("Q6_K").unpack(raw.view(2, 3, -1)).shape == (2, 3, 512)
    with pytest.raises(CheckpointError, match="BF16 is not a packed type"):
        block_format("BF16").unpack(raw)


@pytest.mark.parametrize("kind", BY_PACKAGE)
def test_other_types_are_read_by_the_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_CHUNK", 768)  # several chunks, the last one short
    raw = random_blocks(kind, rows=7, blocks=5)
    with np.errstate(all="ignore"):
        theirs = oracle(raw, kind)
    ours = PackedBlocks(block_format(kind), torch.from_numpy(raw))
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.dense(), theirs, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(CheckpointError, match=f"{kind} can be read but not written"):
        ours.format.pack(theirs)
    with pytest.raises(CheckpointError, match=f"no kernel multiplies with {kind}"):
        repack(ours)


@pytest.mark.parametrize("kind", SCALES)
def test_what_the_package_reads_is_what_we_read(kind: str) -> None:
    """A control of the way through the package, by types that are read in both."""
    raw = torch.from_numpy(random_blocks(kind, rows=3, blocks=4))
    assert torch.equal(GGUFBlockFormat(TYPES[kind]).unpack(raw), block_format(kind).unpack(raw))


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    raw = torch.from_numpy(random_blocks("Q2_K", rows=2, blocks=1))
    with pytest.raises(CheckpointError, match=r"pip install gguf, or requantize the file to one of Q4_0, .*Q6_K$"):
        block_format("Q2_K").unpack(raw)
    assert block_format("Q4_K").unpack(torch.from_numpy(random_blocks("Q4_K", rows=2, blocks=1))).shape == (2, 256)


def test_a_model_in_other_types_opens_and_is_written_again(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 64, **sizes}
    triptych.create(config, seed=1).save(tmp_path / "plain.gguf")
    plain, kinds = open_source(tmp_path / "plain.gguf"), ("Q2_K", "IQ4_NL", "IQ3_S", "Q4_K")
    entries, numbers = [], {}
    for at, (name, info) in enumerate(plain.infos.items()):
        kind = kinds[at % len(kinds)] if len(info.shape) == 2 else "F32"
        values = plain.read(name)
        if kind != "F32":
            size = TYPES[kind]
            raw = random_blocks(kind, info.shape[0], info.shape[1] // size.elements, seed=at)
            values, numbers[name] = torch.from_numpy(raw), oracle(raw, kind)
        entries.append(GGUFTensor(name, kind, info.shape, partial(torch.clone, values)))
    dense = [replace(e, kind="F32", values=partial(torch.clone, numbers.get(e.name, e.values()))) for e in entries]
    write_gguf(tmp_path / "packed.gguf", plain.metadata, entries)
    write_gguf(tmp_path / "numbers.gguf", plain.metadata, dense)
    model, same = (triptych.load(tmp_path / f"{file}.gguf") for file in ("packed", "numbers"))
    exact = triptych.load(tmp_path / "packed.gguf", dequantize=True)
    assert torch.equal(exact.logits([[3, 5, 7]])[0], same.logits([[3, 5, 7]])[0])
    assert model.report is not None
    if native.library() is not None:
        assert any("no kernel multiplies with Q2_K" in note for note in model.report.notes)
    convert(tmp_path / "packed.gguf", tmp_path / "again.gguf")
    again, packed = (open_source(tmp_path / f"{name}.gguf") for name in ("again", "packed"))
    for name in numbers:
        assert again.infos[name].dtype == packed.infos[name].dtype
        assert torch.equal(again.read_raw(name), packed.read_raw(name))
    assert again.metadata["general.file_type"] in {TYPES[kind].file_type for kind in kinds}


def test_the_sizes_of_blocks_are_ggml_s() -> None:
    theirs = {kind.name: (int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {name: (kind.number, kind.elements, kind.nbytes) for name, kind in TYPES.items()} == {
        name: theirs[name] for name in TYPES
    }
    assert set(FORMATS) == {name for name, kind in TYPES.items() if kind.torch_dtype is None}
    assert all(kind.type is TYPES[name] for name, kind in FORMATS.items())
    packed = {name: {int(one): one.name for one in gguf.LlamaFileType}[kind.file_type] for name, kind in TYPES.items()
              if kind.file_type is not None}  # fmt: skip
    assert all(name in theirs_name for name, theirs_name in packed.items())
    assert set(SCALES) | set(BY_PACKAGE) == set(FORMATS)
    assert count.DTYPES["q6_k"] == Fraction(210, 256)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file by the `gguf` package with every readable type and every kind of metadata."""
    path = tmp_path / "every.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -3)
    writer.add_uint16("n.u16", 60_000)
    writer.add_int16("n.i16", -300)
    writer.add_uint32("n.u32", 4_000_000_000)
    writer.add_int32("n.i32", -70_000)
    writer.add_uint64("n.u64", 2**63 + 1)
    writer.add_int64("n.i64", -(2**40))
    writer.add_float32("n.f32", 1.5)
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("n.yes", True)
    writer.add_string("n.text", "naïve\nline")
    writer.add_array("n.strings", ["a", "", "é", "b" * 300])
    writer.add_array("n.ints", [3, -4, 5])
    writer.add_array("n.floats", [0.5, -2.0])
    writer.add_array("n.flags", [True, False, True])
    dice = np.random.default_rng(5)
    stored: dict[str, np.ndarray] = {
        "f32": dice.normal(size=(3, 5)).astype(np.float32),
        "f16": dice.normal(size=(7,)).astype(np.float16),
        "f64": dice.normal(size=(2, 3, 4, 5)),
        "i32": dice.integers(-9, 9, (11,), dtype=np.int32),
    }
    for name, array in stored.items():
        writer.add_tensor(name, array)
    halves = dice.normal(size=(5, 2)).astype(np.float32)
    writer.add_tensor("bf16", gguf.quants.quantize(halves, gguf.GGMLQuantizationType.BF16), raw_dtype=30)
    stored["bf16"] = torch.from_numpy(halves).bfloat16().float().numpy()
    for kind in SCALES:
        raw = random_blocks(kind, rows=6, blocks=3)
        writer.add_tensor(kind, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        stored[kind] = oracle(raw, kind).numpy()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, stored


def test_metadata_is_what_was_written(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    metadata = open_source(written[0]).metadata
    assert {key: value for key, value in metadata.items() if key.startswith("n.")} == {
        "n.u8": 200,
        "n.i8": -3,
        "n.u16": 60_000,
        "n.i16": -300,
        "n.u32": 4_000_000_000,
        "n.i32": -70_000,
        "n.u64": 2**63 + 1,
        "n.i64": -(2**40),
        "n.f32": 1.5,
        "n.f64": 0.1,
        "n.yes": True,
        "n.text": "naïve\nline",
        "n.strings": ["a", "", "é", "b" * 300],
        "n.ints": [3, -4, 5],
        "n.floats": [0.5, -2.0],
        "n.flags": [True, False, True],
    }
    assert metadata["general.architecture"] == "llama"
    assert metadata["n.yes"] is True


def test_tensors_are_what_was_written(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, stored = written
    source = open_source(path)
    assert source.kind == "gguf"
    assert source.names == list(stored)
    for name, array in stored.items():
        tensor = source.read(name)
        assert tuple(tensor.shape) == source.infos[name].shape == array.shape
        assert torch.equal(tensor.to(torch.from_numpy(array).dtype), torch.from_numpy(array))
    assert source.read("f16").dtype == torch.float16
    assert source.read("bf16").dtype == torch.bfloat16
    assert source.read("f16", torch.float32).dtype == torch.float32
    assert source.read("Q4_K", torch.bfloat16).dtype == torch.bfloat16


def test_raw_bytes_are_rows_of_blocks(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    source = open_source(written[0])
    assert isinstance(source, GGUFSource)
    for kind in SCALES:
        raw = source.read_raw(kind)
        assert torch.equal(raw, torch.from_numpy(random_blocks(kind, rows=6, blocks=3)))
        assert torch.equal(block_format(kind).unpack(raw), source.read(kind))
        blocks = source.blocks(kind)
        assert blocks.shape == source.infos[kind].shape
        assert blocks.raw.data_ptr() == source.read_raw(kind).data_ptr()  # a view of the file: nothing is copied
        assert torch.equal(blocks.rows(2, 5).dense(), source.read(kind)[2:5])
    assert source.read_raw("f16").tolist() == list(written[1]["f16"].tobytes())


def test_a_tensor_outlives_its_source_and_never_reaches_the_file(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, stored = written
    before = path.read_bytes()
    tensor = open_source(path).read("f32")
    assert torch.equal(tensor, torch.from_numpy(stored["f32"]))
    tensor.fill_(9.0)
    assert path.read_bytes() == before
    assert torch.equal(open_source(path).read("f32"), torch.from_numpy(stored["f32"]))


def test_unknown_name_is_refused_with_the_nearest(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'Q4_L' \(did you mean 'Q4_K'\?\)"):
        open_source(written[0]).read("Q4_L")


def test_a_number_that_is_none_is_refused_like_any_other() -> None:
    """NaN has many spellings, and no decimal is stored as this one."""
    metadata = references.metadata("llama", **references.GROUPED)
    (odd,) = struct.unpack("<f", struct.pack("<I", 0x7FC0_0001))
    key = "llama.attention.layer_norm_rms_epsilon"
    assert key in metadata
    with pytest.raises(ConfigError, match=r"layer_norm_rms_epsilon must be a finite number .* not nan"):
        read_gguf({**metadata, key: odd}, {"token_embd.weight": (41, 24)})
