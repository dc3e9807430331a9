"""What is read and edited while beams search and guesses are verified: that of one forward over the text that is
returned."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import references
import tiny
import triptych
from native_models import llama, needs_native
from test_engine import PROMPTS, SOURCES, alone
from test_native_step import packed
from test_speculation import Oracle, run
from triptych.errors import InputError, ProbeError
from triptych.generate import Engine, LiveRow, PromptLookup, Request, Speculation, beam_search
from triptych.model import Model
from triptych.nn import Transformer
from triptych.probe import Edit, Plan, Read, Session, Statistics, Trace, Where, add, sites

MODELS = {name: tiny.MODELS[name] for name in ("decoder", "learned", "alibi", "mixture", "encoder-decoder")}
SHORT = ["decoder", *(pytest.param(name, marks=pytest.mark.heavy) for name in MODELS if name != "decoder")]
NEW, BEAMS = 7, 3
INSIDE = ("scores", "pattern", "k_ctx", "v_ctx")  # of an attention, which native steps do not keep


def steps_of(module: Transformer) -> list[str]:
    """The sites that native steps keep."""
    return [name for name in sites(module.spec) if not name.endswith(INSIDE) and not name.startswith("encoder.")]


def inputs_of(model: Model) -> list[list[int]]:
    return SOURCES if model.module.encoder is not None else PROMPTS


def whole(model: Model, written: Sequence[Sequence[int]], read: Any, **how: Any) -> Trace:
    """One forward over the prompts with what was written after them, less the last token, which never ran."""
    if model.module.encoder is None:
        return model.trace([[*p, *ids][:-1] for p, ids in zip(PROMPTS, written, strict=True)], read=read, **how)
    start = model.spec.ids.start
    return model.trace(SOURCES, [[start, *ids][:-1] for ids in written], read=read, **how)


def apart(cached: Trace | None, full: Trace) -> float:
    """The largest difference between a trace of a generation and one of a full forward; inf where positions differ."""
    assert set(cached) == set(full)
    worst = 0.0
    for site in full:
        for row, (a, b) in enumerate(zip(cached[site], full[site], strict=True)):
            ours, theirs = cached.positions(site)[row], full.positions(site)[row]
            if len(ours) != len(theirs):  # logits of the positions that chose a token, contexts of a window
                if site != "logits" and not site.endswith("_ctx"):
                    return float("inf")
                b, theirs = b[-len(ours) :], theirs[-len(ours) :]
            if ours != theirs or a.shape != b.shape:
                return float("inf")
            worst = max([worst, *((a - b).abs()[a != b].tolist())])
    return worst


@pytest.mark.parametrize("executor", ["auto", "modules"])
@pytest.mark.parametrize("name", SHORT)
def test_beams_record_what_one_forward_of_the_text_records(name: str, executor: Any) -> None:
    model = Model(MODELS[name]())
    model.executor = executor
    plain = model.generate(inputs_of(model), max_new_tokens=NEW, beams=BEAMS)
    for read in ("*", steps_of(model.module)):
        found = model.generate(inputs_of(model), max_new_tokens=NEW, beams=BEAMS, read=read)
        assert [one.ids for one in found] == [one.ids for one in plain]
        assert apart(found[0].trace, whole(model, [one.ids for one in found], read)) < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("executor", ["auto", "modules"])
def test_a_broken_path_of_beams_is_found(name: str, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows that are copied do not take over what their parent read, or all read under the key of the request."""
    model = Model(MODELS[name]())
    model.executor = executor
    read = steps_of(model.module)
    branch = LiveRow.branch
    broken: list[Callable[[LiveRow], None]] = [
        lambda row: None,
        lambda row: (branch(row), setattr(row, "path", (row.path[0], row.path[-1])))[0],
    ]
    for wrong in broken:
        monkeypatch.setattr(LiveRow, "branch", wrong)
        found = model.generate(inputs_of(model), max_new_tokens=NEW, beams=BEAMS, read=read)
        assert apart(found[0].trace, whole(model, [one.ids for one in found], read)) > 1e-2


