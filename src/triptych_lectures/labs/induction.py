"""Induction: A B ... A -> B, by two layers of attention alone (Elhage et al. 2021; Olsson et al. 2022; L4.8)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych.errors import counted
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Curve, TableSection
from triptych.probe import Edit, zero
from triptych.probe.role_scores import at_offset, mean_weight
from triptych.train import Example, OptimizerSettings, Pairs
from .bounds import rounded_down, rounded_up
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import Points, attention_layers, fit

OFFSETS = 8  # places back among which the one a head reads most is searched


class InductionLab(Lab):
    name = "induction"

    width: int = size(48, "model width D, a multiple of the heads", multiple="heads")
    heads: int = size(3, "heads of each layer, two or more", least=2)
    vocab: int = size(48, "tokens that there are, at least `longest`")
    shortest: int = size(
        12, "tokens of the shortest sequence that is repeated, 5 or more", least=OFFSETS // 2 + 1, most="longest"
    )
    longest: int = size(32, "tokens of the longest one", most="vocab")
    steps: int = size(400, "training steps")
    rows: int = size(32, "rows of a training step")
    tested: int = size(32, "rows that are tested")

    def findings(self, setup: Setup) -> Findings:
        noise = np.random.default_rng(setup.seed)
        data = Pairs(tuple(self._repeated(noise) for _ in range(self.steps * self.rows)))
        tests = [self._repeated(noise) for _ in range(self.tested)]
        models, losses = {}, {}
        for layers in (1, 2):
            setup.progress(f"training {counted(layers, 'layer')}: {self.steps} steps")
            models[layers], losses[f"layers: {layers}"] = self._train(layers, data, setup.seed)
        shallow, copied = (_copied(model, tests) for model in models.values())
        setup.progress("removing heads, one at a time")
        heads = _heads(models[2], tests)
        best = max(heads, key=lambda head: head.induction)
        others = [head.without for head in heads if head.layer == best.layer and head is not best]
        first = [head for head in heads if head.layer == 0]
        below = min(first, key=lambda head: head.without)
        beside = [head for head in first if head is not below]
        ratio = below.previous / max(head.previous for head in beside)
        best_beside = max(head.without for head in beside)
        previous = f"weight of {below.name} on the token before, over the most of the other heads of layer 0"
        yield clause(
            f"Two layers learn to look up in the row which token follows which, and copy {copied:.0%} right; one"
            f" layer copies {shallow:.0%}.",
            Check("copied right by two layers", copied, least=0.8),
            Check("copied right by one layer", shallow, most=0.3),
            instead="The difference between two layers and one was not seen",
        )
        yield clause(
            f"In {best.name} the second A attends to the place after the first A. Without this head"
            f" {best.without:.0%} is copied right; without another head of its layer, the control,"
            f" {rounded_down(min(others), '.0%')} and more.",
            Check(f"pattern score of {best.name}, the highest", best.induction, least=0.4),
            Check(f"copied right without {best.name}", best.without, most=0.25),
            Check("copied right without another head of its layer, the worst", min(others), least=0.5),
            instead="No single head of the second layer does the copying",
        )
        yield clause(
            f"That place can be recognized because {below.name} reads recent tokens, the one before most"
            f" ({below.previous:.2f} of its weight). Without it {below.without:.0%} is copied right; without"
            f" another head of layer 0 up to {rounded_up(best_beside, '.0%')}.",
            Check(f"copied right without {below.name}, the head it reads from", below.without, most=0.25),
            Check(f"places back that {below.name} reads most", below.most, 1, 1),
            Check(previous, ratio, least=1.5),
            Check("copied right without another head of layer 0, the best", best_beside, least=0.5),
            instead="No single head of the first layer supplies the previous token",
        )
        rows = [[h.name, f"{h.induction:.2f}", f"{h.previous:.2f}", str(h.most), f"{h.without:.0%}"] for h in heads]
        header = ("head", "second A to after first A", "to the token before", "places back read most")
        guess = {"guessing": float(np.log(self.vocab))}
        yield TableSection("Heads of the two-layer model", (*header, "copied right without it"), rows)
        yield Curve("Loss on the repetition", "step", "nats per token", losses, guess)
        yield _maps(models[2], tests)

    def _repeated(self, noise: np.random.Generator) -> Example:
        return repeated(noise, self.vocab, self.shortest, self.longest)

    def _train(self, layers: int, data: Pairs, seed: int) -> tuple[Model, Points]:
        module = attention_layers(layers, self.vocab, self.width, self.heads, seed)
        settings = OptimizerSettings(lr=1e-2, weight_decay=0.0)
        losses = fit(
            module, data, rows=self.rows, length=2 * self.longest, steps=self.steps, seed=seed, optimizer=settings
        )
        return Model(module), losses


def repeated(noise: np.random.Generator, vocab: int, shortest: int, longest: int) -> Example:
    """A sequence of distinct tokens twice over, trained where it is determined: from the second repeated token on.

    Its length varies, so that no fixed distance leads back to the first occurrence."""
    length = int(noise.integers(shortest, longest + 1))
    twice = np.tile(noise.choice(vocab, length, replace=False).astype(np.int32), 2)
    return Example(twice[:-1], twice[1:], np.arange(1, len(twice)) > length)


class Head(NamedTuple):
    """One head: the weight of the second A on the token after the first A, of each token on the one before it, how
    many places back it reads most, and the share copied right with this head's output set to 0."""

    layer: int
    head: int
    induction: float
    previous: float
    most: int
    without: float

    @property
    def name(self) -> str:
        return f"layer {self.layer} head {self.head}"


