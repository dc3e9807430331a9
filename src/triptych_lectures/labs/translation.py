"""Labs that train several models on one synthetic translation task, and the task itself.

`recurrence` (Cho et al. 2014; Bahdanau et al. 2015; lectures L0 and L1); `panels`: an encoder-decoder, a decoder with
a prefix mask, and one with a plain prompt (Vaswani et al. 2017; Raffel et al. 2020, section 3.2; Radford et al. 2019).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from triptych.page import Curve, TableSection
from triptych.train.metrics import distance
from triptych_lectures.data.second_language import ADJECTIVES, NOUNS, VERBS, AlignedPair, SecondLanguage, Vocabulary
from . import translators
from .lab import Check, Findings, Lab, Setup, clause, size
from .small_models import curve, parameters
from .translators import END_ID, START_ID, BehindPrompt, Builder, Ids, TrainedTranslator, Training, Translator

HEADS = 4  # of self-attention


class TranslationSizes(Lab):
    """What a run of a lab about translation can change: the training, the models, the language and its sentences."""

    steps: int = size(150, "training steps of each model", full=800)
    rows: int = size(48, "sentences of a training step")
    rate: float = size(6e-3, "highest learning rate")
    width: int = size(64, f"width of embeddings and blocks, a multiple of {HEADS}", multiple=HEADS)
    layers: int = size(1, "blocks of the encoder, and of the decoder beside it; a decoder alone has twice as many")
    nouns: int = size(4, "nouns of the language", least=2, most=len(NOUNS), full=12)
    verbs: int = size(3, "verbs of the language", least=2, most=len(VERBS), full=8)
    adjectives: int = size(2, "adjectives of the language", least=2, most=len(ADJECTIVES), full=6)
    clauses: int = size(1, "most clauses of a sentence", most=16, full=3)
    train: int = size(3000, "sentences to train on", full=20_000)
    held: int = size(120, "held-out sentences, four or more, judged in quarters by length", least=4, full=400)

    def task(self, seed: int) -> TranslationTask:
        """The language that `seed` draws, and its sentences."""
        language = SecondLanguage(seed, nouns=self.nouns, verbs=self.verbs, adjectives=self.adjectives)
        pairs = language.sentences(seed, self.train + self.held, self.clauses)
        return TranslationTask(pairs[: self.train], pairs[self.train :])

    def training(self, seed: int, cross_heads: int | None = None) -> Training:
        """What all models of a run share."""
        return Training(self.width, HEADS, self.layers, self.rows, self.steps, self.rate, seed, cross_heads)


class TranslationTask:
    """Sentences to train on and held out ones, no two with the same source, as words and as ids: `rows` are source and
    target of each sentence to train on with their end tokens, `targets` what is to be written for each of `sources`."""

    def __init__(self, train: list[AlignedPair], held_out: list[AlignedPair]) -> None:
        self.train, self.held_out, self.vocabulary = train, held_out, Vocabulary([*train, *held_out])
        ids = self.vocabulary.ids
        self.rows = [(ids(pair.source), ids(pair.target)) for pair in train]
        self.sources = [ids(pair.source) for pair in held_out]
        self.targets = [ids(pair.target)[:-1] for pair in held_out]

    def shuffled(self, seed: int) -> TranslationTask:
        """The same with each source to train on beside the target of another sentence: the control."""
        task, order = copy(self), np.random.default_rng(seed).permutation(len(self.rows))
        task.rows = [(source, self.rows[i][1]) for (source, _), i in zip(self.rows, order, strict=True)]
        return task

    def judgement_of(self, model: Translator) -> Judgement:
        """What the model writes for the held-out sources."""
        return self.judged(write(model, self.sources, 2 * max(map(len, self.targets))))

    def judged(self, written: Sequence[Ids]) -> Judgement:
        """What was written for the held-out sources, compared with the targets."""
        groups = [
            wrong_tokens([written[i] for i in group], [self.targets[i] for i in group])
            for group in quarters(self.sources)
        ]
        exact = sum(output == right for output, right in zip(written, self.targets, strict=True)) / len(self.targets)
        return Judgement(wrong_tokens(written, self.targets), tuple(groups), exact)


class Judgement(NamedTuple):
    """Wrong tokens of all held-out sentences and of their quarters by the source's length, shortest first, and the
    share of sentences without a wrong token."""

    wrong: float
    by_length: tuple[float, ...]
    exact: float

    @property
    def cells(self) -> list[str]:
        """The numbers of a row of a table."""
        return [f"{self.wrong:.1%}", *(f"{wrong:.1%}" for wrong in self.by_length), f"{self.exact:.0%}"]


class Comparison(NamedTuple):
    """Models that were trained on the same sentences, what each writes for the held-out ones, and the word-by-word
    translation of these."""

    task: TranslationTask
    trained: dict[str, TrainedTranslator]
    judged: dict[str, Judgement]
    word_by_word: Judgement

    @property
    def losses(self) -> Curve:
        """The loss of each model over its training."""
        lines = {name: translator.losses for name, translator in self.trained.items()}
        return Curve("Training", "step", "nats a token", lines, {})


def compared(sizes: TranslationSizes, builders: Mapping[str, Builder], setup: Setup) -> Comparison:
    """Train the model of each builder on the same sentences in the same order, and judge what it writes."""
    task, training = sizes.task(setup.seed), sizes.training(setup.seed)
    trained, judged = {}, {}
    for name, builder in builders.items():
        setup.progress(f"{name}: training {sizes.steps} steps")
        trained[name] = builder(task.rows, len(task.vocabulary), training)
        judged[name] = task.judgement_of(trained[name].model)
    return Comparison(task, trained, judged, task.judged(word_by_word(task)))


# ---------------------------------------------------------------- writing and judging


def write(model: Translator, sources: Sequence[Ids], most: int) -> list[Ids]:
    """What the model writes for each source, greedily, without the end token: at most `most` tokens.

    The whole row is computed again for each token, so that models with and without a cache are treated alike.
    """
    written: list[Ids] = [[START_ID] for _ in sources]
    going = list(range(len(sources)))
    for _ in range(most):
        if not going:
            break
        tokens = model.next_tokens([sources[i] for i in going], [written[i] for i in going]).tolist()
        for i, token in zip(going, tokens, strict=True):
            written[i].append(token)
        going = [i for i, token in zip(going, tokens, strict=True) if token != END_ID]
    return [[token for token in row[1:] if token != END_ID] for row in written]


def wrong_tokens(written: Sequence[Ids], targets: Sequence[Ids]) -> float:
    """The fewest tokens to insert, delete or replace, over the tokens of the targets; without end tokens."""
    texts = [
        ("".join(map(chr, output)), "".join(map(chr, right))) for output, right in zip(written, targets, strict=True)
    ]
    return sum(distance(output, right) for output, right in texts) / sum(len(right) for _, right in texts)


def quarters(sources: Sequence[Ids]) -> list[list[int]]:
    """The indices of the sources in four groups of equal size, from the shortest to the longest."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    edges = [round(i * len(order) / 4) for i in range(5)]
    return [order[a:b] for a, b in pairwise(edges)]


