"""The engine: requests that join and leave at any step write what each would alone, by its own settings."""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
import torch

import references
import tiny
import triptych
from triptych.errors import InputError, ProbeError, TextError
from triptych.generate import Engine, LiveRow, Request, Sampling, beam_search, forbid
from triptych.generate.beam import _largest
from triptych.model import Model
from triptych.nn import Transformer
from triptych.probe import Plan, Session, add, zero

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8], [9]]
SOURCES = [[5, 6, 7], [9], [10, 11, 12, 13], [4, 4]]
MODELS = {name: tiny.MODELS[name] for name in ("decoder", "alibi", "encoder-decoder")}
SETTINGS = [
    {"max_new_tokens": 7},
    {"max_new_tokens": 5, "sampling": Sampling(temperature=1.0, seed=4)},
    {"max_new_tokens": 9, "sampling": Sampling(temperature=0.8, top_k=7, repetition_penalty=1.3, seed=1)},
    {"max_new_tokens": 6, "rules": [forbid(range(0, 41, 2))]},
]


def requests(module: Transformer, settings: Sequence[dict[str, Any]] = SETTINGS) -> list[Request]:
    both = module.encoder is not None
    return [
        Request(prompt=prompt, source=source if both else None, number=i, **how)
        for i, (prompt, source, how) in enumerate(zip(PROMPTS, SOURCES, settings, strict=False))
    ]


def run(engine: Engine) -> int:
    """Steps until all rows have left."""
    steps = 0
    while engine.rows:
        engine.step()
        steps += 1
    return steps


def alone(module: Transformer, request: Request) -> list[int]:
    engine = Engine(module)
    (row,) = engine.add(request)
    run(engine)
    return row.new


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("name", MODELS)
def test_requests_of_every_kind_run_together_as_alone(name: str, chunk: int | None) -> None:
    module = MODELS[name]()
    engine = Engine(module, chunk=chunk)
    rows = engine.add(*requests(module))
    run(engine)
    expected = [alone(module, request) for request in requests(module)]
    assert [row.new for row in rows] == expected
    assert [row.reason for row in rows] == ["length"] * 4
    assert len({tuple(row) for row in expected}) == 4
    assert not any(token % 2 == 0 for token in rows[3].new)


