"""Mistakes in causal attention that raise no error, each run beside the right version (lecture L2).

Four are made: the mask is applied after the softmax, it is forgotten, the softmax is taken along the wrong axis, and
the vectors of a layer are cut into heads along the wrong axes.  Attention on random numbers shows what each does to the
weights, and training on a text of known entropy what comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych.attention import attend
from triptych.nn.attention import Attention, KindState
from triptych.nn.part import Taps
from triptych.page import Curve, MatrixSection, TableSection
from triptych.spec import causal
from .bounds import rounded_down
from .generated_tasks import MarkovRows, TrainedRun, TrainingBudget, train, with_positions
from .lab import Check, Clause, Clauses, Findings, Lab, Setup, clause, size
from .left_to_right import nats_of_prefixes, written
from .small_models import block
from .statements import gap

RIGHT, AFTER, FORGOTTEN = "right", "mask after the softmax", "mask forgotten"
AXIS, HEADS = "softmax over the queries", "heads by the wrong view"
MISTAKES = (AFTER, FORGOTTEN, AXIS, HEADS)


class MistakesLab(Lab):
    name = "mistakes"

    tokens: int = size(8, "tokens of attention on random numbers, a multiple of the heads", multiple="heads", least=4)
    heads: int = size(4, "heads of each layer, two or more", least=2)
    width: int = size(32, "model width D, a multiple of the heads", multiple="heads")
    layers: int = size(2, "layers of the decoders")
    symbols: int = size(6, "symbols of the text, two or more", least=2)
    length: int = size(17, "symbols of a row, 8 or more", least=8)
    noise: float = size(0.3, "share of symbols that follow no rule, below 1", most=0.9)
    steps: int = size(220, "training steps")
    rows: int = size(32, "rows of a training step")
    rate: float = size(5e-3, "learning rate")
    tested: int = size(64, "rows that are tested")

    def findings(self, setup: Setup) -> Findings:
        shown = {kind: self._measure(kind, setup.seed) for kind in (RIGHT, *MISTAKES)}
        task = MarkovRows(self.symbols, self.length, setup.seed, self.noise, shortest=self.length)
        trained = {}
        for kind in shown:
            setup.progress(f"training, {kind}: {self.steps} steps")
            trained[kind] = self._train(kind, task, setup.seed)
        yield self._control(shown[RIGHT], trained[RIGHT], task)
        yield from _untrained(shown)
        yield _trained({kind: trained[kind] for kind in MISTAKES}, trained[RIGHT], task)
        losses = {kind: one.run.losses for kind, one in trained.items()}
        guides = {"entropy of the text": task.entropy, "guess": trained[RIGHT].run.guess}
        yield _table(shown, self.tokens)
        yield from (_weights(kind, one.weights) for kind, one in shown.items() if kind != HEADS)
        yield _losses(trained, task)
        yield Curve("Loss in training", "step", "nats per symbol", losses, guides)

    def _measure(self, kind: str, seed: int) -> Weighed:
        """One row on random numbers, in fp64, and again with another last token."""
        noise = torch.Generator().manual_seed(seed)
        q, k, v, other = torch.randn(4, 1, self.tokens, self.width, generator=noise, dtype=torch.float64)
        out, weights = attention(q, k, v, self.heads, kind)
        q2, k2, v2 = (torch.cat([x[:, :-1], other[:, -1:]], 1) for x in (q, k, v))
        future = gap(attention(q2, k2, v2, self.heads, kind)[0][:, :-1], out[:, :-1])
        cut = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        exact = attend(*cut, mask=causal()).transpose(1, 2).flatten(2)
        return Weighed(weights[0], future, gap(out, exact))

    def _train(self, kind: str, task: MarkovRows, seed: int) -> TrainedMistake:
        module = with_positions(
            [block(self.width, self.heads, 2 * self.width)] * self.layers, self.symbols, self.length, seed
        )
        assert module.decoder is not None
        for layer in module.decoder.blocks:
            layer.attn = WrittenOut(layer.attn, kind)
        run = train(module, task, TrainingBudget(self.steps, self.rows, self.rate, 0.1, "linear"), seed)
        texts = task.texts(np.random.default_rng([seed, 1]), self.tested)
        return TrainedMistake(run, nats_of_prefixes(module, texts), task.follows(written(module, texts)))

    def _control(self, shown: Weighed, trained: TrainedMistake, task: MarkovRows) -> Clause:
        return clause(
            "The right version is the library's: rows of weights sum to 1, nothing hidden has weight, and another"
            " last token changes no earlier output. Trained, its loss stays above the entropy of the text"
            f" ({trained.run.end:.2f} and {task.entropy:.2f} nats), and {trained.follows:.0%} of what it writes"
            " follows the text's rule.",
            Check("right: distance from `attend`", shown.error, most=1e-12),
            Check("right: change of earlier outputs by another last token", shown.future, most=1e-12),
            Check("right: training loss over the entropy", trained.run.end / task.entropy, 0.9, 1.3),
            Check("right: written symbols that follow the rule", trained.follows, least=0.9),
            instead="The right version differs from the library's, or did not learn the text",
        )


class WrittenOut(Attention):
    """An attention layer whose arithmetic is `attention`, with the projections of `layer`.

    Its rows must be equally long; it keeps no cache, and reads no mask and no rotation.
    """

    def __init__(self, layer: Attention, kind: str) -> None:
        super().__init__(layer.spec)
        self.q, self.k, self.v, self.out = layer.q, layer.k, layer.v, layer.out
        self.kind = kind

    def forward(self, x: Tensor, state: KindState, layer: int, taps: Taps) -> Tensor:
        """[N, D] -> [N, D]"""
        q, k, v = (part(x).unflatten(0, (len(state.rows.lengths), -1)) for part in (self.q, self.k, self.v))
        return self.out(attention(q, k, v, self.spec.heads, self.kind)[0].flatten(0, 1))


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, kind: str = RIGHT) -> tuple[Tensor, Tensor]:
    """Causal attention of [B, T, D] as it is written by hand, with one mistake or none: outputs [B, T, D] and weights
    [B, H, T, T]."""

    def split(x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, K].  The wrong view has the right shape, and rows that are pieces of other tokens."""
        b, t, d = x.shape
        return x.reshape(b, heads, t, d // heads) if kind == HEADS else x.reshape(b, t, heads, -1).transpose(1, 2)

    q, k, v = split(q), split(k), split(v)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if kind not in (AFTER, FORGOTTEN):
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-2 if kind == AXIS else -1)
    if kind == AFTER:
        weights = weights * visible
    return (weights @ v).transpose(1, 2).flatten(2), weights


