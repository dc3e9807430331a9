"""The keys that a query may see: a closed, symbolic algebra of masks.

A mask is a predicate on a query and a key, each known by its absolute *position*, its *index* in the row, and
the *document* it belongs to.  Nothing here is a tensor: `visible` is the definition, written with operators
alone, so it runs on NumPy arrays, on torch tensors and on plain integers, and `triptych.attention` lowers the
same objects to whatever its fast paths understand.

Conventions
    `window(back)` counts the query itself: `window(512)` leaves 512 keys visible.
    A key at a negative position is an empty cache slot and is never visible; that rule needs no mask.
    A query that sees nothing gets exactly 0.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any, NoReturn, SupportsIndex

from triptych.arguments import checked, integer, listed
from triptych.errors import ArgumentError, InputError, shown
from triptych.migration_hints import ConstructorOfOthers, Explained


@dataclass(frozen=True)
class Points:
    """Queries (or keys) as arrays that broadcast against the other side's: `[..., T, 1]` or `[..., 1, S]`."""

    position: Any
    index: Any = None  # place in the row's storage; the position when absent
    document: Any = None  # packing boundary; None is one document a row
    per_row: Callable[[Sequence[int]], Any] = field(default=lambda values: values[0])  # row values -> [B, 1, 1, 1]

    @property
    def slot(self) -> Any:
        return self.position if self.index is None else self.index


@dataclass(frozen=True, eq=False)
class Mask(Explained):
    """The keys that a query may see; made by `causal()`, `window(128)` and the other functions, not by its constructor.

    `a & b` shows a key that both show, `a | b` one that either shows.  `a and b`, and a mask combined with anything but
    a mask, raise InputError.  Masks are equal by value; those made by `dense` are equal only to themselves.
    """

    causal = ConstructorOfOthers("triptych.causal()")

    def visible(self, q: Points, k: Points) -> Any:
        """Boolean array, true where query `q` may see key `k`: the definition of the mask.

        With positions `q` [T, 1] and `k` [1, S], `triptych.spec.masks.Points` of NumPy arrays, tensors or integers, the
        result is [T, S].
        """
        if not isinstance(q, Points) or not isinstance(k, Points):
            raise InputError(f"visible({shown(q)}, {shown(k)}): give triptych.spec.masks.Points of positions twice")
        return self._visible(q, k)

    def _visible(self, q: Points, k: Points) -> Any:
        raise InputError(f"{type(self).__name__} is no mask by itself; write triptych.causal(), window(128) and so on")

    def __and__(self, other: Mask) -> Mask:
        """A key is visible where both masks show it.  Raises InputError for anything but a mask."""
        return _join(And, self, other)

    def __or__(self, other: Mask) -> Mask:
        """A key is visible where either mask shows it.  Raises InputError for anything but a mask."""
        return _join(Or, self, other)

    __rand__, __ror__ = __and__, __or__  # tensor & mask

    def __add__(self, other: object) -> NoReturn:
        """Raises ArgumentError, as other operators: masks are combined with `&` and `|`."""
        raise ArgumentError("masks are combined with & (both show the key) and | (either shows it)")

    __radd__ = __sub__ = __xor__ = __lt__ = __add__

    def __invert__(self) -> NoReturn:
        """Raises InputError: masks have no complement."""
        raise InputError("a mask has no complement; write triptych.dense(~array) for one of booleans")

    def __bool__(self) -> NoReturn:
        """Raises InputError: `a and b` would be one of the two."""
        raise InputError("a mask is neither true nor false; combine masks with & and |, not with `and` and `or`")


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key, as in an encoder."""

    def _visible(self, q: Points, k: Points) -> Any:
        return (k.position == k.position) & (q.position == q.position)


@dataclass(frozen=True)
class Causal(Mask):
    """Keys at the query's position or before it."""

    def _visible(self, q: Points, k: Points) -> Any:
        return k.position <= q.position


