"""Induction: A B ... A -> B, by two layers of attention alone (Elhage et al. 2021; Olsson et al. 2022; L4.8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from triptych import nn
from triptych.labs.lab import Check, Finding, Setup
from triptych.labs.small import Points, block, decoder, fit
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Curve, TableSection
from triptych.probe import Edit, zero
from triptych.spec import Alibi, RMSNorm
from triptych.train import Example, OptimizerSettings, Pairs

WIDTH, HEADS, VOCAB = 48, 3, 48
SHORTEST, LONGEST = 12, 32  # of a sequence that is then said again
STEPS, ROWS, TESTED = 400, 32, 32


@dataclass(frozen=True, eq=False)
class Head:
    """One head: how much the second A draws from the token after the first A, how much each token from the one before
    it, and the share copied right with this head's output set to 0."""

    layer: int
    head: int
    induction: float
    previous: float
    without: float

    @property
    def name(self) -> str:
        return f"layer {self.layer} head {self.head}"


def run(setup: Setup) -> Finding:
    """Random sequences, each said twice: one layer and two layers of attention learn the second saying."""
    noise = np.random.default_rng(setup.seed)
    data = Pairs(tuple(_repeated(noise) for _ in range(STEPS * ROWS)))
    tests = [_repeated(noise) for _ in range(TESTED)]
    models, losses = {}, {}
    for layers in (1, 2):
        setup.say(f"training {layers} layer{'s' * (layers > 1)}: {STEPS} steps")
        models[layers], losses[f"layers: {layers}"] = _train(layers, data, setup.seed)
    shallow, copied = (_copied(model, tests) for model in models.values())
    setup.say("removing heads, one at a time")
    heads = _heads(models[2], tests)
    best = max(heads, key=lambda head: head.induction)
    others = [head.without for head in heads if head.layer == best.layer and head is not best]
    below = min((head for head in heads if head.layer == 0), key=lambda head: head.without)
    checks = (
        Check("copied right by two layers", copied, least=0.8),
        Check("copied right by one layer", shallow, most=0.3),
        Check(f"pattern score of {best.name}, the highest", best.induction, least=0.4),
        Check("copied right without it", best.without, most=0.25),
        Check("copied right without another head of its layer, the worst", min(others), least=0.5),
        Check(f"copied right without {below.name}, the head it reads from", below.without, most=0.25),
    )
    meaning = (
        "Which token follows which differs from row to row, so only the row itself can tell. Two layers learn to look"
        f" it up: in {best.name} the second A draws from the place after the first A, and says what stands there. It"
        f" finds that place because {below.name} has written there which token came before: without that head nothing"
        " is copied either, and one layer, which has no layer below to do it, copies next to nothing. Positions are"
        " ALiBi's: each head has a reach of its own, and each task falls to one head. Where positions are alike for"
        " all heads, as with RoPE, several learn the same, and removing one of them shows little."
    )
    table = TableSection(
        "Heads of the two-layer model",
        ("head", "second A to after first A", "to the token before", "copied right without it"),
        [[h.name, f"{h.induction:.2f}", f"{h.previous:.2f}", f"{h.without:.0%}"] for h in heads],
    )
    curve = Curve("Loss on the second saying", "step", "nats per token", losses, {"guessing": float(np.log(VOCAB))})
    return Finding(
        "How does a model copy what it has seen once?", meaning, checks, (table, curve, _maps(models[2], tests))
    )


def _repeated(noise: np.random.Generator) -> Example:
    """A sequence of distinct tokens twice over, trained where it can be known: from the second token said again.

    Its length varies, so that no fixed distance leads back to the first saying."""
    once = noise.choice(VOCAB, int(noise.integers(SHORTEST, LONGEST + 1)), replace=False).astype(np.int32)
    twice = np.concatenate([once, once])
    return Example(twice[:-1], twice[1:], np.arange(1, len(twice)) > len(once))


def _train(layers: int, data: Pairs, seed: int) -> tuple[Model, Points]:
    blocks = [block(WIDTH, HEADS, hidden=None)] * layers
    spec = decoder(VOCAB, blocks, inside=Alibi(heads=HEADS), final_norm=RMSNorm(width=WIDTH))
    module = nn.new(spec, seed)
    settings = OptimizerSettings(lr=1e-2, weight_decay=0.0)
    return Model(module), fit(module, data, rows=ROWS, length=2 * LONGEST, steps=STEPS, seed=seed, optimizer=settings)


def _copied(model: Model, tests: Sequence[Example], edit: Sequence[Edit] = ()) -> float:
    """Share of the trained places where the right token comes first."""
    logits = model.trace([test.ids.tolist() for test in tests], edit=edit).logits
    right = [(own.argmax(-1).numpy() == test.targets)[test.trained] for own, test in zip(logits, tests, strict=True)]
    return float(np.concatenate(right).mean())


def _heads(model: Model, tests: Sequence[Example]) -> list[Head]:
    trace = model.trace([test.ids.tolist() for test in tests], read=["blocks.*.attn.pattern"])
    found = []
    for layer in (0, 1):
        patterns = trace[f"blocks.{layer}.attn.pattern"]  # [H, T, T] a row, T one less than twice the length
        copying = _mean([pattern.diagonal(1 - (pattern.shape[-1] + 1) // 2, 1, 2)[:, 1:] for pattern in patterns])
        before = _mean([pattern.diagonal(-1, 1, 2) for pattern in patterns])
        for head in range(HEADS):
            without = _copied(model, tests, [zero(f"blocks.{layer}.attn.z", heads=[head])])
            found.append(Head(layer, head, copying[head], before[head], without))
    return found


def _mean(diagonals: Sequence[Tensor]) -> list[float]:
    """Over the places of each row, then over rows: one number a head."""
    means: list[float] = sum(diagonal.mean(-1) for diagonal in diagonals).div(len(diagonals)).tolist()  # type: ignore[union-attr]
    return means


def _maps(model: Model, tests: Sequence[Example]) -> AttentionSection:
    shown = min(tests, key=lambda test: len(test.ids)).ids.tolist()
    trace = model.trace([shown], read=["blocks.*.attn.pattern"])
    tokens = [str(token) for token in shown]
    maps = [
        AttentionMap("decoder", layer, tokens, tokens, trace[f"blocks.{layer}.attn.pattern"][0].numpy())
        for layer in (1, 0)
    ]
    return AttentionSection("A sequence said twice", "Rows are queries, columns are keys.", maps)
