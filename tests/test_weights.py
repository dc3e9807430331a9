"""Weights as objects: packed ones stand in the slots of dense ones and compute the same."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from cli_models import BLOCKS as LLAMA
from triptych import nn
from triptych.checkpoints import open_source
from triptych.checkpoints.convert import convert
from triptych.checkpoints.gguf_blocks import block_format
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import read_weights
from triptych.errors import InputError
from triptych.model import Model, create, load
from triptych.nn.packed_weight import PackedWeight, dense, rows

GPT2 = {"model_type": "gpt2", "vocab_size": 43, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
CASES = {
    "llama, Q8_0": (LLAMA, "q8_0"),
    "llama, tied, Q4_0": (LLAMA | {"tie_word_embeddings": True}, "q4_0"),
    "gpt2, Q4_1": (GPT2, "q4_1"),
    "mixtral, Q8_0": (MIXTRAL, "q8_0"),
}
ROWS = [[3, 7, 1, 22, 9], [30, 5, 11]]


def test_a_learned_position_table_may_be_of_odd_width() -> None:
    model = create(GPT2 | {"n_embd": 15, "n_head": 3})
    assert model.logits(ROWS)[0].shape == (5, 43)


def gguf_file(hf: dict[str, object], dtype: str, directory: Path) -> Path:
    create(hf, seed=3).save(directory / "hf")
    convert(directory / "hf", directory / "x.gguf", dtype=dtype)
    return directory / "x.gguf"


def opened(path: Path, dtype: torch.dtype | None = None, *, dequantize: bool = False) -> Model:
    header = read_header(path)
    module, report = read_weights(header.spec, header.source, dtype, dequantize=dequantize)
    return Model(module, None, header.hf, path, report)


def packed_names(module: torch.nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters(remove_duplicate=False) if isinstance(p, PackedWeight)}


@pytest.fixture
def matrix() -> PackedWeight:
    kind = block_format("Q8_0")
    return PackedWeight(kind.pack(torch.randn(7, 64)), kind)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_of_packed_weights_has_the_logits_of_the_unpacked_one(
    case: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    path = gguf_file(*CASES[case], tmp_path)
    packed, plain = opened(path, dtype), opened(path, dtype, dequantize=True)
    assert packed_names(packed.module) >= {"decoder.blocks.0.attn.q.weight", "decoder.embed.tokens.weight"}
    assert not packed_names(plain.module)
    for ours, theirs in zip(packed.logits(ROWS), plain.logits(ROWS), strict=True):
        assert torch.equal(ours, theirs)
    assert packed.generate(ROWS, max_new_tokens=4)[0].ids == plain.generate(ROWS, max_new_tokens=4)[0].ids
    names = [name for name, _ in plain.module.named_parameters()]
    assert [name for name, _ in packed.module.named_parameters()] == names
    assert list(packed.module.state_dict()) == list(plain.module.state_dict())
    assert packed.module.dtype == plain.module.dtype == (dtype or torch.float32)


def test_a_damaged_block_reaches_the_logits(tmp_path: Path) -> None:
    """Negative control: the packed model computes from its blocks."""
    model = opened(gguf_file(LLAMA, "q8_0", tmp_path))
    before = model.logits(ROWS)[0]
    weight = model.module.get_parameter("decoder.blocks.1.mlp.up.weight")
    assert isinstance(weight, PackedWeight)
    weight.blocks[0, 2] ^= 0x40
    assert not torch.equal(model.logits(ROWS)[0], before)


def test_a_matrix_whose_rows_an_operation_mixes_is_unpacked(tmp_path: Path) -> None:
    """Norms, biases and vectors are never packed; Gemma's norms are stored plus one."""
    model = opened(gguf_file(GPT2, "q8_0", tmp_path))
    names = packed_names(model.module)
    assert all(name.endswith(".weight") and "norm" not in name for name in names)
    assert "decoder.embed.position.weight" not in names  # stored in F32


@pytest.mark.parametrize("case", CASES)
def test_saving_a_packed_model_writes_what_saving_the_unpacked_one_does(case: str, tmp_path: Path) -> None:
    path = gguf_file(*CASES[case], tmp_path)
    for name, dequantize in (("packed", False), ("plain", True)):
        opened(path, dequantize=dequantize).save(tmp_path / name)
    ours, theirs = open_source(tmp_path / "packed"), open_source(tmp_path / "plain")
    assert ours.names == theirs.names
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in theirs.names)
    assert (tmp_path / "packed" / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()


def test_a_tie_shares_the_packed_object_also_after_a_cast(tmp_path: Path) -> None:
    module = opened(gguf_file(LLAMA | {"tie_word_embeddings": True}, "q4_0", tmp_path)).module
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype)
        table = module.get_parameter("decoder.embed.tokens.weight")
        assert isinstance(table, PackedWeight)
        assert module.get_parameter("head.proj.weight") is table
        assert table.dtype == module.dtype == dtype


@pytest.mark.weights
def test_a_real_file_computes_the_same_from_its_blocks(smollm2_gguf: Path) -> None:
    """K-quants, ties and RoPE's permuted rows, as published."""
    packed, plain = opened(smollm2_gguf), opened(smollm2_gguf, dequantize=True)
    assert len(packed_names(packed.module)) > 200
    assert torch.equal(packed.logits([[504, 3575, 282]])[0], plain.logits([[504, 3575, 282]])[0])


