"""Prompts that begin alike are computed once, with the results of prompts that are computed each; nothing outdated is
used."""

import random
from collections.abc import Callable

import pytest
import torch

import references
import tiny
import triptych
from native_models import llama, needs_native
from test_engine import alone
from test_native_step import packed
from triptych.generate import Engine, LiveRow, Request, Scheduler
from triptych.generate.prefixes import LEAST, Prefixes, common, share_a_beginning
from triptych.model import Model
from triptych.nn import Transformer
from triptych.probe import Plan, Session

START = list(range(5, 25))
TAILS = [[3], [4, 9], [30, 31, 32], [40]]


def run(engine: Engine) -> None:
    while engine.rows:
        engine.step()


def one_after_another(engine: Engine, prompts: list[list[int]]) -> list[LiveRow]:
    rows = []
    for i, prompt in enumerate(prompts):
        rows += engine.add(Request(prompt=prompt, max_new_tokens=5, number=i))
        run(engine)
    return rows


def test_common_beginnings() -> None:
    draw = random.Random(0)
    for _ in range(200):
        a = [draw.randrange(2) for _ in range(draw.randrange(9))]
        b = [draw.randrange(2) for _ in range(draw.randrange(9))]
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common(a, b) == expected


def test_prompts_that_begin_alike() -> None:
    start = START[:LEAST]
    assert share_a_beginning([[*start, 1], [2, *start], [*start, 3]])
    assert not share_a_beginning([[*start, 1], [2, *start], [*start[:-1], 3], start[:-1]])
    assert not share_a_beginning([START])
    model = Model(llama())
    for prompts, reused in (([START, START[::-1]], [0, 0]), ([START, START], [0, 19])):
        assert [one.reused for one in model.generate(prompts, max_new_tokens=2)] == reused


@pytest.mark.parametrize("position", ["rope", "alibi", "learned", "t5"])
def test_a_prompt_goes_on_from_the_one_before(position: str) -> None:
    module = tiny.decoder(position)
    engine = Engine(module, reuse=True)
    rows = one_after_another(engine, [START + tail for tail in TAILS])
    assert [row.reused for row in rows] == [0, 20, 20, 20]
    assert engine.prefixes.reused == 60
    assert len(engine.cache.lengths) == 1
    assert [row.new for row in rows] == [alone(module, row.request) for row in rows]


def test_rows_of_one_step_wait_for_the_one_that_computes_their_beginning() -> None:
    module = tiny.decoder()
    scheduler = Scheduler(Engine(module, reuse=True, budget=12))
    rows = [scheduler.submit(Request(prompt=START + tail, max_new_tokens=5)) for tail in TAILS]
    computed = 0
    while scheduler.busy:
        before = {row: row.cached - row.reused for row in rows}
        scheduler.step()
        computed += sum(max(row.cached - row.reused - before[row], 0) for row in rows if row.reason is None)
    assert [row.reused for row in rows] == [0, 20, 20, 20]
    assert [row.new for row in rows] == [alone(module, row.request) for row in rows]
    assert scheduler.progress.reused == 60


@needs_native
def test_natively_a_reused_beginning_gives_the_same_bits() -> None:
    module = packed()
    found = []
    for reuse in (True, False):
        engine = Engine(module, reuse=reuse)
        for tail in TAILS[:2]:
            (row,) = engine.add(Request(prompt=START + tail, max_new_tokens=4, logprobs=0))
            while engine.rows:
                found += [one.logprobs.logprob for one in engine.step() if one.logprobs is not None]
        assert row.reused == 20 * reuse
    assert found[:8] == found[8:]


