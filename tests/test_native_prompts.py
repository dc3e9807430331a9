"""Prompts of packed models are multiplied in bf16, generated tokens by integers: which of the two depends on the role
of a token alone, so its bits do not depend on batches, chunks, threads, guesses or reuse."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
import triptych
from native_models import ANY, llama, needs_native
from test_engine import alone
from test_native_step import packed, unpacked
from test_prefixes import START, one_after_another
from triptych import native, nn, tasks
from triptych.attention import Rows
from triptych.checkpoints.gguf_blocks import WRITABLE, PackedBlocks, block_format
from triptych.errors import InputError
from triptych.generate import Engine, Request
from triptych.generate.prefixes import Prefixes
from triptych.generate.speculation import PromptLookup, Speculation
from triptych.generate.step_runner import StepRunner
from triptych.native import Matrix
from triptych.native.step import Op
from triptych.program import native_calls, native_executor
from triptych.program.lower import lower
from triptych.program.native_executor import NativeStep, prompts_in_bf16
from triptych.program.native_plan import plan_of
from triptych.program.native_tables import bound
from triptych.quantize import kernel_matrix, packed_weight, repack

LIBRARY = native.library()
HERE = None if LIBRARY is None else LIBRARY.bf16
pytestmark = [needs_native, pytest.mark.skipif(HERE is None, reason="this processor has no products in bf16")]
FORMS = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q6_K")  # of all layouts
WIDE = {"hidden_size": 96, "intermediate_size": 416, "head_dim": 80}  # ranges of columns, heads of no whole tile


@torch.inference_mode()
def logits(
    module: nn.Transformer, pieces: Sequence[int], prompt: int, rows: int = 1, *, bf16: bool = True, scale: int = 7
) -> Tensor:
    """The logits of row 0, whose first `prompt` tokens are of its prompt, run in these pieces beside other rows."""
    cache, out, done = module.decoder.cache(rows), [], 0
    step = NativeStep(module, cache, matrix_of=kernel_matrix, most_dense=ANY, bf16=bf16)
    for length in pieces:
        lengths = [length, *(1 + (done + i) % 3 for i in range(1, rows))]
        ids = [(done + i) * scale % 41 for i in range(length)] + [5] * (sum(lengths) - length)
        of_prompt = [min(max(prompt - done, 0), length), *((done + i) % 2 * n for i, n in enumerate(lengths[1:]))]
        found = step.logits(ids, Rows(tuple(lengths), tuple(cache.lengths)), range(len(ids)), of_prompt)
        assert found is not None, step.why_modules
        out.append(found[:length])
        done += length
    return torch.cat(out)


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "block", "columns"), [(2, 32, 96), (3, 32, 96), (4, 32, 96), (5, 256, 512)])
@pytest.mark.parametrize("rows", [7, 16, 37])
def test_packed_weights_are_unpacked_to_their_rounded_numbers(layout: int, block: int, columns: int, rows: int) -> None:
    """The tiles of every range are the numbers of `unpack_row`, rounded to the nearest, in the order of tiles."""
    functions, draw = LIBRARY.functions, np.random.default_rng(layout)
    size = functions.matrix_bytes(layout, rows, columns)
    data = draw.integers(0, 61, size, np.uint8)  # no exponent of all ones, so no NaN
    w = Matrix(layout, rows, columns, 0, data.ctypes.data)
    dense = np.zeros((-(-rows // 32) * 32, columns), np.float32)
    for row in range(rows):
        functions.unpack_row(w, row, dense[row].ctypes.data)
    for pair in range(len(dense) // 32):
        for first, last in ((0, columns // 32), (1, 3)):
            tiles = np.zeros((last - first, 2, 16, 16, 2), np.uint16)
            functions.unpack_tiles(ctypes.byref(w), pair, first, last, tiles.ctypes.data)
            found = torch.from_numpy(tiles.view(np.int16)).view(torch.bfloat16).permute(1, 3, 0, 2, 4).reshape(32, -1)
            expected = torch.from_numpy(dense[32 * pair : 32 * pair + 32, 32 * first : 32 * last]).bfloat16()
            count = min(32, rows - 32 * pair)
            assert torch.equal(found[:count], expected[:count])
            assert not torch.equal(found[:count], expected[:count].roll(1, 1))


def gap(found: Tensor, expected: Tensor) -> float:
    """The difference of log-probabilities, relative to them."""
    found, expected = found.log_softmax(-1), expected.log_softmax(-1)
    return float((found - expected).norm() / expected.norm())


def drawn(form: str) -> nn.Transformer:
    """A model whose matrices are packed in a form that is not written here, with numbers of about 0.1."""
    module, kind = llama(hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4,
                         num_key_value_heads=2), block_format(form)  # fmt: skip
    numbers = {"Q5_1": {0: 0.012, 2: -0.19}, "Q6_K": {208: 1e-4}}[form]
    random = torch.Generator().manual_seed(0)
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            shape = len(weight), weight.shape[1] // kind.elements, kind.nbytes
            raw = torch.randint(256, shape, dtype=torch.uint8, generator=random)
            for place, number in numbers.items():
                raw[..., place : place + 2] = torch.tensor([number]).half().view(torch.uint8)
            blocks = PackedBlocks(kind, raw.flatten(1))
            part.register_parameter("weight", torch.nn.Parameter(packed_weight(repack(blocks)), requires_grad=False))
    return module


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_every_layout_is_nearer_the_modules_than_integers_are(form: str) -> None:
    module = packed(form) if form in WRITABLE else drawn(form)
    plain = unpacked(module)
    for length in (1, 5, 16, 33, 150):
        ids = [i * 7 % 41 for i in range(length)]
        expected = plain.logits(nn.Batch(inputs=torch.tensor(ids), rows=Rows((length,))))
        gaps = [gap(logits(module, [length], n), expected) for n in (length, 0)]
        assert gaps[0] <= 1e-2
        assert length < 16 or gaps[0] < gaps[1]


def test_attention_to_several_tiles_is_near_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, biases, heads of 20 numbers, more than one range; and a value that a query should not see shows."""
    for make in (lambda: packed(**WIDE), lambda: packed(model_type="mistral", sliding_window=70)):
        module = make()
        expected = logits(unpacked(module), [300], 0)
        found = logits(module, [300], 300)
        assert gap(found, expected) <= 1e-2
    plan_of = native_executor.plan_of

    def blurred(*arguments: Any, **more: Any) -> Any:
        plan = plan_of(*arguments, **more)
        plan.instructions["attend"]["window"][plan.instructions["op"] == Op.ATTEND] = 50
        return plan

    monkeypatch.setattr(native_executor, "plan_of", blurred)
    module = make()
    module.plans.clear()
    assert gap(logits(module, [300], 300), expected) > 2e-2


