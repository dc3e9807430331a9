"""Plans: what may be read and edited is checked before anything runs, and is known by its content."""

import fnmatch
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from triptych.attention import FlatKeys, Heads, Rows
from triptych.attention.rows import RowGroups
from triptych.errors import ProbeError
from triptych.model import Model
from triptych.probe import Edit, Plan, Read, Session, Where, add, put, sites, zero
from triptych.probe import reads_and_edits as plans
from triptych.probe.apply_plan import ProbeTaps
from triptych.probe.content_hash import digest
from triptych.probe.trace_recording import Notes
from triptych.spec.masks import causal, full

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
PATTERN, STREAM, LATER = "blocks.0.attn.pattern", "blocks.0.resid_post", "blocks.1.resid_post"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.decoder())


def trace(model: Model, **how: Any) -> Any:
    return model.trace(ROWS, **how)


# ---------------------------------------------------------------- how a plan is given


@pytest.mark.usefixtures("unchecked")
def test_one_read_and_one_edit_need_no_list(model: Model) -> None:
    assert list(trace(model, read=PATTERN)) == list(trace(model, read=[PATTERN])) == [PATTERN]
    assert list(trace(model, read=Read(PATTERN, heads=1))) == [PATTERN]
    single, listed = (trace(model, read=STREAM, edit=edit) for edit in (zero(PATTERN), [zero(PATTERN)]))
    assert torch.equal(single[STREAM][0], listed[STREAM][0])
    for wrong in ({"read": 3}, {"read": [3]}, {"edit": PATTERN}, {"edit": [PATTERN]}, {"edit": torch.zeros(3)}):
        with pytest.raises(ProbeError, match="must be a list of"):
            trace(model, **wrong)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"edit": zero(STREAM, at=-1)}, "count from 0, so the last token of a row is at=len"),
        ({"edit": zero(STREAM, at=[0, -1])}, "count from 0"),
        ({"edit": zero(STREAM, at=slice(-2, None))}, "count from 0"),
        ({"edit": zero(STREAM, at=slice(3, None, 0))}, "step of a slice"),
        ({"edit": zero(STREAM, items=-1)}, "rows count from 0"),
        ({"read": Read(PATTERN, heads=-1)}, "heads 0..5"),
        ({"read": "blocks.99.resid_post"}, r"blocks are 0 to 1$"),
        ({"edit": add(STREAM, torch.ones(tiny.D + 1))}, rf"shape \(25,\), and a vector there has {tiny.D} numbers"),
        ({"edit": put("blocks.0.attn.z", torch.ones(tiny.D))}, f"has {tiny.K} numbers a head"),
        ({"edit": add(STREAM, torch.ones(5, tiny.D))}, "does not broadcast"),
        ({"edit": put(PATTERN, torch.ones(7, 7))}, "does not broadcast"),
    ],
    ids=str,
)
def test_what_cannot_be_selected_or_added_is_refused(model: Model, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        trace(model, **how)


@pytest.mark.usefixtures("unchecked")
def test_positions_are_integers(model: Model) -> None:
    with pytest.raises(ProbeError, match="integer, a slice or a list"):
        trace(model, read=Read(STREAM, at=1.5))  # type: ignore[arg-type]


def test_an_edit_that_changes_nothing_may_be_allowed(model: Model) -> None:
    nothing = [Edit(STREAM, lambda x, where: x), zero(PATTERN)]
    with pytest.raises(ProbeError, match=f"the edit at {STREAM} changed nothing.*allow_null=True"):
        trace(model, edit=nothing)
    assert trace(model, edit=nothing, allow_null=True).fired == {PATTERN: 2}
    assert trace(model, edit=nothing[1:]).fired == {PATTERN: 2}


def test_a_trace_says_what_it_holds(model: Model) -> None:
    found = trace(model, read=[PATTERN, STREAM])
    assert list(found.keys()) == [PATTERN, STREAM]
    assert len(found) == 2
    assert repr(found).splitlines() == [
        f"Trace of 2 rows, 2 sites, {found.nbytes:,} bytes",
        f"  {PATTERN}  [6, 8, 8], [6, 3, 3]  float32",
        f"  {STREAM}  [8, 24], [3, 24]  float32",
    ]


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("read", [Read(STREAM, grad=True), Read(STREAM, at=2, items=0, grad=True)], ids=str)
def test_gradients_reach_what_was_read(model: Model, read: Read) -> None:
    """Against a finite difference along one direction; and without any parameter that wants a gradient."""
    for wanted in (True, False):
        model.module.requires_grad_(wanted)
        found = trace(model, read=read)
        (x, *_), plain = found[STREAM], model.logits(ROWS)
        # With gradients other kernels compute.
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found.logits, plain, strict=True))
        score = found.logits[0][-1].square().sum()
        score.backward(retain_graph=True)
        gradient = x.grad.clone()
        assert torch.equal(torch.autograd.grad(score, x)[0], gradient)
        direction, step = torch.randn_like(x), 1e-3
        nudged = [
            trace(model, edit=Edit(STREAM, moved(s * direction), items=0, at=read.at)).logits[0][-1]
            for s in (step, -step)
        ]
        difference = float(nudged[0].square().sum() - nudged[1].square().sum()) / (2 * step)
        assert difference == pytest.approx(float((gradient * direction).sum()), rel=2e-2)
    model.module.requires_grad_(True)
    model.module.zero_grad()


