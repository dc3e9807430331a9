"""The queue before an engine: whatever comes when, each request writes what it would alone; bad ones fail alone."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from native_models import needs_native
from test_engine import MODELS, PROMPTS, alone, requests
from test_native_step import packed
from triptych import machine
from triptych.errors import InputError, ProbeError
from triptych.generate import (
    CacheBudget,
    Engine,
    LiveRow,
    QueueProgress,
    Request,
    Sampling,
    Scheduler,
    forbid,
    prompt_pieces,
    scheduling,
)
from triptych.generate.pacing import FEWEST, SLOWER, Pace
from triptych.generate.scheduling import AGING, MOST_OVERTAKEN, WaitingRow
from triptych.generate.step_runner import StepRunner
from triptych.model import Model, create
from triptych.nn import Transformer
from triptych.probe import add

WAYS = (Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2))


def drawn(random: random.Random, module: Transformer, number: int, prefixes: Sequence[list[int]] = ([],)) -> Request:
    """A request of any length and kind; `prefixes` are beginnings that several share."""
    prompt = [*random.choice(prefixes), *(random.randrange(3, 41) for _ in range(random.randint(1, 17)))]
    source = [random.randrange(3, 41) for _ in range(random.randint(1, 9))] if module.encoder else None
    rules = [forbid([random.randrange(41)])] if random.random() < 0.2 else []
    return Request(
        prompt=prompt, source=source, number=number, max_new_tokens=random.randint(1, 12), rules=rules,
        sampling=random.choice(WAYS), ends=[random.randrange(41)], logprobs=0,
    )  # fmt: skip


Written = tuple[list[int], list[float]]
"""Ids, and their log-probabilities."""


def in_a_queue(module: Transformer, wanted: Sequence[Request], random: random.Random) -> list[Written]:
    """What requests write that arrive while others run, under random limits, also of the time for prompts in a step."""
    engine = Engine(module, budget=random.randint(1, 40), reuse=True)
    scheduler = Scheduler(engine, max_rows=random.randint(1, 5))
    seconds = type(random)(len(wanted)).choice  # of its own: the requests are drawn with the other
    scheduler.pace.seconds = lambda decoding: seconds((0.0, 0.0, 1e-4, 1.0))  # type: ignore[method-assign]
    rows, waiting, logprobs = list[LiveRow](), list(wanted), dict[LiveRow, list[float]]()
    while waiting or scheduler.busy:
        while waiting and random.random() < 0.4:
            rows.append(scheduler.submit(waiting.pop(0)))
        for output in scheduler.step():
            logprobs.setdefault(output.row, []).append(output.logprobs.logprob)
        assert len(engine.rows) <= scheduler.max_rows >= len(engine.cache.lengths)
    return [(row.new, logprobs[row]) for row in rows]


def by_itself(module: Transformer, request: Request) -> Written:
    engine = Engine(module)
    (row,) = engine.add(request)
    found = []
    while engine.rows:
        found += [output.logprobs.logprob for output in engine.step() if output.logprobs is not None]
    return row.new, found


@pytest.fixture
def short_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts too are read in pieces of time."""
    monkeypatch.setattr(prompt_pieces, "SMALL", 0)


@pytest.mark.usefixtures("short_in_pieces")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_random_arrivals_and_budgets_give_what_each_gives_alone(name: str, seed: int) -> None:
    module, draw = MODELS[name](), random.Random(seed)
    wanted = [drawn(draw, module, i, ([], list(range(5, 16)))) for i in range(12)]
    for request, (ids, logprobs) in zip(wanted, in_a_queue(module, wanted, draw), strict=True):
        expected = by_itself(module, request)
        assert ids == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-4)


@needs_native
@pytest.mark.usefixtures("short_in_pieces")
@pytest.mark.parametrize("seed", range(8))
def test_natively_the_bits_are_the_same_too(seed: int) -> None:
    module, draw = packed(), random.Random(seed)
    wanted = [drawn(draw, module, i, ([], list(range(5, 16)))) for i in range(12)]
    assert in_a_queue(module, wanted, draw) == [by_itself(module, request) for request in wanted]