def test_gates_and_rounding_are_parts_of_products_and_norms() -> None:
    """A gated MLP is one product with two matrices, whose result is written in bf16, as those of norms are."""
    module = packed("Q4_1")
    logits(module, [5], 5)
    plans, blocks = [one.plan for one in module.plans["prompt"].values()], module.decoder.blocks
    assert plans
    for plan in plans:
        steps, layers = plan.instructions, len(blocks)
        products = steps[steps["op"] == Op.LINEAR_BF16]
        products, norms = products["linear_bf16"], steps["norm"][steps["op"] == Op.RMS_NORM]
        gated = products[products["gate"] != -1]
        assert not (steps["op"] == Op.MAP_MULTIPLY).any()
        assert (steps["op"] == Op.ROUND_BF16).sum() == layers + 1  # what attention gives, and what the head reads
        assert len(gated) == gated["rounds"].sum() == (gated["gate"] != gated["weight"]).sum() == layers
        assert norms["rounds"].sum() == 2 * layers


def test_a_gate_that_something_else_reads_is_a_product_of_its_own() -> None:
    module = packed("Q4_1")
    program = lower(module)
    for site, gates in (("blocks.0.mlp.gate", 1), ("blocks.0.mlp.up", 1), ("blocks.0.mlp.out", 2)):
        plan = plan_of(program, frozenset(program.weights), windows=[None, None], bf16=True, reads=[site])
        steps = plan.instructions
        products = steps["linear_bf16"][steps["op"] == Op.LINEAR_BF16]
        assert (products["gate"] != -1).sum() == gates, site


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [0, native_calls.ALONE])
@pytest.mark.parametrize("changes", [{}, WIDE, {"model_type": "mistral", "sliding_window": 9}], ids=str)
def test_a_token_has_the_bits_of_its_role_in_any_step(
    changes: dict[str, Any], alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_calls, "ALONE", alone)
    module, prompt = packed("Q4_1", **changes), 33
    torch.set_num_threads(1)
    expected = logits(module, [33, 7], prompt)
    for pieces, rows, count in (
        ([1] * 40, 1, 1), ([40], 4, 2), ([7, 1, 1, 16, 15], 3, 3), ([32, 1, 7], 2, 2), ([17, 23], 1, 8)
    ):  # fmt: skip
        torch.set_num_threads(count)
        assert torch.equal(logits(module, pieces, prompt, rows), expected), (pieces, rows, count)
    for other in (32, 34, 0):  # the control: each token's role counts, and that of no later one
        found = logits(module, [40], other)
        same = min(other, prompt)
        assert torch.equal(found[:same], expected[:same])
        assert not torch.equal(found[same], expected[same])
    assert torch.equal(logits(module, [40], 0), logits(module, [40], 40, bf16=False))  # integers, as before


