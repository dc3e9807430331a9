"""Models whose weights are packed in the layouts of the native kernels: as files have them, and rounded by us."""

import copy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import references
from cli_models import BLOCKS as LLAMA
from triptych import nn
from triptych.checkpoints.convert import convert
from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.errors import InputError
from triptych.model import Model, create, load
from triptych.native import library, why_not
from triptych.nn.packed_weight import PackedWeight
from triptych.quantize import LAYOUTS, BandFormat, packed_weight, packer_for, packing, quantize, repack
from triptych.train.optimizer import Optimizer, OptimizerSettings

pytestmark = pytest.mark.skipif(library() is None, reason=why_not() or "")

MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
ROWS = [[3, 7, 1, 22, 9], [30, 5, 11]]


def packed_names(module: torch.nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters(remove_duplicate=False) if isinstance(p, PackedWeight)}


def gguf_file(hf: dict[str, object], dtype: str, directory: Path) -> Path:
    create(hf, seed=3).save(directory / "hf")
    convert(directory / "hf", directory / "x.gguf", dtype=dtype)
    return directory / "x.gguf"


def exact(model: Model) -> Model:
    """The same model with every packed weight as the numbers it holds."""
    twin = copy.deepcopy(model.module)
    for name in packed_names(twin):
        path, _, leaf = name.rpartition(".")
        weight = twin.get_parameter(name)
        twin.get_submodule(path).register_parameter(leaf, torch.nn.Parameter(torch.Tensor(weight.dense())))
    return Model(twin, None, model.hf)


def worst(model: Model, other: Model) -> float:
    """The largest difference of log-probabilities over their spread."""
    pairs = zip(model.logits(ROWS), other.logits(ROWS), strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().std()) for a, b in pairs)


@pytest.mark.parametrize(("hf", "dtype"), [(LLAMA, "q8_0"), (LLAMA, "q4_0"), (MIXTRAL, "q4_1")])
def test_a_file_stays_packed_and_computes_what_its_numbers_do(
    hf: dict[str, object], dtype: str, tmp_path: Path
) -> None:
    path = gguf_file(hf, dtype, tmp_path)
    model, plain = load(path), load(path, dequantize=True)
    names = packed_names(model.module)
    assert names >= {"decoder.blocks.0.attn.q.weight", "decoder.blocks.1.attn.out.weight", "head.proj.weight"}
    assert not [name for name in names if "router" in name]
    for name in names:  # Q4_0's and Q8_0's scales are exact in fp16, and so are the numbers
        assert torch.equal(model.module.get_parameter(name).dense(), plain.module.get_parameter(name))
    assert worst(model, plain) < 0.05
    assert "matrices are packed" in model.report.packed
    ids = [row.ids for row in model.generate(ROWS, max_new_tokens=5)]
    assert ids == [model.generate([row], max_new_tokens=5)[0].ids for row in ROWS]  # rows do not act on each other


@pytest.mark.parametrize(("form", "limit"), [("int8", 0.05), ("int4", 0.05)])
def test_any_checkpoint_is_packed_while_it_is_loaded(form: str, limit: float, tmp_path: Path) -> None:
    create(LLAMA | {"tie_word_embeddings": True}, seed=3).save(tmp_path / "hf")
    model = load(tmp_path / "hf", quantize=form)
    table = model.module.get_parameter("decoder.embed.tokens.weight")
    assert isinstance(table, PackedWeight)
    assert model.module.get_parameter("head.proj.weight") is table
    assert worst(model, exact(model)) < limit
    assert worst(model, load(tmp_path / "hf")) < 1.0