class Weighed(NamedTuple):
    """Attention on random numbers: the weights [H, T, T], the largest change of an earlier output when the last token
    is another one, and the largest distance from `attend`."""

    weights: Tensor
    future: float
    error: float

    def sums(self, axis: int) -> tuple[float, float]:
        """The smallest and the largest sum: of rows with axis -1, of columns with axis -2."""
        sums = self.weights.sum(axis)
        return sums.min().item(), sums.max().item()

    @property
    def hidden(self) -> float:
        """The mean weight of a query on the keys after it."""
        return self.weights.triu(1).sum(-1).mean().item()


class TrainedMistake(NamedTuple):
    """A trained decoder: its run, its loss in nats where, as in writing, nothing stands after the place from which it
    predicts, and the share of the symbols it writes that follow the rule of the text."""

    run: TrainedRun
    writing: float
    follows: float


def _untrained(shown: Mapping[str, Weighed]) -> Clauses:
    """What the weights of each mistake show, and what only another last token shows."""
    after, forgotten, axis, heads = (shown[kind] for kind in MISTAKES)
    least, (low, high) = after.sums(-1)[0], axis.sums(-1)
    future = min(one.future for one in (after, forgotten, axis, heads))
    yield clause(
        f"Two mistakes show in the sums. With the {AFTER} a row of weights sums to as little as {least:.2f}. With"
        f" the {AXIS} the columns sum to 1, and rows to between {low:.2f} and {high:.2f}.",
        Check(f"{AFTER}: smallest sum of a row", least, most=0.9),
        Check(f"{AXIS}: largest distance of a column's sum from 1", max(1 - axis.sums(-2)[0], 0), most=1e-12),
        Check(f"{AXIS}: largest distance of a row's sum from 1", max(1 - low, high - 1), least=0.1),
        instead="The sums do not show them",
    )
    yield clause(
        f"Two do not: with the {FORGOTTEN} rows sum to 1, and {forgotten.hidden:.0%} of the weight is on tokens to"
        f" come; with {HEADS} the weights themselves look right.",
        Check(f"{FORGOTTEN}: largest distance of a row's sum from 1", 1 - forgotten.sums(-1)[0], -1e-12, 1e-12),
        Check(f"{FORGOTTEN}: weight on later tokens", forgotten.hidden, least=0.2),
        Check(f"{HEADS}: largest distance of a row's sum from 1", 1 - heads.sums(-1)[0], -1e-12, 1e-12),
        Check(f"{HEADS}: weight on later tokens", heads.hidden, most=0.0),
        instead="The weights show something else",
    )
    yield clause(
        "One test finds all four: with another last token, which no earlier place may see, earlier outputs"
        f" change, by {rounded_down(future, '.2g')} and more. Where the mask comes after the softmax, hidden keys"
        " are still in the denominator.",
        Check("smallest change of earlier outputs by another last token, mistakes", future, least=0.01),
        instead="Another last token does not find all mistakes",
    )


