"""The labs about trained models: PASS in small, FAIL when their mechanism is broken or their data are shuffled."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import test_labs_learning
from lab_results import Known, failed, passes, shuffle_rows
from triptych import nn, spec
from triptych.attention import Rows
from triptych.nn.feedforward import GLU
from triptych.ops import ACTIVATIONS
from triptych_lectures import labs
from triptych_lectures.labs import deep_stacks, depth, generated_tasks, heads_and_width, padding, reading_heads
from triptych_lectures.labs.lab import LabResult, Setup

SMALL: dict[str, dict[str, Any]] = {
    "norm-placement": {"depths": (2, 6), "steps": 120, "length": 12},
    "residual-scaling": {"untrained": (4, 16)},
    "trained-scale": {"widths": (4, 512), "steps": 120, "length": 16},
    "trained-heads": {"heads": (1, 4)},
    "activations": {"draws": 1},
    "padding": {"padded": (20, 160), "steps": 150, "tested": 100},
} | test_labs_learning.SMALL
TASKS = {
    "norm-placement": generated_tasks.Places,
    "residual-scaling": generated_tasks.Places,
    "trained-scale": generated_tasks.Places,
    "trained-heads": generated_tasks.Places,
    "activations": generated_tasks.LookupTable,
    "padding": padding.MajorityTask,
} | test_labs_learning.TASKS


def small(name: str, seed: int = 1) -> LabResult:
    return labs.run(name, Setup(seed=seed, sizes=SMALL[name]))


# ---------------------------------------------------------------- all of them, with those of test_labs_learning


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_it_passes(name: str) -> None:
    passes(small(name))


@pytest.mark.heavy
@pytest.mark.parametrize("name", SMALL)
def test_it_fails_on_shuffled_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle_rows(monkeypatch, TASKS[name])
    assert not small(name).passed


@pytest.mark.parametrize("name", SMALL)
def test_it_says_what_would_have_falsified_it(name: str) -> None:
    assert labs.lab_class(name).falsified_by.count(".") >= 2
    assert labs.lab_class(name).seeds == 5


# ---------------------------------------------------------------- each mechanism broken


@pytest.mark.heavy
def test_norm_placement_fails_without_the_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Block, "forward", depth.NoResidualBlock.forward)
    worst = "pre-norm, the worst of all depths, with and without a warm-up: learned"
    assert worst in failed(small("norm-placement"))


GOOD, BAD = (generated_tasks.TrainedRun([(float(step), nats) for step in range(20)], guess=1.0) for nats in (0.0, 1.0))


@pytest.mark.parametrize(
    ("bad", "claim"),
    [
        ((), "post-norm: learned more with a warm-up, at the depth where it is most"),
        (("post", "pre"), "pre-norm, the worst of all depths, with and without a warm-up: learned"),
        (("post-norm, warm-up", "post-norm, no"), "post-norm, 4 layers, warm-up: learned"),
    ],
    ids=["all learn", "none learns", "post-norm never learns"],
)
def test_norm_placement_fails_when_a_warm_up_does_not_decide(
    bad: tuple[str, ...], claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def canned(sizes: Any, name: str, how: str, depth: int, task: Any, seed: int) -> generated_tasks.TrainedRun:
        shuffled = isinstance(task, generated_tasks.ShuffledTask)
        return BAD if shuffled or f"{name}, {how}".startswith(bad or ("none",)) else GOOD

    monkeypatch.setattr(deep_stacks.NormPlacementLab, "_train", canned)
    assert claim in failed(labs.run("norm-placement"))


def test_residual_scaling_fails_when_nothing_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are real; the runs are not, and differ by nothing."""
    monkeypatch.setattr(deep_stacks.ResidualScalingLab, "_train", lambda *given: GOOD)
    setup = Setup(sizes={"untrained": (4, 16)})
    usual = failed(labs.run("residual-scaling", setup))
    assert "not scaled, 16 layers: steps later than scaled to learn half" in usual
    assert "scaled: the stream's variance before training grows as depth to the power, either way" not in usual
    monkeypatch.setattr(
        deep_stacks, "redraw", lambda module, seed, std, written: generated_tasks.redraw(module, seed, std)
    )
    assert "scaled: the stream's variance before training grows as depth to the power, either way" in failed(
        labs.run("residual-scaling", setup)
    )


@pytest.mark.heavy
def test_trained_scale_fails_when_no_head_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    def undivided(*given: Any, scale: float | None, **options: Any) -> Any:
        return spec.attention(*given, scale=1.0, **options)

    monkeypatch.setattr(reading_heads, "attention", undivided)
    assert "d 512: answers right with 1/√d, less without" in failed(small("trained-scale"))


@pytest.mark.heavy
def test_trained_heads_fails_when_the_layer_is_not_cut_into_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    block = heads_and_width.block
    monkeypatch.setattr(heads_and_width, "block", lambda width, heads, hidden: block(width, 1, hidden))
    assert "4 places read right by 4 heads, less by 1" in failed(small("trained-heads"))


