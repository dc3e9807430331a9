"""Other attention patterns that give the same output, found by gradient descent, and shuffled ones as their control.

They are searched in a small encoder classifier, trained here on a task whose deciding token is known, and for the last
token of a text in a pretrained decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.model import Model
from triptych.probe import Edit, Read
from triptych.train import Example

Path = list[tuple[float, float]]  # (distance of the patterns, distance of the output) after each step of the search


class Answers:
    """The answers of a model to rows of one length, read at the token `at` of each, with its attention patterns
    replaced: those of the query `query` alone, or of all.

    `patterns` [R, L, H, Q, T] are the original ones and `output` [R, V] the distributions of the answers with them.
    `weights` says how much each pattern counts in a mean distance; it broadcasts to `patterns` without its last axis,
    and its mean is 1.
    """

    weights = torch.ones(())

    def __init__(self, model: Model, ids: list[list[int]], at: int, query: int | None = None) -> None:
        self.model, self.ids, self.at, self.query = model, ids, at, query
        trace = model.trace(ids, read=[Read("blocks.*.attn.pattern", at=query)])
        self.patterns = torch.stack([torch.stack(list(trace[site])) for site in trace], 1)
        self.output = torch.stack([logits[at] for logits in trace.logits]).softmax(-1)

    def edit(self, patterns: Tensor, layer: int) -> Edit:
        """Use `patterns` in this layer."""
        return Edit(f"blocks.{layer}.attn.pattern", lambda value, where: patterns[where.item, layer], at=self.query)

    def logits(self, edits: Sequence[Edit], *, grad: bool = False) -> Tensor:
        """The logits [R, V] of the answers, with gradients where `grad`."""
        read = [Read("logits", at=self.at, grad=grad)]
        rows = self.model.trace(self.ids, read=read, edit=edits, allow_null=True)["logits"]
        return torch.stack([logits[0] for logits in rows])

    def with_patterns(self, patterns: Tensor, *, grad: bool = False) -> Tensor:
        """The logits [R, V] with `patterns` in all layers."""
        return self.logits([self.edit(patterns, layer) for layer in range(patterns.shape[1])], grad=grad)

    def moved(self, edits: Sequence[Edit]) -> Tensor:
        """[R]: how far the edits move the output."""
        return distances(self.logits(edits).softmax(-1), self.output)

    def moved_without(self, key: int) -> Tensor:
        """[R]: how far the output moves when a token is hidden from the queries of all layers."""
        hidden = torch.tensor([key])
        edit = Edit(
            "blocks.*.attn.scores", lambda scores, where: scores.index_fill(-1, hidden, -torch.inf), at=self.query
        )
        return self.moved([edit])

    def apart(self, patterns: Tensor) -> float:
        """The mean distance of `patterns` from the original ones."""
        return float((distances(patterns, self.patterns) * self.weights).mean())


class Replacement(NamedTuple):
    """Other patterns, and the mean total variation, 0 to 1, of patterns and output from the original ones."""

    patterns: Tensor
    attention: float
    output: float


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Total variation of distributions in the last axis, 0 to 1."""
    return (a - b).detach().abs().sum(-1) / 2


def distance(a: Tensor, b: Tensor) -> float:
    """The mean of `distances`."""
    return float(distances(a, b).mean())


def replaced(answers: Answers, patterns: Tensor) -> Replacement:
    """The output with `patterns`, and how far both are from the original ones."""
    output = distance(answers.with_patterns(patterns).softmax(-1), answers.output)
    return Replacement(patterns, answers.apart(patterns), output)


