"""Keys and values that outlive a forward.

Every cache has one door, `extend(layer, k, v, rows)`, which takes the new keys in and gives back all that the new
queries may see.  A step begins with `begin`, extends each layer once with the same `rows`, and `advance(rows)` counts
it; until then the lengths stand, so no layer is special.  Row b of the batch is slot b.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.attention.rows import FlatKeys, Rows, SlotKeys
from triptych.errors import InputError, ProbeError

Keys = FlatKeys | SlotKeys


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer stores a token: `groups` keys of `width` and values of `value_width` numbers.

    window   the layer never looks `window` or more positions back; None keeps every token.
    """

    groups: int
    width: int
    value_width: int
    window: int | None = None


class NullCache:
    """Remembers nothing: training, encoders, scoring."""

    def begin(self, rows: Rows, provenance: str) -> None:
        pass

    def extend(self, layer: int, k: Float[Tensor, "N G K"], v: Float[Tensor, "N G Kv"], rows: Rows) -> Keys:
        return FlatKeys(k, v, rows)

    def advance(self, rows: Rows) -> None:
        pass


class Store(Protocol):
    """One layer's memory: `write` takes new tokens in, `extend` also gives what their queries may see."""

    def write(self, k: Tensor, v: Tensor, rows: Rows) -> None: ...
    def extend(self, k: Tensor, v: Tensor, rows: Rows) -> Keys: ...
    def check_trim(self, lengths: Sequence[int]) -> None: ...
    def trim(self, lengths: Sequence[int]) -> None: ...
    def take(self, slots: Sequence[int]) -> None: ...
    def clone(self) -> Store: ...
    @property
    def nbytes(self) -> int: ...


class FullCache:
    """Every token of a layer: `[slot, G, capacity, K]`, where a key's place is its position.  Capacity doubles.

    Room not yet written is zero: a hidden key has weight 0, and 0 times garbage may be NaN.
    """

    def __init__(
        self, spec: LayerSpec, slots: int, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.k = torch.zeros(slots, spec.groups, capacity, spec.width, dtype=dtype, device=device)
        self.v = torch.zeros(slots, spec.groups, capacity, spec.value_width, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, k: Tensor, v: Tensor, rows: Rows) -> None:
        end = max(rows.ends)
        if end > self.k.shape[2]:
            capacity = max(end, 2 * self.k.shape[2])
            self.k, self.v = (_grown(x, capacity) for x in (self.k, self.v))
        for store, new in ((self.k, k), (self.v, v)):
            _write(store, new, rows)

    def extend(self, k: Tensor, v: Tensor, rows: Rows) -> Keys:
        self.write(k, v, rows)
        end = max(rows.ends)
        return SlotKeys(self.k[:, :, :end].to(k.dtype), self.v[:, :, :end].to(v.dtype), rows.ends)

    def check_trim(self, lengths: Sequence[int]) -> None:
        pass

    def trim(self, lengths: Sequence[int]) -> None:
        pass

    def take(self, slots: Sequence[int]) -> None:
        index = torch.tensor(list(slots), device=self.k.device)
        self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)

    def clone(self) -> FullCache:
        twin = copy(self)
        twin.k, twin.v = self.k.clone(), self.v.clone()
        return twin


