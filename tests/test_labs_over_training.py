"""The lab of heads over training: its rows, and its criteria on made-up histories and on what cannot be learned."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lab_results import failed
from triptych.train import Example
from triptych_lectures import labs
from triptych_lectures.labs import roles_over_training
from triptych_lectures.labs.lab import LabResult, Setup
from triptych_lectures.labs.roles_over_training import LOOKS, History, RolesOverTrainingLab

ORDER = "induction score midway, after what a repetition saves, share of the training"
ENDS = "induction score at the end"


def stepped(at: int, before: float, after: float) -> list[float]:
    """A value that changes at one look."""
    return [before if i < at else after for i in range(LOOKS + 1)]


def history(layers: int, induction: int = 20, loss: int = 18, previous: int = 18) -> History:
    """What two layers show whose heads and whose loss change at these looks; one layer shows no change."""
    deep = layers == 2
    score = stepped(induction, 0.05, 0.9 if deep else 0.05)
    before = stepped(previous, 0.1, 0.6 if deep else 0.1)
    return History(
        steps=list(range(LOOKS + 1)),
        first=stepped(4, 3.7, 2.8),
        again=stepped(loss, 2.8, 0.1 if deep else 2.8),
        induction=[[[0.05], [one]] if deep else [[one]] for one in score],
        previous=[[[one], [0.1]] if deep else [[one]] for one in before],
    )


def judged(monkeypatch: pytest.MonkeyPatch, **deep: int) -> LabResult:
    made = {1: history(1), 2: history(2, **deep)}
    monkeypatch.setattr(RolesOverTrainingLab, "_trained", lambda self, layers, *given: made[layers])
    return labs.run("roles-over-training", Setup(sizes={"steps": LOOKS, "rows": 1}))


def test_a_loss_that_falls_shortly_before_the_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch).passed


@pytest.mark.parametrize(("induction", "loss"), [(30, 5), (20, 36)])
def test_a_loss_that_falls_at_another_time_is_not(induction: int, loss: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ORDER in failed(judged(monkeypatch, induction=induction, loss=loss))


def test_a_previous_token_head_that_comes_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (claim,) = failed(judged(monkeypatch, previous=36))
    assert claim.startswith("previous-token score midway")


def test_a_walk_is_twice_the_same_and_keeps_to_its_table() -> None:
    table = np.array([[1, 2], [2, 3], [3, 0], [0, 1]], dtype=np.int32)
    lab = RolesOverTrainingLab(vocab=4, follow=2, shortest=3, longest=3)
    for seed in range(20):
        row = lab._walk(table, np.random.default_rng(seed))
        ids = [*row.ids.tolist(), int(row.targets[-1])]
        assert ids[:3] == ids[3:]
        assert len(set(ids[:3])) == 3
        assert all(b in table[a] for a, b in pairwise(ids[:3]))
        assert row.trained.all()


@pytest.mark.heavy
def test_it_fails_on_rows_that_repeat_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = RolesOverTrainingLab._walk

    def unrepeated(self: RolesOverTrainingLab, table: Any, noise: np.random.Generator) -> Example:
        row = walk(self, table, noise)
        once = (len(row.ids) + 1) // 2
        ids = np.array([*row.ids.tolist(), row.targets[-1]], dtype=np.int32)
        ids[once:] = noise.permutation(ids[once:])
        return Example(ids[:-1], ids[1:], row.trained)

    monkeypatch.setattr(RolesOverTrainingLab, "_walk", unrepeated)
    assert ENDS in failed(labs.run("roles-over-training"))


@pytest.mark.heavy
def test_it_fails_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which token is the one before cannot be seen then."""
    made = roles_over_training.with_positions

    def unplaced(*given: Any) -> Any:
        module = made(*given)
        for name, weight in module.named_parameters():
            if "position" in name:
                weight.data.zero_()
                weight.requires_grad_(False)
        return module

    monkeypatch.setattr(roles_over_training, "with_positions", unplaced)
    assert ENDS in failed(labs.run("roles-over-training"))
