"""Calls of native functions: whether a step may run, its memory and the integer labels of each token; and the largest
number of each row (`largest_of`)."""

from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int32
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.attention.layer_cache import Store
from triptych.errors import InputError
from triptych.native import library, usable_threads, why_not
from triptych.native.huge_pages import PAGE, HugePages
from triptych.native.step import CHUNK, COUNTERS, FEW_TOKENS, RANGE, STORE, Call, Integers, PlanStruct, Records
from .native_plan import NativePlan, check_plan, stored_type
from .native_reads import StepReads
from .native_tables import Binding
from .not_served import NotServed

# Nanoseconds of work that one thread does sooner than two that meet before and after it, as `cost_of` in step.c counts.
ALONE = 3000
LABELS = ("ids", "position", "slot", "start", "end", "reach", "source", "source_slot", "chosen")
_chunks = attrgetter("chunks")
_POSITION, _SLOT, _SOURCE = (LABELS.index(name) for name in ("position", "slot", "source"))
RunStep = Callable[[Any, Any], None]
Largest = tuple[list[int], list[float]]
"""Where the largest number of each row stands, and that number."""
TokenLabels = npt.NDArray[np.int32] | Sequence[Sequence[int]]


def zeros(count: int) -> Tensor:
    """So many fp32 zeros, in huge pages where they fill one.  Torch would write many with several threads, which a
    forked process does not have."""
    if count * 4 >= PAGE:
        return HugePages().take(count * 4).view(torch.float32)
    return torch.from_numpy(np.zeros(count, np.float32))


class Calls:
    """The arena, the scratch memory and the labels that calls of one executor use one after another."""

    def __init__(self) -> None:
        kernels = library()
        self.function: RunStep | None = None if kernels is None else kernels.functions.run_step
        self.unavailable = why_not()
        self.labels = np.zeros((len(LABELS), 0), np.int32)
        self.arena = self.scratch = zeros(0)
        self.partial = zeros(COUNTERS)
        self.call = Call()
        self.call.partial = self.partial.data_ptr()
        self.pages: npt.NDArray[np.int32] | None = None

    def check(self) -> None:
        """Raises NotServed where nothing runs natively now."""
        if self.unavailable is not None:
            raise NotServed(self.unavailable)
        if torch.is_grad_enabled():
            raise NotServed("gradients may be needed")
        # of functions too, without the mode of a default device
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        if modes or torch.is_autocast_enabled("cpu"):
            raise NotServed("autocast or another mode of torch is on")

    def _grow_labels(self, tokens: int) -> None:
        self.labels = np.zeros((len(LABELS), max(tokens, 256)), np.int32)
        for i, name in enumerate(LABELS):
            setattr(self.call, name, self.labels[i].ctypes.data)

    def run(
        self, size: NativePlan, plan: PlanStruct, labels: TokenLabels, chosen: Sequence[int], out: Tensor,
        reads: StepReads | None, pages: npt.NDArray[np.int32],
    ) -> None:  # fmt: skip
        """One call of a plan of this size: `labels [8, N]` of its tokens (`piece_of`), the tokens `chosen`, and `out`,
        which receives the result.  The values of sites that the plan keeps go to `reads`; `pages` is the table of pages
        (`Pages.numbers`).  The caller has checked every size."""
        assert self.function is not None
        tokens, call = len(labels[0]), self.call
        threads = usable_threads(torch.get_num_threads())
        if self.labels.shape[1] < tokens:
            self._grow_labels(tokens)
        self.labels[:-1, :tokens] = labels
        self.labels[-1, : len(chosen)] = chosen
        scratch = size.scratch + tokens
        if self.arena.numel() < size.arena * tokens:
            self.arena = zeros(size.arena * tokens)
            call.arena = self.arena.data_ptr()
        if self.scratch.numel() < scratch * threads:
            self.scratch = zeros(scratch * threads)
            call.scratch = self.scratch.data_ptr()
        if tokens <= FEW_TOKENS:
            ranges = int(max(*labels[_POSITION], *labels[_SOURCE])) // RANGE + 1
            if self.partial.numel() < COUNTERS + ranges * tokens * size.partial:
                self.partial = zeros(COUNTERS + 2 * ranges * tokens * size.partial)
                call.partial = self.partial.data_ptr()
        if pages is not self.pages:
            self.pages, call.pages, call.most_pages = pages, pages.ctypes.data, pages.shape[1]
        call.tokens, call.chosen_count, call.threads, call.scratch_floats = tokens, len(chosen), threads, scratch
        call.output = out.data_ptr()
        call.reads = None
        if reads is not None:
            call.reads = reads.reserve(size, [*map(int, labels[_SLOT])], [*map(int, labels[_POSITION])])
        self.function(byref(plan), byref(call))


