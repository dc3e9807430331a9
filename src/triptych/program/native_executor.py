"""Runs decoding steps of a model natively: any mix of rows in one call, where the model is what its program says.

`NativeStep.logits` gives None where the modules must run, with the reason in `why_modules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.attention import Cache, CrossCache, Rows
from triptych.native import library
from triptych.native.step import PlanRecord
from triptych.nn import Transformer
from triptych.program.native_binding import LAYOUT_BF16, Binding, MatrixOf
from triptych.program.native_calls import Calls, labels_of, piece_of, plan_struct, store_records, stored_type
from triptych.program.native_plan import NativePlan, plan_of
from triptych.program.native_prepared import Prepared
from triptych.program.native_values import NotNative
from triptych.program.program import Program

TOKENS = 256  # of one call: more run as several, so that the arena stays small
# Tokens of one step up to which dense models are faster here than as modules.  With AVX-512 the products of fp32
# weights are about as fast as those of torch's matrix library (with wide matrices and 256 vectors a fifth slower), and
# the rest of a step is faster.  bf16 weights are multiplied in fp32 here, by torch at twice that rate or more.
MOST_DENSE, MOST_DENSE_FP32 = 32, 256
_keys_and_values = attrgetter("k", "v")


class PreparedStep(Prepared):
    """The plan of a step; it depends on what the cache keeps, and on the window of each of its stores."""

    @staticmethod
    def plan_of(program: Program, packed: frozenset[str], *how: Any) -> NativePlan:
        dtype, windows = how
        return plan_of(program, packed, stored_type(dtype), windows)


class NativeStep:
    """The native executor over one cache.  One thread uses it at a time; others may use the same module.

    matrix_of     the run-time layout of a packed weight; without it, packed models run as modules.
    most_dense    tokens of one call, MOST_DENSE at least, up to which a model without packed weights runs here; None
                  for MOST_DENSE or, where it holds, MOST_DENSE_FP32.
    why_modules   why the last call gave None; None after a call that ran.
    """

    def __init__(
        self, module: Transformer, cache: Cache, cross: CrossCache | None = None, *, matrix_of: MatrixOf | None = None,
        most_dense: int | None = None,
    ) -> None:  # fmt: skip
        self.module, self.cache, self.cross = module, cache, cross
        self.matrix_of, self.most_dense = matrix_of, most_dense
        self.calls = Calls()
        self.why_modules: str | None = None
        dtype = cache.stores[0].form.dtype if cache.stores else torch.float32
        self.how = dtype, tuple(store.window for store in cache.stores)  # what a plan depends on beside the module
        self.binding: Binding | None = None
        self.seen: list[Tensor] = []

    def logits(self, ids: Sequence[int], rows: Rows, chosen: Sequence[int]) -> Tensor | None:
        """Run the tokens `ids` [N] of `rows`, which continue the cache -> the logits of tokens `chosen`, in rising
        order, [C, V] fp32.

        The caller has begun no step of the cache; this begins and finishes one.  Raises as `Cache.begin`.
        """
        try:
            self.calls.check()
            binding = PreparedStep.bound(self.module, self.how, self.matrix_of, max(rows.ends, default=0))
            self._check(binding, ids, rows)
        except NotNative as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        step = self.cache.begin(rows, "")
        plan = self._plan(binding)
        out = torch.empty(len(chosen), binding.plan.outputs)
        sources = [] if self.cross is None else self.cross.of(rows.slots)
        labels = labels_of(ids, rows, sources)
        done = 0
        for first in range(0, len(ids), TOKENS):
            last = min(first + TOKENS, len(ids))
            own = chosen if len(ids) <= TOKENS else [token - first for token in chosen[done:] if token < last]
            piece = piece_of(labels, first, last)
            self.calls.run(binding, self.matrices, plan, piece, own, out[done : done + len(own)])
            done += len(own)
        step.finish()
        return out

    # -- what must hold -------------------------------------------------------------------------------------------

    def _check(self, binding: Binding, ids: Sequence[int], rows: Rows) -> None:
        """Sizes, before anything is written.  The modules run where one is wrong, and say so."""
        if len(ids) != rows.total or not ids:
            raise NotNative("no tokens, or not as many as the rows have")
        if len(ids) > MOST_DENSE and not binding.packed and len(ids) > self._most_dense(binding):
            raise NotNative(f"{len(ids)} tokens at once and dense weights: torch's matrix products are faster")
        if max(rows.ends) > min(binding.limit, self.module.spec.context or binding.limit):
            raise NotNative("a row is longer than the model's context")
        if min(ids) < 0 or max(ids) >= binding.vocab:
            raise NotNative("an id lies outside the vocabulary")
        if rows.documents is not None:
            raise NotNative("rows of several documents")
        if self.cross is not None:
            lacking = self.cross.pending is not None or any(slot not in self.cross.lengths for slot in rows.slots)
            if lacking:
                raise NotNative("the source is not projected yet")

    def _most_dense(self, binding: Binding) -> int:
        if self.most_dense is not None:
            return self.most_dense
        kernels = library()
        fast = kernels is not None and kernels.isa == "avx512" and LAYOUT_BF16 not in binding.matrices["layout"]
        return MOST_DENSE_FP32 if fast else MOST_DENSE

    # -- the call -------------------------------------------------------------------------------------------------

    def _plan(self, binding: Binding) -> PlanRecord:
        """The structure of a plan, made anew where the weights or the stores moved."""
        stores = self.cache.stores if self.cross is None else [*self.cache.stores, *self.cross.stores]
        tensors = [*map(_keys_and_values, stores)]
        if binding is not self.binding:
            self.binding, self.matrices = binding, binding.matrices.copy()
            self.seen = []
        flat = [*chain.from_iterable(tensors)]
        if len(flat) != len(self.seen) or not all(map(is_, flat, self.seen)):
            records = [store_records(self.cache.stores, len(self.cache.lengths), self.cache.capacity)]
            if self.cross is not None:
                records.append(store_records(self.cross.stores))
            self.stores, self.seen = np.concatenate(records), flat
            self.plan = plan_struct(binding, self.matrices, self.stores)
        return self.plan
