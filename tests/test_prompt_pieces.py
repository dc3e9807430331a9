"""Prompts whose forward stops between its layers and goes on in later steps."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from native_models import LLAMA, needs_native, packed
from triptych.generate import Engine, LiveRow, Request, Scheduler
from triptych.generate.prompt_pieces import PromptPieces
from triptych.model import create
from triptych.native.step import INSTRUCTION, Barrier, Op
from triptych.nn import Transformer
from triptych.program import native_executor
from triptych.program.native_pieces import MOST_PIECES, pieces_of

pytestmark = needs_native

LONG = [3 + i * i % 37 for i in range(150)]
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
MODULES: dict[str, Callable[[], Transformer]] = {
    "packed": packed,
    "fp32": lambda: create(LLAMA).module,
    "windows": lambda: packed(model_type="mistral", sliding_window=24),
    "mixture": lambda: packed(**MIXTURE),
}


def in_pieces(engine: Engine) -> int:
    """Run all rows, one piece of prompts in each step -> steps in which a forward of prompts was under way."""
    engine.prompt_seconds, steps = 0.0, 0
    while engine.rows:
        engine.step()
        steps += bool(engine.pieces.rows)
    return steps


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_prompt_in_pieces_gives_the_same_bits(name: str, reuse: bool) -> None:
    module = MODULES[name]()
    wanted = [Request(prompt=LONG[i:], max_new_tokens=6, number=i, logprobs=0) for i in (0, 60, 140)]
    texts = []
    for seconds in (None, 0.0):
        engine = Engine(module, budget=70, reuse=reuse)
        engine.prompt_seconds = seconds
        rows, outputs, begun = engine.add(*wanted), dict[LiveRow, list[float]](), 0
        while engine.rows:
            for output in engine.step():
                if output.logprobs is not None:
                    outputs.setdefault(output.row, []).append(output.logprobs.logprob)
            begun += bool(engine.pieces.rows)
        texts.append([(row.new, outputs[row]) for row in rows])
        assert (begun > 0) == (seconds is not None), "prompts ran in pieces where they should not, or did not"
    assert texts[0] == texts[1]


def test_rows_that_decode_go_on_while_a_prompt_is_under_way() -> None:
    engine = Engine(packed(num_hidden_layers=8))
    (short,) = engine.add(Request(prompt=[5], max_new_tokens=200, number=0))
    engine.step()
    (long,) = engine.add(Request(prompt=LONG, max_new_tokens=2, number=1))
    engine.prompt_seconds, before = 0.0, len(short.ids)
    while not long.cached:
        engine.step()
    assert len(short.ids) - before >= 8, "a step of one piece runs more than a layer"
    whole = Engine(packed(num_hidden_layers=8))
    (short,) = whole.add(Request(prompt=[5], max_new_tokens=200, number=0))
    whole.step()
    (long,) = whole.add(Request(prompt=LONG, max_new_tokens=2, number=1))
    before = len(short.ids)
    while not long.cached:
        whole.step()
    assert len(short.ids) - before == 1, "without a limit of time the prompt is one step"


def test_a_row_that_leaves_takes_its_forward_with_it_and_its_slot_serves_others() -> None:
    module = packed(model_type="mistral", sliding_window=24)
    wanted = [Request(prompt=LONG[::-1], max_new_tokens=5, number=i) for i in (0, 1)]
    (expected,) = (rows := Engine(module)).add(wanted[0])
    in_pieces(rows)
    engine = Engine(module)
    engine.prompt_seconds = 0.0
    leaving, staying = engine.add(Request(prompt=LONG, max_new_tokens=5, number=9), wanted[1])
    for _ in range(3):
        engine.step()
    assert {leaving, staying} == {*engine.pieces.rows}
    engine.free([leaving])
    assert not engine.pieces.rows
    (late,) = engine.add(wanted[0])
    assert late.slot == leaving.slot
    in_pieces(engine)
    assert staying.new == late.new == expected.new


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("window", [None, 24])
def test_a_change_of_the_weights_in_the_middle_of_a_prompt_counts(
    follows: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the first layers computed before the change, the text is another one: the control."""
    if not follows:
        monkeypatch.setattr(native_executor, "versions", lambda module: [])
    changes = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    texts = []
    for changed_at in (0, 20):
        module = create(LLAMA | changes).module
        engine = Engine(module)
        engine.prompt_seconds = 0.0
        (row,) = engine.add(Request(prompt=LONG, max_new_tokens=8, logprobs=0))
        logprobs = list[float]()
        for step in range(2000):
            if step == changed_at:
                assert bool(engine.pieces.rows) == bool(step)
                with torch.no_grad():
                    next(module.parameters()).mul_(-1.0)
                if step and not follows:
                    engine.guard.due = lambda: False  # type: ignore[method-assign]
            if not engine.rows:
                break
            logprobs += [one.logprobs.logprob for one in engine.step() if one.logprobs is not None]
        texts.append((row.new, logprobs))
    assert (texts[0] == texts[1]) == follows


def test_a_queue_gives_prompts_that_share_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Scheduler` sets the time of prompts, and measures decoding without it."""
    scheduler = Scheduler(Engine(packed()))
    given: list[float | None] = []
    go_on = PromptPieces.go_on

    def recorded(self: PromptPieces, seconds: float | None) -> object:
        given.append(seconds)
        return go_on(self, seconds)

    monkeypatch.setattr(PromptPieces, "go_on", recorded)
    short = scheduler.submit(Request(prompt=[5], max_new_tokens=60, number=0))
    for _ in range(40):
        scheduler.step()
    scheduler.submit(Request(prompt=LONG, max_new_tokens=2, number=1))
    scheduler.pace.alone.extend([0.25] * 40)
    scheduler.step()
    assert given[-1] == pytest.approx(0.25), "(SLOWER - 1) times the seconds of decoding"
    while scheduler.busy:
        scheduler.step()
    assert len(short.new) == 60
    assert max(scheduler.pace.of_id) < 0.25


def test_where_modules_run_a_forward_is_one_step_again() -> None:
    scheduler = Scheduler(Engine(packed(), executor="modules"))
    scheduler.pace.in_pieces = True  # as after steps that ran natively
    scheduler.submit(Request(prompt=LONG, max_new_tokens=2, number=0))
    scheduler.step()
    assert not scheduler.pace.in_pieces


def test_a_forward_stops_only_where_threads_meet_and_between_experts() -> None:
    records = np.zeros(12, INSTRUCTION)
    records["op"] = [Op.EMBED, Op.LINEAR, Op.ADD, Op.ROUTE, Op.TAKE, Op.LINEAR, Op.GIVE, Op.TAKE, Op.LINEAR, Op.GIVE,
                     Op.ADD, Op.LINEAR]  # fmt: skip
    records["barrier"] = Barrier.BEFORE
    records["barrier"][[2, 7]] = Barrier.NONE, Barrier.IF_ANY
    assert [*pieces_of(records)] == [(0, 1), (1, 3), (3, 10), (10, 11), (11, 12)]
    many = np.zeros(1000, INSTRUCTION)
    many["barrier"] = Barrier.BEFORE
    pieces = [*pieces_of(many)]
    assert len(pieces) <= MOST_PIECES
    assert [first for first, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert (pieces[0][0], pieces[-1][1]) == (0, 1000)
