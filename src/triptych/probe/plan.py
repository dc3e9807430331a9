"""Reads and edits as data, resolved against a model before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from triptych.errors import ProbeError
from triptych.probe.sites import MATRIX_SITES, Site, match, sites
from triptych.spec.model import Model

At = int | slice | Sequence[int] | None


@dataclass(frozen=True)
class Where:
    """What an edit's function is told: the site, the row of the batch, and the absolute positions it was given."""

    site: str
    item: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """Keep what passes at `site` (a name or a glob).

    `items` selects rows of the batch, `at` absolute positions (of the queries, for scores and pattern), `heads` heads;
    None is all of them.  `grad` keeps the autograd graph.
    """

    site: str
    items: At = None
    at: At = None
    heads: At = None
    grad: bool = False


@dataclass(frozen=True)
class Edit:
    """Replace what passes at `site` by `fn(value, where)`.

    `value` holds the chosen positions only: `[n, ...]`, heads on dimension 1 where the site has them, or `[h, n, S]`
    for scores and pattern.  The result must have its shape.  A function of the position and the value alone means
    the same in cached generation and in one full forward.
    """

    site: str
    fn: Callable[[Tensor, Where], Tensor]
    items: At = None
    at: At = None
    heads: At = None


def zero(site: str, *, items: At = None, at: At = None, heads: At = None) -> Edit:
    """Ablate: 0 at the chosen places."""
    return Edit(site, lambda value, where: value.new_zeros(value.shape), items, at, heads)


def add(site: str, vector: Tensor, *, items: At = None, at: At = None, heads: At = None) -> Edit:
    """Steer: add `vector`, broadcast over the chosen places."""
    return Edit(site, lambda value, where: value + vector.to(value), items, at, heads)


def put(site: str, value: Tensor, *, items: At = None, at: At = None, heads: At = None) -> Edit:
    """Patch: the given value, broadcast over the chosen places."""
    return Edit(site, lambda old, where: value.to(old).expand_as(old), items, at, heads)


@dataclass(frozen=True)
class Plan:
    """Reads and edits by site name, checked against the model."""

    sites: dict[str, Site]
    reads: dict[str, list[Read]]
    edits: dict[str, list[Edit]]

    @staticmethod
    def of(model: Model, read: Sequence[Read | str] = (), edit: Sequence[Edit] = ()) -> Plan:
        """Resolve names and globs.  Raises ProbeError for a site that is not there or heads it does not have."""
        known = sites(model)
        reads: dict[str, list[Read]] = {}
        edits: dict[str, list[Edit]] = {}
        for asked in (Read(r) if isinstance(r, str) else r for r in read):
            for site in match(asked.site, model, known):
                _check_heads(site, asked.heads)
                reads.setdefault(site.name, []).append(replace(asked, site=site.name))
        for change in edit:
            for site in match(change.site, model, known):
                _check_heads(site, change.heads)
                edits.setdefault(site.name, []).append(replace(change, site=site.name))
        return Plan(known, reads, edits)

    def nbytes(self, lengths: Sequence[int], sources: Sequence[int] = (), itemsize: int = 4) -> int:
        """Bytes the reads will keep for decoder (or only) rows of these final lengths and source rows of those."""
        total = 0
        for name, asked in self.reads.items():
            site = self.sites[name]
            of_encoder = name.startswith("encoder.") or site.of_source
            rows = sources if of_encoder else lengths
            for read in asked:
                heads = _count(read.heads, site.heads or 1) / (site.heads or 1)
                for item in _chosen(read.items, len(rows)):
                    keys = (sources if ".cross." in name else rows)[item] if site.per_key else 1
                    total += round(_count(read.at, rows[item]) * keys * site.width * heads) * itemsize
        return total

    def check_bytes(self, lengths: Sequence[int], sources: Sequence[int], most: int) -> None:
        """Raise ProbeError when the reads would keep more than `most` bytes, saying how to ask for less."""
        asked = self.nbytes(lengths, sources)
        if asked > most:
            raise ProbeError(
                f"the reads would keep {asked:,} bytes, over max_bytes={most:,}; choose at=, heads= or items=, "
                "or fewer sites, or raise max_bytes"
            )

    @property
    def provenance(self) -> str:
        """Identifies the edits: keys and values written under them must not be read without them."""
        if not self.edits:
            return ""
        told = repr([(name, [(id(e.fn), e.items, e.at, e.heads) for e in edits]) for name, edits in self.edits.items()])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def touches(self, prefix: str) -> bool:
        """Whether any read or edit lies under this dotted prefix (the empty one is the whole model)."""
        return any(name.startswith(prefix) for name in (*self.reads, *self.edits))


def select(at: At, positions: Sequence[int]) -> list[int]:
    """Indices into `positions` (absolute, ascending) that `at` chooses."""
    if at is None:
        return list(range(len(positions)))
    if isinstance(at, int):
        return [i for i, position in enumerate(positions) if position == at]
    if isinstance(at, slice):
        if (at.start or 0) < 0 or (at.stop or 0) < 0:
            raise ProbeError(f"at={at}: positions are absolute and count from 0; a negative one has no meaning here")
        chosen = range(at.start or 0, at.stop if at.stop is not None else 1 << 62, at.step or 1)
        return [i for i, position in enumerate(positions) if position in chosen]
    wanted = set(at)
    return [i for i, position in enumerate(positions) if position in wanted]


def matrix(site: str) -> bool:
    """Whether a site holds [H, T, S] instead of [T, ...]."""
    return site.rpartition(".")[2] in MATRIX_SITES


def _check_heads(site: Site, heads: At) -> None:
    if heads is None:
        return
    if site.heads is None:
        raise ProbeError(f"{site.name} has no heads; leave heads= out")
    asked = [heads] if isinstance(heads, int) else [] if isinstance(heads, slice) else list(heads)
    for head in asked:
        if not 0 <= head < site.heads:
            raise ProbeError(f"{site.name} has heads 0..{site.heads - 1}, not {head}")


def _chosen(at: At, n: int) -> list[int]:
    return select(at, range(n))


def _count(at: At, n: int) -> int:
    return len(_chosen(at, n))
