"""Labels of texts, of pairs of texts, and of words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError, InputError, shown
from triptych.nn import Transformer
from triptych.train import metrics
from triptych.train.data import Data
from triptych.train.evaluate import HeldOut, Score
from triptych.train.labelled import IGNORED, ClassLoss, HeadLoss, LabelledExample, SeveralLoss, labelled
from triptych.train.recipe import ObjectiveSettings, Recipe
from triptych.train.records import DataRecord
from triptych.train.task import Fitter, HeadTask, JudgedRows, Outputs, epoch_rows, read_split, trained_at


class LabelTask(HeadTask):
    """One label of each text, or several (`objective.several`): fields `text` and `label` (or `labels`), and `text_b`
    for pairs.  `reads` is the field that is labelled, `also` are those that may stand beside it."""

    kind = "labels"
    reads: ClassVar[str] = "text"
    also: ClassVar[tuple[str, ...]] = ("text_b",)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.several = recipe.objective.several
        field = "labels" if self.several else "label"
        self.train, self.held = read_split(recipe.data, (self.reads, field), self.also)
        self.names = [[self._names(record, field) for record in side] for side in (self.train, self.held)]
        self.labels = _told_apart(recipe, self.names, self.held, "every training record has the label")
        self.texts = [text for record in self.train for text in self._texts(record)]

    def _texts(self, record: DataRecord) -> list[str]:
        return [text for text in _both(record) if text is not None]

    def _names(self, record: DataRecord, field: str) -> list[str]:
        return record.listed(field, ";") if self.several else [record.label(field)]

    def goals(self) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], HeadLoss]:
        """The goal of each record to train on and held out, `[records, 1]` or `[records, C]`; of the former the labels
        as the metrics and guesses take them; and the loss."""
        assert self.labels is not None
        index = {label: i for i, label in enumerate(self.labels)}
        goals = [np.stack([_goal(names, index, self.several) for names in side]) for side in self.names]
        if self.several:
            if self.recipe.objective.smoothing or self.recipe.objective.class_weights is not None:
                raise ConfigError("objective.several goes without smoothing and class_weights; remove them")
            return goals, goals[0], SeveralLoss(tuple(self.labels))
        right = goals[0][:, 0]
        return goals, right, class_loss(self.recipe.objective, self.labels, right)

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        assert self.labels is not None
        fit, (goals, right, loss) = Fitter(self.recipe, self.tokenizer), self.goals()
        at_end = module.decoder is not None  # of an encoder-decoder, whose head reads the last token

        def example(number: int, record: DataRecord, goal: NDArray[np.int64]) -> LabelledExample | None:
            row = fit(record, *_both(record))
            if row is None:
                return None
            if at_end and row.ids[-1] not in module.spec.ids.eos:
                raise record.error("the row does not end with an end-of-text token, where this model has its label")
            return labelled(row, goal, loss, number, trained_at(len(row.ids), len(row.ids) - 1 if at_end else 0))

        sides = zip((self.train, self.held), goals, strict=True)
        data, held = (epoch_rows(map(example, count(), *side)) for side in sides)
        texts = [[_joined(record) for record in side] for side in (self.train, self.held)]
        guesses = {
            "majority": metrics.majority(right, len(self.held)),
            "bag of words": metrics.bag_of_words(texts[0], right, texts[1], len(self.labels)),
        }
        judge = partial(judged_labels, guesses, self.several)
        return data, JudgedRows.of_rows(held.examples, judge, tokens, self.device)


def judged_labels(
    guesses: Mapping[str, NDArray[np.integer]], several: bool, nats: float, count: int, rows: Outputs
) -> Score:
    """Accuracy and macro F1 of labels of rows, beside the accuracy of the guesses, `[records]` or `[records, C]`."""
    outputs = np.stack([output.numpy() for _, output in rows])
    right = np.stack([example.goal if several else example.goal[0] for example, _ in rows])
    predicted = (outputs > 0).astype(np.int64) if several else outputs.argmax(-1)
    numbers = [example.number for example, _ in rows]
    guessed = {name: metrics.accuracy(guess[numbers], right) for name, guess in guesses.items()}
    accuracy = metrics.accuracy(predicted, right)
    figures = {"accuracy": accuracy, "macro F1": metrics.macro_f1(predicted, right)}
    correct, most = round(accuracy * len(rows)), round(guessed["majority"] * len(rows))
    return Score(nats, count, correct, most, metrics=figures, baselines=guessed)


class TagTask(HeadTask):
    """One tag of each word: fields `words` and `tags`, lists of the same length or texts with spaces between.

    The words are joined by spaces, so that a trained model reads plain text.  The first token of a word has its tag,
    and the others are ignored.
    """

    kind = "tags"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.train, self.held = read_split(recipe.data, ("words", "tags"))
        self.rows = [[_tagged(record) for record in side] for side in (self.train, self.held)]
        tags = [[tags for _, tags in side] for side in self.rows]
        self.labels = _told_apart(recipe, tags, self.held, "every word has the tag")
        self.texts = [" ".join(words) for words, _ in self.rows[0]]

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        assert self.labels is not None
        fit, index = Fitter(self.recipe, self.tokenizer), {label: i for i, label in enumerate(self.labels)}
        words = [[row for row, _ in side] for side in self.rows]
        goals = [[np.array([index[tag] for tag in tags]) for _, tags in side] for side in self.rows]
        loss = class_loss(self.recipe.objective, self.labels, np.concatenate(goals[0]))

        def example(
            number: int, record: DataRecord, words: Sequence[str], goal: NDArray[np.int64]
        ) -> LabelledExample | None:
            row = fit(record, " ".join(words))
            if row is None:
                return None
            tags = np.full(len(row.ids), IGNORED)
            first = first_tokens(words, row.offsets, row.sequence_ids)
            tags[first] = goal[: len(first)]
            return labelled(row, tags, loss, number, tags != IGNORED)

        sides = zip((self.train, self.held), words, goals, strict=True)
        data, held = (epoch_rows(map(example, count(), *side)) for side in sides)
        common = int(metrics.majority(np.concatenate(goals[0]), 1)[0])
        guesses = {
            "majority": [np.full(len(row), common) for row in words[1]],
            "each word's commonest": metrics.commonest_tags(words[0], goals[0], words[1]),
        }
        judge = partial(_judged_tags, guesses, self.labels)
        return data, JudgedRows.of_rows(held.examples, judge, tokens, self.device)


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]], of: Sequence[int | None]) -> list[int]:
    """The first token of each word of the text `" ".join(words)`, up to the first word that has none (it was cut off).

    Raises InputError for a word that the tokenizer drops though a later one has a token.
    """
    first: list[int] = []
    start, tokens = 0, [i for i, sequence in enumerate(of) if sequence == 0 and offsets[i][1] > offsets[i][0]]
    last = max((offsets[i][1] for i in tokens), default=0)
    at = 0  # of the first token that does not end before the word
    for word in words:
        stop = start + len(word)
        while at < len(tokens) and offsets[tokens[at]][1] <= start:
            at += 1
        token = tokens[at] if at < len(tokens) and offsets[tokens[at]][0] < stop else None
        if token is None and stop < last:
            raise InputError(f"the tokenizer makes no token of the word {shown(word)}; remove it from the record")
        if token is None:
            break
        if first and token == first[-1]:
            raise InputError(f"the tokenizer joins the word {shown(word)} to the one before; tags need words apart")
        first.append(token)
        start = stop + 1
    return first


def _judged_tags(
    guesses: Mapping[str, Sequence[NDArray[np.integer]]], labels: Sequence[str], nats: float, count: int, rows: Outputs
) -> Score:
    """Accuracy of the words' tags and F1 of entities, beside the accuracy of the guesses."""
    right = [example.goal[example.trained] for example, _ in rows]
    predicted = [output.numpy().argmax(-1)[example.trained] for example, output in rows]
    flat, joined = np.concatenate(right), np.concatenate(predicted)
    guessed = {
        name: metrics.accuracy(np.concatenate([guess[e.number][: e.trained.sum()] for e, _ in rows]), flat)
        for name, guess in guesses.items()
    }
    figures = {"accuracy": metrics.accuracy(joined, flat)}
    if any(label.startswith("B-") for label in labels):
        named = [[[labels[i] for i in row] for row in side] for side in (predicted, right)]
        figures["entity F1"] = metrics.entity_f1(*named)
    else:
        figures["macro F1"] = metrics.macro_f1(joined, flat)
    correct, most = int((joined == flat).sum()), round(guessed["majority"] * len(flat))
    return Score(nats, count, correct, most, metrics=figures, baselines=guessed)