@pytest.mark.parametrize("site", [PATTERN, "blocks.1.attn.scores", "blocks.0.attn.k_ctx", "blocks.1.attn.z"])
def test_every_kind_of_site_can_be_in_the_graph(model: Model, site: str) -> None:
    whole, part = (trace(model, read=Read(site, heads=heads, grad=True)) for heads in (None, [0, 2]))
    for found in (whole, part):
        found.logits[0].logsumexp(-1).sum().backward()
        assert found[site][0].grad.abs().sum() > 0
    axis = 0 if site.endswith(("pattern", "scores")) else 1
    torch.testing.assert_close(whole[site][0].grad.index_select(axis, torch.tensor([0, 2])), part[site][0].grad)


def test_a_generation_has_no_graph(model: Model) -> None:
    with pytest.raises(ProbeError, match="generation has no autograd graph"):
        model.generate(ROWS, max_new_tokens=2, read=[Read(STREAM, grad=True)])


# ---------------------------------------------------------------- provenance


def scaled(factor: float) -> Callable[[torch.Tensor, Where], torch.Tensor]:
    return lambda x, where: x * factor


def moved(by: torch.Tensor) -> Callable[[torch.Tensor, Where], torch.Tensor]:
    return lambda x, where: x + by


def times(x: torch.Tensor, where: Where, factor: float) -> torch.Tensor:
    return x * factor


def provenance(model: Model, *edits: Edit) -> str:
    return Plan.of(model.spec, [], edits).provenance


def test_equal_edits_are_one_provenance(model: Model) -> None:
    vector = torch.arange(tiny.D)
    pairs = [
        (zero(STREAM), zero(STREAM)),
        (add(STREAM, vector), add(STREAM, vector.clone())),
        (Edit(STREAM, scaled(2.0)), Edit(STREAM, scaled(2.0))),
        (Edit(STREAM, partial(times, factor=3.0)), Edit(STREAM, partial(times, factor=3.0))),
        (zero(STREAM, at=[1, 2]), zero("blocks.0.resid_p*st", at=(1, 2))),
    ]
    for one, other in pairs:
        assert provenance(model, one) == provenance(model, other) != ""
    every = [provenance(model, one) for one, _ in pairs]
    other = [
        put(STREAM, vector), add(STREAM, vector + 1), Edit(STREAM, scaled(2.5)), zero(STREAM, at=1),
        Edit(STREAM, partial(times, factor=2.0)), zero(STREAM, items=1), zero("blocks.1.resid_post"),
    ]  # fmt: skip
    every += [provenance(model, one) for one in other]
    assert len(set(every)) == len(every)
    assert provenance(model) == ""


def test_what_has_no_content_equals_nothing() -> None:
    class Stateful:
        def __call__(self, x: torch.Tensor, where: Where) -> torch.Tensor:
            return x

    assert digest(Stateful()) != digest(Stateful())
    assert digest([1, "a", None, 2.5, {"k": torch.ones(2)}]) == digest([1, "a", None, 2.5, {"k": torch.ones(2)}])
    loop: list[Any] = [1]
    loop.append(loop)
    assert digest(loop) == digest(loop)


