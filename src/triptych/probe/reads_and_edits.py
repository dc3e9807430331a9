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

from triptych.arguments import checked, checked_methods, readable, takes
from triptych.checkpoints.load_weights import compute_dtype
from triptych.errors import InputError, ProbeError, shown
from triptych.probe.content import digest
from triptych.probe.reductions import Reduction, Statistics, check_reduction
from triptych.probe.sites import CONTEXT_SITES, MATRIX_SITES, Selection, Site, in_layers, match, sites
from triptych.spec.model import ModelSpec


@dataclass(frozen=True)
class Where:
    """The second argument of an edit's function: which values it changes.

    site        the name of the site.
    item        the row of the batch, counted from 0.
    positions   the absolute positions of the values, in their order.
    """

    site: str
    item: int
    positions: tuple[int, ...]


EditFunction = Callable[[Tensor, Where], Tensor]


@checked_methods
@dataclass(frozen=True)
class Read:
    """A read: keep the values at `site`, a name or a glob such as "blocks.*.attn.pattern".

    `items` selects rows of the batch, `at` absolute positions (of the queries, for scores and pattern), `heads` heads
    and `layers` blocks among those that the glob names; None is all of them.  Negative positions and layers count from
    the end; positions do so in `trace` alone, since a generation does not know where a row will end.

    dtype    the dtype in which the values are kept, "bf16" for example; by default their own.
    reduce   what is kept instead of the values, in fp32 or better: "mean" over the chosen positions (`[1, ...]`,
             `[h, 1, S]`), "norm" of each vector (without its last dimension), "mean_heads" (1 head), or
             `Statistics()` of a pattern.
    grad     the trace holds the tensor with which the forward itself continues, so that a backward pass fills its
             `.grad` and `torch.autograd.grad` accepts it; at scores and pattern that layer then runs the reference.

    What does not fit the model (an unknown site, heads or layers out of range) raises ProbeError when the read is used.
    """

    site: str
    items: Selection = None
    at: Selection = None
    heads: Selection = None
    grad: bool = False
    layers: Selection = None
    dtype: torch.dtype | str | None = None
    reduce: Reduction = None

    @property
    def whole(self) -> bool:
        """Whether everything that passes is kept as it is."""
        chosen = self.items is self.at is self.heads is self.layers is None
        return chosen and self.dtype is self.reduce is None and not self.grad

    @property
    def adds_up(self) -> bool:
        """Whether what is kept of several positions is a sum over them, or has one."""
        return self.reduce == "mean" or isinstance(self.reduce, Statistics)


@checked_methods
@dataclass(frozen=True)
class Edit:
    """An edit: replace the values at `site`, a name or a glob, by `fn(value, where)`.

    `value` holds the chosen positions only: `[n, ...]`, heads on dimension 1 where the site has them, or `[h, n, S]`
    for scores and pattern.  The result must have its shape, and be finite where the value was; -inf is allowed
    at scores and logits.  `where` is a `triptych.probe.Where`.  `items`, `at` and `heads` select as in `Read`.  A
    function of the value and its positions alone has the same effect in cached generation and in one forward over the
    whole row.

    `triptych.probe.zero`, `add` and `put` make the common ones.  What does not fit the model, and an edit that changes
    nothing, raise ProbeError when the edit is used.
    """

    site: str
    fn: EditFunction
    items: Selection = None
    at: Selection = None
    heads: Selection = None

    def __post_init__(self) -> None:
        """Raises ProbeError for a function that cannot be called with a value and its place."""
        if not callable(self.fn):
            raise ProbeError(f"the edit at {self.site}: {shown(self.fn)} is no function of (value, where)")
        if not takes(self.fn, "value", "where"):
            raise ProbeError(
                f"the edit at {self.site}: its function takes {signature(self.fn)}; it is called with (value, where), "
                f"as in Edit({self.site!r}, lambda value, where: 2 * value)"
            )


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