@pytest.mark.parametrize("read", [(), ("final", "blocks.0.attn.pattern")], ids=["plain", "read"])
@pytest.mark.parametrize("prompts", [PROMPTS[3:], PROMPTS[1:2], PROMPTS[1:2] * 2, PROMPTS], ids=len)
@pytest.mark.parametrize("name", ["rope", "alibi", "none"])
def test_every_cached_step_is_that_of_a_whole_forward(
    name: str, prompts: list[list[int]], read: tuple[str, ...]
) -> None:
    """Over many steps: a step may go on from what the one before decided, where only the ends of the rows moved."""
    model = Model(tiny.decoder(name))
    for prompt, found in zip(prompts, model.generate(prompts, max_new_tokens=12, read=read), strict=True):
        row = list(prompt)
        for _ in range(12):
            row.append(int(model.logits([row])[0][-1].argmax()))
        assert found.ids == row[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_rows_join_and_leave_between_steps(name: str) -> None:
    """Three slots serve five requests: slots are used again, and no other row notices."""
    module = MODELS[name]()
    first, second, third, fourth = requests(module)
    engine = Engine(module, chunk=3)
    rows = engine.add(first, second)
    engine.step()
    rows += engine.add(third)
    dropped = engine.add(Request(prompt=[1, 2, 3], source=second.source, max_new_tokens=20))
    for _ in range(3):
        engine.step()
    engine.free(dropped)
    assert dropped[0].reason is None
    rows += engine.add(fourth)
    run(engine)
    assert [row.new for row in rows] == [alone(module, request) for request in requests(module)]
    assert len(engine.cache.lengths) == 4
    engine.free([*rows, *dropped])  # of rows that have left nothing is freed twice
    assert sorted(engine.cache.free_slots) == [0, 1, 2, 3]
    assert {row.slot for row in rows} | {dropped[0].slot} == {0, 1, 2, 3}


def test_a_freed_slot_keeps_nothing_of_its_row() -> None:
    module = tiny.encoder_decoder()
    engine = Engine(module)
    (row,) = engine.add(Request(prompt=[0], source=[5, 6, 7, 8, 9], max_new_tokens=5))
    run(engine)
    (again,) = engine.add(Request(prompt=[0], source=[3], max_new_tokens=5))
    run(engine)
    assert again.slot == row.slot
    assert again.new == alone(module, Request(prompt=[0], source=[3], max_new_tokens=5))


@pytest.mark.parametrize("name", MODELS)
def test_all_logits_are_those_of_one_forward(name: str) -> None:
    module = MODELS[name]()
    engine, pieces = Engine(module, chunk=3), dict[LiveRow, list[torch.Tensor]]()
    rows = engine.add(*requests(module, [{"max_new_tokens": 4, "all_logits": i != 1} for i in range(4)]))
    while engine.rows:
        for output in engine.step():
            assert (output.logits is None) == (output.row is rows[1])
            if output.logits is not None:
                pieces.setdefault(output.row, []).append(output.logits)
    for i, row in enumerate(rows):
        if i == 1:
            continue
        target = [row.ids[:-1]]
        whole = Model(module).logits(*([[SOURCES[i]], target] if module.encoder else [target]))[0]
        found = torch.cat(pieces[row])
        assert found.shape == whole.shape
        assert (found.log_softmax(-1) - whole.log_softmax(-1)).abs().max() < 1e-4


def test_plans_belong_to_their_requests() -> None:
    """Rows under different edits and under none share an engine; each trace has its own rows."""
    module = tiny.decoder()
    steer = add("blocks.0.resid_post", torch.linspace(-3, 3, tiny.D))
    plans = [Plan.of(module.spec, ["final"], [steer]), None, Plan.of(module.spec, ["blocks.*.attn.pattern"])]
    sessions = [None if plan is None else Session(plan) for plan in plans]
    engine = Engine(module)
    rows = engine.add(*requests(module, [{"max_new_tokens": 5, "probe": session} for session in sessions]))
    run(engine)
    model = Model(module)
    expected = [
        model.generate([PROMPTS[0]], max_new_tokens=5, edit=steer)[0].ids,
        *(model.generate([p], max_new_tokens=5)[0].ids for p in PROMPTS[1:3]),
    ]
    assert [row.new for row in rows] == expected
    assert expected[0] != model.generate([PROMPTS[0]], max_new_tokens=5)[0].ids
    assert sessions[0].close().items("final") == [0]
    assert sessions[2].close()["blocks.0.attn.pattern"][0].shape == (tiny.H, 9, 9)


# ---------------------------------------------------------------- what a request may say


def test_the_log_probabilities_are_the_models_own() -> None:
    model = Model(tiny.decoder())
    (plain,) = model.generate([PROMPTS[0]], max_new_tokens=4)
    (found,) = model.generate([PROMPTS[0]], max_new_tokens=4, logprobs=3)
    assert plain.logprobs is None
    assert found.logprobs is not None
    assert found.ids == plain.ids
    logits = model.logits([PROMPTS[0] + found.ids[:-1]])[0][-4:].log_softmax(-1)
    for token, told, row in zip(found.ids, found.logprobs, logits, strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [i for i, _ in told.top] == best.indices.tolist()
        assert [p for _, p in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "rules": [forbid([found.ids[0]])]}
    (sampled,) = model.generate([PROMPTS[0]], max_new_tokens=1, logprobs=0, **how)
    assert sampled.logprobs[0].logprob == pytest.approx(float(logits[0][sampled.ids[0]]), abs=1e-4)
    assert sampled.logprobs[0].top == []


def test_rules_are_applied_in_order_and_checked() -> None:
    model, calls = Model(tiny.decoder()), list[Sequence[int]]()

    def only(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        calls.append(list(ids))
        assert logits.shape == (tiny.V,)
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([len(ids)]), 0.0)

    (found,) = model.generate([[5, 6]], max_new_tokens=3, rules=[forbid([1]), only])
    assert found.ids == [2, 3, 4]
    assert calls == [[5, 6], [5, 6, 2], [5, 6, 2, 3]]
    (searched,) = model.generate([[5, 6]], max_new_tokens=3, rules=[only], beams=1)
    assert searched.ids == [2, 3, 4]
    assert "".join(map(str, model.generate([[5, 6]], max_new_tokens=3, rules=[only], temperature=1.0)[0].ids)) == "234"
    wrong: dict[str, Any] = {
        "leave no token": lambda logits, ids: logits - torch.inf,
        r"returned \[2\], not logits \[41\]": lambda logits, ids: logits[:2],
        "returned None": lambda logits, ids: None,
        "not finite": lambda logits, ids: logits * torch.nan,
    }
    for message, rule in wrong.items():
        with pytest.raises(InputError, match=message):
            model.generate([[5, 6]], rules=[rule], max_new_tokens=2)


def test_what_a_request_lacks_is_refused_before_anything_runs() -> None:
    both, single = Engine(tiny.encoder_decoder()), Engine(tiny.decoder())
    with pytest.raises(InputError, match="generates from a source"):
        both.add(Request(prompt=[0]))
    with pytest.raises(InputError, match="takes no source"):
        single.add(Request(prompt=[0], source=[1], max_new_tokens=2))
    with pytest.raises(InputError, match="token id 41 is outside the vocabulary of 41"):
        single.add(Request(prompt=[41], max_new_tokens=2))
    with pytest.raises(TextError, match="stop strings need a tokenizer"):
        single.add(Request(prompt=[1], stop=["x"], max_new_tokens=2))
    with pytest.raises(InputError, match="encoder does not generate"):
        Engine(tiny.encoder())
    assert not single.rows
    assert single.cache.lengths == []


def test_a_stream_and_logits_take_edits() -> None:
    import cli_models
    from test_writing import load as loaded

    model = loaded(cli_models.checkpoint("decoder"))
    steer = add("blocks.0.resid_post", torch.linspace(-9, 9, 24))
    how: dict[str, Any] = {"max_new_tokens": 12}
    plain, edited = ("".join(model.stream("Mill", edit=edit, **how)) for edit in ((), steer))
    assert edited == model.generate(["Mill"], edit=steer, **how)[0].text != plain
    changed, same = (model.logits(["Mill"], edit=edit)[0] for edit in (steer, ()))
    assert torch.equal(changed, model.trace(["Mill"], edit=steer).logits[0])
    assert torch.equal(same, model.logits(["Mill"])[0])
    assert not torch.equal(same, changed)
    nothing = zero("blocks.0.resid_post", items=3)
    with pytest.raises(ProbeError, match="would change nothing"):
        model.logits(["Mill"], edit=nothing)
    with pytest.raises(ProbeError, match="changed nothing"):
        list(model.stream("Mill", edit=nothing, **how))
    assert torch.equal(model.logits(["Mill"], edit=nothing, allow_null=True)[0], same)


def test_a_trace_across_longropes_length_is_that_of_the_last_pass() -> None:
    """Crossing computes a row again with the other factors: each position is there once, with what the last pass
    computed, as in one whole forward; the logits are those that chose the tokens."""
    model = triptych.load(references.saved("llama-longrope")[1])
    prompt, new = [5, 9, 3, 7, 11, 2, 8, 4, 6, 13, 12], 6
    (found,) = model.generate([prompt], max_new_tokens=new, read=["*"])
    (trace, ids) = (found.trace, prompt + found.ids)
    assert len(prompt) < 13 < len(ids) - 1
    whole = model.trace([ids[:-1]], read=["*"])
    for site in whole:
        if site == "logits":
            continue
        assert trace.positions(site) == whole.positions(site), site
        torch.testing.assert_close(trace[site], whole[site], atol=1e-4, rtol=1e-4)
    assert trace.positions("logits") == [tuple(range(len(prompt) - 1, len(ids) - 1))]
    chosen = trace["logits"][0]
    assert chosen.argmax(-1).tolist() == found.ids
    before = model.trace([ids[:12]], read=["logits"])["logits"][0][-1]  # of a row that has not crossed
    torch.testing.assert_close(chosen[11 - (len(prompt) - 1)], before, atol=1e-4, rtol=1e-4)
    assert (chosen[0] - whole["logits"][0][len(prompt) - 1]).abs().max() > 1e-3
    torch.testing.assert_close(chosen[-1], whole["logits"][0][-1], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- beams and work


@pytest.mark.parametrize(("columns", "wanted"), [(64 * 20 + 13, 5), (64 * 20, 20), (64 * 3 + 1, 8), (7, 12)])
def test_the_largest_of_each_row_are_those_of_all_its_columns(columns: int, wanted: int) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    x[0, -1], x[1, :4], x[2, 3:-3] = 9.0, torch.arange(5.0, 9.0), -torch.inf
    values, places = _largest(x, wanted)
    expected = x.topk(min(wanted, columns))
    assert torch.equal(values, expected.values)
    assert torch.equal(x.gather(1, places), values)
    assert all(len(set(row)) == len(row) for row in places.tolist())
    assert not torch.equal(_largest(-x, wanted)[0], expected.values)


def test_beams_of_unequal_requests_are_those_of_each_alone() -> None:
    module = tiny.decoder()
    wanted = requests(module, [{"max_new_tokens": n, "ends": [7, 9]} for n in (6, 3, 5, 4)])
    together = beam_search(Engine(module), wanted, beams=3)
    for request, found in zip(wanted, together, strict=True):
        (expected,) = beam_search(Engine(module), [request], beams=3)
        assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
        assert [beam.logprob for beam in found] == pytest.approx([beam.logprob for beam in expected], abs=1e-4)
        assert all(len(beam.tokens) <= request.max_new_tokens for beam in found)


def frames(engine: Engine) -> list[str]:
    """The functions of the package that one step enters, those of the layers left out."""
    layers = (
        "/nn/attention.py",
        "/nn/feedforward.py",
        "/nn/linear.py",
        "/ops/",
        "/attention/row_plan.py",
        "/attention/mechanisms.py",
    )
    entered: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/src/triptych/" in file and not any(part in file for part in layers):
            entered.append(f"{file.partition('/src/triptych/')[2]}:{frame.f_code.co_name}")

    sys.setprofile(watch)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.usefixtures("unchecked")
def test_a_greedy_step_enters_few_functions_of_the_engine() -> None:
    engine = Engine(tiny.decoder())
    engine.add(Request(prompt=PROMPTS[0], max_new_tokens=20))
    for _ in range(3):
        engine.step()
    own = [name for name in frames(engine) if name.startswith("generate/")]
    assert len(own) <= 4, own


def test_an_engine_follows_a_cast_of_its_model() -> None:
    module = tiny.decoder()
    engine = Engine(module, reuse=True)
    engine.add(Request(prompt=[3, 1, 4], max_new_tokens=4))
    run(engine)
    engine.add(Request(prompt=[3, 1, 4], max_new_tokens=4))
    engine.step()
    module.to(torch.float64)
    with pytest.raises(InputError, match=r"moved or cast while rows run.*reset\(\)"):
        engine.add(Request(prompt=[5], max_new_tokens=4))
    engine.reset()
    (row,) = engine.add(Request(prompt=[3, 1, 4], max_new_tokens=4))
    run(engine)
    assert engine.cache.stores[0].form.dtype == torch.float64
    module.to(torch.float32)
    (again,) = engine.add(Request(prompt=[3, 1, 4], max_new_tokens=4))
    run(engine)
    assert engine.cache.stores[0].form.dtype == torch.float32
    assert again.new == row.new
