"""On one GPU: attention by its definition, reads and edits, training, loading, and packed weights."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import triptych
from cli_models import checkpoint
from native_models import LLAMA, needs_native
from test_attention import MASKS, noise, options_for, qkv
from test_gpu import WITHIN, exact_products, gap
from test_train_checkpoints import recipe, same, weights
from triptych.attention import KERNELS, attend, attend_reference, why
from triptych.checkpoints.convert import convert
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.model import Model
from triptych.nn.packed_weight import PackedWeight
from triptych.probe import Edit
from triptych.train import Optimizer, prepare, resume, verify_resume

pytestmark = pytest.mark.gpu
_ = exact_products  # a fixture of every test here


def moved(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": noise(1, 6, 9, 12, seed=7)},
    "sinks": {"sinks": noise(6, seed=8)},
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", MASKS)
def test_every_path_agrees_with_the_reference_on_the_cpu(name: str, extra: str) -> None:
    q, k, v = qkv(9, 12)
    options = options_for(name, 9, 12) | EXTRAS[extra]
    expected = attend_reference(q, k, v, **options)
    there = [x.cuda() for x in (q, k, v)]
    reasons = why(*there, **moved(options))
    assert gap([attend(*there, **moved(options))], [expected]) <= 1e-4
    for path in KERNELS:
        if not reasons[path]:
            assert gap([attend(*there, **moved(options), path=path)], [expected]) <= 1e-4, path


def test_a_mask_on_the_other_device_is_taken_there() -> None:
    q, k, v = (x.cuda() for x in qkv(9, 12))
    mask = noise(2, 9, 12, seed=9) > 0
    expected = attend_reference(q.cpu(), k.cpu(), v.cpu(), mask=mask)
    for given in (mask, mask.cuda()):
        assert gap([attend(q, k, v, mask=given)], [expected]) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(300, 300), (1, 300), (70, 300)])
def test_half_precision_and_pieces_of_prompts(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    queries, keys = shape
    q, k, v = (noise(2, n, t, 64, seed=i) for i, (n, t) in enumerate(((6, queries), (3, keys), (3, keys))))
    expected = attend_reference(q, k, v, mask=triptych.causal())
    found = attend(*(x.cuda().to(dtype) for x in (q, k, v)), mask=triptych.causal())
    assert found.dtype == dtype
    assert gap([found], [expected]) <= 2e-2


def test_reads_lie_on_the_gpu_and_hold_what_the_cpu_reads() -> None:
    path = checkpoint("decoder")
    cpu, gpu = triptych.load(path), triptych.load(path, device="cuda")
    read = ["blocks.*.attn.pattern", "blocks.1.resid_mid", "blocks.*.attn.scores", "logits"]
    traces = [model.trace(["the old mill", "a ship"], read=read) for model in (cpu, gpu)]
    assert set(traces[0]) == set(traces[1])
    for name in traces[0]:
        for one, other in zip(traces[0][name], traces[1][name], strict=True):
            assert other.is_cuda
            finite = one.isfinite()
            assert torch.equal(finite, other.cpu().isfinite())
            assert gap([one[finite]], [other.cpu()[finite]]) <= WITHIN


def test_an_edit_acts_under_fixed_shapes_and_runs_as_modules() -> None:
    path = checkpoint("decoder")
    cpu, gpu = triptych.load(path), triptych.load(path, device="cuda")
    gpu.executor = "static"
    plain = gpu.generate(["the old mill"], max_new_tokens=10)[0].ids
    edit = [Edit("blocks.1.mlp.out", lambda x, where: x * 0.0)]
    edited = [model.generate(["the old mill"], max_new_tokens=10, edit=edit)[0].ids for model in (cpu, gpu)]
    assert edited[0] == edited[1] != plain
    traced = gpu.generate(["the old mill"], max_new_tokens=6, read=["blocks.0.attn.pattern"])[0]
    assert traced.ids == plain[:6]
    assert traced.trace is not None


def test_a_statistic_of_attention_is_that_of_the_cpu() -> None:
    path = checkpoint("decoder")
    tables = [triptych.load(path, device=device).heads(["the old mill stands"]) for device in ("cpu", "cuda")]
    assert str(tables[0])[:200] == str(tables[1])[:200]


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
def test_twenty_steps_lower_the_loss(tmp_path: Path, objective: str, precision: str) -> None:
    job = prepare(recipe(tmp_path, objective, device="cuda", precision=precision))
    assert job.trainer.module.device.type == "cuda"
    job.run()
    losses = [record.loss for record in job.trainer.at.history]
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
def test_ten_steps_and_ten_more_are_twenty(tmp_path: Path, objective: str) -> None:
    whole = prepare(recipe(tmp_path, objective, device="cuda"))
    whole.run()
    prepare(recipe(tmp_path, objective, out=tmp_path / "run", device="cuda")).run(until=10)
    again = resume(tmp_path / "run")
    assert again.trainer.device.type == "cuda"
    assert not same(weights(again), weights(whole))
    again.run()
    assert same(weights(again), weights(whole))


def test_a_resumed_run_without_its_optimizer_would_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "restore", lambda self, state: None)
    with pytest.raises(triptych.TriptychError, match="cannot resume"):
        verify_resume(recipe(tmp_path, device="cuda"), 4)


def test_the_losses_of_the_first_steps_are_those_of_the_cpu(tmp_path: Path) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        job = prepare(recipe(tmp_path, device=device, precision="fp32"))
        job.run(until=5)
        losses.append([record.loss for record in job.trainer.at.history])
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= WITHIN


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_weights_go_straight_to_the_gpu(dtype: str | None) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = triptych.load(checkpoint("decoder"), device="cuda", dtype=dtype)
    size = sum(p.nbytes for p in model.module.parameters())
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + (1 << 20)
    assert model.module.device == next(model.module.parameters()).device
    assert model.module.device.type == "cuda"


def test_a_packed_file_is_dequantized_on_a_gpu_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    triptych.create(LLAMA).save(tmp_path / "plain")
    convert(tmp_path / "plain", path, dtype="q8_0")
    cpu, gpu = triptych.load(path, dequantize=True), triptych.load(path, device="cuda")
    assert not any(isinstance(p, PackedWeight) for p in gpu.module.parameters())
    assert any("are dequantized" in note for note in gpu.report.notes)
    assert gap(gpu.logits([[1, 2, 3]]), cpu.logits([[1, 2, 3]])) <= WITHIN
    for options in ({"quantize": "int8"}, {"dequantize": False}):
        with pytest.raises(InputError, match="packed weights run on the CPU"):
            triptych.load(path, device="cuda", **options)


@needs_native
def test_moving_packed_weights_to_a_gpu_is_refused(tmp_path: Path) -> None:
    triptych.create(LLAMA).save(tmp_path / "plain")
    model = triptych.load(tmp_path / "plain", quantize="int8")
    assert any(isinstance(p, PackedWeight) for p in model.module.parameters())
    with pytest.raises(InputError, match=r"packed weights stay on the CPU"):
        model.module.to("cuda")


def test_a_model_moves_there_and_back() -> None:
    module = tiny.decoder()
    logits = Model(module).logits([[1, 2, 3]])
    there = Model(deepcopy(module).to("cuda"))
    assert there.module.device.type == "cuda"
    assert gap(there.logits([[1, 2, 3]]), logits) <= WITHIN
    back = Model(there.module.to("cpu"))
    assert gap(back.logits([[1, 2, 3]]), logits) == 0
    engine = Engine(there.module)
    engine.add(Request(prompt=[1], max_new_tokens=3))
    assert engine.step()
