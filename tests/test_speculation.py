"""Guessed tokens: what is written is what would be written without guesses, whatever is guessed."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import references
import test_engine
import tiny
import triptych
from native_models import llama, needs_native
from test_engine import MODELS, PROMPTS, alone, run
from test_native_step import packed
from triptych.errors import InputError
from triptych.generate import (
    DraftModel,
    Engine,
    LiveRow,
    PromptLookup,
    Request,
    Sampling,
    Scheduler,
    Speculation,
    forbid,
    speculation,
)
from triptych.generate import engine as speculation_engine
from triptych.model import Model
from triptych.nn import Transformer


class Oracle:
    """Guesses the ids that a row will have, each of them wrong with some probability."""

    def __init__(self, ids: Sequence[Sequence[int]], wrong: float, seed: int = 0) -> None:
        self.ids, self.wrong, self.draw = ids, wrong, random.Random(seed)

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        out = []
        for row, count in zip(rows, counts, strict=True):
            coming = list(self.ids[row.request.number][len(row.ids) :][:count])
            coming += [0] * (count - len(coming))
            out.append([self.draw.randrange(41) if self.draw.random() < self.wrong else token for token in coming])
        return out

    def forget(self, rows: Sequence[LiveRow]) -> None: ...

    def reset(self) -> None: ...


def requests(module: Transformer, **how: Any) -> list[Request]:
    return test_engine.requests(module, [{"max_new_tokens": 17 + i} | how for i in range(len(PROMPTS))])


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": Sampling(temperature=0.9, top_p=0.95, seed=3)},
    "penalty": {"sampling": Sampling(repetition_penalty=1.4)},
    "rules": {"rules": [forbid(range(0, 41, 2))]},
    "ends": {"ends": list(range(0, 41, 7))},
}


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_is_guessed_the_ids_are_the_same(name: str, how: str, wrong: float) -> None:
    module = MODELS[name]()
    wanted = requests(module, **HOW[how])
    expected = [alone(module, request) for request in wanted]
    oracle = Oracle([[*r.prompt, *ids] for r, ids in zip(wanted, expected, strict=True)], wrong)
    made = Speculation(oracle, 3, adaptive=False)
    engine = Engine(module, speculation=made)
    rows = engine.add(*wanted)
    steps = run(engine)
    assert [row.new for row in rows] == expected
    assert sum(row.drafted for row in rows) > 0
    if how != "ends" and wrong == 0:
        assert all(row.accepted == row.drafted for row in rows)
        assert steps <= 8
    if wrong == 1:
        assert sum(row.accepted for row in rows) < 0.2 * sum(row.drafted for row in rows)


@needs_native
def test_natively_the_bits_are_the_same_too() -> None:
    module = packed()
    wanted = requests(module, logprobs=2)
    expected = [alone(module, request) for request in wanted]
    found = []
    for made in (None, Speculation(Oracle([[*r.prompt, *e] for r, e in zip(wanted, expected, strict=True)], 0.4), 4)):
        engine = Engine(module, speculation=made)
        if made is not None:
            made.adaptive = False
        rows, logprobs = engine.add(*wanted), dict[LiveRow, list[object]]()
        while engine.rows:
            for output in engine.step():
                logprobs.setdefault(output.row, []).append((output.logprobs.logprob, output.logprobs.top))
        assert engine.why_modules is None
        found.append([(row.new, logprobs[row]) for row in rows])
    assert found[0] == found[1]


def test_stop_strings_and_limits_are_those_without_guesses() -> None:
    import cli_models
    from test_writing import load

    model, text = load(cli_models.checkpoint("decoder")), "the mill and the mill and the"
    for how in ({}, {"temperature": 1.0, "seed": 5}):
        (plain,) = model.generate([text], max_new_tokens=24, **how)  # type: ignore[arg-type]
        for stop in ((), *filter(None, (plain.text[3:5], plain.text[7:9]))):
            expected = model.generate([text], max_new_tokens=24, stop=stop, **how)[0]  # type: ignore[arg-type]
            (found,) = model.generate([text], max_new_tokens=24, stop=stop, draft="ngram", **how)  # type: ignore[arg-type]
            assert (found.ids, found.text, found.reason) == (expected.ids, expected.text, expected.reason)
            streams = []
            for draft in (None, model):
                engine, tokens = model.engine(draft=draft, draft_tokens=5), list[int]()
                if engine.speculation is not None:
                    engine.speculation.adaptive = False
                settings = {"max_new_tokens": 24, "stop": stop, "engine": engine, **how}
                stream = model.stream(text, on_token=lambda _, token, t=tokens: t.append(token), **settings)
                streams.append(("".join(stream), tokens))
            assert streams[0] == streams[1]
            assert streams[0][0] == expected.text


def test_longropes_factors_do_not_change_within_a_draft() -> None:
    module = triptych.load(references.saved("llama-longrope")[1]).module
    prompt = [5, 9, 3, 7, 11, 2, 8]
    wanted = Request(prompt=prompt, max_new_tokens=14)
    expected = alone(module, wanted)
    engine = Engine(module, speculation=Speculation(Oracle([prompt + expected], 0.0), 4, adaptive=False))
    (row,) = engine.add(wanted)
    run(engine)
    assert row.new == expected
    assert row.accepted >= 8


# -- what guesses -----------------------------------------------------------------------------------------------------


def test_prompt_lookup_guesses_what_followed_before() -> None:
    drafts = PromptLookup()

    def guess(ids: list[int], count: int = 4, source: list[int] | None = None) -> list[int]:
        row = LiveRow(Request(prompt=ids, source=source), list(ids))
        return drafts.guess([row], [count])[0]

    assert guess([1, 2, 3, 4, 5, 6, 7, 2, 3]) == [4, 5, 6, 7]
    assert guess([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]) == [4, 9, 2, 3]  # three ids decide before two
    assert guess([2, 3, 4, 2, 3, 5, 2, 3], 2) == [5, 2]  # the newest place counts
    assert guess([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # a repetition goes on
    assert guess([1, 2, 3]) == []
    assert guess([7], source=[5, 6]) == []
    assert guess([0, 5, 6], 2, source=[4, 5, 6, 8, 9]) == [8, 9]
    row = LiveRow(Request(prompt=[1, 2, 3, 1]), [1, 2, 3, 1])
    assert drafts.guess([row], [2]) == [[]]
    row.ids += [2]
    assert drafts.guess([row], [2]) == [[3, 1]]


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    module = tiny.decoder("rope", "window")
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=2)):
        made = Speculation(DraftModel(Engine(module), tiny.V), 4, adaptive=False)
        engine = Engine(module, speculation=made)
        wanted = requests(module, sampling=sampling)
        rows = engine.add(*wanted[:2])
        engine.step()
        rows += engine.add(*wanted[2:])
        run(engine)
        assert [row.new for row in rows] == [alone(module, request) for request in wanted]
        assert all(row.accepted == row.drafted > 10 for row in rows)
        assert not made.drafts.engine.rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_another_draft_model_is_right_at_times(mask: str) -> None:
    module, small = tiny.decoder("rope", mask), tiny.decoder("rope", mask, seed=0)
    small.head.proj.weight.detach().add_(0.1 * torch.randn(small.head.proj.weight.shape))  # type: ignore[union-attr]
    model, draft = Model(module), Model(small)
    plain = model.generate(PROMPTS, max_new_tokens=20, temperature=0.7)
    found = model.generate(PROMPTS, max_new_tokens=20, temperature=0.7, draft=draft, draft_tokens=3)
    assert [one.ids for one in found] == [one.ids for one in plain]


def test_what_cannot_be_guessed_for_is_refused() -> None:
    model = Model(tiny.decoder())
    how: dict[str, Any] = {"max_new_tokens": 2, "draft": "ngram"}
    with pytest.raises(InputError, match="beams and draft do not go together"):
        model.generate([[1]], beams=2, **how)
    with pytest.raises(InputError, match="draft='other' must be a Model or 'ngram'"):
        model.generate([[1]], draft="other")
    with pytest.raises(InputError, match="a vocabulary of 600 tokens, the model 41"):
        model.generate([[1]], draft=Model(llama(vocab_size=600)))
    with pytest.raises(InputError, match="must be a decoder alone"):
        model.generate([[1]], draft=Model(tiny.encoder_decoder()))
    with pytest.raises(InputError, match="draft_tokens=0 must be an integer of at least 1"):
        model.generate([[1]], draft="ngram", draft_tokens=0)


# -- the distribution -------------------------------------------------------------------------------------------------


def pairs(module: Transformer, draws: int, made: Speculation | None) -> Counter[tuple[int, ...]]:
    """How often each two ids were sampled after one prompt."""
    engine = Engine(module, speculation=made)
    scheduler, sampling = Scheduler(engine, max_rows=250), Sampling(temperature=1.5, top_k=4, seed=11)
    wanted = [Request(prompt=[5, 7], max_new_tokens=3, sampling=sampling, number=i) for i in range(draws)]
    rows = [scheduler.submit(request) for request in wanted]
    while scheduler.busy:
        scheduler.step()
    return Counter(tuple(row.new[1:]) for row in rows)  # the first token is chosen from the prompt's own logits


def exact(module: Transformer) -> dict[tuple[int, ...], float]:
    """The probability of each two ids after the first, by enumeration."""
    out: dict[tuple[int, ...], float] = {}

    def probs(ids: list[int]) -> list[tuple[int, float]]:
        best = Model(module).logits([ids])[0][-1].topk(4)
        return list(zip(best.indices.tolist(), (best.values / 1.5).softmax(-1).tolist(), strict=True))

    for a, p in probs([5, 7]):
        for b, q in probs([5, 7, a]):
            for c, r in probs([5, 7, a, b]):
                out[b, c] = out.get((b, c), 0.0) + p * q * r
    return out


def chi_square(module: Transformer, counts: Counter[tuple[int, ...]]) -> tuple[float, int]:
    """Pearson's statistic against the exact distribution, and its degrees of freedom."""
    expected, draws = exact(module), counts.total()
    assert set(counts) <= set(expected)
    return sum((counts[ids] - draws * p) ** 2 / (draws * p) for ids, p in expected.items()), len(expected) - 1


