"""The storage of values in a trace: pieces for each row and site, values recomputed on access, and reductions.

Beam search makes several rows of one, each with a key of its own (`Branches`); values of rejected guesses are dropped.

Some values are computed again when somebody looks at them, instead of being kept.  A module that writes
`taps.computed(function, *inputs)` says that a value is this function of these tensors and of nothing else.  Where the
trace keeps all of the inputs, it keeps the function in place of the value: the same function of the same tensors gives
the same bits.  A forward that somebody replaced says nothing of the kind unless it does so itself, and what passes
there is kept.

A read may also keep a reduction in place of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from triptych.arguments import as_index, checked_methods
from triptych.attention import KeyLabels, Rows
from triptych.errors import ProbeError, nearest, shown
from triptych.native.step import STATISTICS_TOP
from .sites import CONTEXT_SITES, Site, leaf_of, matrix

REDUCTIONS = ("mean", "norm", "mean_heads")
RowLabels = Sequence[Sequence[int]] | None
How = Literal["tokens", "queries", "sum", "mean"]


@dataclass(frozen=True, eq=False)
class DeferredPiece:
    """A piece that is made when somebody looks at it, and its bytes then.  `place` is equal for pieces that are one
    tensor; None where it is no other's."""

    make: Callable[[], Tensor]
    nbytes: int
    place: Callable[[], Hashable] | None = None


@dataclass
class Record:
    """One row's pieces at one site, in the order in which they were read.

    how   what a piece is: "tokens" `[t, ...]`, "queries" `[h, t, ...]`, or the "sum" or "mean" of what was read so far,
          whose last dimension grows with the keys in a generation; of a mean the pieces hold the sum.  Behind the sum
          stand what may be dropped again, a piece for each position.
    dtype what a mean is given in: its sum is kept in fp32 or better, where it can neither overflow nor lose digits.
    """

    how: How = "tokens"
    positions: list[tuple[int, ...]] = field(default_factory=list)  # queries' absolute positions of each piece
    pieces: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype | None = None
    later: list[DeferredPiece] = field(default_factory=list)  # behind the pieces

    def sizes(self) -> dict[Hashable, int]:
        """The bytes of each piece by where it lies, which several records may share."""
        pieces: dict[Hashable, int] = {(piece.data_ptr(), piece.nbytes): piece.nbytes for piece in self.pieces}
        return pieces | {id(one) if one.place is None else one.place(): one.nbytes for one in self.later}

    @property
    def sums(self) -> bool:
        return self.how in ("sum", "mean")

    def add(self, positions: tuple[int, ...], value: Tensor, *, apart: bool = False) -> None:
        """Add a piece; of a sum `apart` from what it will be added to."""
        self.make()
        self.positions.append(positions)
        self.pieces.append(value)
        if not apart:
            self._add_up()

    def make(self) -> None:
        """Compute the pieces that are made later."""
        self.pieces += [piece.make() for piece in self.later]
        self.later.clear()

    def _add_up(self) -> None:
        while self.sums and len(self.pieces) > 1:
            last, before = self.pieces.pop(), self.pieces.pop()
            self.pieces.append(pad(before, (0, last.shape[-1] - before.shape[-1])) + last)

    def extend(self, later: Record) -> None:
        """Add what the same row had at later positions."""
        self.make()
        later.make()
        self.positions += later.positions
        self.pieces += later.pieces
        self._add_up()

    def cut(self, length: int, *, keys: bool) -> None:
        """Drop the newest values, those at positions from `length` on; with `keys` in the last dimension, the numbers
        of keys there too.  The positions of a sum that are dropped were added apart."""
        self.make()
        while self.positions and self.positions[-1][-1:] >= (length,):
            at, piece = self.positions.pop(), self.pieces.pop()
            left = sum(position < length for position in at)
            if left:
                self.positions.append(at[:left])
                self.pieces.append(piece[:, :left] if self.how == "queries" else piece[:left])
        if keys:
            self.pieces = [piece[..., :length] for piece in self.pieces]
        self._add_up()

    def joined(self, leaf: str) -> Tensor:
        self.make()
        if self.how == "mean":
            mean = self.pieces[0] / len(self.at())
            return mean if self.dtype is None else mean.to(self.dtype)
        if len(self.pieces) == 1 and not self.pieces[0].is_inference():
            return self.pieces[0]  # itself: a tensor read with its gradient
        if self.how != "queries":
            return torch.cat(self.pieces)
        if self.pieces[0].dim() == 2:
            return torch.cat(self.pieces, dim=1)
        longest = max(piece.shape[-1] for piece in self.pieces)  # [h, t, S] with S growing from step to step
        fill = float("-inf") if leaf == "scores" else 0.0
        return torch.cat([pad(p, (0, longest - p.shape[-1]), value=fill) for p in self.pieces], dim=1)

    def at(self) -> tuple[int, ...]:
        return tuple(p for piece in self.positions for p in piece)


