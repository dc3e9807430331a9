"""The lab of equal parameters over depth, width and heads: its shapes, and what makes it FAIL."""

from typing import Any

import numpy as np
import pytest

from lab_results import failed, passes, shuffle_rows
from triptych.errors import InputError
from triptych_lectures import labs
from triptych_lectures.labs import capacity
from triptych_lectures.labs.capacity import CapacityLab, Repetition
from triptych_lectures.labs.generated_tasks import LookupTable, TrainedHead, TrainedRun, with_positions
from triptych_lectures.labs.lab import LabResult, Setup
from triptych_lectures.labs.small_models import block, parameters

REPEATED = "repetition: right by 2 layers"


def test_shapes_have_equal_parameters() -> None:
    lab = CapacityLab()
    counts = {}
    for shape in [*lab._deep(), *lab._wide()]:
        blocks = [block(shape.width, shape.heads, shape.hidden)] * shape.layers
        counts[shape] = parameters(with_positions(blocks, lab.symbols, lab.length, 0))
    assert len({(shape.layers, shape.width) for shape in counts}) == 5
    assert max(counts.values()) / min(counts.values()) < 1.05


def test_a_repetition_is_answered_by_what_it_repeats() -> None:
    for row in Repetition(12, 3, 5).rows(np.random.default_rng(0), 10):
        once = (len(row.ids) + 1) // 2
        assert (row.targets[row.trained] == row.ids[1:once]).all()


def test_a_budget_that_leaves_no_mlp_is_an_error() -> None:
    with pytest.raises(InputError, match="leave no MLP"):
        labs.run("capacity", Setup(sizes={"budget": 9000}))


def judged(monkeypatch: pytest.MonkeyPatch, **changed: float) -> LabResult:
    """The verdict on made-up shares of right answers: those of `changed`, else as the claim has them."""
    right = {
        "lookup of one": 0.2,
        "lookup": 1.0,
        "places of one": 0.1,
        "places": 1.0,
        "table of one": 0.9,
        "table": 0.9,
    }
    right |= {name.replace("_", " "): value for name, value in changed.items()}

    def trained(self: CapacityLab, shape: capacity.Shape, task: Any, seed: int) -> TrainedHead:
        kinds = {Repetition: ("lookup", shape.layers), LookupTable: ("table", shape.layers)}
        kind, size = kinds.get(type(task), ("places", shape.heads))
        share = right[f"{kind} of one" if size == 1 else kind]
        if isinstance(task, capacity.ShuffledTask):
            share = right.get("control", 0.0)
        return TrainedHead(TrainedRun([(float(i), 1 - share) for i in range(20)], guess=1.0), share, 60_000)

    monkeypatch.setattr(CapacityLab, "_trained", trained)
    return labs.run("capacity")


def test_it_passes_on_what_the_claim_says(monkeypatch: pytest.MonkeyPatch) -> None:
    passes(judged(monkeypatch))


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        ({"lookup_of_one": 0.9}, f"{REPEATED}, less by one"),
        ({"places_of_one": 0.9}, "four places: right by 4 heads, less by one"),
        ({"table_of_one": 0.2}, "table: bits stored by the worst shape, over the best"),
        ({"control": 0.5}, "control: bits of shuffled answers, over the best shape's"),
    ],
)
def test_it_fails_where_a_shape_does_otherwise(
    changed: dict[str, float], claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed(judged(monkeypatch, **changed)) == {claim}


@pytest.mark.heavy
@pytest.mark.parametrize("task", [LookupTable, Repetition, capacity.Places])
def test_it_fails_on_shuffled_answers(task: type, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle_rows(monkeypatch, task)
    assert not labs.run("capacity").passed
