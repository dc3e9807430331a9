"""The native step: equal to the modules for every family, the same bits however a row is run, and the modules wherever
a model does more than its program says."""

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import native_models
import parity
import tiny
from native_models import ANY, EXACT, Run, llama, needs_native, packed
from triptych import nn
from triptych.attention import Rows
from triptych.errors import InputError
from triptych.generate import Engine, Request, Sampling
from triptych.native import library
from triptych.native.loader import LEVELS
from triptych.native.step import MEMBER, Op
from triptych.nn.packed_weight import PackedWeight
from triptych.program import lower, native_calls, native_executor
from triptych.program.module_changes import ModuleGuard
from triptych.program.native_executor import NativeStep
from triptych.program.native_plan import NativePlan, plan_of
from triptych.program.not_served import NotServed
from triptych.quantize import kernel_matrix

pytestmark = needs_native


# -- equal to the modules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", native_models.decoders())
def test_every_family_that_generates_gives_what_its_modules_give(name: str) -> None:
    assert Run(parity.ours(name).module).gap() <= EXACT


@pytest.mark.parametrize("name", native_models.seq2seq())
@torch.inference_mode()
def test_the_keys_of_sources_are_those_of_the_modules(name: str) -> None:
    """Each layer's keys and values of sources that are read natively, beside the largest number of them."""
    run = Run(parity.ours(name).module, native_sources=True)
    sides, source = (run.side(False), run.side(True)), run._source()
    for side in sides:
        side.step([1, 1, 1], Rows((1, 1, 1)), source)
    for one, other in zip(*(side.cross.stores for side in sides), strict=True):
        for a, b in ((one.k, other.k), (one.v, other.v)):
            assert float((a - b).abs().max() / a.abs().max()) <= EXACT


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
    with pytest.raises(NotServed, match=LACKING[name][1]):
        plan_of(lower(module), windows=[None, None])
    engine = Engine(module)
    engine.add(Request(prompt=[1, 2], max_new_tokens=2))
    engine.step()
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
    """With the inputs of every packed product rounded as the kernels round them, the modules give the same for most
    tokens; rounded to another code, for none.

    A token's inputs have about 900 codes of at most 127.  The modules' fp32 sums of 64 to 96 terms are off by about
    4e-7 of the largest number, so that a number lies within 127 * 4e-7 of the edge between two codes on either side
    with a chance of 1e-4, and goes to the other code in a tenth of the tokens.  Later tokens of the row see these: how
    many are not the same depends on how the processor's products round.
    """
    module = packed(name)
    modules, native = Run(module).both()
    exact = torch.cat(_by_modules(unpacked(module)))
    assert share_alike(native, exact, with_rounded_inputs(unpacked(module))) >= 0.75
    assert share_alike(native, exact, with_rounded_inputs(unpacked(module), most=126)) <= 0.1
    for other in (exact, torch.cat(modules)):
        assert torch.cat(native).sub(other).norm() / other.norm() <= 1e-2


def share_alike(native: list[Tensor], exact: Tensor, rounded: nn.Transformer) -> float:
    """The share of tokens that differ from those of a model by less than a tenth of what its rounding takes from
    them."""
    ours, expected = torch.cat(native), torch.cat(_by_modules(rounded))
    lost = (expected - exact).abs().amax(-1)
    return float(((ours - expected).abs().amax(-1) < 0.1 * lost).float().mean())


