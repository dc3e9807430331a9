"""Reads and edits as data, resolved against a model before anything runs.

Sites are listed in sites.py.  A head's output is the site `attn.z` of its block: `zero("blocks.0.attn.z", heads=3)`
silences head 3 of block 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature

import torch
from torch import Tensor

from triptych.errors import ProbeError, shown
from triptych.probe.content import digest
from triptych.probe.sites import MATRIX_SITES, Site, match, sites
from triptych.spec.model import ModelSpec

Selection = int | slice | Sequence[int] | None


@dataclass(frozen=True)
class Where:
    """What the function of an edit is told about the values it changes: the site, the row of the batch,
    and the absolute positions of `value`."""

    site: str
    item: int
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """Keep what passes at `site` (a name or a glob).

    `items` selects rows of the batch, `at` absolute positions (of the queries, for scores and pattern), `heads` heads;
    None is all of them.  With `grad` the trace holds the tensor that the forward itself goes on with, so that `.grad`
    is filled by a backward pass and `torch.autograd.grad` finds it; at scores and pattern that layer then runs the
    reference.
    """

    site: str
    items: Selection = None
    at: Selection = None
    heads: Selection = None
    grad: bool = False


@dataclass(frozen=True)
class Edit:
    """Replace what passes at `site` by `fn(value, where)`.

    `value` holds the chosen positions only: `[n, ...]`, heads on dimension 1 where the site has them, or `[h, n, S]`
    for scores and pattern.  The result must have its shape.  A function of the position and the value alone means
    the same in cached generation and in one full forward.  It must not hold NaN or inf where the value was finite, but
    for -inf at scores and logits.
    """

    site: str
    fn: Callable[[Tensor, Where], Tensor]
    items: Selection = None
    at: Selection = None
    heads: Selection = None

    def __post_init__(self) -> None:
        """Raises ProbeError for a function that cannot be called with a value and its place."""
        if not callable(self.fn):
            raise ProbeError(f"the edit at {self.site}: {shown(self.fn)} is no function of (value, where)")
        try:
            signature(self.fn).bind(None, None)
        except TypeError:
            takes = str(signature(self.fn))
            raise ProbeError(
                f"the edit at {self.site}: its function takes {takes}; it is called with (value, where), as in "
                f"Edit({self.site!r}, lambda value, where: 2 * value)"
            ) from None
        except ValueError:  # a function without a signature, as some of those written in C are
            return


@dataclass(frozen=True, eq=False)
class Zero:
    """0 at the chosen places."""

    def __call__(self, value: Tensor, where: Where) -> Tensor:
        return torch.zeros_like(value)


@dataclass(frozen=True, eq=False)
class Add:
    """The value plus `vector`, broadcast over the chosen places."""

    vector: Tensor

    def __call__(self, value: Tensor, where: Where) -> Tensor:
        return value + _broadcast(self.vector, value, where.site)


@dataclass(frozen=True, eq=False)
class Put:
    """`value`, broadcast over the chosen places."""

    value: Tensor

    def __call__(self, value: Tensor, where: Where) -> Tensor:
        return _broadcast(self.value, value, where.site)


def zero(site: str, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """Ablate: 0 at the chosen places."""
    return Edit(site, Zero(), items, at, heads)


def add(site: str, vector: Tensor, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """Steer: add `vector`, broadcast over the chosen places."""
    return Edit(site, Add(vector), items, at, heads)


def put(site: str, value: Tensor, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """Patch: `value` in place of what passes, broadcast over the chosen places."""
    return Edit(site, Put(value), items, at, heads)


Reads = Sequence[Read | str] | Read | str
Edits = Sequence[Edit] | Edit


@dataclass(frozen=True)
class Plan:
    """Reads and edits by site name, checked against the model."""

    sites: dict[str, Site]
    reads: dict[str, list[Read]]
    edits: dict[str, list[Edit]]

    @staticmethod
    def of(model: ModelSpec, read: Reads = (), edit: Edits = ()) -> Plan:
        """Resolve names and globs; one read or one edit may be given without a list.

        Raises ProbeError for a site that is not there, heads it does not have, positions below 0, and a vector of
        `add` or `put` that is as wide as no site it is for.
        """
        known = sites(model)
        reads: dict[str, list[Read]] = {}
        edits: dict[str, list[Edit]] = {}
        for wanted in _reads(read):
            for site in match(wanted.site, model, known):
                items, at, heads = _selection(site, wanted)
                one = replace(wanted, site=site.name, items=items, at=at, heads=heads)
                reads.setdefault(site.name, []).append(one)
        for change in _edits(edit):
            for site in match(change.site, model, known):
                _check_width(site, change)
                items, at, heads = _selection(site, change)
                edits.setdefault(site.name, []).append(replace(change, site=site.name, items=items, at=at, heads=heads))
        return Plan(known, reads, edits)

    @cached_property
    def wants_grad(self) -> bool:
        """Whether a read keeps its tensor in the autograd graph."""
        return any(read.grad for reads in self.reads.values() for read in reads)

    def nbytes(
        self, lengths: Sequence[int], sources: Sequence[int] = (), itemsize: int = 4, *, new: int | None = None
    ) -> int:
        """Bytes the reads will keep for decoder (or only) rows of these final lengths and source rows of those.

        In a generation of `new` tokens a row, logits exist for that many positions only.
        """
        total = 0
        for name, reads in self.reads.items():
            site = self.sites[name]
            of_encoder = name.startswith("encoder.") or site.of_source
            rows = sources if of_encoder else lengths
            for read in reads:
                heads = _count(read.heads, site.heads or 1) / (site.heads or 1)
                for item in _chosen(read.items, len(rows)):
                    keys = (sources if ".cross." in name else rows)[item] if site.per_key else 1
                    positions = _count(read.at, rows[item])
                    if name == "logits" and new is not None:
                        positions = min(positions, new)
                    total += round(positions * keys * site.width * heads) * itemsize
        return total

    def check_bytes(
        self, lengths: Sequence[int], sources: Sequence[int], max_bytes: int, *, new: int | None = None
    ) -> None:
        """Raise ProbeError when the reads would keep more than `max_bytes` bytes, saying how to read less."""
        nbytes = self.nbytes(lengths, sources, new=new)
        if nbytes > max_bytes:
            raise ProbeError(
                f"the reads would keep {nbytes:,} bytes, over max_bytes={max_bytes:,}; choose at=, heads= or items=, "
                "or fewer sites, or raise max_bytes"
            )

    @cached_property
    def provenance(self) -> str:
        """A hash of what the edits do: keys and values written under them must not be read without them.

        Equal edits have equal hashes, whichever object holds them.
        """
        if not self.edits:
            return ""
        return digest([(name, [(e.fn, e.items, e.at, e.heads) for e in edits]) for name, edits in self.edits.items()])

    def touches(self, prefix: str) -> bool:
        """Whether any read or edit lies under this dotted prefix (the empty one is the whole model)."""
        return any(name.startswith(prefix) for name in (*self.reads, *self.edits))


def select(at: Selection, positions: Sequence[int]) -> list[int]:
    """Indices into `positions` (absolute, ascending) that `at` chooses."""
    if at is None:
        return list(range(len(positions)))
    if isinstance(at, int):
        return [i for i, position in enumerate(positions) if position == at]
    if isinstance(at, slice):
        chosen = range(at.start or 0, at.stop if at.stop is not None else 1 << 62, at.step or 1)
        return [i for i, position in enumerate(positions) if position in chosen]
    wanted = set(at)
    return [i for i, position in enumerate(positions) if position in wanted]


def matrix(site: str) -> bool:
    """Whether a site holds [H, T, S] instead of [T, ...]."""
    return site.rpartition(".")[2] in MATRIX_SITES


def _reads(read: Reads) -> list[Read]:
    """The reads, where a name stands for itself.  Raises ProbeError for anything else."""
    every = [read] if isinstance(read, Read | str) else read
    if not isinstance(every, Sequence) or not all(isinstance(one, Read | str) for one in every):
        raise ProbeError(f"read= must be a list of site names or Reads, not {shown(read)}")
    return [Read(one) if isinstance(one, str) else one for one in every]


def _edits(edit: Edits) -> Sequence[Edit]:
    """The edits.  Raises ProbeError for anything else."""
    every = [edit] if isinstance(edit, Edit) else edit
    if not isinstance(every, Sequence) or not all(isinstance(one, Edit) for one in every):
        raise ProbeError(f"edit= must be a list of Edits, not {shown(edit)}")
    return every


def _selection(site: Site, chosen: Read | Edit) -> tuple[Selection, Selection, Selection]:
    """The items, positions and heads of a read or an edit at one site, checked."""
    if chosen.heads is not None and site.heads is None:
        raise ProbeError(f"{site.name} has no heads; leave heads= out")
    range_of_heads = f"{site.name} has heads 0..{(site.heads or 1) - 1}"
    heads = _indices(chosen.heads, "heads", range_of_heads)
    for head in [heads] if isinstance(heads, int) else heads if isinstance(heads, tuple) else ():
        if head >= (site.heads or 1):
            raise ProbeError(f"{range_of_heads}, not {head}")
    last = "positions are absolute and count from 0, so the last token of a row is at=len(ids) - 1"
    return _indices(chosen.items, "items", "rows count from 0"), _indices(chosen.at, "at", last), heads


def _indices(at: Selection, what: str, hint: str) -> Selection:
    """`at` with plain integers.  Raises ProbeError for anything else, and for numbers below 0."""
    if at is None:
        return None
    parts = [at.start or 0, at.stop or 0, 1 if at.step is None else at.step] if isinstance(at, slice) else at
    try:
        numbers = [operator.index(i) for i in parts] if isinstance(parts, Sequence) else [operator.index(parts)]
    except TypeError:
        raise ProbeError(f"{what}={shown(at)} must be an integer, a slice or a list of integers") from None
    if isinstance(at, slice) and numbers[2] < 1:
        raise ProbeError(f"{what}={shown(at)}: the step of a slice must be 1 or more")
    if min(numbers, default=0) < 0:
        raise ProbeError(f"{what}={shown(at)}: {hint}")
    if isinstance(at, slice):
        return slice(numbers[0], None if at.stop is None else numbers[1], numbers[2])
    return tuple(numbers) if isinstance(at, Sequence) else numbers[0]


def _check_width(site: Site, change: Edit) -> None:
    value = change.fn.vector if isinstance(change.fn, Add) else change.fn.value if isinstance(change.fn, Put) else None
    if value is None or site.per_key or not value.dim():
        return
    width = site.width // (site.heads or 1)
    if value.shape[-1] not in (1, width):
        raise ProbeError(
            f"the edit at {site.name}: its value has shape {tuple(value.shape)}, and a vector there has {width} numbers"
            + (" a head" if site.heads else "")
        )


def _broadcast(new: Tensor, value: Tensor, site: str) -> Tensor:
    try:
        return new.to(value).expand_as(value)
    except RuntimeError:
        raise ProbeError(
            f"the edit at {site}: its value has shape {tuple(new.shape)}, which does not broadcast to the chosen "
            f"places {tuple(value.shape)}"
        ) from None


def _chosen(at: Selection, n: int) -> list[int]:
    return select(at, range(n))


def _count(at: Selection, n: int) -> int:
    return len(_chosen(at, n))