@pytest.mark.parametrize(
    ("make", "site", "reason"),
    [
        (lambda: tiny.decoder(mechanism="linear"), "blocks.1.attn.scores", "linear attention never forms them"),
        (tiny.mixture, "blocks.0.mlp.act", "a mixture of experts, which has the sites in, router and out"),
        (tiny.mixture, "blocks.0.resid_mid", "attention and MLP are parallel"),
        (tiny.attention_only, "blocks.*.mlp.out", "its blocks have no MLP"),
        (tiny.decoder, "blocks.0.cross.pattern", "no cross-attention"),
        (tiny.decoder, "blocks.0.mlp.router", "no mixture of experts"),
        (tiny.decoder, "encoder.blocks.0.attn.z", "this decoder has no encoder"),
        (tiny.encoder, "blocks.0.mlp.gate", "its MLP has no gate"),
        (tiny.encoder, "blocks.0.branch.out", "no convolution beside the block"),
        (tiny.encoder_decoder, "encoder.blocks.0.cross.z", "no cross-attention"),
        (tiny.encoder_decoder, "blocks.0.attn.z", "did you mean 'encoder.blocks.0.attn.z'"),
    ],
)
def test_a_site_that_a_part_cannot_serve_is_refused_with_the_reason(
    make: Callable[[], Any], site: str, reason: str
) -> None:
    with pytest.raises(ProbeError, match=f"no site .*{reason}") as caught:
        Plan.of(make().spec, site)
    assert "\n" not in str(caught.value)


def test_names_of_migration_hints_are_answered_with_ours(model: Model) -> None:
    """Every hook of the table in docs/concepts/from-transformerlens.md, and modules of transformers."""
    table = Path("docs/concepts/from-transformerlens.md").read_text()
    pairs = re.findall(r"^\| `([\w.]+)`[^|]*\| `([\w.]+)` \|", table, re.M)
    pairs += [("hook_embed", "embed"), ("blocks.i.mlp.hook_pre", "blocks.i.mlp.gate")]
    pairs += [("model.layers.i.self_attn", "blocks.i.attn.out"), ("transformer.h.i", "blocks.i.resid_post")]
    known = [(there.replace("i.", "1.") if ".i." in there else there.replace(".i", ".1"), ours.replace(".i.", ".1."))
             for there, ours in pairs if "mlp.up" not in ours]  # fmt: skip
    assert len(known) > 20
    for there, ours in known:
        if there != ours:
            with pytest.raises(ProbeError, match=f"write '{re.escape(ours)}'$|mean '{re.escape(ours)}'"):
                model.trace(ROWS, read=there)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"read": partial(Read, STREAM, at=9)}, r"never fired: .*at=9 of rows 0 to 1 with positions up to 7"),
        ({"read": partial(Read, STREAM, items=2)}, "never fired: .*items=2"),
        ({"read": partial(Read, STREAM, items=1, at=5)}, "never fired"),
        ({"edit": partial(zero, STREAM, at=8)}, "the edit at .* would change nothing"),
        ({"edit": partial(zero, STREAM, items=[2, 3])}, "the edit at .* would change nothing"),
        ({"read": partial(Read, "*.z", heads=slice(6, 9))}, r"has heads 0\.\.5, and heads="),
        ({"read": partial(Read, "*.z", layers=True)}, "layers=True must be an integer"),
        ({"edit": partial(add, STREAM, 2.0)}, "2.0 is no tensor"),
        ({"edit": partial(put, STREAM, None)}, "None is no tensor"),
    ],
)
def test_what_no_row_has_is_refused_before_anything_runs(
    model: Model, how: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "_forward", None)
    with pytest.raises(ProbeError, match=message) as caught:
        trace(model, **{name: make() for name, make in how.items()})
    assert "\n" not in str(caught.value)


def test_a_generation_refuses_positions_that_it_never_reaches(model: Model) -> None:
    model.generate(ROWS, max_new_tokens=4, read=Read(STREAM, at=10))
    with pytest.raises(ProbeError, match="never fired"):
        model.generate(ROWS, max_new_tokens=4, read=Read(STREAM, at=11))


