"""Packed matrices of AWQ and GPTQ stay packed, and packed models are written block for block."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cli_models import BLOCKS
from test_packed import AWQ, GPTQ, PLACES, Packer, awq, gptq, write
from triptych.checkpoints import open_source
from triptych.checkpoints.convert import convert
from triptych.checkpoints.gguf_blocks import FORMATS, PackedBlocks, block_format
from triptych.checkpoints.gguf_writer import GGUFTensor, write_gguf
from triptych.checkpoints.packed_groups import PackedGroups
from triptych.errors import CheckpointError
from triptych.model import create, load
from triptych.native import library, why_not
from triptych.nn.packed_weight import PackedWeight
from triptych.quantize import INVERTIBLE, OrderedBandFormat, blocks_of, packed_weight, repack, repack_groups

pytestmark = pytest.mark.skipif(library() is None, reason=why_not() or "")

LLAMA = BLOCKS | {"hidden_size": 256, "intermediate_size": 512}
SCALES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}  # bytes at which a block has an fp16 number


def random_blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Blocks of random bytes with small scales of either sign."""
    format = block_format(kind)
    raw = torch.randint(0, 256, (rows * columns // format.elements, format.nbytes), dtype=torch.uint8)
    for at in SCALES.get(kind, (0, 2)):
        raw[:, at : at + 2] = (torch.randn(len(raw), 1) * 0.001).half().view(torch.uint8)
    return raw.view(rows, -1)


def written(kind: str, path: Path, **more: object) -> Path:
    """A Llama as a GGUF file whose matrices are random blocks of one type."""
    create(LLAMA | more, seed=3).save(path.parent / "hf")
    convert(path.parent / "hf", path.parent / "plain.gguf", dtype="f32")
    plain = open_source(path.parent / "plain.gguf")
    entries = []
    for name, info in plain.infos.items():
        raw = random_blocks(kind, *info.shape) if len(info.shape) == 2 else plain.read(name)
        form = kind if len(info.shape) == 2 else "F32"
        entries.append(GGUFTensor(name, form, info.shape, lambda raw=raw: raw))
    write_gguf(path, plain.metadata, entries)
    return path


def differing(first: Path, second: Path) -> list[str]:
    """The tensors whose types or bytes are not the same."""
    one, other = open_source(first), open_source(second)
    assert set(one.names) == set(other.names)
    return [
        name
        for name in one.names
        if one.infos[name].dtype != other.infos[name].dtype or not torch.equal(one.read_raw(name), other.read_raw(name))
    ]


@pytest.mark.parametrize("kind", INVERTIBLE)
def test_blocks_come_back_from_a_layout(kind: str) -> None:
    raw = random_blocks(kind, 37, 512)
    matrix = repack(PackedBlocks(block_format(kind), raw))
    assert torch.equal(blocks_of(matrix, kind).raw, raw)
    matrix.data[3] ^= 0x10  # control: a code
    assert not torch.equal(blocks_of(matrix, kind).raw, raw)


@pytest.mark.parametrize("kind", [name for name, form in FORMATS.items() if form.parts is not None])
def test_a_file_comes_back_block_for_block(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path / "x.gguf", tie_word_embeddings=kind == "Q5_1")
    done = load(path).save(tmp_path / "again.gguf")
    assert done.tensors[kind] > 10
    assert done.notes == ()
    assert differing(path, tmp_path / "again.gguf") == []
    convert(path, tmp_path / "converted.gguf")
    assert differing(path, tmp_path / "converted.gguf") == []
    convert(path, tmp_path / "f16.gguf", dtype="f16")
    assert differing(path, tmp_path / "f16.gguf")


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_blocks_that_only_the_file_holds_are_refused_when_it_has_changed(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path / "x.gguf")
    moved = load(path)
    blocks = moved.module.decoder.blocks
    blocks[0].mlp.up.weight, blocks[1].mlp.up.weight = blocks[1].mlp.up.weight, blocks[0].mlp.up.weight
    with pytest.raises(CheckpointError, match=rf"\({kind}\) have to be read from its file, which has changed or is go"):
        moved.save(tmp_path / "moved.gguf")
    assert not (tmp_path / "moved.gguf").exists()
    model = load(path)
    shutil.move(path, tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match="has changed or is gone; save into a directory, as plain numbers"):
        model.save(tmp_path / "again.gguf")


def test_moved_weights_are_written_where_they_are(tmp_path: Path) -> None:
    """What is written is the model, not the file it came from."""
    model = load(written("Q4_0", tmp_path / "x.gguf"))
    blocks = model.module.decoder.blocks
    blocks[0].mlp.up.weight, blocks[1].mlp.up.weight = blocks[1].mlp.up.weight, blocks[0].mlp.up.weight
    model.save(tmp_path / "again.gguf")
    assert differing(tmp_path / "x.gguf", tmp_path / "again.gguf") == ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"]


@pytest.mark.parametrize(("form", "kind"), [("int4", "Q4_1"), ("int8", "Q8_0")])
def test_what_we_rounded_is_a_gguf_file_of_the_same_numbers(form: str, kind: str, tmp_path: Path) -> None:
    create(LLAMA, seed=3).save(tmp_path / "hf")
    model = load(tmp_path / "hf", quantize=form)
    done = model.save(tmp_path / "x.gguf")
    assert done.tensors[kind] == 2 + 2 * 7
    again = load(tmp_path / "x.gguf")
    rows = [[3, 7, 1, 22, 9], [30, 5, 11]]
    assert all(torch.equal(a, b) for a, b in zip(model.logits(rows), again.logits(rows), strict=True))


def test_a_directory_gets_plain_numbers_and_says_so(tmp_path: Path) -> None:
    path = written("Q4_0", tmp_path / "x.gguf")
    done = load(path).save(tmp_path / "out")
    assert done.notes == ("16 packed matrices were written as plain numbers in float32",)
    plain = load(path, dequantize=True)
    assert plain.save(tmp_path / "plain").notes == ()
    ours, theirs = open_source(tmp_path / "out"), open_source(tmp_path / "plain")
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.names)


@pytest.mark.weights
@pytest.mark.heavy
def test_a_real_file_comes_back_block_for_block(smollm2_gguf: Path, tmp_path: Path, unchecked: None) -> None:
    load(smollm2_gguf).save(tmp_path / "x.gguf")
    assert differing(smollm2_gguf, tmp_path / "x.gguf") == []


ROWS = [[3, 7, 1, 22, 9], [30, 5, 11]]
CASES: dict[str, tuple[dict[str, Any], Packer]] = {
    "gptq 32": (GPTQ, gptq(32)),
    "gptq 64": (GPTQ | {"group_size": 64}, gptq(64)),  # 96 inputs are one group and a half
    "gptq one group": (GPTQ | {"group_size": -1}, gptq(-1)),
    "gptq act-order": (GPTQ | {"desc_act": True}, gptq(32, ordered=True)),
    "awq 32": (AWQ, awq(32)),
    "awq 128": (AWQ | {"group_size": 128}, awq(128)),
}


def groups(bits: int, zeros: torch.Tensor, of: torch.Tensor) -> PackedGroups:
    """Random codes [37, 64] with these zero points [37, groups]."""
    codes = torch.randint(0, 2**bits, (37, 64), dtype=torch.uint8)
    scales = (torch.rand(zeros.shape) * 0.02 + 0.001).half().float()
    return PackedGroups(bits, codes, scales, zeros.float(), of)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_stays_packed(case: str, tmp_path: Path) -> None:
    write(tmp_path, *CASES[case])
    model, plain = load(tmp_path), load(tmp_path, dtype=torch.float32, dequantize=True)
    packed = {name: p for name, p in model.module.named_parameters() if isinstance(p, PackedWeight)}
    assert len(packed) == 2 * len(PLACES)
    assert f"{len(packed)} matrices are packed" in model.report.packed
    for name, weight in packed.items():
        expected = plain.module.get_parameter(name).detach()
        # one rounding to fp16 of the minimum of a group, a code of at most 16 times its scale
        assert (weight.dense() - expected).abs().max() <= 16 * 0.021 / 2048
        assert torch.equal(weight.rows(15, 20), weight.dense()[15:20])
        x = torch.randn(5, weight.shape[1])
        assert relative(F.linear(x, weight), F.linear(x, expected)) <= 1e-2
        assert isinstance(weight.format, OrderedBandFormat) == ("act-order" in case)
    ours, theirs = torch.cat(model.logits(ROWS)), torch.cat(plain.logits(ROWS))
    assert relative(ours, theirs) < 0.05
    ids = [row.ids for row in model.generate(ROWS, max_new_tokens=4)]
    assert ids == [model.generate([row], max_new_tokens=4)[0].ids for row in ROWS]


def test_columns_in_another_order_are_noticed() -> None:
    """Control: without its order, or with codes that are not moved, a matrix is another one."""
    made = groups(4, torch.randint(1, 16, (37, 2)), (torch.arange(64) // 32)[torch.randperm(64)])
    matrix, order = repack_groups(made)
    assert order is not None
    x, expected = torch.randn(5, 64), made.values()
    assert relative(F.linear(x, packed_weight(matrix, order=order)), F.linear(x, expected)) <= 1e-2
    assert torch.equal(packed_weight(matrix, order=order).to(torch.bfloat16).dense(), expected.bfloat16()) or (
        relative(packed_weight(matrix, order=order).dense(), expected) < 1e-3
    )
    ids = torch.tensor([36, 0, 17])
    weight = packed_weight(matrix, order=order)
    assert torch.equal(F.embedding(ids, weight), weight.dense()[ids])
    assert relative(F.linear(x, packed_weight(matrix)), F.linear(x, expected)) > 0.1


def test_gradients_pass_through_columns_in_another_order() -> None:
    made = groups(4, torch.randint(1, 16, (37, 2)), (torch.arange(64) // 32)[torch.randperm(64)])
    matrix, order = repack_groups(made)
    weight, x = packed_weight(matrix, order=order), torch.randn(5, 64, requires_grad=True)
    F.linear(x, weight).sum().backward()
    assert torch.allclose(x.grad, weight.dense().sum(0).expand(5, 64), atol=1e-5)


def test_eight_bits_are_exact_where_their_codes_fit() -> None:
    of = torch.arange(64) // 32
    made = groups(8, torch.full((37, 2), 128), of)
    matrix, order = repack_groups(made)
    assert order is None
    assert matrix.layout.name == "S8"
    assert torch.equal(matrix.dense(), made.values())
    with pytest.raises(CheckpointError, match="less their zero points do not fit eight bits"):
        repack_groups(groups(8, torch.full((37, 2), 60), of))
    with pytest.raises(CheckpointError, match="its groups of inputs are not whole groups of 32"):
        repack_groups(groups(4, torch.full((37, 4), 8), torch.arange(64) // 16))


def test_what_does_not_fit_is_dequantized_and_said(tmp_path: Path) -> None:
    write(tmp_path, GPTQ | {"bits": 8}, gptq(32, bits=8))  # zero points of any size
    model, plain = load(tmp_path), load(tmp_path, dtype=torch.float32, dequantize=True)
    assert not any(isinstance(p, PackedWeight) for p in model.module.parameters())
    (note,) = model.report.notes
    assert note.startswith("not packed: decoder.blocks.0.")
    assert "do not fit eight bits" in note
    assert torch.equal(model.logits(ROWS)[0], plain.logits(ROWS)[0])