def _copied(model: Model, tests: Sequence[Example], edit: Sequence[Edit] = ()) -> float:
    """Share of the trained places where the right token comes first."""
    logits = model.trace([test.ids.tolist() for test in tests], edit=edit).logits
    right = [(own.argmax(-1).numpy() == test.targets)[test.trained] for own, test in zip(logits, tests, strict=True)]
    return float(np.concatenate(right).mean())


def _heads(model: Model, tests: Sequence[Example]) -> list[Head]:
    trace = model.trace([test.ids.tolist() for test in tests], read=["blocks.*.attn.pattern"])
    heads = []
    for layer in (0, 1):
        copying, back = pattern_scores(trace[f"blocks.{layer}.attn.pattern"])
        for head, induction in enumerate(copying):
            without = _copied(model, tests, [zero(f"blocks.{layer}.attn.z", heads=[head])])
            most = max(range(OFFSETS), key=lambda n: back[n][head])
            heads.append(Head(layer, head, induction, back[1][head], most, without))
    return heads


def pattern_scores(patterns: Sequence[Tensor]) -> tuple[list[float], list[list[float]]]:
    """Two scores of each head on rows that are a sequence twice over, from its `patterns`, [H, T, T] a row with T one
    less than twice the length: the weight of the second A on the token after the first A, and that of each token on
    the one 0 to `OFFSETS` - 1 places back."""
    lengths = [pattern.shape[-1] for pattern in patterns]
    copying = _mean(patterns, [at_offset(range((n + 1) // 2, n), 1 - (n + 1) // 2, n) for n in lengths])
    steps = range(OFFSETS)
    return copying, [_mean(patterns, [at_offset(range(OFFSETS + k, n), -k, n) for n in lengths]) for k in steps]


def _mean(patterns: Sequence[Tensor], reads: Sequence[Tensor]) -> list[float]:
    """Over the queries of each row, then over rows: one number a head."""
    means: list[float] = torch.stack(list(map(mean_weight, patterns, reads))).mean(0).tolist()
    return means


def _maps(model: Model, tests: Sequence[Example]) -> AttentionSection:
    shown = min(tests, key=lambda test: len(test.ids)).ids.tolist()
    trace = model.trace([shown], read=["blocks.*.attn.pattern"])
    tokens = [str(token) for token in shown]
    patterns = ((layer, trace[f"blocks.{layer}.attn.pattern"][0].numpy()) for layer in (1, 0))
    maps = [AttentionMap("decoder", layer, tokens, tokens, pattern) for layer, pattern in patterns]
    return AttentionSection("A sequence and its repetition", "Rows are queries, columns are keys.", maps)
