"""The lab of depth, width and heads at equal parameters: its tasks, its verdict, and what makes it FAIL."""

from typing import Any

import numpy as np
import pytest

from lab_results import failed, passes, shuffle_rows
from triptych.errors import InputError
from triptych.spec import window
from triptych_lectures import labs
from triptych_lectures.labs import capacity, small_models
from triptych_lectures.labs.capacity import CapacityLab, FollowerTable, Repetition, Shape
from triptych_lectures.labs.generated_tasks import Places, ShuffledTask
from triptych_lectures.labs.lab import LabResult, Setup

REPEATED = "repetition: right by two layers, from a guess, 0, to all, 1"
WIDE, DEEP = "table: wide less deep, over that of the ranks", "table: deep less one layer, likewise"
GAINED = "four places: learned by four heads, less by one"
STACKED = "four places: learned by four layers of one head, less by four heads"


# ---------------------------------------------------------------- the tasks


def test_a_repetition_is_answered_by_what_it_repeats() -> None:
    for row in Repetition(12, 3, 5).rows(np.random.default_rng(0), 10):
        once = (len(row.ids) + 1) // 2
        assert (row.targets[row.trained] == row.ids[1:once]).all()


def test_the_guess_is_right_as_often_as_one_that_draws() -> None:
    task, noise = Repetition(20, 4, 9), np.random.default_rng(3)
    hits = []
    for row in task.rows(noise, 3000):
        once = (len(row.ids) + 1) // 2
        for place in np.flatnonzero(row.trained):
            hits.append(row.targets[place] == noise.choice(row.ids[place + 1 - once : once]))
    assert np.mean(hits) == pytest.approx(task.guess, abs=0.02)


def test_answers_of_the_table_are_drawn_with_its_probabilities() -> None:
    task = FollowerTable(4, 50, seed=2)
    counts = np.zeros((4, 4))
    for row in task.rows(np.random.default_rng(0), 1000):
        np.add.at(counts, (row.ids, row.targets), 1)
    table = np.exp(task.logits)
    assert counts / counts.sum(1, keepdims=True) == pytest.approx(table / table.sum(1, keepdims=True), abs=0.03)


def test_what_is_learned_of_the_table_is_bound_by_the_rank() -> None:
    task, every = FollowerTable(16, 12, seed=1), np.arange(16, dtype=np.int32)
    assert task.learned(np.zeros((16, 16)), every) == pytest.approx(0)
    assert task.learned(task.logits + 5.0, every) == pytest.approx(1)
    assert task.learned(task.logits[::-1].copy(), every) < 0
    ranks = [task.of_rank(rank) for rank in (4, 8, 12, 16)]
    assert ranks == sorted(ranks)
    assert ranks[-1] == pytest.approx(1)


# ---------------------------------------------------------------- the verdict, on made-up models


def judged(monkeypatch: pytest.MonkeyPatch, count: int = 0, **changed: float) -> LabResult:
    """The verdict on what the models would have learned: as the claim has it, but for those of `changed`."""
    shares = {"repetition_1": 0.2, "repetition_2": 0.9, "table_wide": 0.9, "table_deep": 0.8, "table_narrow": 0.8}
    shares |= {"heads": 1.0, "one_head": 0.7, "stacked": 1.0, "one_place": 1.0, "shuffled": 0.0} | changed

    def trained(self: CapacityLab, task: Any, shape: Shape, seed: int) -> tuple[int, float]:
        if isinstance(task, ShuffledTask):
            name = "shuffled"
        elif isinstance(task, Repetition):
            name = f"repetition_{shape.layers}"
        elif isinstance(task, FollowerTable):
            name = "table_wide" if shape.width == self.wide else "table_deep" if shape.layers > 1 else "table_narrow"
        elif len(task.places) == 1:
            name = "one_place"
        else:
            name = "stacked" if shape.layers > 1 else "heads" if shape.heads > 1 else "one_head"
        return 1000 + count * shape.layers, shares[name]

    monkeypatch.setattr(CapacityLab, "_trained", trained)
    return labs.run("capacity")


