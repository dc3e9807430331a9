"""What heads over labels say: of a whole row, of each token, of where an answer lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.errors import InputError
from triptych.generate.encode import batches
from triptych.nn import Transformer, flat
from triptych.spec import model as spec
from triptych.text import Encoded

Label = tuple[str, float]


@dataclass(frozen=True)
class Tag:
    """What is said of one token; `begin` and `end` are its place in the text."""

    token: str
    label: str
    probability: float
    begin: int
    end: int


@dataclass(frozen=True)
class Entity:
    """Neighbouring tokens of one thing: their text, its label, the mean of their probabilities, and its place."""

    text: str
    label: str
    probability: float
    begin: int
    end: int


@dataclass(frozen=True)
class Answer:
    """A piece of the context, and its place there."""

    text: str
    probability: float
    begin: int
    end: int


@torch.inference_mode()
def outputs(module: Transformer, rows: Sequence[Encoded | Tensor], *, batch_tokens: int = 4096) -> list[Tensor]:
    """What the head gives of each row, in fp32; rows of similar length run together.

    An encoder-decoder reads each in its decoder too, one place later; where the config names no token to begin with,
    after the row's own last one (mBART's language).
    """
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    lengths = [module.length(row) if isinstance(row, Tensor) else len(row.ids) for row in rows]
    for group in batches(lengths, batch_tokens):
        for i, given in zip(group, _forward(module, [rows[i] for i in group]), strict=True):
            found[i] = given.float()
    return found


def _forward(module: Transformer, either: Sequence[Encoded | Tensor]) -> Sequence[Tensor]:
    if pixels := [row for row in either if isinstance(row, Tensor)]:
        return list(module(*module.flat(pixels)))
    rows = [row for row in either if isinstance(row, Encoded)]
    device, ids = module.device, module.spec.ids
    tokens, where = flat([row.ids for row in rows], device)
    if module.decoder is None:
        types = torch.tensor([kind for row in rows for kind in row.types], device=device)
        given = module(tokens, where, token_types=types)
    else:
        for i, row in enumerate(rows):
            if isinstance(module.spec.head, spec.ClassHead) and row.ids[-1] not in ids.eos:
                raise InputError(
                    f"text {i} does not end with an end-of-text token, where this model looks for the label"
                )
        begin = [row.ids[-1] if ids.start is None else ids.start for row in rows]
        shifted, into = flat([[first, *row.ids[:-1]] for first, row in zip(begin, rows, strict=True)], device)
        given = module(shifted, into, source=(tokens, where))
    return list(given) if isinstance(module.spec.head, spec.ClassHead) else where.split(given)


def classify(
    module: Transformer, rows: Sequence[Encoded | Tensor], labels: Sequence[str], *, problem: str | None = None
) -> list[list[Label]]:
    """Every label of each row, of words or of pixels, best first.

    One of them holds (softmax), or, where there is one label or `problem` is `multi_label_classification`, each by
    itself (sigmoid); of a `regression` it is the score.  Raises InputError for a model without such a head.
    """
    if not isinstance(module.spec.head, spec.ClassHead):
        raise InputError(f"this {module.spec.family} model has no head over classes, so it cannot classify")
    found = []
    for told in outputs(module, rows):
        if problem == "multi_label_classification" or (len(labels) == 1 and problem != "regression"):
            told = told.sigmoid()
        elif problem != "regression":
            told = told.softmax(-1)
        found.append(sorted(zip(labels, told.tolist(), strict=True), key=lambda pair: -pair[1]))
    return found


def tag(module: Transformer, rows: Sequence[Encoded], texts: Sequence[str], labels: Sequence[str]) -> list[list[Tag]]:
    """The likeliest label of each token that is not special; ELECTRA's are `original` and `replaced`.

    Raises InputError for a model without a head over tokens.
    """
    head = module.spec.head
    if not isinstance(head, spec.TokenHead | spec.ReplacedHead):
        raise InputError(f"this {module.spec.family} model has no head over tokens, so it cannot tag them")
    found = []
    for row, text, logits in zip(rows, texts, outputs(module, rows), strict=True):
        if isinstance(head, spec.ReplacedHead):
            labels, logits = ("original", "replaced"), torch.cat((torch.zeros_like(logits), logits), dim=-1)
        best = logits.softmax(-1).max(-1)
        said = zip(row.places, row.text, best.indices.tolist(), best.values.tolist(), strict=True)
        found.append([Tag(text[a:b], labels[i], p, a, b) for (a, b), of, i, p in said if of is not None])
    return found


def entities(tags: Sequence[Tag], text: str) -> list[Entity]:
    """What the tags of a text name, without its tokens outside (`O`).

    Neighbours whose labels differ by no more than `B-` and `I-` (Ramshaw & Marcus 1995) are one thing, of which `B-`
    begins another.
    """
    groups: list[list[Tag]] = []
    for one in tags:
        if groups and _named(one) == _named(groups[-1][-1]) and not one.label.startswith("B-"):
            groups[-1].append(one)
        else:
            groups.append([one])
    found = []
    for group in groups:
        begin, end = group[0].begin, group[-1].end
        mean = sum(one.probability for one in group) / len(group)
        found.append(Entity(text[begin:end], _named(group[0]), mean, begin, end))
    return [entity for entity in found if entity.label != "O"]


def _named(one: Tag) -> str:
    """PER of `B-PER` and `I-PER`."""
    return one.label[2:] if one.label.startswith(("B-", "I-")) else one.label


def answer(
    module: Transformer, windows: Sequence[Encoded], context: str, *, longest: int = 15, top: int = 1
) -> list[Answer]:
    """The `top` likeliest pieces of `context`, at most `longest` tokens each, best first.

    `windows` are the question with each part of the context.  A piece that lies in several counts where it is
    likeliest; probabilities are over all pieces.  Raises InputError for a model without a head over spans.
    """
    if not isinstance(module.spec.head, spec.SpanHead):
        raise InputError(f"this {module.spec.family} model has no head over answers, so it cannot answer")
    scores: dict[tuple[int, int], float] = {}
    for window, logits in zip(windows, outputs(module, windows), strict=True):
        begins, ends = logits.unbind(-1)
        inside = [i for i, of in enumerate(window.text) if of == 1]
        for i in inside:
            for j in range(i, min(i + longest, inside[-1] + 1)):
                place, score = (window.places[i][0], window.places[j][1]), float(begins[i] + ends[j])
                scores[place] = max(score, scores.get(place, score))
    if not scores:
        raise InputError("the context has no tokens to answer with")
    probabilities = torch.tensor(list(scores.values())).softmax(-1).tolist()
    best = sorted(zip(scores, probabilities, strict=True), key=lambda pair: -pair[1])[:top]
    return [Answer(context[a:b], p, a, b) for (a, b), p in best]
