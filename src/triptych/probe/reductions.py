"""What a read may keep instead of the values themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.arguments import as_index
from triptych.attention import KeyLabels
from triptych.errors import ProbeError, nearest, shown
from triptych.native.step import STATISTICS_TOP
from triptych.probe.sites import MATRIX_SITES, Site

REDUCTIONS = ("mean", "norm", "mean_heads")
Labels = Sequence[Sequence[int]] | None


@dataclass(frozen=True, eq=False)
class Statistics:
    """The `reduce` of a `Read` of a pattern that keeps its statistics (`triptych.attention.AttentionStatistics`); the
    pattern itself is never stored.  `Model.statistics` makes such reads.

    top          how many of the keys with the largest weights are returned.
    delimiters   for each row of the batch, for each of its keys, whether it counts as a delimiter.
    documents    for each row of the batch a label of each token, for the weight on keys with the query's label.

    Keys of cross-attention are those of the source.  Raises ProbeError for a `top` out of range.
    """

    top: int = 4
    delimiters: Labels = None
    documents: Labels = None

    def __post_init__(self) -> None:
        if as_index(self.top) not in range(STATISTICS_TOP + 1):
            raise ProbeError(f"top={shown(self.top)}: give a number of keys from 0 to {STATISTICS_TOP}")

    def labels(self, item: int, queries: Sequence[int], keys: int, device: torch.device) -> KeyLabels:
        """Those of one row for queries at these positions.  Tokens behind the end of what was given, such as
        generated ones, are no delimiters, and belong to no document.  Raises ProbeError for a row that has none."""
        marked, documents = (_of_row(x, item, what) for x, what in self._given)
        q_document = k_document = delimiters = None
        if marked is not None:
            delimiters = torch.tensor([bool(x) for x in _padded(marked, keys, 0)], device=device)
        if documents is not None:
            whole = _padded(documents, max(keys, *queries) + 1, -1)
            q_document = torch.tensor([whole[position] for position in queries], device=device)
            k_document = torch.tensor(_padded(documents, keys, -2), device=device)
        return KeyLabels(delimiters=delimiters, q_document=q_document, k_document=k_document)

    @property
    def _given(self) -> tuple[tuple[Labels, str], ...]:
        return (self.delimiters, "delimiters"), (self.documents, "documents")

    def nbytes(self, heads: int, positions: int, keys: int) -> int:
        """The bytes of one row at one site."""
        numbers = 4 + sum(x is not None for x, _ in self._given) + 2 * self.top
        return 4 * heads * (positions * numbers + keys)


Reduction = str | Statistics | None


def check_reduction(site: Site, reduce: Reduction) -> None:
    """Raise ProbeError for a reduction that does not exist or that the site cannot serve."""
    if isinstance(reduce, Statistics):
        if site.leaf != "pattern":
            raise ProbeError(f"{site.name}: Statistics are of a pattern; read {site.name.rpartition('.')[0]}.pattern")
        return
    if reduce is None:
        return
    if reduce not in REDUCTIONS:
        known = f"{', '.join(REDUCTIONS)} and Statistics(){nearest(str(reduce), REDUCTIONS)}"
        raise ProbeError(f"{site.name}: reduce={shown(reduce)} is not one of {known}")
    if site.leaf == "scores":
        raise ProbeError(f"{site.name}: scores hold -inf, which has no mean and no norm; reduce the pattern instead")
    if reduce == "norm" and site.per_key:
        raise ProbeError(f"{site.name}: a norm is of a vector; for a pattern take 'mean', 'mean_heads' or Statistics()")
    if reduce == "mean_heads" and site.heads is None:
        raise ProbeError(f"{site.name} has no heads to take the mean of")


def reduced(value: Tensor, reduce: str, site: str) -> Tensor:
    """`[t, ...]`, or `[h, t, S]` for a pattern, in fp32 or better.  `mean` gives the sum over t, which the trace
    divides in the end, since a generation comes in pieces."""
    value = value if value.dtype == torch.float64 else value.float()
    by_key = site.rpartition(".")[2] in MATRIX_SITES
    if reduce == "norm":
        length: Tensor = torch.linalg.vector_norm(value, dim=-1)
        return length
    if reduce == "mean":
        return value.sum(1 if by_key else 0, keepdim=True)
    return value.mean(0 if by_key else 1, keepdim=True)


def _of_row(given: Labels, item: int, what: str) -> Sequence[int] | None:
    if given is None:
        return None
    if item >= len(given):
        raise ProbeError(f"{what}: {len(given)} rows, and row {item} is read; give them for every row of the batch")
    return given[item]


def _padded(labels: Sequence[int], length: int, fill: int) -> list[int]:
    return [*map(int, labels[:length]), *[fill] * (length - len(labels))]