class Likeliest:
    """Guesses the likeliest ids: right more often than others, so that taking them unseen shows."""

    def __init__(self, module: Transformer) -> None:
        self.model = Model(module)

    def guess(self, rows: Sequence[LiveRow], counts: Sequence[int]) -> list[list[int]]:
        best = [x[-1].argmax() for x in self.model.logits([row.ids for row in rows])]
        return [[int(token)] for token in best]

    def forget(self, rows: Sequence[LiveRow]) -> None: ...

    def reset(self) -> None: ...


@pytest.mark.heavy
def test_sampled_tokens_have_the_models_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against exact enumeration; a rule that takes guesses of some probability, whatever was drawn, is noticed."""
    module, draws = tiny.decoder(), 3000
    guessed = pairs(module, draws, Speculation(Likeliest(module), 1, adaptive=False))
    statistic, freedom = chi_square(module, guessed)
    limit = freedom + 4 * (2 * freedom) ** 0.5
    assert statistic < limit
    assert guessed == pairs(module, draws, None)
    choose = speculation_engine.choose

    def lenient(rows: Sequence[LiveRow], logits: torch.Tensor) -> Any:
        choices = choose(rows, logits)
        for row, x, choice in zip(rows, logits, choices, strict=True):
            place = len(row.ids) - row.cached + len(row.draft)
            if place < len(row.draft) and x.softmax(-1)[row.draft[place]] > 0.1:
                choice.token = row.draft[place]
        return choices

    monkeypatch.setattr(speculation_engine, "choose", lenient)
    wrong, _ = chi_square(module, pairs(module, draws, Speculation(Likeliest(module), 1, adaptive=False)))
    assert wrong > 3 * limit


def test_keys_of_wrong_guesses_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they stay in the cache, or a ring is not given back what they took the place of."""
    module = tiny.decoder("rope", "window")
    wanted = requests(module)
    expected = [alone(module, request) for request in wanted]

    def found() -> list[list[int]]:
        engine = Engine(module, speculation=Speculation(Oracle([[0]] * 4, 1.0), 3, adaptive=False))
        rows = engine.add(*wanted)
        run(engine)
        return [row.new for row in rows]

    assert found() == expected
    from triptych.attention import Cache

    def only_shorter(self: Cache, slot: int, length: int, held: object) -> None:
        self.last = None
        self.lengths[slot] = length

    monkeypatch.setattr(Cache, "rollback", only_shorter)
    assert found() != expected


