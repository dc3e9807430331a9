"""How well a model finds the modern line of a First Folio line: recall@1 and recall@10 over held-out plays.

    python bench/retrieval.py MODEL [--pairs 500] [--words N] [--seed 0]

Queries are lines of the First Folio of plays that nothing is trained on, candidates the modern lines of the same
pairs (`triptych.text.shakespeare`), or pieces of N words of these lines, which share fewer words; a line counts as
found where the modern line of its own pair, or one with the same text, is among the nearest k by cosine.  Beside it
stand two controls: the same vectors with the pairs shuffled, which must be at chance (k over the number of
candidates), and words in common (the fraction of a Folio line's words that a modern line has), which needs no model.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import triptych
from triptych.text import shakespeare
from triptych.train.sources import pieces

CUTS = (1, 10)


def held_out_pairs(count: int, seed: int, words: int | None = None) -> tuple[list[str], list[str]]:
    """`count` lines of held-out plays in both spellings, chosen by `seed`, without those of fewer than four words; with
    `words`, different pieces of this many words."""
    _, pairs = shakespeare.parallel_split()
    lines = [(pair.folio, pair.modern) for pair in pairs]
    if words is not None:
        lines = list(dict.fromkeys(pieces(lines, words, words)))
    least = 4 if words is None else words
    lines = [sides for sides in lines if min(len(side.split()) for side in sides) >= least]
    chosen = np.random.default_rng(seed).permutation(len(lines))[:count]
    return [lines[i][0] for i in chosen], [lines[i][1] for i in chosen]


def recall(scores: NDArray[np.float64], targets: Sequence[str], order: Sequence[int]) -> dict[int, float]:
    """Recall at each of `CUTS`, of `scores` [queries, candidates]; query i belongs to candidate `order[i]`."""
    names = {text: number for number, text in enumerate(dict.fromkeys(targets))}
    own = np.array([names[text] for text in targets])  # candidates of one text are one
    best = np.argsort(-scores, axis=1, kind="stable")[:, : max(CUTS)]
    right = own[best] == own[list(order)][:, None]
    return {k: float(right[:, :k].any(1).mean()) for k in CUTS}


def words_in_common(queries: Sequence[str], targets: Sequence[str]) -> NDArray[np.float64]:
    """[queries, candidates]: the words that both lines have, over the root of the product of their numbers."""
    of_query, of_target = ([set(line.lower().split()) for line in lines] for lines in (queries, targets))
    return np.array([[len(a & b) / (len(a) * len(b)) ** 0.5 for b in of_target] for a in of_query])


def measured(model: triptych.Model, pairs: int, seed: int, words: int | None = None) -> dict[str, object]:
    """Recall of the model, of both controls, and chance."""
    queries, targets = held_out_pairs(pairs, seed, words)
    vectors = model.encode([*queries, *targets]).float()
    vectors = torch.nn.functional.normalize(vectors, dim=-1).double().numpy()
    scores = vectors[: len(queries)] @ vectors[len(queries) :].T
    own = range(len(queries))
    shuffled = np.random.default_rng(seed + 1).permutation(len(queries)).tolist()
    return {
        "pairs": len(queries),
        "recall": recall(scores, targets, own),
        "shuffled": recall(scores, targets, shuffled),
        "words in common": recall(words_in_common(queries, targets), targets, own),
        "chance": {k: k / len(targets) for k in CUTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model directory, a .gguf file or hub:org/name")
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--words", type=int, help="pieces of this many words in place of whole lines")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    model = triptych.load(chosen.model)
    print(
        json.dumps(
            {"model": Path(chosen.model).name} | measured(model, chosen.pairs, chosen.seed, chosen.words), indent=1
        )
    )


if __name__ == "__main__":
    main()