@checked
def zero(site: str, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """The edit that ablates: 0 at the chosen rows (`items`), positions (`at`) and `heads`, by default everywhere."""
    return Edit(site, Zero(), items, at, heads)


@checked
def add(site: str, vector: Tensor, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """The edit that steers: add `vector`, [D] or of a shape that broadcasts to the chosen values.

    Raises ProbeError for anything but a tensor.
    """
    _check_tensor(site, vector)
    return Edit(site, Add(vector), items, at, heads)


@checked
def put(site: str, value: Tensor, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """The edit that patches: `value`, of a shape that broadcasts to the chosen values, in their place.

    Raises ProbeError for anything but a tensor.
    """
    _check_tensor(site, value)
    return Edit(site, Put(value), items, at, heads)


def _check_tensor(site: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ProbeError(f"the edit at {site}: {shown(value)} is no tensor; write torch.tensor(...)")
    readable(value, f"the edit at {site}")


Reads = Sequence[Read | str] | Read | str
Edits = Sequence[Edit] | Edit


@dataclass(frozen=True)
class Plan:
    """Reads and edits by site name, checked against the model."""

    sites: dict[str, Site]
    reads: dict[str, list[Read]]
    edits: dict[str, list[Edit]]

    @staticmethod
    def of(model: ModelSpec, read: Reads = (), edit: Edits = (), *, grad: bool = False) -> Plan:
        """Resolve names and globs; one read or one edit may be given without a list.  With `grad` every read has it.

        Raises ProbeError for a site that is not there, heads and layers it does not have, positions below 0 of an edit,
        a dtype or a reduction that cannot be served, and a vector of `add` or `put` that is as wide as no site it is
        for.
        """
        known = sites(model)
        reads: dict[str, list[Read]] = {}
        edits: dict[str, list[Edit]] = {}
        for wanted in _reads(read):
            if wanted.whole and not grad:  # nothing to check: most reads of many sites
                for site in match(wanted.site, model, known):
                    one = wanted if wanted.site == site.name else Read(site.name)
                    if one not in reads.setdefault(site.name, []):
                        reads[site.name].append(one)
                continue
            dtype = _dtype(wanted)
            for site in in_layers(match(wanted.site, model, known), wanted.layers, wanted.site):
                items, at, heads = _selection(site, wanted, from_end=True)
                one = replace(
                    wanted, site=site.name, items=items, at=at, heads=heads, dtype=dtype, grad=wanted.grad or grad,
                    layers=None,
                )  # fmt: skip
                _check_kept(site, one)
                if one not in reads.setdefault(site.name, []):  # a site that two globs name is read once
                    reads[site.name].append(one)
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

    @cached_property
    def from_end(self) -> bool:
        """Whether a read counts positions from the end of its row."""
        every = (read.at for reads in self.reads.values() for read in reads)
        return any(min(_numbers_of(at), default=0) < 0 for at in every)

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
        return prefix in self._prefixes

    @cached_property
    def _prefixes(self) -> set[str]:
        prefixes = {""} if self.reads or self.edits else set()
        for name in (*self.reads, *self.edits):
            prefix = name[: name.rfind(".") + 1]
            while prefix not in prefixes:
                prefixes.add(prefix)
                prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        return prefixes

    @cached_property
    def plain(self) -> set[str]:
        """The sites whose values are kept as they pass, all of them."""
        alone = {name for name, reads in self.reads.items() if len(reads) == 1 and name not in self.edits}
        whole = {name for name in alone if self.reads[name][0].whole}
        return {name for name in whole if not name.endswith((*MATRIX_SITES, *CONTEXT_SITES))}

    @cached_property
    def of_steps(self) -> list[str]:
        """The sites that are read of each step of a generation within the decoder, in the order in which they are
        reached: not the logits, nor what is computed of the source once."""
        return [name for name in self.sites if name in self.reads and name != "logits" and not self._of_source(name)]

    @cached_property
    def of_row(self) -> set[str]:
        """The sites that are read at the positions of decoder (or only) rows: not what a source has."""
        return {name for name in self.reads if not self._of_source(name)}

    @cached_property
    def reads_source(self) -> bool:
        """Whether something is read that is computed of a source once."""
        return any(self._of_source(name) for name in self.reads)

    @cached_property
    def why_modules(self) -> str | None:
        """Why native steps cannot serve this plan; None where they can."""
        if self.edits:
            return f"an edit is made at {next(iter(self.edits))}"
        inside = [name for name in self.reads if self.sites[name].leaf in (*MATRIX_SITES, *CONTEXT_SITES)]
        return f"{inside[0]} is read, which the native step does not keep" if inside else None

    def _of_source(self, name: str) -> bool:
        return name.startswith("encoder.") or self.sites[name].of_source


def select(at: Selection, positions: Sequence[int]) -> list[int]:
    """Indices into `positions` (absolute, ascending) that `at` chooses; what is negative counts from behind the last
    of them."""
    if at is None:
        return list(range(len(positions)))
    if positions and min(_numbers_of(at), default=0) < 0:
        at = _from_start(at, positions[-1] + 1)
    if isinstance(at, int):
        return [i for i, position in enumerate(positions) if position == at]
    if isinstance(at, slice):
        chosen = range(at.start or 0, at.stop if at.stop is not None else 1 << 62, at.step or 1)
        return [i for i, position in enumerate(positions) if position in chosen]
    wanted = set(_numbers_of(at))
    return [i for i, position in enumerate(positions) if position in wanted]


def _numbers_of(at: Selection) -> list[int]:
    if isinstance(at, slice):
        return [number for number in (at.start, at.stop) if number is not None]
    return [] if at is None else [at] if isinstance(at, int) else list(at)


def _from_start(at: Selection, end: int) -> Selection:
    """The same with negative numbers counted from `end`; one before 0 chooses nothing, or begins a slice at 0."""
    if isinstance(at, slice):
        start, stop = (x if x is None or x >= 0 else max(0, x + end) for x in (at.start, at.stop))
        return slice(start, stop, at.step)
    return tuple(x if x >= 0 or x + end < 0 else x + end for x in _numbers_of(at))


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


def _dtype(read: Read) -> torch.dtype | None:
    """Raises ProbeError for a dtype that is none of floating point."""
    try:
        return None if read.dtype is None else compute_dtype(read.dtype)
    except InputError as error:
        raise ProbeError(f"the read at {read.site}: {error}") from None


def _check_kept(site: Site, read: Read) -> None:
    """Raise ProbeError for a reduction that the site cannot serve, and for a gradient of what is not kept as it is."""
    check_reduction(site, read.reduce)
    if read.grad and (read.dtype is not None or read.reduce is not None):
        what = "dtype=" if read.dtype is not None else "reduce="
        raise ProbeError(f"{site.name}: grad=True keeps the tensor that the forward goes on with; leave {what} out")
    if isinstance(read.reduce, Statistics) and read.dtype is not None:
        raise ProbeError(f"{site.name}: statistics are kept in fp32; leave dtype= out")


def _selection(site: Site, chosen: Read | Edit, *, from_end: bool = False) -> tuple[Selection, Selection, Selection]:
    """The items, positions and heads of a read or an edit at one site, checked."""
    if chosen.heads is not None and site.heads is None:
        raise ProbeError(f"{site.name} has no heads; leave heads= out")
    range_of_heads = f"{site.name} has heads 0..{(site.heads or 1) - 1}"
    heads = _indices(chosen.heads, "heads", range_of_heads)
    if isinstance(heads, slice) and not range(site.heads or 1)[heads]:
        raise ProbeError(f"{range_of_heads}, and heads={shown(chosen.heads)} chooses none of them")
    for head in [heads] if isinstance(heads, int) else heads if isinstance(heads, tuple) else ():
        if head >= (site.heads or 1):
            raise ProbeError(f"{range_of_heads}, not {head}")
    last = "positions are absolute and count from 0, so the last token of a row is at=len(ids) - 1"
    at = _indices(chosen.at, "at", None if from_end else last)
    return _indices(chosen.items, "items", "rows count from 0"), at, heads


def _indices(at: Selection, what: str, hint: str | None) -> Selection:
    """`at` with plain integers.  Raises ProbeError for anything else, and with this hint for numbers below 0."""
    if at is None:
        return None
    if isinstance(at, bool) or (isinstance(at, Sequence) and any(isinstance(i, bool) for i in at)):
        raise ProbeError(f"{what}={shown(at)} must be an integer, a slice or a list of integers")
    if isinstance(at, Sequence) and not at:
        raise ProbeError(f"{what}={shown(at)} chooses nothing; leave it out to choose all")
    parts = [at.start or 0, at.stop or 0, 1 if at.step is None else at.step] if isinstance(at, slice) else at
    try:
        numbers = [operator.index(i) for i in parts] if isinstance(parts, Sequence) else [operator.index(parts)]
    except TypeError:
        raise ProbeError(f"{what}={shown(at)} must be an integer, a slice or a list of integers") from None
    if isinstance(at, slice) and numbers[2] < 1:
        raise ProbeError(f"{what}={shown(at)}: the step of a slice must be 1 or more")
    if hint is not None and min(numbers, default=0) < 0:
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