def test_a_window_is_taken_over_only_where_it_is_still_held() -> None:
    module = tiny.decoder("rope", "window")
    engine = Engine(module, reuse=True)
    (first,) = engine.add(Request(prompt=START, max_new_tokens=5))
    run(engine)
    longer, other = [*first.ids[:-1], 3, 7], [*START[:12], 1, 2]
    rows = one_after_another(engine, [longer, other])
    assert [row.reused for row in rows] == [24, 0]  # of 24 that were held; a window of 4 has passed the other's 12
    assert [row.new for row in rows] == [alone(module, row.request) for row in rows]


def test_nothing_is_taken_over_across_longropes_length() -> None:
    """13 is the length from which the other factors hold."""
    module = triptych.load(references.saved("llama-longrope")[1]).module
    engine = Engine(module, reuse=True)
    assert engine.runner.switch == 13, "beyond so many"
    start = [5, 9, 3, 7, 11, 2, 8, 4, 6, 13]
    short, long = start, [*start, 12, 1, 5, 6, 7, 2, 9]
    for prompts, reused in (([short, long, short], [0, 0, 0]), ([long, [*long, 3], short], [0, 17, 0])):
        engine.reset()
        rows = one_after_another(engine, prompts)
        assert [row.reused for row in rows] == reused
        assert [row.new for row in rows] == [alone(module, row.request) for row in rows]


def test_rows_with_a_probe_or_a_source_neither_give_nor_take() -> None:
    module = tiny.decoder()
    engine = Engine(module, reuse=True)
    session = Session(Plan.of(module.spec, ["final"]))
    engine.add(Request(prompt=START, max_new_tokens=2, probe=session))
    run(engine)
    assert [row.reused for row in one_after_another(engine, [START])] == [0]
    again = Session(Plan.of(module.spec, ["final"]))
    engine.add(Request(prompt=START, max_new_tokens=2, probe=again))
    run(engine)
    assert again.close()["final"][0].shape == session.close()["final"][0].shape
    assert Engine(tiny.encoder_decoder(), reuse=True).prefixes is None


# -- nothing outdated -------------------------------------------------------------------------------------------------


def scaled(module: Transformer) -> None:
    module.decoder.blocks[0].attn.q.weight.detach().mul_(1.5)  # type: ignore[union-attr]


def loaded(module: Transformer) -> None:
    module.load_state_dict({name: 1.1 * x for name, x in module.state_dict().items()})


def replaced(module: Transformer) -> None:
    part = module.decoder.blocks[0].attn.k  # type: ignore[union-attr]
    part.weight = torch.nn.Parameter(part.weight.detach() * -3)


def swapped(module: Transformer) -> None:
    part = module.decoder.blocks[0].attn.q.weight  # type: ignore[union-attr]
    part.data = part.data * 1.5


def trained(module: Transformer) -> None:
    """By a fused optimizer, whose steps torch does not count."""
    parameters = list(module.parameters())
    for one in parameters:
        one.grad = torch.arange(one.numel()).float().cos().view(one.shape)
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()


