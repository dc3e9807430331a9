"""Caches of fp32, fp16, bf16 and int8: what they keep, in how many bytes, and that all readers of one read the same."""

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
import tiny
import triptych
from cli_models import Captured, checkpoint, said
from native_models import ANY, LLAMA, Run, decoders, llama, needs_native
from test_native_levels import TABLE
from triptych import nn
from triptych.attention import Cache, CachedLayer, CacheType, Rows, StoredForm, stored_form
from triptych.attention.cache_steps import FullStep, RingStep
from triptych.check import check
from triptych.check.quality import TEXT, quality
from triptych.cli import main
from triptych.count import count
from triptych.errors import InputError
from triptych.generate import Engine, Request, Scheduler
from triptych.measure import bench
from triptych.model import Model, create, load
from triptych.native import library
from triptych.native.step import StoredType
from triptych.program import native_calls
from triptych.program.native_executor import NativeStep

TYPES: list[CacheType] = ["fp32", "fp16", "bf16", "int8"]
LOSSY: list[CacheType] = ["fp16", "bf16", "int8"]
#: Of log-probabilities, between executors and between pieces: a number that is rounded the other way, because what came
#: before it differs in its last bits, moves by a step of its type.
LIMITS: dict[CacheType, float] = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 2e-2, "int8": 2e-2}
PROMPT = [5 + i * 7 % 30 for i in range(40)]
FEW = PROMPT[:24]  # tokens that the native step runs at once with dense weights, whatever the instructions


def close(a: Tensor, b: Tensor, cache_type: CacheType) -> bool:
    return float((a.float().log_softmax(-1) - b.float().log_softmax(-1)).abs().max()) <= LIMITS[cache_type]


# ---------------------------------------------------------------- numbers


def test_a_code_is_the_number_over_the_scale_of_its_group() -> None:
    x = torch.randn(3, 45, generator=torch.Generator().manual_seed(0))
    form = stored_form("int8", torch.float32)
    kept = form.encode(x)
    assert kept.dtype == torch.int8
    assert kept.shape == (3, 45 + 2 * 2) == (3, form.length(45))
    for row, stored in zip(x, kept, strict=True):
        for group, first in enumerate((0, 32)):
            own = row[first : first + 32]
            scale = (own.abs().max() / 127).to(torch.bfloat16)
            bytes_of = stored[45 + 2 * group : 47 + 2 * group].clone()
            assert bytes_of.view(torch.bfloat16)[0] == scale
            assert stored[first : first + 32][: len(own)].tolist() == (own / scale.float()).round().tolist()
    back = form.decode(kept, 45)
    steps = (x.abs().amax() / 127 * 1.01).item()
    assert (back - x).abs().max() <= steps / 2 * 1.01
    assert torch.equal(form.encode(back), kept)  # what was read is kept as it was
    assert not form.decode(torch.zeros_like(kept), 45).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_is_not_lost(bad: float) -> None:
    x = torch.ones(64)
    x[40] = bad
    for cache_type in TYPES:
        form = stored_form(cache_type, torch.float32)
        back = form.decode(form.encode(x), 64)
        assert back[:32].isfinite().all()
        assert not back[32:].isfinite().all()


def rows_of_c() -> tuple[Callable[[int, Tensor], Tensor], Callable[[int, Tensor, int, int], Tensor]]:
    native = library()
    table = ctypes.c_void_p.in_dll(native.functions, "kernels_in_use").value
    kernels = (ctypes.c_void_p * len(TABLE)).from_address(table + 8)  # behind two integers
    int32, address = ctypes.c_int32, ctypes.c_void_p
    keep = ctypes.CFUNCTYPE(None, int32, address, address, int32)(kernels[TABLE.index("keep")])
    read = ctypes.CFUNCTYPE(None, int32, address, address, int32, int32)(kernels[TABLE.index("read")])
    size = native.functions.stored_bytes
    size.argtypes, size.restype = [ctypes.c_int32, ctypes.c_int32], ctypes.c_int64

    def kept(kind: int, x: Tensor) -> Tensor:
        out = torch.zeros(size(kind, len(x)), dtype=torch.uint8)
        keep(kind, out.data_ptr(), x.data_ptr(), len(x))
        return out

    def back(kind: int, stored: Tensor, rows: int, width: int) -> Tensor:
        out = torch.empty(rows, width)
        read(kind, out.data_ptr(), stored.data_ptr(), rows, width)
        return out

    return kept, back


