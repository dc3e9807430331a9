"""The loss of distillation (Hinton, Vinyals and Dean 2015): a model learns a teacher's distributions beside the tokens.

The loss of a token is `(1 - weight) * cross-entropy + weight * T^2 * KL(p || q)`, where p and q are the softmax of the
teacher's and of the model's logits, both divided by the temperature T.  The factor T^2 keeps the gradient of the second
term as large as that of the first when T changes.

Of p the k largest entries may be kept, with all others together as one more entry, "the rest", whose mass is r.  What
KL then leaves out is how the rest is divided: KL(p || q) = KL over k + 1 entries + r * KL(p in the rest || q in the
rest).  So it is a lower bound, and its value and its gradient are 0 for a model that equals the teacher.  Renormalizing
the k entries instead would ask for a rest without mass: for a model that equals the teacher that loss is -log(1 - r),
and its gradient raises the k entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.attention import Rows
from triptych.errors import InputError
from triptych.nn import Transformer
from triptych.ops import RowNoise
from .data import Data
from .objectives import Device, Example, Ids, TrainingBatch, exact, final, in_parts
from .settings import Positive, Rate, RecipeSection, Share

LEAST = -100.0  # the smallest log-probability: its share of a sum is 0 in fp32, and a product with it is finite
#: Log-probabilities [M, k + 1], the rest last, and the ids [M, k] of the others; [M, V] where k is the whole
#: vocabulary, and then no ids where they are in order.
Entries = tuple[Tensor, Tensor | None]


class DistillSettings(RecipeSection):
    """With this table the model learns the distributions of a teacher beside the tokens (Hinton et al. 2015).

    For causal, masked, seq2seq, corruption and chat; docs/concepts/objectives.md.  Losses on held-out data stay those
    of the tokens alone.
    """

    teacher: str
    """A model with the same vocabulary: a model directory, a run directory, a `.gguf` file or `hub:org/name`."""
    top: Positive | None = None
    """How many of the teacher's largest logits count one by one for each token; all others count together. Without it
    all count one by one, and with `store` 64."""
    temperature: Rate = 1.0
    """By which both logits are divided; a higher one gives unlikely tokens more weight."""
    weight: Share = 0.5
    """The share of the teacher in the loss, in [0, 1]; the rest is the cross-entropy of the tokens."""
    store: str | None = None
    """A directory for the teacher's largest logits, which are computed before the first step, once for all runs on the
    same rows; those of causal are then windows at fixed places. Without it the teacher runs in each step."""


def teacher_entries(logits: Tensor, temperature: float, top: int | None = None) -> Entries:
    """The distributions of logits [M, V] at `temperature`, with the `top` largest entries and the rest, or all."""
    every = (logits / temperature).log_softmax(-1).clamp(min=LEAST)
    if top is None:
        return every, None
    largest, ids = every.topk(top, dim=-1)
    return _with_rest(every, largest, ids), ids


def student_entries(logits: Tensor, temperature: float, ids: Tensor | None = None) -> Tensor:
    """The log-probabilities of logits [M, V] at `temperature` for the entries `ids` [M, k] of a teacher: [M, k + 1]."""
    every = (logits / temperature).log_softmax(-1)
    return every if ids is None else _with_rest(every, every.gather(-1, ids), ids)


def _with_rest(every: Tensor, some: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities `some` [M, k] of `every` [M, V], and last that of all but these `ids`, if there are any."""
    if ids.shape[-1] == every.shape[-1]:
        return some
    rest = every.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([some, rest], -1)


@runtime_checkable
class Teacher(Protocol):
    """What knows the distributions of a teacher: its model, or what was stored of it."""

    def known(self, batch: TrainingBatch) -> tuple[Tensor, ...]:
        """What is known of the M trained tokens of a batch, as tensors [M, ...]."""
        ...

    def entries(self, rows: Rows, *known: Tensor) -> Entries:
        """The distributions of some tokens, from their part of `known`."""
        ...


@dataclass(frozen=True, eq=False)
class TeacherModel:
    """A teacher in evaluation mode, of whose logits the first `vocab` count.  It runs in its own dtype."""

    module: Transformer
    vocab: int
    temperature: float
    top: int | None = None

    def known(self, batch: TrainingBatch) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(self.module.device.type, enabled=False):
            return (final(self.module, batch),)

    def entries(self, rows: Rows, *known: Tensor) -> Entries:
        with torch.no_grad(), torch.autocast(self.module.device.type, enabled=False):
            logits = exact(self.module.unembed(known[0], rows)[:, : self.vocab])
        if logits.isnan().any():
            raise InputError("the teacher gives NaN for a token of these rows; check it with `triptych check`")
        return teacher_entries(logits, self.temperature, self.top)


@dataclass(frozen=True, eq=False)
class Distillation:
    """The teacher, and how its distributions count; those of the first `vocab` tokens, which both models know."""

    teacher: Teacher
    vocab: int
    temperature: float
    weight: float

    def nats(self, module: Transformer, rows: Rows, x: Tensor, targets: Tensor, *known: Tensor) -> Tensor:
        """The sum [] of the losses of tokens that are predicted from `x` [M, D]."""
        logits = exact(module.unembed(x, rows))
        own = F.cross_entropy(logits, targets, reduction="sum")
        wanted, ids = self.teacher.entries(rows, *known)
        entries = student_entries(logits[:, : self.vocab], self.temperature, ids)
        apart = F.kl_div(entries, wanted.to(entries.dtype), reduction="sum", log_target=True)
        return (1.0 - self.weight) * own + self.weight * self.temperature**2 * apart

    def row(self, example: Example, number: int | None = None) -> DistilledExample:
        """The row `example` with the teacher; `number` is its place in a store."""
        fields = (example.ids, example.targets, example.trained, example.source)
        return DistilledExample(*fields, distillation=self, number=number)


@dataclass(frozen=True, eq=False, kw_only=True)
class DistilledExample(Example):
    """A row whose loss has a teacher."""

    distillation: Distillation
    number: int | None = None

    def collated(self, examples: Sequence[Example], device: Device) -> DistilledBatch:
        return DistilledBatch.of(examples, device)


@dataclass(frozen=True, eq=False)
class DistilledBatch(TrainingBatch):
    """A batch of `DistilledExample`."""

    def nats(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        first = self.examples[0]
        assert isinstance(first, DistilledExample)
        distillation = first.distillation
        known = distillation.teacher.known(self)
        most = max_logits // (2 * module.spec.vocab)  # the teacher's logits are as many
        loss = partial(distillation.nats, module, self.rows)
        return in_parts(loss, most, final(module, self, random), self.targets, *known)


@dataclass(frozen=True, eq=False)
class DistilledRows:
    """The rows of `data` with a teacher that runs in each step."""

    data: Data
    distillation: Distillation

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return [self.distillation.row(one) for one in self.data.draw(seed, step, rows)]

    def held_out_rows(self) -> Iterator[Example]:
        return self.data.held_out_rows()

    def targets(self) -> Ids:
        return self.data.targets()
