"""What the native step holds follows the model: weights that change are bound again, and the modules run wherever the
model does more than its program says."""

import copy
import pickle
from collections.abc import Callable
from threading import Event, Thread
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import tiny
from native_models import ANY, EXACT, LLAMA, Run, llama, needs_native
from triptych import nn, ops
from triptych.attention import Rows
from triptych.generate import Engine, Request, Scheduler
from triptych.generate.generation import pieces
from triptych.model import create
from triptych.native import library
from triptych.nn.feedforward import GLU
from triptych.nn.transformer import ExecutorPlans
from triptych.probe import Plan, Session, zero
from triptych.program import native_executor
from triptych.program.module_changes import WeightVersions
from triptych.program.native_executor import MOST_DENSE, MOST_DENSE_FP32, NativeStep
from triptych.program.native_plan import NativePlan, plan_of
from triptych.program.native_tables import bound
from triptych.program.program import Program
from triptych.text.detokenize import TextStream

pytestmark = needs_native


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
    return module.decoder.blocks[0]


@torch.no_grad()
def _scaled(weight: Tensor, factor: float) -> None:
    weight.mul_(factor)


def _adapter_added(module: nn.Transformer) -> None:
    mlp = _block(module).mlp
    mlp.down = Adapter(mlp.down, 96, 64).eval()


def _adapter_merged(module: nn.Transformer) -> None:
    mlp = _block(module).mlp
    if isinstance(mlp.down, Adapter):
        with torch.no_grad():
            mlp.down.base.weight += mlp.down.up @ mlp.down.down
        mlp.down = mlp.down.base


def _twice(weight: Tensor) -> Tensor:
    return weight.detach() * 2


CHANGES: dict[str, Callable[[nn.Transformer], object]] = {
    "in place": lambda module: _scaled(_block(module).attn.q.weight, -1.5),
    "norm in place": lambda module: _scaled(_block(module).mlp_norm.pre.weight, 3),
    "replaced": lambda module: setattr(
        _block(module).mlp.down, "weight", torch.nn.Parameter(_twice(_block(module).mlp.down.weight))
    ),
    "data": lambda module: setattr(_block(module).mlp.down.weight, "data", _twice(_block(module).mlp.down.weight)),
    "loaded": lambda module: module.load_state_dict(create(LLAMA, seed=5).module.state_dict()),
    "assigned": lambda module: module.load_state_dict(create(LLAMA, seed=5).module.state_dict(), assign=True),
    "cast": lambda module: module.to(torch.bfloat16).to(torch.float32),
    "adapter added": _adapter_added,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_binding_follows_the_weights(change: str) -> None:
    followed(llama(), CHANGES[change])


def test_an_adapter_merged_and_a_bias_table_changed_in_place() -> None:
    module = llama()
    _adapter_added(module)
    before = followed(module, _adapter_merged, differs=False)
    _scaled(_block(module).attn.q.weight, -1.5)
    assert not torch.equal(before, Run(module).both()[1][0])

    def table(module: nn.Transformer) -> None:
        with torch.no_grad():
            for kind in module.decoder.kinds.values():
                kind.position.weight.mul_(-2)

    followed(tiny.decoder("t5"), table)


def _with_a_norm_of_bf16() -> nn.Transformer:
    module = llama().to(torch.bfloat16).to(torch.float32)  # numbers that bf16 holds
    norm = _block(module).attn_norm.pre
    norm.weight = torch.nn.Parameter(norm.weight.detach().bfloat16())
    return module


def test_bf16_vectors_are_copied_again() -> None:
    followed(_with_a_norm_of_bf16(), lambda module: _scaled(_block(module).attn_norm.pre.weight, 2))


def _fused_step(module: nn.Transformer) -> None:
    parameters = [one for one in module.parameters() if one.dim() and one.dtype == torch.float32]
    copied = [_block(module).attn_norm.pre.weight] if module.spec.family == "llama" else []
    for one in (*parameters, *copied):
        one.grad = torch.ones_like(one)
    for some in (parameters, copied):
        if some:
            torch.optim.AdamW(some, lr=0.3, fused=True).step()


def _data_in_place(module: nn.Transformer) -> None:
    for one in module.parameters():
        one.data.mul_(-2)


def _swapped_class(module: nn.Transformer) -> None:
    mlp = _block(module).mlp

    class Doubled(type(mlp)):  # type: ignore[misc]
        def forward(self, *inputs: Any) -> Any:
            return 2 * super().forward(*inputs)

    mlp.__class__ = Doubled


@pytest.mark.parametrize("change", [_fused_step, _data_in_place, _swapped_class], ids=lambda one: one.__name__)
def test_changes_that_torch_does_not_count_are_followed(change: Callable[[nn.Transformer], None]) -> None:
    """Of what the binding copied: vectors in bf16, and the table of T5's biases in any dtype."""
    followed(_with_a_norm_of_bf16(), change)
    if change is not _swapped_class:
        followed(tiny.decoder("t5"), change)


def test_the_end_of_a_large_tensor_is_compared_and_memory_that_moved_is_not_read() -> None:
    tensors = [torch.zeros(1000), torch.zeros(3, 40).T, torch.zeros(0), torch.zeros((), dtype=torch.bfloat16)]
    for tensor, place in ((tensors[0], -1), (tensors[0], 500), (tensors[1], (-1, -1)), (tensors[3], ())):
        contents = WeightVersions([], tensors, [], 64)
        assert contents.same()
        tensor.data[place] = 7
        assert not contents.same()
    contents = WeightVersions([], tensors, [], 64)
    tensors[0].data[100] = 7
    assert contents.same()  # of a large tensor not every number is compared
    tensors[0].share_memory_()
    assert not contents.same()


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of two logits, beside the largest of them where that is over 1: fp32 rounds in proportion
    to the numbers, and weights times -2 make logits of 16."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1))


def followed(module: nn.Transformer, change: Callable[[nn.Transformer], object], differs: bool = True) -> Tensor:
    """One engine's step, before a change and after it, is ten times nearer to the modules than the change takes it."""
    run = Run(module)
    first, second = run.side(True), run.side(False)
    rows, ids = Rows((3, 2, 4), (0, 0, 0)), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with torch.inference_mode():
        before = first.step(ids, rows, None)
        assert apart(before, second.step(ids, rows, None)) < EXACT
    change(module)
    later = Rows((1, 1, 1), rows.ends)
    with torch.inference_mode():
        for row in range(3):
            first.cache.trim(row, 0)
            second.cache.trim(row, 0)
        after = first.step(ids, rows, None)
        assert differs == (apart(after, before) > 10 * EXACT)
        assert apart(after, second.step(ids, rows, None)) < EXACT
        assert apart(first.step([1, 2, 3], later, None), second.step([1, 2, 3], later, None)) < EXACT
    return after


def ran(module: nn.Transformer) -> Run:
    """A run of a few steps, natively as through the modules."""
    run = Run(module)
    assert run.gap() <= EXACT
    return run


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), copy.copy])
def test_a_copy_of_a_model_that_ran_has_plans_of_its_own(copied: Callable[[nn.Transformer], nn.Transformer]) -> None:
    """Each follows its own weights: those of the copy change, and then those of the first are gone."""
    module = llama()
    ran(module)
    other = copied(module)
    if copied is not copy.copy:  # which shares the parts and weights
        assert other.plans.get("step") is None
        assert module.plans.get("step") is not None
        _block(other).mlp.down.weight.detach().mul_(3)
    ran(other)
    ran(module)
    prepared = other.plans.get("step")
    assert (prepared is module.plans.get("step")) == (copied is copy.copy)
    assert not [name for name in module.state_dict() if "plans" in name]
    del module
    ran(other)


