"""Word alignments: the error rate of Och and Ney 2003, IBM Model 1 (Brown et al. 1993), and the diagonal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych_lectures.data.second_language import AlignedPair, Link


def error_rate(links: Sequence[frozenset[Link]], pairs: Sequence[AlignedPair]) -> float:
    """AER, `1 - (|A & S| + |A & P|) / (|A| + |S|)` over all sentences, of links A, sure ones S and possible ones P."""
    triples = list(zip(links, (pair.sure for pair in pairs), (pair.possible for pair in pairs), strict=True))
    right = sum(len(proposed & sure) + len(proposed & possible) for proposed, sure, possible in triples)
    return 1.0 - right / max(1, sum(len(proposed) + len(sure) for proposed, sure, _ in triples))


def diagonal(pair: AlignedPair) -> frozenset[Link]:
    """Each target word with the source word at the same share of the sentence."""
    ratio = len(pair.source) / len(pair.target)
    return frozenset((t, int((t + 0.5) * ratio)) for t in range(len(pair.target)))


class Model1:
    """Probabilities `t(target word | source word)` of a lexicon that is fitted to sentence pairs by expectation
    maximization, where each target word comes from any source word of its sentence, or from none, all alike."""

    def __init__(self, pairs: Sequence[AlignedPair], iterations: int = 10) -> None:
        self.sources = {word: i for i, word in enumerate(dict.fromkeys(w for p in pairs for w in ("", *p.source)))}
        self.targets = {word: i for i, word in enumerate(dict.fromkeys(w for p in pairs for w in p.target))}
        rows = [(self._sources(pair), np.array([self.targets[word] for word in pair.target])) for pair in pairs]
        self.lexicon = np.full((len(self.sources), len(self.targets)), 1.0 / len(self.targets))
        for _ in range(iterations):
            counts = np.zeros_like(self.lexicon)
            for source, target in rows:
                weights = self.lexicon[np.ix_(source, target)]
                np.add.at(counts, np.ix_(source, target), weights / weights.sum(0))
            self.lexicon = counts / counts.sum(1, keepdims=True)

    def links(self, pair: AlignedPair) -> frozenset[Link]:
        """Each target word with the source word that it most probably comes from, or with none."""
        known = [(t, self.targets[word]) for t, word in enumerate(pair.target) if word in self.targets]
        source = self._sources(pair)
        best = [(t, int(self.lexicon[source, word].argmax()) - 1) for t, word in known]
        return frozenset((t, s) for t, s in best if s >= 0)

    def _sources(self, pair: AlignedPair) -> NDArray[np.int64]:
        """The empty word and those of the source; an unknown word counts as the empty one."""
        return np.array([self.sources.get(word, 0) for word in ("", *pair.source)])
