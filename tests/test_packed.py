"""Packed safetensors, each written here by a packer of its own from numbers that the format keeps exactly."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.checkpoints import open_source
from triptych.checkpoints.convert import convert
from triptych.checkpoints.header import read_header
from triptych.checkpoints.load_weights import StoredParameters
from triptych.checkpoints.packed_safetensors import FilePacking, PackedSource, scheme, unpacked
from triptych.errors import CheckpointError, ConfigError
from triptych.model import load

D, F, V = 64, 96, 40
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": V, "hidden_size": D,
         "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 52, "tie_word_embeddings": False}  # fmt: skip
PLACES = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (D // 2, D), "self_attn.v_proj": (D // 2, D),
          "self_attn.o_proj": (D, D), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D),
          "mlp.down_proj": (D, F)}  # fmt: skip
Packer = Callable[[str, int, int], tuple[dict[str, Tensor], Tensor]]  # name, out, in -> stored, and what they mean


def write(path: Path, quantization: Any, packer: Packer, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """A Llama whose matrices `packer` packs; every tensor as it is meant, in float32."""
    path.mkdir(exist_ok=True)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}

    def plain(name: str, *shape: int) -> None:
        stored[name] = (torch.randn(shape) * 0.1 + (len(shape) == 1)).to(dtype)
        meant[name] = stored[name].float()

    plain("model.embed_tokens.weight", V, D)
    plain("lm_head.weight", V, D)
    plain("model.norm.weight", D)
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain(f"model.layers.{i}.{norm}.weight", D)
        for place, (outputs, inputs) in PLACES.items():
            name = f"model.layers.{i}.{place}"
            parts, meant[f"{name}.weight"] = packer(name, outputs, inputs)
            stored |= parts
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    return meant


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Whole numbers `[..., n]` packed along the last axis into int32; `order[i]` is the number that lands i-th."""
    each = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, each).long()
    if order is not None:
        grouped = grouped[..., list(order)]
    total = sum(grouped[..., i] << (bits * i) for i in range(each))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def grouped(outputs: int, inputs: int, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes [in, out], zeros and scales [groups, out]."""
    groups = 1 if group == -1 else math.ceil(inputs / group)
    return (
        torch.randint(0, 2**bits, (inputs, outputs)),
        torch.randint(1, 2**bits, (groups, outputs)),
        (torch.rand(groups, outputs) * 0.02 + 0.001).half(),
    )


def gptq(group: int, *, bits: int = 4, ordered: bool = False, minus_one: bool = True, index: bool = True) -> Packer:
    def packer(name: str, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = grouped(outputs, inputs, group, bits)
        of = torch.arange(inputs) // (inputs if group == -1 else group)
        if ordered:
            of = of[torch.randperm(inputs)]
        stored = {
            f"{name}.qweight": words(codes.T, bits).T,
            f"{name}.qzeros": words(zeros - int(minus_one), bits),
            f"{name}.scales": scales,
        }
        if index:
            stored[f"{name}.g_idx"] = of.to(torch.int32)
        return stored, ((codes - zeros[of]) * scales.float()[of]).T

    return packer


def awq(group: int) -> Packer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def packer(name: str, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = grouped(outputs, inputs, group, 4)
        of = torch.arange(inputs) // group
        stored = {"qweight": words(codes, 4, order), "qzeros": words(zeros, 4, order), "scales": scales}
        return {f"{name}.{key}": value for key, value in stored.items()}, ((codes - zeros[of]) * scales[of].float()).T

    return packer


def fp8(
    block: tuple[int, int] | None, kind: str = "scale_inv", static: bool = False, scale: torch.dtype = torch.float32
) -> Packer:
    def packer(name: str, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = (torch.randn(outputs, inputs) * 60).to(torch.float8_e4m3fn)
        if block is None:
            shape = {"scale_inv": (), "scale": (outputs, 1)}[kind]
            scales = (2.0 ** torch.randint(-12, -6, shape)).to(scale)
            factor = scales.float().expand(outputs, inputs)
        else:
            scales = torch.rand(math.ceil(outputs / block[0]), math.ceil(inputs / block[1])) / 500 + 1e-4
            scales = (2.0 ** scales.log2().round() if scale == torch.float8_e8m0fnu else scales).to(scale)
            rows, columns = torch.arange(outputs) // block[0], torch.arange(inputs) // block[1]
            factor = scales.float()[rows][:, columns]
        stored = {f"{name}.weight": codes, f"{name}.weight_{kind}": scales}
        if static:
            stored[f"{name}.input_scale"] = torch.tensor(0.5)
        return stored, codes.float() * factor

    return packer


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
NO_BLOCK = FP8 | {"weight_block_size": None}
CASES: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "gptq 32": (GPTQ, gptq(32), "GPTQ 4-bit"),
    "gptq 64": (GPTQ | {"group_size": 64}, gptq(64), "GPTQ 4-bit"),  # 96 inputs are one group and a half
    "gptq 128": (GPTQ | {"group_size": 128}, gptq(128), "GPTQ 4-bit"),
    "gptq one group": (GPTQ | {"group_size": -1}, gptq(-1), "GPTQ 4-bit"),
    "gptq act-order": (GPTQ | {"desc_act": True}, gptq(32, ordered=True), "GPTQ 4-bit"),
    "gptq without g_idx": (GPTQ, gptq(32, index=False), "GPTQ 4-bit"),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(32, minus_one=False), "GPTQ 4-bit"),
    "gptq 8 bits": (GPTQ | {"bits": 8}, gptq(32, bits=8), "GPTQ 8-bit"),
    "awq 32": (AWQ, awq(32), "AWQ 4-bit"),
    "awq 64": (AWQ | {"group_size": 64, "version": "GEMM"}, awq(64), "AWQ 4-bit"),
    "awq 128": (AWQ | {"group_size": 128}, awq(128), "AWQ 4-bit"),
    "fp8 blocks": (FP8, fp8((16, 24)), "F8_E4M3 scaled"),  # 64 inputs are two blocks and two thirds
    "fp8 power blocks": (
        FP8 | {"scale_fmt": "ue8m0"}, fp8((16, 24), scale=torch.float8_e8m0fnu), "F8_E4M3 scaled"),
    "fp8 rows": (NO_BLOCK, fp8(None, "scale", scale=torch.bfloat16), "F8_E4M3 scaled"),
    "fp8 whole": (NO_BLOCK | {"activation_scheme": "static"}, fp8(None, static=True), "F8_E4M3 scaled"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_packed_matrices_are_what_was_packed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.checkpoints.packed_safetensors._CHUNK", 10 * D)  # several chunks, not of whole words
    quantization, packer, label = CASES[case]
    meant = write(tmp_path, quantization, packer)
    header = read_header(tmp_path)
    assert set(header.source.names) == set(meant)
    assert "quantization_config" not in header.hf
    for name, value in meant.items():
        assert header.source.infos[name].shape == tuple(value.shape)
        assert torch.equal(header.source.read(name, torch.float32), value), name
        assert header.source.read(name).dtype == torch.float16
    model = load(tmp_path, dtype=torch.float32, dequantize=True)
    plain = load(_plain(tmp_path / "plain", meant))
    assert torch.equal(model.logits([[3, 1, 4, 15]])[0], plain.logits([[3, 1, 4, 15]])[0])
    report = str(model.report)
    assert report.count(label) == 2 * len(PLACES)


def _plain(path: Path, meant: dict[str, Tensor]) -> Path:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_matrices_take_the_dtype_of_the_rest(dtype: torch.dtype, tmp_path: Path) -> None:
    meant = write(tmp_path, FP8, fp8((16, 24)), dtype)
    model, name = load(tmp_path), "model.layers.1.mlp.up_proj.weight"
    wanted = torch.float32 if dtype == torch.float16 else dtype  # fp16 is not computed with on a CPU
    assert {parameter.dtype for parameter in model.module.parameters()} == {wanted}
    up = model.module.get_parameter("decoder.blocks.1.mlp.up.weight")
    assert torch.equal(up, meant[name].to(dtype).to(wanted))


def test_packed_models_become_plain_ones(tmp_path: Path) -> None:
    """To a directory in the dtype of the rest, to GGUF in f32, and from either the same numbers."""
    meant = write(tmp_path / "awq", AWQ, awq(32))
    assert convert(tmp_path / "awq", tmp_path / "hf").tensors == {"float16": len(meant)}
    assert all(torch.equal(open_source(tmp_path / "hf").read(name), value.half()) for name, value in meant.items())
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    convert(tmp_path / "awq", tmp_path / "x.gguf", dtype="f32")
    header = read_header(tmp_path / "x.gguf")
    up = StoredParameters(header.spec, header.source)["decoder.blocks.0.mlp.up.weight"]
    assert torch.equal(up, meant["model.layers.0.mlp.up_proj.weight"])


def test_fp8_without_a_scale_is_widened(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(5, 7).to(torch.float8_e4m3fn), "b": torch.randn(5).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = unpacked(open_source(tmp_path), None)
    assert source.infos["w"].dtype == "F8_E4M3"
    assert source.read("w").dtype == torch.bfloat16
    assert torch.equal(source.read("w"), tensors["w"].bfloat16())
    assert source.read_raw("w").shape == (35,)


def test_the_reference_reads_fp8_alike(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    write(tmp_path, FP8 | {"weight_block_size": [32, 32]}, fp8((32, 32)), torch.bfloat16)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32)), dtype="auto"
    )
    ours, tensors = read_header(tmp_path).source, theirs.state_dict()
    for name in ours.names:
        assert torch.equal(ours.read(name, torch.bfloat16), tensors[name].bfloat16()), name


def test_what_the_reference_writes_for_a_config_is_understood() -> None:
    """Of either kind it writes the keys of both."""
    from transformers import AwqConfig, FineGrainedFP8Config, GPTQConfig

    assert scheme(AwqConfig(bits=4, group_size=64).to_dict()) == FilePacking("awq", 4, 64)
    assert scheme(GPTQConfig(bits=4, group_size=-1).to_dict()) == FilePacking("gptq", 4, None, minus_one=True)
    assert scheme(FineGrainedFP8Config().to_dict()) == FilePacking("fp8", block=(128, 128))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not one of 'fp8', 'gptq', 'awq'; convert"),
        ({"bits": 4}, "quant_method None is not one of"),
        ("gptq", "must be a table"),
        (GPTQ | {"bits": 3}, "bits 3 is not one of 4, 8"),
        (GPTQ | {"bits": True}, "bits True is not one of"),
        (GPTQ | {"group_size": 0}, "group_size 0 is neither a size nor -1"),
        (GPTQ | {"group_size": 32.0}, r"group_size 32\.0 is neither"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not one of"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is set"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic is set"),
        (GPTQ | {"desc_acts": True}, r"'desc_acts' is not understood \(did you mean 'desc_act'\?\)"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not one of 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point False is not one of True"),
        (AWQ | {"bits": 8}, "bits 8 is not one of 4"),
        (AWQ | {"desc_act": True}, "desc_act True is not one of False"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not one of"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size \[128\] is not two sizes"),
        (FP8 | {"weight_block_size": [0, 128]}, "is not two sizes"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    ],
)
def test_a_config_not_understood_is_refused(config: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        scheme(config, "x/config.json")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=says) as caught:
        read_header(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: quantization_config")
    assert "\n" not in str(caught.value)


def i32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


WHOLE = {"m.qweight": i32(8, 32), "m.qzeros": i32(2, 4), "m.scales": torch.ones(2, 32).half(), "m.g_idx": i32(64)}
GPTQ_FILE, AWQ_FILE, FP8_FILE = FilePacking("gptq", 4, 32), FilePacking("awq", 4, 32), FilePacking("fp8")
BROKEN: dict[str, tuple[FilePacking, dict[str, Tensor | None], str]] = {
    "no zeros": (GPTQ_FILE, {"m.qzeros": None}, "'m.qweight' comes without its qzeros"),
    "no scales": (AWQ_FILE, {"m.scales": None}, "comes without its scales"),
    "scales of another size": (GPTQ_FILE, {"m.scales": torch.ones(3, 32)}, r"is \[3, 32\], .* \[2, 32\]"),
    "zeros of another size": (GPTQ_FILE, {"m.qzeros": i32(2, 5)}, r"is \[2, 5\], .* \[2, 4\]"),
    "groups of another size": (FilePacking("gptq", 4, 64), {}, r"asks for \[1, 32\]"),
    "index of another size": (GPTQ_FILE, {"m.g_idx": i32(63)}, r"asks for \[64\]"),
    "index past the groups": (GPTQ_FILE, {"m.g_idx": i32(64) + 2}, "names a group that is not there"),
    "index below the groups": (GPTQ_FILE, {"m.g_idx": i32(64) - 1}, "names a group that is not there"),
    "floating codes": (GPTQ_FILE, {"m.qweight": torch.zeros(8, 32)}, r"is F32 \[8, 32\], not I32"),
    "codes in one row": (AWQ_FILE, {"m.qweight": i32(8)}, "not a matrix"),
    "no codes": (AWQ_FILE, {"m.qweight": i32(0, 4)}, r"is I32 \[0, 4\]"),
    "plain too": (GPTQ_FILE, {"m.weight": torch.ones(32, 64)}, "plain and packed"),
}
CODES = torch.ones(6, 8).to(torch.float8_e4m3fn)
BROKEN_FP8: dict[str, tuple[FilePacking, dict[str, Tensor], str]] = {
    "too few scales": (FilePacking("fp8", block=(4, 4)), {"m.weight_scale_inv": torch.ones(1, 2)}, r"must be \[2, 2\]"),
    "scales without blocks": (FP8_FILE, {"m.weight_scale_inv": torch.ones(2, 2)}, "must be one number or 6"),
    "two scales": (FP8_FILE, {"m.weight_scale": torch.ones(()), "m.weight_scale_inv": torch.ones(())}, "two"),
    "whole scales": (FP8_FILE, {"m.weight_scale": torch.ones(6, dtype=torch.int32)}, r"is \[6\] I32"),
    "a stack": (FP8_FILE, {"n": torch.ones(2, 2, 2).to(torch.float8_e4m3fn)}, "is no matrix"),
}


@pytest.mark.parametrize("case", [*BROKEN, *BROKEN_FP8])
def test_parts_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    packing, changes, says = BROKEN.get(case) or BROKEN_FP8[case]
    tensors: dict[str, Tensor | None] = {**(WHOLE if case in BROKEN else {"m.weight": CODES}), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        PackedSource(open_source(tmp_path), packing).read("m.weight")
    assert str(caught.value).startswith(str(tmp_path / "model.safetensors"))
    assert "\n" not in str(caught.value)