@pytest.mark.heavy
def test_reduced_and_chosen_reads_under_beams() -> None:
    model = Model(tiny.decoder())
    reads = [
        Read("blocks.0.attn.z", reduce="mean"), Read("blocks.1.mlp.act", reduce="norm", at=slice(2, None)),
        Read("blocks.1.attn.pattern", reduce=Statistics(top=1)), Read("blocks.0.attn.scores", heads=[1]),
        Read("blocks.1.attn.k_ctx", items=1), Read("final", dtype="bf16", items=[0, 2]),
    ]  # fmt: skip
    found = model.generate(PROMPTS, max_new_tokens=NEW, beams=BEAMS, read=reads)
    full = whole(model, [one.ids for one in found], reads)
    assert {site: found[0].trace.items(site) for site in full} == {site: full.items(site) for site in full}
    for site in full:
        if site != "final" and not site.endswith("top_keys"):
            for a, b in zip(found[0].trace[site], full[site], strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=site)


@pytest.mark.heavy
def test_beams_that_cross_longropes_length() -> None:
    model = triptych.load(references.saved("llama-longrope")[1])
    prompt = [5, 9, 3, 7, 11, 2, 8, 4, 6, 13, 12]
    read = [name for name in sites(model.spec) if name != "logits"]
    (found,) = model.generate([prompt], max_new_tokens=6, beams=BEAMS, read=read)
    assert apart(found.trace, model.trace([prompt + found.ids[:-1]], read=read)) < 1e-4


def test_hypotheses_that_end_early_keep_their_own_values() -> None:
    """With many ids that end a row, hypotheses finish at different steps, and the rows they came from go on."""
    module = tiny.decoder()
    model = Model(module)
    session = Session(Plan.of(module.spec, "*"))
    wanted = [
        Request(prompt=prompt, max_new_tokens=9, ends=list(range(0, 41, 5)), number=i, probe=session)
        for i, prompt in enumerate(PROMPTS)
    ]
    best = [beams[0].tokens for beams in beam_search(Engine(module), wanted, beams=BEAMS)]
    assert len({len(tokens) for tokens in best}) > 1
    assert apart(session.close(), whole(model, best, "*")) < 1e-4


def test_a_search_keeps_no_contexts_that_no_row_needs() -> None:
    """Each step leaves a whole context; those of earlier steps and of hypotheses that were dropped are let go."""
    module = tiny.decoder()
    session = Session(Plan.of(module.spec, "blocks.0.attn.k_ctx"))
    request = Request(prompt=PROMPTS[0], max_new_tokens=20, probe=session)
    most = 0

    class Watched(Engine):
        def logits(self, *how: Any, **more: Any) -> Tensor:
            nonlocal most
            out = super().logits(*how, **more)
            most = max(most, *(len(rows) for rows in session.trace.records.values()))
            return out

    beam_search(Watched(module), [request], beams=BEAMS)
    assert most <= 3 * BEAMS
    assert list(session.close().records["blocks.0.attn.k_ctx"]) == [0]


def test_the_bytes_of_all_beams_are_counted() -> None:
    model = Model(tiny.decoder())
    read = "blocks.*.resid_post"
    new = 4 * tiny.D * len(model.spec.stacks["decoder"].blocks) * 8
    with pytest.raises(ProbeError, match=f"would keep {new * (len(PROMPTS[0]) + 5 * 8) // 8:,} bytes"):
        model.generate(PROMPTS[:1], max_new_tokens=8, beams=5, read=read, max_bytes=1)


# ---------------------------------------------------------------- edits under beams

