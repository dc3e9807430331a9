"""The native step: equal to the modules for every family, the same bits however a row is run, and the modules wherever
a model does more than its program says."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import native_models
import parity
import tiny
from native_models import ANY, Run, needs_native
from triptych import nn, ops
from triptych.attention import Rows
from triptych.checkpoints.gguf_blocks import PackedBlocks, block_format
from triptych.generate import Engine, Request, Sampling
from triptych.model import create
from triptych.native.step import Op
from triptych.nn.feedforward import GLU
from triptych.nn.weights import PackedWeight
from triptych.probe import Plan, Session, zero
from triptych.program import lower, native_executor
from triptych.program.native_executor import NativeStep
from triptych.program.native_plan import NativePlan, plan_of
from triptych.program.native_steps import NotNative
from triptych.quantize import kernel_matrix, packed_weight, repack

pytestmark = needs_native
EXACT = 1e-4  # of log-probabilities, in fp32
LLAMA = {"model_type": "llama", "vocab_size": 41, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 700,
         "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def llama(**changes: Any) -> nn.Transformer:
    return create(LLAMA | changes).module


def packed(name: str = "Q8_0") -> nn.Transformer:
    """A model whose matrices are packed."""
    module, form = llama(), block_format(name)
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            blocks = PackedBlocks(form, form.pack(weight.detach().reshape(-1, form.elements)).view(len(weight), -1))
            part.register_parameter("weight", torch.nn.Parameter(packed_weight(repack(blocks)), requires_grad=False))
    return module


# -- equal to the modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", native_models.decoders())
def test_every_family_that_generates_gives_what_its_modules_give(name: str) -> None:
    assert Run(parity.ours(name).module).gap() <= EXACT


TINY = {
    "partial, interleaved": lambda: tiny.decoder("rope-partial-interleaved"), "window": lambda: tiny.decoder(
        mask="window"), "t5 buckets": lambda: tiny.decoder("t5", "window"), "alibi": lambda: tiny.decoder("alibi"),
    "learned": lambda: tiny.decoder("learned"), "sinusoidal": lambda: tiny.decoder("sinusoidal"),
    "none": lambda: tiny.decoder("none"), "attention only": tiny.attention_only, "mixture": tiny.mixture,
    "encoder-decoder": tiny.encoder_decoder,
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_every_part_gives_what_its_module_gives(name: str) -> None:
    assert Run(TINY[name]()).gap() <= EXACT


LACKING = {
    "additive": (lambda: tiny.decoder(mechanism="additive"), "not by additive scores"),
    "linear": (lambda: tiny.decoder(mechanism="linear"), "not by linear scores"),
    "disentangled": (lambda: tiny.decoder("disentangled"), "no operation reached_table"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_the_native_step_lacks_is_named_and_runs_as_modules(name: str) -> None:
    module = LACKING[name][0]()
    with pytest.raises(NotNative, match=LACKING[name][1]):
        plan_of(lower(module), windows=[None, None])
    engine = Engine(module)
    engine.add(Request(prompt=[1, 2], max_new_tokens=2))
    engine.step()
    assert engine.why_modules is not None
    assert LACKING[name][1] in engine.why_modules


def test_long_rows_run_in_several_calls_and_windows_slide() -> None:
    steps = ((300, 2, 270), (1, 290, 1), (1, 1, 1))
    assert Run(llama()).gap(steps) <= EXACT
    assert Run(llama(model_type="mistral", sliding_window=100)).gap(steps) <= EXACT


def test_bf16_weights_and_cache() -> None:
    module = llama().to(torch.bfloat16)
    assert Run(module).gap() < 0.15  # the modules round every value to 8 bits of mantissa


# -- packed weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])  # a row of Q4_0 numbers lies on ties of the rounding
def test_packed_weights_give_what_modules_give_for_rounded_vectors(name: str) -> None:
    """With the inputs of every packed product rounded as the kernels round them, the modules give the same, but where
    a number on the edge between two codes went to the other one."""
    module = packed(name)
    modules, native = Run(module).both()
    plain = unpacked(module)
    exact = _by_modules(plain)
    _with_rounded_inputs(plain)
    expected = _by_modules(plain)
    assert max(float((a - b).abs().max()) for a, b in zip(native, modules, strict=True)) < 1e-4
    worst = max(float((a - b).abs().max()) for a, b in zip(native, expected, strict=True))
    lost = max(float((a - b).abs().max()) for a, b in zip(native, exact, strict=True))
    assert worst < 0.1 * lost, (worst, lost)
    relative = torch.cat(native).sub(torch.cat(exact)).norm() / torch.cat(exact).norm()
    assert relative <= 1e-2


def unpacked(module: nn.Transformer) -> nn.Transformer:
    """The same model with the numbers of its packed weights as plain parameters."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, PackedWeight):
            part.register_parameter("weight", torch.nn.Parameter(weight.dense(), requires_grad=False))
    return twin