@pytest.mark.heavy
def test_activations_fails_when_the_gate_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def ungated(self: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.down(ACTIVATIONS[self.spec.act](self.gate(x)))
        return hidden

    monkeypatch.setattr(GLU, "forward", ungated)
    assert "SwiGLU learned more than ReLU, mean of the tables" in failed(small("activations"))


def test_activations_refuses_a_hidden_width_without_two_thirds() -> None:
    with pytest.raises(labs.InputError, match="size hidden: 25 must be a multiple of 3"):
        labs.run("activations", Setup(sizes={"hidden": 25}))


def test_padding_fails_when_the_mask_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training: what a new model answers is moved by padding as well."""
    monkeypatch.setattr(padding, "train", lambda *given: GOOD)
    sizes = {"tested": 8, "padded": (20, 30)}
    claim = "control: padded and masked: largest change of a log-probability, nats"
    assert claim not in failed(labs.run("padding", Setup(sizes=sizes)))
    monkeypatch.setattr(padding, "keys", lambda lengths: spec.full())
    assert claim in failed(labs.run("padding", Setup(sizes=sizes)))


# ---------------------------------------------------------------- tasks and runs


def test_places_name_the_symbols_that_stand_there() -> None:
    task = generated_tasks.Places(5, 9, (1, 3))
    (row,) = task.rows(np.random.default_rng(1), 1)
    assert task.classes == 25
    assert np.flatnonzero(row.trained).tolist() == list(range(3, 9))
    assert [row.targets[t] for t in range(3, 9)] == [5 * row.ids[t - 1] + row.ids[t - 3] for t in range(3, 9)]


def test_a_table_answers_from_the_token_and_the_one_before() -> None:
    task = generated_tasks.LookupTable(5, 9, seed=3)
    (row,) = task.rows(np.random.default_rng(1), 1)
    assert np.array_equal(task.entries, generated_tasks.LookupTable(5, 9, seed=3).entries)
    assert not np.array_equal(task.entries, generated_tasks.LookupTable(5, 9, seed=4).entries)
    assert row.targets[1:].tolist() == [task.entries[row.ids[t - 1], row.ids[t]] for t in range(1, 9)]
    assert row.trained.tolist() == [False] + [True] * 8


def test_shuffled_answers_are_the_same_ones_elsewhere() -> None:
    plain = generated_tasks.Places(5, 9, (2,)).rows(np.random.default_rng(1), 20)
    rows = generated_tasks.ShuffledTask(Known(plain)).rows(np.random.default_rng(2), 20)
    answers, moved = (np.concatenate([row.targets[row.trained] for row in some]) for some in (plain, rows))
    assert all((a.ids == b.ids).all() and (a.trained == b.trained).all() for a, b in zip(plain, rows, strict=True))
    assert sorted(answers) == sorted(moved)
    assert (answers == moved).mean() < 0.5


def test_the_most_frequent_symbol_is_the_answer_and_padding_changes_no_row() -> None:
    task = padding.MajorityTask(4, 5, 12)
    for row in generated_tasks.held_out_rows(task, 30, 0):
        counts = np.bincount(row.ids[1:], minlength=4)
        assert row.ids[0] == 5
        assert np.flatnonzero(row.trained).tolist() == [0]
        assert row.targets[0] == counts.argmax()
        assert np.sort(counts)[-1] >= np.sort(counts)[-2] + 2
        longer = padding.padded(row, 12, 4)
        assert longer.ids[: len(row.ids)].tolist() == row.ids.tolist()
        assert longer.ids[len(row.ids) :].tolist() == [4] * (13 - len(row.ids))
        assert longer.trained.sum() == 1


def test_how_far_a_run_came() -> None:
    falling = generated_tasks.TrainedRun([(float(step), max(0.0, 2 - step / 20)) for step in range(60)], guess=2.0)
    assert falling.learned == 1.0
    assert falling.steps_to(0.5) == 26  # the mean of steps 16 to 25, the first being 0, is at most 1
    assert math.isinf(BAD.steps_to(0.5))
    diverged = generated_tasks.TrainedRun([], 2.0, diverged=True)
    assert diverged.learned == -math.inf
    assert math.isinf(diverged.steps_to(0.5))


def test_a_run_that_diverges_has_no_end() -> None:
    sizes = deep_stacks.NormPlacementLab()
    module = sizes.stack(deep_stacks.PRE, 1, 0)
    generated_tasks.redraw(module, 0, math.inf)
    assert generated_tasks.train(
        module, generated_tasks.Places(16, 16, (0,)), generated_tasks.TrainingBudget(5, 4, 1e-3), 0
    ).diverged


def test_training_rows_are_new_and_never_those_of_the_test() -> None:
    task = generated_tasks.Places(16, 16, (0,))
    data = generated_tasks.GeneratedRows(task)
    first, again, second = (data.draw(0, step, 4) for step in (0, 0, 1))
    assert all((a.ids == b.ids).all() for a, b in zip(first, again, strict=True))
    tests = generated_tasks.held_out_rows(task, 4, 0)
    assert not any((a.ids == b.ids).all() for a in [*first, *second] for b in tests)
    assert not any((a.ids == b.ids).all() for a in first for b in second)


def test_drawing_anew_changes_the_matrices_of_blocks_alone() -> None:
    sizes = deep_stacks.NormPlacementLab()
    module = sizes.stack(deep_stacks.PRE, 2, 0)
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    generated_tasks.redraw(module, 1, 0.5, written=0.0)
    for name, weight in module.named_parameters():
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            assert not weight.any()
        elif ".blocks." in name and weight.dim() == 2:
            assert 0.4 < weight.std() < 0.6
        else:
            assert torch.equal(weight, before[name])


def test_the_share_of_right_answers() -> None:
    sizes = deep_stacks.NormPlacementLab()
    module = sizes.stack(deep_stacks.PRE, 1, 0)
    rows = generated_tasks.held_out_rows(generated_tasks.Places(16, 16, (0,)), 8, 0)
    answers = [
        module.unembed(generated_tasks.final(module, generated_tasks.collate([row])), Rows((16,))) for row in rows
    ]
    own = np.concatenate([one.argmax(-1).numpy() == row.targets for one, row in zip(answers, rows, strict=True)])
    assert generated_tasks.right(module, rows) == pytest.approx(own.mean())
