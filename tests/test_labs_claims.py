"""The labs about trained models: PASS in small, FAIL when their mechanism is broken or their data are shuffled."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import test_labs_learning
from lab_results import Known, failed, passes, shuffle_rows
from triptych import nn, spec
from triptych.attention import Rows
from triptych.nn.feedforward import GLU
from triptych.nn.positions import Sinusoidal
from triptych.ops import ACTIVATIONS
from triptych_lectures import labs
from triptych_lectures.labs import (
    activations,
    deep_stacks,
    depth,
    dropout_places,
    embedding_scale,
    generated_tasks,
    heads_and_width,
    padding,
    reading_heads,
)
from triptych_lectures.labs.lab import LabResult, Setup

SMALL: dict[str, dict[str, Any]] = {
    "norm-placement": {"depths": (2, 7), "draws": 3},
    "residual-scaling": {"untrained": (4, 16), "draws": 1},
    "trained-scale": {"widths": (4, 512), "steps": 120, "length": 16},
    "trained-heads": {"draws": 3},
    "activations": {"draws": 4, "without": 1},
    "dropout-places": {},
    "embedding-scale": {"draws": 1},
    "padding": {"padded": (20, 160), "steps": 150, "tested": 100},
} | test_labs_learning.SMALL
TASKS = {
    "norm-placement": generated_tasks.Places,
    "residual-scaling": generated_tasks.Places,
    "trained-scale": generated_tasks.Places,
    "trained-heads": generated_tasks.Places,
    "activations": generated_tasks.LookupTable,
    "dropout-places": generated_tasks.Places,
    "embedding-scale": generated_tasks.Places,
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
    assert labs.lab_class(name).seeds == 10


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
        ((), "post-norm, 7 layers: learned more with a warm-up, mean"),
        (("post", "pre"), "pre-norm, the worst of all depths, with and without a warm-up: learned"),
        (("post-norm, warm-up", "post-norm, no"), "post-norm, 7 layers, warm-up: learned, mean"),
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


def test_a_mean_that_rounds_to_nothing_has_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post-norm without a warm-up ends a little above the loss of a guess."""
    worse = generated_tasks.TrainedRun([(0.0, 1.001), (1.0, 1.001)], guess=1.0)

    def canned(sizes: Any, name: str, how: str, depth: int, task: Any, seed: int) -> generated_tasks.TrainedRun:
        bad = isinstance(task, generated_tasks.ShuffledTask) or (name, how) == (deep_stacks.POST, deep_stacks.WITHOUT)
        return worse if bad else GOOD

    monkeypatch.setattr(deep_stacks.NormPlacementLab, "_train", canned)
    result = labs.run("norm-placement")
    assert worse.learned < 0
    assert "on the mean 0.00 and" in next(iter(result.conclusion)).statement


def test_residual_scaling_fails_when_nothing_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are real; the runs are not, and differ by nothing but that one way diverges."""
    diverged = generated_tasks.TrainedRun([], 1.0, diverged=True)
    monkeypatch.setattr(
        deep_stacks.ResidualScalingLab,
        "_train",
        lambda lab, way, *given: diverged if way == deep_stacks.ZERO else GOOD,
    )
    setup = Setup(sizes={"untrained": (4, 16)})
    usual = failed(labs.run("residual-scaling", setup))
    assert "not scaled, 16 layers: steps later than scaled to learn half" in usual
    assert "scaled: the stream's variance before training grows as depth to the power" not in usual
    assert "outputs that begin at 0, 16 layers: steps later than scaled" in usual
    redraw = generated_tasks.redraw
    monkeypatch.setattr(generated_tasks, "redraw", lambda module, seed, std, written: redraw(module, seed, std))
    assert "scaled: the stream's variance before training grows as depth to the power" in failed(
        labs.run("residual-scaling", setup)
    )


def test_means_of_steps_are_written_as_they_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs the mean may be half a step: written without it, 37.5 and 56.5 would be 18 steps apart, not 19."""

    def canned(lab: Any, way: str, depth: int, task: Any, seed: int) -> generated_tasks.TrainedRun:
        least = {deep_stacks.SCALED: 36 + 3 * (seed % 2), deep_stacks.PLAIN: 55 + 3 * (seed % 2)}.get(way, 20)
        return generated_tasks.TrainedRun([(float(step), float(step < least)) for step in range(81)], guess=1.0)

    monkeypatch.setattr(deep_stacks.ResidualScalingLab, "_train", canned)
    result = labs.run("residual-scaling", Setup(sizes={"untrained": (4, 16)}))
    (delay,) = (check.measured for check in result.checks if check.claim.startswith("not scaled, 16 layers: steps"))
    steps = re.search(
        r"after (\S+) steps scaled and (\S+) unscaled", " ".join(of.statement for of in result.conclusion)
    )
    assert steps is not None
    assert all(step.endswith(".5") for step in steps.groups())
    assert float(steps[2]) - float(steps[1]) == delay == 19


