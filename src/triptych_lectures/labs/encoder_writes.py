"""Can an encoder write?  (Lecture L1 says that BERT cannot generate; Wang and Cho 2019)

A bidirectional encoder is trained as BERT is, on symbols hidden at random.  Then it is made to write: a mask is put at
the end, filled, and so on.  Beside it a causal decoder of the same size writes the same text, and so does the same
encoder, the control, trained on rows whose last symbol alone was hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych import nn
from triptych.generate import Engine, Request
from triptych.page import Curve, TableSection
from triptych.spec import full
from triptych.train import Example
from triptych.train.objectives import Ids, TokenMasking
from .counting import products
from .generated_tasks import GeneratedTask, MarkovRows, TrainedRun, TrainingBudget, train, with_positions
from .lab import Check, Clause, Clauses, Findings, Lab, Setup, clause, ratio, size
from .left_to_right import logits_at, nats_of_prefixes, next_logits, written
from .small_models import block, with_mask

DECODER, ENCODER, LAST = "decoder", "encoder", "encoder, last symbol hidden"
STARTS, SUMMED = 8, 3  # texts, and how many symbols of each, whose continuations are all summed


class EncoderWritesLab(Lab):
    name = "encoder-writes"

    symbols: int = size(6, "symbols of the text, 3 to 8", least=3, most=8)
    length: int = size(16, "symbols of the longest row, 8 or more", least=8)
    noise: float = size(0.3, "share of symbols that follow no rule, below 1", most=0.9)
    width: int = size(32, "model width D, a multiple of the heads", multiple="heads")
    heads: int = size(4, "heads of each layer")
    layers: int = size(2, "layers of each model")
    steps: int = size(250, "training steps of the decoder")
    longer: int = size(4, "times these steps for the encoders, which predict fewer symbols a row")
    rows: int = size(32, "rows of a training step")
    rate: float = size(5e-3, "learning rate")
    hidden: float = size(0.15, "share of symbols that are hidden in training", most=0.9)
    tested: int = size(128, "rows that are tested")

    def findings(self, setup: Setup) -> Findings:
        text = MarkovRows(self.symbols, self.length, setup.seed, self.noise, shortest=4)
        steps = {DECODER: self.steps, ENCODER: self.longer * self.steps, LAST: self.longer * self.steps}
        models: dict[str, WritingModel] = {}
        for kind, count in steps.items():
            setup.progress(f"training, {kind}: {count} steps")
            models[kind] = self._train(kind, text, count, setup.seed)
        setup.progress("summing over all continuations, and counting FLOPs")
        totals = {kind: models[kind].totals(text, setup.seed) for kind in (DECODER, ENCODER)}
        flops = {kind: models[kind].flops(text) for kind in (DECODER, ENCODER)}
        best = _best_filling(text, setup.seed, self.tested)
        rows = [
            [
                kind, f"{steps[kind]:,}", f"{one.nats:.2f}", f"{one.follows:.0%}",
                "" if one.filled is None else f"{one.filled:.0%}",
            ]
            for kind, one in models.items()
        ]  # fmt: skip
        header = ("", "steps", "nats of the next symbol", "written by the rule", "filled right")
        losses = {kind: one.run.losses for kind, one in models.items()}
        yield TableSection(f"A text with an entropy of {text.entropy:.2f} nats a symbol", header, rows)
        yield Curve("Loss in training", "step", "nats a symbol", losses, {"entropy": text.entropy})
        yield self._learned(models, best, text)
        yield from self._conclusion(models, totals, flops)

    def _train(self, kind: str, text: MarkovRows, steps: int, seed: int) -> WritingModel:
        """All models have the same parts and sizes, and begin with the same weights."""
        blocks = [block(self.width, self.heads, 2 * self.width)] * self.layers
        module = with_positions(blocks, self.symbols + 1, self.length, seed)
        task: GeneratedTask = text
        if kind != DECODER:
            module, task = with_mask(module, full()), HiddenSymbols(text, self.hidden, last=kind == LAST)
        run = train(module, task, TrainingBudget(steps, self.rows, self.rate, 0.1, "linear"), seed)
        mask = None if kind == DECODER else self.symbols
        tests = text.texts(np.random.default_rng([seed, 1]), self.tested)
        module.eval()
        filled = _filled(module, tests, self.symbols) if kind == ENCODER else None
        nats, follows = nats_of_prefixes(module, tests, mask), text.follows(written(module, tests, mask))
        return WritingModel(module, mask, run, nats, follows, filled)

    def _learned(self, models: Mapping[str, WritingModel], best: float, text: MarkovRows) -> Clause:
        filled, guess, nats = models[ENCODER].filled or 0.0, 1 / self.symbols, models[DECODER].nats
        learned = (filled - guess) / (best - guess)
        return clause(
            f"Both learn what they are trained for: the encoder fills {filled:.0%} of hidden symbols right (a guess"
            f" {guess:.0%}, the best possible {best:.0%}), and the decoder predicts the next symbol with {nats:.2f}"
            f" nats, where the entropy of the text is {text.entropy:.2f}.",
            Check("filled by the encoder, from a guess, 0, to the best, 1", learned, least=0.5),
            Check("nats of the decoder's next symbol over the entropy", nats / text.entropy, 0.9, 1.2),
            instead="They have not learned what they were trained for",
        )

    def _conclusion(
        self, models: Mapping[str, WritingModel], totals: Mapping[str, float], flops: Mapping[str, int]
    ) -> Clauses:
        decoder, encoder, last = models.values()
        behind, guess = encoder.nats - decoder.nats, 1 / self.symbols
        by_rule, times = (encoder.follows - guess) / (1 - guess), flops[ENCODER] / flops[DECODER]
        of_last = ratio(last.nats - decoder.nats, behind)
        yield clause(
            f"The encoder can write: a mask at the end is filled, and again. {encoder.follows:.0%} of its symbols"
            f" follow the rule of the text, the decoder's {decoder.follows:.0%}.",
            Check("written by the encoder after the rule, from a guess, 0, to all, 1", by_rule, least=0.5),
            Check("written by the decoder after the rule", decoder.follows, least=0.9),
            instead="The two do not both write by the rule",
        )
        yield clause(
            f"But it writes worse: a next symbol costs {encoder.nats:.2f} nats, {behind:.2f} more than the"
            f" decoder's, though it trained {self.longer} times as long. The missing causal mask is not"
            " the reason: the same encoder, trained with the last symbol hidden, needs"
            f" {last.nats:.2f} (control).",
            Check("nats of a next symbol, encoder less decoder", behind, least=0.1),
            Check("nats above the decoder, trained for the last symbol over trained as BERT", of_last, most=0.5),
            instead="It does not write worse for this reason",
        )
        yield clause(
            "Its own probabilities, each symbol given all others, are not those of a text: multiplied and summed"
            f" over all {self.symbols**SUMMED} continuations they are {totals[ENCODER]:.2f} away from 1. The"
            " decoder's, each given those before, sum to 1.",
            Check("distance from 1 of the sum over all continuations, encoder", totals[ENCODER], least=0.05),
            Check("distance from 1 of the sum over all continuations, decoder", totals[DECODER], most=1e-4),
            instead="The sums are not so",
        )
        yield clause(
            "And it keeps no cache, since each new symbol changes all others: a text takes"
            f" {times:.1f} times the decoder's FLOPs, more with every symbol.",
            Check("FLOPs of a text, encoder over decoder with its cache", times, self.length / 4),
            instead="It does not cost that much more",
        )


@dataclass(frozen=True)
class HiddenSymbols:
    """The texts of `text` with symbols hidden as BERT does, or only the last; what is hidden is predicted.  The mask's
    id follows those of the symbols."""

    text: MarkovRows
    rate: float
    last: bool

    @property
    def classes(self) -> int:
        return self.text.symbols

    def rows(self, noise: np.random.Generator, count: int) -> list[Example]:
        mask, cut = self.text.symbols, self.text.cut(noise, count)
        if not self.last:
            hide = TokenMasking(mask, mask + 1, frozenset({mask}), self.rate)
            return [hide(ids, noise) for ids in cut]
        return [Example(np.append(ids[:-1], np.int32(mask)), ids, np.arange(len(ids)) == len(ids) - 1) for ids in cut]


class WritingModel(NamedTuple):
    """A trained model; `mask` is the id of an encoder's mask, None for a decoder.  It has `nats` of the next symbol
    from those before alone, and the shares that follow the rule in what it writes and that it filled right in texts."""

    module: nn.Transformer
    mask: int | None
    run: TrainedRun
    nats: float
    follows: float
    filled: float | None

    def totals(self, text: MarkovRows, seed: int) -> float:
        """The probabilities of `SUMMED` symbols, each as the model gives it, are multiplied, and summed over all that
        these symbols can be.  -> the mean distance of the sum from 1, over `STARTS` texts."""
        start = torch.from_numpy(text.texts(np.random.default_rng([seed, 2]), STARTS)[:, :2].astype(np.int64))
        ends = torch.tensor(list(product(range(text.symbols), repeat=SUMMED)))
        ids = torch.cat([start.repeat_interleave(len(ends), 0), ends.repeat(STARTS, 1)], 1)
        total = torch.zeros(len(ids))
        for place in range(2, 2 + SUMMED):
            if self.mask is None:
                logits = next_logits(self.module, ids[:, :place])
            else:
                logits = logits_at(self.module, _hide(ids, place, self.mask), place)
            total += logits[:, : text.symbols].log_softmax(-1).gather(1, ids[:, place, None])[:, 0]
        return (total.exp().view(STARTS, -1).sum(1) - 1).abs().mean().item()

    def flops(self, text: MarkovRows) -> int:
        """Of one text: by an encoder everything again for each symbol, by a decoder with its cache."""
        start = text.texts(np.random.default_rng(0), 1)
        if self.mask is not None:
            return products(lambda: written(self.module, start, self.mask)).total
        engine = Engine(self.module, executor="modules")
        engine.add(Request(prompt=start[0, :2].tolist(), max_new_tokens=text.length - 2))

        def finish() -> None:
            while engine.rows:
                engine.step()

        return products(finish).total


def _hide(ids: Tensor, place: int, mask: int) -> Tensor:
    hidden = ids.clone()
    hidden[:, place] = mask
    return hidden


def _filled(module: nn.Transformer, texts: Ids, mask: int) -> float:
    """The share of symbols in the middle of `texts` that are filled right when they are hidden."""
    ids, place = torch.from_numpy(texts.astype(np.int64)), texts.shape[1] // 2
    return (logits_at(module, _hide(ids, place, mask), place).argmax(-1) == ids[:, place]).double().mean().item()


def _best_filling(text: MarkovRows, seed: int, count: int) -> float:
    """The same share for who knows the rule and the noise: the likeliest symbol given its two neighbors on each
    side."""
    ids, place = text.texts(np.random.default_rng([seed, 1]), count), text.length // 2
    chances = np.ones((count, text.symbols))
    for symbol in range(text.symbols):
        tried = ids.copy()
        tried[:, place] = symbol
        for t in range(place, place + 3):
            by_rule = text.entries[tried[:, t - 2], tried[:, t - 1]] == tried[:, t]
            chances[:, symbol] *= text.noise / text.symbols + (1 - text.noise) * by_rule
    return float((chances.argmax(1) == ids[:, place]).mean())
