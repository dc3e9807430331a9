"""AWQ and GPTQ in the layouts of the native kernels: their numbers, and their products beside the dequantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from test_packed import AWQ, GPTQ, PLACES, Packer, awq, gptq, write
from triptych.checkpoints.packed_safetensors import PackedGroups
from triptych.errors import CheckpointError
from triptych.model import load
from triptych.native import library, why_not
from triptych.nn.weights import PackedWeight
from triptych.quantize import OrderedBandFormat, packed_weight, repack_groups

pytestmark = pytest.mark.skipif(library() is None, reason=why_not() or "")

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
    assert x.grad is not None
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
