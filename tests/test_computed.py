"""What a trace computes again instead of keeping it: the same bits as what passed, whoever wrote the forward."""

import gc
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
import triptych
from triptych.errors import ProbeError
from triptych.model import Model
from triptych.nn import Transformer
from triptych.probe import Read, Trace, add, trace_values

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8]]
ACT, MID, POST = "blocks.0.mlp.act", "blocks.0.resid_mid", "blocks.0.resid_post"
MODELS: dict[str, Callable[[], Transformer]] = {
    "decoder": tiny.decoder,
    "mixture": tiny.mixture,
    "encoder": tiny.encoder,
    "encoder-decoder": tiny.encoder_decoder,
    "attention only": tiny.attention_only,
}

GPT2 = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}


def inputs(model: Model) -> tuple[list[list[int]], ...]:
    return (ROWS, ROWS[::-1]) if model.spec.layout == "encoder-decoder" else (ROWS,)


def computed_sites(trace: Trace) -> list[str]:
    return [site for site, rows in trace.records.items() if any(record.later for record in rows.values())]


def assert_as_passed(model: Model, **options: Any) -> Trace:
    """A trace of everything holds what passed: reads of chosen positions, here all, are kept as the forward runs."""
    trace = model.trace(*inputs(model), read="*", **options)
    passed = model.trace(*inputs(model), read=Read("*", at=slice(0, None)), **options)
    assert list(trace) == list(passed)
    for site in reversed(list(trace)):  # the last first, so that what it is computed from is not there yet
        assert trace.positions(site) == passed.positions(site)
        for a, b in zip(trace[site], passed[site], strict=True):
            assert torch.equal(a, b), site
    return trace


@pytest.fixture
def model() -> Model:
    return Model(tiny.decoder())


@pytest.mark.parametrize("name", MODELS)
def test_everything_read_is_what_passed(name: str) -> None:
    assert_as_passed(Model(MODELS[name]()))


def test_what_follows_from_kept_values_is_not_kept(model: Model) -> None:
    streams = [f"blocks.{i}.{leaf}" for i in range(2) for leaf in ("resid_pre", "resid_mid", "resid_post")]
    acts = [f"blocks.{i}.mlp.act" for i in range(2)]
    trace = model.trace(ROWS[:1], read="*")
    assert {*streams[1:], *acts} <= set(computed_sites(trace))
    assert computed_sites(model.trace(ROWS[:1], read=["*.resid_*", "*.act"])) == []  # their inputs are not kept
    assert computed_sites(model.trace(ROWS[:1], read=[Read("*.up", heads=None, dtype="bf16"), "*.act"])) == []


def test_an_mlp_with_a_forward_of_somebody_else() -> None:
    """It computes another function, with the site or with `computed`."""
    model = triptych.create(GPT2)
    mlp = model.module.decoder.blocks[0].mlp
    before = model.trace(ROWS, read=ACT)[ACT]

    def squared(self: Any, x: Tensor, ctx: Any, taps: Any) -> Tensor:
        up = taps("up", self.up(x), ctx.rows)
        return self.down(taps("act", up * up, ctx.rows))

    def cubed(self: Any, x: Tensor, ctx: Any, taps: Any) -> Tensor:
        up = taps("up", self.up(x), ctx.rows)
        return self.down(taps("act", taps.computed(lambda y: y * y * y, up), ctx.rows))

    for forward, power in ((squared, 2), (cubed, 3)):
        mlp.forward = MethodType(forward, mlp)
        trace = assert_as_passed(model)
        assert (ACT in computed_sites(model.trace(ROWS, read="*"))) == (forward is cubed)
        for act, up, old in zip(trace[ACT], trace["blocks.0.mlp.up"], before, strict=True):
            torch.testing.assert_close(act, up**power)
            assert not torch.equal(act, old)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_hook_between_the_computation_and_the_site(model: Model, in_place: bool) -> None:
    """It changes the sum that the residual stream goes on with, as another tensor or where it lies."""

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        return out.mul_(1.5) if in_place else out * 1.5

    plain = model.trace(ROWS, read=POST)[POST]
    handle = model.module.decoder.blocks[0].mlp_norm.post.register_forward_hook(hook)
    trace = assert_as_passed(model)
    handle.remove()
    assert all(torch.equal(a, 1.5 * b) for a, b in zip(trace[POST], plain, strict=True))


def test_edits_count(model: Model) -> None:
    for site in ("blocks.0.mlp.up", ACT, "blocks.0.attn.out", MID):
        trace = assert_as_passed(model, edit=add(site, torch.tensor(0.5)))
        assert trace.fired == {site: 3}


def test_training_drops_numbers_at_random_and_so_they_are_kept() -> None:
    model = triptych.create({**GPT2, "resid_pdrop": 0.5})
    model.module.train()
    trace = model.trace(ROWS, read="*")
    assert not any(site.endswith(("resid_mid", "resid_post")) for site in computed_sites(trace))


def test_functions_that_would_give_another_dtype_are_not_computed_later(model: Model) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert computed_sites(model.trace(ROWS, read=["*.up", "*.act", "*.gate"])) == []


def test_a_tensor_changed_in_place_is_not_computed_from(model: Model) -> None:
    trace = model.trace(ROWS, read="*")
    trace["blocks.0.attn.out"][0].zero_()
    with pytest.raises(ProbeError, match="changed in place"):
        trace[POST]
    trace = model.trace(ROWS, read="*")
    trace[MID][0].zero_()
    with pytest.raises(ProbeError, match="changed in place"):
        trace[POST]
    trace = model.trace(ROWS, read="*")
    post = trace[POST]
    post[0].zero_()  # looked at before: a tensor as any other
    assert trace[POST][0] is post[0]


def test_sites_that_pass_one_tensor_are_computed_once(model: Model) -> None:
    trace = model.trace(ROWS[:1], read="*")
    size = trace.nbytes
    assert trace[POST][0] is trace["blocks.1.resid_pre"][0]
    assert trace.nbytes == size == model.trace_size(ROWS[:1], read="*").total
    with torch.inference_mode():
        assert torch.equal(trace["blocks.1.resid_post"][0], model.trace(ROWS[:1], read="*")["blocks.1.resid_post"][0])


def test_a_computation_that_ignores_changes_would_be_wrong(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the hook above."""
    monkeypatch.setattr(trace_values.Computations, "kept_as", without_versions)
    with pytest.raises(AssertionError, match="resid_"):
        test_a_hook_between_the_computation_and_the_site(model, in_place=True)


def without_versions(self: trace_values.Computations, value: Tensor, rows: Any) -> Tensor | trace_values.Computation:
    made = self.computations.get(value)
    self.kept_tensors[value] = True
    return value if made is None else made[0]


def test_a_trace_is_freed_as_soon_as_nobody_has_it(model: Model) -> None:
    gc.collect()
    gc.disable()
    try:
        trace = model.trace(ROWS, read="*")
        gone = weakref.ref(trace)
        del trace
        assert gone() is None
    finally:
        gc.enable()
