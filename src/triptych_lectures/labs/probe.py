"""A linear probe: what can be read from a model's states, and what of it the model uses (lecture L1).

Hewitt and Liang 2019, on control tasks; Belrose et al. 2023, on removing what a linear probe reads; the sentences are
of the kind of Linzen et al. 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.probe import Edit, Where
from triptych.train import metrics
from .lab import Check, Findings, Lab, Setup, clause, size
from .pretrained import decoder, last_states
from .small_models import curve, line_table

NOUNS = (
    "key|dog|author|pilot|doctor|teacher|farmer|painting|senator|driver|engineer|window|picture|letter|student|singer|"
    "report|table|lamp|guard|actor|book|bottle|girl|boy|worker|player|house|car|river"
)
OTHERS = "cabinet|boat|tree|door|wall|garden|road|hotel|bridge|tower"
PLACES = "near|behind|beside|by|above"  # each stands before the other noun
VERBS = (" is", " are")
EVERY = 3  # layers, of which one is probed


class ProbeLab(Lab):
    name = "probe"

    nouns: str = size(NOUNS, "subjects, nouns whose plural ends in s, separated by |; a third is held out")
    others: str = size(OTHERS, "nouns that stand between subject and verb; a third is held out")
    places: str = size(PLACES, "prepositions before them; a third is held out")
    fitted: int = size(160, "sentences that probes are fitted to")
    tested: int = size(80, "sentences of each test")
    controls: int = size(5, "control tasks, whose mean is taken")

    def __post_init__(self) -> None:
        for name in ("nouns", "others", "places"):
            if len(getattr(self, name).split("|")) < 3:
                raise InputError(f"size {name}: give three words or more, separated by |")

    def findings(self, setup: Setup) -> Findings:
        noise, model = np.random.default_rng(setup.seed), decoder(setup)
        if model.spec.layout != "decoder":
            raise InputError(f"this lab needs a decoder, and this model is an {model.spec.layout}")
        sentences = self._sentences(noise)
        rows, labels = model.ids([sentence.text for sentence in sentences]), self._labels(sentences, noise)
        setup.progress(f"probing the model on {len(rows)} sentences")
        states = last_states(model, rows).float()
        layers = range(0, len(states), EVERY)
        trained = [self._read(states[layer], labels) for layer in layers]
        setup.progress("probing a model of random weights")
        other = last_states(Model(nn.new(model.spec, setup.seed)), rows).float()
        random = [self._read(other[layer], labels) for layer in layers][1:]
        read, half, middle = trained[-1], len(states) // 2, len(layers) * 2 // 3
        place, there = layers[middle], trained[middle]
        chance = 0.5 + 1.5 / math.sqrt(self.tested)  # and three standard errors
        setup.progress("removing what the probe reads")
        verb = Verb(model, rows[-self.tested :], labels[-self.tested :, 0])
        known, fitted = states[:, : self.fitted], labels[: self.fitted]
        late = range(half, len(states))
        subject, another, by_chance, alone = (
            verb.left({layer: direction(known[layer], column, setup.seed + layer) for layer in of})
            for of, column in ((late, fitted[:, 0]), (late, fitted[:, 1]), (late, None), ([place], fitted[:, 0]))
        )
        by_random = Reads(*(float(np.mean(line)) for line in zip(*random, strict=True)))
        yield clause(
            f"At the last token, after layer {layers[-1]}, a probe reads the subject's number: {read.new:.0%} are"
            f" right, with words and contexts that it was not fitted to; {trained[0].new:.0%} from the embedding,"
            " which is that of another word.",
            Check("number of the subject, new words: right after the last layer", read.new, least=0.75),
            Check("the same from the embedding, where it cannot stand", trained[0].new, 0.3, 0.7),
            instead="The probe did not read the number of the subject as claimed",
        )
        yield clause(
            f"Control: a random label for each word form is right in {read.control:.0%} there; the selectivity is"
            f" {read.selectivity:.2f}. In a model of random weights a probe is right for words that it knows"
            f" ({by_random.seen:.0%}, the mean of all layers), but for random labels too ({by_random.control:.0%}),"
            f" and for new words in {by_random.new:.0%}: it has learned the words.",
            Check("selectivity after the last layer", read.selectivity, least=0.1),
            Check("selectivity, less that in random weights", read.selectivity - by_random.selectivity, least=0.05),
            Check("random weights: right for known words", by_random.seen, least=0.75),
            Check("new words: right, more than with random weights", read.new - by_random.new, least=0.2),
            instead="The control task did not tell the model's number from learned words",
        )
        yield clause(
            f"What is read need not be used: the number of the other noun is right in {read.other:.0%}, yet without"
            f" its direction, from layer {half} on, {another:.0%} of the verb's preference is left, without the"
            f" subject's {subject:.0%}, without a random one {by_chance:.0%}.",
            Check("number of the other noun, new words: right", read.other, least=0.9),
            Check("preference left without the other noun's direction", another, 0.85, 1.15),
            Check("preference left without the subject's direction", subject, most=0.6),
            Check("control: preference left without a random direction", by_chance, 0.9, 1.1),
            instead="Removing directions did not tell what is used from what is read",
        )
        yield clause(
            f"Nor is the layer where it is read the one that uses it: after layer {place} the probe is right for"
            f" {there.seen:.0%} of the known words, but with the direction removed at this layer alone {alone:.0%}"
            " of the preference is left.",
            Check(f"number of the subject, known words: right after layer {place}", there.seen, chance),
            Check(f"preference left without its direction after layer {place} alone", alone, 0.85, 1.15),
            Check("control: more left than without it in all these layers", alone - subject, least=0.25),
            instead="That what is removed at one layer is made up for was not seen",
        )
        yield clause(
            f"The model does use the number: it prefers the right verb in {verb.right:.0%} of the new sentences.",
            Check("verb of the right number preferred, in new sentences", verb.right, least=0.75),
            instead="The model did not prefer the right verb",
        )
        names = "new words", "known words", "control task", "other noun's number"
        lines = dict(zip(names, map(list, zip(*trained, strict=True)), strict=True))
        lines["random weights, new words"] = [trained[0].new, *(own.new for own in random)]
        title = "Right at the last token: the number of the subject"
        yield line_table(title, "layer", layers, lines, ".0%")
        yield curve(title, "layers passed", "share", layers, lines, {"chance": 0.5})

    def _sentences(self, noise: np.random.Generator) -> list[Sentence]:
        """Those that probes are fitted to, then tests with the same subjects, then tests with other ones.  Tests have
        other contexts.  Every form of a subject is equally frequent, and the number of the other noun is random."""
        known, new = zip(
            *(split(noise.permutation(of.split("|")).tolist()) for of in (self.nouns, self.others, self.places)),
            strict=True,
        )
        tests = (known[0], *new[1:]), new
        return drawn(known, self.fitted, noise) + [one for of in tests for one in drawn(of, self.tested, noise)]

    def _labels(self, sentences: Sequence[Sentence], noise: np.random.Generator) -> NDArray[np.int64]:
        """`[N, 2 + controls]` of 0 and 1: the number of the subject, that of the other noun, and control tasks, each a
        random label for each form of a subject, as many of 0 as of 1."""
        forms = sorted({sentence.form for sentence in sentences})
        halves = np.arange(len(forms)) % 2
        tasks = [dict(zip(forms, noise.permutation(halves), strict=True)) for _ in range(self.controls)]
        return np.array([[own.number, own.other, *(task[own.form] for task in tasks)] for own in sentences])

    def _read(self, states: Tensor, labels: NDArray[np.int64]) -> Reads:
        """What probes of one layer, `[N, D]`, get right."""
        known, new = states[: self.fitted].numpy(), states[self.fitted :].numpy()
        guessed = metrics.linear(known, labels[: self.fitted], new, labels.shape[1])
        right = guessed == labels[self.fitted :]
        seen, unseen = right[: self.tested].mean(0), right[self.tested :].mean(0)
        return Reads(float(unseen[0]), float(seen[0]), float(seen[2:].mean()), float(unseen[1]))


class Sentence(NamedTuple):
    """A sentence without its verb, the form of its subject, and the numbers of subject and other noun, 1 for plural."""

    text: str
    form: str
    number: int
    other: int


class Reads(NamedTuple):
    """Shares that probes of one layer get right: the number of new words, of words that they were fitted to, random
    labels of these, and the number of the other noun."""

    new: float
    seen: float
    control: float
    other: float

    @property
    def selectivity(self) -> float:
        return self.seen - self.control


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The first two thirds, and the rest."""
    cut = len(words) * 2 // 3
    return words[:cut], words[cut:]


