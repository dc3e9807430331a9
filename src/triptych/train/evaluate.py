"""Evaluation of a model on held-out rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.arguments import checked
from triptych.errors import InputError
from triptych.nn import Transformer
from .data import Data
from .objectives import Device, Example, TrainingBatch, collate, exact, final

FEWEST = 8  # batches of an evaluation


@dataclass(frozen=True)
class Score:
    """Of `tokens` predictions: the sum of their losses in nats, and how many ranked the right token first.

    `commonest` counts the predictions that are right when the guess is always the commonest token of the training data.
    `characters` and `bytes` are the size of the text these tokens spell, where it is known.
    """

    nats: float
    tokens: int
    right: int
    commonest: int = 0
    characters: int | None = None
    bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # of an objective other than predicting tokens, by name
    baselines: Mapping[str, float] = field(default_factory=dict)  # what the first metric is for simple guesses

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def nats_per_character(self) -> float | None:
        return self.nats / self.characters if self.characters else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / self.bytes / float(np.log(2.0)) if self.bytes else None

    @property
    def accuracy(self) -> float:
        return self.right / self.tokens

    @property
    def baseline(self) -> float:
        return self.commonest / self.tokens


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out rows in batches, the commonest token of the training data, and the size of the text the rows spell (None
    where tokens do not map to text one to one)."""

    batches: tuple[TrainingBatch, ...]
    commonest: int = 0
    characters: int | None = None
    bytes: int | None = None

    @staticmethod
    def of(held_out: Data, train: Data, tokens: int, *, text: str | None = None, device: Device = "cpu") -> HeldOut:
        """All rows of `held_out` in batches of about `tokens` tokens; `text` is what they spell together.

        Raises InputError where no token of them is predicted.
        """
        commonest = int(np.bincount(train.targets()).argmax())
        batches = batched(held_out.held_out_rows(), tokens, device)
        size = () if text is None else (len(text), len(text.encode()))
        return HeldOut(batches, commonest, *size)

    def sample(self, count: int) -> HeldOut:
        """At most `count` batches, evenly spaced, for a quick estimate; the size of their text is unknown."""
        if count >= len(self.batches):
            return self
        indices = np.linspace(0, len(self.batches) - 1, count).round().astype(int)
        return self.of_batches(tuple(self.batches[i] for i in indices))

    def of_batches(self, batches: tuple[TrainingBatch, ...]) -> HeldOut:
        """Some of the batches, whose text is of unknown size."""
        return replace(self, batches=batches, characters=None, bytes=None)

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        """The score of `module`, in evaluation mode, over `batches`, which are some or all of these."""
        nats, commonest, hits = 0.0, 0, list[tuple[TrainingBatch, Tensor]]()
        for batch in batches:
            logits = exact(module.unembed(final(module, batch), batch.rows))
            nats += float(F.cross_entropy(logits, batch.targets, reduction="sum"))
            commonest += int((batch.targets == self.commonest).sum())
            hits.append((batch, logits.argmax(-1) == batch.targets))
        size = (self.characters, self.bytes) if len(hits) == len(self.batches) else ()
        right = torch.cat([hit for _, hit in hits])
        return self.finished(Score(nats, len(right), int(right.sum()), commonest, *size), module, hits)

    def finished(self, score: Score, module: Transformer, hits: Sequence[tuple[TrainingBatch, Tensor]]) -> Score:
        """The score with the objective's own metrics; `hits` tells of each batch which trained tokens rank first."""
        return score


@torch.no_grad()
@checked
def evaluate(
    module: Transformer,
    held_out: HeldOut,
    context: AbstractContextManager[object] | None = None,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Score:
    """The score of `module`, in evaluation mode, over all batches of `held_out`.

    With `seconds`, no batch beyond the first begins that would end later than that, going by those before it; those
    left out are evenly spaced, and the score then has no size of the text.
    """
    training = module.training
    module.eval()
    batches = held_out.batches if seconds is None else _until(clock() + seconds, _spread(held_out.batches), clock)
    try:
        with context or nullcontext():
            return held_out.measured(module, batches)
    finally:
        module.train(training)


def _until(end: float, batches: Iterable[TrainingBatch], clock: Callable[[], float]) -> Iterator[TrainingBatch]:
    """The first batch, and those after it of which none would end later than `end`, going by those before."""
    longest, now = 0.0, clock()
    for done, batch in enumerate(batches):
        if done and now + longest > end:
            return
        yield batch
        began, now = now, clock()
        longest = max(longest, now - began)


def _spread(batches: Sequence[TrainingBatch]) -> list[TrainingBatch]:
    """The batches in an order whose first ones, however many, are about evenly spaced: by multiples of the golden
    ratio."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    return [batches[i] for i in sorted(range(len(batches)), key=lambda i: i * golden % 1.0)]


def batched(examples: Iterable[Example], tokens: int, device: Device) -> tuple[TrainingBatch, ...]:
    """Held-out rows in order, in batches of about `tokens` tokens; rows without a trained token are left out.

    Raises InputError where nothing of them is predicted.
    """
    groups, length = list[list[Example]](), 0
    for example in examples:
        if example.trained.any():
            length += len(example.ids)
            if not groups or length > tokens:
                groups.append([])
                length = len(example.ids)
            groups[-1].append(example)
    if not groups:
        raise InputError("the held-out data has no token to predict, so nothing can be evaluated; hold out more of it")
    return tuple(collate(group, device) for group in groups)