@needs_native
@pytest.mark.parametrize("cache_type", TYPES)
def test_native_rows_have_the_bytes_of_torch(cache_type: CacheType) -> None:
    """Ragged widths, zeros, numbers below the normal ones, halfway cases."""
    kept, back = rows_of_c()
    form = stored_form(cache_type, torch.float32)
    kind = native_calls.stored_type(form.dtype)
    draw = torch.Generator().manual_seed(0)
    for width in (1, 7, 31, 32, 33, 64, 100):
        for scale in (0.0, 1e-41, 1e-7, 3e-5, 1.0, 3e4):
            x = torch.randn(width, generator=draw) * scale
            stored = form.encode(x).contiguous()
            assert torch.equal(kept(kind, x), stored.view(torch.uint8)), (width, scale)
            many = torch.stack([stored, form.encode(x.flip(0))]).contiguous()
            assert torch.equal(back(kind, many, 2, width), form.decode(many, width)), (width, scale)


@needs_native
def test_every_number_of_16_bits_is_read_as_torch_reads_it() -> None:
    kept, back = rows_of_c()
    for kind, dtype in ((StoredType.F16, torch.float16), (StoredType.BF16, torch.bfloat16)):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        expected = every.float()
        assert torch.equal(back(kind, every, 1, len(every))[0].nan_to_num(7.5), expected.nan_to_num(7.5))
        middle = torch.cat([expected[:-1], (expected[:-1] + expected[1:]) / 2, expected[1:] * 1.0001])
        rounded = kept(kind, middle).view(dtype)
        assert torch.equal(rounded.float().nan_to_num(7.5), middle.to(dtype).float().nan_to_num(7.5))


# ---------------------------------------------------------------- bytes and names


def test_bytes_per_token() -> None:
    module = llama()
    expected = {"fp32": 2 * 3 * 2 * 32 * 4, "fp16": 2 * 3 * 2 * 32 * 2, "bf16": 2 * 3 * 2 * 32 * 2}
    expected["int8"] = 2 * 3 * 2 * (32 + 2)
    for cache_type, nbytes in expected.items():
        cache = Engine(module, cache_type=cache_type).cache
        assert cache.slot_bytes(1) == cache.slot_bytes(64) == 64 * nbytes == cache.slot_bytes(65) // 2
        cache.add(3)
        cache.begin(Rows((1, 64, 65)), "").finish()
        assert cache.nbytes == 4 * 64 * nbytes
    assert expected["int8"] * 10 == count(module.spec).cache_bytes(10, dtype="q8_0")
    ragged = Cache([CachedLayer(groups=3, width=45, value_width=10, window=5)], cache_type="int8")
    assert ragged.slot_bytes(100) == 5 * 3 * (45 + 4 + 10 + 2)


def test_a_request_is_refused_by_the_bytes_of_its_cache() -> None:
    request = Request(prompt=PROMPT, max_new_tokens=24)
    limit = 64 * 2 * 3 * 2 * (32 + 2)
    Scheduler(Engine(llama(), cache_type="int8"), cache_bytes=limit).submit(request)
    for cache_type, least in (("int8", limit), ("fp16", 64 * 768)):
        with pytest.raises(InputError, match=f"would take {least:,} bytes"):
            Scheduler(Engine(llama(), cache_type=cache_type), cache_bytes=least - 1).submit(request)


@pytest.mark.parametrize("wrong", ["int4", "INT8", "", None, 8, ["int8"], torch.int8])
def test_a_wrong_type_is_refused_with_the_choices(wrong: Any, unchecked: None) -> None:
    model = create(LLAMA)
    calls: list[Callable[[], object]] = [
        lambda: model.generate([PROMPT], max_new_tokens=1, cache=wrong),
        lambda: model.generate([PROMPT], max_new_tokens=1, beams=2, cache=wrong),
        lambda: model.engine(cache=wrong),
        lambda: Engine(model.module, cache_type=wrong),
        lambda: bench("nowhere", cache=wrong),
        lambda: check(model, against="none", cache=[wrong]),
        lambda: quality({"fp32": model}, caches=[wrong]),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"^cache must be one of \['auto', 'fp32', 'fp16', 'bf16', 'int8'\], not "):
            call()


