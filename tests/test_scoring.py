"""Log-probabilities of ids that are given: the engine's are those of plain forwards, however rows are cut, shared and
mixed with rows that generate."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import tiny
from triptych.errors import InputError
from triptych.generate import Engine, Executor, Request, Scheduler, TokenLogprobs, score
from triptych.model import Model
from triptych.nn import Transformer
from triptych.probe import Plan, Session, add

MODELS = {name: tiny.MODELS[name] for name in ("decoder", "alibi", "encoder-decoder")}
COUNTS = (1, 4, 2, 5)  # ids of the choices of one question
TOLERANCE = 3e-5


def questions(module: Transformer, seed: int = 0) -> list[Request]:
    """Six questions of four choices each, whose ids are scored, in an order that mixes them."""
    draw, start = random.Random(seed), 0
    requests = []
    for _ in range(6):
        context = [draw.randrange(2, tiny.V) for _ in range(draw.randrange(9, 30))]
        for count in COUNTS:
            choice = [draw.randrange(2, tiny.V) for _ in range(count)]
            if module.encoder is not None:
                row = Request(prompt=[start, *choice], source=context, score_from=1, max_new_tokens=0, logprobs=1)
            else:
                row = Request(prompt=context + choice, score_from=len(context), max_new_tokens=0, logprobs=1)
            requests.append(row)
    draw.shuffle(requests)
    return requests


def expected(module: Transformer, request: Request) -> list[tuple[float, int]]:
    """The log-probability of each scored id and the likeliest id there, by one plain forward of the row alone."""
    ids, source = list(request.prompt), request.source
    logits = Model(module).logits([ids] if source is None else [source], None if source is None else [ids])[0]
    assert request.score_from is not None
    scores = logits[request.score_from - 1 : -1].double().log_softmax(-1)
    scored = zip(scores, ids[request.score_from :], strict=True)
    return [(float(row[token]), int(row.argmax())) for row, token in scored]


def furthest(module: Transformer, requests: Sequence[Request], scored: Sequence[Sequence[TokenLogprobs]]) -> float:
    """The largest difference from plain forwards; the likeliest tokens are the same."""
    worst = 0.0
    for request, row in zip(requests, scored, strict=True):
        for one, (value, best) in zip(row, expected(module, request), strict=True):
            worst = max(worst, abs(one.logprob - value))
            assert one.top[0][0] == best
    return worst


@pytest.mark.parametrize("executor", ["auto", "modules"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_plain_forwards(name: str, reuse: bool, executor: Executor) -> None:
    module = MODELS[name]()
    requests = questions(module)
    for chunk in (None, 3):
        engine = Engine(module, reuse=reuse, chunk=chunk, executor=executor)
        scored = score(Scheduler(engine, max_rows=6), requests)
        assert furthest(module, requests, scored) < TOLERANCE
    with pytest.raises(AssertionError):  # the control: other weights
        assert furthest(MODELS[name](seed=1), requests, scored) < TOLERANCE


def test_a_context_that_choices_share_is_computed_once() -> None:
    module = tiny.decoder()
    requests = sorted(questions(module), key=lambda request: list(request.prompt))
    engine = Engine(module, reuse=True)
    assert furthest(module, requests, score(Scheduler(engine, max_rows=8), requests)) < TOLERANCE
    contexts = sum(request.score_from or 0 for request in requests)
    assert engine.prefixes is not None
    assert contexts * 3 // 4 - len(requests) <= engine.prefixes.reused <= contexts * 3 // 4


def test_equal_sources_are_encoded_once() -> None:
    module = tiny.encoder_decoder()
    requests = sorted(questions(module), key=lambda request: list(request.source or ()))
    sources = sum(len(list(request.source or ())) for request in requests)
    encoded = {}
    for reuse in (False, True):
        engine, ran = Engine(module, reuse=reuse, executor="modules"), []
        assert module.encoder is not None
        hook = module.encoder.register_forward_pre_hook(lambda _, args, ran=ran: ran.append(len(args[0])))
        scored = score(Scheduler(engine, max_rows=8), requests)
        hook.remove()
        assert furthest(module, requests, scored) < TOLERANCE
        encoded[reuse] = sum(ran)
    assert encoded[False] == sources
    assert sources // 4 <= encoded[True] < sources // 2  # again where the choices of a question do not run together


def test_rows_that_wait_for_a_source_are_served_where_the_first_is_cancelled() -> None:
    module = tiny.encoder_decoder()
    source = [5, 6, 7, 8]
    engine = Engine(module, reuse=True)
    rows = engine.add(*(Request(prompt=[0, 3 + i], source=source, max_new_tokens=3, number=i) for i in range(3)))
    engine.free(rows[:1])
    while engine.rows:
        engine.step()
    (plain,) = Engine(module).add(Request(prompt=[0, 5], source=source, max_new_tokens=3))
    single = Engine(module)
    single.join([(row := single.prepare(plain.request))])
    while single.rows:
        single.step()
    assert rows[2].new == row.new
    assert len(rows[1].new) == 3


@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_generates_is_scored_beside_what_it_writes(name: str) -> None:
    module = MODELS[name]()
    scored, plain = [], []
    for request in questions(module)[:8]:
        both = replace(request, max_new_tokens=4, logprobs=2)
        engine = Engine(module, chunk=4)
        rows = engine.add(both, replace(both, score_from=None))
        scores, written = [], []
        while engine.rows:
            for output in engine.step():
                if output.row is rows[0]:
                    scores += output.scores
                    written += [] if output.token is None else [output]
                assert not output.scores or output.row is rows[0]
        assert rows[0].new == rows[1].new == [output.token for output in written]
        assert all(output.logprobs is not None for output in written)
        assert all(len(one.top) == 2 for one in scores)
        scored.append(scores)
        plain.append(request)
    assert furthest(module, plain, scored) < TOLERANCE


def test_edits_act_on_scores() -> None:
    module = tiny.decoder()
    request = questions(module)[0]
    edit = add("blocks.0.resid_post", torch.linspace(-1, 1, tiny.D))
    session = Session(Plan.of(module.spec, (), edit))
    (scores,) = score(Scheduler(Engine(module)), [replace(request, probe=session)])
    session.close()
    assert request.score_from is not None
    ids = list(request.prompt)
    logits = Model(module).logits([ids], edit=edit)[0][request.score_from - 1 : -1].log_softmax(-1)
    values = [float(row[token]) for row, token in zip(logits, ids[request.score_from :], strict=True)]
    assert [one.logprob for one in scores] == pytest.approx(values, abs=TOLERANCE)
    assert furthest(module, [request], [[replace(one, top=[(b, 0.0)]) for one, (_, b) in
                                         zip(scores, expected(module, request), strict=True)]]) > 1e-3  # fmt: skip


def test_the_last_id_takes_no_position() -> None:
    module = tiny.decoder("learned")  # 64 positions
    ids = [3 + i % 30 for i in range(66)]
    (scores,) = score(Scheduler(Engine(module)), [Request(prompt=ids[:65], score_from=60, max_new_tokens=0)])
    assert len(scores) == 5
    assert all(math.isfinite(one.logprob) and one.top == [] for one in scores)
    with pytest.raises(InputError, match="the model has 64"):
        score(Scheduler(Engine(module)), [Request(prompt=ids, score_from=60, max_new_tokens=0)])


def test_weights_that_are_no_numbers_are_said() -> None:
    module = tiny.decoder()
    requests = questions(module)[:2]
    with torch.no_grad():
        module.get_parameter("decoder.final_norm.weight")[0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        score(Scheduler(Engine(module)), requests)


@pytest.mark.usefixtures("unchecked")
def test_requests_that_cannot_be_scored() -> None:
    module = tiny.decoder()
    for wrong in (0, 3, -1, 1.5, "1"):
        with pytest.raises(InputError, match="score_from"):
            Request(prompt=[3, 4, 5], score_from=wrong)  # type: ignore[arg-type]
    for request in (Request(prompt=[3, 4]), Request(prompt=[3, 4], score_from=1, max_new_tokens=2)):
        with pytest.raises(InputError, match=r"score\(\) runs requests with score_from and max_new_tokens=0"):
            score(Scheduler(Engine(module)), [request])
    engine = Engine(module)
    engine.add(Request(prompt=[3, 4, 5], score_from=1, max_new_tokens=0))
    with pytest.raises(InputError, match=r"no next token; step\(\) gives its scores"):
        engine.logits()


def test_more_requests_than_fit_at_once() -> None:
    module = tiny.decoder()
    requests = questions(module) * 3
    done = []
    scheduler = Scheduler(Engine(module, reuse=True), max_rows=3)
    scored = score(scheduler, iter(requests), on_progress=lambda progress: done.append(progress.done))
    assert furthest(module, requests, scored) < TOLERANCE
    assert done[-1] == len(requests)
    assert done == sorted(done)