def test_a_model_that_ran_is_freed() -> None:
    module = llama()
    ran(module)
    alive = ref(module)
    del module
    assert alive() is None


def test_threads_that_prepare_a_module_at_once_lose_no_plan() -> None:
    """The first makes its plan while the second asks for another one: both are kept, and neither is made again."""
    made, first_makes, second_asked = list[object](), Event(), Event()

    def slow(program: Program, packed: frozenset[str], *how: Any) -> NativePlan:
        made.append(how)
        if len(made) == 1:
            first_makes.set()
            second_asked.wait(1)  # where it looks before it waits for the first, it is now past its look
        return plan_of(program, packed, *how)

    class Watched(ExecutorPlans):
        def get(self, *key: Any) -> Any:
            if first_makes.is_set():
                second_asked.set()
            return super().get(*key)

    module = llama()
    module.plans = Watched()
    hows = [(torch.float32, (None, None), reads) for reads in ((), ("final",))]

    def bind(how: tuple[Any, ...]) -> None:
        with torch.inference_mode():
            bound(module, "step", slow, how, None, 8)

    threads = [Thread(target=bind, args=(how,)) for how in hows]
    threads[0].start()
    first_makes.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    for how in hows:
        bind(how)
    assert len(made) == 2


# -- the modules run where the program does not say all ---------------------------------------------------------------


def _hooked(module: nn.Transformer) -> None:
    _block(module).attn.out.register_forward_hook(lambda part, inputs, out: out * 0.5)


def _forward_replaced(module: nn.Transformer) -> None:
    mlp = _block(module).mlp
    mlp.forward = lambda *arguments, forward=mlp.forward: forward(*arguments) * 0.5


REFUSED: dict[str, tuple[Callable[[nn.Transformer], object], str]] = {
    "hook": (_hooked, "decoder.blocks.0.attn.out has a hook"),
    "replaced forward": (_forward_replaced, "the forward of decoder.blocks.0.mlp is replaced"),
    "training": (lambda module: _block(module).mlp.train(), "decoder.blocks.0.mlp is in training mode"),
}


def test_steps_that_run_as_modules_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="triptych")
    model = create(LLAMA, seed=3)
    for executor, change, expected in (
        ("auto", None, []),
        ("auto", _hooked, ["steps of generation run as modules: decoder.blocks.0.attn.out has a hook"]),
        ("modules", None, []),
    ):
        caplog.clear()
        model.executor = executor
        if change is not None:
            change(model.module)
        model.generate([[1, 2, 3]], max_new_tokens=5)
        assert [one.getMessage() for one in caplog.records if "generation" in one.getMessage()] == expected


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