def test_many_prompts_run_in_few_slots_and_come_back_in_order() -> None:
    model, draw, steps = Model(tiny.decoder()), random.Random(0), list[QueueProgress]()
    prompts = [[draw.randrange(3, 41) for _ in range(draw.randint(1, 20))] for _ in range(60)]
    how = {"max_new_tokens": 6, "temperature": 0.9, "seed": 3}
    found = model.generate(prompts, max_rows=7, on_progress=steps.append, **how)  # type: ignore[arg-type]
    for i, generation in enumerate(found):
        wanted = Request(prompt=prompts[i], max_new_tokens=6, sampling=Sampling(temperature=0.9, seed=3), number=i)
        assert generation.ids == alone(model.module, wanted)
    assert max(one.running for one in steps) <= 7
    assert (steps[-1].done, steps[-1].total, steps[-1].tokens) == (60, 60, sum(len(one.ids) for one in found))
    assert [one.done for one in steps] == sorted(one.done for one in steps)
    assert 0 < steps[len(steps) // 2].done < 60


def test_a_step_runs_no_more_ids_than_its_budget_and_decodes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[dict[int, int]] = []
    run = StepRunner.run

    def recorded(self: StepRunner, session: object, rows: Sequence[LiveRow], *rest: object) -> object:
        before = [row.cached for row in rows]
        out = run(self, session, rows, *rest)  # type: ignore[arg-type]
        steps.append({row.request.number: row.cached - b for row, b in zip(rows, before, strict=True)})
        return out

    monkeypatch.setattr(StepRunner, "run", recorded)
    engine = Engine(tiny.decoder(), budget=10)
    engine.add(Request(prompt=[7] * 4, max_new_tokens=9, number=0))
    engine.step()
    engine.add(*(Request(prompt=[i] * 16, max_new_tokens=3, number=i) for i in (1, 2)))
    while engine.rows:
        engine.step()
    assert steps[:6] == [{0: 4}, {0: 1, 1: 9}, {0: 1, 1: 7, 2: 2}, {0: 1, 1: 1, 2: 8}, {0: 1, 1: 1, 2: 6}, {0: 1, 2: 1}]
    assert max(sum(step.values()) for step in steps) == 10


def test_a_long_prompt_does_not_hold_up_short_ones_and_is_read_meanwhile() -> None:
    engine = Engine(tiny.encoder_decoder(), budget=12)
    long, *short = engine.add(
        Request(prompt=[5] * 200, source=[1] * 4, max_new_tokens=2, number=0),
        *(Request(prompt=[6] * 8, source=[1] * 4, max_new_tokens=2, number=i) for i in range(1, 5)),
    )
    engine.step()  # sources
    steps = 0
    while any(row.reason is None for row in short):
        before, steps = long.cached, steps + 1
        engine.step()
        assert long.cached > before, "the oldest prompt stands still"
    assert steps <= 12
    assert long.cached < 100


def test_a_step_beside_prompts_is_a_fixed_number_of_times_longer() -> None:
    """Steps of 1 ms for each row that decodes and 0.1 ms for each id of a prompt."""
    pace = Pace(512)
    assert pace.ids(8) == 512  # nothing is known
    for decoding in (1, 4, 8):
        pace.measured(1e-3 * decoding, decoding, 0)
    pace.measured(1e-3 * 8 + 1e-4 * 512, 8, 512)
    for decoding in (4, 8, 32):
        ids = pace.ids(decoding)
        assert (1e-3 * decoding + 1e-4 * ids) / (1e-3 * decoding) == pytest.approx(SLOWER, rel=0.02)
    assert pace.ids(1) == FEWEST
    assert pace.ids(0) == 512  # nobody waits
    for _ in range(40):
        pace.measured(1e-3, 1, 512)  # a step that is no longer than decoding alone: prompts cost nothing
    assert pace.ids(8) == 512


# -- who joins, and who leaves --------------------------------------------------------------------------------------


def written(scheduler: Scheduler) -> list[int]:
    """Run to the end -> the numbers of the requests in the order in which they ended."""
    ended: list[int] = []
    while scheduler.busy:
        ended += [one.row.request.number for one in scheduler.step() if one.row.reason is not None]
    return ended


def test_a_higher_priority_joins_first_and_nobody_waits_for_ever() -> None:
    scheduler = Scheduler(Engine(tiny.decoder()), max_rows=1)
    for i, priority in enumerate((0, 5, 0, 5)):
        scheduler.submit(Request(prompt=[3, 4], max_new_tokens=2, number=i, priority=priority))
    assert written(scheduler) == [1, 3, 0, 2]
    low = scheduler.submit(Request(prompt=[3, 4], max_new_tokens=1, number=99))
    for i in range(200):  # one of a higher priority always waits
        scheduler.submit(Request(prompt=[3, 4], max_new_tokens=1, number=i, priority=2))
        scheduler.step()
        if low.reason is not None:
            break
    assert i == 2 * AGING


def test_a_long_prompt_that_does_not_fit_is_overtaken_but_not_for_ever() -> None:
    engine = Engine(tiny.encoder_decoder())
    slot = engine.cache.slot_bytes(64) + engine.cross.slot_bytes(4)
    scheduler, source = Scheduler(engine, max_rows=8, cache_bytes=2 * slot), [1] * 4
    first = scheduler.submit(Request(prompt=[3] * 4, source=source, max_new_tokens=40, number=0))
    scheduler.step()
    wanted = Request(prompt=[4] * 100, source=source, max_new_tokens=4, number=1)
    long = scheduler.submit(wanted)
    how = {"prompt": [5] * 4, "source": source, "max_new_tokens": 2}
    short = [scheduler.submit(Request(number=2 + i, **how)) for i in range(60)]  # type: ignore[arg-type]
    while first.reason is None:
        scheduler.step()
    assert sum(row.reason is not None for row in short) >= 10
    order = written(scheduler)
    assert order.index(1) < len(order) - 20, "the long prompt was overtaken by all short ones"
    assert long.new == alone(engine.module, wanted)


def test_only_those_that_join_count_as_overtaking() -> None:
    """A long wait in which nobody joins leaves all others their right to join first."""
    engine, source = Engine(tiny.encoder_decoder()), [1] * 4
    slot = engine.cache.slot_bytes(64) + engine.cross.slot_bytes(4)
    scheduler = Scheduler(engine, max_rows=8, cache_bytes=2 * slot)
    scheduler.submit(Request(prompt=[3] * 4, source=source, max_new_tokens=60, number=0))
    scheduler.step()
    scheduler.submit(Request(prompt=[4] * 120, source=source, max_new_tokens=4, number=1))
    for _ in range(2 * MOST_OVERTAKEN):
        scheduler.step()
    assert [one.overtaken for one in scheduler.waiting] == [0]
    how = {"prompt": [5] * 4, "source": source, "max_new_tokens": 1}
    late = [scheduler.submit(Request(number=2 + i, **how)) for i in range(3)]  # type: ignore[arg-type]
    for _ in range(4):
        scheduler.step()
    assert [row.reason for row in late] == ["length"] * 3
    assert [one.overtaken for one in scheduler.waiting] == [3]


def test_the_queue_is_not_sorted_while_no_row_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(Engine(tiny.decoder()), max_rows=1)
    for i in range(20):
        scheduler.submit(Request(prompt=[3, 4], max_new_tokens=10, number=i))
    scheduler.step()
    asked: list[int] = []
    monkeypatch.setattr(WaitingRow, "priority", lambda self, joined: asked.append(joined) or 0)
    for _ in range(8):
        scheduler.step()
    assert asked == []
    for _ in range(3):
        scheduler.step()
    assert len(asked) == 19, "the first row has left, and all that wait are asked once"


def test_two_models_share_one_budget_and_give_back_what_they_do_not_use() -> None:
    first, second = Engine(tiny.decoder(), reuse=True), Engine(tiny.decoder(), reuse=True)
    slot = first.cache.slot_bytes(64)
    budget = CacheBudget(3 * slot)
    one, other = Scheduler(first, cache_bytes=budget), Scheduler(second, cache_bytes=budget)
    how = {"prompt": [3] * 40, "max_new_tokens": 20}
    wanted = [Request(number=i, **how) for i in range(4)]  # type: ignore[arg-type]
    rows = [one.submit(request) for request in wanted[:2]] + [other.submit(request) for request in wanted[2:]]
    most = [0, 0]
    while one.busy or other.busy:
        one.step()
        other.step()
        most = [max(a, len(b.engine.rows)) for a, b in zip(most, (one, other), strict=True)]
        assert first.cache.nbytes + second.cache.nbytes <= budget.nbytes
    assert most[0] == 2
    assert most[1] in (1, 2)
    assert all(row.new == alone(first.module, request) for row, request in zip(rows, wanted, strict=True))
    with pytest.raises(InputError, match="cache_bytes"):
        CacheBudget(0)


@pytest.mark.parametrize("asked", [True, False])
def test_a_scheduler_at_rest_gives_back_what_it_holds_where_another_lacks_it(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Engine(tiny.decoder(), reuse=True), Engine(tiny.decoder(), reuse=True)
    budget = CacheBudget(first.cache.slot_bytes(64))
    one, other = Scheduler(first, cache_bytes=budget), Scheduler(second, cache_bytes=budget)
    resets: list[int] = []
    reset = first.reset
    monkeypatch.setattr(first, "reset", lambda: (resets.append(1), reset()))
    if asked:
        budget.follow(one, one.give_back)
    wanted = Request(prompt=[3] * 40, max_new_tokens=20)
    one.submit(wanted)
    written(one)
    assert first.cache.nbytes == budget.nbytes, "it keeps what a later request may reuse"
    row = other.submit(wanted)
    for _ in range(80):
        other.step()
    assert (row.reason, len(row.new), len(resets)) == (("length", 20, 1) if asked else (None, 0, 0))
    for _ in range(3):
        one.give_back()
    assert len(resets) == 1, "one that holds nothing has nothing to give"


@pytest.mark.parametrize("name", MODELS)
def test_a_cancelled_row_leaves_and_the_others_write_what_they_write_alone(name: str) -> None:
    module = MODELS[name]()
    scheduler = Scheduler(Engine(module), max_rows=3)
    wanted = requests(module, [{"max_new_tokens": 8}] * 4)
    rows = [scheduler.submit(request) for request in wanted]
    scheduler.step()
    thread = threading.Thread(target=lambda: [scheduler.cancel(rows[i]) for i in (1, 3, 3)])
    thread.start()
    thread.join()
    while scheduler.busy:
        scheduler.step()
    scheduler.cancel(rows[0])  # that has ended
    scheduler.step()
    assert [row.reason for row in rows] == ["length", "cancelled", "length", "cancelled"]
    assert (len(rows[1].new), len(rows[3].new)) == (1, 0)
    assert all(rows[i].new == alone(module, wanted[i]) for i in (0, 2))
    assert len(scheduler.engine.cache.free_slots) == len(scheduler.engine.cache.lengths)


def test_a_row_leaves_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(scheduling, "monotonic", lambda: clock[0])
    scheduler = Scheduler(Engine(tiny.decoder()), max_rows=2)
    how = {"prompt": [3, 4], "max_new_tokens": 20}
    deadlines = (None, 3.0, 2.0, 9.0)
    rows = [scheduler.submit(Request(number=i, deadline=d, **how)) for i, d in enumerate(deadlines)]  # type: ignore[arg-type]
    while scheduler.busy:
        scheduler.step()
        clock[0] += 1
    assert [row.reason for row in rows] == ["length", "deadline", "deadline", "deadline"]
    assert [len(row.new) for row in rows] == [20, 3, 0, 6]
    assert scheduler.deadlines == {}
    gone = [scheduler.submit(Request(number=i, deadline=1e6, **how)) for i in range(3)]  # type: ignore[arg-type]
    scheduler.step()
    scheduler.engine.reset()
    scheduler.step()
    assert [*scheduler.deadlines] == gone[2:], "a reset removed the two rows that ran"
    for bad in (-1.0, float("nan"), "soon"):
        with pytest.raises(InputError, match="deadline"):
            Request(deadline=bad, **how)  # type: ignore[arg-type]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_is_refused_with_the_bytes_and_fails_alone() -> None:
    engine = Engine(tiny.decoder())
    page = engine.cache.slot_bytes(1)
    assert page == 64 * 2 * tiny.G * 2 * tiny.K * 4
    scheduler = Scheduler(engine, cache_bytes=page - 1)
    with pytest.raises(InputError, match=f"prompt 3: the cache of its 6 positions would take {page:,} bytes"):
        scheduler.submit(Request(prompt=[1, 2], max_new_tokens=4, number=3))
    scheduler.budget.nbytes += 1
    row = scheduler.submit(Request(prompt=[1, 2], max_new_tokens=4, number=4))
    with pytest.raises(InputError, match="prompt 5: token id 41 is outside"):
        scheduler.submit(Request(prompt=[41], max_new_tokens=4, number=5))
    while scheduler.busy:
        scheduler.step()
    assert len(row.new) == 4


def test_rows_wait_until_the_cache_has_room_for_them() -> None:
    module = tiny.encoder_decoder()
    engine = Engine(module)
    slot = engine.cache.slot_bytes(64) + engine.cross.slot_bytes(4)
    scheduler = Scheduler(engine, cache_bytes=2 * slot)
    wanted = requests(module, [{"max_new_tokens": 5}] * 4)
    rows = [scheduler.submit(request) for request in wanted]
    while scheduler.busy:
        scheduler.step()
        assert len(engine.rows) <= 2
        assert engine.cache.nbytes + engine.cross.nbytes <= 2 * slot
    assert [row.new for row in rows] == [alone(module, request) for request in wanted]
    long = scheduler.submit(Request(prompt=[1] * 100, source=[1] * 4, max_new_tokens=20, number=9))
    while scheduler.busy:
        scheduler.step()  # alone it fits, once the slots of the others are gone
    assert len(long.new) == 20
    assert engine.cache.nbytes + engine.cross.nbytes <= 2 * slot


def test_generate_refuses_before_anything_runs_and_names_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Model(tiny.decoder()), list[int]()
    how: dict[str, Any] = {"max_new_tokens": 4, "max_rows": 2, "on_token": lambda i, token: tokens.append(i)}
    for beams in (0, 2):
        with pytest.raises(InputError, match="prompt 2: 62 prompt tokens"):
            model.generate([[1], [2], [3] * 62], beams=beams, **how)
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"prompt 0: the cache of its 5 positions would take .* and 750 are free"):
        model.generate([[1]], max_new_tokens=4, on_token=lambda i, token: tokens.append(i))
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * 64 * 240 * 2)  # of two rows, of which 3/4 are for caches
    assert len(model.generate([[1]], max_new_tokens=4)[0].ids) == 4
    with pytest.raises(InputError, match="prompt 0: the cache of its 5 positions would take 61,440 bytes, and 46,080"):
        model.generate([[1]], max_new_tokens=4, beams=2)
    assert not tokens