def test_a_packed_file_stays_packed_unless_something_else_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_file(LLAMA, "q4_0", tmp_path)
    assert packed_names(load(path).module) == packed_names(load(path, dequantize=False).module) != set()
    half = load(path, dtype=torch.bfloat16).module
    assert packed_names(half)
    assert half.dtype == torch.bfloat16
    plain = load(path, dequantize=True)
    assert not packed_names(plain.module)
    assert plain.report.notes == ()
    exact = load(path, dtype=torch.float64)
    assert not packed_names(exact.module)
    assert "dequantized, which takes more memory and time: they compute in float32" in exact.report.notes[0]
    anew = load(path, quantize="int8").module.get_parameter("head.proj.weight")
    assert isinstance(anew, PackedWeight)
    assert anew.format == BandFormat(LAYOUTS["S8"])
    assert load(tmp_path / "hf").report.notes == ()  # plain files have nothing to say
    monkeypatch.setattr(packing, "library", lambda: None)
    without = load(path)
    assert not packed_names(without.module)
    assert "dequantized, which takes more memory and time: they need native kernels" in without.report.notes[0]
    with pytest.raises(InputError, match="packed weights need native kernels"):
        load(path, dequantize=False)


def test_whether_to_dequantize_is_a_truth_value(tmp_path: Path, unchecked: None) -> None:
    create(LLAMA, seed=3).save(tmp_path / "hf")
    with pytest.raises(InputError, match="dequantize='int8' must be True or False"):
        load(tmp_path / "hf", dequantize="int8")


def test_a_packed_weight_is_not_trained(tmp_path: Path) -> None:
    module = load(gguf_file(LLAMA, "q4_0", tmp_path)).module
    with pytest.raises(InputError, match=r"packed weights are constants.*dequantize=True"):
        module.requires_grad_(True)
    with pytest.raises(InputError, match=r"has packed matrices, which are not trained.*dequantize=True"):
        Optimizer(load(tmp_path / "x.gguf").module, OptimizerSettings())
    frozen = load(tmp_path / "x.gguf").module.requires_grad_(False)
    frozen.adapter = torch.nn.Linear(2, 2)
    assert len(Optimizer(frozen, OptimizerSettings()).parameters) == 2  # an adapter over it is
    Optimizer(load(tmp_path / "x.gguf", dequantize=True).module, OptimizerSettings())


def test_swapped_halves_of_a_block_are_noticed(tmp_path: Path) -> None:
    """Control of the tests above."""
    model = load(gguf_file(LLAMA, "q4_0", tmp_path))
    before = load(tmp_path / "x.gguf", dequantize=True)
    blocks = model.module.get_parameter("decoder.blocks.0.mlp.up.weight").blocks
    nibbles = blocks.view(-1)[:256]
    nibbles.copy_((nibbles >> 4) | (nibbles << 4))
    assert worst(model, before) > 0.05


@pytest.mark.parametrize("name", ["bert", "t5", "whisper", "gpt2", "mixtral"])
def test_every_layout_takes_packed_weights(name: str) -> None:
    module = load(references.saved(name)[1], quantize="int8").module
    report = packed_names(module)
    widths = {p.shape[1] for n, p in module.named_parameters() if n.endswith("attn.q.weight")}
    assert bool(report) == any(width % 32 == 0 for width in widths)


def test_parts_that_choose_among_few_stay_exact(tmp_path: Path) -> None:
    create(MIXTRAL, seed=3).save(tmp_path / "m")
    module = load(tmp_path / "m", quantize="int8").module
    packed, routers = packed_names(module), {n for n, _ in module.named_parameters() if n.endswith("mlp.router.weight")}
    assert packed
    assert len(routers) == 2
    assert not packed & routers