def _told_apart(
    recipe: Recipe, named: Sequence[Sequence[Sequence[str]]], held: Sequence[DataRecord], every: str
) -> list[str]:
    """The labels of the training records in order, from those of each record trained on and held out.

    Raises InputError where there is one only, which `every` one has, and for a label that occurs in no training record.
    """
    labels = ordered_labels(chain.from_iterable(named[0]))
    if len(labels) < 2:
        raise InputError(f"{recipe.data.path}: {every} {labels}; there is nothing to tell apart")
    known, what = set(labels), every.rpartition(" ")[2]
    for names, record in zip(named[1], held, strict=True):
        if unseen := [name for name in names if name not in known]:
            problem = f"the {what} {shown(unseen[0])} occurs in no training record"
            raise InputError(f"{record.where}: {problem}; remove the record or add others")
    return labels


def ordered_labels(labels: Iterable[str]) -> list[str]:
    """The different labels in order: by number where all are numbers, else by name."""
    every = set(labels)
    numbers = all(label.isdecimal() and len(label) < 19 for label in every)
    return sorted(every, key=lambda label: (int(label) if numbers else 0, label))


def class_loss(settings: ObjectiveSettings, labels: Sequence[str], right: NDArray[np.integer]) -> ClassLoss:
    """Cross-entropy with the smoothing and the weights of the recipe; `right` are the training labels [N].

    "balanced" weights are N / (C * count), as in scikit-learn.  Raises ConfigError for a label without a weight.
    """
    class_weights, weights = settings.class_weights, None
    if class_weights == "balanced":
        counts = np.maximum(np.bincount(right, minlength=len(labels)), 1)
        weights = tuple((len(right) / (len(labels) * counts)).tolist())
    elif class_weights is not None:
        if class_weights.keys() != set(labels):
            wrong = sorted(class_weights.keys() ^ set(labels))[0]
            raise ConfigError(f"objective.class_weights needs a weight for each of {', '.join(labels)}; see {wrong!r}")
        weights = tuple(class_weights[label] for label in labels)
    return ClassLoss(tuple(labels), settings.smoothing, weights)


def _goal(names: Sequence[str], index: Mapping[str, int], several: bool) -> NDArray[np.int64]:
    if not several:
        return np.array([index[names[0]]])
    return np.array([int(label in names) for label in index])


def _both(record: DataRecord) -> tuple[str, str | None]:
    return record.text("text"), record.text("text_b") if "text_b" in record.values else None


def _joined(record: DataRecord) -> str:
    """The words of a record for the baseline; those of the second text count as others than those of the first."""
    text, second = _both(record)
    return text if second is None else " ".join((text, *(f"b_{word}" for word in metrics.words(second))))


def _tagged(record: DataRecord) -> tuple[list[str], list[str]]:
    words, tags = record.listed("words", None), record.listed("tags", None)
    if len(words) != len(tags):
        raise record.error(f"words and tags are {len(words)} and {len(tags)}; give one tag for each word")
    if not words:
        raise record.error("words is empty; remove the record")
    if any(" " in word for word in words):
        raise record.error("a word has a space in it; write it as several words, with a tag each")
    return words, tags