def drawn(words: Sequence[Sequence[str]], count: int, noise: np.random.Generator) -> list[Sentence]:
    """`count` sentences of nouns, other nouns and prepositions, in which every form of a subject is equally frequent
    and the rest is random."""
    nouns, others, places = words
    sentences = []
    for index in range(count):
        at, number = index % len(nouns), index // len(nouns) % 2
        form, other = nouns[at] + "s" * number, int(noise.integers(2))
        text = f"The {form} {noise.choice(places)} the {noise.choice(others)}{'s' * other}"
        sentences.append(Sentence(text, form, number, other))
    return sentences


@dataclass(frozen=True, eq=False)
class Removed:
    """Takes the part along one direction of unit length out of a vector, where it differs from the mean."""

    along: Tensor
    mean: Tensor

    def __call__(self, value: Tensor, where: Where) -> Tensor:
        return value - ((value - self.mean) @ self.along)[..., None] * self.along


def direction(states: Tensor, labels: NDArray[np.int64] | None, seed: int) -> Removed:
    """The difference of the means of `states`, [N, D], with label 1 and 0; a random one where there are no labels."""
    if labels is None:
        along = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(seed))
    else:
        of = torch.from_numpy(labels).bool()
        along = states[of].mean(0) - states[~of].mean(0)
    return Removed(along / along.norm(), states.mean(0))


class Verb:
    """How a model prefers the verb of the plural after some sentences, whose subjects have these numbers."""

    def __init__(self, model: Model, rows: Sequence[Sequence[int]], numbers: NDArray[np.int64]) -> None:
        self.model, self.rows, self.plural = model, rows, torch.from_numpy(numbers).bool()
        self.verbs = [ids[0] for ids in model.ids(list(VERBS))]
        preferred = self._preferred([])
        self.right, self.gap = float(((preferred > 0) == self.plural).double().mean()), self._gap(preferred)

    def left(self, removed: Mapping[int, Removed]) -> float:
        """The share of the preference's difference that is left without a direction after these layers, from 1 on, at
        the last token."""
        edits = [
            Edit(f"blocks.{layer - 1}.resid_post", of, item, len(row) - 1)
            for layer, of in removed.items()
            for item, row in enumerate(self.rows)
        ]
        return self._gap(self._preferred(edits)) / self.gap

    def _preferred(self, edits: Sequence[Edit]) -> Tensor:
        """`[N]`: the logit of the plural's verb less that of the singular's."""
        logits = torch.stack([own[-1] for own in self.model.trace(self.rows, edit=edits).logits])
        one, several = self.verbs
        return logits[:, several] - logits[:, one]

    def _gap(self, preferred: Tensor) -> float:
        return float(preferred[self.plural].mean() - preferred[~self.plural].mean())
