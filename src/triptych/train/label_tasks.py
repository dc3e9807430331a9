"""Labels of texts, of pairs of texts and of words; and answers to questions, as the place of a span in its context
(SQuAD: Rajpurkar et al. 2016, 2018)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby
from typing import ClassVar, Literal

import numpy as np

from triptych.errors import ConfigError, InputError, shown
from triptych.nn import Transformer
from triptych.text import Encoded, Tokenizer
from . import metrics
from .evaluate import Score
from .labelled import IGNORED, ClassLoss, HeadLoss, LabelledExample, SeveralLoss, SpanLoss, labelled
from .objectives import Integers
from .recipe import ObjectiveSettings, Recipe
from .records import DataRecord
from .task import HeadTask, Outputs, Prepared, epoch_rows, read_split, trained_at


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
        self.train, self.held_out = sides = read_split(recipe.data, (self.reads, field), self.also)
        self.names = [
            [one.listed(field, ";") if self.several else [one.label(field)] for one in side] for side in sides
        ]
        self.labels = _told_apart(recipe, self.names, self.held_out, "every training record has the label")
        self.texts = [text for record in self.train for text in self._texts(record)]

    def _texts(self, record: DataRecord) -> list[str]:
        return [text for text in _text_pair(record) if text is not None]

    def goals(self) -> tuple[list[Integers], Integers, HeadLoss]:
        """The goal of each record to train on and held out, `[records, 1]` or `[records, C]`; of the former the labels
        as the metrics and guesses take them; and the loss."""
        if self.several:
            if self.objective.smoothing or self.objective.class_weights is not None:
                raise ConfigError("objective.several goes without smoothing and class_weights; remove them")
            goals = [np.array([[int(one in names) for one in self.labels] for names in side]) for side in self.names]
            return goals, goals[0], SeveralLoss(tuple(self.labels))
        index = {label: i for i, label in enumerate(self.labels)}
        goals = [np.array([[index[name] for name in names] for names in side]) for side in self.names]
        right = goals[0][:, 0]
        return goals, right, class_loss(self.objective, self.labels, right)

    def data(self, module: Transformer, tokens: int) -> Prepared:
        goals, right, loss = self.goals()
        at_end = module.decoder is not None  # of an encoder-decoder, whose head reads the last token

        def example(number: int, record: DataRecord, goal: Integers) -> LabelledExample | None:
            row = self.fitted(record, *_text_pair(record))
            if row is None:
                return None
            if at_end and row.ids[-1] not in module.spec.ids.eos:
                raise record.error("the row does not end with an end-of-text token, where this model has its label")
            return labelled(row, goal, loss, number, trained_at(len(row.ids), len(row.ids) - 1 if at_end else 0))

        sides = zip((self.train, self.held_out), goals, strict=True)
        data, held_out = (epoch_rows(map(example, count(), *side)) for side in sides)
        train, texts = (list(map(_joined, side)) for side in (self.train, self.held_out))
        guesses = {
            "majority": metrics.majority(right, len(texts)),
            "bag of words": metrics.bag_of_words(train, right, texts, len(self.labels)),
        }
        return data, self.judged(held_out.examples, partial(judged_classes, guesses, "macro F1"), tokens)


ClassMetric = Literal["macro F1", "entity F1", "F1 of replaced"]


def judged_classes(
    guesses: Mapping[str, Sequence[Integers] | Integers], metric: ClassMetric, nats: float, count: int, rows: Outputs
) -> Score:
    """Accuracy and another metric of the classes of rows or of their tokens, beside the accuracy of `guesses`,
    which have the classes of each record."""
    head = rows[0][0].head
    right = [one.goal[one.goal != IGNORED] for one, _ in rows]
    predicted = [head.predicted(output)[one.goal != IGNORED] for one, output in rows]
    together = np.stack if isinstance(head, SeveralLoss) else np.concatenate
    wanted, flat = together(right), together(predicted)
    guessed = {}
    for name, guess in guesses.items():
        of_rows = [np.atleast_1d(guess[one.number])[: len(row)] for (one, _), row in zip(rows, right, strict=True)]
        guessed[name] = metrics.accuracy(together(of_rows), wanted)
    match metric:
        case "entity F1":
            value = metrics.entity_f1(*([head.names(row.tolist()) for row in side] for side in (predicted, right)))
        case "F1 of replaced":
            value = metrics.f1(flat == 1, wanted == 1)
        case "macro F1":
            value = metrics.macro_f1(flat, wanted)
    figures = {"accuracy": metrics.accuracy(flat, wanted), metric: value}
    correct, most = (round(share * len(wanted)) for share in (figures["accuracy"], guessed["majority"]))
    return Score(nats, count, correct, most, metrics=figures, baselines=guessed)


class TagTask(HeadTask):
    """One tag of each word: fields `words` and `tags`, lists of the same length or texts with spaces between.

    The words are joined by spaces, so that a trained model reads plain text.  The first token of a word has its tag,
    and the others are ignored.
    """

    kind = "tags"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.train, self.held_out = read_split(recipe.data, ("words", "tags"))
        self.rows = [list(map(_tagged, side)) for side in (self.train, self.held_out)]
        tags = [[tags for _, tags in side] for side in self.rows]
        self.labels = _told_apart(recipe, tags, self.held_out, "every word has the tag")
        self.texts = [" ".join(words) for words, _ in self.rows[0]]

    def data(self, module: Transformer, tokens: int) -> Prepared:
        index = {label: i for i, label in enumerate(self.labels)}
        words = [[row for row, _ in side] for side in self.rows]
        goals = [[np.array([index[tag] for tag in tags]) for _, tags in side] for side in self.rows]
        loss = class_loss(self.objective, self.labels, np.concatenate(goals[0]))

        def example(number: int, record: DataRecord, words: Sequence[str], goal: Integers) -> LabelledExample | None:
            row = self.fitted(record, " ".join(words))
            if row is None:
                return None
            tags = np.full(len(row.ids), IGNORED)
            first = first_tokens(words, row.offsets, row.sequence_ids)
            tags[first] = goal[: len(first)]
            return labelled(row, tags, loss, number, tags != IGNORED)

        sides = zip((self.train, self.held_out), words, goals, strict=True)
        data, held_out = (epoch_rows(map(example, count(), *side)) for side in sides)
        common = int(metrics.majority(np.concatenate(goals[0]), 1)[0])
        guesses = {
            "majority": [np.full(len(row), common) for row in words[1]],
            "each word's commonest": metrics.commonest_tags(words[0], goals[0], words[1]),
        }
        metric: ClassMetric = "entity F1" if any(label.startswith("B-") for label in self.labels) else "macro F1"
        return data, self.judged(held_out.examples, partial(judged_classes, guesses, metric), tokens)


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]], of: Sequence[int | None]) -> list[int]:
    """The first token of each word of the text `" ".join(words)`, up to the first word that has none (it was cut off).

    Raises InputError for a word that the tokenizer drops though a later one has a token.
    """
    places = enumerate(zip(offsets, of, strict=True))
    tokens = [(i, begin, end) for i, ((begin, end), sequence) in places if sequence == 0 and end > begin]
    last = max((end for _, _, end in tokens), default=0)
    first: list[int] = []
    start, at = 0, 0  # of the word, and the first token that does not end before it
    for word in words:
        stop = start + len(word)
        while at < len(tokens) and tokens[at][2] <= start:
            at += 1
        if at == len(tokens) or tokens[at][1] >= stop:
            if stop < last:
                raise InputError(f"the tokenizer makes no token of the word {shown(word)}; remove it from the record")
            break
        if first and tokens[at][0] == first[-1]:
            raise InputError(f"the tokenizer joins the word {shown(word)} to the one before; tags need words apart")
        first.append(tokens[at][0])
        start = stop + 1
    return first


def _told_apart(
    recipe: Recipe, named: Sequence[Sequence[Sequence[str]]], held_out: Sequence[DataRecord], clause: str
) -> list[str]:
    """The labels of the training records in order, from those of each record trained on and held out.

    Raises InputError where there is one only, as `clause` says, and for a label that occurs in no training record.
    """
    labels = ordered_labels(chain.from_iterable(named[0]))
    if len(labels) < 2:
        raise InputError(f"{recipe.data.path}: {clause} {labels}; there is nothing to tell apart")
    trained_labels, noun = set(labels), clause.rpartition(" ")[2]
    for names, record in zip(named[1], held_out, strict=True):
        if unseen := [name for name in names if name not in trained_labels]:
            problem = f"the {noun} {shown(unseen[0])} occurs in no training record"
            raise InputError(f"{record.location}: {problem}; remove the record or add others")
    return labels


def ordered_labels(labels: Iterable[str]) -> list[str]:
    """The different labels in order: by number where all are numbers, else by name."""
    every = sorted(set(labels))
    return sorted(every, key=int) if all(label.isdecimal() and len(label) < 19 for label in every) else every


def class_loss(settings: ObjectiveSettings, labels: Sequence[str], right: Integers) -> ClassLoss:
    """Cross-entropy with the smoothing and the weights of the recipe; `right` are the training labels [N].

    "balanced" weights are N / (C * count), as in scikit-learn.  Raises ConfigError for a label without a weight.
    """
    class_weights, weights = settings.class_weights, None
    if class_weights == "balanced":
        counts = np.maximum(np.bincount(right, minlength=len(labels)), 1)
        weights = tuple((len(right) / (len(labels) * counts)).tolist())
    elif class_weights is not None:
        more, missing = sorted(class_weights.keys() - set(labels)), sorted(set(labels) - class_weights.keys())
        if more or missing:
            problem = f"{shown(more[0])} is no label" if more else f"{shown(missing[0])} has none"
            raise ConfigError(f"objective.class_weights needs a weight for each of {', '.join(labels)}; {problem}")
        weights = tuple(class_weights[label] for label in labels)
    return ClassLoss(tuple(labels), settings.smoothing, weights)


def _text_pair(record: DataRecord) -> tuple[str, str | None]:
    return record.text("text"), record.text("text_b") if "text_b" in record.values else None


def _joined(record: DataRecord) -> str:
    """The words of a record for the baseline; those of the second text count as others than those of the first."""
    text, second = _text_pair(record)
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


LONGEST = 30  # tokens of an answer, as in SQuAD's evaluation


@dataclass(frozen=True)
class Question:
    """A question, its context, and the answer with its first character there; None where there is no answer."""

    question: str
    context: str
    answer: str
    start: int | None
    record: DataRecord


class SpanTask(HeadTask):
    """Fields `question`, `context`, `answer` and `start`, the answer's first character in the context.  Both empty (or
    null) mean that the context has no answer; its target is then the first token of the row."""

    kind = "spans"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        sides = read_split(recipe.data, ("question", "context", "answer", "start"))
        self.train, self.held_out = (list(map(_question, side)) for side in sides)
        self.texts = [text for question in self.train for text in (question.question, question.context)]

    def data(self, module: Transformer, tokens: int) -> Prepared:
        loss = SpanLoss(self.objective.smoothing)
        train, held_out = (
            [row for i, question in enumerate(side) for row in windows(question, self.tokenizer, self.length, loss, i)]
            for side in (self.train, self.held_out)
        )
        judge = partial(_judged_spans, self.held_out, [_overlapping(question) for question in self.held_out])
        return epoch_rows(train), self.judged(held_out, judge, tokens)


def windows(question: Question, tokenizer: Tokenizer, length: int, loss: SpanLoss, index: int) -> list[LabelledExample]:
    """The question beside its context in rows of at most `length` tokens, which overlap by half of the context's share.

    A row that does not hold the whole answer has none: its target is its first token, twice.  Raises InputError for a
    question that leaves no room, and for an answer that is longer than a row holds.
    """
    text, context, location = question.question, question.context, question.record.location
    needed = len(tokenizer.encode(text)) + 2
    if needed + 2 > length:
        raise InputError(f"{location}: the question needs {needed} of run.length = {length} tokens; raise it")
    cut = tokenizer.encode_with_offsets(text, context, max_length=length, overlap=(length - needed) // 2)
    rows, answered = [], False
    for window in cut:
        span = _span(window, question)
        answered, ends = answered or span is not None, span or (0, 0)
        row = labelled(window, ends, loss, index, trained_at(len(window.ids), *ends))
        inside = np.array([of == 1 for of in window.sequence_ids])
        rows.append(replace(row, offsets=np.where(inside[:, None], np.array(window.offsets, dtype=np.int32), -1)))
    if question.start is not None and not answered:
        raise InputError(f"{location}: no row of run.length = {length} holds the whole answer; raise it")
    return rows


def _span(window: Encoded, question: Question) -> tuple[int, int] | None:
    """The first and the last token of the answer, None where the window does not hold all of it."""
    if question.start is None:
        return None
    stop = question.start + len(question.answer.rstrip())
    start = stop - len(question.answer.strip())
    tokens = [(i, *window.offsets[i]) for i, of in enumerate(window.sequence_ids) if of == 1]
    first = [i for i, begin, end in tokens if begin <= start < end]
    last = [i for i, begin, end in tokens if begin < stop <= end]
    return (first[0], last[-1]) if first and last else None


def _judged_spans(
    questions: Sequence[Question], guesses: Sequence[str], nats: float, count: int, rows: Outputs
) -> Score:
    """F1 and exact match of the best span over all windows of a question, beside the F1 of `guesses`."""
    may_be_empty = any(question.start is None for question in questions)
    rows_of_question = {number: list(of) for number, of in groupby(rows, key=lambda row: row[0].number)}
    answers = [best_span(of, questions[i].context, may_be_empty=may_be_empty) for i, of in rows_of_question.items()]
    right, guessed = [questions[i].answer for i in rows_of_question], [guesses[i] for i in rows_of_question]
    exact = float(np.mean(list(map(metrics.exact_match, answers, right))))
    empty = float(np.mean([questions[i].start is None for i in rows_of_question]))
    figures = {"F1": float(np.mean(list(map(metrics.answer_f1, answers, right)))), "exact match": exact}
    overlap = float(np.mean(list(map(metrics.answer_f1, guessed, right))))
    simple = {"majority (no answer)": empty, "word overlap": overlap}
    correct, most = round(exact * len(rows_of_question)), round(empty * len(rows_of_question))
    return Score(nats, count, correct, most, metrics=figures, baselines=simple)


def best_span(rows: Outputs, context: str, *, may_be_empty: bool) -> str:
    """The text of the span with the highest sum of scores in any window; empty where the first tokens' score is higher.

    As in SQuAD's reference, a question has no answer only if that holds in its least sure window.
    """
    best, score, nothing = "", -np.inf, np.inf
    for example, output in rows:
        assert example.offsets is not None
        begins, ends = output.numpy().T
        nothing = min(nothing, float(begins[0] + ends[0]))
        inside = np.flatnonzero(example.offsets[:, 0] >= 0)
        if not len(inside):  # a context of characters that the tokenizer drops
            continue
        both = begins[inside, None] + ends[None, inside]
        allowed = np.triu(np.tri(len(inside), k=LONGEST - 1))
        both = np.where(allowed > 0, both, -np.inf)
        i, j = np.unravel_index(both.argmax(), both.shape)
        if both[i, j] > score:
            score = float(both[i, j])
            best = context[example.offsets[inside[i], 0] : example.offsets[inside[j], 1]]
    return "" if may_be_empty and nothing > score else best


def _question(record: DataRecord) -> Question:
    start, context = record.integer("start"), record.text("context")
    answer = "" if record.values["answer"] is None else record.text("answer", empty=True)
    if (start is None) != (not answer.strip()):
        raise record.error("answer and start must both be given, or both be empty where there is no answer")
    if start is not None and (start < 0 or context[start : start + len(answer)] != answer):
        raise record.error(
            f"the context has {shown(context[max(0, start) : max(0, start) + len(answer)])} at character {start}, not "
            f"the answer {shown(answer)}"
        )
    return Question(record.text("question"), context, answer, start, record)


def _overlapping(one: Question) -> str:
    """The sentence of the context with the most words of the question, a guess without training."""
    question = set(metrics.words(one.question))
    sentences = [part for part in re.split("[.?!]", one.context) if part.strip()]
    return max(sentences, key=lambda part: len(question & set(metrics.words(part))), default="").strip()
