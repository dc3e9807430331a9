"""Rows with labels: of the whole row, of its tokens, of an answer's two ends, or of replaced tokens; and their losses.

A loss is a sum over what is labelled, and a batch tells the weight to divide it by, so that a step of several
micro-batches is the step of one large batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.nn import Transformer
from triptych.ops import RowNoise
from triptych.text import Encoded, Tokenizer
from .objectives import Device, Example, Ids, Integers, TrainingBatch, exact, joined

IGNORED = -100  # the goal of a token without a label, as in torch's cross-entropy


class HeadLoss:
    """What a head's outputs should be.  `goals` are those of all rows of a batch, end to end."""

    def __call__(self, outputs: Tensor, goals: Tensor, rows: Rows) -> Tensor:
        """The sum of the losses [], in fp32 or better."""
        raise NotImplementedError

    def weight(self, goals: Tensor) -> float:
        """The divisor of the sum: the number of labels, or the sum of their weights."""
        return float(len(goals))

    def plain(self) -> HeadLoss:
        """The same loss without smoothing and weights, for held-out data."""
        return self

    def predicted(self, outputs: Tensor) -> Integers:
        """The likeliest classes by the outputs of one row, as its goal has them."""
        return (outputs.numpy() > 0).astype(np.int64).reshape(-1)

    def names(self, goal: Sequence[int]) -> list[str]:
        """The targets at the trained tokens of a row, in order, to be read by people."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledExample(Example):
    """One row with its `goal`: `[1]` a class, `[C]` of 0 and 1, `[T]` a class a token or IGNORED, or `[2]` the first
    and the last token of an answer.  `types` [T] are token types, None for other inputs than tokens; `number` is that
    of the record it was made from; `offsets` [T, 2] are the characters of each token of an answer's context, -1 for
    other tokens."""

    goal: Integers
    head: HeadLoss
    types: Ids | None = None
    number: int = 0
    offsets: NDArray[np.int32] | None = None

    def collated(self, examples: Sequence[Example], device: Device) -> LabelledBatch:
        return LabelledBatch.of(examples, device)

    def target_names(self, tokenizer: Tokenizer) -> list[str]:
        names = iter(self.head.names(self.goal.tolist()))
        return [next(names, "") if trained else "" for trained in self.trained.tolist()]


def labelled(
    row: Encoded, goal: Sequence[int] | Integers, head: HeadLoss, number: int, trained: NDArray[np.bool_]
) -> LabelledExample:
    """The example of an encoded row; see `LabelledExample`."""
    ids = np.asarray(row.ids, dtype=np.int32)
    return LabelledExample(
        ids=ids,
        targets=ids,
        trained=trained,
        goal=np.asarray(goal, dtype=np.int64),
        head=head,
        types=np.asarray(row.token_types, dtype=np.int32),
        number=number,
    )


@dataclass(frozen=True, eq=False)
class LabelledBatch(TrainingBatch):
    """Rows of one objective with labels."""

    examples: tuple[LabelledExample, ...] = ()

    @property
    def head(self) -> HeadLoss:
        return self.examples[0].head

    @cached_property
    def goals(self) -> Tensor:
        """Those of the rows, end to end."""
        return joined([one.goal for one in self.examples], self.ids.device)

    @cached_property
    def types(self) -> Tensor | None:
        """Token types [N], None for other inputs than tokens."""
        types = [one.types for one in self.examples if one.types is not None]
        return joined(types, self.ids.device) if types else None

    @property
    def weight(self) -> float:
        return self.head.weight(self.goals)

    def outputs(self, module: Transformer, random: RowNoise | None = None) -> Tensor:
        """The outputs of the head: [B, C] for whole rows, [N, C] for tokens."""
        batch = module.labelled_batch(self.ids, self.rows, token_types=self.types, random=random)
        return module.unembed(module(batch), self.rows, random=random)

    def nats(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        return self.head(exact(self.outputs(module, random)), self.goals, self.rows)


@dataclass(frozen=True)
class ClassLoss(HeadLoss):
    """Cross-entropy of one class a row, or a token, with label smoothing (Szegedy et al. 2016) and class weights [C].

    As in torch, the loss of each label is multiplied by the weight of its class and the sum divided by these weights.
    """

    labels: tuple[str, ...]
    smoothing: float = 0.0
    weights: tuple[float, ...] | None = None

    def __call__(self, outputs: Tensor, goals: Tensor, rows: Rows) -> Tensor:
        weights = None if self.weights is None else outputs.new_tensor(self.weights)
        return F.cross_entropy(
            outputs, goals, weights, reduction="sum", ignore_index=IGNORED, label_smoothing=self.smoothing
        )

    def weight(self, goals: Tensor) -> float:
        goals = goals[goals != IGNORED]
        return super().weight(goals) if self.weights is None else float(torch.tensor(self.weights)[goals.cpu()].sum())

    def plain(self) -> ClassLoss:
        return ClassLoss(self.labels)

    def predicted(self, outputs: Tensor) -> Integers:
        return np.atleast_1d(outputs.numpy().argmax(-1))

    def names(self, goal: Sequence[int]) -> list[str]:
        return [self.labels[one] for one in goal if one != IGNORED]


@dataclass(frozen=True)
class SeveralLoss(HeadLoss):
    """Binary cross-entropy of each of C labels a row, averaged over the labels as in transformers."""

    labels: tuple[str, ...]

    def __call__(self, outputs: Tensor, goals: Tensor, rows: Rows) -> Tensor:
        wanted = goals.view(outputs.shape).to(outputs.dtype)
        return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="sum") / len(self.labels)

    def weight(self, goals: Tensor) -> float:
        return len(goals) / len(self.labels)

    def names(self, goal: Sequence[int]) -> list[str]:
        return [", ".join(compress(self.labels, goal)) or "none"]


@dataclass(frozen=True)
class SpanLoss(HeadLoss):
    """The mean of two cross-entropies over the tokens of a row: of the answer's first token, and of its last."""

    smoothing: float = 0.0

    def __call__(self, outputs: Tensor, goals: Tensor, rows: Rows) -> Tensor:
        total = outputs.new_zeros(())
        for scores, (first, last) in zip(rows.split(outputs), goals.view(-1, 2).tolist(), strict=True):
            ends = torch.tensor([first, last], device=outputs.device)
            total = total + F.cross_entropy(scores.T, ends, label_smoothing=self.smoothing)
        return total

    def weight(self, goals: Tensor) -> float:
        return len(goals) / 2

    def plain(self) -> SpanLoss:
        return SpanLoss()

    def names(self, goal: Sequence[int]) -> list[str]:
        first, last = goal
        if first != last:
            return ["answer begins", "answer ends"]
        return ["answer begins and ends" if first else "no answer"]


@dataclass(frozen=True)
class ReplacedLoss(HeadLoss):
    """Binary cross-entropy of whether each token was replaced (Clark et al. 2020)."""

    def __call__(self, outputs: Tensor, goals: Tensor, rows: Rows) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), goals.to(outputs.dtype), reduction="sum")

    def names(self, goal: Sequence[int]) -> list[str]:
        return ["replaced" if one else "original" for one in goal]