def search(
    answers: Answers, random: torch.Generator, *, steps: int, rate: float, faithful: float
) -> tuple[Replacement, Path]:
    """Gradient descent (Adam) on the logits of all patterns: far from the original ones, and `faithful` times the
    Kullback-Leibler divergence of the output from the original one."""
    old = answers.patterns
    logits = (old.clamp_min(1e-4).log() + 0.1 * torch.randn(old.shape, generator=random)).requires_grad_()
    optimizer, path = torch.optim.Adam([logits], rate), list[tuple[float, float]]()
    for _ in range(steps):
        patterns = logits.softmax(-1)
        log_p = answers.with_patterns(patterns, grad=True).log_softmax(-1)
        divergence = torch.nn.functional.kl_div(log_p, answers.output, reduction="batchmean")
        each = ((patterns - old).square() + 1e-6).sqrt().sum(-1) / 2  # total variation, smooth at 0
        apart = (each * answers.weights).mean()
        path.append((answers.apart(patterns), distance(log_p.exp(), answers.output)))
        (logits.grad,) = torch.autograd.grad(faithful * divergence - apart, [logits])
        optimizer.step()
    return replaced(answers, logits.detach().softmax(-1)), path


def shuffled(answers: Answers, attention: float, random: torch.Generator) -> Replacement:
    """Every query's weights in another order, mixed with the original ones so that their distance is `attention`, or
    as near to it as an order goes."""
    old = answers.patterns
    mixed = old.gather(-1, torch.rand(old.shape, generator=random).argsort(-1))
    share = min(1.0, attention / answers.apart(mixed))  # the total variation of a mixture is linear in its share
    return replaced(answers, (1 - share) * old + share * mixed)


@dataclass(frozen=True)
class AskedKind:
    """A first token that asks for one of several kinds, then one token of each kind with a random value, at random
    places among blanks; the label, read at the first token, is the value of the kind that is asked for.

    Ids: `values` for each kind, the questions, and a blank.
    """

    kinds: int
    values: int
    length: int

    @property
    def classes(self) -> int:
        return self.values

    @property
    def blank(self) -> int:
        return self.kinds * self.values + self.kinds

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        return [self._row(noise) for _ in range(count)]

    def _row(self, noise: np.random.Generator) -> Example:
        values, kind = noise.integers(self.values, size=self.kinds), noise.integers(self.kinds)
        ids = np.full(self.length + 1, self.blank, dtype=np.int32)
        ids[1 + noise.permutation(self.length)[: self.kinds]] = np.arange(self.kinds) * self.values + values
        ids[0] = self.kinds * self.values + kind
        return Example(ids, np.full_like(ids, values[kind]), np.arange(len(ids)) == 0)

    def deciding(self, row: Example) -> int:
        """Where the token is that the label depends on."""
        kind = row.ids[0] - self.kinds * self.values
        return int(np.flatnonzero(row.ids // self.values == kind)[0])


def apart_in(answers: Answers, patterns: Tensor, layer: int) -> float:
    """How far, in this layer, the pattern of the token with the answer is from the original one."""
    return distance(patterns[:, layer, :, 0], answers.patterns[:, layer, :, 0])


class ClassifierAnswers(Answers):
    """The labels of some rows, with the attention of all tokens in every layer.

    A pattern counts where the label can depend on it: in the last layer that of the first token alone, which weighs as
    much there as those of all tokens do in a layer before.
    """

    def __init__(self, module: nn.Transformer, rows: list[Example]) -> None:
        super().__init__(Model(module), [row.ids.tolist() for row in rows], at=0)
        self.weights = torch.ones(self.patterns.shape[1:-1])
        self.weights[-1, :, 1:], self.weights[-1, :, 0] = 0.0, float(self.patterns.shape[-1])

    def gradients(self) -> Tensor:
        """[R, T]: the length of the gradient of the label's logit by each token's embedding.

        Its product with the embedding says nothing here: an RMSNorm hides the length of what it reads, so that the
        gradient through it is orthogonal to the embedding.
        """
        sizes = []
        for ids, output in zip(self.ids, self.output, strict=True):
            trace = self.model.trace([ids], read=[Read("embed", grad=True), Read("logits", at=0, grad=True)])
            (vectors,), (logits,) = trace["embed"], trace["logits"]
            (slope,) = torch.autograd.grad(logits[0, int(output.argmax())], [vectors])
            sizes.append(slope.norm(dim=-1))
        return torch.stack(sizes)

    def ablations(self) -> Tensor:
        """[R, T]: how far the output moves when each token is hidden; the question itself, the first, stays."""
        moved = [self.moved_without(key) for key in range(1, self.patterns.shape[-1])]
        return torch.stack([torch.zeros(len(self.ids)), *moved], 1)