def largest_of(rows: Tensor) -> Largest | None:
    """Where the largest number of each row of `rows` [B, n] stands first, or its first NaN, and that number.  None
    where the kernels are not loaded, and for what is not contiguous fp32 numbers on the CPU."""
    find, (count, n) = _find_largest(), rows.shape
    if find is None or rows.dtype != torch.float32 or not rows.is_cpu or not rows.is_contiguous() or not n:
        return None
    places, tops = (c_int32 * count)(), (c_float * count)()
    find(rows.data_ptr(), count, n, places, tops)
    return places[:], tops[:]


@cache
def _find_largest() -> Callable[..., None] | None:
    loaded = library()
    return None if loaded is None else loaded.functions.largest_of


def plan_struct(binding: Binding, stores: Records) -> PlanStruct:
    """`struct plan`; the binding and the stores must live as long as it.  Raises as `check_plan`."""
    check_plan(binding.plan, binding.matrices, len(stores))
    plan, records = PlanStruct(), binding.plan.instructions
    plan.count, plan.alone, plan.instructions = len(records), ALONE, records.ctypes.data
    plan.weights, plan.stores = binding.matrices.ctypes.data, stores.ctypes.data
    return plan


class StoreRecords:
    """`struct store` of some stores, and their chunks, which must live as long as they are used.  Stores without pages
    have strips for at least so many slots, and places where they are no rings.

    Raises InputError for tensors that do not have the shape of their store, before anything of them is read; NotServed
    as `stored_type`.
    """

    def __init__(self, stores: Sequence[Store], slots: int = 0, capacity: int = 0) -> None:
        self.stores = np.zeros(len(stores), STORE)
        self.tensors: list[Tensor] = list(chain.from_iterable(chain.from_iterable(map(_chunks, stores))))
        self.chunks = np.zeros(len(self.tensors) // 2, CHUNK)
        at = 0
        for i, (record, store) in enumerate(zip(self.stores, stores, strict=True)):
            record["chunks"] = self.chunks[at:].ctypes.data
            record["page"], record["type"] = store.page or 0, stored_type(store.form.dtype)
            for k, v in store.chunks:
                _check_chunk(i, store, k, v, slots, capacity)
                self.chunks[at] = k.data_ptr(), v.data_ptr(), k.shape[2]
                at += 1

    def follow(self, stores: Sequence[Store]) -> bool:
        """Whether these are the stores, with the memory that they have now."""
        tensors = list(chain.from_iterable(chain.from_iterable(map(_chunks, stores))))
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))


def _check_chunk(number: int, store: Store, k: Tensor, v: Tensor, slots: int, capacity: int) -> None:
    form, (held, _, places, _) = store.form, k.shape
    strips = max(held, slots) if store.page is None else 1
    least = 0 if store.page is not None else capacity if store.window is None else store.window
    for x, width in zip((k, v), store.widths, strict=True):
        shape = strips, store.layer.groups, max(places, least), form.length(width)
        if tuple(x.shape) != shape or x.dtype != form.dtype or not x.is_contiguous():
            what, wanted = f"{x.dtype} {list(x.shape)}", f"{form.dtype} {list(shape)}"
            raise InputError(f"the cache of layer {number} holds {what}, not {wanted}; begin with an empty cache")


def labels_of(ids: Sequence[int], rows: Rows, sources: Sequence[Sequence[int]]) -> Integers:
    """[8, N]: `LABELS` of each token but `chosen`, with where its row stops in the batch in the place of `end`.

    sources   the length of each row's source and its slot in the stores of sources.
    """
    n = np.asarray(rows.lengths)
    per_row = np.asarray((rows.slots, rows.starts, rows.past, rows.ends, *sources))
    slot, start, past, reach, *source = per_row.repeat(n, axis=1) if rows.longest > 1 else per_row
    position = past + np.arange(len(ids)) - start
    stop = start + reach - past
    return np.asarray((ids, position, slot, start, stop, reach, *source))


def part_of(labels: Integers, mine: npt.NDArray[np.bool_]) -> Integers:
    """The tokens `mine` [N] alone, of each row a run that reaches to its end or from its beginning."""
    part = labels[:, mine]
    _, first, lengths = np.unique(part[3], return_index=True, return_counts=True)
    part[3], part[4] = first.repeat(lengths), (first + lengths).repeat(lengths)
    return part


def piece_of(labels: Integers, first: int, last: int) -> npt.NDArray[np.int32]:
    """Tokens [first, last) as a call of their own."""
    piece = labels[:, first:last].astype(np.int32)
    position, start, stop = piece[1], piece[3], piece[4]
    piece[4] = position - np.arange(first, last, dtype=np.int32) + np.minimum(stop, last)
    piece[3] = np.maximum(start, first) - first
    return piece