@dataclass(frozen=True)
class Window(Mask):
    """Keys fewer than `back` positions behind (self included) and at most `ahead` positions in front."""

    back: int
    ahead: int = 0

    def __post_init__(self) -> None:
        if integer("back", self.back) < 1 or integer("ahead", self.ahead) < 0:
            problem = "back must be >= 1 and ahead >= 0, both whole numbers"
            raise InputError(f"window({self.back}, ahead={self.ahead}): {problem}")

    def _visible(self, q: Points, k: Points) -> Any:
        distance = q.position - k.position
        return (distance < self.back) & (distance >= -self.ahead)


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `lengths` positions of each row, visible to all of it: `causal() | prefix(n)` is a prefix LM."""

    lengths: tuple[int, ...]  # one for all rows, or one a row

    def _visible(self, q: Points, k: Points) -> Any:
        return (k.position < k.per_row(self.lengths)) & (q.position == q.position)


@dataclass(frozen=True)
class SameDocument(Mask):
    """Keys of the query's own document (packed rows)."""

    def _visible(self, q: Points, k: Points) -> Any:
        return Full()._visible(q, k) if q.document is None or k.document is None else q.document == k.document


@dataclass(frozen=True)
class BlockSparse(Mask):
    """Fixed block pattern (Child et al. 2019, Zaheer et al. 2020): blocks of `block` positions, query block `i`
    sees key block `j` when `|i - j| < local`, when `j < first`, when `every` divides `j + 1`, or, with `powers`,
    when `|i - j|` is a power of two (Li et al. 2019)."""

    block: int
    local: int = 1
    first: int = 0
    every: int = 0
    powers: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("local", 1), ("first", 0), ("every", 0)):
            integer(name, getattr(self, name), least)
        if not isinstance(self.powers, bool):
            raise InputError(f"{self}: powers must be true or false")

    def distances(self, blocks: int) -> list[int]:
        """Each `i - j` at which a query block sees a key block, of rows of so many blocks."""
        near = set(range(min(self.local, blocks)))
        if self.powers:
            near |= {1 << n for n in range(blocks.bit_length()) if 1 << n < blocks}
        return sorted(near | {-distance for distance in near})

    def visible_to_all(self, blocks: int) -> list[int]:
        """The key blocks that every query block sees, of so many."""
        every = range(self.every - 1, blocks, self.every) if self.every else ()
        return sorted({*range(min(self.first, blocks)), *every})

    def _visible(self, q: Points, k: Points) -> Any:
        i, j = q.position // self.block, k.position // self.block
        visible = ((i - j) < self.local) & ((j - i) < self.local)
        if self.first:
            visible = visible | (j < self.first)
        if self.every:
            visible = visible | ((j + 1) % self.every == 0)
        if self.powers:
            visible = visible | ((abs(i - j) & (abs(i - j) - 1)) == 0)
        return visible


