"""Generated tasks with a known best loss, and short training runs on them, for the labs about trained models."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.page import Curve
from triptych.spec import AttentionSpec, BlockSpec, LearnedSpec, NormsSpec, RMSNormSpec
from triptych.train import DivergedError, Example, OptimizerSettings, Schedule, collate
from triptych.train.data import RandomUse, random_numbers
from triptych.train.objectives import Ids, final
from .small_models import Points, decoder, examples, fit, parameters

LAST = 10  # steps whose mean loss is the loss at the end
MOST_CLASSES = 1 << 16  # each has a row of weights in the head


@runtime_checkable
class GeneratedTask(Protocol):
    """Rows with answers, and the loss in nats of a uniform guess among the possible ones."""

    @property
    def classes(self) -> int:
        """How many answers there are."""
        ...

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        """`count` new rows."""
        ...


@dataclass(frozen=True)
class Places:
    """Random symbols; the answer at a token follows from those that stand `places` back, 0 being the token itself.

    It is all of them in order, as one number with these digits in base `symbols`.  The best loss is 0.

    Raises InputError for rows in which no token has a symbol so many places back, and for more than `MOST_CLASSES`
    answers.
    """

    symbols: int
    length: int
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if max(self.places) >= self.length:
            raise InputError(f"a row of {self.length} symbols has none {max(self.places)} places back; make it longer")
        if not 2 <= self.classes <= MOST_CLASSES:
            raise InputError(
                f"{self.symbols} symbols at {len(self.places)} places are {self.classes:,} answers; give 2 to"
                f" {MOST_CLASSES:,}"
            )

    @property
    def classes(self) -> int:
        return int(self.symbols ** len(self.places))

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        ids = noise.integers(self.symbols, size=(count, self.length)).astype(np.int32)
        first, targets = max(self.places), np.zeros_like(ids)
        for place in self.places:
            targets[:, first:] = targets[:, first:] * self.symbols + ids[:, first - place : self.length - place]
        return examples(ids, targets, np.arange(self.length) >= first)


@dataclass(frozen=True)
class LookupTable:
    """Random symbols; the answer at a token is what a table [symbols, symbols] has for it and the one before it.

    The entries of the table are random symbols that `seed` draws, so that no rule is shorter than the table.  The best
    loss is 0.
    """

    symbols: int
    length: int
    seed: int

    @property
    def classes(self) -> int:
        return self.symbols

    @cached_property
    def entries(self) -> Ids:
        drawn = np.random.default_rng(self.seed).integers(self.symbols, size=(self.symbols, self.symbols))
        return drawn.astype(np.int32)

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        ids = noise.integers(self.symbols, size=(count, self.length)).astype(np.int32)
        targets = np.zeros_like(ids)
        targets[:, 1:] = self.entries[ids[:, :-1], ids[:, 1:]]
        return examples(ids, targets, np.arange(self.length) >= 1)


@dataclass(frozen=True)
class MarkovRows:
    """A text whose next symbol is what a table has for the last two, or with probability `noise` any symbol.

    `seed` draws the entries of the table.  Rows have `shortest` to `length` symbols, and the first of what the table
    decides is the third symbol.
    """

    symbols: int
    length: int
    seed: int
    noise: float
    shortest: int = 3

    @property
    def classes(self) -> int:
        return self.symbols

    @property
    def entropy(self) -> float:
        """Of the next symbol, in nats: no prediction from what stands before it has a lower loss."""
        other = self.noise / self.symbols
        likeliest = 1 - self.noise + other
        return -likeliest * math.log(likeliest) - (self.symbols - 1) * other * math.log(other)

    @cached_property
    def entries(self) -> Ids:
        return LookupTable(self.symbols, self.length, self.seed).entries

    def texts(self, noise: np.random.Generator, count: int) -> Ids:
        """[count, length]"""
        ids = noise.integers(self.symbols, size=(count, self.length)).astype(np.int32)
        by_table = noise.random((count, self.length)) >= self.noise
        for t in range(2, self.length):
            ids[:, t] = np.where(by_table[:, t], self.entries[ids[:, t - 2], ids[:, t - 1]], ids[:, t])
        return ids

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        """Each symbol from the third on, predicted from those before it."""
        return [Example(ids[:-1], ids[1:], np.arange(1, len(ids)) >= 2) for ids in self.cut(noise, count)]

    def cut(self, noise: np.random.Generator, count: int) -> list[Ids]:
        """Texts of all lengths."""
        lengths = noise.integers(self.shortest, self.length + 1, size=count)
        return [ids[:length] for ids, length in zip(self.texts(noise, count), lengths, strict=True)]

    def follows(self, ids: Ids) -> float:
        """The share of symbols, from the third on, that are what the table has for the two before; [B, T]."""
        return float((self.entries[ids[:, :-2], ids[:, 1:-1]] == ids[:, 2:]).mean())


@dataclass(frozen=True)
class ShuffledTask:
    """The rows of a task with their answers in a random order, each no longer that of its token: the control."""

    task: GeneratedTask

    @property
    def classes(self) -> int:
        return self.task.classes

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        rows = self.task.rows(noise, count)
        answers = noise.permutation(np.concatenate([row.targets[row.trained] for row in rows]))
        ends = np.cumsum([row.trained.sum() for row in rows])[:-1]
        mixed = []
        for row, own in zip(rows, np.split(answers, ends), strict=True):
            targets = row.targets.copy()
            targets[row.trained] = own
            mixed.append(replace(row, targets=targets))
        return mixed


class GeneratedRows(NamedTuple):
    """New rows of `task` for each step: no row is trained on twice, so that the training loss is that of new rows."""

    task: GeneratedTask

    def draw(self, seed: int, step: int, rows: int) -> list[Example]:
        return self.task.rows(random_numbers(seed, RandomUse.OFFSETS, step), rows)

    def held_out_rows(self) -> Iterator[Example]:
        return iter(())

    def targets(self) -> Ids:
        return np.arange(self.task.classes, dtype=np.int32)


class TrainingBudget(NamedTuple):
    """What a training run may use: steps, rows of a step, learning rate, the share of the steps that warm up, and the
    optimizer."""

    steps: int
    rows: int
    rate: float
    warmup: float = 0.0
    shape: Literal["constant", "linear"] = "constant"
    optimizer: Literal["muon", "adamw"] = "adamw"


class TrainedRun(NamedTuple):
    """One training run: the loss in nats of each step.  A run that diverged has the steps before, and no end."""

    losses: Points
    guess: float
    diverged: bool = False

    @property
    def end(self) -> float:
        """Mean loss of the last steps, in nats; infinite where the run diverged."""
        return math.inf if self.diverged else fmean(nats for _, nats in self.losses[-LAST:])

    @property
    def learned(self) -> float:
        """How far the loss went from that of a guess, 0, to the best one, 1.  Below 0 it is worse than a guess."""
        return 1 - self.end / self.guess

    def steps_to(self, share: float) -> float:
        """The first step from which the mean loss of `LAST` steps is this share of the way; infinite if none is, and
        where the run has fewer steps."""
        nats = np.array([loss for _, loss in self.losses])
        if len(nats) < LAST:
            return math.inf
        means = np.convolve(nats, np.ones(LAST) / LAST, "valid")
        reached = np.flatnonzero(1 - means / self.guess >= share)
        return float(reached[0] + LAST) if len(reached) else math.inf


def mean_steps(runs: Iterable[TrainedRun], share: float, most: int) -> float:
    """The mean number of steps to this share of the way; for a run that never was there it counts one past `most`."""
    return fmean(min(run.steps_to(share), most + 1.0) for run in runs)


def train(module: nn.Transformer, task: GeneratedTask, budget: TrainingBudget, seed: int) -> TrainedRun:
    """Train `module` in place, without weight decay."""
    optimizer = OptimizerSettings(name=budget.optimizer, lr=budget.rate, weight_decay=0.0, clip=0.0)
    schedule = Schedule(shape=budget.shape, warmup=budget.warmup)
    length = max(len(row.ids) for row in held_out_rows(task, 8, seed))
    guess = math.log(task.classes)
    try:
        losses = fit(
            module, GeneratedRows(task), rows=budget.rows, length=length, steps=budget.steps, seed=seed,
            optimizer=optimizer, schedule=schedule,
        )  # fmt: skip
        return TrainedRun(losses, guess)
    except DivergedError:
        return TrainedRun([], guess, diverged=True)


def training_curve(title: str, y: str, runs: Mapping[str, TrainedRun]) -> Curve:
    """The losses of runs of one task, and that of a guess."""
    guess = next(iter(runs.values())).guess
    return Curve(title, "step", y, {name: run.losses for name, run in runs.items()}, {"guess": guess})


@dataclass(frozen=True)
class TrainedHead:
    """A model of attention alone after training: its run, the share of new answers that are right, and how many
    parameters it has."""

    run: TrainedRun
    right: float
    parameters: int


def trained_head(
    module: nn.Transformer, task: GeneratedTask, budget: TrainingBudget, tested: int, seed: int
) -> TrainedHead:
    """Train `module` in place, and test it on `tested` rows that it was not trained on."""
    run = train(module, task, budget, seed)
    share = right(module, held_out_rows(task, tested, seed))
    return TrainedHead(run, share, parameters(module))


def attention_alone(attn: AttentionSpec, symbols: int, length: int, seed: int) -> nn.Transformer:
    """A decoder with this attention as its only layer, without an MLP, and with learned positions."""
    norms = NormsSpec(pre=RMSNormSpec(width=attn.q.inputs))
    return with_positions([BlockSpec(attn=attn, mlp=None, attn_norm=norms, mlp_norm=None)], symbols, length, seed)


def with_positions(blocks: Sequence[BlockSpec], symbols: int, length: int, seed: int) -> nn.Transformer:
    """A decoder of these blocks with learned positions and a last norm."""
    width = blocks[0].attn.q.inputs
    positions = LearnedSpec(length=length, width=width)
    return nn.new(decoder(symbols, blocks, embedded=positions, final_norm=RMSNormSpec(width=width)), seed)


def multiply_queries_and_keys(module: nn.Transformer, factor: float) -> None:
    """Multiply the matrices of queries and keys by `factor`, in place."""
    for name, weight in module.named_parameters():
        if name.endswith((".attn.q.weight", ".attn.k.weight")):
            weight.data = weight.data * factor


def held_out_rows(task: GeneratedTask, count: int, seed: int) -> list[Example]:
    """Rows that no training run with this seed draws."""
    return task.rows(random_numbers(seed, RandomUse.HELD_OUT, 0), count)


@torch.no_grad()
def logits(module: nn.Transformer, rows: Sequence[Example]) -> Tensor:
    """[N, V]: at the trained tokens of `rows`, one row after the other."""
    batch = collate(rows)
    return module.unembed(final(module, batch), batch.rows)


def right(module: nn.Transformer, rows: Sequence[Example]) -> float:
    """The share of the trained tokens of `rows` whose answer has the largest logit."""
    return float((logits(module, rows).argmax(-1) == collate(rows).targets).double().mean())


def redraw(module: nn.Transformer, seed: int, std: float, *, written: float | None = None) -> None:
    """Draw the matrices of the blocks anew, normal with this standard deviation; those that write to the residual
    stream, the last of attention and of the MLP, with that of `written`, where it is given."""
    noise = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if ".blocks." in name and weight.dim() == 2:
            writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
            own = written if writes and written is not None else std
            weight.data = own * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