def test_what_does_not_go_together_is_said(unchecked: None) -> None:
    model = load(checkpoint("decoder"))
    engine = model.engine(cache="int8")
    with pytest.raises(InputError, match=r"cache is a setting of the engine; give it to Model\.engine"):
        model.stream("A", engine=engine, cache="int8")
    with pytest.raises(InputError, match=r"cache='int8' must be a list of types"):
        check(model, against="none", cache="int8")
    assert main(["generate", str(checkpoint("decoder")), "A", "--cache", "int4"]) == 2


# ---------------------------------------------------------------- executors, pieces, rows

MODELS: dict[str, Callable[[], nn.Transformer]] = {
    "grouped": llama, "odd width": lambda: llama(head_dim=20, num_key_value_heads=1),
    "ring": lambda: llama(model_type="mistral", sliding_window=6), "bias": lambda: tiny.decoder("t5", "window"),
    "mixture": tiny.mixture, "encoder-decoder": tiny.encoder_decoder,
}  # fmt: skip


@needs_native
@pytest.mark.parametrize("cache_type", LOSSY)
@pytest.mark.parametrize("name", MODELS)
def test_natively_as_by_the_modules(name: str, cache_type: CacheType) -> None:
    """The sources of an encoder-decoder are read natively too."""
    run = Run(MODELS[name](), cache_type=cache_type, native_sources=True)
    assert run.gap() <= LIMITS[cache_type]


@needs_native
@pytest.mark.heavy
@pytest.mark.parametrize("cache_type", LOSSY)
@pytest.mark.parametrize("name", decoders())
def test_every_family_natively_as_by_the_modules(name: str, cache_type: CacheType) -> None:
    module = parity.ours(name).module
    run = Run(module, cache_type=cache_type)
    if run.side(True).native.logits([1], Rows((1,)), [0]) is None and module.encoder is None:
        pytest.skip("runs as modules")
    assert run.gap() <= 5 * LIMITS[cache_type]


