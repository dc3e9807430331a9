"""Reads and edits as data, resolved against a model before anything runs; `apply_plan.py` applies them.

Sites are listed in sites.py.  A head's output is the site `attn.z` of its block: `zero("blocks.0.attn.z", heads=3)`
silences head 3 of block 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from triptych.arguments import checked, checked_methods, readable, takes
from triptych.checkpoints.load_weights import compute_dtype
from triptych.errors import InputError, ProbeError, shown
from triptych.spec.model import ModelSpec
from .content_hash import digest
from .sites import CONTEXT_SITES, MATRIX_SITES, Selection, Site, in_layers, integers, match, sites
from .trace_values import Reduction, Statistics, check_reduction


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
    for scores and pattern.  The result must have its shape, and be finite where the value was; -inf may be at scores
    and logits.  `where` is a `triptych.probe.Where`.  `items`, `at` and `heads` select as in `Read`.  A function of the
    value and its positions alone has the same effect in cached generation and in one forward over the whole row.

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
class Put:
    """`value`, broadcast over the chosen places: in place of what is there, or `added` to it."""

    value: Tensor
    added: bool = False

    def __call__(self, value: Tensor, where: Where) -> Tensor:
        try:
            new = self.value.to(value).expand_as(value)
        except RuntimeError:
            raise ProbeError(
                f"the edit at {where.site}: its value has shape {tuple(self.value.shape)}, which does not broadcast to "
                f"the chosen places {tuple(value.shape)}"
            ) from None
        return value + new if self.added else new


@checked
def zero(site: str, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """The edit that ablates: 0 at the chosen rows (`items`), positions (`at`) and `heads`, by default everywhere."""
    return Edit(site, Put(torch.zeros(())), items, at, heads)


@checked
def add(site: str, vector: Tensor, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """The edit that steers: add `vector`, [D] or of a shape that broadcasts to the chosen values.

    Raises ProbeError for anything but a tensor.
    """
    return Edit(site, _put(site, vector, added=True), items, at, heads)


@checked
def put(site: str, value: Tensor, *, items: Selection = None, at: Selection = None, heads: Selection = None) -> Edit:
    """The edit that patches: `value`, of a shape that broadcasts to the chosen values, in their place.

    Raises ProbeError for anything but a tensor.
    """
    return Edit(site, _put(site, value), items, at, heads)


def _put(site: str, value: object, *, added: bool = False) -> Put:
    if not isinstance(value, Tensor):
        raise ProbeError(f"the edit at {site}: {shown(value)} is no tensor; write torch.tensor(...)")
    readable(value, f"the edit at {site}")
    if value.is_complex():
        raise ProbeError(f"the edit at {site}: its value is {value.dtype}; give real numbers")
    return Put(value, added)


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
        for entry in _as_list(read, Read | str, "read= must be a list of site names or Reads"):
            requested = Read(entry) if isinstance(entry, str) else entry
            whole = requested.whole and not grad  # most reads of many sites, with nothing to check
            dtype = _dtype(requested)
            for site in in_layers(match(requested.site, model, known), requested.layers, requested.site):
                resolved = requested
                if not whole or requested.site != site.name:
                    resolved = Read(site.name) if whole else _read(site, requested, dtype, grad=grad)
                if resolved not in reads.setdefault(site.name, []):  # a site that two globs name is read once
                    reads[site.name].append(resolved)
        if grad and not reads:
            raise ProbeError("grad=True is for what read= names; give it too")
        for change in _as_list(edit, Edit, "edit= must be a list of Edits"):
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

    @cached_property
    def touched(self) -> set[str]:
        """The sites that are read or edited."""
        return {*self.reads, *self.edits}

    @cached_property
    def prefixes(self) -> set[str]:
        """The dotted prefixes under which any read or edit lies; the empty one is the whole model."""
        prefixes = {""} if self.touched else set()
        for name in self.touched:
            prefix = name[: name.rfind(".") + 1]
            while prefix not in prefixes:
                prefixes.add(prefix)
                prefix = prefix[: prefix.rfind(".", 0, -1) + 1]
        return prefixes

    @cached_property
    def kept_as_passed(self) -> set[str]:
        """The sites whose values are kept as they pass, all of them."""
        return {
            name for name, reads in self.reads.items()
            if len(reads) == 1 and reads[0].whole and name not in self.edits
            and not name.endswith((*MATRIX_SITES, *CONTEXT_SITES))
        }  # fmt: skip

    @cached_property
    def of_row(self) -> set[str]:
        """The sites that are read at the positions of decoder (or only) rows: not what is computed of a source once."""
        return {name for name in self.reads if not name.startswith("encoder.") and not self.sites[name].of_source}

    @cached_property
    def of_steps(self) -> list[str]:
        """Those that each step of a generation reaches within the decoder, in this order: not the logits."""
        return [name for name in self.sites if name in self.of_row and name != "logits"]

    @cached_property
    def reads_source(self) -> bool:
        """Whether something is read that is computed of a source once."""
        return len(self.of_row) < len(self.reads)

    @cached_property
    def why_modules(self) -> str | None:
        """The reason why native steps cannot serve this plan; None where they can."""
        if self.edits:
            return f"an edit is made at {next(iter(self.edits))}"
        inside = [name for name in self.reads if self.sites[name].leaf in (*MATRIX_SITES, *CONTEXT_SITES)]
        return f"{inside[0]} is read, which the native step does not keep" if inside else None


def select(at: Selection, positions: Sequence[int]) -> list[int]:
    """Indices into `positions` (absolute, ascending) that `at` chooses; what is negative counts from behind the last
    of them, and chooses nothing, or begins a slice at 0, where it is before 0."""
    if at is None:
        return list(range(len(positions)))
    end = positions[-1] + 1 if positions else 0
    chosen: Collection[int]
    if isinstance(at, slice):
        start, stop = (x if x is None or x >= 0 else max(0, x + end) for x in (at.start, at.stop))
        chosen = range(start or 0, 1 << 62 if stop is None else stop, at.step or 1)
    else:
        chosen = {x if x >= 0 or x + end < 0 else x + end for x in _numbers_of(at)}
    return [i for i, position in enumerate(positions) if position in chosen]


def _numbers_of(at: Selection) -> list[int]:
    if isinstance(at, slice):
        return [number for number in (at.start, at.stop) if number is not None]
    return [] if at is None else [at] if isinstance(at, int) else list(at)


def _as_list(value: object, kind: Any, requirement: str) -> Sequence[Any]:
    """The items that are given, one or a list.  Raises ProbeError for anything that is not of this kind."""
    items = [value] if isinstance(value, kind) else value
    if (
        isinstance(items, bytes | str | range)
        or not isinstance(items, Sequence)
        or not all(isinstance(item, kind) for item in items)
    ):
        raise ProbeError(f"{requirement}, not {shown(value)}")
    return items


def _dtype(read: Read) -> torch.dtype | None:
    """Raises ProbeError for a dtype that is none of floating point."""
    try:
        return None if read.dtype is None else compute_dtype(read.dtype)
    except InputError as error:
        raise ProbeError(f"the read at {read.site}: {error}") from None


def _read(site: Site, read: Read, dtype: torch.dtype | None, *, grad: bool) -> Read:
    """The read at one site.  Raises ProbeError for a reduction that the site cannot serve, and for a gradient of what
    is not kept as it is."""
    items, at, heads = _selection(site, read, from_end=True)
    grad, reduce = read.grad or grad, read.reduce
    check_reduction(site, reduce)
    if grad and (dtype is not None or reduce is not None):
        what = "dtype=" if dtype is not None else "reduce="
        raise ProbeError(f"{site.name}: grad=True keeps the tensor that the forward goes on with; leave {what} out")
    if isinstance(reduce, Statistics) and dtype is not None:
        raise ProbeError(f"{site.name}: statistics are kept in fp32; leave dtype= out")
    return Read(site.name, items, at, heads, grad, None, dtype, reduce)


def _selection(site: Site, chosen: Read | Edit, *, from_end: bool = False) -> tuple[Selection, Selection, Selection]:
    """The items, positions and heads of a read or an edit at one site, checked."""
    if chosen.heads is not None and site.heads is None:
        raise ProbeError(f"{site.name} has no heads; leave heads= out")
    range_of_heads = f"{site.name} has heads 0..{(site.heads or 1) - 1}"
    heads = _indices(chosen.heads, "heads", range_of_heads)
    if isinstance(heads, slice) and not range(site.heads or 1)[heads]:
        raise ProbeError(f"{range_of_heads}, and heads={shown(chosen.heads)} chooses none of them")
    numbers = [] if isinstance(heads, slice) else _numbers_of(heads)
    if len(numbers) > len(set(numbers)):
        raise ProbeError(f"heads={shown(chosen.heads)} names a head twice")
    for head in numbers:
        if head >= (site.heads or 1):
            raise ProbeError(f"{range_of_heads}, not {head}")
    last = "positions are absolute and count from 0, so the last token of a row is at=len(ids) - 1"
    at = _indices(chosen.at, "at", None if from_end else last)
    return _indices(chosen.items, "items", "rows count from 0"), at, heads


def _indices(at: Selection, what: str, hint: str | None) -> Selection:
    """`at` with plain integers.  Raises ProbeError for anything else, and with this hint for numbers below 0."""
    if at is None:
        return None
    argument_text = f"{what}={shown(at)}"
    if isinstance(at, Sequence) and not at:
        raise ProbeError(f"{argument_text} chooses nothing; leave it out to choose all")
    parts: object = at
    if isinstance(at, slice):
        parts = [at.start or 0, at.stop or 0, 1 if at.step is None else at.step]
    numbers = integers(parts, argument_text)
    if isinstance(at, slice) and numbers[2] < 1:
        raise ProbeError(f"{argument_text}: the step of a slice must be 1 or more")
    if hint is not None and min(numbers, default=0) < 0:
        raise ProbeError(f"{argument_text}: {hint}")
    if isinstance(at, slice):
        return slice(numbers[0], None if at.stop is None else numbers[1], numbers[2])
    return tuple(numbers) if isinstance(at, Sequence) else numbers[0]


def _check_width(site: Site, change: Edit) -> None:
    """Raise ProbeError for a value of `add` or `put` that is as wide as no vector of the site."""
    if not isinstance(change.fn, Put) or site.per_key or not change.fn.value.dim():
        return
    shape, width = change.fn.value.shape, site.width // (site.heads or 1)
    if shape[-1] not in (1, width):
        raise ProbeError(
            f"the edit at {site.name}: its value has shape {tuple(shape)}, and a vector there has {width} numbers"
            + (" a head" if site.heads else "")
        )
