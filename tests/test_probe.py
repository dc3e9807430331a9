"""Reading never changes a bit, an edit means the same cached and whole, and nothing is silent."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from triptych import nn
from triptych.attention import Rows, attend_reference, disentangled_bias
from triptych.errors import ProbeError
from triptych.model import Model
from triptych.probe import Edit, Plan, Read, Session, Trace, Where, add, put, sites, zero
from triptych.probe.trace_size import trace_size

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8]]
SOURCES = [[5, 6, 7], [9], [10, 11, 12, 13]]
CPU = torch.device("cpu")
MODELS = {name: make for name, make in tiny.MODELS.items() if name not in ("learned", "attention only")}


def run(
    module: nn.Transformer, plan: Plan | None, rows: list[list[int]] = ROWS
) -> tuple[list[torch.Tensor], Session | None]:
    ids, where = nn.flat(rows, CPU)
    source = nn.flat(SOURCES[: len(rows)], CPU) if module.spec.layout == "encoder-decoder" else None
    session = None if plan is None else Session(plan)
    taps = nn.NO_TAPS if session is None else session.taps
    with torch.inference_mode():
        out = module.logits(nn.Batch(inputs=ids, rows=where, source=source, taps=taps))
    return where.split(out), session


def traced(module: nn.Transformer, *read: Read | str, edit: tuple[Edit, ...] = ()) -> Trace:
    out, session = run(module, Plan.of(module.spec, read, edit))
    trace = session.close()
    trace.logits = out
    return trace


@pytest.mark.parametrize("name", MODELS)
def test_every_site_can_be_read_and_reading_changes_no_bit(name: str) -> None:
    module = MODELS[name]()
    plain, _ = run(module, None)
    known = sites(module.spec)
    for site in known:
        trace = traced(module, site)
        assert all(torch.equal(a, b) for a, b in zip(trace.logits, plain, strict=True)), site
    everything = traced(module, "*")
    assert set(everything) == set(known)
    assert all(torch.equal(a, b) for a, b in zip(everything.logits, plain, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_bill_is_what_is_kept(name: str) -> None:
    module = MODELS[name]()
    both = module.spec.layout == "encoder-decoder"
    for site in sites(module.spec):
        plan = Plan.of(module.spec, [site])
        _, session = run(module, plan)
        lengths, sources = [len(r) for r in ROWS], [len(r) for r in SOURCES] if both else []
        assert trace_size(plan, lengths, sources).total == session.close().nbytes, site


@pytest.mark.parametrize("name", MODELS)
def test_every_site_is_alive(name: str) -> None:
    """Zeroing any site, or shifting scores, changes the logits."""
    module = MODELS[name]()
    plain, _ = run(module, None)
    for site in sites(module.spec):
        change = Edit(site, lambda x, where: x * 0.5) if site.endswith("scores") else zero(site)
        trace = traced(module, edit=(change,))
        assert not all(torch.equal(a, b) for a, b in zip(trace.logits, plain, strict=True)), site


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_sites_satisfy_their_equations(name: str) -> None:
    module = MODELS[name]()
    trace = traced(module, "*")
    prefix = "decoder." if name == "encoder-decoder" else ""
    stack = module.decoder or module.encoder
    for i, block in enumerate(stack.blocks):
        at = f"{prefix}blocks.{i}."
        names = ["attn", "cross"] if block.cross is not None else ["attn"]
        for row in range(len(ROWS)):
            get = {site.removeprefix(at): trace[site][row] for site in trace if site.startswith(at)}
            for part in names if name != "linear" else ():
                attn = getattr(block, part)
                spec = attn.spec
                pattern, v = get[f"{part}.pattern"], get[f"{part}.v_ctx"]
                group = torch.arange(spec.heads) * spec.kv_heads // spec.heads
                z = torch.einsum("hts,shv->thv", pattern, v[:, group])
                assert torch.allclose(get[f"{part}.z"], z, atol=1e-5), f"{at}{part}.z"
                assert torch.allclose(pattern.sum(-1), torch.ones(()), atol=1e-5)
                assert torch.allclose(torch.softmax(get[f"{part}.scores"], -1), pattern, atol=1e-6)
                scale = spec.scale or 1 / math.sqrt(spec.head_width)
                raw = torch.einsum("thk,shk->hts", get[f"{part}.q_rot"], get[f"{part}.k_ctx"][:, group]) * scale
                if name == "decoder" or part == "cross":  # no bias
                    seen = get[f"{part}.scores"].isfinite()
                    assert torch.allclose(get[f"{part}.scores"][seen], raw[seen], atol=1e-5)
                assert torch.allclose(get[f"{part}.k_ctx"], get[f"{part}.k_rot"])
            out = get["attn.out"] + (get["cross.out"] if "cross" in names else 0)
            if name != "encoder":  # pre-norm, or parallel: the stream is a sum
                assert torch.allclose(get["resid_post"], get["resid_pre"] + out + get["mlp.out"], atol=1e-5)
            if name == "mixture":
                assert torch.allclose(block.mlp.router(get["mlp.in"]), get["mlp.router"], atol=1e-5)
                continue
            if name != "encoder":
                assert torch.allclose(get["resid_mid"], get["resid_pre"] + out, atol=1e-5)
            assert torch.allclose(block.mlp.down(get["mlp.act"]), get["mlp.out"], atol=1e-5)


def generated(
    module: nn.Transformer, plan: Plan, rows: list[list[int]], new: int
) -> tuple[list[list[int]], list[torch.Tensor], Trace]:
    """Greedy rows, the logits that chose each new token, and the trace of a cached generation."""
    session = Session(plan)
    sources = SOURCES[: len(rows)] if module.spec.layout == "encoder-decoder" else None
    engine = tiny.engine(module, rows, sources, probe=session)
    chosen: list[list[torch.Tensor]] = [[] for _ in rows]
    for _ in range(new):
        out = engine.logits()
        for i, token in enumerate(out.argmax(-1).tolist()):
            chosen[i].append(out[i])
            engine.rows[i].ids.append(token)
    return [row.ids for row in engine.rows], [torch.stack(c) for c in chosen], session.close()


STEER = torch.linspace(-1, 1, tiny.D)
EDITS = {
    "resid": add("blocks.1.resid_pre", STEER, at=4),
    "head": zero("blocks.0.attn.z", heads=2),
    "k_rot": Edit("blocks.0.attn.k_rot", lambda k, w: k * 2, at=[1, 5]),
    "k_ctx": Edit("blocks.0.attn.k_ctx", lambda k, w: k.flip(-1), at=2),
    "v_ctx": zero("blocks.1.attn.v_ctx", at=slice(0, 3), heads=1),
    "pattern": Edit("blocks.1.attn.pattern", lambda p, w: p * 0.3, at=slice(2, 6), heads=[0, 4]),
    "scores": Edit("blocks.0.attn.scores", lambda s, w: s * 3, at=6),
    "mlp": zero("blocks.0.mlp.act", at=[0, 3, 7]),
    "item": add("blocks.0.mlp.out", STEER, items=1),
}


@pytest.mark.parametrize("model", ["decoder", "alibi", "encoder-decoder"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_means_the_same_cached_and_whole(edit: str, model: str) -> None:
    module = MODELS[model]()
    prefix = "decoder." if model == "encoder-decoder" else ""
    change = Edit(**{**vars(EDITS[edit]), "site": prefix + EDITS[edit].site})
    rows, new = [r[:3] for r in ROWS], 5
    grown, chosen, _ = generated(module, Plan.of(module.spec, [], [change]), rows, new)
    whole, session = run(module, Plan.of(module.spec, [], [change]), [r[:-1] for r in grown])
    session.close()
    for logits, steps in zip(whole, chosen, strict=True):
        assert torch.allclose(logits[-new:].log_softmax(-1), steps.log_softmax(-1), atol=1e-4)
    plain, _ = run(module, None, [r[:-1] for r in grown])
    assert not all(torch.allclose(a[-new:], b, atol=1e-3) for a, b in zip(plain, chosen, strict=True))


@pytest.mark.parametrize("model", ["decoder", "alibi", "encoder-decoder"])
def test_records_mean_the_same_cached_and_whole(model: str) -> None:
    module = MODELS[model]()
    plan = Plan.of(module.spec, ["*"])
    grown, _, cached = generated(module, plan, [r[:3] for r in ROWS], 5)
    _, session = run(module, plan, [r[:-1] for r in grown])
    whole = session.close()
    for site in whole:
        for i, (a, b) in enumerate(zip(whole[site], cached[site], strict=True)):
            if site == "logits":
                a = a[-b.shape[0] :]
            elif model == "decoder" and "blocks.0.attn" in site and site.endswith("_ctx"):
                assert whole.positions(site)[i][-4:] == cached.positions(site)[i][-4:]  # a window keeps what it needs
                a, b = a[-4:], b[-4:]
            elif site != "logits":
                assert whole.positions(site)[i] == cached.positions(site)[i], site
            assert torch.allclose(a, b, atol=1e-4), site


def test_an_edit_reaches_only_its_layer_row_and_position() -> None:
    module = tiny.decoder()
    plain = traced(module, "blocks.*.resid_post")
    changed = traced(module, "blocks.*.resid_post", edit=(add("blocks.0.mlp.out", STEER, items=2, at=3),))
    for row in range(3):
        a, b = plain["blocks.0.resid_post"][row], changed["blocks.0.resid_post"][row]
        moved = (a != b).any(-1).nonzero().flatten().tolist()
        assert moved == ([3] if row == 2 else [])
    assert torch.allclose(changed["blocks.0.resid_post"][2][3] - plain["blocks.0.resid_post"][2][3], STEER, atol=1e-5)


def test_an_edited_pattern_is_the_reference() -> None:
    module = tiny.decoder(blocks=1)
    uniform = Edit("blocks.0.attn.pattern", lambda p, w: torch.full_like(p, 1 / p.shape[-1]))
    trace = traced(module, "blocks.0.attn.z", "blocks.0.attn.v", edit=(uniform,))
    v = trace["blocks.0.attn.v"][0][:, torch.arange(tiny.H) * tiny.G // tiny.H]
    assert torch.allclose(trace["blocks.0.attn.z"][0], v.mean(0).expand(8, -1, -1), atol=1e-5)


def test_the_recorded_pattern_is_the_references() -> None:
    module = tiny.decoder(blocks=1)
    trace = traced(module, *(f"blocks.0.attn.{leaf}" for leaf in ("q_rot", "k_ctx", "v_ctx", "pattern")))
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, x: torch.Tensor) -> torch.Tensor:
        kept[name] = x
        return x

    q, k, v = (trace[f"blocks.0.attn.{leaf}"][0].transpose(0, 1)[None] for leaf in ("q_rot", "k_ctx", "v_ctx"))
    from triptych.spec import causal

    attend_reference(q, k, v, mask=causal(), hook=keep)
    assert torch.allclose(kept["pattern"][0], trace["blocks.0.attn.pattern"][0], atol=1e-6)


def test_reads_select_items_positions_and_heads() -> None:
    module = tiny.decoder()
    trace = traced(module, Read("blocks.0.attn.pattern", items=[0, 2], at=slice(1, 3), heads=[5, 1]))
    assert [tuple(x.shape) for x in trace["blocks.0.attn.pattern"]] == [(2, 2, 8), (2, 2, 5)]
    assert trace.items("blocks.0.attn.pattern") == [0, 2]
    assert trace.positions("blocks.0.attn.pattern") == [(1, 2), (1, 2)]
    full = traced(module, "blocks.0.attn.pattern")["blocks.0.attn.pattern"][0]
    torch.testing.assert_close(trace["blocks.0.attn.pattern"][0], full[[1, 5]][:, 1:3])


def test_what_the_function_is_told() -> None:
    told: list[Where] = []

    def look(x: torch.Tensor, where: Where) -> torch.Tensor:
        told.append(where)
        return x + 1

    traced(tiny.decoder(), edit=(Edit("blocks.1.attn.z", look, items=1, at=[0, 2, 99]),))
    assert told == [Where("blocks.1.attn.z", 1, (0, 2))]


def test_patching_in_one_rows_own_value_changes_nothing_and_that_is_said() -> None:
    module = tiny.decoder()
    value = traced(module, "blocks.0.resid_post")["blocks.0.resid_post"][0]
    with pytest.raises(ProbeError, match=r"blocks\.0\.resid_post changed nothing") as caught:
        traced(module, edit=(put("blocks.0.resid_post", value, items=0),))
    assert isinstance(caught.value.trace, Trace)


@pytest.mark.parametrize(
    ("read", "edit", "message"),
    [
        (["blocks.0.attn.patern"], [], r"no site 'blocks.0.attn.patern'.*did you mean 'blocks.0.attn.pattern'"),
        (["blocks.7.resid_pre"], [], "no site 'blocks.7.resid_pre'.*blocks are 0 to 1"),
        ([Read("blocks.0.attn.z", heads=6)], [], "heads 0..5, not 6"),
        ([Read("blocks.0.resid_pre", heads=0)], [], "has no heads"),
        ([], [zero("blocks.0.cross.z")], "no site"),
    ],
)
def test_unknown_sites_and_heads_are_refused_before_running(read: list, edit: list, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ProbeError, match=message):
        Plan.of(tiny.decoder().spec, read, edit)


def test_what_never_fires_is_an_error() -> None:
    with pytest.raises(ProbeError, match=r"never fired: blocks\.0\.resid_pre"):
        traced(tiny.decoder(), Read("blocks.0.resid_pre", at=63))
    with pytest.raises(ProbeError, match="changed nothing"):
        traced(tiny.decoder(), edit=(zero("blocks.0.resid_pre", items=9),))
    with pytest.raises(ProbeError, match="returned"):
        traced(tiny.decoder(), edit=(Edit("blocks.0.resid_pre", lambda x, w: x[:1]),))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda value: value, r"its function takes \(value\); it is called with \(value, where\)"),
        (lambda value, where, more: value, r"its function takes \(value, where, more\)"),
        (lambda value, *, where: value, r"its function takes \(value, \*, where\)"),
        (lambda: 0, r"its function takes \(\)"),
        (torch.zeros(3), "is no function of"),
    ],
)
def test_a_function_of_other_arguments_is_refused_before_anything_runs(
    function: Any, message: str, unchecked: None
) -> None:
    with pytest.raises(ProbeError, match=rf"the edit at blocks\.0\.resid_pre: .*{message}"):
        Edit("blocks.0.resid_pre", function)


@pytest.mark.parametrize("function", [lambda *both: both[0], lambda value, where, scale=2: value * scale, torch.add])
def test_a_function_that_two_arguments_fit_is_taken(function: Any) -> None:
    Edit("blocks.0.resid_pre", function)


@pytest.mark.parametrize(
    ("site", "number"),
    [
        ("blocks.0.resid_pre", float("nan")),
        ("blocks.0.attn.z", float("inf")),
        ("blocks.0.mlp.out", -float("inf")),
        ("blocks.0.attn.scores", float("nan")),
        ("blocks.0.attn.pattern", float("nan")),
        ("logits", float("nan")),
    ],
)
def test_an_edit_that_gives_nan_is_named(site: str, number: float) -> None:
    """In a trace, in logits and in a generation alike; the weights were blamed, or nothing."""
    model, edit = Model(tiny.decoder()), Edit(site, lambda value, where: torch.full_like(value, number))
    for run in (
        lambda: model.trace(ROWS, edit=edit),
        lambda: model.logits(ROWS, edit=edit),
        lambda: model.generate(ROWS, edit=edit, max_new_tokens=2),
    ):
        with pytest.raises(ProbeError, match=rf"the edit at {site} returned \d+ numbers that are NaN or inf for row 0"):
            run()


def test_which_of_several_edits_gives_nan_is_said() -> None:
    broken = Edit("blocks.0.attn.scores", lambda value, where: 0 * value)  # 0 · -inf, where keys are hidden
    with pytest.raises(ProbeError, match=r"blocks\.0\.attn\.scores \(number 2 of those there\) returned"):
        Model(tiny.decoder()).logits(ROWS, edit=[add("blocks.0.attn.scores", torch.ones(1)), broken])


def test_an_edit_may_hide_keys_and_tokens() -> None:
    model = Model(tiny.decoder())
    for site in ("blocks.0.attn.scores", "logits"):
        hide = Edit(site, lambda value, where: value.index_fill(-1, torch.tensor([0]), -torch.inf))
        assert model.logits([[3, 1, 4, 1, 5]], edit=hide)


def test_the_stack_name_may_be_given_where_there_is_one() -> None:
    plan = Plan.of(tiny.decoder().spec, ["decoder.blocks.*.resid_pre"])
    assert list(plan.reads) == ["blocks.0.resid_pre", "blocks.1.resid_pre"]


def test_keys_written_under_edits_are_not_read_without_them() -> None:
    module = tiny.decoder()
    session = Session(Plan.of(module.spec, [], [zero("blocks.0.attn.z")]))
    engine = tiny.engine(module, ROWS, probe=session)
    engine.logits()
    again = Session(Plan.of(module.spec, [], [zero("blocks.0.attn.z")]))  # the same edits in other objects
    for probe, message in ((again, None), (Session(Plan.of(module.spec, ["logits"])), "written under edits")):
        for row in engine.rows:
            row.ids.append(1)
            row.request = replace(row.request, probe=probe)
        engine.reorder(engine.rows)
        if message is None:
            engine.logits()
        else:
            with pytest.raises(ProbeError, match=message):
                engine.logits()


@pytest.mark.parametrize("site", ["q", "q_rot", "k", "k_rot", "k_ctx"])
def test_an_edit_of_q_or_k_is_felt_by_what_distances_add(site: str) -> None:
    """Without q a query has only what distances ask of keys, without k only what it asks of distances."""
    module = tiny.encoder("disentangled")
    edited = traced(module, "blocks.0.attn.*", edit=(zero(f"blocks.0.attn.{site}"),))
    layer, part = module.encoder.blocks[0].attn, module.encoder.kinds["self"].position
    for item, row in enumerate(ROWS):
        q, k = (edited[f"blocks.0.attn.{leaf}"][item].transpose(0, 1)[None] for leaf in ("q_rot", "k_ctx"))
        table, row_of = part.reached(Rows((len(row),)))
        at = torch.arange(len(row))
        leaf = "pos_q" if site.startswith("q") else "pos_k"
        left = disentangled_bias(q, k, row_of(at, at), **{leaf: part.vectors(table, layer)[leaf]})[0]
        torch.testing.assert_close(edited["blocks.0.attn.scores"][item], left, atol=1e-5, rtol=1e-5)
        assert left.abs().max() > 0.1