def test_of_the_deepest_stack_its_own_clause_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the depth that a warm-up makes learn, post-norm must fail with it too, and pre-norm must not."""

    def canned(sizes: Any, name: str, how: str, depth: int, task: Any, seed: int) -> generated_tasks.TrainedRun:
        shuffled = isinstance(task, generated_tasks.ShuffledTask)
        fails = shuffled or (name == deep_stacks.POST and (depth == deepest or how == deep_stacks.WITHOUT))
        return BAD if fails else GOOD

    monkeypatch.setattr(deep_stacks.NormPlacementLab, "_train", canned)
    setup, deepest = Setup(sizes={"depths": (4, 7, 128)}), 128
    passes(labs.run("norm-placement", setup))
    deepest = 64
    assert failed(labs.run("norm-placement", setup)) == {"post-norm, 128 layers: learned, the better of both"}


@pytest.mark.heavy
def test_trained_scale_fails_when_no_head_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    def undivided(*given: Any, scale: float | None, **options: Any) -> Any:
        return spec.attention(*given, scale=1.0, **options)

    monkeypatch.setattr(reading_heads, "attention", undivided)
    assert "d 512: answers right with 1/√d, less without" in failed(small("trained-scale"))


def test_trained_scale_fails_when_smaller_weights_do_not_give_the_scaled_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is learned is not real; the first scores are."""
    monkeypatch.setattr(reading_heads.ReadingLab, "learned", lambda *given: generated_tasks.TrainedHead(GOOD, 1.0, 1))
    claim, setup = "distance of its first scores from those of 1/√d", Setup(sizes={"widths": (4, 64)})
    assert claim not in failed(labs.run("trained-scale", setup))
    smaller = generated_tasks.multiply_queries_and_keys
    monkeypatch.setattr(generated_tasks, "multiply_queries_and_keys", lambda module, by: smaller(module, by**2))
    assert claim in failed(labs.run("trained-scale", setup))


@pytest.mark.heavy
def test_trained_heads_fails_when_the_layer_is_not_cut_into_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    block = heads_and_width.block
    monkeypatch.setattr(heads_and_width, "block", lambda width, heads, hidden: block(width, 1, hidden))
    assert "4 places read right by 4 heads, less by 1" in failed(small("trained-heads"))


