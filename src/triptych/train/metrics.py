"""Metrics of labels, entities, answers, retrieval, transcripts and translations, and baselines for a model."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import InputError
from .objectives import Integers

EntitySpan = tuple[str, int, int]
#: Metrics that are no shares, with the decimals that are shown: sacrebleu's from 0 to 100, and differences in nats.
DECIMALS = {"BLEU": 1, "chrF": 1, "margin": 3}


def accuracy(predicted: Integers, right: Integers) -> float:
    """The share of equal classes, both `[N]`; of several labels a row, `[N, C]`, the share of rows right in all."""
    equal = predicted == right
    return float((equal if equal.ndim == 1 else equal.all(-1)).mean())


def macro_f1(predicted: Integers, right: Integers) -> float:
    """The mean F1 of the classes that occur in `predicted` or `right`, `[N]` each; each class counts the same.

    Of several labels a row, `[N, C]` of 0 and 1, it is the mean over all C columns; one that never occurs has F1 0.
    """
    if predicted.ndim == 2:
        return float(np.mean(list(map(f1, predicted.T == 1, right.T == 1))))
    return float(np.mean([f1(predicted == c, right == c) for c in np.union1d(predicted, right)]))


def f1(predicted: NDArray[np.bool_], right: NDArray[np.bool_]) -> float:
    """2 TP / (2 TP + FP + FN), which is 0 where there is nothing to find and nothing was found."""
    return _f1(int((predicted & right).sum()), int(predicted.sum() + right.sum()))


def _f1(both: int, either: int) -> float:
    return 2 * both / either if either else 0.0


def entities(tags: Sequence[str]) -> set[EntitySpan]:
    """Type, first word and the word after the last of each entity in BIO tags (IOB2, as seqeval's strict mode).

    An entity is one `B-X` and the `I-X` after it; an `I-X` that continues none is no entity.
    """
    spans: set[EntitySpan] = set()
    start: int | None = None
    for i, tag in enumerate([*tags, "O"]):
        if start is not None and tag != f"I-{tags[start][2:]}":
            spans.add((tags[start][2:], start, i))
            start = None
        if tag.startswith("B-"):
            start = i
    return spans


def entity_f1(predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> float:
    """Micro F1 of the entities of all rows: one counts where its type, its first and its last word are right."""
    sides = [{(row, *one) for row, tags in enumerate(side) for one in entities(tags)} for side in (predicted, right)]
    return _f1(len(sides[0] & sides[1]), sum(map(len, sides)))


def normalized_answer(text: str) -> str:
    """An answer as SQuAD compares it: lower case, without ASCII punctuation and the articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", _bare(text)).split())


def _bare(text: str) -> str:
    """The text in lower case, without ASCII punctuation."""
    return text.lower().translate(str.maketrans("", "", string.punctuation))


def exact_match(predicted: str, right: str) -> float:
    """1 where both answers are the same text once normalized (Rajpurkar et al. 2016)."""
    return float(normalized_answer(predicted) == normalized_answer(right))


def answer_f1(predicted: str, right: str) -> float:
    """F1 of the words that two answers share once normalized; with an empty one, 1 if both are empty."""
    a, b = normalized_answer(predicted).split(), normalized_answer(right).split()
    return _f1((Counter(a) & Counter(b)).total(), len(a) + len(b)) if a or b else 1.0


def recall_at(scores: NDArray[np.floating], k: int) -> float:
    """The share of rows of `scores` [N, M] whose own column, the one of the row's number, is among the `k` best.

    Columns that score the same as the right one count as better, and so do those where either is NaN, so that equal
    vectors are no success, and broken ones neither.
    """
    right = np.take_along_axis(scores, np.arange(len(scores))[:, None], axis=1)
    return float(((~(scores < right)).sum(1) <= k).mean())


def word_error_rate(written: Sequence[str], right: Sequence[str]) -> float:
    """The words replaced, left out or added, by the fewest such changes, over the words of all texts in `right`.

    Words are compared in lower case and without ASCII punctuation; the rate may exceed 1.  Raises InputError where
    `right` has no word.
    """
    pairs = [(spoken_words(a), spoken_words(b)) for a, b in zip(written, right, strict=True)]
    count = sum(len(b) for _, b in pairs)
    if not count:
        raise InputError("a word error rate needs transcripts with words")
    return sum(distance(a, b) for a, b in pairs) / count


def distance(a: Sequence[str], b: Sequence[str]) -> int:
    """The fewest items (letters, words) to insert, delete or replace that turn `a` into `b` (Levenshtein 1966),
    computed one row of the table at a time."""
    number = {item: i for i, item in enumerate({*a, *b})}
    codes = np.array([number[item] for item in b], dtype=np.int64)
    row = columns = np.arange(len(b) + 1)
    for i, item in enumerate(a, 1):
        best = np.concatenate([[i], np.minimum(row[:-1] + (codes != number[item]), row[1:] + 1)])
        row = np.minimum.accumulate(best - columns) + columns  # insertions along the row
    return int(row[-1])


def spoken_words(text: str) -> list[str]:
    """The words of a transcript in lower case, without ASCII punctuation."""
    return _bare(text).split()


def translation(written: Sequence[str], right: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU and chrF in [0, 100], by sacrebleu with its defaults.  Raises InputError where it is missing."""
    try:
        import sacrebleu
    except ImportError:
        raise InputError("BLEU and chrF need sacrebleu; run: pip install sacrebleu") from None
    texts, references = list(written), [list(right)]
    return {
        "BLEU": float(sacrebleu.corpus_bleu(texts, references).score),
        "chrF": float(sacrebleu.corpus_chrf(texts, references).score),
    }


WORDS = 20_000  # commonest words of the training texts that count


def words(text: str) -> list[str]:
    """Lower-case words; punctuation is left out."""
    return re.findall(r"\w+", text.lower())


def majority(right: Integers, rows: int) -> Integers:
    """The commonest class of the training labels `right` [N], for each of `rows` rows.  Of several labels a row,
    `[N, C]` of 0 and 1, each column has its own."""
    if right.ndim == 2:
        return np.tile((right.mean(0) > 0.5).astype(np.int64), (rows, 1))
    return np.full(rows, np.bincount(right).argmax(), dtype=np.int64)


def bag_of_words(train: Sequence[str], right: Integers, texts: Sequence[str], classes: int) -> Integers:
    """The classes `[len(texts)]` that logistic regression on word counts predicts; `[len(texts), C]` of 0 and 1 where
    `right` is such a matrix.

    Its loss is the sum of the cross-entropies and half the sum of the squared weights (scikit-learn's C = 1), which
    torch's L-BFGS minimizes.
    """
    commonest = Counter(word for text in train for word in words(text)).most_common(WORDS)
    index = {word: i for i, (word, _) in enumerate(commonest)}
    return _logistic(_counts(train, index), right, _counts(texts, index), classes)


def linear(train: NDArray[np.float32], right: Integers, rows: NDArray[np.float32], classes: int) -> Integers:
    """The classes that the same logistic regression predicts from vectors, `[N, F]` each; each of the F numbers is
    brought to mean 0 and standard deviation 1 over `train` first."""
    mean, deviation = train.mean(0), np.maximum(train.std(0), 1e-6)
    known, new = (torch.from_numpy((side - mean) / deviation) for side in (train, rows))
    return _logistic(known, right, new, classes)


def _logistic(known: Tensor, right: Integers, new: Tensor, classes: int) -> Integers:
    """The classes of `new` [M, F] by a model fitted to `known` [N, F], both sparse or both dense."""
    weights = torch.zeros(known.shape[1] + 1, classes, requires_grad=True)  # the last row is the bias
    goal = torch.from_numpy(right.astype(np.int64))
    solver = torch.optim.LBFGS([weights], max_iter=100, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        several = goal.dim() == 2
        cross_entropy = F.binary_cross_entropy_with_logits if several else F.cross_entropy
        loss = cross_entropy(_scores(known, weights), goal.float() if several else goal, reduction="sum")
        loss = loss + weights[:-1].square().sum() / 2
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    scores = _scores(new, weights.detach())
    return ((scores > 0).long() if goal.dim() == 2 else scores.argmax(-1)).numpy()


def commonest_tags(
    rows: Sequence[Sequence[str]], tags: Sequence[Integers], held_out: Sequence[Sequence[str]]
) -> list[Integers]:
    """For each word of `held_out` the tag it had most often in training; the commonest tag for a word never seen."""
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for word, tag in zip(chain(*rows), np.concatenate(tags).tolist(), strict=True):
        counts[word][tag] += 1
    rest = sum(counts.values(), Counter[int]())
    return [np.array([counts.get(word, rest).most_common(1)[0][0] for word in row], dtype=np.int64) for row in held_out]


def word_overlap(sources: Sequence[str], targets: Sequence[str]) -> NDArray[np.float32]:
    """Cosines `[N, M]` of the word counts of texts, each word weighted by log(texts / texts that have it)."""
    texts = [*sources, *targets]
    index = {word: i for i, word in enumerate(dict.fromkeys(word for text in texts for word in words(text)))}
    counts = _counts(texts, index).to_dense().numpy()
    vectors = (counts * np.log(len(texts) / (counts > 0).sum(0))).astype(np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(vectors[: len(sources)] @ vectors[len(sources) :].T)


def _counts(texts: Sequence[str], index: Mapping[str, int]) -> Tensor:
    """Sparse word counts [texts, words]."""
    places = [(row, index[word]) for row, text in enumerate(texts) for word in words(text) if word in index]
    indices = torch.tensor(places, dtype=torch.long).reshape(-1, 2).T
    size = len(texts), len(index)
    return torch.sparse_coo_tensor(indices, torch.ones(len(places)), size, check_invariants=True).coalesce()


def _scores(counts: Tensor, weights: Tensor) -> Tensor:
    product: Tensor = counts @ weights[:-1]
    return product + weights[-1]