class WindowCache:
    """The last tokens of a layer in a ring: position p stands at place `p % ring`.

    The ring holds `window + slack` tokens; `slack` is how far a trim may go back (beyond one) and how long a chunk may
    be before the old ring is set beside it for one call.
    """

    def __init__(self, spec: LayerSpec, slots: int, slack: int, dtype: torch.dtype, device: torch.device | str) -> None:
        assert spec.window is not None
        self.window, self.ring = spec.window, spec.window + slack
        self.k = torch.zeros(slots, spec.groups, self.ring, spec.width, dtype=dtype, device=device)
        self.v = torch.zeros(slots, spec.groups, self.ring, spec.value_width, dtype=dtype, device=device)
        self.high = [0] * slots  # the furthest each slot ever was: what stands `ring` behind it is overwritten

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def extend(self, k: Tensor, v: Tensor, rows: Rows) -> Keys:
        fits = rows.longest - 1 <= self.ring - self.window  # the first query's oldest key survives the last write
        if not fits:
            old = SlotKeys(self.k.clone(), self.v.clone(), rows.past, self._positions(rows.past))
        self.write(k, v, rows)
        if not fits:
            return _beside(old, k, v, rows)
        places = (self.ring,) * len(rows)
        return SlotKeys(self.k.to(k.dtype), self.v.to(v.dtype), places, self._positions(rows.ends))

    def write(self, k: Tensor, v: Tensor, rows: Rows) -> None:
        """The last `ring` of the new tokens, so that no place is written twice."""
        row, position = rows.row_of(k.device), rows.positions(k.device)
        if rows.longest > self.ring:
            kept = position >= torch.tensor(rows.ends, device=k.device)[row] - self.ring
            k, v, row, position = k[kept], v[kept], row[kept], position[kept]
        self.k[row, :, position % self.ring] = k.to(self.k.dtype)
        self.v[row, :, position % self.ring] = v.to(self.v.dtype)
        self.high = [max(high, end) for high, end in zip(self.high, rows.ends, strict=True)]

    def _positions(self, lengths: Sequence[int]) -> Tensor:
        """`[slot, ring]`: the last position below the length that belongs at each place, -1 for none.

        After a trim a place may hold a forgotten token instead; `check_trim` sees to it that the position said here is
        then behind every window to come.
        """
        length = torch.tensor(list(lengths), device=self.k.device)[:, None]
        place = torch.arange(self.ring, device=self.k.device)
        position = length - 1 - (length - 1 - place) % self.ring
        return position.clamp(min=-1)

    def check_trim(self, lengths: Sequence[int]) -> None:
        for slot, (high, length) in enumerate(zip(self.high, lengths, strict=True)):
            if length and max(high - self.ring, 0) > max(length - self.window + 1, 0):
                raise InputError(
                    f"trim: slot {slot} cannot go back from {high} to {length}, a window layer keeps {self.ring} "
                    f"tokens; make the cache with slack={high - length - 1}"
                )

    def trim(self, lengths: Sequence[int]) -> None:
        self.high = [high if length else 0 for high, length in zip(self.high, lengths, strict=True)]

    def take(self, slots: Sequence[int]) -> None:
        index = torch.tensor(list(slots), device=self.k.device)
        self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)
        self.high = [self.high[slot] for slot in slots]

    def clone(self) -> WindowCache:
        twin = copy(self)
        twin.k, twin.v, twin.high = self.k.clone(), self.v.clone(), list(self.high)
        return twin


class Cache:
    """One store a layer, full or window, and the lengths they share.

    layers       what each layer stores.
    slots        rows of the batch.
    capacity     tokens a full layer has room for before it doubles.
    slack        tokens that `trim` may take back from a window layer, beyond one.
    provenance   hash of the edits this cache is written under; a cache cannot mix them.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        slots: int,
        *,
        capacity: int = 64,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        provenance: str = "",
    ) -> None:
        self.dtype, self.provenance = dtype, provenance
        self.lengths: tuple[int, ...] = (0,) * slots
        self.stores: list[Store] = [
            FullCache(spec, slots, capacity, dtype, device)
            if spec.window is None
            else WindowCache(spec, slots, slack, dtype, device)
            for spec in layers
        ]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(store.nbytes for store in self.stores)

    def begin(self, rows: Rows, provenance: str) -> None:
        """Open a step: `rows` go on where the cache ends, under the edits it was written under.

        Raises InputError when they do not, ProbeError under other edits than before.
        """
        if rows.past != self.lengths:
            raise InputError(f"cache holds {list(self.lengths)} tokens, the rows begin at {list(rows.past)}")
        if provenance != self.provenance and any(self.lengths):
            raise ProbeError(
                f"this cache was written under edits {self.provenance or 'none'!r}, not {provenance or 'none'!r}: "
                "start again with an empty one"
            )
        self.provenance = provenance

    def extend(self, layer: int, k: Float[Tensor, "N G K"], v: Float[Tensor, "N G Kv"], rows: Rows) -> Keys:
        """Write one layer's new keys and values in place; all that its new queries may see.

        A first prefill gives the fresh tensors back, so it needs no mask and keeps their gradient.
        """
        store = self.stores[layer]
        if any(rows.past):
            return store.extend(k.detach(), v.detach(), rows)
        store.write(k.detach(), v.detach(), rows)
        return FlatKeys(k, v, rows)

    def advance(self, rows: Rows) -> None:
        """Count a step, once every layer was extended with it."""
        self.lengths = rows.ends

    def trim(self, lengths: Sequence[int]) -> None:
        """Forget each slot's tokens from `lengths[slot]` on.

        Raises InputError when a slot is shorter already, or a window layer no longer holds what came before.
        """
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)
        ):
            raise InputError(f"trim to {list(lengths)}: the cache holds {list(self.lengths)}")
        for store in self.stores:
            store.check_trim(lengths)
        for store in self.stores:
            store.trim(lengths)
        self.lengths = tuple(lengths)

    def filter(self, slots: Sequence[int]) -> None:
        """Keep these slots in this order; a slot may repeat (beams)."""
        if list(slots) == list(range(len(self.lengths))):
            return
        for store in self.stores:
            store.take(slots)
        self.lengths = tuple(self.lengths[slot] for slot in slots)

    def fork(self) -> Cache:
        """An independent copy."""
        twin = copy(self)
        twin.stores = [store.clone() for store in self.stores]
        return twin


@dataclass
class CrossCache:
    """An encoder's keys and values, written once a layer and read at every step of the decoder.

    Sources of one length stay flat; ragged ones are laid out in slots once, so that a step neither copies nor buckets.
    """

    held: dict[int, Keys] = field(default_factory=dict)

    def fill(self, layer: int, k: Float[Tensor, "N G K"], v: Float[Tensor, "N G Kv"], rows: Rows) -> Keys:
        """Take a layer's keys of the source rows.  Raises InputError when the layer was filled before."""
        if layer in self.held:
            raise InputError(
                f"cross-attention layer {layer}: its keys are already here; a new source needs a new cache"
            )
        self.held[layer] = FlatKeys(k, v, rows) if rows.equal else _slotted(k, v, rows)
        return self.held[layer]

    def keys(self, layer: int) -> Keys:
        return self.held[layer]

    def __contains__(self, layer: int) -> bool:
        return layer in self.held

    @property
    def nbytes(self) -> int:
        return sum(keys.k.nbytes + keys.v.nbytes for keys in self.held.values())

    def filter(self, slots: Sequence[int]) -> None:
        """Keep the sources of these rows in this order; a row may repeat (beams)."""
        self.held = {layer: _taken(keys, slots) for layer, keys in self.held.items()}

    def fork(self) -> CrossCache:
        """Another cache of the same sources, which are never written again."""
        return CrossCache(dict(self.held))