@torch.inference_mode()
def test_long_prompts_in_calls_of_any_length_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = packed("Q4_1")
    expected = logits(module, [530], 530)
    monkeypatch.setattr(native_executor, "TOKENS", 96)
    for pieces in ([530], [1, 255, 274], [100, 430]):
        assert torch.equal(logits(module, pieces, 530), expected)


@torch.inference_mode()
def test_a_number_that_a_query_does_not_see_never_reaches_it() -> None:
    """A token whose keys and values are not finite spoils itself and later ones alone."""
    module = packed("Q8_0")
    numbers = unpacked(module).input.tokens.weight.detach().clone()
    found = []
    for number in (0.5, float("inf")):
        numbers[20 * 7 % 41, 3] = number
        module.input.tokens.register_parameter("weight", torch.nn.Parameter(numbers.clone(), requires_grad=False))
        found.append(logits(module, [40], 40))
    assert torch.equal(found[0][:20], found[1][:20])
    assert found[0].isfinite().all()
    assert found[1][20:].isnan().all()


# -- the engine -------------------------------------------------------------------------------------------------------


def test_guesses_chunks_and_beams_change_nothing_that_is_written() -> None:
    module = packed("Q4_1")
    requests = [Request(prompt=(START * 3)[:length], max_new_tokens=12, number=length) for length in (1, 2, 30, 47)]
    expected = [alone(module, request) for request in requests]
    for how in ({"chunk": 1}, {"chunk": 7}, {"budget": 9, "reuse": True}, {"speculation": None}):
        if "speculation" in how:
            how = {"speculation": Speculation(PromptLookup(), 4, adaptive=False)}  # type: ignore[dict-item]
        engine = Engine(module, **how)  # type: ignore[arg-type]
        rows = engine.add(*requests)
        while engine.rows:
            engine.step()
        assert engine.why_modules is None
        assert [row.new for row in rows] == expected, how