def _counted_looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with each look for changes of the module."""
    looks = list[str]()

    def counted(*arguments: Any) -> Any:
        looks.append("look")
        return bound(*arguments)

    monkeypatch.setattr(native_executor, "bound", counted)
    return looks


def test_changes_are_looked_for_in_every_step_or_where_nothing_else_ran_in_one_of_16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, module = _counted_looks(monkeypatch), llama()
    engine = Engine(module, decode=str)
    (row,) = engine.add(Request(prompt=[1, 2, 3], max_new_tokens=200))
    for unchanged, expected in ((False, 32), (True, 2), (False, 32)):
        looks.clear()
        for _ in range(32):
            engine.guard.only_own_code = unchanged
            engine.step()
        assert len(looks) == expected
    for more in ({"rules": [lambda logits, ids: logits]}, {"stop": ["no such text"]}):  # they may change anything
        engine.free([row])
        (row,) = engine.add(Request(prompt=[1, 2, 3], max_new_tokens=20, **more))
        looks.clear()
        for _ in range(8):
            engine.guard.only_own_code = True
            engine.step()
        assert len(looks) == 8
    _hooked(module)  # as another thread would
    engine.free([row])
    engine.add(Request(prompt=[1, 2, 3], max_new_tokens=20))
    for _ in range(16):
        engine.guard.only_own_code = True
        engine.step()
    assert engine.why_modules == "decoder.blocks.0.attn.out has a hook"


@pytest.mark.parametrize("way", ["on_token", "on_progress", "rules", "stream"])
def test_code_that_runs_between_two_steps_may_change_the_model(way: str) -> None:
    """The hook that it adds acts from the next token on, as with modules alone."""

    def written(executor: str, hook: bool) -> list[int]:
        model, calls = create(LLAMA, seed=3), list[object]()
        model.executor = executor

        def called(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 3 and hook:
                _block(model.module).mlp.register_forward_hook(lambda part, inputs, out: out * -20)
            return arguments[0]

        settings: dict[str, Any] = {way: [called] if way == "rules" else called} if way != "stream" else {}
        if way != "stream":
            return model.generate([[1, 2, 3]], max_new_tokens=24, **settings)[0].ids
        scheduler = Scheduler(model.engine())
        row = scheduler.submit(Request(prompt=[1, 2, 3], max_new_tokens=24))
        for _ in pieces(scheduler, row, TextStream(lambda ids: "x" * len(ids)), []):
            called(0)
        return row.new

    assert written("auto", True) == written("modules", True) != written("auto", False)


def test_a_run_without_callbacks_looks_for_changes_in_one_of_16_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = create(LLAMA, seed=3), _counted_looks(monkeypatch)
    assert len(model.generate([[1, 2, 3]], max_new_tokens=33)[0].ids) == 33
    assert len(looks) == 3
    looks.clear()
    model.generate([[1, 2, 3]], max_new_tokens=33, on_token=lambda number, token: None)
    assert len(looks) == 33


def test_a_class_whose_forward_is_replaced_is_lowered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.decoder()
    run = Run(module)
    assert run.gap() <= EXACT
    before = run.both()[1][0]
    forward = GLU.forward
    monkeypatch.setattr(GLU, "forward", lambda self, *arguments: forward(self, *arguments) * 0.5)
    assert run.gap() <= EXACT
    assert not torch.allclose(run.both()[1][0], before)


def test_edited_rows_run_as_modules_and_others_natively() -> None:
    module = llama()
    session = Session(Plan.of(module.spec, [], [zero("blocks.0.mlp.out")]))
    for probe, why in ((session, "an edit is made at blocks.0.mlp.out"), (None, None)):
        engine = Engine(module)
        engine.add(Request(prompt=[1, 2, 3], max_new_tokens=4, probe=probe))
        engine.step()
        assert engine.why_modules == why


def test_gradients_and_modes_of_torch_run_as_modules() -> None:
    module = llama()
    step = NativeStep(module, module.decoder.cache(1))
    assert step.logits([1], Rows((1,)), [0]) is None
    assert step.why_modules == "gradients may be needed"
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert step.logits([1], Rows((1,)), [0]) is None
    assert "autocast" in step.why_modules


@torch.no_grad()
def test_dense_weights_run_up_to_as_many_tokens_as_are_faster() -> None:
    kernels = library()
    fast = MOST_DENSE_FP32 if kernels.wide else MOST_DENSE
    for module, most in ((llama(), fast), (llama().to(torch.bfloat16), MOST_DENSE)):
        for tokens, ran in ((most, True), (most + 1, False)):
            step = NativeStep(module, module.decoder.cache(1))
            assert (step.logits([1] * tokens, Rows((tokens,)), [0]) is not None) == ran, step.why_modules


@torch.inference_mode()
def test_wrong_sizes_never_reach_the_kernels() -> None:
    module = llama()
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
