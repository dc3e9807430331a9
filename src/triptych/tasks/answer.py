"""Extractive question answering: the likeliest pieces of a context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.errors import InputError
from triptych.nn import Transformer
from triptych.spec import SpanHeadSpec
from triptych.tasks.batching import head_outputs
from triptych.text import Encoded


@dataclass(frozen=True)
class Answer:
    """A piece of the context; `begin` and `end` are its characters there."""

    text: str
    probability: float
    begin: int
    end: int


def answer(
    module: Transformer, windows: Sequence[Encoded], context: str, *, longest: int = 15, top: int = 1
) -> list[Answer]:
    """The `top` likeliest pieces of `context`, at most `longest` tokens each, best first.

    `windows` hold the question beside each part of the context.  A piece that lies in several windows counts where its
    score is highest; probabilities are over all pieces.  Raises InputError for a model without a head over spans.
    """
    if not isinstance(module.spec.head, SpanHeadSpec):
        raise InputError(f"this {module.spec.family} model has no head over answers, so it cannot answer")
    scores: dict[tuple[int, int], float] = {}
    for window, logits in zip(windows, head_outputs(module, windows), strict=True):
        begins, ends = logits.unbind(-1)
        inside = [i for i, of in enumerate(window.sequence_ids) if of == 1]
        for i in inside:
            for j in range(i, min(i + longest, inside[-1] + 1)):
                span, score = (window.offsets[i][0], window.offsets[j][1]), float(begins[i] + ends[j])
                scores[span] = max(score, scores.get(span, score))
    if not scores:
        raise InputError("the context has no tokens to answer with")
    probabilities = torch.tensor(list(scores.values())).softmax(-1).tolist()
    best = sorted(zip(scores, probabilities, strict=True), key=lambda pair: -pair[1])[:top]
    return [Answer(context[a:b], p, a, b) for (a, b), p in best]