def test_casts_copies_and_state_dicts_stay_packed(tmp_path: Path) -> None:
    model = opened(gguf_file(LLAMA, "q8_0", tmp_path))
    before, names = model.logits(ROWS)[0], packed_names(model.module)
    twin = copy.deepcopy(model.module)
    assert packed_names(twin) == names
    weight = twin.get_parameter("decoder.blocks.0.attn.q.weight")
    assert isinstance(weight, PackedWeight)
    weight.blocks.zero_()
    assert torch.equal(model.logits(ROWS)[0], before)  # the copy has blocks of its own
    assert all(isinstance(model.module.state_dict()[name], PackedWeight) for name in names)
    model.module.half()
    assert packed_names(model.module) == names
    assert {p.dtype for p in model.module.parameters()} == {torch.float16} == {model.module.dtype}
    model.module.float()
    assert torch.equal(model.logits(ROWS)[0], before)  # the blocks were never rounded


def test_one_packed_weight(matrix: PackedWeight) -> None:
    numbers = matrix.dense()
    assert matrix.shape == numbers.shape == (7, 64)
    assert matrix.dtype == torch.float32
    assert torch.equal(dense(matrix), numbers)
    assert dense(numbers) is numbers
    assert torch.equal(rows(matrix, 2, 5), numbers[2:5])
    assert torch.equal(rows(numbers, 2, 5), numbers[2:5])
    ids, x = torch.tensor([[3, 0], [6, 3]]), torch.randn(5, 64, requires_grad=True)
    assert torch.equal(F.embedding(ids, matrix), F.embedding(ids, numbers))
    assert torch.equal(F.linear(x, matrix), F.linear(x, numbers))
    assert type(F.linear(x, matrix)) is torch.Tensor
    assert torch.equal(matrix.to(torch.bfloat16).dense(), numbers.bfloat16())
    (gradient,) = torch.autograd.grad(F.linear(x, matrix).sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(F.linear(x, numbers).sum(), x)[0])


def test_only_the_rows_that_are_read_are_unpacked(matrix: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    kind = type(matrix.format)
    unpack = kind.unpack

    def counted(self: object, raw: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes.append(raw.numel() // 68)
        return unpack(self, raw, dtype)

    monkeypatch.setattr(kind, "unpack", counted)
    F.embedding(torch.tensor([4, 4]), matrix)
    rows(matrix, 1, 4)
    assert sizes == [2, 3]


def test_what_would_change_a_packed_weight_is_refused(matrix: PackedWeight) -> None:
    parameter = torch.nn.Parameter(matrix, requires_grad=False)
    for change in (lambda: parameter.mul_(2), lambda: parameter.copy_(torch.zeros(7, 64)), lambda: parameter.zero_()):
        with pytest.raises(InputError, match="would change a packed weight in place; load the model unpacked"):
            change()
    with pytest.raises(InputError, match=r"are not rows of blocks of 34 bytes"):
        PackedWeight(torch.zeros(3, 33, dtype=torch.uint8), block_format("Q8_0"))


def test_dense_weights_are_ordinary_parameters(tmp_path: Path) -> None:
    model = create(LLAMA | {"tie_word_embeddings": True})
    assert {type(p) for p in model.module.parameters()} == {torch.nn.Parameter}
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.1)
    before = model.logits(ROWS)[0]
    ids, where = nn.flat(ROWS, model.module.device)
    model.module.logits(nn.Batch(inputs=ids, rows=where)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert not torch.equal(model.logits(ROWS)[0], before)
    assert model.module.get_parameter("head.proj.weight") is model.module.get_parameter("decoder.embed.tokens.weight")


def test_dtype_and_device_are_stated_and_follow_every_cast(tmp_path: Path) -> None:
    create(LLAMA).save(tmp_path / "hf")
    module = load(tmp_path / "hf", dtype=torch.bfloat16).module
    assert (module.dtype, module.device) == (torch.bfloat16, torch.device("cpu"))
    block = module.decoder.blocks[0]
    assert (block.attn.q.dtype, block.dtype) == (torch.bfloat16, torch.bfloat16)
    assert module.half().dtype == torch.float16 == block.attn.q.dtype
    assert module.to(torch.float64).dtype == torch.float64
    assert module.float().dtype == torch.float32
    assert module.decoder.cache(1).stores[0].form.dtype == torch.float32
    meta = nn.empty(module.spec)
    assert (meta.dtype, meta.device) == (torch.float32, torch.device("meta"))
    assert module.to("meta").device == torch.device("meta")


def test_dtype_is_not_that_of_the_first_parameter(tmp_path: Path) -> None:
    """A table in another dtype, or packed into bytes, says nothing about the activations of the rest."""
    module = opened(gguf_file(LLAMA, "q8_0", tmp_path)).module
    assert module.decoder.cache(1).stores[0].form.dtype == torch.float32
    before = create(LLAMA).module
    before.decoder.embed.tokens.weight = torch.nn.Parameter(torch.zeros(43, 64, dtype=torch.uint8), requires_grad=False)
    assert before.decoder.cache(1).stores[0].form.dtype == torch.float32
