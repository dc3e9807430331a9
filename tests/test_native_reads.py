"""Reads of a generation that runs natively: what the modules have at every site, wherever a native step has it."""

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import native_models
import parity
import tiny
from native_models import EXACT, llama, needs_native
from test_native_step import packed, unpacked, with_rounded_inputs
from triptych import nn
from triptych.generate import Engine, Request, Sampling
from triptych.generate.step_runner import StepRunner
from triptych.native import huge_pages
from triptych.probe import Read, Session, Trace, sites, trace_recording
from triptych.probe.reads_and_edits import Plan, Reads
from triptych.program import native_executor, native_reads
from triptych.program.native_executor import NativeStep
from triptych.program.native_plan import NativePlan
from triptych.spec import FramesSpec

pytestmark = needs_native

MODULES_ALONE = ("scores", "pattern", "k_ctx", "v_ctx")
PROMPTS = ([5, 6, 7, 8, 9, 3], [2], [11, 4, 12])
NEW = 4


def of_steps(module: nn.Transformer) -> list[str]:
    """All sites that native steps serve, with those of the source, which one forward of the modules serves."""
    return [name for name in sites(module.spec) if not name.endswith(MODULES_ALONE)]


def written(
    module: nn.Transformer, read: Reads, *, executor: str = "auto", every: bool = False, refused: bool = False,
    **settings: Any,
) -> tuple[list[list[int]], Trace, list[Tensor]]:  # fmt: skip
    """What three ragged rows of one engine wrote, the trace, and all their logits."""
    engine, session = Engine(module, executor=executor, **settings), Session(Plan.of(module.spec, read))
    probe = session if read else None
    rows = engine.add(*(
        Request(prompt=list(prompt), number=i, probe=probe, max_new_tokens=NEW + i, all_logits=every,
                source=source_of(module, i), sampling=Sampling(temperature=0))
        for i, prompt in enumerate(PROMPTS)
    ))  # fmt: skip
    found: dict[int, list[Tensor]] = {}
    while engine.rows:
        for output in engine.step():
            if output.logits is not None:
                found.setdefault(output.row.request.number, []).append(output.logits)
    assert (engine.why_modules is None) == (executor == "auto" and not refused), engine.why_modules
    logits = [torch.cat(found[i]) for i in sorted(found)]
    return [row.ids for row in rows], session.close() if read else Trace(), logits


def source_of(module: nn.Transformer, row: int) -> Any:
    if module.encoder is None:
        return None
    embed = module.spec.reads.embed
    if isinstance(embed, FramesSpec):
        random = torch.Generator().manual_seed(row)
        return torch.randn(embed.stride * embed.position.length, embed.conv1.inputs, generator=random)
    return [[5, 6, 7], [9], [10, 11, 12, 13]][row]


def gap(one: Trace, other: Trace) -> float:
    """The largest difference of two traces of the same sites and positions, beside the largest number of each site."""
    assert list(one) == list(other)
    worst = 0.0
    for site in one:
        assert one.items(site) == other.items(site)
        assert one.positions(site) == other.positions(site)
        for a, b in zip(one[site], other[site], strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            worst = max(worst, float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-9)))
    return worst


@pytest.mark.parametrize("name", native_models.decoders())
def test_every_site_of_every_family_holds_what_the_modules_have_there(name: str) -> None:
    module = parity.ours(name).module
    read = of_steps(module)
    ids, ours, logits = written(module, read, every=True)
    assert (ids, [*map(torch.Tensor.tolist, logits)]) == (
        (plain := written(module, (), every=True))[0], [*map(torch.Tensor.tolist, plain[2])],
    )  # fmt: skip
    assert set(ours) == set(read)
    assert gap(ours, written(module, read, executor="modules", every=True)[1]) <= EXACT