def test_a_part_says_whether_its_weight_may_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the name of its slot: a part of another name stays exact as soon as it says so."""
    create(LLAMA, seed=3).save(tmp_path / "m")
    monkeypatch.setattr(nn.linear.Linear, "takes_packed", False)
    assert packed_names(load(tmp_path / "m", quantize="int8").module) == {"decoder.embed.tokens.weight"}


def test_one_weight_looks_up_multiplies_and_passes_gradients() -> None:
    numbers = torch.randn(37, 64)
    weight = packed_weight(quantize(numbers, "int8"))
    dense = weight.dense()
    assert weight.shape == (37, 64)
    assert (dense - numbers).abs().max() < numbers.abs().max() / 200
    ids = torch.tensor([[36, 0, 17], [17, 17, 3]])
    assert torch.equal(F.embedding(ids, weight), dense[ids])
    assert torch.equal(weight.rows(15, 34), dense[15:34])
    x, bias = torch.randn(2, 5, 64, requires_grad=True), torch.randn(37)
    out = F.linear(x, weight, bias)
    assert type(out) is torch.Tensor
    assert (out - F.linear(x, dense, bias)).abs().max() / out.std() < 0.05
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.allclose(gradient, (2 * out) @ dense, atol=1e-4)
    half = F.linear(x.detach().bfloat16(), weight)
    assert half.dtype == torch.bfloat16


def test_gradients_are_computed_in_the_dtype_of_autocast() -> None:
    """As those of the same numbers unpacked, bit for bit; a product in fp32 differs."""
    weight = packed_weight(quantize(torch.randn(37, 64), "int8"))
    x, upstream = torch.randn(5, 64, requires_grad=True), torch.randn(5, 37).bfloat16()
    gradients = []
    for matrix in (weight, weight.dense()):
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x, matrix)
        gradients.append(torch.autograd.grad(out, x, upstream)[0])
    assert torch.equal(*gradients)
    assert not torch.equal(gradients[0], upstream.float() @ weight.dense())


def test_casts_and_copies_stay_packed() -> None:
    weight = packed_weight(quantize(torch.randn(37, 64), "int4"))
    for other in (copy.deepcopy(weight), weight.clone(), weight.detach()):
        assert isinstance(other, PackedWeight)
        assert other.shape == weight.shape
        assert torch.equal(other.dense(), weight.dense())
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16


def test_without_kernels_the_numbers_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = packed_weight(quantize(torch.randn(37, 64), "int8")), torch.randn(3, 64)
    monkeypatch.setattr(packing, "library", lambda: None)
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dense()))
    with pytest.raises(InputError, match="packed weights need native kernels"):
        packer_for("int8")


def test_what_cannot_be_packed_is_refused_or_noted(tmp_path: Path, unchecked: None) -> None:
    with pytest.raises(InputError, match="known are int8, int4"):
        packer_for(["int8"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"quantize='int7'; did you mean 'int8'|quantize='int7'"):
        packer_for("int7")
    with pytest.raises(InputError, match="packed weights run on the CPU"):
        packer_for(None, "cuda")
    narrow = LLAMA | {"hidden_size": 48, "intermediate_size": 80}
    create(narrow, seed=3).save(tmp_path / "hf")
    notes = load(tmp_path / "hf", quantize="int8").report.notes
    assert notes
    assert all("not packed: " in note for note in notes)


def test_scales_too_large_for_fp16_leave_the_matrix_as_numbers() -> None:
    kind = block_format("Q4_0")
    blocks = PackedBlocks(kind, kind.pack(torch.full((16, 32), 6.0e4)))
    blocks.raw[:, 1] = 0x7B  # a scale near the largest fp16 number: eight times it is none
    packer = packer_for(None)
    assert packer.stored("w", blocks, torch.float32) is None
    assert "too large for fp16" in packer.refused["w"]
    assert isinstance(packed_weight(repack(PackedBlocks(kind, kind.pack(torch.randn(16, 32))))).format, BandFormat)


def test_a_lookup_needs_nothing_of_torch_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first operation that goes there makes torch import packages for a second."""
    weight = packed_weight(quantize(torch.randn(37, 64), "int8"))
    monkeypatch.setattr(PackedWeight, "__torch_dispatch__", None)
    ids = torch.tensor([[3, 36], [0, 3]])
    assert torch.equal(F.embedding(ids, weight), weight.dense()[ids])