def _grown(x: Tensor, capacity: int) -> Tensor:
    larger = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
    larger[:, :, : x.shape[2]] = x
    return larger


def _write(store: Tensor, new: Tensor, rows: Rows) -> None:
    """`[N, G, K]` to the rows' positions in `[slot, G, capacity, K]`."""
    if rows.equal and len(set(rows.past)) == 1:
        new = new.view(len(rows), -1, *new.shape[1:]).transpose(1, 2)
        store[:, :, rows.past[0] : rows.ends[0]] = new
    else:
        store[rows.row_of(new.device), :, rows.positions(new.device)] = new.to(store.dtype)


def _slotted(k: Tensor, v: Tensor, rows: Rows) -> SlotKeys:
    row, place = rows.row_of(k.device), rows.positions(k.device)
    laid = []
    for x in (k, v):
        room = x.new_zeros(len(rows), rows.longest, *x.shape[1:])
        laid.append(room.index_put((row, place), x).transpose(1, 2))
    return SlotKeys(laid[0], laid[1], rows.lengths)


def _beside(old: SlotKeys, k: Tensor, v: Tensor, rows: Rows) -> SlotKeys:
    """The old ring and the new tokens as one set of slots with positions."""
    new = _slotted(k, v, _from_zero(rows))
    assert old.positions is not None
    place = torch.arange(rows.longest, device=k.device)
    past, length = (torch.tensor(x, device=k.device)[:, None] for x in (rows.past, rows.lengths))
    positions = (past + place).masked_fill(place >= length, -1)
    return SlotKeys(
        torch.cat((old.k.to(k.dtype), new.k), 2),
        torch.cat((old.v.to(v.dtype), new.v), 2),
        (old.k.shape[2] + rows.longest,) * len(rows),
        torch.cat((old.positions, positions), 1),
    )


def _from_zero(rows: Rows) -> Rows:
    """The same rows, counted from their own first token."""
    return replace(rows, past=())


def _taken(keys: Keys, slots: Sequence[int]) -> Keys:
    if isinstance(keys, SlotKeys):
        index = torch.tensor(list(slots), device=keys.k.device)
        lengths = tuple(keys.lengths[slot] for slot in slots)
        return SlotKeys(keys.k.index_select(0, index), keys.v.index_select(0, index), lengths)
    ks, vs = keys.rows.split(keys.k), keys.rows.split(keys.v)
    k, v = (torch.cat([x[slot] for slot in slots]) for x in (ks, vs))
    return FlatKeys(k, v, keys.rows.take(slots))
