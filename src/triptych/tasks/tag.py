"""Labels of single tokens, and the entities that neighbouring tokens name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.errors import InputError
from triptych.nn import Transformer
from triptych.spec import ReplacedHeadSpec, TokenHeadSpec
from triptych.tasks.batching import head_outputs
from triptych.text import Encoded


@dataclass(frozen=True)
class Tag:
    """The likeliest label of one token; `begin` and `end` are its characters in the text."""

    token: str
    label: str
    probability: float
    begin: int
    end: int


@dataclass(frozen=True)
class Entity:
    """Neighbouring tokens of one entity: their text, its label, the mean of their probabilities, its characters."""

    text: str
    label: str
    probability: float
    begin: int
    end: int


def tag(module: Transformer, rows: Sequence[Encoded], texts: Sequence[str], labels: Sequence[str]) -> list[list[Tag]]:
    """The likeliest label of each token that is not special; ELECTRA's are `original` and `replaced`.

    Raises InputError for a model without a head over tokens.
    """
    head = module.spec.head
    if not isinstance(head, TokenHeadSpec | ReplacedHeadSpec):
        raise InputError(f"this {module.spec.family} model has no head over tokens, so it cannot tag them")
    tagged = []
    for row, text, logits in zip(rows, texts, head_outputs(module, rows), strict=True):
        if isinstance(head, ReplacedHeadSpec):
            labels, logits = ("original", "replaced"), torch.cat((torch.zeros_like(logits), logits), dim=-1)
        best = logits.softmax(-1).max(-1)
        tokens = zip(row.offsets, row.sequence_ids, best.indices.tolist(), best.values.tolist(), strict=True)
        tagged.append([Tag(text[a:b], labels[i], p, a, b) for (a, b), of, i, p in tokens if of is not None])
    return tagged


def entities(tags: Sequence[Tag], text: str) -> list[Entity]:
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
    every = []
    for group in groups:
        begin, end = group[0].begin, group[-1].end
        mean = sum(one.probability for one in group) / len(group)
        every.append(Entity(text[begin:end], _name(group[0]), mean, begin, end))
    return [entity for entity in every if entity.label != "O"]


def _name(one: Tag) -> str:
    """PER of `B-PER` and `I-PER`."""
    return one.label[2:] if one.label.startswith(("B-", "I-")) else one.label