def unpacked(module: nn.Transformer) -> nn.Transformer:
    """The same model with the numbers of its packed weights as plain parameters."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, PackedWeight):
            part.register_parameter("weight", torch.nn.Parameter(weight.dense(), requires_grad=False))
    return twin


def with_rounded_inputs(module: nn.Transformer, most: int = 127) -> nn.Transformer:
    def rounded(part: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        groups = inputs[0].unflatten(-1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / most
        return ((torch.round(groups / scale.clamp(min=1e-30)) * scale).flatten(-2),)

    for part in module.modules():
        if type(part).__name__ == "Linear":
            part.register_forward_pre_hook(rounded)
    return module


def _by_modules(module: nn.Transformer) -> list[Tensor]:
    return Run(module).both(native=False)[0]


# -- the same bits ----------------------------------------------------------------------------------------------------


def bits(module: nn.Transformer, pieces: list[int], rows: int, threads: int) -> Tensor:
    """The logits of row 0, its tokens run in these pieces beside other rows."""
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


@pytest.mark.parametrize("alone", [0, native_calls.ALONE])  # at 0 the threads share the work of every level
@pytest.mark.parametrize("made", [
    lambda: llama(), lambda: llama(model_type="mistral", sliding_window=9), packed,
    lambda: tiny.mixture(), lambda: tiny.decoder("t5"),
], ids=["dense", "window", "packed", "mixture", "bias"])  # fmt: skip
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_number_of_threads(
    made: Callable[[], nn.Transformer], alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_calls, "ALONE", alone)
    module = made()
    expected = bits(module, [30], rows=1, threads=1)
    for pieces, rows, count in (([1] * 30, 1, 1), ([30], 4, 2), ([7, 1, 1, 16, 5], 3, 3), ([13, 17], 2, 8)):
        assert torch.equal(bits(module, pieces, rows, count), expected), (pieces, rows, count)


@pytest.fixture(params=LEVELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native = library()
    if native.use(request.param) != request.param:
        pytest.skip(f"this processor lacks {request.param}")
    yield request.param
    native.use(LEVELS[-1])


@pytest.mark.parametrize("changes", [{"head_dim": 20}, {"model_type": "mistral", "sliding_window": 70}], ids=str)
def test_attention_to_several_tiles_of_keys_is_exact_and_has_the_same_bits(changes: dict[str, Any], isa: str) -> None:
    """Rows that end inside a tile and beyond it, new and held keys in one tile, heads whose width fills no register."""
    module = llama(**changes)
    assert Run(module).gap(((150, 3, 90), (1, 1, 1), (2, 75, 1))) <= EXACT
    expected = bits(module, [150], rows=1, threads=torch.get_num_threads())
    for pieces in ([149, 1], [60, 1, 1, 70, 18], [3] * 50):
        assert torch.equal(bits(module, pieces, rows=2, threads=torch.get_num_threads()), expected), pieces


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
    module = llama()
    torch.set_num_threads(2)
    expected, square = _natively(module), torch.ones(700, 700)
    product = square @ square  # by threads of torch
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for threads it does not have
        same = torch.equal(_natively(module), _natively(module)) and torch.equal(square @ square, product)
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(_natively(module), expected)


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
        plan.instructions[MEMBER[op]][name][plan.instructions["op"] == op] = value
        return plan

    return broken


BROKEN = {
    "two instructions swapped": _swapped, "a rotation left out": _without(Op.ROTATE),
    "keys not kept": _without(Op.EXTEND), "the other pairing": _changed(Op.ROTATE, "pairing", 1),
    "another scale": _changed(Op.ATTEND, "scale", 0.3), "another eps": _changed(Op.RMS_NORM, "eps", 0.1),
    "no activation": _changed(Op.MAP_MULTIPLY, "function", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = native_executor.plan_of
    monkeypatch.setattr(native_executor, "plan_of", lambda *arguments, **named: BROKEN[name](made(*arguments, **named)))
    assert Run(llama()).gap() > 10 * EXACT


# -- the likeliest token ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 15, 255, 256, 257, 5000])
def test_the_largest_number_is_the_first_of_its_size_or_the_first_nan(n: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(n).integers(-9, 9, (40, n)).astype(np.float32))
    rows[1], rows[2], rows[3, n // 2], rows[4, -1] = 0.0, -torch.inf, torch.nan, torch.inf
    rows[5, n // 3 :], rows[6, 0], rows[7, -1] = torch.nan, torch.nan, 99.0
    found = native_calls.largest_of(rows)
    assert found[0] == rows.numpy().argmax(-1).tolist()
    assert np.array_equal(found[1], rows[range(40), found[0]], equal_nan=True)
    assert native_calls.largest_of(rows.double()) is native_calls.largest_of(rows.T) is None or n == 1


@torch.inference_mode()
def test_a_step_of_one_token_per_row_has_the_bits_of_any_other_step() -> None:
    module = packed()
    guard = ModuleGuard()
    side = NativeStep(module, module.decoder.cache(), matrix_of=kernel_matrix, guard=guard)
    twin = NativeStep(module, module.decoder.cache(), matrix_of=kernel_matrix)
    for step in (side, twin):
        step.cache.add(2)
        assert step.logits([3, 4, 5, 6], Rows((3, 1)), [2, 3]) is not None
    for i in range(70):  # beyond the places that the cache has at first
        rows = Rows((1, 1), (3 + i, 1 + i))
        logits, others = (step.logits([7, i % 40], rows, [0, 1], keep=step is twin) for step in (side, twin))
        assert torch.equal(logits, others)
    assert side.logits([7, 41], Rows((1, 1), (73, 71)), [0, 1]) is None  # no such id
    assert side.why_modules is not None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_greedy_rows_whose_logits_are_not_finite_end_with_an_error(bad: float) -> None:
    module = llama()
    engine = Engine(module)
    engine.add(Request(prompt=[3, 4, 5], max_new_tokens=9))
    engine.step()
    engine.step()
    module.decoder.final_norm.weight.detach()[0] = bad
    with pytest.raises(InputError, match="not finite"):
        engine.step()
    assert not engine.rows