def word_by_word(task: TranslationTask) -> list[Ids]:
    """The baseline that knows the true links: each source word becomes the target words that a sure link most often
    joins to it in training, in the order of the source."""
    counts: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for pair in task.train:
        links = sorted(pair.sure)
        for i, word in enumerate(pair.source):
            counts[word][tuple(pair.target[target] for target, source in links if source == i)] += 1
    best = {word: of_word.most_common(1)[0][0] for word, of_word in counts.items()}
    number = task.vocabulary.number
    return [[number[target] for word in pair.source for target in best.get(word, ())] for pair in task.held_out]


FIXED, ATTENTION, TRANSFORMER = "GRU, fixed vector", "GRU, attention", "transformer"
RECURRENCE: dict[str, Builder] = {
    FIXED: translators.fixed_vector,
    ATTENTION: translators.bahdanau,
    TRANSFORMER: translators.beside_encoder,
}


class RecurrenceLab(TranslationSizes):
    name = "recurrence"

    steps: int = size(320, "training steps of each model", full=800)
    rows: int = size(24, "sentences of a training step", full=64)
    layers: int = size(1, "blocks of the transformer's encoder, and of its decoder")
    clauses: int = size(2, "most clauses of a sentence", most=16, full=4)

    def findings(self, setup: Setup) -> Findings:
        comparison = compared(self, RECURRENCE, setup)
        fixed, attention = comparison.judged[FIXED], comparison.judged[ATTENTION]
        transformer, by_words = comparison.judged[TRANSFORMER], comparison.word_by_word
        # by how much the share of wrong tokens is larger in the longest quarter than in the shortest
        lost, lost_by_attention = (judged.by_length[-1] - judged.by_length[0] for judged in (fixed, attention))
        level, costs = _costs(comparison)
        waits, fewer = costs[ATTENTION].operations, costs[TRANSFORMER].operations
        over = "wrong tokens, over those of word by word"
        grows = "increase of wrong tokens from the shortest quarter to the longest, fixed vector"
        worse, longer = fixed.by_length[-1] / max(attention.by_length[-1], 1e-9), waits / fewer
        yield clause(
            f"In the longest quarter of the sentences the model with one vector writes {fixed.by_length[-1]:.0%} of"
            f" the tokens wrong, the one with attention {attention.by_length[-1]:.0%}. Word by word, which does not"
            f" read the sentence, gets {by_words.wrong:.0%} of all tokens wrong.",
            Check("word by word: wrong tokens", by_words.wrong, least=0.5),
            Check(f"{ATTENTION}: {over}", attention.wrong / by_words.wrong, most=0.5),
            Check("longest quarter: wrong tokens of the fixed vector, over those of attention", worse, least=2.0),
            instead="Attention did not halve what one vector gets wrong, or did not learn a task that asks for it",
        )
        yield clause(
            f"One vector has to hold the whole source: from the shortest quarter to the longest its share of wrong"
            f" tokens grows by {100 * lost:.0f} percentage points, from {fixed.by_length[0]:.0%}, that of attention"
            f" by {100 * lost_by_attention:.0f}, from {attention.by_length[0]:.0%}.",
            Check(grows, lost, least=0.1),
            Check(f"{grows} less attention", lost - lost_by_attention, least=0.1),
            instead="One vector did not lose more with length than attention",
        )
        yield clause(
            f"Each cell waits for the one before. To the loss that both with attention reach, {level:.2f} nats a"
            f" token, recurrence took {waits:,.0f} operations one after another, and the transformer {fewer:,.0f}.",
            Check(f"{TRANSFORMER}: {over}", transformer.wrong / by_words.wrong, most=0.5),
            Check("operations one after another, those of recurrence over the transformer's", longer, least=2.0),
            instead="The transformer did not learn this in fewer operations one after another",
        )
        lines = {**comparison.judged, "word by word": comparison.word_by_word}
        header = ("model", "all", "shortest quarter", "second", "third", "longest quarter", "exact")
        sources = comparison.task.sources
        lengths = [sum(len(sources[i]) - 1 for i in group) / len(group) for group in quarters(sources)]
        shares = {name: judgement.by_length for name, judgement in lines.items()}
        yield TableSection("Wrong tokens, written freely", header, [[name, *of.cells] for name, of in lines.items()])
        yield _cost_table(comparison, level, costs)
        yield curve("Wrong tokens by length", "words of the source", "share", lengths, shares)
        yield comparison.losses


