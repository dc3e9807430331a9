"""The labs about what training teaches: PASS in small, FAIL with a broken mechanism or with shuffled data."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab_results import failed
from triptych.errors import InputError
from triptych.spec import AdditiveSpec, window
from triptych_lectures import labs
from triptych_lectures.labs import exposure_bias, in_context, reading_heads
from triptych_lectures.labs import small_models as small_models
from triptych_lectures.labs.exposure_bias import RecitedTexts
from triptych_lectures.labs.generated_tasks import Places, held_out_rows
from triptych_lectures.labs.in_context import Lookups
from triptych_lectures.labs.lab import LabResult, Setup

SMALL: dict[str, dict[str, Any]] = {
    "in-context": {"tested": 100},
    "exposure-bias": {"texts": 12, "steps": 250, "tested": 100},
    "trained-scores": {},
    "cosine-scores": {"steps": 120},
}
TASKS = {"in-context": Lookups, "exposure-bias": RecitedTexts, "trained-scores": Places, "cosine-scores": Places}


def small(name: str, seed: int = 1) -> LabResult:
    return labs.run(name, Setup(seed=seed, sizes=SMALL[name]))


# ---------------------------------------------------------------- in-context

SHOWN = "functions never trained: right where the input was shown before"


@pytest.mark.heavy
def test_in_context_fails_when_attention_does_not_reach_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_models.decoder
    near = window(2)
    monkeypatch.setattr(small_models, "decoder", lambda *given, **options: decoder(*given, mask=near, **options))
    assert SHOWN in failed(small("in-context"))


def test_no_function_is_both_trained_and_new() -> None:
    task = Lookups(5, 6)
    noise = np.random.default_rng(0)
    trained, new = (replace(task, functions=kind).tables(noise, 500) for kind in ("trained", "new"))
    assert not {tuple(table) for table in trained.tolist()} & {tuple(table) for table in new.tolist()}
    assert not (new.sum(-1) % 5).any()
    assert (trained.sum(-1) % 5).all()
    assert {int(x) for x in trained.flatten()} == {int(x) for x in new.flatten()} == set(range(5))


def test_a_pool_has_so_many_functions_and_the_same_in_each_draw() -> None:
    task = Lookups(4, 6, pool=3, seed=7)
    first, second = ({tuple(t) for t in task.tables(np.random.default_rng(i), 100).tolist()} for i in (0, 1))
    assert first == second
    assert len(first) == 3


def test_a_row_asks_for_each_answer_after_its_input() -> None:
    task = Lookups(4, 6, pool=1)
    (table,) = task.tables(np.random.default_rng(0), 1)
    (row,) = task.rows(np.random.default_rng(1), 1)
    assert row.trained.tolist() == [True, False] * 5 + [True]
    assert (row.targets[row.trained] == 4 + table[row.ids[row.trained]]).all()
    assert (row.ids[1::2] == row.targets[:-1:2]).all()
    drawn = replace(task, random_answers=True).rows(np.random.default_rng(1), 200)
    answers = np.stack([other.targets[other.trained] for other in drawn])
    inputs = np.stack([other.ids[other.trained] for other in drawn])
    assert (answers == 4 + table[inputs]).mean() == pytest.approx(1 / 4, abs=0.1)


def test_the_least_error_is_that_of_a_lookup() -> None:
    sizes = in_context.InContextLab(symbols=4, examples=6)
    rows = held_out_rows(Lookups(4, 6), 4000, 0)
    inputs = np.stack([row.ids[row.trained] for row in rows])
    not_shown = [(inputs[:, :i] != inputs[:, i : i + 1]).all(-1).mean() for i in range(6)]
    assert sizes.best_errors() == pytest.approx(0.75 * np.array(not_shown), abs=0.03)


def test_of_few_rows_the_error_may_be_less_than_expected_and_nothing_calls_it_possible() -> None:
    """A lookup that also guesses every unseen input right: less than the mean of the best, which is no bound."""
    sizes = in_context.InContextLab()
    shown = np.arange(16)[None, :] > np.zeros((4, 1))
    lookup = in_context.TaskAnswers(shown, shown)
    none = in_context.TaskAnswers(np.zeros_like(shown), shown)
    single, new = in_context._name(1), in_context._name(None)
    said = next(iter(sizes._conclusion({single: none, new: lookup}, lookup, none)))
    assert lookup.errors[-1] < sizes.best_errors()[-1]
    assert "to 0% at the last; 3% is expected of the best rule" in said.statement
    assert "possible" not in said.statement + "".join(check.claim for check in said.checks)


@pytest.mark.parametrize("wrong", [{"width": 32}, {"pools": (2, 4)}, {"symbols": 1}, {"examples": 1}])
def test_in_context_refuses_sizes_it_cannot_use(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="size"):
        labs.run("in-context", Setup(sizes=wrong))


# ---------------------------------------------------------------- exposure-bias


@pytest.mark.heavy
def test_exposure_bias_fails_when_the_model_does_not_read_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = exposure_bias.ExposureBiasLab.errors

    def after_true_tokens(*given: Any, share: float, forced: bool = False) -> Any:
        return errors(*given, share=share, forced=True)

    monkeypatch.setattr(exposure_bias.ExposureBiasLab, "errors", after_true_tokens)
    assert "true prefixes: wrong after its own text, over never coming back" in failed(small("exposure-bias"))


@pytest.mark.heavy
def test_exposure_bias_fails_when_no_prefix_of_training_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    train = exposure_bias.ExposureBiasLab._train
    monkeypatch.setattr(
        exposure_bias.ExposureBiasLab, "_train", lambda sizes, task, seed: train(sizes, replace(task, noise=0.0), seed)
    )
    result = small("exposure-bias")
    assert failed(result) == {
        "30% of the prefixes replaced: wrong after its own text, over never coming back",
        "wrong less than the one trained on true prefixes",
    }
    assert "Wrong tokens in the prefixes of training did not help" in result.meaning


def test_no_token_is_in_two_texts_and_rows_begin_with_the_cue() -> None:
    task = RecitedTexts(3, 5, seed=2)
    assert sorted(task.tokens.flatten()) == list(range(15))
    for row in task.rows(np.random.default_rng(0), 20):
        assert row.targets.tolist() == task.tokens[row.ids[0] - 15].tolist()
        assert row.ids[1:].tolist() == row.targets[:-1].tolist()
        assert row.trained.all()


def test_noise_replaces_the_prefix_and_not_the_targets() -> None:
    task = RecitedTexts(3, 50, seed=2, noise=0.25)
    rows = task.rows(np.random.default_rng(0), 200)
    replaced = np.mean([row.ids[1:] != row.targets[:-1] for row in rows])
    assert replaced == pytest.approx(0.25, abs=0.02)
    assert all(row.targets.tolist() == task.tokens[row.ids[0] - 150].tolist() for row in rows)


def test_never_coming_back_is_a_replaced_token_before_the_place() -> None:
    sizes = exposure_bias.ExposureBiasLab(texts=2, length=6, replaced=0.2)
    task, noise = RecitedTexts(2, 6, seed=0), np.random.default_rng(0)
    true = task.tokens[noise.integers(2, size=20000)]
    wrong = task.disturbed(true, 0.2, noise) != true
    before = [wrong[:, :place].any(-1).mean() for place in range(6)]
    assert sizes.never_back() == pytest.approx(np.array(before), abs=0.02)


@pytest.mark.parametrize(
    "wrong", [{"texts": 1}, {"length": 3}, {"replaced": 1.0}, {"noises": (0.1, 1.5)}, {"width": 6}]
)
def test_exposure_bias_refuses_sizes_it_cannot_use(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="size"):
        labs.run("exposure-bias", Setup(sizes=wrong))


# ---------------------------------------------------------------- trained-scores


@pytest.mark.heavy
def test_trained_scores_fails_when_every_dot_product_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = reading_heads.attention

    def divided(*given: Any, mechanism: Any, scale: float | None, **options: Any) -> Any:
        return attention(*given, mechanism=mechanism, scale=scale if mechanism else None, **options)

    monkeypatch.setattr(reading_heads, "attention", divided)
    claim = "d 1024: answers right with the additive score, less with the dot product without scale"
    assert failed(small("trained-scores")) == {claim, "deviation of first scores, additive over the other"}


def test_the_scores_are_those_of_their_names() -> None:
    sizes = reading_heads.TrainedScoresLab()
    dot, plain, additive = (sizes.scorer(name, 8) for name in reading_heads.SCORES)
    assert (dot.mechanism, dot.scale, plain.mechanism, plain.scale) == (None, None, None, 1.0)
    assert additive.mechanism == AdditiveSpec(width=8)
    assert additive.scale == 1.0


# ---------------------------------------------------------------- cosine-scores


@pytest.mark.heavy
def test_cosine_scores_fails_without_the_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = reading_heads.attention

    def without(*given: Any, q_norm: Any, k_norm: Any, **options: Any) -> Any:
        return attention(*given, **options)

    monkeypatch.setattr(reading_heads, "attention", without)
    claims = failed(small("cosine-scores"))
    assert "cosine: answers right with weights 16 times as large" in claims
    assert "cosine: largest score before training, over √d" in claims


def test_larger_weights_change_the_scores_of_the_dot_product_alone() -> None:
    sizes = reading_heads.CosineScoresLab(factor=3.0)
    largest = {
        (name, begin): sizes._largest(sizes.head(name, begin, 0), 0)
        for name in (reading_heads.DOT, reading_heads.COSINE)
        for begin in (reading_heads.DRAWN, reading_heads.LARGER)
    }
    assert largest["dot product", "drawn larger"] == pytest.approx(9 * largest["dot product", "as drawn"], rel=1e-4)
    assert largest["cosine", "drawn larger"] == pytest.approx(largest["cosine", "as drawn"], rel=1e-4)