STEER = torch.linspace(-2, 2, tiny.D)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["decoder", "learned", "encoder-decoder"])
def test_steering_under_beams_is_in_every_token(name: str) -> None:
    """The records and the score of the best hypothesis are those of one steered forward over it."""
    model = Model(MODELS[name]())
    stack = "decoder." if model.module.encoder is not None else ""
    edit = add(f"{stack}blocks.0.resid_post", STEER)
    read = [f"{stack}blocks.0.resid_post", f"{stack}final", "logits"]
    found = model.generate(inputs_of(model), max_new_tokens=NEW, beams=BEAMS, edit=edit, read=read)
    plain = model.generate(inputs_of(model), max_new_tokens=NEW, beams=BEAMS)
    assert [one.ids for one in found] != [one.ids for one in plain]
    written = [one.ids for one in found]
    assert apart(found[0].trace, whole(model, written, read, edit=edit)) < 1e-4
    assert apart(found[0].trace, whole(model, written, read)) > 1e-2
    with pytest.raises(ProbeError, match="changed nothing"):
        model.generate(inputs_of(model), max_new_tokens=2, beams=2, edit=add(f"{stack}final", torch.zeros(tiny.D)))


def test_an_edit_of_one_item_reaches_all_its_beams_and_no_other() -> None:
    model = Model(tiny.decoder())
    seen: set[int] = set()

    def steer(value: Tensor, where: Where) -> Tensor:
        seen.add(where.item)
        return value + STEER

    found = model.generate(PROMPTS, max_new_tokens=NEW, beams=BEAMS, edit=Edit("blocks.0.resid_post", steer, items=1))
    plain = model.generate(PROMPTS, max_new_tokens=NEW, beams=BEAMS)
    (alone_,) = model.generate([PROMPTS[1]], max_new_tokens=NEW, beams=BEAMS, edit=add("blocks.0.resid_post", STEER))
    assert seen == {1}
    assert [one.ids for one in found] == [plain[0].ids, alone_.ids, *(one.ids for one in plain[2:])]


# ---------------------------------------------------------------- guesses


def guessed(
    module: Transformer, read: Any, edit: Sequence[Edit] = (), *, wrong: float = 0.5, executor: Any = "auto",
    draft: Any = None,
) -> tuple[Trace, list[list[int]], list[LiveRow]]:  # fmt: skip
    """Texts that were written with guesses, and what was read."""
    plan, session = Plan.of(module.spec, read, edit), Session(Plan.of(module.spec, read, edit))
    how: list[dict[str, Any]] = [
        {"prompt": prompt, "source": source if module.encoder else None, "number": i, "max_new_tokens": 12 + i}
        for i, (prompt, source) in enumerate(zip(PROMPTS, SOURCES, strict=True))
    ]
    expected = [alone(module, Request(**one, probe=Session(plan, allow_null=True) if edit else None)) for one in how]
    oracle = Oracle([[*one["prompt"], *ids] for one, ids in zip(how, expected, strict=True)], wrong)
    speculation = Speculation(oracle if draft is None else draft, 3, adaptive=False)
    engine = Engine(module, speculation=speculation, executor=executor)
    rows = engine.add(*(Request(**one, probe=session) for one in how))
    run(engine)
    assert [row.new for row in rows] == expected
    assert sum(row.drafted for row in rows) > sum(row.accepted for row in rows) > 0
    return session.close(), expected, rows


@pytest.mark.parametrize("executor", ["auto", "modules"])
@pytest.mark.parametrize("name", SHORT[:-1])
def test_guesses_leave_what_one_forward_of_the_text_records(name: str, executor: Any) -> None:
    module = MODELS[name]()
    for read in ("*", steps_of(module)):
        trace, written, _ = guessed(module, read, executor=executor)
        assert apart(trace, whole(Model(module), written, read)) < 1e-4


def test_guesses_beside_a_source() -> None:
    module = tiny.encoder_decoder()
    model = Model(module)
    trace, written, rows = guessed(module, "*")
    targets = [[*row.request.prompt, *ids][:-1] for row, ids in zip(rows, written, strict=True)]
    assert apart(trace, model.trace(SOURCES, targets, read="*")) < 1e-4