class ChainCost(NamedTuple):
    """Of one model the longest chain of a training step, the steps to a loss, NaN where it never reached it, and the
    operations one after another that these are."""

    chain: int
    steps: float

    @property
    def operations(self) -> float:
        return self.chain * self.steps


def _costs(comparison: Comparison) -> tuple[float, dict[str, ChainCost]]:
    """The loss, in nats a token, that both models with attention reach, and what each model needs to it."""
    source = max(len(source) for source in comparison.task.sources)
    target = max(len(target) for target in comparison.task.targets)
    level = max(comparison.trained[name].last for name in (ATTENTION, TRANSFORMER))
    return level, {
        name: ChainCost(one.model.sequential_steps(source, target), one.reached(level) or math.nan)
        for name, one in comparison.trained.items()
    }


def _cost_table(comparison: Comparison, level: float, costs: Mapping[str, ChainCost]) -> TableSection:
    rows = []
    for name, one in comparison.trained.items():
        cost = costs[name]
        seconds = one.seconds * cost.steps / len(one.losses)
        reached = [f"{cost.steps:,.0f}", f"{cost.operations:,.0f}", f"{seconds:.1f} s"]
        shown = ["–", "–", "–"] if math.isnan(cost.steps) else reached
        rows.append([name, f"{parameters(one.model.module):,}", str(cost.chain), *shown])
    return TableSection(
        f"To the loss that both with attention reach, {level:.2f} nats a token",
        ("model", "parameters", "chain of one step", "steps", "steps one after another", "processor time"),
        rows,
    )