def test_only_tokens_of_prompts_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second turn takes over the first prompt, and computes the reply again as a part of its own."""
    module = packed("Q4_0")

    def turns(**how: Any) -> list[Any]:
        engine, found = Engine(module, **how), []
        (first,) = one_after_another(engine, [START])
        (second,) = engine.add(Request(prompt=[*first.ids, 7, 8, 9], max_new_tokens=5, logprobs=0))
        while engine.rows:
            found += [one.logprobs.logprob for one in engine.step() if one.logprobs is not None]
        return [second.reused, found]

    expected = turns()[1]
    assert turns(reuse=True) == [len(START), expected]
    assert turns(reuse=True, matmul="stored") == [len(START) + 4, turns(matmul="stored")[1]]
    reusable_ids = Prefixes._reusable_ids
    monkeypatch.setattr(
        Prefixes, "_reusable_ids", lambda self, row, upto=None: row.ids[: row.cached if upto is None else upto]
    )
    reused, broken = turns(reuse=True)
    assert reused == len(START) + 4
    assert broken != expected
    monkeypatch.setattr(Prefixes, "_reusable_ids", reusable_ids)


def test_logits_that_nobody_asked_for_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    run = native_calls.Calls.run

    def noted(
        self: Any, binding: Any, matrices: Any, plan: Any, labels: Any, chosen: Any, *rest: Any, **how: Any
    ) -> None:
        counts.append(len(chosen))
        run(self, binding, matrices, plan, labels, chosen, *rest, **how)

    monkeypatch.setattr(native_calls.Calls, "run", noted)
    engine = Engine(packed("Q4_0"), chunk=11)
    engine.add(Request(prompt=START, max_new_tokens=1))
    while engine.rows:
        engine.step()
    assert counts == [0, 1]


# -- settings ---------------------------------------------------------------------------------------------------------


def test_what_prompts_are_multiplied_in(monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    library: Any = native.library()
    small, dense = packed("Q8_0"), llama()
    for isa, expected in (("amx-bf16", True), (None, False)):
        monkeypatch.setattr(library, "bf16", isa)
        assert prompts_in_bf16(small, "auto") == expected
        assert not prompts_in_bf16(dense, "auto")
        assert not prompts_in_bf16(small, "stored")
        assert bool(tasks.note_on_prompts(small, "auto")) == expected
    with pytest.raises(InputError, match="matmul='bf16' needs AMX"):
        Engine(small, matmul="bf16")
    monkeypatch.setattr(library, "bf16", "amx-bf16")
    assert "prompts are multiplied with packed weights in bf16 (amx-bf16)" in (
        tasks.note_on_prompts(small, "auto") or ""
    )
    assert Engine(small).runner.prompts_use_bf16
    assert not Engine(small, executor="modules").runner.prompts_use_bf16
    with pytest.raises(InputError, match="matmul='bf16' is for packed weights"):
        Engine(dense, matmul="bf16")
    with pytest.raises(InputError, match=r"matmul='bf16' needs the native executor"):
        Engine(small, matmul="bf16", executor="modules")
    for wrong in ("fp8", None, 3):
        with pytest.raises(InputError, match="matmul must be one of"):
            Engine(small, matmul=wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="matmul must be one of"):
            triptych.model.Model(small).generate([[1, 2]], matmul=wrong)  # type: ignore[arg-type]


@torch.inference_mode()
def test_a_mixture_and_an_encoder_decoder_have_prompts_too() -> None:
    """Weights that are not packed are multiplied as they are stored."""
    for make in (tiny.mixture, tiny.encoder_decoder):
        assert not StepRunner(make(), 9, "auto").prompts_use_bf16
    module = packed("Q8_0", model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    expected = logits(module, [30, 4], 30)
    plan = bound(module, "prompt", plan_of, (torch.float32, (None, None), (), True), kernel_matrix, 1).plan
    assert Op.TAKE in plan.instructions["op"].tolist()
    assert Op.LINEAR_BF16 in plan.instructions["op"].tolist()
    assert torch.equal(logits(module, [3, 9, 20, 2], 30, rows=3), expected)