def test_it_passes_on_what_the_claim_says(monkeypatch: pytest.MonkeyPatch) -> None:
    passes(judged(monkeypatch))


@pytest.mark.parametrize(
    ("changed", "claims"),
    [
        ({"repetition_1": 0.9}, {"repetition: right by one wide layer, less a guess"}),
        ({"repetition_2": 0.4}, {REPEATED}),
        ({"table_wide": 0.8}, {WIDE}),
        ({"table_deep": 0.9}, {WIDE, DEEP}),
        ({"table_deep": 0.7}, {DEEP}),
        ({"shuffled": 0.2}, {"control: table: learned from shuffled answers"}),
        ({"one_head": 0.95}, {GAINED}),
        ({"stacked": 0.75}, {STACKED}),
        ({"heads": 0.85}, {STACKED}),
        ({"heads": 0.75}, {GAINED, STACKED}),
        ({"one_place": 0.8}, {"control: one place: learned by one head"}),
        ({"count": 20}, {f"{task}: parameters, most over least" for task in ("table", "four places")}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "fails",
)
def test_it_fails_where_a_shape_does_otherwise(
    changed: dict[str, Any], claims: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = judged(monkeypatch, **changed)
    assert failed(result) == claims
    assert "was not seen" in result.meaning


@pytest.mark.parametrize("sizes", [{"vocab": 8}, {"narrow": 64}, {"symbols": 40}], ids=str)
def test_sizes_that_contradict_each_other_are_an_error(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"size (longest|narrow|wide): .* must be (at most|below)"):
        labs.run("capacity", Setup(sizes=sizes))


# ---------------------------------------------------------------- trained, and broken on purpose

Models = dict[tuple[Any, Shape], tuple[int, float]]


@pytest.fixture(scope="module")
def models() -> Models:
    """Each model of a run at default size, which passes."""
    kept: Models = {}
    trained = CapacityLab._trained

    def keep(self: CapacityLab, task: Any, shape: Shape, seed: int) -> tuple[int, float]:
        kept[task, shape] = trained(self, task, shape, seed)
        return kept[task, shape]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapacityLab, "_trained", keep)
        passes(labs.run("capacity", Setup(seed=1)))
    return kept


def again(kind: type, models: Models, monkeypatch: pytest.MonkeyPatch) -> LabResult:
    """The same run, with the models of one kind of task trained anew."""
    trained = CapacityLab._trained

    def taken(self: CapacityLab, task: Any, shape: Shape, seed: int) -> tuple[int, float]:
        return trained(self, task, shape, seed) if isinstance(task, kind) else models[task, shape]

    monkeypatch.setattr(CapacityLab, "_trained", taken)
    return labs.run("capacity", Setup(seed=1))


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "claim"), [(Repetition, REPEATED), (FollowerTable, WIDE), (Places, GAINED)])
def test_it_fails_on_shuffled_answers(kind: type, claim: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle_rows(monkeypatch, kind)
    assert claim in failed(again(kind, models, monkeypatch))


@pytest.mark.heavy
def test_two_layers_repeat_nothing_where_attention_does_not_reach(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small_models.decoder
    monkeypatch.setattr(small_models, "decoder", lambda *given, **other: decoder(*given, mask=window(2), **other))
    result = again(Repetition, models, monkeypatch)
    assert failed(result) == {REPEATED}
    assert "That two layers repeat what one cannot, at equal parameters, was not seen" in result.meaning


@pytest.mark.heavy
def test_width_does_not_decide_where_the_deep_model_is_as_wide(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    module = capacity._module
    monkeypatch.setattr(capacity, "_module", lambda task, shape, *given: module(task, shape._replace(width=64), *given))
    assert WIDE in failed(again(FollowerTable, models, monkeypatch))


@pytest.mark.heavy
def test_heads_buy_nothing_where_the_layer_is_not_cut_into_heads(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = small_models.block
    monkeypatch.setattr(capacity, "block", lambda width, heads, hidden: block(width, 1, hidden))
    assert GAINED in failed(again(Places, models, monkeypatch))
