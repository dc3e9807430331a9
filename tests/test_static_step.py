"""The executor of fixed shapes: the logits of the modules, rows at rest untouched, and nothing compiled twice."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

import parity
import tiny
from native_models import Run, Side, decoders, llama
from triptych import nn
from triptych.attention import Cache, CrossCache, Rows
from triptych.errors import InputError
from triptych.generate import Engine, Executor, Request
from triptych.program import Instruction, lower, static_plan
from triptych.program.not_served import NotServed
from triptych.program.static_executor import Run as StepRun
from triptych.program.static_executor import StaticStep
from triptych.program.static_plan import StaticPlan, _StaticRun, bucket_of, check_static

EXECUTORS: tuple[Executor, Executor] = ("modules", "static")
EXACT = 1e-4  # of log-probabilities, in fp32
ONE, PAUSE = (1, 1, 1), (1, 0, 1)
STEPS = ((7, 1, 3), *(ONE,) * 6, PAUSE, PAUSE, *(ONE,) * 20)  # tokens of three rows, step after step
MODELS: dict[str, Callable[[], nn.Transformer]] = {
    **{name: partial(tiny.decoder, name) for name in tiny.POSITIONS if name != "disentangled"},
    "window": partial(tiny.decoder, mask="window"),
    "alibi and a window": partial(tiny.decoder, "alibi", "window"),
    "no MLP": tiny.attention_only,
    "encoder-decoder": tiny.encoder_decoder,
}


@dataclass
class StaticSide(Side):
    """The modules read prompts and sources; single tokens run in fixed shapes."""

    static: StaticStep | None = None

    def step(self, ids: Sequence[int], rows: Rows, source: tuple[Tensor, Rows] | None) -> Tensor:
        if source is not None or rows.longest > 1:
            return super().step(ids, rows, source)
        logits = self.static.logits(ids, rows, range(len(ids)))
        assert logits is not None, self.static.why_modules
        return logits


@dataclass
class StaticRun(Run):
    """`Run` with fixed shapes in the place of the native step."""

    compiler: Callable[[StepRun], StepRun] | None = None
    page: int | None = None

    def side(self, native: bool) -> Side:
        side = super().side(False)
        static = StaticStep(self.module, side.cache, side.cross, compiler=self.compiler) if native else None
        return StaticSide(side.module, side.cache, side.cross, None, static=static) if native else side


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_the_modules(name: str) -> None:
    assert StaticRun(MODELS[name]()).gap(STEPS) <= EXACT


@pytest.mark.heavy
@pytest.mark.parametrize("name", decoders())
def test_every_family_that_has_fixed_shapes(name: str) -> None:
    module = parity.ours(name).module
    if any(step.op == "experts" for step in lower(module).instructions()):
        with pytest.raises(NotServed, match="experts"):
            check_static(lower(module), module)
    else:
        assert StaticRun(module).gap(STEPS) <= EXACT


def test_a_row_at_rest_and_a_free_slot_stay_as_they_are() -> None:
    side = StaticRun(tiny.decoder(mask="window")).side(True)
    side.step([1, 2, 3, 4, 5], Rows((2, 1, 2), (0, 0, 0), (0, 1, 2)), None)
    before = [x[1].clone() for store in side.cache.stores for x in (store.k, store.v)]
    for past in range(2, 9):
        side.step([6, 7], Rows((1, 1), (past, past), (0, 2)), None)
    assert all(torch.equal(a, b) for a, b in zip(before, _slot(side, 1), strict=True))
    assert side.cache.lengths == [9, 1, 9]


def _slot(side: Side, slot: int) -> list[Tensor]:
    return [x[slot] for store in side.cache.stores for x in (store.k, store.v)]


# -- controls: each of these must move the logits -----------------------------------------------------------------


def _without_use(self: _StaticRun) -> Tensor:
    self.inputs[2] = 1
    return RUN(self)


def _of_position_zero(self: _StaticRun, step: Instruction) -> None:
    self.values[step.out[0]] = self.plan.tables[step.out[0]][0][torch.zeros_like(self.positions)]


RUN = _StaticRun.run


def test_a_rotation_of_other_positions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(static_plan.STATIC, "rotation_cos", _of_position_zero)
    monkeypatch.setitem(static_plan.STATIC, "rotation_sin", _of_position_zero)
    assert StaticRun(tiny.decoder()).gap(STEPS) > 100 * EXACT


def test_writing_to_rows_at_rest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_StaticRun, "run", _without_use)
    with pytest.raises(AssertionError):
        test_a_row_at_rest_and_a_free_slot_stay_as_they_are()


# -- what runs as one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rope", "t5", "learned", "encoder-decoder"])
def test_products_and_rotations_run_as_one(name: str) -> None:
    module = MODELS[name]()
    program, before = lower(module), [p.detach().clone() for p in module.parameters()]
    made = [nn_cache(module) for _ in range(3)]
    plans = [
        StaticPlan(program, module, *cache, joined=joined)
        for cache, joined in zip(made, (False, True, True), strict=True)
    ]
    sizes = [sorted(len(group) for group in plan.groups if len(group) > 1) for plan in plans]
    rotates = [2, 2] if name == "rope" else []
    assert sizes[0] == rotates
    assert len(sizes[1]) == len(rotates) + len(plans[1].matrices) > len(rotates)
    assert all(map(torch.equal, before, module.parameters()))
    for key, (weight, _, _) in plans[1].matrices.items():  # of the first plan to join them: nothing is copied again
        assert plans[2].matrices[key][0].data_ptr() == weight.data_ptr()
    inputs = torch.tensor([[3, 5], [0, 0], [1, 1], [2, 2], [0, 1]])

    def gap() -> float:
        with torch.inference_mode():
            one, other = (plan.run(inputs, 64) for plan in plans[:2])
        return float((one - other).abs().max())

    assert gap() <= EXACT
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)  # reaches the joined matrix, of which it is a part
    assert gap() <= 10 * EXACT
    next(iter(plans[1].matrices.values()))[0].zero_()  # the control
    assert not all(map(torch.equal, before, (p / 1.5 for p in module.parameters())))


def nn_cache(module: nn.Transformer) -> tuple[Cache, CrossCache | None]:
    """A cache of two slots, and one of two sources."""
    if module.encoder is None:
        return module.decoder.cache(2, page=None), None
    cross = module.decoder.cross_cache()
    cross.assign_places(Rows((2, 2), slots=(0, 1)))
    return module.decoder.cache(2, page=None), cross


# -- shapes -----------------------------------------------------------------------------------------------------------


COMPILE = """
import torch
import tiny
from triptych.generate import Engine, Request
from triptych.program.static_executor import StaticStep

