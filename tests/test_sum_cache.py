"""The cache of causal linear attention, two sums of constant size: what is computed with it is what is computed without
one, and what cannot be taken from a sum is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from test_engine import alone
from test_forward import ROWS, cached, logits, same
from test_speculation import Oracle
from triptych import nn
from triptych.attention import DOT_PRODUCT, LINEAR, CacheType, Heads, Rows
from triptych.attention.cache_steps import SumPlan, SumStep
from triptych.attention.layer_cache import Store
from triptych.count import count
from triptych.errors import InputError, ProbeError
from triptych.generate import DraftModel, Engine, PromptLookup, Request, Speculation
from triptych.generate.beam import beam_search
from triptych.model import Model
from triptych.spec import (
    BlockSpec,
    EmbedSpec,
    KindSpec,
    LinearKernelSpec,
    LinearSpec,
    LMHeadSpec,
    ModelSpec,
    NormsSpec,
    RMSNormSpec,
    RopeSpec,
    StackSpec,
    attention,
    causal,
    window,
)

D, H, G, K, KV, V = 20, 6, 2, 8, 5, 41


def mixed(linear: tuple[int, ...] = (0, 2), *, blocks: int = 4, seed: int = 0) -> nn.Transformer:
    """Layers of linear attention beside one that keeps every token and one with a window; values narrower than keys."""
    norms = NormsSpec(pre=RMSNormSpec(width=D))
    kinds = {
        "all": KindSpec(mask=causal(), position=RopeSpec(width=K)),
        "near": KindSpec(mask=causal() & window(4), position=RopeSpec(width=K)),
    }
    made = tuple(
        BlockSpec(
            attn=attention(
                D, H, kv_heads=G, head_width=K, value_width=KV, kind="near" if i == 3 else "all",
                mechanism=LinearKernelSpec() if i in linear else None,
            ),
            mlp=None, attn_norm=norms, mlp_norm=None,
        )
        for i in range(blocks)
    )  # fmt: skip
    stack = StackSpec(embed=EmbedSpec(vocab=V, width=D), kinds=kinds, blocks=made, final_norm=RMSNormSpec(width=D))
    head = LMHeadSpec(proj=LinearSpec(inputs=D, outputs=V))
    return nn.new(ModelSpec(family="tiny", decoder=stack, head=head, context=256, init_std=0.3), seed)


MODULES: dict[str, Callable[[], nn.Transformer]] = {"linear": lambda: mixed((0, 1), blocks=2), "mixed": mixed}
each_module = pytest.mark.parametrize("module", [make() for make in MODULES.values()], ids=MODULES)


def requests(**options: Any) -> list[Request]:
    return [Request(prompt=row, number=i, max_new_tokens=9, **options) for i, row in enumerate(ROWS)]


def written(engine: Engine, wanted: list[Request]) -> list[list[int]]:
    rows = engine.add(*wanted)
    while engine.rows:
        engine.step()
    return [row.new for row in rows]


# ---------------------------------------------------------------- the same numbers


@each_module
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_cached_in_chunks_is_one_uncached_pass(module: nn.Transformer, chunk: int) -> None:
    assert same(cached(module, ROWS, None, chunk), logits(module, ROWS), 1e-5)


@each_module
@pytest.mark.parametrize("broken", ["nothing is added", "each token is added twice", "the 1 behind values is missing"])
def test_a_wrong_sum_shows(module: nn.Transformer, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, extend = SumStep.finish, SumStep.extend

    def twice(self: SumStep) -> None:
        finish(self)
        for layer, after in self.after.items():
            store = self.stores[layer]
            store.k[self.slots], store.v[self.slots] = 2 * after[..., :-1], 2 * after[..., -1:]

    def without(self: SumStep, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = extend(self, layer, k, v)
        self.after[layer][..., -1] -= 0.5 * self.after[layer][..., -1]
        return out

    if broken == "the 1 behind values is missing":
        monkeypatch.setattr(SumStep, "extend", without)
    else:
        monkeypatch.setattr(SumStep, "finish", twice if broken.startswith("each") else lambda self: None)
    # 1e-3 is far above rounding
    assert not same(cached(module, ROWS, None, 1), logits(module, ROWS), 1e-3)


def test_the_size_does_not_depend_on_the_length() -> None:
    module = mixed((0, 1), blocks=2)
    engine = Engine(module)
    (row,) = engine.add(Request(prompt=[3, 4], max_new_tokens=200))
    sizes = set()
    while engine.rows:
        engine.step()
        sizes.add(engine.cache.nbytes)
    assert sizes == {2 * 4 * G * K * (KV + 1)}
    assert len(row.new) == 200
    assert engine.cache.slot_bytes(1) == engine.cache.slot_bytes(10_000) == 2 * 4 * G * K * (KV + 1)


@pytest.mark.parametrize("cache_type", ["auto", "fp16", "int8"])
def test_sums_are_kept_in_fp32_whatever_the_rest_is_kept_in(cache_type: CacheType) -> None:
    for module, dtype in (
        (mixed(), torch.float32),
        (mixed().bfloat16(), torch.float32),
        (mixed().double(), torch.float64),
    ):
        stores = module.decoder.cache(1, cache_type).stores
        assert {store.form.dtype for store in stores if store.layer.sums} == {dtype}
    assert written(Engine(mixed((0, 1), blocks=2), cache_type=cache_type), requests()) == [
        alone(mixed((0, 1), blocks=2), request) for request in requests()
    ]


# ---------------------------------------------------------------- rows that come, go and part


@each_module
def test_rows_join_and_leave_and_slots_are_given_out_again(module: nn.Transformer) -> None:
    engine, expected = Engine(module, chunk=2), [alone(module, request) for request in requests()]
    first, second, third = requests()
    a = engine.add(first)
    engine.step()
    b = engine.add(second)
    while a[0].reason is None:
        engine.step()
    c = engine.add(third)
    while engine.rows:
        engine.step()
    assert [row.new for row in (*a, *b, *c)] == expected
    assert len(engine.cache.lengths) == 2


@each_module
def test_beams_are_those_of_a_cache_of_keys(module: nn.Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> list[list[int]]:
        return [beam.tokens for beams in beam_search(Engine(module), requests(), beams=3) for beam in beams]

    found = search()
    with monkeypatch.context() as patch:
        patch.setattr(StackSpec, "keeps_sums", lambda self, attn: False)
        assert search() == found
    copy = Store.copy
    monkeypatch.setattr(Store, "copy", lambda self, *how: None if self.layer.sums else copy(self, *how))
    assert search() != found


@each_module
@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
def test_guesses_change_no_token(module: nn.Transformer, wrong: float) -> None:
    wanted = requests()
    expected = [alone(module, request) for request in wanted]
    oracle = Oracle([request.prompt + new for request, new in zip(wanted, expected, strict=True)], wrong)
    speculation = Speculation(oracle, 3, adaptive=False)
    engine = Engine(module, speculation=speculation)
    assert written(engine, wanted) == expected
    assert speculation.drafted > speculation.accepted or wrong == 0.0
    assert not engine.cache.snapshots


@each_module
def test_a_wrong_guess_that_stays_in_a_sum_shows(module: nn.Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def probabilities() -> Tensor:
        engine = Engine(module, speculation=Speculation(Oracle([[0]] * 3, 1.0), 3, adaptive=False))
        engine.add(Request(prompt=ROWS[0], max_new_tokens=9, logprobs=V, number=0))
        tops = []
        while engine.rows:
            tops += [output.logprobs.top for output in engine.step() if output.logprobs is not None]
        return torch.tensor([[value for _, value in sorted(top)] for top in tops])

    right = probabilities()
    monkeypatch.setattr("triptych.attention.caches.put_back", lambda *arguments: None)
    assert (probabilities() - right).abs().max() > 1e-3


def test_only_a_whole_row_is_taken_over_by_another() -> None:
    module = mixed((0, 1), blocks=2)
    engine = Engine(module, reuse=True)
    start = list(range(5, 25))
    (first,) = engine.add(Request(prompt=start, max_new_tokens=4))
    while engine.rows:
        engine.step()
    others = [Request(prompt=[*first.ids, 3], max_new_tokens=4), Request(prompt=[*start, 9], max_new_tokens=4)]
    for request, reused in zip(others, (23, 0), strict=True):
        (row,) = engine.add(request)
        while engine.rows:
            engine.step()
        assert row.reused == reused
        assert row.new == alone(module, request)


def test_what_a_sum_cannot_give_is_refused() -> None:
    module = mixed((0, 1), blocks=2)
    engine = Engine(module)
    (row,) = engine.add(Request(prompt=ROWS[0], max_new_tokens=9))
    engine.step()
    with pytest.raises(InputError, match=r"from 11 to 5 tokens: a layer of linear attention keeps only sums"):
        engine.trim(row, 5)
    engine.trim(row, row.cached)
    engine.trim(row, 0)  # the row is read again
    engine.step()
    assert row.new == alone(module, requests()[0])[:2]
    with pytest.raises(InputError, match="a draft model with linear attention cannot take back its wrong guesses"):
        DraftModel(Engine(module), V)
    rows, heads = Rows((1,), (1,)), Heads(
        heads=H, groups=G, width=K, value_width=KV, dtype=torch.float32, device=torch.device("cpu")
    )  # fmt: skip
    with pytest.raises(InputError, match="a cache of sums serves linear attention alone"):
        SumPlan(rows).plan(rows, causal(), heads, mechanism=DOT_PRODUCT)
    with pytest.raises(InputError, match="softcap: it acts on scores"):
        SumPlan(rows).plan(rows, causal(), replace(heads, softcap=2.0), mechanism=LINEAR)


def test_a_step_that_fails_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mixed((0, 1), blocks=2)
    engine = Engine(module)
    (row,) = engine.add(Request(prompt=ROWS[0], max_new_tokens=0))
    expected = [engine.logits()]
    row.ids.append(7)
    extend = SumStep.extend

    def fails(self: SumStep, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == 1:
            raise RuntimeError("no memory")
        return extend(self, layer, k, v)

    with monkeypatch.context() as patch:
        patch.setattr(SumStep, "extend", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.logits()
    expected.append(engine.logits())
    whole = logits(module, [[*ROWS[0], 7]])[0]
    assert same([torch.cat(expected)], [whole[-2:]], 1e-5)


def test_prompt_lookup_serves_it_too() -> None:
    module = mixed()
    prompt = [3, 4, 5, 6, 7] * 4
    expected = alone(module, Request(prompt=prompt, max_new_tokens=20))
    engine = Engine(module, speculation=Speculation(PromptLookup(), 3, adaptive=False))
    assert written(engine, [Request(prompt=prompt, max_new_tokens=20)]) == [expected]


# ---------------------------------------------------------------- seen from outside


def test_reads_of_a_cached_run() -> None:
    model = Model(mixed())
    ids = ROWS[0]
    whole = model.trace([ids], read=["blocks.0.attn.z", "blocks.0.attn.k_ctx"])
    assert whole["blocks.0.attn.k_ctx"][0].shape == (len(ids), G, K)
    (new,) = model.generate([ids], max_new_tokens=3, read=["blocks.0.attn.z"])
    again = model.trace([ids + list(new.ids)], read=["blocks.0.attn.z"])["blocks.0.attn.z"][0]
    torch.testing.assert_close(new.trace["blocks.0.attn.z"][0], again[:-1], atol=1e-5, rtol=1e-5)
    with pytest.raises(ProbeError, match=r"blocks\.2\.attn\.v_ctx: the cache of linear attention keeps sums"):
        model.generate([ids], max_new_tokens=3, read=["blocks.2.attn.v_ctx"])


def test_why_it_runs_as_modules() -> None:
    engine = Engine(mixed())
    written(engine, requests())
    assert "not by linear scores" in engine.why_modules


@each_module
def test_count_knows_its_bytes(module: nn.Transformer) -> None:
    counted, engine = count(module.spec), Engine(module)
    engine.add(Request(prompt=[3] * 64, max_new_tokens=0))
    engine.step()
    assert counted.cache_bytes(64, dtype="fp32") == engine.cache.nbytes
    sums = counted.cache_bytes(0)
    assert sums == 2 * 4 * G * K * (KV + 1)
    assert counted.cache_bytes(64, dtype="int8") - sums == (counted.cache_bytes(64, dtype="fp32") - sums) // 4 + (
        2 * G * 2 * (64 + 4) if len(module.spec.decoder.blocks) > 2 else 0  # type: ignore[union-attr]
    )


def test_count_knows_its_flops() -> None:
    spec = mixed((0, 1), blocks=2).spec
    assert count(spec).flops(7)["scores"] == 2 * 2 * 7 * (G + H) * K * (KV + 1)
    assert count(spec).flops(1, cached=500)["scores"] == 2 * 2 * 1 * (G + H) * K * (KV + 1)


def test_a_mask_that_looks_ahead_keeps_keys() -> None:
    stack = mixed((0, 1), blocks=2).spec.decoder
    assert stack.keeps_sums(stack.blocks[0].attn)
    for mask in (causal() & window(4), causal() | causal() & window(2)):
        kinds = {**stack.kinds, "all": KindSpec(mask=mask)}
        assert not StackSpec(embed=stack.embed, kinds=kinds, blocks=stack.blocks).keeps_sums(stack.blocks[0].attn)