def _with_rounded_inputs(module: nn.Transformer) -> None:
    def rounded(part: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        groups = inputs[0].unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((torch.round(groups / scale.clamp(min=1e-30)) * scale).flatten(-2),)

    for part in module.modules():
        if type(part).__name__ == "Linear":
            part.register_forward_pre_hook(rounded)


def _by_modules(module: nn.Transformer) -> list[Tensor]:
    return Run(module).both(native=False)[0]


# -- the same bits ----------------------------------------------------------------------------------------------------


def bits(module: nn.Transformer, pieces: list[int], rows: int, threads: int) -> Tensor:
    """The logits of row 0, its tokens run in these pieces beside other rows."""
    assert module.decoder is not None
    torch.set_num_threads(threads)
    step, out, done = None, [], 0
    cache = module.decoder.cache(rows)
    step = NativeStep(module, cache, matrix_of=kernel_matrix, most_dense=ANY)
    with torch.inference_mode():
        for length in pieces:
            lengths = [length, *(1 + (done + i) % 3 for i in range(1, rows))]
            ids = [(done + i) * 7 % 41 for i in range(length)] + [5] * (sum(lengths) - length)
            order = tuple(cache.lengths)
            logits = step.logits(ids, Rows(tuple(lengths), order), range(len(ids)))
            assert logits is not None, step.why_modules
            out.append(logits[:length])
            done += length
    return torch.cat(out)


@pytest.mark.parametrize("made", [
    lambda: llama(), lambda: llama(model_type="mistral", sliding_window=9), packed,
    lambda: tiny.mixture(), lambda: tiny.decoder("t5"),
], ids=["dense", "window", "packed", "mixture", "bias"])  # fmt: skip
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_number_of_threads(made: Callable[[], nn.Transformer]) -> None:
    module, threads = made(), torch.get_num_threads()
    try:
        expected = bits(module, [30], rows=1, threads=1)
        for pieces, rows, count in (([1] * 30, 1, 1), ([30], 4, 2), ([7, 1, 1, 16, 5], 3, 3), ([13, 17], 2, 2)):
            assert torch.equal(bits(module, pieces, rows, count), expected), (pieces, rows, count)
    finally:
        torch.set_num_threads(threads)


# -- bindings follow the weights --------------------------------------------------------------------------------------


class Adapter(torch.nn.Module):
    """A low-rank change beside a layer (Hu et al. 2022)."""

    def __init__(self, base: torch.nn.Module, width: int, out: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(4, width, generator=random))
        self.up = torch.nn.Parameter(torch.randn(out, 4, generator=random))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ops.linear(ops.linear(x, self.down), self.up)


def _block(module: nn.Transformer) -> Any:
    assert module.decoder is not None
    return module.decoder.blocks[0]


@torch.no_grad()
def _in_place(module: nn.Transformer) -> None:
    _block(module).attn.q.weight.mul_(-1.5)


@torch.no_grad()
def _norm_in_place(module: nn.Transformer) -> None:
    _block(module).mlp_norm.pre.weight.mul_(3)


def _replaced(module: nn.Transformer) -> None:
    down = _block(module).mlp.down
    down.weight = torch.nn.Parameter(down.weight.detach() * 2)


def _data(module: nn.Transformer) -> None:
    down = _block(module).mlp.down
    down.weight.data = down.weight.data * 2


def _loaded(module: nn.Transformer) -> None:
    module.load_state_dict(create(LLAMA, seed=5).module.state_dict())


def _assigned(module: nn.Transformer) -> None:
    module.load_state_dict(create(LLAMA, seed=5).module.state_dict(), assign=True)


def _cast(module: nn.Transformer) -> None:
    module.to(torch.bfloat16).to(torch.float32)


def _adapter_added(module: nn.Transformer) -> None:
    mlp = _block(module).mlp
    mlp.down = Adapter(mlp.down, 96, 64).eval()


def _adapter_merged(module: nn.Transformer) -> None:
    mlp = _block(module).mlp
    if isinstance(mlp.down, Adapter):
        with torch.no_grad():
            mlp.down.base.weight += mlp.down.up @ mlp.down.down
        mlp.down = mlp.down.base


CHANGES = [_in_place, _norm_in_place, _replaced, _data, _loaded, _assigned, _cast, _adapter_added]


@pytest.mark.parametrize("change", CHANGES)
def test_a_binding_follows_the_weights(change: Callable[[nn.Transformer], None]) -> None:
    module = llama()
    followed(module, change)


def test_an_adapter_merged_and_a_bias_table_changed_in_place() -> None:
    module = llama()
    _adapter_added(module)
    before = followed(module, _adapter_merged, differs=False)
    _in_place(module)
    assert not torch.equal(before, Run(module).both()[1][0])

    def table(module: nn.Transformer) -> None:
        assert module.decoder is not None
        with torch.no_grad():
            for kind in module.decoder.kinds.values():
                kind.position.weight.mul_(-2)

    followed(tiny.decoder("t5"), table)


def test_bf16_vectors_are_copied_again() -> None:
    module = llama()
    norm = _block(module).attn_norm.pre
    norm.weight = torch.nn.Parameter(norm.weight.detach().bfloat16())
    followed(module, _norm_of_bf16)


@torch.no_grad()
def _norm_of_bf16(module: nn.Transformer) -> None:
    _block(module).attn_norm.pre.weight.mul_(2)


def followed(module: nn.Transformer, change: Callable[[nn.Transformer], object], differs: bool = True) -> Tensor:
    """One engine's step, before a change and after it, equals the modules."""
    run = Run(module)
    first, second = run.side(True), run.side(False)
    rows, ids = Rows((3, 2, 4), (0, 0, 0)), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with torch.inference_mode():
        before = first.step(ids, rows, None)
        assert float((before - second.step(ids, rows, None)).abs().max()) < EXACT
    change(module)
    later = Rows((1, 1, 1), rows.ends)
    with torch.inference_mode():
        for row in range(3):
            first.cache.trim(row, 0)
            second.cache.trim(row, 0)
        after = first.step(ids, rows, None)
        assert differs == (float((after - before).abs().max()) > 1e-3)
        assert float((after - second.step(ids, rows, None)).abs().max()) < EXACT
        assert float((first.step([1, 2, 3], later, None) - second.step([1, 2, 3], later, None)).abs().max()) < EXACT
    return after


# -- the modules run where the program does not say all ---------------------------------------------------------------


def _hooked(module: nn.Transformer) -> None:
    _block(module).attn.out.register_forward_hook(lambda part, inputs, out: out * 0.5)


def _forward_replaced(module: nn.Transformer) -> None:
    mlp = _block(module).mlp
    forward = mlp.forward
    mlp.forward = lambda *arguments: forward(*arguments) * 0.5


def _training(module: nn.Transformer) -> None:
    _block(module).mlp.train()


REFUSED = {
    "hook": (_hooked, "decoder.blocks.0.attn.out has a hook"),
    "replaced forward": (_forward_replaced, "the forward of decoder.blocks.0.mlp is replaced"),
    "training": (_training, "decoder.blocks.0.mlp is in training mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_run_where_the_model_does_more_than_its_program(name: str) -> None:
    module = llama()
    engine, by_modules = Engine(module), Engine(module, executor="modules")
    for one in (engine, by_modules):
        one.add(Request(prompt=[1, 2, 3], max_new_tokens=9, all_logits=True))
    outputs = [[one.step()[0] for one in (engine, by_modules)] for _ in range(2)]
    assert engine.why_modules is None
    change, reason = REFUSED[name]
    change(module)
    outputs += [[one.step()[0] for one in (engine, by_modules)] for _ in range(2)]
    assert engine.why_modules == reason
    for ours, theirs in outputs:
        torch.testing.assert_close(ours.logits, theirs.logits, atol=EXACT, rtol=0)


def native_logits(module: nn.Transformer) -> Tensor:
    return Run(module).both()[1][0]


def test_a_class_whose_forward_is_replaced_is_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.decoder()
    run = Run(module)
    assert run.gap() <= EXACT
    before = run.both()[1][0]
    forward = GLU.forward
    monkeypatch.setattr(GLU, "forward", lambda self, *arguments: forward(self, *arguments) * 0.5)
    assert run.gap() <= EXACT
    assert not torch.allclose(run.both()[1][0], before)


def test_probed_rows_run_as_modules_and_others_natively() -> None:
    module = llama()
    engine = Engine(module)
    session = Session(Plan.of(module.spec, [], [zero("blocks.0.mlp.out")]))
    engine.add(Request(prompt=[1, 2, 3], max_new_tokens=4, probe=session))
    engine.step()
    assert engine.why_modules == "the rows are probed"
    engine = Engine(module)
    engine.add(Request(prompt=[1, 2, 3], max_new_tokens=4))
    engine.step()
    assert engine.why_modules is None


def test_gradients_and_modes_of_torch_run_as_modules() -> None:
    module = llama()
    assert module.decoder is not None
    step = NativeStep(module, module.decoder.cache(1))
    assert step.logits([1], Rows((1,)), [0]) is None
    assert step.why_modules == "gradients may be needed"
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert step.logits([1], Rows((1,)), [0]) is None
    assert step.why_modules is not None
    assert "autocast" in step.why_modules


@torch.inference_mode()
def test_wrong_sizes_never_reach_the_kernels() -> None:
    module = llama()
    assert module.decoder is not None
    step = NativeStep(module, module.decoder.cache(1))
    for ids, rows, reason in (
        ([41], Rows((1,)), "outside the vocabulary"), ([-1], Rows((1,)), "outside the vocabulary"),
        ([1, 2], Rows((1,)), "no tokens"), ([], Rows((0,)), "no tokens"),
        ([1] * 701, Rows((701,)), "at once"),
    ):  # fmt: skip
        assert step.logits(ids, rows, []) is None
        assert reason in (step.why_modules or "")
    step.most_dense = ANY
    assert step.logits([1] * 701, Rows((701,)), []) is None
    assert "context" in (step.why_modules or "")


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "alibi", "mixture", "encoder-decoder"])
def test_an_engine_writes_natively_what_it_writes_with_modules(name: str) -> None:
    module = TINY[name]()
    texts = []
    for executor in ("auto", "modules"):
        engine = Engine(module, executor=executor)  # type: ignore[arg-type]
        both = module.encoder is not None
        rows = engine.add(*(
            Request(prompt=prompt, source=[5, 6, 7 + i] if both else None, number=i, max_new_tokens=9,
                    sampling=Sampling(temperature=0.5 * i, seed=4))
            for i, prompt in enumerate([[3, 1, 4], [2], [7, 8, 9, 1]])
        ))  # fmt: skip
        reasons = []
        while engine.rows:
            engine.step()
            reasons.append(engine.why_modules)
        texts.append([row.new for row in rows])
        if executor == "auto":
            assert reasons[2:] == [None] * len(reasons[2:]), reasons
    assert texts[0] == texts[1]


def test_two_threads_use_one_model() -> None:
    module, found = llama(), dict[int, list[int]]()

    def write(number: int) -> None:
        engine = Engine(module)
        (row,) = engine.add(Request(prompt=[1 + number % 2, 2, 3], max_new_tokens=40))
        while engine.rows:
            engine.step()
            assert engine.why_modules is None
        found[number] = row.new

    write(0)
    write(1)
    alone = dict(found)
    workers = [threading.Thread(target=write, args=(number,)) for number in range(2, 6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [found[number] for number in range(2, 6)] == [alone[number % 2] for number in range(2, 6)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_fork_after_use_works() -> None:
    module, threads = llama(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = native_logits(module)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(_natively(module), _natively(module)) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(native_logits(module), expected)
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _natively(module: nn.Transformer) -> Tensor:
    return Run(module).side(True).step([1, 2, 3, 4], Rows((2, 1, 1)), None)


# -- controls ---------------------------------------------------------------------------------------------------------


def _without(op: Op) -> Callable[[NativePlan], NativePlan]:
    def broken(plan: NativePlan) -> NativePlan:
        at = np.nonzero(plan.instructions["op"] == op)[0][0]
        plan.instructions["op"][at] = -1
        return plan

    return broken


def _swapped(plan: NativePlan) -> NativePlan:
    at = np.nonzero(plan.instructions["op"] == Op.LINEAR)[0]
    plan.instructions[[at[0], at[-2]]] = plan.instructions[[at[-2], at[0]]]
    return plan


def _changed(op: Op, name: str, value: float) -> Callable[[NativePlan], NativePlan]:
    def broken(plan: NativePlan) -> NativePlan:
        plan.instructions[name][plan.instructions["op"] == op] = value
        return plan

    return broken


BROKEN = {
    "two instructions swapped": _swapped, "a rotation left out": _without(Op.ROTATE),
    "keys not kept": _without(Op.EXTEND), "the other pairing": _changed(Op.ROTATE, "kind", 1),
    "another scale": _changed(Op.ATTEND, "first", 0.3), "another eps": _changed(Op.RMS_NORM, "first", 0.1),
    "no activation": _changed(Op.MAP_MULTIPLY, "kind", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = native_executor.plan_of
    monkeypatch.setattr(native_executor, "plan_of", lambda *arguments: BROKEN[name](made(*arguments)))
    assert Run(llama()).gap() > 10 * EXACT
