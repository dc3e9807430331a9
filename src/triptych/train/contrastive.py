"""Pairs of texts that belong together, trained by contrast with the other texts of the batch.

The loss is the multiple negatives ranking loss of sentence-transformers (Henderson et al. 2017; van den Oord et al.
2018): for each text the cross-entropy of its own partner among all partners and hard negatives of the batch, scored by
cosine times a scale.  Micro-batches have negatives of their own only, so that `run.accumulate` changes this loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from triptych import nn
from triptych.attention import Rows
from triptych.errors import ConfigError, InputError
from triptych.nn import Transformer
from triptych.ops import RowNoise
from triptych.text import Encoded, Tokenizer
from . import metrics
from .data import groups
from .evaluate import HeldOut, Score
from .objectives import Device, Example, TrainingBatch, VectorGathering, collate, exact, joined
from .recipe import Recipe
from .records import DataRecord
from .task import HeadTask, Prepared, epoch_rows, read_split, trained_at


@dataclass(frozen=True, eq=False, kw_only=True)
class TextPair(Example):
    """A text, which is the row to show, its partner and perhaps a hard negative, all `sides` with token types;
    `number` is that of the record."""

    sides: tuple[Encoded, ...]
    scale: float
    number: int = 0

    @staticmethod
    def of(sides: Sequence[Encoded], scale: float, number: int = 0) -> TextPair:
        ids = np.asarray(sides[0].ids, dtype=np.int32)
        return TextPair(ids, ids, trained_at(len(ids), 0), sides=tuple(sides), scale=scale, number=number)

    def collated(self, examples: Sequence[Any], device: Device) -> ContrastiveBatch:
        texts = [row for side in zip(*(one.sides for one in examples), strict=True) for row in side]
        numbers = torch.arange(len(examples), device=device)
        return ContrastiveBatch(
            ids=joined([row.ids for row in texts], device),
            rows=Rows(tuple(len(row.ids) for row in texts)),
            at=numbers,
            targets=numbers,
            examples=tuple(examples),
            types=joined([row.token_types for row in texts], device),
        )

    def target_names(self, tokenizer: Tokenizer) -> list[str]:
        partner = "near: " + "".join(tokenizer.tokens(self.sides[1].ids[1:-1]))
        return [partner, *[""] * (len(self.ids) - 1)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ContrastiveBatch(TrainingBatch):
    """B texts, then their B partners, then B hard negatives where there are some, as rows of one flat batch."""

    examples: tuple[TextPair, ...]
    types: Tensor
    ranks: VectorGathering | None = None  # of the processes that have the other texts of the batch

    @property
    def numbers_of_rows(self) -> Sequence[int]:
        return [side << 40 | number for side in range(len(self.rows) // self.trained) for number in self.numbers]

    def across(self, ranks: VectorGathering) -> ContrastiveBatch:
        return replace(self, ranks=ranks)

    @property
    def scale(self) -> float:
        return self.examples[0].scale

    def vectors(self, module: Transformer, random: RowNoise | None = None) -> Tensor:
        """[rows, D], of length 1."""
        batch = nn.Batch(inputs=self.ids, rows=self.rows, token_types=self.types, random=random)
        return F.normalize(exact(module.unembed(module(batch), self.rows, random=random)), dim=-1)

    def nats(self, module: Transformer, max_logits: int, random: RowNoise | None) -> Tensor:
        vectors = self.vectors(module, random)
        if self.ranks is None:
            return ranking_loss(vectors, self.trained, self.scale)
        own, count = vectors[: self.trained], self.trained
        others = [self.ranks.gathered(vectors[i : i + count]) for i in range(count, len(vectors), count)]
        return partner_loss(own, torch.cat(others), self.scale, self.ranks.rows_before(count))


def ranking_loss(vectors: Tensor, count: int, scale: float) -> Tensor:
    """The sum over the first `count` vectors of -log softmax(scale * cosines with all others) at their own partner.

    vectors [(1 + P) * count, D] of length 1: texts, their partners, then hard negatives.
    """
    return partner_loss(vectors[:count], vectors[count:], scale)


def partner_loss(texts: Tensor, others: Tensor, scale: float, first: int = 0) -> Tensor:
    """The same for texts [T, D] whose partners are `others` [O, D] from the row `first` on."""
    scores = scale * texts @ others.T
    return F.cross_entropy(scores, torch.arange(first, first + len(texts), device=texts.device), reduction="sum")


class ContrastiveTask(HeadTask):
    """Fields `text` and `text_b`, which belong together, and `negative`, a text that is near and does not."""

    kind = "contrastive"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if recipe.run.rows // recipe.run.accumulate < 2:
            raise ConfigError("objective contrastive needs at least 2 rows in each micro-batch; raise run.rows")
        self.train, self.held_out = read_split(recipe.data, ("text", "text_b"), ("negative",))
        self.fields = ("text", "text_b", *(("negative",) if "negative" in self.train[0].values else ()))
        for record in (*self.train, *self.held_out):
            if missing := [name for name in self.fields if name not in record.values]:
                raise record.error(f"there is no field {missing[0]}, which other records have")
        self.texts = [record.text(name) for record in self.train for name in self.fields]

    def data(self, module: Transformer, tokens: int) -> Prepared:
        def pair(number: int, record: DataRecord) -> TextPair | None:
            sides = [self.fitted(record, record.text(name)) for name in self.fields]
            rows = [side for side in sides if side is not None]
            return TextPair.of(rows, self.objective.scale, number) if len(rows) == len(sides) else None

        data, held_out = (epoch_rows(map(pair, count(), side)) for side in (self.train, self.held_out))
        if len(data.examples) < self.recipe.run.rows:
            raise InputError(
                f"{len(data.examples)} pairs are fewer than run.rows = {self.recipe.run.rows}, so that a batch would "
                "hold a pair twice; lower run.rows"
            )
        sides = ([record.text(field) for record in self.held_out] for field in ("text", "text_b"))
        overlap = metrics.word_overlap(*sides)
        batches = groups(held_out.examples, max(2, self.recipe.run.rows))
        if len(batches) > 1 and len(batches[-1]) == 1:  # with no other text to be told from, its loss would be 0
            batches[-2:] = [[*batches[-2], *batches[-1]]]
        collated = tuple(collate(batch, self.device) for batch in batches)
        return data, HeldOutTexts(collated, overlap=overlap)


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldOutTexts(HeldOut):
    """Held-out pairs, each text of which is searched for its partner among all those of the same evaluation.

    `overlap` [N, N] are the scores of the same search by the words that texts share.
    """

    overlap: NDArray[np.floating[Any]]

    def measured(self, module: Transformer, batches: Iterable[TrainingBatch]) -> Score:
        nats, texts, partners, numbers = 0.0, list[Tensor](), list[Tensor](), list[int]()
        for batch in batches:
            assert isinstance(batch, ContrastiveBatch)
            vectors, count = batch.vectors(module), batch.trained
            nats += float(ranking_loss(vectors, count, batch.scale))
            texts.append(vectors[:count])
            partners.append(vectors[count : 2 * count])
            numbers += [one.number for one in batch.examples]
        scores = (torch.cat(texts) @ torch.cat(partners).T).double().cpu().numpy()
        figures = {f"recall@{k}": metrics.recall_at(scores, k) for k in (1, 10)}
        words = self.overlap[np.ix_(numbers, numbers)]
        guesses = {"chance": 1 / len(scores), "word overlap": metrics.recall_at(words, 1)}
        right = round(figures["recall@1"] * len(scores))
        return Score(nats, len(scores), right, 1, metrics=figures, baselines=guesses)
