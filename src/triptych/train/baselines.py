"""Simple guesses that a trained model must beat: the commonest label, and word counts without order."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

WORDS = 20_000  # commonest words of the training texts that count


def words(text: str) -> list[str]:
    """Lower-case words; punctuation is left out."""
    return re.findall(r"\w+", text.lower())


def majority(right: NDArray[np.integer], rows: int) -> NDArray[np.int64]:
    """The commonest class of the training labels `right` [N], for each of `rows` rows.  Of several labels a row,
    `[N, C]` of 0 and 1, each column has its own."""
    if right.ndim == 2:
        return np.tile((right.mean(0) > 0.5).astype(np.int64), (rows, 1))
    return np.full(rows, np.bincount(right).argmax(), dtype=np.int64)


def bag_of_words(
    train: Sequence[str], right: NDArray[np.integer], texts: Sequence[str], classes: int
) -> NDArray[np.int64]:
    """The classes `[len(texts)]` that logistic regression on word counts predicts; `[len(texts), C]` of 0 and 1 where
    `right` is such a matrix.

    Its loss is the sum of the cross-entropies and half the sum of the squared weights (scikit-learn's C = 1), which
    torch's L-BFGS minimizes.
    """
    counted = Counter(word for text in train for word in words(text))
    index = {word: i for i, (word, _) in enumerate(counted.most_common(WORDS))}
    return _logistic(_counts(train, index), right, _counts(texts, index), classes)


def linear(
    train: NDArray[np.float32], right: NDArray[np.integer], rows: NDArray[np.float32], classes: int
) -> NDArray[np.int64]:
    """The classes that the same logistic regression predicts from vectors, `[N, F]` each; each of the F numbers is
    brought to mean 0 and standard deviation 1 over `train` first."""
    mean, deviation = train.mean(0), np.maximum(train.std(0), 1e-6)
    known, new = (torch.from_numpy((side - mean) / deviation) for side in (train, rows))
    return _logistic(known, right, new, classes)


def _logistic(known: Tensor, right: NDArray[np.integer], new: Tensor, classes: int) -> NDArray[np.int64]:
    """The classes of `new` [M, F] by a model fitted to `known` [N, F], both sparse or both dense."""
    weights = torch.zeros(known.shape[1] + 1, classes, requires_grad=True)  # the last row is the bias
    goal = torch.from_numpy(right.astype(np.int64))
    solver = torch.optim.LBFGS([weights], max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        scores = _scores(known, weights)
        if goal.dim() == 2:
            loss = F.binary_cross_entropy_with_logits(scores, goal.float(), reduction="sum")
        else:
            loss = F.cross_entropy(scores, goal, reduction="sum")
        loss = loss + weights[:-1].square().sum() / 2
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    scores = _scores(new, weights.detach())
    best: Tensor = (scores > 0).long() if goal.dim() == 2 else scores.argmax(-1)
    return best.numpy()


def commonest_tags(
    rows: Sequence[Sequence[str]], tags: Sequence[NDArray[np.integer]], held: Sequence[Sequence[str]]
) -> list[NDArray[np.int64]]:
    """For each word of `held` the tag it had most often in training; the commonest tag for a word never seen."""
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for row, of in zip(rows, tags, strict=True):
        for word, tag in zip(row, of.tolist(), strict=True):
            counts[word][tag] += 1
    total: Counter[int] = sum(counts.values(), Counter())
    best: Mapping[str, int] = {word: tag.most_common(1)[0][0] for word, tag in counts.items()}
    rest = total.most_common(1)[0][0]
    return [np.array([best.get(word, rest) for word in row], dtype=np.int64) for row in held]


def word_overlap(sources: Sequence[str], targets: Sequence[str]) -> NDArray[np.float32]:
    """Cosines `[N, M]` of the word counts of texts, each word weighted by log(texts / texts that have it)."""
    every = [Counter(words(text)) for text in (*sources, *targets)]
    having = Counter(word for counts in every for word in counts)
    index = {word: i for i, word in enumerate(having)}
    vectors = np.zeros((len(every), max(1, len(index))), dtype=np.float32)
    for row, counts in enumerate(every):
        for word, count in counts.items():
            vectors[row, index[word]] = count * np.log(len(every) / having[word])
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(vectors[: len(sources)] @ vectors[len(sources) :].T)


def _counts(texts: Sequence[str], index: Mapping[str, int]) -> Tensor:
    """Sparse word counts [texts, words]."""
    rows, columns, values = [], [], []
    for row, text in enumerate(texts):
        for word, count in Counter(words(text)).items():
            if word in index:
                rows.append(row)
                columns.append(index[word])
                values.append(float(count))
    places = torch.tensor([rows, columns], dtype=torch.long).reshape(2, -1)
    return torch.sparse_coo_tensor(
        places, torch.tensor(values), (len(texts), len(index)), check_invariants=True
    ).coalesce()


def _scores(counts: Tensor, weights: Tensor) -> Tensor:
    product: Tensor = counts @ weights[:-1]
    return product + weights[-1]
