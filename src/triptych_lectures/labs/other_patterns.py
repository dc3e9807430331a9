"""Other attention patterns that give the same output, found by gradient descent, and shuffled ones as their control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Path = list[tuple[float, float]]  # (distance of the patterns, distance of the output) after each step of the search


@runtime_checkable
class Answering(Protocol):
    """A model's answers with its attention patterns replaced.

    `patterns` [..., T] are the original ones and `output` [R, V] the distributions of R answers with them.  `weights`
    says how much each pattern counts in a mean distance; it broadcasts to `patterns` without its last axis, and its
    mean is 1.
    """

    @property
    def patterns(self) -> Tensor: ...

    @property
    def output(self) -> Tensor: ...

    @property
    def weights(self) -> Tensor: ...

    def with_patterns(self, patterns: Tensor, *, grad: bool = False) -> Tensor:
        """The logits [R, V] with `patterns` in all layers, with gradients where `grad`."""
        ...


@dataclass(frozen=True)
class Replacement:
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


def replaced(answers: Answering, patterns: Tensor) -> Replacement:
    """The output with `patterns`, and how far both are from the original ones."""
    attention = float((distances(patterns, answers.patterns) * answers.weights).mean())
    return Replacement(patterns, attention, distance(answers.with_patterns(patterns).softmax(-1), answers.output))


def search(
    answers: Answering, random: torch.Generator, *, steps: int, rate: float, faithful: float
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
        path.append((float((distances(patterns, old) * answers.weights).mean()), distance(log_p.exp(), answers.output)))
        (logits.grad,) = torch.autograd.grad(faithful * divergence - apart, [logits])
        optimizer.step()
    return replaced(answers, logits.detach().softmax(-1)), path


def shuffled(answers: Answering, attention: float, random: torch.Generator) -> Replacement:
    """Every query's weights in another order, mixed with the original ones so that their distance is `attention`, or
    as near to it as an order goes."""
    old = answers.patterns
    mixed = old.gather(-1, torch.rand(old.shape, generator=random).argsort(-1))
    apart = float((distances(mixed, old) * answers.weights).mean())
    share = min(1.0, attention / apart)  # the total variation of a mixture is linear in its share
    return replaced(answers, (1 - share) * old + share * mixed)
