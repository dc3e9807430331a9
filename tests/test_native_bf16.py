"""Products in bf16: as close as rounding both factors allows, the same bits in any batch, chosen by the processor."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
import test_native_encoder
import triptych
from native_models import needs_native
from test_native_encoder import BERT, LENGTHS, by_modules, drawn
from triptych import native, nn, ops, tasks
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.measure.jobs import texts
from triptych.model import create
from triptych.native.step import Op
from triptych.program import native_tables
from triptych.program.native_encoder import encoder_binding, multiplies_in_bf16

LIBRARY = native.library()
HERE = None if LIBRARY is None else LIBRARY.bf16
pytestmark = [needs_native, pytest.mark.skipif(HERE is None, reason="this processor has no products in bf16")]
ODD = BERT | {"hidden_size": 52, "intermediate_size": 77}  # no multiples of the sizes of a tile
NEAR = 2e-2  # of hidden states of about 1: sums in another order may be rounded to a neighbouring number of bf16

natively = partial(test_native_encoder.natively, bf16=True)


def rounded_modules(monkeypatch: pytest.MonkeyPatch, module: nn.Transformer, ids: list[int], rows: Rows) -> Tensor:
    """The modules with both factors of every product with weights rounded to bf16, and the sum in fp64."""
    linear = ops.linear

    def rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight = (one.bfloat16().double() for one in (x, nn.packed_weight.dense(weight)))
        return linear(x, weight, None if bias is None else bias.double()).float()

    with monkeypatch.context() as patch:
        patch.setattr(ops, "linear", rounded)
        return by_modules(module, ids, rows)


@pytest.mark.parametrize("sizes", [BERT, ODD], ids=["even", "odd"])
@torch.no_grad()
def test_only_the_factors_of_products_are_rounded(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = create(sizes).module
    for lengths in (LENGTHS, (1,), (5,), (16,), (31, 2), (259,)):
        ids, rows = drawn(sum(lengths)), Rows(lengths)
        found, expected = natively(module, ids, rows), rounded_modules(monkeypatch, module, ids, rows)
        assert float((found - expected).abs().max()) <= NEAR
        assert float((found - expected).abs().mean()) <= NEAR / 20
    exact = by_modules(module, ids, rows)
    assert float((exact - expected).abs().mean()) > float((found - expected).abs().mean())  # so it was bf16


@torch.no_grad()
def test_weights_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rows = drawn(sum(LENGTHS)), Rows(LENGTHS)
    expected = natively(create(BERT).module, ids, rows)
    monkeypatch.setattr(native_tables, "BAND", 8)
    assert float((natively(create(BERT).module, ids, rows) - expected).abs().max()) > 10 * NEAR


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert-base", "electra-base", "bart-base", "marian"])
@torch.no_grad()
def test_every_family_of_encoders_is_near_its_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, lengths = parity.ours(name).module, (17, 1, 40, 3)
    ids, rows = drawn(sum(lengths)), Rows(lengths)
    expected = rounded_modules(monkeypatch, module, ids, rows)
    assert float((natively(module, ids, rows) - expected).abs().max()) <= NEAR


@pytest.mark.parametrize("form", [None, "int8"])
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch_and_number_of_threads(form: str | None, tmp_path: Path) -> None:
    model = create(ODD if form is None else BERT)
    model.save(tmp_path)
    module = model.module if form is None else triptych.load(tmp_path, quantize=form).module
    ids, rows = drawn(900), Rows((200, 33, 1, 300, 66, 300))
    torch.set_num_threads(1)
    expected = natively(module, ids, rows)
    for count in (2, 3):  # pieces on threads of their own, then all threads at one piece
        torch.set_num_threads(count)
        assert torch.equal(natively(module, ids, rows), expected)
        for start, length in ((0, 200), (200, 33), (233, 1), (234, 300)):
            alone = natively(module, ids[start : start + length], Rows((length,)))
            assert torch.equal(alone, expected[start : start + length])


@torch.no_grad()
def test_activations_sums_and_rounding_are_parts_of_products() -> None:
    module = create(BERT).module
    natively(module, [5, 6], Rows((2,)))
    plan = encoder_binding(module, True, False, None, 1).plan
    ops_of, products = plan.instructions["op"].tolist(), plan.instructions[plan.instructions["op"] == Op.LINEAR_BF16]
    assert Op.MAP not in ops_of
    assert ops_of.count(Op.ADD) == 2  # of the embeddings
    assert len(products) == 12
    assert (products["linear_bf16"]["function"] != 0).sum() == products["linear_bf16"]["rounds"].sum() == 2  # up
    assert (products["linear_bf16"]["more"] != -1).sum() == 4  # out and down


@torch.no_grad()
def test_changed_weights_are_followed() -> None:
    ids, rows = drawn(sum(LENGTHS)), Rows(LENGTHS)
    module: Any = create(BERT).module
    natively(module, ids, rows)
    for weight in (module.encoder.blocks[0].attn.q.weight, module.encoder.blocks[1].mlp.up.weight):
        weight.mul_(-1.5)
        fresh = create(BERT).module
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(natively(module, ids, rows), natively(fresh, ids, rows))


def test_what_products_are_computed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    model = create(BERT)
    model.save(tmp_path)
    packed, half = triptych.load(tmp_path, quantize="int8"), triptych.load(tmp_path, dtype="bf16")
    library: Any = native.library()
    for isa, expected in (("amx-bf16", (False, True, True)), (None, (False, False, False))):
        monkeypatch.setattr(library, "bf16", isa)
        assert tuple(multiplies_in_bf16(one.module, "auto") for one in (model, half, packed)) == expected
        assert not any(multiplies_in_bf16(one.module, "stored") for one in (model, half, packed))
    rows: list[Any] = [[5, 6, 7]]
    with pytest.raises(InputError, match="matmul='bf16' needs AMX"):
        model.encode(rows, matmul="bf16")
    monkeypatch.setattr(library, "bf16", "amx-bf16")
    assert tasks.note_on_products(model.module, "auto") is None
    assert "packed weights are multiplied in bf16" in (tasks.note_on_products(packed.module, "auto") or "")
    assert tasks.note_on_products(packed.module, "stored") is None
    model.executor = "modules"
    with pytest.raises(InputError, match=r"matmul='bf16' needs the native executor.*executor='modules'"):
        model.encode(rows, matmul="bf16")
    with pytest.raises(InputError, match="matmul must be one of"):
        model.encode(rows, matmul="fp8")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@torch.no_grad()
def test_a_process_that_was_forked_after_use_encodes() -> None:
    module, ids, rows = create(BERT).module, drawn(300), Rows((150, 150))
    expected = natively(module, ids, rows)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if torch.equal(natively(module, ids, rows), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.heavy
def test_sentences_in_bf16_are_near_those_in_fp32(minilm_dir: Path, unchecked: None) -> None:
    sentences = texts(128)
    model = triptych.load(minilm_dir)
    expected, half = model.encode(sentences), triptych.load(minilm_dir, dtype="bf16")

    def least(vectors: Tensor) -> float:
        return float(torch.cosine_similarity(vectors.float(), expected).min())

    found = half.encode(sentences)
    assert found.dtype == torch.bfloat16
    assert least(found) >= 0.9998  # norms and embeddings are rounded, too
    assert least(model.encode(sentences, matmul="bf16")) >= 0.9999
    if HERE == "amx-bf16":
        packed = triptych.load(minilm_dir, quantize="int8")
        assert least(packed.encode(sentences)) > least(packed.encode(sentences, matmul="stored")) < 0.9999
    half.executor = "modules"
    torch.testing.assert_close(half.encode(sentences), found, atol=1e-2, rtol=1e-2)
    assert least(half.encode(sentences)) < least(found)