@needs_native
def test_another_rounding_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: modules whose codes are rounded down."""
    encode = StoredForm.encode
    monkeypatch.setattr(StoredForm, "encode", lambda self, x: encode(self, x - 0.5 * x.abs().max() / 127))
    assert Run(llama(), cache_type="int8").gap() > LIMITS["int8"]


@torch.inference_mode()
def in_pieces(module: nn.Transformer, pieces: list[int], cache_type: CacheType) -> Tensor:
    """The logits of the prompt, by the modules."""
    cache, done, out = module.decoder.cache(1, cache_type), 0, []
    for length in pieces:
        ids = torch.tensor(PROMPT[done : done + length])
        out.append(module.logits(nn.Batch(inputs=ids, rows=Rows((length,), (done,)), cache=cache)))
        done += length
    return torch.cat(out)


@pytest.mark.parametrize("cache_type", LOSSY)
@pytest.mark.parametrize("name", ["grouped", "ring"])
def test_a_prompt_in_pieces_is_the_prompt_at_once(name: str, cache_type: CacheType) -> None:
    module = MODELS[name]()
    whole = in_pieces(module, [40], cache_type)
    assert close(in_pieces(module, [13, 1, 1, 20, 5], cache_type), whole, cache_type)
    exact = in_pieces(module, [40], "auto")
    assert not torch.equal(whole, exact)
    assert torch.equal(in_pieces(module, [40], "fp32"), exact)


@pytest.mark.parametrize("step", [FullStep, RingStep])
def test_a_first_piece_that_reads_what_it_did_not_keep_is_seen(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = step.extend

    def unrounded(self: Any, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept = extend(self, layer, k, v)
        return (k, v) if self.fresh else kept

    monkeypatch.setattr(step, "extend", unrounded)
    module = MODELS["ring" if step is RingStep else "grouped"]()
    assert not close(in_pieces(module, [13, 27], "int8"), in_pieces(module, [40], "int8"), "int8")


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("cache_type", LOSSY)
def test_a_row_has_the_same_bits_beside_others(cache_type: CacheType) -> None:
    module = MODELS["ring"]()
    steps = [NativeStep(module, module.decoder.cache(rows, cache_type), most_dense=ANY) for rows in (3, 1)]
    together = steps[0].logits([*PROMPT[:9], *PROMPT[:20], 7], Rows((9, 20, 1)), range(30))
    alone = steps[1].logits(PROMPT[:20], Rows((20,)), range(20))
    assert torch.equal(together[9:29], alone)
    more = steps[0].logits([3, 4, 4], Rows((2, 1), (9, 20), (0, 1)), [2])
    after = steps[1].logits([4], Rows((1,), (20,)), [0])
    assert torch.equal(more, after)


@torch.inference_mode()
@pytest.mark.parametrize("executor", [pytest.param("auto", marks=needs_native), "modules", "static"])
def test_rows_that_are_copied_go_on_alike(executor: Any) -> None:
    """As beams are: forked, then another id each; slots are moved, not read."""
    module = llama()
    one, other = (Engine(module, executor=executor, cache_type="int8") for _ in range(2))
    one.add(Request(prompt=PROMPT, max_new_tokens=0))
    one.logits()
    rows = one.reorder([one.rows[0]] * 2)
    for row, token in zip(rows, (7, 9), strict=True):
        row.ids.append(token)
    found = one.logits()
    other.add(*(Request(prompt=PROMPT, max_new_tokens=0, number=i) for i in range(2)))
    other.logits()
    for row, token in zip(other.rows, (7, 9), strict=True):
        row.ids.append(token)
    expected = other.logits()
    assert close(found, expected, "int8")
    if executor == "auto":
        assert one.why_modules is None
        assert torch.equal(found, expected)


def test_a_step_of_fixed_shapes_reads_every_type() -> None:
    module = llama()
    for cache_type in TYPES:
        scores = []
        for executor in ("static", "modules"):
            engine = Engine(module, executor=executor, cache_type=cache_type)
            engine.add(*(Request(prompt=PROMPT[:n], max_new_tokens=0, number=n) for n in (5, 9)))
            engine.logits()
            for row in engine.rows:
                row.ids.append(3)
            scores.append(engine.logits())
            assert (engine.why_modules is None) == (executor == "static")
        assert close(*scores, cache_type)


@needs_native
@pytest.mark.parametrize("cache_type", LOSSY)
def test_guesses_change_nothing(cache_type: CacheType) -> None:
    model = create(LLAMA)
    prompts = [PROMPT[:6] * 4, PROMPT[:9]]
    plain = model.generate(prompts, max_new_tokens=30, cache=cache_type)
    guessed = model.generate(prompts, max_new_tokens=30, cache=cache_type, draft="ngram", chunk=5)
    assert sum(one.drafted for one in guessed) > 0
    assert [one.ids for one in guessed] == [one.ids for one in plain]
    beams = model.generate(prompts, max_new_tokens=8, cache=cache_type, beams=3)
    assert [one.ids for one in beams] == [
        model.generate([prompt], max_new_tokens=8, cache=cache_type, beams=3)[0].ids for prompt in prompts
    ]


@needs_native
def test_what_is_reused_was_kept_in_the_same_type() -> None:
    module, ids = llama(), {}
    for cache_type in ("fp32", "int8"):
        engine = Engine(module, reuse=True, cache_type=cache_type)
        for i in range(2):
            engine.add(Request(prompt=[*FEW, i], max_new_tokens=0, number=i))
            ids[cache_type] = engine.logits()
            row = engine.rows[0]
            assert row.reused == (len(FEW) if i else 0)
            engine.free([row])
        fresh = Engine(module, cache_type=cache_type)
        fresh.add(Request(prompt=[*FEW, 1], max_new_tokens=0))
        assert torch.equal(ids[cache_type], fresh.logits())
    assert not torch.equal(ids["fp32"], ids["int8"])


@pytest.mark.heavy
def test_a_row_beyond_the_switch_of_longrope_is_read_again() -> None:
    """Its whole cache is written anew with other factors."""
    module = parity.ours("llama-longrope").module
    found = [Engine(module, cache_type="int8", executor=executor) for executor in ("auto", "modules")]
    for engine in found:
        engine.add(Request(prompt=[3, 4, 5], max_new_tokens=0))
        engine.logits()
    assert found[0].runner.switch < 30
    for token in range(3, 3 + found[0].runner.switch):
        for engine in found:
            engine.rows[0].ids.append(token)
    assert close(found[0].logits(), found[1].logits(), "int8")


@needs_native
def test_caches_of_two_types_share_no_plan_and_lose_none() -> None:
    """Steps in turn lower the model once for each type; a changed part ends both plans."""
    module = llama()
    engines = [Engine(module, cache_type=cache_type) for cache_type in ("fp32", "int8")]
    plans = []
    for _ in range(3):
        for engine in engines:
            engine.add(Request(prompt=FEW, max_new_tokens=0))
            engine.logits()
            assert engine.why_modules is None
            plans.append(engine.runner.executor.binding.plan)
    assert plans[:2] * 2 == plans[2:]
    assert plans[0] is not plans[1]
    down = module.decoder.blocks[0].mlp.down
    down.weight = torch.nn.Parameter(down.weight * 2)
    engines[0].add(Request(prompt=FEW, max_new_tokens=0))
    engines[0].logits()
    assert len(module.plans["step"]) == 1


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("executor", ["auto", "modules"])
def test_a_trace_has_the_numbers_that_the_cache_gives(executor: Any) -> None:
    model = create(LLAMA)
    model.executor = executor
    sites = ["blocks.1.attn.k_ctx", "blocks.1.attn.v_ctx"]
    form = stored_form("int8", torch.float32)
    for cache in ("int8", "fp32"):
        trace = model.generate([PROMPT], max_new_tokens=3, cache=cache, read=sites)[0].trace
        for site in sites:
            x = trace[site]
            x = x if isinstance(x, Tensor) else torch.cat([one.flatten(0, -2) for one in x])
            assert torch.equal(form.decode(form.encode(x), x.shape[-1]), x) == (cache == "int8")


@needs_native
def test_a_damaged_store_is_refused_before_it_is_read() -> None:
    for damage in (lambda x: x[:, :, :, :-1].contiguous(), lambda x: x[:, :, :-1].contiguous(), lambda x: x.float()):
        engine = Engine(llama(), cache_type="int8")
        engine.add(Request(prompt=FEW, max_new_tokens=2))
        engine.step()
        ((k, v),) = engine.cache.stores[1].chunks
        engine.cache.stores[1].chunks = [(k, damage(v))]
        assert engine.why_modules is None
        with pytest.raises(InputError, match=r"the cache of layer 1 holds .* begin with an empty cache"):
            engine.step()


# ---------------------------------------------------------------- check and the command line


def test_the_quality_of_a_cache_is_measured_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = load(checkpoint("decoder")), TEXT[:300]
    for model.executor in ("auto", "modules"):
        plain, exact, kept = quality({"fp32": model}, text, ["auto", "int8"])
        assert [plain.form, exact.form, kept.form] == ["fp32", "cache auto", "cache int8"]
        assert plain.tokens == exact.tokens == kept.tokens
        assert abs(exact.kl or 0.0) < 1e-7 < (kept.kl or 0.0) < 1e-2
        assert abs(exact.perplexity - plain.perplexity) < 1e-3
    encode = StoredForm.encode  # the control: codes without their last six bits
    monkeypatch.setattr(StoredForm, "encode", lambda self, x: encode(self, x) if self.exact else encode(self, x) & -64)
    assert (quality({"fp32": model}, text, ["int8"])[1].kl or 0.0) > 10 * (kept.kl or 0.0)


@pytest.mark.heavy
def test_check_takes_types_of_the_cache(capsys: Captured) -> None:
    command = ["check", str(checkpoint("decoder")), "--against", "none", "--cache", "int8", "--cache", "bf16", "--json"]
    found = json.loads(said(command, capsys)[0])["quality"]
    assert [one["form"] for one in found] == ["fp32", "cache auto", "cache int8", "cache bf16"]


@pytest.mark.heavy
def test_commands_that_generate_take_a_type(capsys: Captured) -> None:
    for layout in ("decoder", "encoder-decoder"):
        command = ["generate", str(checkpoint(layout)), "A text.", "--max-new-tokens", "4", "--json"]
        for cache in TYPES:
            assert json.loads(said([*command, "--cache", cache], capsys)[0])["tokens"] >= 1


def test_sources_are_kept_in_the_same_type() -> None:
    model = Model(tiny.encoder_decoder())
    engine = model.engine(cache="int8")
    assert {store.k.dtype for store in engine.cross.stores} == {torch.int8}
    assert triptych.create(LLAMA).engine().cache.stores[0].form.dtype == torch.float32
