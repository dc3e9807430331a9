"""How much attention goes from some queries to some keys: the number by which roles, links and labs score a head."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_weight(patterns: Tensor, reads: Tensor) -> Tensor:
    """`[..., T, S]` weights -> `[...]`: what each query gives the keys it `reads`, `[T, S]` booleans, summed over these
    keys; the mean over the queries that read any (Clark et al. 2019)."""
    summed = (patterns * reads.to(patterns.dtype)).sum(-1)
    return summed[..., reads.any(-1)].mean(-1)


def at_offset(queries: range, offset: int, length: int) -> Tensor:
    """`[length, length]` booleans: each of the queries reads the key `offset` places behind it, or before it where that
    is negative."""
    reads = torch.zeros(length, length, dtype=torch.bool)
    for query in queries:
        reads[query, query + offset] = True
    return reads
