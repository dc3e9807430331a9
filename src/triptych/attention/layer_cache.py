"""The keys and values of one layer, in slots that `caches.Cache` gives out, and the types of numbers that it keeps.

Where a step writes and what a window drops are in `cache_steps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.errors import InputError, shown
from triptych.native.huge_pages import PAGE, HugePages
from triptych.native.step import PAGES_OF_CHUNK
from .rows import KeysAndValues

LEAST_IN_HUGE_PAGES = 2 * PAGE  # bytes of several stores together: less would leave most of a page unused


@dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """What one layer stores per token: `groups` keys of `width` and values of `value_width` numbers.

    window   the layer never looks `window` or more positions back; None keeps every token.  Older keys are
             overwritten in a ring (`cache_steps.RingStep`).
    sums     the layer keeps sums over all tokens in place of their keys and values (`cache_steps.py`).
    """

    groups: int
    width: int
    value_width: int
    window: int | None = None
    sums: bool = False


class Store:
    """The keys and values of one layer, in chunks of memory `[strips, G, places, length of a vector in `form`]`.  Room
    not yet written is zero: a hidden key has weight 0, and 0 times what is left there may be NaN.

    Where each token has a place, chunks are of one strip of pages (`pages.Pages`), as many as are added, or with
    `capacity` there is one chunk with a strip for each slot, `k` and `v`, whose memory moves when it grows.  So it is
    with rings and with sums.  Of a layer that keeps sums, `k` is `[slot, G, K, Kv]` and `v` `[slot, G, K, 1]`: a place
    is a feature, and the numbers are of fp32 or better, whatever the cache keeps of other layers.

    places   places of a slot that do not depend on how many tokens it holds; None where each token has its own.
    page     places of a page; None where each slot has a strip."""

    def __init__(
        self, layer: CachedLayer, form: StoredForm, device: torch.device | str, *, capacity: int = 0,
        page: int | None = None,
    ) -> None:  # fmt: skip
        self.widths = layer.width, layer.value_width
        self.places = layer.window
        if layer.sums:
            precision = torch.promote_types(form.computed, torch.float32)
            form, self.places, self.widths = StoredForm(precision, precision), layer.width, (layer.value_width, 1)
        self.layer, self.window, self.form, self.exact, self.device = layer, layer.window, form, form.exact, device
        self.page = None if self.places else page
        self.chunks: list[KeysAndValues] = []
        if self.page is None:
            self.chunks.append(self._zeros(0, self.places or capacity))

    def _zeros(self, strips: int, places: int, memory: HugePages | None = None) -> KeysAndValues:
        """A chunk of keys and values, in memory of `memory` where it is given."""
        form, shapes = self.form, [(strips, self.layer.groups, places, self.form.length(n)) for n in self.widths]
        with torch.inference_mode(False):  # so that any step may write to it
            if memory is None:
                k, v = (torch.zeros(shape, dtype=form.dtype, device=self.device) for shape in shapes)
            else:
                k, v = (memory.take(prod(shape) * form.dtype.itemsize).view(form.dtype).view(shape) for shape in shapes)
        return k, v

    @property
    def k(self) -> Tensor:
        """Keys of all slots, where each has a strip."""
        return self._strips[0]

    @property
    def v(self) -> Tensor:
        """Values of all slots, where each has a strip."""
        return self._strips[1]

    @property
    def _strips(self) -> KeysAndValues:
        assert self.page is None, "a store of pages has no strips"
        return self.chunks[0]

    def new_chunk(self, places: int, memory: HugePages | None = None) -> KeysAndValues:
        """A chunk of so many places of pages, in `memory` where it is given and the store is on the CPU."""
        on_cpu = torch.device(self.device).type == "cpu"
        return self._zeros(1, places, memory if on_cpu else None)

    def pages(self, first: int, end: int) -> KeysAndValues:
        """Keys and values [G, places, K or Kv] of pages [first, end) of one chunk, as they are kept."""
        assert self.page is not None
        chunk, at = divmod(first, PAGES_OF_CHUNK)
        here = slice(at * self.page, (at + end - first) * self.page)
        k, v = self.chunks[chunk]
        return k[0, :, here], v[0, :, here]

    def encode(self, k: Tensor, v: Tensor) -> KeysAndValues:
        """Keys [..., K] and values [..., Kv] as the store keeps them; without a gradient."""
        k, v = k.detach(), v.detach()
        return (k, v) if self.exact else (self.form.encode(k), self.form.encode(v))

    def decode(self, k: Tensor, v: Tensor) -> KeysAndValues:
        """Keys and values of what the store keeps, or of a part of it: `encode` backwards."""
        return self.form.decode(k, self.layer.width), self.form.decode(v, self.layer.value_width)

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.chunks)

    @property
    def place_bytes(self) -> int:
        """Bytes of the keys and values of one place."""
        return self.layer.groups * sum(map(self.form.length, self.widths)) * self.form.dtype.itemsize

    def slot_bytes(self, length: int) -> int:
        """Bytes of one slot with room for `length` tokens, in whole pages; rings and sums do not grow with it."""
        page = self.page or 1
        return self.place_bytes * (self.places or -(-length // page) * page)

    def resize(self, slots: int, capacity: int, memory: HugePages | None = None) -> None:
        """Strips for at least so many slots, of so many places, in memory of `memory` where it is given."""
        k, v = self._strips
        if slots > k.shape[0] or capacity > k.shape[2]:
            larger = self._zeros(max(slots, k.shape[0]), max(capacity, k.shape[2]), memory)
            for x, y in zip((k, v), larger, strict=True):
                y[: x.shape[0], :, : x.shape[2]] = x
            self.chunks = [larger]

    def clear(self, slot: int, first: int, end: int) -> None:
        """Make places `first` to `end` of a slot's strip zero; where their number is fixed, all of them."""
        where = slice(None) if self.places else slice(first, end)
        self.k[slot, :, where].zero_()
        self.v[slot, :, where].zero_()

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` places of the strips of slots `sources` to those of `targets`, all read before any is
        written."""
        take, put = list(sources), list(targets)
        for x in self._strips:
            if x.device.type == "cpu":  # numpy copies runs of bytes, torch one number after another
                y = x.detach().view(torch.uint8).numpy()
                y[put, :, :length] = y[take, :, :length]
            else:
                x[put, :, :length] = x[take, :, :length]


class Stores:
    """One store per layer."""

    stores: list[Store]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, used or not."""
        return sum(store.nbytes for store in self.stores)

    def slot_bytes(self, length: int) -> int:
        """Bytes of one slot with room for `length` tokens, or for a source of so many positions."""
        return sum(store.slot_bytes(length) for store in self.stores)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What some next tokens of a slot change for good; `length` and `high_water` are those of the slot before.

    rings   the numbers that they overwrite in each ring: keys [G, count, K] and values [G, count, Kv].
    sums    of each layer that keeps sums: both as they were.
    added   what was added to them since: features [n, G, K] and values [n, G, Kv + 1].
    """

    length: int
    high_water: int
    rings: list[tuple[Store, Tensor, Tensor]]
    sums: dict[int, tuple[Tensor, Tensor]]
    added: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def resize_together(stores: Sequence[Store], slots: int, capacity: int) -> None:
    """At least so many slots and places in each of these stores, which have strips, in shared huge pages where they are
    large, on the CPU.  The memory is freed when all of the stores have grown again."""
    grown = sum(store.place_bytes * max(slots, store.k.shape[0]) * max(capacity, store.k.shape[2]) for store in stores)
    memory = HugePages() if grown >= LEAST_IN_HUGE_PAGES and stores[0].k.is_cpu else None
    for store in stores:
        store.resize(slots, capacity, memory)


CacheType = Literal["auto", "fp32", "fp16", "bf16", "int8"]
"""What a cache keeps: "auto", numbers of the dtype that the model computes in; "int8", codes of 8 bits with a scale for
each `GROUP` numbers of a vector."""

GROUP = 32  # numbers that share a scale (`GROUP` of matmul.h)
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def check_cache_type(name: object) -> None:
    """Raises InputError, with the choices, for anything but a `CacheType`."""
    if not isinstance(name, str) or name not in get_args(CacheType):
        raise InputError(f"cache must be one of {list(get_args(CacheType))}, not {shown(name)}")


@dataclass(frozen=True)
class StoredForm:
    """How a store keeps vectors for a model that computes in `computed`: as numbers of `dtype`, or, where that is int8,
    as codes that are followed by the bytes of their scales (bf16).

    A code is the number divided by the scale of its group and rounded to the nearest integer, ties to even.  The scale
    is the largest magnitude of the group divided by 127, rounded to bf16, so that a code times its scale is an exact
    fp32 number.  A group with a number that is not finite gives NaN.
    """

    dtype: torch.dtype
    computed: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether vectors are kept, and given back, as they are."""
        return self.dtype == self.computed

    def length(self, width: int) -> int:
        """Elements of `dtype` that a vector of `width` numbers takes."""
        return width + 2 * -(-width // GROUP) if self.dtype == torch.int8 else width

    def encode(self, x: Tensor) -> Tensor:
        """Vectors [..., K] as they are kept, [..., length(K)]."""
        if self.dtype != torch.int8:
            return x.to(self.dtype)
        width = x.shape[-1]
        groups = F.pad(x.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
        scales = (groups.abs().amax(-1) / 127).to(torch.bfloat16)
        codes = (groups / scales.float()[..., None]).round().clamp(-127, 127).nan_to_num(0.0)
        codes = codes.flatten(-2)[..., :width].to(torch.int8)
        return torch.cat((codes, scales.view(torch.int8)), -1)

    def decode(self, stored: Tensor, width: int) -> Tensor:
        """What `encode` gave, or a part of it, [..., length(K)] -> vectors of `width` numbers, [..., K]."""
        if self.dtype != torch.int8:
            return stored.to(self.computed)
        scales = stored[..., width:].contiguous().view(torch.bfloat16).float()
        codes: Tensor = F.pad(stored[..., :width].float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
        numbers = (codes * scales[..., None]).flatten(-2)
        return numbers[..., :width].to(self.computed)


def stored_form(name: CacheType, computed: torch.dtype) -> StoredForm:
    """The form of a cache type for a model that computes in `computed`.  Raises InputError as `check_cache_type`."""
    check_cache_type(name)
    return StoredForm(_DTYPES.get(name, computed), computed)
