"""Other attention patterns that give the same output, found by gradient descent, and shuffled ones as their control.

They are searched in a small encoder classifier, trained here on a task whose deciding token is known, and for the last
token of a text in a pretrained decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe import Edit, Read
from triptych.spec import RMSNormSpec, full
from triptych.train import Example
from triptych_lectures.labs.small import block, decoder
from triptych_lectures.labs.trained import (
    GeneratedTask,
    Shuffled,
    TrainedRun,
    TrainingBudget,
    held_out_rows,
    right,
    train,
)

if TYPE_CHECKING:
    from triptych_lectures.labs.not_explanation import NotExplanationLab

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


@dataclass(frozen=True, eq=False)
class PatternsResult:
    """What was measured: the optimized patterns `other`, the shuffled ones `mixed`, and the path of the search; `alone`
    is the output's change when one layer is shuffled, for each of them."""

    answers: Answers
    other: Replacement
    mixed: Replacement
    path: Path
    alone: list[float]

    def apart(self, layer: int) -> float:
        """How far the optimized pattern of the token with the answer is from the original one in this layer."""
        return distance(self.other.patterns[:, layer, :, 0], self.answers.patterns[:, layer, :, 0])

    def sensitive(self, count: int) -> list[int]:
        """The layers where a shuffle alone moves the output most."""
        return sorted(range(len(self.alone)), key=lambda layer: -self.alone[layer])[:count]


@dataclass(frozen=True, eq=False)
class ClassifierResult(PatternsResult):
    """`changed` is the largest change of an answer under the alternative, `needed` the mean one when the deciding token
    is hidden; `named` is the share of rows in which the token with the largest score is the deciding one, by what gave
    the score."""

    right: float
    changed: float
    named: dict[str, float]
    needed: float
    shuffled_labels: TrainedRun


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


def _trained(sizes: NotExplanationLab, task: GeneratedTask, seed: int) -> tuple[nn.Transformer, TrainedRun]:
    """Blocks in which every token sees every other, without positions: the task does not need them."""
    blocks = [block(sizes.width, sizes.heads, 2 * sizes.width)] * sizes.layers
    final_norm = RMSNormSpec(width=sizes.width)
    module = nn.new(decoder(sizes.task.blank + 1, blocks, final_norm=final_norm, mask=full()), seed)
    budget = TrainingBudget(sizes.trained, sizes.rows, sizes.learning_rate, shape="linear")
    return module, train(module, task, budget, seed)


def of_classifier(sizes: NotExplanationLab, seed: int) -> ClassifierResult:
    """Train the classifier, search for other patterns, shuffle them, and rank the tokens by four measures."""
    module, _ = _trained(sizes, sizes.task, seed)
    _, control = _trained(sizes, Shuffled(sizes.task), seed)
    rows, random = held_out_rows(sizes.task, sizes.tested, seed), torch.Generator().manual_seed(seed)
    share, rows = right(module, rows), rows[: sizes.searched]
    answers = ClassifierAnswers(module, rows)
    steps, rate = sizes.search_steps, sizes.search_rate
    other, path = search(answers, random, steps=steps, rate=rate, faithful=sizes.search_faithful)
    mixed = shuffled(answers, other.attention, random)
    alone = []
    for layer in range(sizes.layers):
        patterns = answers.patterns.clone()
        patterns[:, layer] = mixed.patterns[:, layer]
        alone.append(replaced(answers, patterns).output)
    changed = float(distances(answers.with_patterns(other.patterns).softmax(-1), answers.output).max())
    deciding = torch.tensor([sizes.task.deciding(row) for row in rows])
    hidden = answers.ablations()
    scores = {
        "hiding it": hidden,
        "gradient": answers.gradients(),
        # [R, T]: the first token's attention to each token, the mean over layers and heads
        "attention": answers.patterns[:, :, :, 0].mean((1, 2)),
        "attention of the alternative": other.patterns[:, :, :, 0].mean((1, 2)),
    }
    # The first token asks: it is read in every row, and is not among those that are ranked.
    named = {by: float((rows[:, 1:].argmax(-1) + 1 == deciding).double().mean()) for by, rows in scores.items()}
    needed = float(hidden.gather(1, deciding[:, None]).mean())
    return ClassifierResult(answers, other, mixed, path, alone, share, changed, named, needed, control)


@dataclass(frozen=True, eq=False)
class DecoderResult(PatternsResult):
    """Of each token of the text the output's change when it is hidden (`hidden`), and its share of the last token's
    attention over all layers and heads (`weights`)."""

    tokens: list[str]
    hidden: list[float]

    weights: list[float]

    @property
    def most_read(self) -> int:
        """The token with the most attention."""
        return self.weights.index(max(self.weights))

    @property
    def drop(self) -> float:
        """The largest change when a token is hidden."""
        return max(self.hidden)


def of_decoder(model: Model, sizes: NotExplanationLab, seed: int, progress: Callable[[str], None]) -> DecoderResult:
    """Search for other patterns of the last token, shuffle them, and hide one token after the other."""
    if model.spec.layout != "decoder":
        raise InputError(f"this lab predicts the next word; it needs a decoder, not an {model.spec.layout}")
    [ids] = model.ids([sizes.text])
    last = Answers(model, [ids], at=len(ids) - 1, query=len(ids) - 1)
    layers, random = range(last.patterns.shape[1]), torch.Generator().manual_seed(seed)
    progress(f"searching for other patterns in all {len(layers)} layers of the decoder, {sizes.steps} steps")
    other, path = search(last, random, steps=sizes.steps, rate=sizes.rate, faithful=sizes.faithful)
    progress("shuffling the decoder's patterns")
    mixed = shuffled(last, other.attention, random)
    alone = [float(last.moved([last.edit(mixed.patterns, layer)])) for layer in layers]
    progress("hiding one token of the decoder after the other")
    hidden = [float(last.moved_without(key)) for key in range(len(ids))]
    tokens = [str(i) for i in ids] if model.tokenizer is None else model.tokenizer.tokens(ids)
    weights = last.patterns[0, :, :, 0].mean((0, 1)).tolist()
    return DecoderResult(last, other, mixed, path, alone, tokens, hidden, weights)
