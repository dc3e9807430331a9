"""Extractive question answering: the likeliest pieces of a context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.arguments import integer
from triptych.errors import InputError
from triptych.spec import SpanHeadSpec
from triptych.text import Encoded
from .labels import head_outputs
from .model_inputs import TaskModel


@dataclass(frozen=True)
class Answer:
    """A piece of the context: its `text`, which is `context[begin:end]`.  "No answer" is the empty piece at 0.

    score        the probability that the answer begins here times that it ends here, in its window; there the tokens
                 of the context and the first special token, which stands for "no answer", share the probability 1.
    probability  over all pieces of the context, "no answer" not among them (0 for that).
    no_answer    the score of "no answer" to the same question; None for a model whose rows begin with no special token.
    """

    text: str
    probability: float
    begin: int
    end: int
    score: float
    no_answer: float | None


def answer(
    model: TaskModel, question: str, context: str, *, longest: int = 15, top: int = 1, no_answer: bool = False,
    window: int | None = None, overlap: int | None = None,
) -> list[Answer]:  # fmt: skip
    """The `top` pieces of `context` of at most `longest` tokens with the highest score, best first.

    The score of a piece is the probability that the answer starts at its first token times the probability that it
    ends at its last; pieces begin and end with whole words.  A context longer than `window` tokens is read in windows
    that share `overlap` tokens; a piece that lies in several counts where its score is highest.  With `no_answer` the
    empty answer competes (SQuAD 2.0, Rajpurkar et al. 2018), by the lowest score that any window gives it.  Scores,
    windows and words are those of the question-answering pipeline of transformers 4.

    Raises InputError for a model without a head over spans, an empty question or context, a question that leaves no
    room for the context, and numbers below 1.
    """
    windows = model.inputs.windows(question, context, window, overlap)
    if not isinstance(model.spec.head, SpanHeadSpec):
        raise InputError(
            f"this {model.spec.family} model has no head over answers, so it cannot answer; an extractive checkpoint "
            "(…ForQuestionAnswering) such as hub:deepset/roberta-base-squad2 does"
        )
    integer("longest", longest, 1)
    integer("top", top, 1)
    scores: dict[tuple[int, int], float] = {}
    sums: dict[tuple[int, int], float] = {}
    empty = math.inf
    for row, logits in zip(windows, head_outputs(model.module, windows), strict=True):
        inside = [i for i, of in enumerate(row.sequence_ids) if of == 1]
        if not inside:
            continue
        special = row.sequence_ids[0] is None
        begins, ends = (_probabilities(one, inside, special) for one in logits.unbind(-1))
        if special:
            empty = min(empty, begins[0] * ends[0])
        raw_begins, raw_ends = (one.tolist() for one in logits.unbind(-1))
        words = _words(row, inside)
        for i in inside:
            for j in range(i, min(i + longest, inside[-1] + 1)):
                place = words[i][0], words[j][1]
                scores[place] = max(begins[i] * ends[j], scores.get(place, 0.0))
                sums[place] = max(raw_begins[i] + raw_ends[j], sums.get(place, -math.inf))
    if not scores:
        raise InputError("the context has no tokens to answer with")
    probabilities = dict(
        zip(sums, torch.tensor(list(sums.values()), dtype=torch.float32).softmax(-1).tolist(), strict=True)
    )
    best = sorted(scores, key=lambda place: (-scores[place], -sums[place]))[:top]
    lowest = empty if empty < math.inf else None
    answers = [Answer(context[a:b], probabilities[a, b], a, b, scores[a, b], lowest) for a, b in best]
    if no_answer and lowest is not None:
        answers = sorted([*answers, Answer("", 0.0, 0, 0, lowest, lowest)], key=lambda one: -one.score)[:top]
    return answers


def _probabilities(logits: Tensor, inside: Sequence[int], special: bool) -> list[float]:
    """[T]: softmax over the tokens of the context and, where the row begins with one, the first special token."""
    masked = torch.full_like(logits, -torch.inf)
    places = [*([0] if special else []), *inside]
    masked[places] = logits[places]
    return list(masked.softmax(-1).tolist())


def _words(window: Encoded, inside: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each token of the context the characters of its word, as far as the window has it; its own where the
    tokenizer knows no words."""
    words = window.words or [None] * len(window.ids)
    own = {i: -1 - i if (word := words[i]) is None else word for i in inside}  # a token without a word is its own
    whole: dict[int, tuple[int, int]] = {}
    for i, word in own.items():
        begin, end = window.offsets[i]
        first, last = whole.get(word, (begin, end))
        whole[word] = min(first, begin), max(last, end)
    return {i: whole[word] for i, word in own.items()}