Records = dict[str, dict[int, Record]]
"""For each site the records of its keys: a row of the batch is kept under its number."""


class Branches:
    """The keys under which a search keeps what its rows read, each a number below 0 that belongs to a row of the batch.

    A row that goes on in several ways is not copied: what each way reads from then on has a key of its own, and the
    path of a row is the list of keys from the first token on.

    guessed   keys whose newest values may be dropped again.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self.items: dict[int, int] = {}
        self.guessed: Collection[int] = ()

    def item(self, key: int) -> int:
        """The row of the batch that a key belongs to."""
        return self.items.get(key, key)

    def new(self, item: int) -> int:
        """A new key for row `item` of the batch."""
        key = -1 - len(self.items)
        self.items[key] = item
        return key

    def keep_only(self, paths: Iterable[Sequence[int]]) -> None:
        """Drop what belongs to none of these paths, and all contexts (`k_ctx`, `v_ctx`) but the last of each."""
        paths = list(paths)
        alive = {key for path in paths for key in path}
        for site, rows in self.records.items():
            for key in [key for key in rows if key < 0 and key not in alive]:
                del rows[key]
            if rows and leaf_of(site) in CONTEXT_SITES:
                kept = [[key for key in path if key in rows] for path in paths]
                last = {keys[-1] for keys in kept if keys}
                for key in {key for keys in kept for key in keys} - last:
                    del rows[key]

    def settle(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Make one record a site of the keys of each row's path, in a tensor of its own, and drop all other keys.
        Sites whose pieces are the same have one tensor."""
        joined: dict[tuple[tuple[int, torch.Size], ...], Tensor] = {}
        for site, rows in self.records.items():
            for item, path in paths.items():
                parts = [rows.pop(key) for key in path if key in rows]
                if not parts:
                    continue
                whole = parts[-1] if leaf_of(site) in CONTEXT_SITES else parts[0]
                for later in parts[1:] if whole is parts[0] else ():
                    whole.extend(later)
                if not whole.sums:
                    same = tuple((piece.data_ptr(), piece.shape) for piece in whole.pieces)
                    if same not in joined:
                        joined[same] = whole.joined(leaf_of(site))
                    whole.positions, whole.pieces = [whole.at()], [joined[same]]
                rows[item] = whole
            for key in [key for key in rows if key < 0]:
                del rows[key]

    def cut(self, key: int, length: int, sites: Collection[str]) -> None:
        """Drop what was read at `sites`, and of their measures, under a key at positions from `length` on."""
        for name, rows in self.records.items():
            site, _, measure = name.partition(":")
            if key not in rows or site not in sites:
                continue
            per_key = matrix(site) and measure in ("", "received") and ".cross." not in site
            rows[key].cut(length, keys=per_key)
            if not rows[key].positions:
                del rows[key]