@pytest.mark.parametrize(
    ("sixteen", "wrong"),
    [(0.99, 0.25), (0.6, -0.5)],
    ids=["more heads help", "more heads harm"],
)
def test_trained_heads_tests_both_directions(sixteen: float, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more heads than places little changes: neither a gain nor as much as too few heads lose."""
    learned, parameters = {1: 0.5, 4: 0.8, 16: sixteen}, dict.fromkeys((1, 4, 16), 9)

    def canned(sizes: Any, heads: int, task: Any, seed: int) -> generated_tasks.TrainedHead:
        shuffled, one = isinstance(task, generated_tasks.ShuffledTask), task.classes == sizes.symbols
        share = 1 - learned[heads] + 0.001 * (seed % 7)
        run = generated_tasks.TrainedRun([(float(step), share) for step in range(20)], guess=1.0)
        return generated_tasks.TrainedHead(
            run, 0.3 if shuffled else 1.0 if one or heads > 1 else 0.5, parameters[heads]
        )

    monkeypatch.setattr(heads_and_width.TrainedHeadsLab, "_trained", canned)
    result = labs.run("trained-heads")
    [check] = [check for check in result.checks if not check.passed]
    assert check.claim == "learned more with 16 heads than with 4, mean over what 4 gained"
    assert check.measured > wrong if wrong > 0 else check.measured < wrong
    assert "More heads than places changed what was learned" in result.meaning
    learned[16] = 0.75
    assert "learned less than 4 in 10 of 10 initializations (95%" in passes(labs.run("trained-heads")).meaning
    learned[16] = learned[4]
    assert failed(labs.run("trained-heads")) == {"initializations in which the two learned differently"}
    learned[16], parameters[4] = 0.75, 10
    assert failed(labs.run("trained-heads")) == {"parameters of the largest layer over those of the smallest"}


@pytest.mark.heavy
def test_activations_fails_when_the_gate_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def ungated(self: Any, x: torch.Tensor, *given: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.down(ACTIVATIONS[self.spec.act](self.gate(x)))
        return hidden

    monkeypatch.setattr(GLU, "forward", ungated)
    result = small("activations")
    assert "SwiGLU learned more than ReLU, the low end of the mean's 95% interval" in failed(result)
    assert "SwiGLU was not seen to learn more than ReLU at equal parameters: SwiGLU learned more" in result.meaning


def test_activations_fails_when_gelu_is_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained: all runs are the same."""
    monkeypatch.setattr(activations.ActivationsLab, "_train", lambda *given: GOOD)
    assert "tables of which the two learned different shares" in failed(labs.run("activations"))


# ---------------------------------------------------------------- dropout-places and embedding-scale


def test_dropout_places_fails_when_the_usual_places_drop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned is not real."""
    monkeypatch.setattr(generated_tasks, "train", lambda *given: GOOD)
    claim = "usual places: cosine of two passes of a new stack, the largest"
    assert claim not in failed(labs.run("dropout-places"))
    spec = dropout_places.DropoutPlacesLab.spec

    def unless_usual(lab: Any, place: str, depth: int) -> Any:
        return spec(lab, dropout_places.NONE if place in dropout_places.USUAL else place, depth)

    monkeypatch.setattr(dropout_places.DropoutPlacesLab, "spec", unless_usual)
    assert claim in failed(labs.run("dropout-places"))


@pytest.mark.heavy
def test_dropout_places_fails_when_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_places.ops, "dropout", lambda x, *given, **options: x)
    result = small("dropout-places")
    assert {claim.split(":")[0] for claim in failed(result)} == {
        "residual stream, 12 layers",
        "cosine of two passes",
        "usual places",
    }
    assert "That depth does not bear dropout on the stream was not seen" in result.meaning


def test_dropout_places_sees_a_block_that_differs_in_more_than_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dropout_places.DropoutPlacesLab()
    assert sizes._apart(0) < 1e-4
    forward = dropout_places.StreamDropoutBlock.forward
    monkeypatch.setattr(dropout_places.StreamDropoutBlock, "forward", lambda self, *given: 2 * forward(self, *given))
    assert sizes._apart(0) > 1e-2


def test_each_place_drops_where_its_name_says() -> None:
    sizes = dropout_places.DropoutPlacesLab(dropped=0.3)
    for place in dropout_places.PLACES:
        stack = sizes.spec(place, 2).decoder
        assert stack is not None
        layer = stack.blocks[1]
        rates = {
            "attention weights": layer.attn.dropout,
            "embeddings": stack.embed.dropout,
            "residual stream": layer.dropout if isinstance(layer, dropout_places.StreamDropout) else 0.0,
            "sublayers' outputs": layer.dropout if type(layer) is spec.BlockSpec else 0.0,
        }
        assert rates == {other: 0.3 if other == place else 0.0 for other in rates}


@pytest.mark.heavy
def test_embedding_scale_fails_when_the_factor_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = embedding_scale.decoder
    monkeypatch.setattr(
        embedding_scale, "decoder", lambda *given, scale, **options: decoder(*given, scale=None, **options)
    )
    result = small("embedding-scale")
    assert {"1/√d, d 512, √d: share of the token", "1/√d: steps sooner with √d to learn half"} <= failed(result)
    assert "That √d makes small tokens learn sooner was not seen" in result.meaning


def test_embedding_scale_speaks_of_positions_only_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained."""
    monkeypatch.setattr(generated_tasks, "train", lambda *given: GOOD)
    claim = "these two: share of the token less 2/3, where sizes are equal"
    assert claim not in failed(labs.run("embedding-scale"))
    monkeypatch.setattr(Sinusoidal, "embed", lambda self, at: torch.zeros(len(at), self.spec.width))
    assert claim in failed(labs.run("embedding-scale"))


@pytest.mark.parametrize("width", [64, 512])
def test_the_token_s_share_is_that_of_the_two_variances(width: int) -> None:
    sizes = embedding_scale.EmbeddingScaleLab()
    for (name, scaled), variance in {("1/√d", False): 1 / width, ("1/√d", True): 1.0, ("1", False): 1.0}.items():
        assert sizes.share(name, scaled, width, 3) == pytest.approx(variance / (variance + 0.5), rel=0.1)


def test_activations_refuses_a_hidden_width_without_two_thirds() -> None:
    with pytest.raises(labs.InputError, match="size hidden: 25 must be a multiple of 3"):
        labs.run("activations", Setup(sizes={"hidden": 25}))


def test_padding_fails_when_the_mask_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without training: what a new model answers is moved by padding as well."""
    monkeypatch.setattr(padding, "train", lambda *given: GOOD)
    sizes = {"tested": 8, "padded": (20, 30)}
    claim = "control: padded and masked: largest change of a log-probability, nats"
    result = labs.run("padding", Setup(sizes=sizes))
    assert not any("as much as it has seen" in of.statement for of in result.conclusion)  # at 80 of 20 it is right too
    untrained = failed(result)
    assert claim not in untrained
    assert "right more than the one trained without, mean of the lengths" in untrained
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
