"""What tests of labs share: which criteria of a result failed, and a task whose rows are known."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from triptych.attention import EncoderOutput
from triptych.attention.cross_cache import Project
from triptych.train import Example
from triptych_lectures.labs.generated_tasks import ShuffledTask
from triptych_lectures.labs.lab import LabResult


def failed(result: LabResult) -> set[str]:
    """The claim of each criterion that was not met."""
    return {check.claim for check in result.checks if not check.passed}


def passes(result: LabResult) -> LabResult:
    """The result, every criterion of which was met."""
    assert result.passed, result.verdict
    return result


def random_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time of each call is another, whatever it does."""
    clock = accumulate(0.1 * (1 + n * n % 7) for n in count())
    monkeypatch.setattr("time.thread_time", lambda: next(clock))


@dataclass(frozen=True)
class Known:
    """A task with one set of rows."""

    known: list[Example]
    classes: int = 3

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        return self.known


def change_values(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Cross-attention reads changed values beside the keys that it had."""
    keys = EncoderOutput.keys

    def changed(self: EncoderOutput, layer: int, project: Project) -> tuple[Tensor, Tensor]:
        k, v = keys(self, layer, project)
        return k, change(v)

    monkeypatch.setattr(EncoderOutput, "keys", changed)


def shuffle_rows(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Every task of this kind has its answers in a random order."""
    rows = kind.rows

    def shuffled(self: Any, noise: np.random.Generator, count: int) -> list[Example]:
        return ShuffledTask(Known(rows(self, noise, count))).rows(noise, count)

    monkeypatch.setattr(kind, "rows", shuffled)
