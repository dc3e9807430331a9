"""What each head of a pattern mostly reads on one text: numbers of its weights, and a name where one of them is large.

These names describe one text.  They are not tested against chance, as those of `triptych.probe` head roles are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triptych.attention import AttentionStatistics

MOSTLY = 0.5  # share of a head's weight that gives it a name
REPEATED = 0.4  # the same for repeated tokens, which few queries have
FEWEST = 3  # queries with a repeated token
NEAR = 4  # places from the query that are near
EVEN = 0.6  # effective keys, as a share of those in sight, of a diffuse head
TOP = 16  # keys of each query that names are read from

NAMES = {
    "induction": "the token after an earlier occurrence of the present one",
    "duplicate": "an earlier occurrence of the present token",
    "previous": "the token before",
    "next": "the token after",
    "self": "the token itself",
    "first": "the first token",
    "local": f"tokens at most {NEAR} places away",
    "diffuse": "many keys alike",
}


def measures(statistics: AttentionStatistics, *, cross: bool) -> dict[str, list[float]]:
    """Means over the queries, for each head: the first query of self-attention, which often sees itself alone, left
    out.  Distances between a source and a target mean nothing, so that cross-attention has none."""
    start = 0 if cross or statistics.entropy.shape[1] == 1 else 1
    values = {"effective keys": statistics.effective_keys, "first": statistics.first}
    if not cross:
        values |= {"previous": statistics.previous, "distance": statistics.distance}
    return {name: value[:, start:].double().mean(1).tolist() for name, value in values.items()}


def names(
    statistics: AttentionStatistics, queries: Sequence[int], keys: Sequence[int], *, cross: bool, causal: bool
) -> list[str]:
    """For each head the name of what most of its weight is on, or "".  `queries` and `keys` are token ids."""
    places, weights = statistics.top_keys.long().cpu(), statistics.top_weights.double().cpu()
    query = torch.arange(len(queries))[None, :, None]
    visible = torch.arange(1, len(queries) + 1) if causal else torch.full((len(queries),), len(keys))

    def share(chosen: Tensor, rows: Tensor | None = None) -> Tensor:
        """[H]: the mean weight of the `rows` queries on the chosen keys."""
        each = (weights * chosen).sum(-1)
        kept = each[:, 1:] if rows is None and not cross and each.shape[1] > 1 else each
        return kept.mean(1) if rows is None else each[:, rows].mean(1)

    even = (statistics.effective_keys.cpu() / visible)[:, visible > 2]
    scores = {"first": share(places == 0), "diffuse": even.mean(1) if even.numel() else torch.zeros(len(places))}
    if not cross:
        near = (places - query).abs() <= NEAR
        scores |= {"previous": share(places == query - 1), "next": share(places == query + 1)}
        scores |= {
            "self": share(places == query),
            "local": share(near) if len(queries) > 4 * NEAR else scores["first"] * 0,
        }
        scores |= _repeated(places, queries, share)
    bounds = {"induction": REPEATED, "duplicate": REPEATED, "diffuse": EVEN, "local": 0.8}
    found = []
    for head in range(len(places)):
        reached = (name for name in NAMES if name in scores and scores[name][head] >= bounds.get(name, MOSTLY))
        found.append(next(reached, ""))
    return found


def _repeated(places: Tensor, ids: Sequence[int], share: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    """Induction and duplicates, where enough tokens occur again."""
    text = torch.tensor(ids)
    first = {one: at for at, one in reversed(list(enumerate(ids)))}
    again = torch.tensor([first[one] < at for at, one in enumerate(ids)])
    if int(again.sum()) < FEWEST:
        return {}
    query = torch.arange(len(ids))[None, :, None]
    there = places.clamp(min=0)
    earlier = (places >= 0) & (places < query)
    before = (there - 1).clamp(min=0)
    follows = earlier & (places > 0) & (text[before] == text[:, None][None])
    return {
        "induction": share(follows, again),
        "duplicate": share(earlier & (text[there] == text[:, None][None]), again),
    }