class Computation:
    """A value as a function of tensors that are kept, or of other computations; computed once."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Tensor | Computation], value: Tensor) -> None:
        self.function, self.inputs = function, inputs
        self.shape, self.nbytes = value.shape, value.nbytes
        self.versions = [_version(x) for x in inputs]
        self.value: Tensor | None = None
        self.version = 0

    def compute(self) -> Tensor:
        """The value.  Raises ProbeError where one of the tensors it is computed from was changed since it was read."""
        if self.value is None:
            for one, version in zip(self.inputs, self.versions, strict=True):
                if _version(one) != version:
                    raise ProbeError(
                        "a tensor of this trace was changed in place, and this value is computed from it; change a "
                        "clone(), or look at the values that follow from a tensor before changing it"
                    )
            with torch.inference_mode(False), torch.no_grad():
                inputs = [one.compute() if isinstance(one, Computation) else one.detach() for one in self.inputs]
                self.value = self.function(*inputs)
            self.version, self.inputs = self.value._version, []
        return self.value

    def row(self, row: int, rows: Rows) -> DeferredPiece:
        """What one row of the flat batch has of it."""

        def part() -> Tensor:
            whole = self.compute()
            return whole if len(rows) == 1 else rows.split(whole)[row]

        def place() -> Hashable:
            return (id(self), row) if self.value is None else (part().data_ptr(), part().nbytes)

        return DeferredPiece(part, self.nbytes // self.shape[0] * rows.lengths[row], place)


class Computations:
    """Which tensors of one forward passed a site where they are kept, and which were computed from such tensors."""

    def __init__(self) -> None:
        self.kept_tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a tensor that is kept -> True
        self.computations: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors, and their versions then

    def add(self, value: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        """`value` is `function(*inputs)`.  Not remembered unless all of these are kept, or computed from kept ones."""
        device = value.device.type
        casts = device != "meta" and torch.is_autocast_enabled(device)  # to another dtype than where it is looked at
        if value.is_inference() or casts or any(x is value for x in inputs):
            return
        sources = [self._computation_of(x) or (x if x in self.kept_tensors else None) for x in inputs]
        known = [x for x in sources if x is not None]
        if len(known) == len(inputs):
            self.computations[value] = Computation(function, known, value), value._version

    def kept_as(self, value: Tensor, rows: Rows) -> Tensor | Computation:
        """What to keep of a value that passes a site of these rows: the value, or how it is computed."""
        computation = self._computation_of(value)
        if computation is not None and value.shape[0] == rows.total:
            return computation
        self.kept_tensors[value] = True
        return value

    def _computation_of(self, value: Tensor) -> Computation | None:
        """How a tensor was computed; None where that is not known, or where it was written to since."""
        computation, version = self.computations.get(value, (None, -1))
        return None if computation is None or value._version != version else computation


def _version(one: Tensor | Computation) -> int:
    """The number of writes to a tensor; of a computation, of those to its value since it was computed."""
    if isinstance(one, Tensor):
        return one._version
    return 0 if one.value is None else one.value._version - one.version


@checked_methods
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
    delimiters: RowLabels = None
    documents: RowLabels = None

    def __post_init__(self) -> None:
        if as_index(self.top) not in range(STATISTICS_TOP + 1):
            raise ProbeError(f"top={shown(self.top)}: give a number of keys from 0 to {STATISTICS_TOP}")

    def labels(self, item: int, queries: Sequence[int], keys: int, device: torch.device) -> KeyLabels:
        """Those of one row for queries at these positions.  Tokens behind the end of what was given, such as
        generated ones, are no delimiters, and belong to no document.  Raises ProbeError for a row that has none."""
        marked, documents = _of_row(self.delimiters, item, "delimiters"), _of_row(self.documents, item, "documents")
        q_document = k_document = delimiters = None
        if marked is not None:
            delimiters = torch.tensor([bool(x) for x in _padded(marked, keys, 0)], device=device)
        if documents is not None:
            whole = _padded(documents, max(keys, *queries) + 1, -1)
            q_document = torch.tensor([whole[position] for position in queries], device=device)
            k_document = torch.tensor(_padded(documents, keys, -2), device=device)
        return KeyLabels(delimiters=delimiters, q_document=q_document, k_document=k_document)

    def nbytes(self, heads: int, positions: int, keys: int) -> int:
        """The bytes of one row at one site."""
        numbers = 4 + (self.delimiters is not None) + (self.documents is not None) + 2 * self.top
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
    by_key = matrix(site)
    if reduce == "norm":
        length: Tensor = torch.linalg.vector_norm(value, dim=-1)
        return length
    if reduce == "mean":
        return value.sum(1 if by_key else 0, keepdim=True)
    return value.mean(0 if by_key else 1, keepdim=True)


def _of_row(labels: RowLabels, item: int, what: str) -> Sequence[int] | None:
    if labels is None:
        return None
    if not hasattr(labels, "__len__") or item >= len(labels) or str in map(type, labels):
        raise ProbeError(f"{what}={shown(labels)} has none for row {item}; give a list for every row of the batch")
    return labels[item]


def _padded(labels: Sequence[int], length: int, fill: int) -> list[int]:
    return [*map(int, labels[:length]), *[fill] * (length - len(labels))]
