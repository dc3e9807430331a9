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
from triptych.probe import Edit, Read, Where, put
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


class Answering:
    """A model's answers with its attention patterns replaced.

    `patterns` [..., T] are the original ones and `output` [R, V] the distributions of R answers with them.  `weights`
    says how much each pattern counts in a mean distance; it broadcasts to `patterns` without its last axis, and its
    mean is 1.
    """

    patterns: Tensor
    output: Tensor
    weights = torch.ones(())

    def with_patterns(self, patterns: Tensor, *, grad: bool = False) -> Tensor:
        """The logits [R, V] with `patterns` in all layers, with gradients where `grad`."""
        raise NotImplementedError


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


class ClassifierResult(NamedTuple):
    """What was measured.  `alone` and `apart` are of each layer: the output's change when it alone is shuffled, and how
    far the alternative patterns of the first token are from the original ones there.  `changed` is the largest change
    of an answer under the alternative, `needed` the mean one when the deciding token is hidden; `named` is the share of
    rows in which the token with the largest score is the deciding one, by what gave the score."""

    answers: ClassifierAnswers
    right: float
    other: Replacement
    mixed: Replacement
    path: Path
    alone: list[float]
    apart: list[float]
    changed: float
    named: dict[str, float]
    needed: float
    shuffled_labels: TrainedRun

    @property
    def sensitive(self) -> int:
        """The layer where a shuffle alone moves the output most."""
        return self.alone.index(max(self.alone))


class ClassifierAnswers(Answering):
    """The labels of some rows: attention of all tokens in every layer `[R, L, H, T, T]`, and the distributions.

    A pattern counts where the label can depend on it: in the last layer that of the first token alone, which weighs as
    much there as those of all tokens do in a layer before.
    """

    def __init__(self, module: nn.Transformer, rows: list[Example]) -> None:
        self.model, self.ids = Model(module), [row.ids.tolist() for row in rows]
        trace = self.model.trace(self.ids, read=["blocks.*.attn.pattern"])
        self.patterns = torch.stack([torch.stack(list(trace[site])) for site in trace], 1)
        self.output = torch.stack([logits[0] for logits in trace.logits]).softmax(-1)
        self.weights = torch.ones(self.patterns.shape[1:-1])
        self.weights[-1, :, 1:], self.weights[-1, :, 0] = 0.0, float(self.patterns.shape[-1])

    def with_patterns(self, patterns: Tensor, *, grad: bool = False) -> Tensor:
        def edit(layer: int) -> Edit:
            return Edit(f"blocks.{layer}.attn.pattern", lambda value, where: patterns[where.item, layer])

        edits = [edit(layer) for layer in range(patterns.shape[1])]
        read = [Read("logits", at=0, grad=grad)]
        rows = self.model.trace(self.ids, read=read, edit=edits, allow_null=True)["logits"]
        return torch.stack([logits[0] for logits in rows])

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
        """[R, T]: how far the output moves when each token is hidden from all queries of all layers."""
        moved = [self._without(key) for key in range(1, self.patterns.shape[-1])]
        return torch.stack([torch.zeros(len(self.ids)), *moved], 1)  # the question itself stays

    def _without(self, key: int) -> Tensor:
        hidden = Edit("blocks.*.attn.scores", _hidden(key))
        trace = self.model.trace(self.ids, read=[Read("logits", at=0)], edit=[hidden])
        return distances(torch.stack([logits[0] for logits in trace["logits"]]).softmax(-1), self.output)


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
    alone, apart = [], []
    for layer in range(sizes.layers):
        patterns = answers.patterns.clone()
        patterns[:, layer] = mixed.patterns[:, layer]
        alone.append(replaced(answers, patterns).output)
        apart.append(distance(other.patterns[:, layer, :, 0], answers.patterns[:, layer, :, 0]))
    each = distances(answers.with_patterns(other.patterns).softmax(-1), answers.output)
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
    return ClassifierResult(answers, share, other, mixed, path, alone, apart, float(each.max()), named, needed, control)