graphs = []
def backend(graph, inputs):
    graphs.append(len(inputs))
    return graph.forward
def compiler(run):
    return torch.compile(run, fullgraph=True, dynamic=False, backend=backend)

module = tiny.decoder(mask="window")
texts = []
for executor in ("modules", "compiled"):
    engine = Engine(module, executor=executor)
    if executor == "compiled":
        engine.runner.executor.compiler = compiler
        engine.warm_up(3, 64)
        print(len(graphs))
        torch.compiler.set_stance("fail_on_recompile")
    rows = engine.add(*(Request(prompt=[3, 1 + i], max_new_tokens=20 + 9 * i, number=i) for i in range(3)))
    while engine.rows:
        engine.step()
    texts.append([row.new for row in rows])
print(engine.why_modules)
assert texts[0] == texts[1]
print(len(graphs), engine.runner.executor.captures)
engine.add(*(Request(prompt=[3], max_new_tokens=20, number=i) for i in range(4)))  # a fourth slot: the control
try:
    engine.step()
    engine.step()
except RuntimeError as error:
    print("recompile" in str(error))
"""


@pytest.mark.heavy
def test_nothing_is_compiled_after_the_warm_up() -> None:
    """One graph without a break for the bucket of 64 positions, by a backend that needs no compiler; in a process of
    its own, since the checks of types that tests put around functions cannot be compiled."""
    assert printed_by(COMPILE) == ["1", "None", "1", "1", "True"]


def printed_by(code: str) -> list[str]:
    """The words that a process of its own prints, which has the modules of the tests."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_buckets_are_powers_of_two_up_to_the_capacity() -> None:
    assert [bucket_of(end, 200) for end in (1, 64, 65, 128, 129, 200)] == [64, 64, 128, 128, 200, 200]


# -- the engine -------------------------------------------------------------------------------------------------------


def _written(module: nn.Transformer, executor: Executor) -> tuple[list[list[int]], list[str | None]]:
    engine = Engine(module, executor=executor)
    rows = engine.add(Request(prompt=[3, 1, 4], max_new_tokens=12), Request(prompt=[2], max_new_tokens=12, number=1))
    reasons = []
    while engine.rows:
        engine.step()
        reasons.append(engine.why_modules)
    return [row.new for row in rows], reasons


def test_an_engine_writes_the_same_text() -> None:
    module = tiny.decoder(mask="window")
    texts, reasons = _written(module, "static")
    assert texts == _written(module, "modules")[0]
    assert reasons == ["a row has several new tokens"] + [None] * 11


