"""Runs an encoder natively: the hidden states of whole rows, where the model is what its program says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.attention import Rows
from triptych.native.step import STORE
from triptych.nn import Transformer
from triptych.program.native_binding import Binding, MatrixOf
from triptych.program.native_calls import Calls, labels_of, piece_of, plan_struct
from triptych.program.native_plan import NativePlan, encoding_plan_of
from triptych.program.native_prepared import Prepared
from triptych.program.native_values import NotNative
from triptych.program.program import Program

TOKENS = 512  # of one call, unless a row is longer: what a layer computes then stays in the caches of the processor


class PreparedEncoder(Prepared):
    """The plan of an encoder."""

    @staticmethod
    def plan_of(program: Program, packed: frozenset[str], *how: Any) -> NativePlan:
        return encoding_plan_of(program, packed)


class NativeEncoder:
    """The native executor of an encoder.  One thread uses it at a time; others may use the same module.

    matrix_of     the run-time layout of a packed weight.
    dense         whether a model without packed weights runs here too; torch's matrix products are faster.
    why_modules   why the last call gave None; None after a call that ran.
    """

    def __init__(self, module: Transformer, *, matrix_of: MatrixOf | None = None, dense: bool = False) -> None:
        self.module, self.matrix_of, self.dense = module, matrix_of, dense
        self.calls = Calls()
        self.why_modules: str | None = None

    def hidden(self, ids: Sequence[int], rows: Rows) -> Tensor | None:
        """The encoder's output [N, D], fp32, for the ids [N] of whole rows, all of token type 0; None where the modules
        must run."""
        try:
            self.calls.check()
            binding = PreparedEncoder.bound(self.module, (), self.matrix_of, rows.longest)
            self._check(binding, ids, rows)
        except NotNative as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        matrices = binding.matrices.copy()
        stores = np.zeros(1, STORE)  # instructions name the first store, and read nothing of it
        plan = plan_struct(binding, matrices, stores)
        labels = labels_of(ids, rows)
        out = torch.empty(len(ids), binding.plan.outputs)
        for first, last in _pieces(rows.lengths):
            self.calls.run(binding, matrices, plan, piece_of(labels, first, last), [], out[first:last])
        return out

    def _check(self, binding: Binding, ids: Sequence[int], rows: Rows) -> None:
        """Sizes, before anything is written.  The modules run where one is wrong, and say so."""
        if len(ids) != rows.total or not len(ids) or any(rows.past):
            raise NotNative("no tokens, or not as many as the rows have, or rows that continue others")
        if not binding.packed and not self.dense:
            raise NotNative("dense weights: torch's matrix products are faster")
        if rows.longest > min(binding.limit, self.module.spec.context or binding.limit):
            raise NotNative("a row is longer than the model's context")
        if min(ids) < 0 or max(ids) >= binding.vocab:
            raise NotNative("an id lies outside the vocabulary")
        if rows.documents is not None:
            raise NotNative("rows of several documents")


def _pieces(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Tokens [first, last) of neighbouring whole rows, up to TOKENS of them or one row."""
    pieces, first, before = [], 0, 0
    for end in accumulate(lengths):
        if end - first > TOKENS and before > first:
            pieces.append((first, before))
            first = before
        before = end
    return [*pieces, (first, before)]
