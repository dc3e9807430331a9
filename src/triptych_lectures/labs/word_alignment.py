"""Does cross-attention align the words of two languages?  (Bahdanau et al. 2015; lectures L0, L1 and L4)

Beside it stand IBM Model 1 (Brown et al. 1993) and the diagonal, all judged by the error rate of Och and Ney 2003.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych import nn
from triptych.errors import InputError
from triptych.model import Model
from triptych.page import AttentionMap, AttentionSection, Curve
from triptych_lectures.data.second_language import ADJECTIVES, NOUNS, VERBS, AlignedPair, Link
from .lab import Check, Conclusion, LabResult, Setup, clause, size
from .small_models import share_table
from .translation import TranslationSizes, TranslationTask
from .translators import START_ID, BesideEncoder, beside_encoder

MOST = 0.25  # alignment error rate in a full run
HALF = 0.5  # most of the diagonal's error rate, and of an untrained model's


class WordAlignmentLab(TranslationSizes):
    name = "word-alignment"

    steps: int = size(300, "training steps", full=1000)
    cross_heads: int = size(1, "heads of cross-attention; with several, each reads a part of what a word needs")
    layers: int = size(2, "blocks of the encoder, and of the decoder")
    nouns: int = size(6, "nouns of the language", least=2, most=len(NOUNS), full=12)
    verbs: int = size(4, "verbs of the language", least=2, most=len(VERBS), full=8)
    adjectives: int = size(3, "adjectives of the language", least=2, most=len(ADJECTIVES), full=6)
    clauses: int = size(3, "most clauses of a sentence; words repeat in long ones", most=16, full=4)
    train: int = size(4000, "sentences to train on", full=20_000)
    held: int = size(200, "held-out sentences; on the first half layer and head are chosen", least=2, full=800)

    def __post_init__(self) -> None:
        if self.width % self.cross_heads:
            raise InputError(f"sizes width {self.width} and cross_heads {self.cross_heads}: must divide without rest")

    def run(self, setup: Setup) -> LabResult:
        task = self.task(setup.seed)
        setup.progress(f"training a translation model for {self.steps} steps")
        trained = beside_encoder(task.rows, len(task.vocabulary), self.training(setup.seed, self.cross_heads))
        assert isinstance(trained.model, BesideEncoder)
        half = len(task.held_out) // 2
        chosen_on, held = task.held_out[:half], task.held_out[half:]
        module = trained.model.module
        patterns = _patterns(Model(module), task)
        rates, place = _chosen(patterns, chosen_on)
        untrained = _patterns(Model(nn.new(module.spec, setup.seed)), task)
        before = error_rate(_peaks(untrained[_chosen(untrained, chosen_on)[1]][half:]), held)
        setup.progress("fitting IBM Model 1")
        lexicon = Model1(task.train)
        rate = error_rate(_peaks(patterns[place][half:]), held)
        model1 = error_rate([lexicon.links(pair) for pair in held], held)
        straight = error_rate([diagonal(pair) for pair in held], held)
        conclusion: Conclusion = (
            clause(
                "To write a word the model attends to the one it translates, though no alignment was trained. The links"
                f" of {place.name} have an error rate of {rate:.2f}, those of the diagonal {straight:.2f}; control:"
                f" those of the best head before training {before:.2f}.",
                Check(f"alignment error rate of {place.name}, over the diagonal's", rate / straight, most=HALF),
                Check(f"alignment error rate of {place.name}, over that before training", rate / before, most=HALF),
                instead="The strongest weights of no head follow the alignment",
            ),
        )
        if setup.full:
            better = clause(
                f"They are better than those of IBM Model 1, {model1:.2f}, which knows which words go together and not"
                " where they stand: of two articles in a sentence, it cannot tell which is meant.",
                Check(f"alignment error rate of {place.name}", rate, most=MOST),
                Check("error rate of IBM Model 1, less that of this head", model1 - rate, least=0.02),
                instead="They are not better than a lexicon",
            )
            conclusion += (better,)
        remarks = (
            f"Layer and head were chosen on {half} sentences, the rates are those of {len(held)} others. A rate is 0"
            " where exactly the true links are proposed, and 1 where none of them is."
        )
        header, chosen = ("links of", "error rate"), {at.name: of_place for at, of_place in rates.items()}
        judged = {"before training": before, "the diagonal": straight, "IBM Model 1": model1, place.name: rate}
        sections = (
            share_table("Held-out sentences", header, judged, ".3f"),
            share_table("The sentences that layer and head are chosen on", header, chosen, ".3f"),
            *_maps(task, place, patterns[place]),
            Curve("Training", "step", "nats a token", {"loss": trained.losses}, {}),
        )
        return self.result(conclusion, sections, remarks, small=not setup.full)


class HeadPlace(NamedTuple):
    """A head of cross-attention, or the mean of all heads of its layer (`head` is None)."""

    layer: int
    head: int | None

    @property
    def name(self) -> str:
        return f"layer {self.layer}, {'mean of the heads' if self.head is None else f'head {self.head}'}"


def _patterns(model: Model, task: TranslationTask) -> dict[HeadPlace, list[Tensor]]:
    """For each head and each mean of heads, for each held-out sentence, `[T, S]`; the last column is the end token."""
    read = [[START_ID, *target] for target in task.targets]
    trace = model.trace(task.sources, read, read=["decoder.blocks.*.cross.pattern"])
    places: dict[HeadPlace, list[Tensor]] = {}
    for layer, site in enumerate(trace):
        of_words = [pattern[:, :-1].float() for pattern in trace[site]]  # the last query writes the end token
        heads = len(of_words[0])
        for head in range(heads):
            places[HeadPlace(layer, head)] = [pattern[head] for pattern in of_words]
        if heads > 1:
            places[HeadPlace(layer, None)] = [pattern.mean(0) for pattern in of_words]
    return places


def _chosen(
    patterns: Mapping[HeadPlace, list[Tensor]], pairs: Sequence[AlignedPair]
) -> tuple[dict[HeadPlace, float], HeadPlace]:
    """The error rate of each place on the first sentences, which are `pairs`, and the place of the lowest."""
    rates = {place: error_rate(_peaks(pattern[: len(pairs)]), pairs) for place, pattern in patterns.items()}
    return rates, min(rates, key=lambda place: rates[place])


def _peaks(patterns: Sequence[Tensor]) -> list[frozenset[Link]]:
    """Each target word with the source word it attends to most; with none where that is the end token."""
    best = [(pattern.argmax(-1).tolist(), pattern.shape[1] - 1) for pattern in patterns]
    return [frozenset((t, s) for t, s in enumerate(peaks) if s != end) for peaks, end in best]


def _maps(task: TranslationTask, place: HeadPlace, patterns: list[Tensor]) -> list[AttentionSection]:
    """A held-out sentence of about eight words under the weights of this head, and its sure links."""
    i = min(range(len(task.held_out) // 2, len(task.held_out)), key=lambda i: abs(len(task.held_out[i].source) - 8))
    pair, weights = task.held_out[i], patterns[i]
    source, target = [*pair.source, "<end>"], list(pair.target)
    true = torch.zeros(weights.shape)
    for t, s in pair.sure:
        true[t, s] = 1.0
    note = "Rows are the words to write, columns those to read."
    return [
        AttentionSection(title, note, [AttentionMap("cross", place.layer, target, source, x[None].numpy())])
        for title, x in ((f"A sentence: {place.name}", weights), ("Its sure links", true))
    ]


def error_rate(links: Sequence[frozenset[Link]], pairs: Sequence[AlignedPair]) -> float:
    """AER, `1 - (|A & S| + |A & P|) / (|A| + |S|)` over all sentences, of links A, sure ones S and possible ones P."""
    right = proposed = 0
    for of_pair, pair in zip(links, pairs, strict=True):
        right += len(of_pair & pair.sure) + len(of_pair & pair.possible)
        proposed += len(of_pair) + len(pair.sure)
    return 1.0 - right / max(1, proposed)


def diagonal(pair: AlignedPair) -> frozenset[Link]:
    """Each target word with the source word at the same share of the sentence."""
    ratio = len(pair.source) / len(pair.target)
    return frozenset((t, int((t + 0.5) * ratio)) for t in range(len(pair.target)))


class Model1:
    """Probabilities `t(target word | source word)` of a lexicon that is fitted to sentence pairs by expectation
    maximization, where each target word comes from any source word of its sentence, or from none, all alike."""

    def __init__(self, pairs: Sequence[AlignedPair], iterations: int = 10) -> None:
        self.sources = {word: i for i, word in enumerate(dict.fromkeys(w for p in pairs for w in ("", *p.source)))}
        self.targets = {word: i for i, word in enumerate(dict.fromkeys(w for p in pairs for w in p.target))}
        rows = [(self._sources(pair), np.array([self.targets[word] for word in pair.target])) for pair in pairs]
        self.lexicon = np.full((len(self.sources), len(self.targets)), 1.0 / len(self.targets))
        for _ in range(iterations):
            counts = np.zeros_like(self.lexicon)
            for source, target in rows:
                weights = self.lexicon[np.ix_(source, target)]
                np.add.at(counts, np.ix_(source, target), weights / weights.sum(0))
            self.lexicon = counts / counts.sum(1, keepdims=True)

    def links(self, pair: AlignedPair) -> frozenset[Link]:
        """Each target word with the source word that it most probably comes from, or with none."""
        known = [(t, self.targets[word]) for t, word in enumerate(pair.target) if word in self.targets]
        source = self._sources(pair)
        best = [(t, int(self.lexicon[source, word].argmax()) - 1) for t, word in known]
        return frozenset((t, s) for t, s in best if s >= 0)

    def _sources(self, pair: AlignedPair) -> NDArray[np.int64]:
        """The empty word and those of the source; an unknown word counts as the empty one."""
        return np.array([self.sources.get(word, 0) for word in ("", *pair.source)])
