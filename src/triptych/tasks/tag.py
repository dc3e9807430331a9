"""Labels of single tokens, and the entities that neighbouring tokens name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.errors import InputError, shown
from triptych.spec import ReplacedHeadSpec, TokenHeadSpec
from triptych.text import Encoded, Tokenizer
from .labels import head_outputs
from .model_inputs import TaskModel


@dataclass(frozen=True)
class Tag:
    """The likeliest label of one token and its probability; the token is `text[begin:end]` of the input."""

    token: str
    label: str
    probability: float
    begin: int
    end: int


@dataclass(frozen=True)
class Entity:
    """Neighbouring tokens of one entity: their text, the input's from `begin` to `end`, the label, and the mean
    of their probabilities."""

    text: str
    label: str
    probability: float
    begin: int
    end: int


def tag(model: TaskModel, texts: Sequence[str]) -> list[list[Tag]]:
    """The likeliest label of each token of each text that is not special, or whether it was replaced (ELECTRA).

    Raises InputError for a model without a head over tokens.
    """
    rows, labels, head = model.inputs.placed(texts), model.labels, model.spec.head
    if not isinstance(head, TokenHeadSpec | ReplacedHeadSpec):
        raise InputError(f"this {model.spec.family} model has no head over tokens, so it cannot tag them")
    tagged = []
    for row, text, logits in zip(rows, texts, head_outputs(model.module, rows), strict=True):
        if isinstance(head, ReplacedHeadSpec):
            labels, logits = ["original", "replaced"], torch.cat((torch.zeros_like(logits), logits), dim=-1)
        best = logits.softmax(-1).max(-1)
        tokens = zip(row.offsets, row.sequence_ids, best.indices.tolist(), best.values.tolist(), strict=True)
        tagged.append([Tag(text[a:b], labels[i], p, a, b) for (a, b), of, i, p in tokens if of is not None])
    return tagged


Strategy = Literal["simple", "first", "average", "max"]


def entities(
    model: TaskModel, texts: Sequence[str], *, strategy: Strategy = "simple", window: int | None = None,
    overlap: int | None = None,
) -> list[list[Entity]]:  # fmt: skip
    """The entities in each text: neighbouring tokens of one label, where `B-` begins a new one and `O` is none.

    `strategy` is that of transformers' pipeline: "simple" labels each token; "first", "average" and "max" give each
    word one label: that of its first token, of the mean of its tokens' probabilities, or of its surest token.

    A text longer than `window` tokens is read in windows that share `overlap` tokens.  Of entities that overlap in the
    text the longest one stays, and of equally long ones that with the highest probability.

    Raises InputError for a model without a head over named labels, and for another strategy.
    """
    if strategy not in get_args(Strategy):
        raise InputError(f"strategy={shown(strategy)} must be one of {', '.join(get_args(Strategy))}")
    if not isinstance(model.spec.head, TokenHeadSpec):
        raise InputError(
            f"this {model.spec.family} model has no head over tokens with named labels; a checkpoint that tags tokens "
            "(…ForTokenClassification) such as hub:dslim/bert-base-NER does"
        )
    if isinstance(texts, str):
        raise InputError("give a list of texts: [text]")
    rows = [model.inputs.text_windows(text, window, overlap) for text in texts]
    outputs = iter(head_outputs(model.module, [row for parts in rows for row in parts]))
    every = []
    for parts, text in zip(rows, texts, strict=True):
        named: list[Entity] = []
        for row in parts:
            probabilities = next(outputs).softmax(-1)
            words = _words(row, text, model.inputs.words) if strategy != "simple" else [[i] for i in _own_tokens(row)]
            named += joined([_word_tag(row, text, probabilities, word, model.labels, strategy) for word in words], text)
        every.append(_without_overlaps(named) if len(parts) > 1 else named)
    return every


def _own_tokens(row: Encoded) -> list[int]:
    return [i for i, of in enumerate(row.sequence_ids) if of is not None]


def _words(row: Encoded, text: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each word.  A vocabulary that marks the later tokens of a word tells them; with another a token
    goes on a word where no space is before it.  An unknown token is a word of its own."""
    marks = bool(getattr(tokenizer.backend.model, "continuing_subword_prefix", None))
    words: list[list[int]] = []
    for i in _own_tokens(row):
        begin, end = row.offsets[i]
        if marks:
            goes_on = len(tokenizer.backend.id_to_token(row.ids[i]) or "") != end - begin
        else:
            goes_on = begin > 0 and " " not in text[begin - 1 : begin + 1]
        if words and goes_on and row.ids[i] != tokenizer.unk_id:
            words[-1].append(i)
        else:
            words.append([i])
    return words


def _word_tag(
    row: Encoded, text: str, probabilities: Tensor, word: Sequence[int], labels: Sequence[str], strategy: Strategy
) -> Tag:
    """The label of one word by `strategy`; `probabilities` are [T, C]."""
    own = probabilities[list(word)]
    surest = int(own.max(-1).values.argmax()) if strategy == "max" else 0
    scores = own.mean(0) if strategy == "average" else own[surest]
    best, (begin, end) = int(scores.argmax()), (row.offsets[word[0]][0], row.offsets[word[-1]][1])
    return Tag(text[begin:end], labels[best], float(scores[best]), begin, end)


def _without_overlaps(named: Sequence[Entity]) -> list[Entity]:
    """Of entities that overlap, from several windows, one each."""
    disjoint: list[Entity] = []
    for one in sorted(named, key=lambda entity: entity.begin):
        last = disjoint.pop() if disjoint and one.begin < disjoint[-1].end else one
        disjoint.append(max(last, one, key=lambda entity: (entity.end - entity.begin, entity.probability)))
    return disjoint


def joined(tags: Sequence[Tag], text: str) -> list[Entity]:
    """The entities in a tagged text; tokens labelled `O` (outside) belong to none.

    Neighbours whose labels differ by no more than `B-` and `I-` (Ramshaw & Marcus 1995) are one entity; `B-` begins
    another.
    """
    groups: list[list[Tag]] = []
    for one in tags:
        if groups and _name(one) == _name(groups[-1][-1]) and not one.label.startswith("B-"):
            groups[-1].append(one)
        else:
            groups.append([one])
    named = []
    for group in groups:
        begin, end, label = group[0].begin, group[-1].end, _name(group[0])
        mean = sum(one.probability for one in group) / len(group)
        if label != "O":
            named.append(Entity(text[begin:end], label, mean, begin, end))
    return named


def _name(one: Tag) -> str:
    """PER of `B-PER` and `I-PER`."""
    return one.label[2:] if one.label.startswith(("B-", "I-")) else one.label