def test_changed_and_replaced_weights_and_a_hook_are_seen() -> None:
    check_that_changes_are_seen(tiny.decoder(), EXACT)


def check_that_changes_are_seen(module: nn.Transformer, within: float) -> None:
    """The logits of the static step are those of the modules after changes of a weight, and a hook runs the modules."""
    sides = [Engine(module, executor=executor) for executor in EXECUTORS]
    for engine in sides:
        engine.add(Request(prompt=[3], max_new_tokens=30, all_logits=True))

    def gap() -> float:
        one, other = (engine.step()[0].logits for engine in sides)
        return float((one - other).abs().max())

    assert gap() <= within
    module.head.proj.weight.data.mul_(0.5)
    assert gap() <= within
    module.head.proj.weight = torch.nn.Parameter(torch.randn(tiny.V, tiny.D, device=module.device))
    assert gap() <= within
    assert sides[1].why_modules is None
    handle = module.decoder.blocks[0].register_forward_hook(lambda *_: None)
    gap()
    assert str(sides[1].why_modules).endswith("has a hook")
    handle.remove()
    gap()
    assert sides[1].why_modules is None


def test_a_changed_weight_of_a_table_and_replaced_numbers_are_seen() -> None:
    """T5's biases stand in a table by distance, made of a weight."""
    side = StaticRun(tiny.decoder("t5")).side(True)
    with torch.inference_mode():
        first = side.step([5], Rows((1,)), None).clone()
        side.step([6], Rows((1,), (1,)), None)
    assert isinstance(side, StaticSide)
    weight = next(x for name, x in side.module.named_parameters() if "position" in name)
    plans = [side.static.plan]
    for change in (lambda: weight.mul_(-3.0), lambda: setattr(weight, "data", weight.data.clone())):
        with torch.no_grad():
            change()
        side.cache.trim(0, 1)
        with torch.inference_mode():
            side.step([6], Rows((1,), (1,)), None)
        plans.append(side.static.plan)
    assert len(set(map(id, plans))) == 3
    before, after = (plan.tables for plan in plans[:2] if plan is not None)
    assert any(torch.equal(after[name][0], before[name][0] * -3.0) for name in before)
    assert first.isfinite().all()


def test_what_has_no_fixed_shapes_runs_as_modules_with_the_reason() -> None:
    texts, reasons = _written(tiny.mixture(), "static")
    assert texts == _written(tiny.mixture(), "modules")[0]
    assert reasons[1:] == ["experts run on the tokens that chose them, a number that changes"] * 11


def test_warming_up_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="'static' or 'compiled'"):
        Engine(llama()).warm_up(1, 64)
    with pytest.raises(InputError, match="experts"):
        Engine(tiny.mixture(), executor="static").warm_up(1, 64)
    with pytest.raises(InputError, match="first requests"):
        Engine(tiny.encoder_decoder(), executor="static").warm_up(1, 64)
    with pytest.raises(InputError, match="length"):
        Engine(llama(), executor="static").warm_up(1, 0)


def test_a_warm_up_beside_rows_that_run_writes_to_none_of_them() -> None:
    """With no row in a slot the step that fills all slots is prepared too; beside rows it must not run."""
    engine = Engine(tiny.decoder(), executor="static")
    engine.warm_up(2, 128)
    step = engine.runner.executor
    assert isinstance(step, StaticStep)
    assert sorted(step.replays) == [(64, False), (64, True), (128, False), (128, True)]
    engine = Engine(tiny.decoder(), executor="static")
    engine.add(Request(prompt=[3, 1], max_new_tokens=9), Request(prompt=[2, 4], max_new_tokens=9, number=1))
    engine.step()
    before = [x.clone() for store in engine.cache.stores for x in (store.k, store.v)]
    engine.warm_up(2, 64)
    assert all(map(torch.equal, before, (x for store in engine.cache.stores for x in (store.k, store.v))))


def test_a_plan_is_bound_to_the_stores_of_its_cache() -> None:
    module = tiny.decoder()
    plan = StaticPlan(lower(module), module, module.decoder.cache(2, page=None), None)
    inputs = torch.zeros(5, 2, dtype=torch.long)
    assert plan.run(inputs, 64).shape == (2, tiny.V)
    assert not any(store.k.any() for store in plan.cache.stores)


def test_a_cache_of_pages_is_refused() -> None:
    module = tiny.decoder()
    with pytest.raises(InputError, match=r"needs a cache without pages: decoder.cache\(page=None\)"):
        StaticStep(module, module.decoder.cache(1))