class DecoderResult(NamedTuple):
    """What was measured.  `alone` is the output's change when one layer is shuffled, `sensitive` the layers where it is
    largest and `apart` how far the alternative is from the original there; of each token the share of attention
    (`weights`) and the output's change when it is hidden (`hidden`)."""

    last: LastToken
    other: Replacement
    mixed: Replacement
    path: Path
    alone: list[float]
    sensitive: list[int]
    apart: list[float]
    weights: list[float]
    hidden: list[float]

    @property
    def most_read(self) -> int:
        return self.weights.index(max(self.weights))

    @property
    def drop(self) -> float:
        return max(self.hidden)


class LastToken(Answering):
    """The last token of a text in one model: its attention in every layer, and the next word's distribution."""

    def __init__(self, model: Model, text: str) -> None:
        if model.spec.layout != "decoder":
            raise InputError(f"this lab predicts the next word; it needs a decoder, not an {model.spec.layout}")
        self.model, (self.ids,) = model, model.ids([text])
        self.tokens = [str(i) for i in self.ids] if model.tokenizer is None else model.tokenizer.tokens(self.ids)
        trace = model.trace([self.ids], read=[Read("blocks.*.attn.pattern", at=self.at)])
        self.patterns = torch.stack([trace[site][0][:, 0] for site in trace])  # [L, H, T]
        self.output = trace.logits[0][-1:].softmax(-1)  # [1, V]

    @property
    def at(self) -> int:
        return len(self.ids) - 1

    def put(self, layer: int, pattern: Tensor) -> Edit:
        """Use `pattern` [H, T] as the last token's attention in this layer."""
        return put(f"blocks.{layer}.attn.pattern", pattern[:, None], at=self.at)

    def logits(self, edits: Sequence[Edit], grad: bool = False) -> Tensor:
        """`[V]`, of the next word."""
        return self.model.trace([self.ids], read=[Read("logits", at=self.at, grad=grad)], edit=edits)["logits"][0][0]

    def with_patterns(self, patterns: Tensor, *, grad: bool = False) -> Tensor:
        return self.logits([self.put(layer, pattern) for layer, pattern in enumerate(patterns)], grad)[None]

    def moved(self, edits: Sequence[Edit]) -> float:
        """Total variation between the next word's distributions with and without the edits, 0 to 1."""
        return distance(self.logits(edits).softmax(-1), self.output[0])


def of_decoder(model: Model, sizes: NotExplanationLab, seed: int, progress: Callable[[str], None]) -> DecoderResult:
    """Search for other patterns of the last token, shuffle them, and hide one token after the other."""
    last, random = LastToken(model, sizes.text), torch.Generator().manual_seed(seed)
    progress(f"searching for other patterns in all {len(last.patterns)} layers of the decoder, {sizes.steps} steps")
    other, path = search(last, random, steps=sizes.steps, rate=sizes.rate, faithful=sizes.faithful)
    progress("shuffling the decoder's patterns")
    mixed = shuffled(last, other.attention, random)
    alone = [last.moved([last.put(layer, mixed.patterns[layer])]) for layer in range(len(last.patterns))]
    sensitive = sorted(range(len(alone)), key=lambda layer: -alone[layer])[: sizes.sensitive]
    apart = [distance(other.patterns[layer], last.patterns[layer]) for layer in sensitive]
    progress("hiding one token of the decoder after the other")
    hidden = [last.moved([Edit("blocks.*.attn.scores", _hidden(key), at=last.at)]) for key in range(len(last.ids))]
    weights = last.patterns.mean((0, 1)).tolist()
    return DecoderResult(last, other, mixed, path, alone, sensitive, apart, weights, hidden)


def _hidden(key: int) -> Callable[[Tensor, Where], Tensor]:
    return lambda scores, where: scores.index_fill(-1, torch.tensor([key]), -torch.inf)