def _short_and_long(module: nn.Transformer, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float]:
    """How many steps of a greedy generation, which read everything, went the short way, and the largest difference of
    their trace to one of a generation without such steps."""
    steps: list[int] = []
    made = StepRunner._next_tokens

    def counted(*how: Any) -> Any:
        result = made(*how)
        steps.append(int(result is not None))
        return result

    monkeypatch.setattr(StepRunner, "_next_tokens", counted)
    short = written(module, of_steps(module))
    monkeypatch.setattr(StepRunner, "_next_tokens", lambda *how: None)
    long = written(module, of_steps(module))
    assert short[0] == long[0]
    return sum(steps), gap(short[1], long[1])


@pytest.mark.parametrize("make", [packed, llama, tiny.encoder_decoder])
def test_the_short_way_of_greedy_steps_reads_the_same_bits(
    make: Callable[[], nn.Transformer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _short_and_long(make(), monkeypatch) == (NEW + len(PROMPTS) - 2, 0.0)  # all but that of the prompts


def test_logits_that_the_next_step_overwrites_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = NativeStep.logits
    reused = lambda *how, keep=True, **named: made(*how, keep=keep and "reads" not in named, **named)  # noqa: E731
    monkeypatch.setattr(NativeStep, "logits", reused)
    assert _short_and_long(packed(), monkeypatch)[1] > 1e-3


def _swapped(plan: NativePlan) -> NativePlan:
    """Each site with the place of another one of its width."""
    names = [name for name in plan.sites if name.endswith(("resid_pre", "resid_mid", "resid_post", "mlp.in"))]
    swapped = {name: plan.sites[other] for name, other in zip(names, [*names[1:], names[0]], strict=True)}
    return replace(plan, sites=plan.sites | swapped)


def _shifted(plan: NativePlan) -> NativePlan:
    moved = {name: replace(place, offset=max(0, place.offset - 16)) for name, place in plan.sites.items()}
    return replace(plan, sites=moved)


@pytest.mark.parametrize("broken", [_swapped, _shifted])
def test_a_broken_mapping_of_sites_is_found(
    broken: Callable[[NativePlan], NativePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, made = llama(), native_executor.plan_of
    right = written(module, of_steps(module), executor="modules")[1]
    assert gap(written(module, of_steps(module))[1], right) <= EXACT
    monkeypatch.setattr(native_executor, "plan_of", lambda *how, **named: broken(made(*how, **named)))
    assert gap(written(llama(), of_steps(module))[1], right) > 10 * EXACT


@pytest.mark.parametrize("name", ["window", "alibi", "mixture", "encoder-decoder"])
def test_every_part_is_read_natively(name: str) -> None:
    module = {
        "window": lambda: tiny.decoder(mask="window"), "alibi": lambda: tiny.decoder("alibi"),
        "mixture": tiny.mixture, "encoder-decoder": tiny.encoder_decoder,
    }[name]()  # fmt: skip
    read = of_steps(module)
    assert gap(written(module, read)[1], written(module, read, executor="modules")[1]) <= EXACT


CHOSEN: dict[str, Reads] = {
    "heads": Read("*.attn.q_rot", heads=[2, 0]), "positions": Read("*.resid_post", at=slice(1, 6, 2)),
    "rows": Read("*.mlp.act", items=[2, 1]), "layers": Read("*.attn.z", layers=-1, heads=1, at=3),
    "type": Read("*", dtype="bf16"), "norm": Read("*.resid_mid", reduce="norm"),
    "mean": [Read("*.attn.v", reduce="mean"), "final"], "heads together": Read("*.attn.k", reduce="mean_heads"),
    "two of one site": [Read("final", at=0), Read("final", at=[2, 3]), "blocks.0.mlp.up"], "logits": "logits",
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("held", [0, 1 << 22])  # at 0 what was left is taken before every step
def test_chosen_and_reduced_reads_are_those_of_the_modules(
    name: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_recording, "HELD", held)
    module = llama()
    known = [one for one in sites(module.spec) if not one.endswith(MODULES_ALONE)]
    read = CHOSEN[name]
    if isinstance(read, Read) and read.site == "*":
        read = [replace(read, site=site) for site in known]
    tolerance = EXACT if name != "type" else 1e-2
    assert gap(written(module, read)[1], written(module, read, executor="modules")[1]) <= tolerance


@pytest.mark.parametrize("piece", [1, 10_000])
def test_memory_in_many_pieces_holds_the_same(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = llama()
    whole = written(module, of_steps(module))[1]
    monkeypatch.setattr(native_reads, "PIECE", piece)
    monkeypatch.setattr(native_executor, "TOKENS", 4)  # a prompt in two calls
    assert gap(written(module, of_steps(module))[1], whole) == 0.0


def test_steps_of_modules_between_native_ones_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    module = llama()
    right = written(module, of_steps(module), executor="modules")[1]
    run, count = native_executor.NativeStep.logits, iter(range(100))

    def now_and_then(self: Any, *arguments: Any, **named: Any) -> Tensor | None:  # a step asks twice where it is short
        return run(self, *arguments, **named) if next(count) // 2 % 3 else None

    monkeypatch.setattr(native_executor.NativeStep, "logits", now_and_then)
    assert gap(written(module, of_steps(module))[1], right) <= EXACT


@pytest.mark.parametrize("leaf", MODULES_ALONE)
def test_what_a_native_step_does_not_keep_is_named_and_runs_as_modules(leaf: str) -> None:
    module = llama()
    read = [f"blocks.1.attn.{leaf}", "final"]
    engine, session = Engine(module), Session(Plan.of(module.spec, read))
    engine.add(Request(prompt=[1, 2], max_new_tokens=2, probe=session))
    engine.step()
    assert engine.why_modules == f"blocks.1.attn.{leaf} is read, which the native step does not keep"
    one, other = (written(module, read, executor=executor, refused=True)[1] for executor in ("auto", "modules"))
    assert gap(one, other) == 0.0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_packed_weights_leave_what_the_modules_have_for_rounded_vectors(kind: str) -> None:
    """Beside modules that round the inputs of their products as the kernels do: at every site within 1e-2."""
    module = packed(kind)
    twin = unpacked(module)
    with_rounded_inputs(twin)
    one, other = (
        written(model, of_steps(module), executor=executor, **how)[1]
        for model, executor, how in ((module, "auto", {"matmul": "stored"}), (twin, "modules", {}))
    )
    for site in one:
        for a, b in zip(one[site], other[site], strict=True):
            assert float((a - b).norm() / b.norm()) <= 1e-2, site


def test_a_trace_that_nobody_looks_at_costs_no_tensors() -> None:
    """The records are made when they are asked for."""
    module = llama()
    trace = written(module, of_steps(module))[1]
    assert not trace.filled()
    assert trace["final"][0].shape == (len(PROMPTS[0]) + NEW - 1, 64)
    assert set(trace.filled()) == set(of_steps(module))


@pytest.mark.parametrize("matmul", ["auto", "stored"])
def test_reads_of_packed_weights_change_no_bit(matmul: str) -> None:
    """Where prompts are multiplied in bf16, products take in what follows them, but for what is read."""
    module = packed("Q4_1")
    (ids, _, logits), (plain_ids, _, plain) = (
        written(module, read, every=True, matmul=matmul) for read in (of_steps(module), ())
    )
    assert ids == plain_ids
    assert all(map(torch.equal, logits, plain))


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="the system keeps no freed memory for later")
def test_traces_use_the_memory_of_those_that_are_gone_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[mmap.mmap] = []
    monkeypatch.setattr(huge_pages, "UNUSED_MAPPINGS", kept)
    module, finals = llama(), []
    for _ in range(2):  # the second one writes where the first one did
        trace = written(module, of_steps(module))[1]
        finals.append(trace["final"][0])
        whole, one = {site: trace[site] for site in trace}, trace["blocks.0.attn.q"][0][-1]
        expected = {site: [x.clone() for x in values] for site, values in whole.items()}
        written(module, Read("*.mlp.up"))  # of which nobody has the trace
        assert all(all(map(torch.equal, whole[site], expected[site])) for site in whole)
        del trace, whole
        before = one.clone()
        written(module, of_steps(module))
        assert torch.equal(one, before)
        del one
        finals[-1] = finals[-1].clone()
        assert len(kept) == 1
    assert torch.equal(*finals)