# -- whether it pays --------------------------------------------------------------------------------------------------


def guessing(made: Speculation, seconds: float, tokens: int, plain: float, steps: int) -> list[bool]:
    """Whether each of some steps guessed, where one with guesses takes `seconds` for so many tokens."""
    out = []
    for _ in range(steps):
        made.guessing = made.should_guess
        out.append(made.guessing)
        made.measured(seconds if made.guessing else plain, tokens if made.guessing else 1)
    return out


def test_guesses_rest_where_they_lose_and_go_on_where_they_pay() -> None:
    lost = guessing(Speculation(PromptLookup()), 2.0, 1, 1.0, 400)
    assert sum(lost) < 80
    assert any(lost[200:])  # tried again
    won = guessing(Speculation(PromptLookup()), 2.0, 3, 1.0, 400)
    assert sum(won) > 350
    assert all(guessing(Speculation(PromptLookup(), adaptive=False), 2.0, 1, 1.0, 100))
    made = Speculation(PromptLookup())
    guessing(made, 2.0, 3, 1.0, 100)
    assert not all(guessing(made, 9.0, 1, 1.0, 20))  # it paid, and pays no longer
    assert speculation.LONGEST_PAUSE >= made.pause > speculation.PAUSE


def test_the_written_ids_do_not_depend_on_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    module, draw = tiny.decoder(), random.Random(0)
    wanted = requests(module, sampling=Sampling(temperature=0.6))
    expected = [alone(module, request) for request in wanted]
    for _ in range(3):
        monkeypatch.setattr(Speculation, "should_guess", property(lambda self: draw.random() < 0.5))
        oracle = Oracle([[*r.prompt, *ids] for r, ids in zip(wanted, expected, strict=True)], 0.3)
        engine = Engine(module, speculation=Speculation(oracle, 4))
        rows = engine.add(*wanted)
        run(engine)
        assert [row.new for row in rows] == expected
