"""The translation that models are compared on: sentences to train on and held-out ones, what a model writes for them,
and how much of it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from triptych.labs.second_language import AlignedPair, SecondLanguage, Vocabulary
from triptych.labs.translators import END_ID, START_ID, Ids, TrainedTranslator, Translator
from triptych.train.metrics import distance


@dataclass(frozen=True, eq=False)
class TranslationTask:
    """Sentences to train on and held out ones, no two with the same source."""

    train: list[AlignedPair]
    held: list[AlignedPair]
    vocabulary: Vocabulary

    @staticmethod
    def of(language: SecondLanguage, seed: int, train: int, held: int, clauses: int) -> TranslationTask:
        """So many sentences of 1 to `clauses` clauses; the held-out ones have the same share of each number."""
        pairs = language.sentences(seed, train + held, clauses)
        return TranslationTask(pairs[:train], pairs[train:], Vocabulary(pairs))

    @property
    def rows(self) -> list[tuple[Ids, Ids]]:
        """Source and target of the sentences to train on."""
        return as_ids(self.train, self.vocabulary)

    @property
    def sources(self) -> list[Ids]:
        return [source for source, _ in as_ids(self.held, self.vocabulary)]

    @property
    def targets(self) -> list[Ids]:
        """What is to be written for each of `sources`, without the end token."""
        return [target[:-1] for _, target in as_ids(self.held, self.vocabulary)]

    def judged(self, trained: TrainedTranslator) -> Judgement:
        """What the model writes for the held-out sources, compared with the targets."""
        return Judgement.of(self, write(trained.model, self.sources, 2 * max(map(len, self.targets))))


@dataclass(frozen=True)
class Judgement:
    """Wrong tokens of all held-out sentences and of their quarters by the source's length, shortest first, and the
    share of sentences without a wrong token."""

    wrong: float
    by_length: tuple[float, ...]
    exact: float

    @staticmethod
    def of(task: TranslationTask, written: Sequence[Ids]) -> Judgement:
        targets = task.targets
        groups = [
            wrong_tokens([written[i] for i in group], [targets[i] for i in group]) for group in quarters(task.sources)
        ]
        exact = sum(ours == right for ours, right in zip(written, targets, strict=True)) / len(targets)
        return Judgement(wrong_tokens(written, targets), tuple(groups), exact)

    @property
    def cells(self) -> list[str]:
        """The numbers of a row of a table."""
        return [f"{self.wrong:.1%}", *(f"{wrong:.1%}" for wrong in self.by_length), f"{self.exact:.0%}"]


def as_ids(pairs: Sequence[AlignedPair], vocabulary: Vocabulary) -> list[tuple[Ids, Ids]]:
    """Sources and targets as ids, each with its end token."""
    return [(vocabulary.ids(pair.source), vocabulary.ids(pair.target)) for pair in pairs]


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
    texts = [("".join(map(chr, ours)), "".join(map(chr, right))) for ours, right in zip(written, targets, strict=True)]
    return sum(distance(ours, right) for ours, right in texts) / sum(len(right) for _, right in texts)


def quarters(sources: Sequence[Ids]) -> list[list[int]]:
    """The indices of the sources in four groups of equal size, from the shortest to the longest."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    edges = [round(i * len(order) / 4) for i in range(5)]
    return [order[a:b] for a, b in pairwise(edges)]


def word_by_word(task: TranslationTask) -> list[Ids]:
    """The baseline that knows the true links: each source word becomes the target words that a sure link most often
    joins to it in training, in the order of the source."""
    counts: dict[str, dict[tuple[str, ...], int]] = {}
    for pair in task.train:
        partners: dict[int, list[str]] = {i: [] for i in range(len(pair.source))}
        for target, source in sorted(pair.sure):
            partners[source].append(pair.target[target])
        for i, words in partners.items():
            of_word = counts.setdefault(pair.source[i], {})
            of_word[tuple(words)] = of_word.get(tuple(words), 0) + 1
    best = {word: max(of_word, key=lambda words: of_word[words]) for word, of_word in counts.items()}
    number = task.vocabulary.number
    return [[number[target] for word in pair.source for target in best.get(word, ())] for pair in task.held]