@dataclass(frozen=True)
class Keys(Mask):
    """Only the first `lengths[b]` stored keys of row `b` exist; the rest is padding."""

    lengths: tuple[int, ...]

    def _visible(self, q: Points, k: Points) -> Any:
        return (k.slot < k.per_row(self.lengths)) & (q.position == q.position)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array `[T, S]`, `[B, T, S]` or `[B, H, T, S]`, true where visible; it has no symbolic form."""

    array: Any

    def _visible(self, q: Points, k: Points) -> Any:
        return self.array


@dataclass(frozen=True)
class And(Mask):
    parts: tuple[Mask, ...]

    def _visible(self, q: Points, k: Points) -> Any:
        return reduce(operator.and_, (part.visible(q, k) for part in self.parts))


@dataclass(frozen=True)
class Or(Mask):
    parts: tuple[Mask, ...]

    def _visible(self, q: Points, k: Points) -> Any:
        return reduce(operator.or_, (part.visible(q, k) for part in self.parts))


def _join(kind: type[And] | type[Or], a: object, b: object) -> Mask:
    """`(x & y) & z` and `x & (y & z)` are the same three parts, `x & x` is `x`; `full & x` is `x`, and `full | x`
    is `full`."""
    parts: list[Mask] = []
    for side in (a, b):
        if not isinstance(side, Mask):
            kind_of = type(side).__name__
            raise InputError(f"a mask is combined with masks, not with {kind_of}; see triptych.dense(array)")
        for part in side.parts if isinstance(side, kind) else (side,):
            if part not in parts and not (kind is And and isinstance(part, Full)):
                parts.append(part)
    if not parts or (kind is Or and Full() in parts):
        return Full()
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _lengths(name: str, value: object) -> tuple[int, ...]:
    """One length for all rows, or one per row, as plain integers."""
    several = isinstance(value, Iterable) and getattr(value, "ndim", None) != 0
    every = listed(value, f"{name}(n)") if several else [value]
    lengths = tuple(integer(f"{name}(n): n", length, 0) for length in every)
    if not lengths:
        raise InputError(f"{name}([]): give one length, a whole number from 0, or one for each row")
    return lengths


@checked
def full() -> Mask:
    """Every query sees every key, as in an encoder (Vaswani et al. 2017, section 3.2.3)."""
    return Full()


@checked
def causal() -> Mask:
    """A query sees the keys at its own absolute position and before it, as in a decoder (Vaswani et al. 2017)."""
    return Causal()


@checked
def window(back: int, ahead: int = 0) -> Mask:
    """A query sees keys fewer than `back` positions behind it, itself included, and at most `ahead` after it.

    `causal() & window(4096)` is the sliding window of Mistral (Jiang et al. 2023); `window(w + 1, ahead=w)` is one on
    both sides (Longformer, Beltagy et al. 2020).  Raises InputError for `back` below 1, `ahead` below 0, and numbers
    that are not whole.
    """
    return Window(back, ahead)


@checked
def prefix(n: SupportsIndex | Iterable[SupportsIndex]) -> Mask:
    """Every query of a row sees the first `n` positions: one number for all rows, or one for each row.

    `causal() | prefix(n)` is a prefix language model (Raffel et al. 2020, section 3.2).  Raises InputError for a length
    that is not a whole number from 0.
    """
    return Prefix(_lengths("prefix", n))


@checked
def same_document() -> Mask:
    """A query sees the keys of its own document, where several documents are packed into one row.

    `attend` takes the documents as `q_doc` and `k_doc`, and raises InputError where there are none.
    """
    return SameDocument()


@checked
def block_sparse(block: int, *, local: int = 1, first: int = 0, every: int = 0, powers: bool = False) -> Mask:
    """A fixed pattern over blocks of `block` positions (Child et al. 2019; Zaheer et al. 2020): block i of the queries
    sees block j of the keys where any of these holds.

    local    |i - j| < `local`: neighbours on each side, itself included.
    first    j < `first`: the first blocks of the row.
    every    `every` divides j + 1; 0 is never.
    powers   |i - j| is a power of two (Li et al. 2019).

    It is not causal by itself: combine it with `causal()`.  Raises InputError for numbers out of range.
    """
    return BlockSparse(block, local, first, every, powers)


@checked
def keys(lengths: SupportsIndex | Iterable[SupportsIndex]) -> Mask:
    """A query of row b sees the first `lengths[b]` stored keys of the row; those after them are padding.

    One number for all rows, or one for each row.  `prefix` compares positions, this the places of keys in the tensor.
    Raises InputError for a length that is not a whole number from 0.
    """
    return Keys(_lengths("keys", lengths))


@checked
def dense(array: Any) -> Mask:
    """A boolean array or tensor `[T, S]`, `[B, T, S]` or `[B, H, T, S]`, true where a key is visible.

    Kernels read all of it, where they can skip what a symbolic mask hides.  `attend` raises InputError for another
    dtype and for a shape that does not fit its scores.
    """
    if isinstance(array, str | bytes) or not hasattr(array, "__len__"):
        raise InputError(f"dense({array!r}): give an array of booleans, true where a key is visible")
    return Dense(array)


def mask_text(mask: Mask) -> str:
    """A mask as Python code: `causal & window(back=512)`."""
    if isinstance(mask, And | Or):
        return (" & " if isinstance(mask, And) else " | ").join(map(mask_text, mask.parts))
    function = re.sub(r"(?<!^)(?=[A-Z])", "_", type(mask).__name__).lower()
    arguments = ", ".join(
        f"{item.name}={value}" for item in fields(mask) if (value := getattr(mask, item.name)) != item.default
    )
    return f"{function}({arguments})" if arguments else function