@needs_native
def test_guesses_of_packed_weights_leave_the_same_bits() -> None:
    """A row's vectors do not depend on what else runs in its step, so that those of accepted guesses are the same."""
    module = packed()
    read = steps_of(module)
    trace, _, rows = guessed(module, read)
    session = Session(Plan.of(module.spec, read))
    engine = Engine(module)
    engine.add(*(Request(**{**vars(row.request), "probe": session}) for row in rows))
    run(engine)
    assert engine.why_modules is None
    plain = session.close()
    for site in plain:
        assert trace.positions(site) == plain.positions(site)
        assert all(torch.equal(a, b) for a, b in zip(trace[site], plain[site], strict=True)), site


@pytest.mark.parametrize("executor", ["auto", "modules"])
def test_values_of_wrong_guesses_would_show(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.decoder()
    read = steps_of(module)
    monkeypatch.setattr(Session, "cut", lambda *how: None)
    trace, written, _ = guessed(module, read, executor=executor)
    assert apart(trace, whole(Model(module), written, read)) > 1e-2


@pytest.mark.heavy
@pytest.mark.parametrize("edited", [False, True])
def test_reductions_leave_wrong_guesses_out(edited: bool) -> None:
    """Sums over positions too, of patterns that are there since they were edited and of those computed beside."""
    module = tiny.decoder()
    edits = [Edit("blocks.0.attn.pattern", lambda p, where: p * 0.5)] if edited else []
    reads = [
        Read("blocks.1.attn.z", reduce="mean"), Read("blocks.0.attn.pattern", reduce="mean"),
        Read("blocks.0.mlp.out", reduce="norm"), Read("blocks.1.attn.v_ctx", reduce="mean"),
        Read("blocks.0.attn.z", reduce="mean_heads", at=slice(3, None)),
    ]  # fmt: skip
    statistics = Read("blocks.0.attn.pattern", reduce=Statistics(top=1))
    for read in (reads, statistics):
        trace, written, _ = guessed(module, read, edits)
        full = whole(Model(module), written, read, edit=edits)
        for site in full:
            if not site.endswith("top_keys"):
                for a, b in zip(trace[site], full[site], strict=True):
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=site)


@pytest.mark.parametrize("name", ["decoder", "learned"])
def test_edits_under_guesses_are_exact(name: str) -> None:
    """The forward that verifies runs with the edits; `guessed` compares the ids with those of single steps."""
    module = MODELS[name]()
    edits = [add("blocks.0.resid_post", STEER), Edit("blocks.1.attn.k_ctx", lambda k, where: k * 0.5)]
    read = ["blocks.0.resid_post", "final"]
    trace, written, _ = guessed(module, read, edits)
    assert apart(trace, whole(Model(module), written, read, edit=edits)) < 1e-4


def test_a_draft_model_is_not_edited() -> None:
    """A draft that is the model itself guesses unsteered text, which is mostly wrong; what is written is steered."""
    model, edit = Model(tiny.decoder()), add("blocks.1.resid_post", STEER)
    read = ["blocks.1.resid_post", "final"]
    plain = model.generate(PROMPTS, max_new_tokens=12, edit=edit)
    found = model.generate(PROMPTS, max_new_tokens=12, edit=edit, read=read, draft=model)
    assert [one.ids for one in found] == [one.ids for one in plain]
    drafted, accepted = (sum(getattr(one, name) for one in found) for name in ("drafted", "accepted"))
    assert 0 <= accepted < drafted
    assert apart(found[0].trace, whole(model, [one.ids for one in found], read, edit=edit)) < 1e-4


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_probe_and_no_speculation_is_one_line() -> None:
    module = llama()
    for wrong in (3, "blocks.0.attn.z", Plan.of(module.spec, "final")):
        with pytest.raises(InputError, match=r"^probe=.* must be a Session"):
            Request(prompt=[1], probe=wrong)  # type: ignore[arg-type]
    for wrong in (5, "ngram", PromptLookup()):
        with pytest.raises(InputError, match=r"^speculation=.* must be a Speculation$"):
            Engine(module, speculation=wrong)  # type: ignore[arg-type]