def test_a_row_that_fails_leaves_and_the_others_run_on() -> None:
    def bad(logits: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        if len(ids) == 7:
            raise KeyError("a rule of the caller")
        return logits

    module = tiny.decoder()
    wanted = [Request(prompt=p, max_new_tokens=6, number=i) for i, p in enumerate(PROMPTS)]
    wanted[1] = Request(prompt=PROMPTS[1], max_new_tokens=6, number=1, rules=[bad])
    scheduler = Scheduler(Engine(module))
    rows = [scheduler.submit(request) for request in wanted]
    failed = []
    while scheduler.busy:
        scheduler.step()
        failed.append(scheduler.failed)
    assert [row.reason for row in rows] == ["length", "error", "length", "length"]
    assert isinstance(rows[1].error, KeyError)
    assert [one for one in failed if one is not None] == [rows[1].error]
    for i in (0, 2, 3):
        assert rows[i].new == alone(module, wanted[i])
    assert rows[1].new == alone(module, Request(prompt=PROMPTS[1], max_new_tokens=4, number=1))
    with pytest.raises(KeyError, match="a rule of the caller"):
        Model(module).generate(PROMPTS, max_new_tokens=6, rules=[bad])


def test_after_an_interruption_the_model_writes_as_before() -> None:
    model = Model(tiny.decoder("rope", "window"))
    expected = [one.ids for one in model.generate(PROMPTS, max_new_tokens=8)]

    def interrupted(row: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPTS, max_new_tokens=8, on_token=interrupted)
    assert [one.ids for one in model.generate(PROMPTS, max_new_tokens=8)] == expected


def test_edits_and_beams_of_many_prompts_are_those_of_each() -> None:
    model = Model(tiny.decoder())
    steer = add("blocks.0.resid_post", torch.linspace(-3, 3, tiny.D))
    together = model.generate(PROMPTS, max_new_tokens=5, edit=steer, max_rows=2, read=["final"])
    assert [one.ids for one in together] == [model.generate([p], max_new_tokens=5, edit=steer)[0].ids for p in PROMPTS]
    assert [len(x) for x in together[0].trace["final"]] == [len(p) + 4 for p in PROMPTS]
    searched = model.generate(PROMPTS, max_new_tokens=5, beams=3, max_rows=6)
    assert [one.ids for one in searched] == [model.generate([p], max_new_tokens=5, beams=3)[0].ids for p in PROMPTS]
    with pytest.raises(ProbeError, match="changed nothing"):
        model.generate(PROMPTS, max_new_tokens=2, edit=add("final", torch.zeros(tiny.D)), max_rows=2)


def test_the_free_memory_counts_the_limits_of_cgroups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert machine.free_memory(tmp_path) == 500 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/a\n")
    group = tmp_path / "sys/fs/cgroup/a"
    group.mkdir(parents=True)
    for name, text in {"max": "300000", "current": "280000", "stat": "anon 9\ninactive_file 5000\n"}.items():
        (group / f"memory.{name}").write_text(text)
    assert machine.free_memory(tmp_path) == 25_000
    assert machine.free_memory(tmp_path / "nowhere") is None


# -- long prompts -----------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().nbytes() and not one._is_view():
                self.elements = max(self.elements, one.numel())
        return out


SMOLLM2 = {"model_type": "mistral", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
           "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
           "max_position_embeddings": 8300, "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("window", [None, 1024])
def test_a_long_prompt_makes_neither_masks_nor_logits_of_all_its_tokens(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8,192 tokens in SmolLM2's widths, beside a row that decodes: nothing larger than a layer's cache is made."""
    model = create(SMOLLM2 | {"sliding_window": window})
    model.executor = "modules"
    prompts = [[1 + i % 4000 for i in range(8192)], [7]]
    places = 8192 + 40 if window is None else window
    limit = max(2 * places * 3 * 64, 512 * 2048)  # a cache; a piece and the window before it, rounded up
    with Largest() as largest:
        found = model.generate(prompts, max_new_tokens=40)
    assert [len(one.ids) for one in found] == [40, 40]
    assert 0 < largest.elements <= limit
    monkeypatch.setattr(StepRunner, "parts", lambda self, members, running: [[*filter(running.get, members)]])
    if window is not None:  # the first control: the piece and the row that decodes in one forward
        with Largest() as together:
            model.generate([prompts[0][:2000], [7]], max_new_tokens=10)
        assert together.elements > limit
    with Largest() as whole:  # the second: at once, and with all logits
        engine = Engine(model.module, executor="modules")
        engine.add(Request(prompt=prompts[0][:512], max_new_tokens=1, all_logits=True))
        engine.step()
    assert whole.elements == 512 * 49152 > limit
