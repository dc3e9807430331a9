"""Random models, rows and recipes of every objective train as in transformers: losses, gradients, gradient norms, and
the weights after a few steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from test_train_audio import MODEL as WHISPER
from training_cases import STEPS, Apart, Case, compare
from training_objectives import DRAW
from triptych import families
from triptych.train import Optimizer, Schedule, Trainer

# Of fp32, whose numbers have an error of 6e-8: a thousandth of a gradient after some hundred operations of like size.
# AdamW divides by the root of the mean square, so that small gradients, which have larger errors, move weights as far.
LOSS, GRADIENT, WEIGHT = 1e-4, 1e-3, 1e-2
SEEDS = 6

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]


def agrees(apart: Apart) -> bool:
    return apart.loss < LOSS and apart.norm < GRADIENT and apart.gradient < GRADIENT and apart.weight < WEIGHT


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("objective", DRAW)
def test_random_cases_train_as_in_the_reference(objective: str, seed: int) -> None:
    apart = compare(DRAW[objective](seed))
    assert agrees(apart), apart


def _first(objective: str, fits: Callable[[Case], bool]) -> Case:
    """The first case in which what will be broken has an effect."""
    return next(case for case in map(DRAW[objective], range(40)) if fits(case))


def _one_behind(monkeypatch: pytest.MonkeyPatch) -> Case:
    right = Schedule.factor
    monkeypatch.setattr(Schedule, "factor", lambda self, progress: right(self, progress - 1 / STEPS))
    return _first("replaced", lambda case: case.schedule.warmup > 0)


def _unclipped(monkeypatch: pytest.MonkeyPatch) -> Case:
    def norm_alone(self: Optimizer) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None]))

    monkeypatch.setattr(Optimizer, "clip", norm_alone)
    return _first("replaced", lambda case: 0 < case.optimizer.clip < 0.1 and case.schedule.warmup < 0.9)


def _everything_decays(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr("triptych.train.optimizer.roles", lambda model: dict.fromkeys(model.shapes(), "matrix"))
    return _first("replaced", lambda case: case.optimizer.weight_decay > 0.1)


def _equal_parts(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Each micro-batch weighs the same, however many of its tokens are trained."""

    def gradients(self: Trainer, batches: list[Any], total: float, seed: int) -> float:
        count = len(batches)
        means = [self._backward(one, one.weight * count, None, last=True) / one.weight for one in batches]
        return total * sum(means) / count

    monkeypatch.setattr(Trainer, "_gradients", gradients)
    return _first("replaced", lambda case: case.accumulate > 1)


def _another_target(monkeypatch: pytest.MonkeyPatch) -> Case:
    case = DRAW["next token"](0)
    examples = [replace(one, targets=one.ids) for one in case.examples]
    return replace(case, examples=examples)


def _pictures_change_places(monkeypatch: pytest.MonkeyPatch) -> Case:
    case = DRAW["captions"](0)
    images = [one.image for one in case.examples]  # type: ignore[attr-defined]
    moved = [replace(one, image=image) for one, image in zip(case.examples, images[1:] + images[:1], strict=True)]  # type: ignore[call-arg]
    return replace(case, examples=moved)


BROKEN = {
    "the schedule is one step behind": _one_behind, "gradients are not clipped": _unclipped,
    "embeddings, norms and biases decay": _everything_decays, "micro-batches weigh the same": _equal_parts,
    "targets are not shifted": _another_target, "captions of other images": _pictures_change_places,
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_step_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = compare(BROKEN[broken](monkeypatch))
    assert not agrees(apart), apart


@pytest.mark.parametrize("objective", ["speech", "seq2seq"])
def test_what_the_reference_never_trains_moves_without_its_mark(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whisper's sinusoids and the bias of BART's logits."""
    find = families.find
    monkeypatch.setattr(families, "find", lambda name: replace(find(name), fixed=frozenset()))
    apart = compare(DRAW[objective](2))
    assert apart.weight > WEIGHT
    assert "embed_positions" in apart.where or "final_logits_bias" in apart.where


def test_a_new_model_trains_what_a_loaded_one_keeps(tmp_path: Path) -> None:
    name = "encoder.embed.position.weight"
    made = triptych.create({**WHISPER, "vocab_size": 40, "decoder_start_token_id": 1, "eos_token_id": 2})
    assert families.find("whisper").fixed == {name}
    assert made.module.get_parameter(name).requires_grad
    made.save(tmp_path / "model")
    loaded = triptych.load(tmp_path / "model").module
    assert [one for one, p in loaded.named_parameters() if not p.requires_grad] == [name]