def _trained(wrong: Mapping[str, TrainedMistake], right: TrainedMistake, task: MarkovRows) -> Clause:
    losses = [one.run.end for one in wrong.values()]
    writing = min(one.writing for one in wrong.values())
    return clause(
        f"In training each mistake looks like progress: the loss falls to {min(losses):.2f} to {max(losses):.2f} nats,"
        f" below the entropy of {task.entropy:.2f}, where no prediction from the past alone can be. Where nothing"
        f" stands after the place, as in writing, it is {rounded_down(writing, '.2f')} nats and more, and"
        f" {right.writing:.2f} with the right version.",
        Check("training loss over the entropy, the mistake with the largest", max(losses) / task.entropy, most=0.9),
        Check("nats as in writing over the right version's, the best mistake", writing / right.writing, least=1.1),
        instead="Training with a mistake does not look better, or writing is not worse",
    )


def _table(shown: Mapping[str, Weighed], tokens: int) -> TableSection:
    both = "{:.2f} to {:.2f}".format
    rows = [
        [kind, *(both(*one.sums(axis)) for axis in (-1, -2)), f"{one.hidden:.0%}", f"{one.future:.2g}"]
        for kind, one in shown.items()
    ]
    header = ("", "sums of rows", "sums of columns", "weight on later tokens", "change by another last token")
    return TableSection(f"Attention on {tokens} random tokens", header, rows)


def _weights(kind: str, weights: Tensor) -> MatrixSection:
    """The weights of the first head."""
    names = [str(i) for i in range(weights.shape[-1])]
    cells = weights[0].tolist()
    texts = [[f"{x:.2f}" if x else "" for x in row] for row in cells]
    return MatrixSection(f"Weights, {kind}", "Head 0; queries in rows, keys in columns.", names, names, texts, cells)


def _losses(trained: Mapping[str, TrainedMistake], task: MarkovRows) -> TableSection:
    rows = [[kind, f"{one.run.end:.2f}", f"{one.writing:.2f}", f"{one.follows:.0%}"] for kind, one in trained.items()]
    title = f"Trained on a text with an entropy of {task.entropy:.2f} nats a symbol"
    return TableSection(title, ("", "loss in training", "as in writing", "written by the rule"), rows)
