"""Answers to questions, as the place of a span in its context (SQuAD: Rajpurkar et al. 2016, 2018)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from triptych.errors import InputError, shown
from triptych.nn import Transformer
from triptych.text import Encoded, Tokenizer
from triptych.train import metrics
from triptych.train.data import Data
from triptych.train.evaluate import HeldOut, Score
from triptych.train.labelled import LabelledExample, SpanLoss, labelled
from triptych.train.recipe import Recipe
from triptych.train.records import DataRecord
from triptych.train.task import HeadTask, JudgedRows, Outputs, epoch_rows, read_split, trained_at

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
        self.train, self.held = ([_question(record) for record in side] for side in sides)
        self.texts = [text for one in self.train for text in (one.question, one.context)]

    def data(self, module: Transformer, tokens: int) -> tuple[Data, HeldOut]:
        loss = SpanLoss(self.recipe.objective.smoothing)
        train, held = (
            [row for i, one in enumerate(side) for row in windows(one, self.tokenizer, self.length, loss, i)]
            for side in (self.train, self.held)
        )
        judge = partial(_judged, self.held, [_overlapping(one) for one in self.held])
        return epoch_rows(train), JudgedRows.of_rows(held, judge, tokens, self.device)


def windows(one: Question, tokenizer: Tokenizer, length: int, loss: SpanLoss, number: int) -> list[LabelledExample]:
    """The question beside its context in rows of at most `length` tokens, which overlap by half of the context's share.

    A row that does not hold the whole answer has none: its target is its first token, twice.  Raises InputError for a
    question that leaves no room, and for an answer that is longer than a row holds.
    """
    needed = len(tokenizer.encode(one.question)) + 2
    if needed + 2 > length:
        raise InputError(f"{one.record.where}: the question needs {needed} of run.length = {length} tokens; raise it")
    cut = tokenizer.encode_with_offsets(one.question, one.context, max_length=length, overlap=(length - needed) // 2)
    rows, answered = [], False
    for window in cut:
        span = _span(window, one)
        answered = answered or span is not None
        ends = span or (0, 0)
        row = labelled(window, ends, loss, number, trained_at(len(window.ids), *ends))
        inside = np.array([of == 1 for of in window.sequence_ids])
        rows.append(replace(row, offsets=np.where(inside[:, None], np.array(window.offsets, dtype=np.int32), -1)))
    if one.start is not None and not answered:
        raise InputError(f"{one.record.where}: no row of run.length = {length} holds the whole answer; raise it")
    return rows


def _span(window: Encoded, one: Question) -> tuple[int, int] | None:
    """The first and the last token of the answer, None where the window does not hold all of it."""
    if one.start is None:
        return None
    stop = one.start + len(one.answer.rstrip())
    start = stop - len(one.answer.strip())
    inside = [i for i, of in enumerate(window.sequence_ids) if of == 1 and window.offsets[i][1] > window.offsets[i][0]]
    first = [i for i in inside if window.offsets[i][0] <= start < window.offsets[i][1]]
    last = [i for i in inside if window.offsets[i][0] < stop <= window.offsets[i][1]]
    return (first[0], last[-1]) if first and last else None


def _judged(questions: Sequence[Question], guesses: Sequence[str], nats: float, count: int, rows: Outputs) -> Score:
    """F1 and exact match of the best span over all windows of a question, beside the F1 of `guesses`."""
    may_be_empty = any(one.start is None for one in questions)
    by_question: defaultdict[int, list[tuple[LabelledExample, Tensor]]] = defaultdict(list)
    for example, output in rows:
        by_question[example.number].append((example, output))
    f1, exact, guessed, empty = [], [], [], []
    for number, of in by_question.items():
        one = questions[number]
        answer = best_span(of, one.context, may_be_empty=may_be_empty)
        f1.append(metrics.answer_f1(answer, one.answer))
        exact.append(metrics.exact_match(answer, one.answer))
        guessed.append(metrics.answer_f1(guesses[number], one.answer))
        empty.append(float(one.start is None))
    figures = {"F1": float(np.mean(f1)), "exact match": float(np.mean(exact))}
    simple = {"majority (no answer)": float(np.mean(empty)), "word overlap": float(np.mean(guessed))}
    return Score(nats, count, round(sum(exact)), round(sum(empty)), metrics=figures, baselines=simple)


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
        allowed = np.triu(np.ones_like(both)) - np.triu(np.ones_like(both), LONGEST)
        both = np.where(allowed > 0, both, -np.inf)
        i, j = np.unravel_index(both.argmax(), both.shape)
        if both[i, j] > score:
            score = float(both[i, j])
            best = context[example.offsets[inside[i], 0] : example.offsets[inside[j], 1]]
    return "" if may_be_empty and nothing > score else best


def _question(record: DataRecord) -> Question:
    start, context = record.whole("start"), record.text("context")
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
    sentences = [part for part in one.context.replace("?", ".").replace("!", ".").split(".") if part.strip()]
    return max(sentences, key=lambda part: len(question & set(metrics.words(part))), default="").strip()