PROMPT = "decoder, plain prompt"
PANELS: dict[str, Builder] = {
    "encoder-decoder": translators.beside_encoder,
    "decoder, prefix mask": translators.behind_prefix,
    PROMPT: translators.behind_prompt,
}


class PanelsLab(TranslationSizes):
    name = "panels"

    def findings(self, setup: Setup) -> Findings:
        comparison = compared(self, PANELS, setup)
        reference = comparison.word_by_word.wrong
        setup.progress(f"{PROMPT}, on targets of other sentences: training {self.steps} steps")
        control = comparison.task.shuffled(setup.seed)
        guesses = translators.behind_prompt(control.rows, len(control.vocabulary), self.training(setup.seed))
        blind = control.judgement_of(guesses.model).wrong
        decoders = (one.model for one in comparison.trained.values() if isinstance(one.model, BehindPrompt))
        with_prefix, with_prompt = (model.reads_ahead(comparison.task.sources[0]) for model in decoders)
        shares = ", ".join(f"{name} {judgement.wrong:.0%}" for name, judgement in comparison.judged.items())
        over = "wrong tokens, over those of word by word"
        yield clause(
            "A translation needs no layout of its own: a decoder alone that finds the source in front of the target"
            f" writes it too. Wrong tokens: {shares}; word by word {reference:.0%}.",
            Check("word by word: wrong tokens", reference, least=0.5),
            *(
                Check(f"{name}: {over}", judgement.wrong / reference, most=0.5)
                for name, judgement in comparison.judged.items()
            ),
            instead="Not every layout learned to translate, or word by word does",
        )
        yield clause(
            "With the prefix mask a word of the source sees those after it, as in an encoder: other words there"
            f" move the vector of the first by {with_prefix:.0%} of its length. With a plain prompt it sees those"
            f" before it alone: {with_prompt:.0%}.",
            Check("prefix mask: change of the first word's vector by words after it", with_prefix, least=0.01),
            Check("plain prompt: change of the first word's vector by words after it", with_prompt, most=1e-5),
            instead="The masks do not differ in what a word of the source sees",
        )
        yield clause(
            "Control: trained beside the targets of other sentences, the decoder with a plain prompt writes"
            f" {blind:.0%} of the tokens wrong.",
            Check(f"control: {PROMPT}, shuffled targets: {over}", blind / reference, least=0.75),
            instead="The translation can be guessed without its source",
        )
        header = ("layout", "parameters", "all", "shortest quarter", "second", "third", "longest quarter", "exact")
        rows = [
            [name, f"{parameters(comparison.trained[name].model.module):,}", *judgement.cells]
            for name, judgement in comparison.judged.items()
        ]
        rows.append(["word by word", "–", *comparison.word_by_word.cells])
        yield TableSection("Wrong tokens, written freely", header, rows)
        yield comparison.losses
