"""Runs an encoder natively: the hidden states of whole rows, where the model is what its program says, and what the
layers of a decoder beside it project of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triptych.attention import CrossCache, Rows
from triptych.native.step import STORE
from triptych.nn import Transformer
from triptych.nn.inputs import Frames
from triptych.program.native_binding import Binding, MatrixOf
from triptych.program.native_calls import Calls, labels_of, piece_of, plan_struct, store_records
from triptych.program.native_plan import NativePlan, encoding_plan_of, source_plan_of
from triptych.program.native_prepared import Prepared
from triptych.program.native_values import NotNative
from triptych.program.program import Program

TOKENS = 512  # of one call, unless a row is longer: what a layer computes then stays in the caches of the processor


class PreparedEncoder(Prepared):
    """The plan of an encoder."""

    @staticmethod
    def plan_of(program: Program, packed: frozenset[str], *how: Any) -> NativePlan:
        return encoding_plan_of(program, packed)


class PreparedSource(Prepared):
    """The plan of an encoder and of what the decoder's layers project of its output."""

    @staticmethod
    def plan_of(program: Program, packed: frozenset[str], *how: Any) -> NativePlan:
        return source_plan_of(program, packed)


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

    def hidden(self, inputs: Sequence[int] | Tensor, rows: Rows) -> Tensor | None:
        """The encoder's output [N, D], fp32, for whole rows of what it reads: ids [N], all of token type 0, or frames
        [N * stride, M]; None where the modules must run."""
        return self._run(PreparedEncoder, inputs, rows, None)

    def project(self, inputs: Sequence[int] | Tensor, rows: Rows, cross: CrossCache) -> bool:
        """The same for sources of a decoder, whose layers' keys and values of it go to `cross`; the slots of `rows` are
        those of the decoder's rows.  False where the modules must run.  Raises as `CrossCache.fill`."""
        return self._run(PreparedSource, inputs, rows, cross) is not None

    def _run(
        self, plans: type[Prepared], inputs: Sequence[int] | Tensor, rows: Rows, cross: CrossCache | None
    ) -> Tensor | None:
        try:
            self.calls.check()
            binding = plans.bound(self.module, (), self.matrix_of, rows.longest)
            ids = self._ids(inputs, rows)
            self._check(binding, ids, rows)
            given = self._given(binding, inputs, rows)
        except NotNative as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        matrices = binding.matrices.copy()
        stores = np.zeros(1, STORE)  # where there are none, instructions name the first one and read nothing of it
        if cross is not None:
            rows = cross.make_room(rows)
            stores = store_records(cross.stores)
        plan = plan_struct(binding, matrices, stores)
        labels = labels_of(ids, rows)
        out = torch.empty(len(ids), binding.plan.outputs)
        for first, last in _pieces(rows.lengths):
            rest = None if given is None else given[first:last]
            self.calls.run(binding, matrices, plan, piece_of(labels, first, last), [], out[first:last], rest)
        return out

    def _ids(self, inputs: Sequence[int] | Tensor, rows: Rows) -> Sequence[int]:
        """The ids; zeros, one per token, in the place of frames."""
        if not isinstance(inputs, Tensor):
            return inputs
        return inputs.tolist() if inputs.dim() == 1 else [0] * rows.total

    def _given(self, binding: Binding, inputs: Sequence[int] | Tensor, rows: Rows) -> Tensor | None:
        """What the convolutions make of frames, where the plan reads that."""
        embed = self.module.input
        if not binding.given:
            if isinstance(inputs, Tensor) and inputs.dim() != 1:
                raise NotNative("the encoder reads ids")
            return None
        assert isinstance(embed, Frames)
        if not isinstance(inputs, Tensor) or inputs.shape != (rows.total * embed.spec.stride, embed.spec.conv1.inputs):
            raise NotNative("the encoder reads frames, as many as the rows have")
        return embed.convolved(inputs, rows).float().contiguous()

    def _check(self, binding: Binding, ids: Sequence[int], rows: Rows) -> None:
        """Sizes, before anything is written.  The modules run where one is wrong, and say so."""
        if len(ids) != rows.total or not len(ids) or any(rows.past):
            raise NotNative("no tokens, or not as many as the rows have, or rows that continue others")
        if not binding.packed and not self.dense:
            raise NotNative("dense weights: torch's matrix products are faster")
        if rows.longest > min(binding.limit, self.module.spec.source_context or binding.limit):
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