@pytest.mark.usefixtures("unchecked")
def test_a_site_is_read_in_one_way_in_a_trace(model: Model) -> None:
    """The same read twice is one; two that differ change no logits, and cannot be told apart in the trace."""
    once = trace(model, read=STREAM)[STREAM]
    for read in ([STREAM, STREAM], [STREAM, "*.resid_post"]):
        assert all(torch.equal(a, b) for a, b in zip(trace(model, read=read)[STREAM], once, strict=True))
    parts = trace(model, read=[Read(STREAM, at=0), Read(STREAM, at=2)])
    assert parts.positions(STREAM) == [(0, 2), (0, 2)]
    for other in (Read(STREAM, reduce="mean"), Read(STREAM, at=2)):
        mixed = trace(model, read=[STREAM, other])
        assert "read in several ways" in repr(mixed)
        with pytest.raises(ProbeError, match="was read in several ways"):
            mixed[STREAM]
    with pytest.raises(ProbeError, match="indexed by the name of a site"):
        parts[0]  # type: ignore[index]


# ---------------------------------------------------------------- what reads do without, counted and not timed


class Calls:
    """How often the function `name` of `owner` is called."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count, plain = 0, getattr(owner, name)

        def counted(*of: Any, **named: Any) -> Any:
            self.count += 1
            return plain(*of, **named)

        patch.setattr(owner, name, counted)


def test_whole_reads_by_name_are_neither_searched_nor_copied(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    searches, selections = Calls(monkeypatch, fnmatch, "fnmatchcase"), Calls(monkeypatch, plans, "_selection")
    wanted = [Read(name) for name in sites(model.spec)]
    plan = Plan.of(model.spec, wanted)
    assert all(plan.reads[read.site][0] is read for read in wanted)
    assert (searches.count, selections.count) == (0, 0)
    Plan.of(model.spec, [Read("blocks.*.attn.pattern", heads=1)])  # the control: these are counted
    assert searches.count >= len(plan.sites)
    assert selections.count == 2  # one for each block


def test_taps_under_a_name_are_made_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calls(monkeypatch, Session, "taps_under")
    taps = Session(Plan.of(model.spec, [LATER])).taps
    block = taps.at("blocks.1")
    assert made.count == 2
    assert all(taps.at("blocks.1") is block for _ in range(9))
    assert taps.at("") is taps
    assert made.count == 2


def test_attention_that_nothing_reads_runs_as_it_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Calls(monkeypatch, ProbeTaps, "_context")
    model.trace(ROWS, read=[LATER, "blocks.0.attn.q", "blocks.1.attn.q"])
    assert contexts.count == 0
    model.trace(ROWS, read=[LATER, "blocks.1.attn.q", PATTERN])
    assert contexts.count == 2  # keys and values of the block that is read, none of the other


def test_notes_are_three_lists_until_they_are_taken() -> None:
    notes, values = Notes(), [torch.ones(2, 3) * i for i in range(4)]
    for i, value in enumerate(values):
        notes.add(value, Rows((2,)), [i])
    assert (len(notes.values), len(notes.rows), len(notes.keys)) == (4, 4, 4)
    assert [(value is mine, keys) for (value, _, keys), mine in zip(notes.take(), values, strict=True)] == [
        (True, [i]) for i in range(4)
    ]
    assert notes.take() == []


@pytest.mark.parametrize("mask", [causal(), full()], ids=str)
def test_rows_of_many_lengths_are_ordered_once_for_queries_and_keys(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, others = Rows((70, 9, 131, 65)), Rows((3, 131, 9, 70))
    heads = Heads(heads=2, groups=2, width=4, value_width=4, dtype=torch.float32, device=torch.device("cpu"),
                  scale=None, softcap=None, sinks=False, dropout=0.0, learns=False)  # fmt: skip
    orders, padded = Calls(monkeypatch, RowGroups, "of"), Calls(monkeypatch, Rows, "padded_places")
    plan = FlatKeys(rows).plan(rows, mask, heads)
    assert plan.queries is plan.flat_keys
    assert plan.queries is not None
    assert orders.count == 1
    assert padded.count == sum(not _equal(piece) for piece in plan.pieces)
    orders.count = 0
    crossed = FlatKeys(others).plan(rows, full(), heads)  # the control: keys of other rows
    assert crossed.queries is not crossed.flat_keys
    assert orders.count == 2


def _equal(piece: Any) -> bool:
    """Whether the rows of a piece are of one length, so that they are not padded."""
    return not hasattr(piece.queries, "places")