def adapted(module: Transformer) -> None:
    """As an adapter does: another part in the slot of a linear layer."""
    attn = module.decoder.blocks[0].attn  # type: ignore[union-attr]

    class Adapted(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.spec = inner, inner.spec

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * self.inner(x)

    attn.q = Adapted(attn.q).eval()


def hooked(module: Transformer) -> None:
    module.decoder.blocks[0].mlp.register_forward_hook(lambda part, given, out: 2 * out)  # type: ignore[union-attr]


CHANGES = [scaled, loaded, replaced, swapped, trained, adapted, hooked]


def after_a_change(change: Callable[[Transformer], None]) -> tuple[list[int], list[int], int]:
    """What a kept beginning leads to after the change, what the model writes now, and how many ids were reused."""
    module = tiny.decoder()
    engine = Engine(module, reuse=True)
    left, _ = engine.add(Request(prompt=START, max_new_tokens=3), Request(prompt=START[::-1], max_new_tokens=20))
    while left.reason is None:
        engine.step()
    change(module)
    rows = engine.add(*(Request(prompt=[*start, 3], max_new_tokens=8) for start in (START, START[::-1])))
    while any(row.reason is None for row in rows):
        engine.step()
    return (
        [*rows[0].new, *rows[1].new],
        [*alone(module, rows[0].request), *alone(module, rows[1].request)],
        sum(row.reused for row in rows),
    )


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_changed_model_computes_everything_again(change: Callable[[Transformer], None]) -> None:
    found, expected, reused = after_a_change(change)
    assert reused == 0
    assert found == expected


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_without_the_check_outdated_keys_would_show(
    change: Callable[[Transformer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefixes, "check", lambda self, running: None)
    monkeypatch.setattr(Prefixes, "_takes", lambda self, row: not row.cached)
    found, expected, reused = after_a_change(change)
    assert reused == 40
    assert found != expected


def test_one_key_too_many_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.decoder()
    engine = Engine(module, reuse=True)
    best = Prefixes._best

    def greedy(self: Prefixes, row: LiveRow, held: object) -> tuple[int, int]:
        slot, length = best(self, row, held)  # type: ignore[arg-type]
        return slot, length + (length >= LEAST)

    monkeypatch.setattr(Prefixes, "_best", greedy)
    rows = one_after_another(engine, [[*START, 3, 8], [*START, 4, 9]])
    assert rows[1].reused == 21
    assert rows[1].new != alone(module, rows[1].request)


# -- a conversation ---------------------------------------------------------------------------------------------------


def test_a_second_turn_computes_what_is_new_alone() -> None:
    module = llama()
    model = Model(module)
    engine = model.engine()
    scheduler = Scheduler(engine, max_rows=1)
    first = scheduler.submit(Request(prompt=START, max_new_tokens=6))
    while scheduler.busy:
        scheduler.step()
    second = scheduler.submit(Request(prompt=[*first.ids, 7, 8, 9], max_new_tokens=6))
    steps = 0
    while scheduler.busy:
        before = second.cached
        scheduler.step()
        steps += 1
        if steps == 1:
            assert (before, second.reused, second.cached) == (0, 25, 29)  # the last id written was not yet computed
    assert second.new == alone(module, second.request)
    assert len(engine.cache.lengths) == 1


def test_streams_share_an_engine_and_give_it_back() -> None:
    import cli_models
    from test_writing import load

    model = load(cli_models.checkpoint("decoder"))
    engine, text = model.engine(), "The river runs past the old mill and"
    expected = ["".join(model.stream(prompt, max_new_tokens=6)) for prompt in (text, f"{text} then")]
    stream = model.stream(text, max_new_tokens=6, engine=engine)
    assert not engine.rows  # one that is never read leaves nothing
    assert not "".join(model.stream(text, max_new_tokens=0, engine=engine))
    first = model.stream(text, max_new_tokens=6, engine=engine)
    next(first)
    with pytest.raises(triptych.InputError, match="runs another text"):
        model.stream(text, max_new_tokens=6, engine=engine)
    first.close()
    assert not engine.rows
    assert ["".join(stream), "".join(model.stream(f"{text} then", max_new_tokens=6, engine=engine))] == expected
    assert engine.prefixes.reused >= LEAST


def test_an_interruption_within_a_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    import cli_models
    from test_writing import load

    model = load(cli_models.checkpoint("decoder"))
    model.executor = "modules"
    engine, text = model.engine(), "The river runs past the old mill and"
    expected = "".join(model.stream(text, max_new_tokens=6))
    block = model.module.decoder.blocks[1]  # type: ignore[union-attr]
    stream, calls = model.stream(text, max_new_tokens=6, engine=engine), [0]
    forward = type(block).forward

    def interrupted(self: object, *rest: object) -> object:
        calls[0] += self is block
        if calls[0] == 3:
            raise KeyboardInterrupt
        return forward(self, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(block), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            "".join(stream)
    assert not engine.rows
    assert "".join(model.stream(text, max_new_tokens=6, engine=engine)) == expected
