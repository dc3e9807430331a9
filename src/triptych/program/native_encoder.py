"""Runs an encoder natively: the hidden states of whole rows, while its module is what the program was lowered from."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from triptych.attention import CrossCache, Rows
from triptych.errors import InputError
from triptych.native import library, usable_threads, why_not
from triptych.native.step import MATRIX, STORE, Call, Integers, PlanStruct, Records
from triptych.nn import Transformer
from triptych.nn.inputs import Frames
from .native_calls import LABELS, Calls, StoreRecords, labels_of, piece_of, zeros
from .native_plan import check_plan, encoding_plan_of
from .native_tables import LAYOUT_F32, Binding, MatrixOf, bound
from .not_served import NotServed, check_rows

TOKENS = 256  # of one piece, unless a row is longer: what a layer computes then stays in the caches of a processor
LEAST = 128  # tokens of a piece that are worth reading all weights for, rather than sharing them with other threads

Matmul = Literal["auto", "bf16", "stored"]
"""What products with weights are computed in: "bf16", whatever the weights are stored as; "stored", as they are (packed
weights by integers, others in the dtype of the model); "auto", the faster of the two that loses nothing beside what the
model was loaded with: bf16 for a model of bf16, and for packed weights on a processor with AMX."""


def multiplies_in_bf16(module: Transformer, matmul: Matmul) -> bool:
    """Whether the native encoder of this module computes its products in bf16.

    Raises InputError for an unknown `matmul`, and for "bf16" on a processor without such products.
    """
    if matmul not in get_args(Matmul):
        raise InputError(f"matmul must be one of {list(get_args(Matmul))}, not {matmul!r}")
    kernels = library()
    isa = None if kernels is None else kernels.bf16
    if matmul == "bf16" and isa is None:
        raise InputError(f"matmul='bf16' needs AMX: {why_not() or 'this processor has none'}")
    if matmul != "auto":
        return matmul == "bf16"
    if module.has_packed_weights:
        return isa == "amx-bf16"
    return isa is not None and module.dtype == torch.bfloat16


def encoder_binding(
    module: Transformer, bf16: bool, source: bool, matrix_of: MatrixOf | None, positions: int
) -> Binding:
    """The plan of an encoder, and where it is a `source` of what the decoder's layers project of its output, with its
    weights.  Raises NotServed where there is none."""
    kind = "source" if source else "encoder"
    return bound(module, kind, encoding_plan_of, (bf16, source), matrix_of, positions)


class NativeEncoder:
    """The native executor of an encoder.  One thread uses it at a time; others may use the same module.

    matrix_of     the run-time layout of a packed weight.
    dense         whether a model without packed weights runs here too where its products are not in bf16; torch's
                  matrix products are faster.
    bf16          whether products with weights are in bf16: both factors are rounded, the sums and all else are fp32.
                  `hidden` then keeps the weights a second time; `project` unpacks them again in every call, as a
                  prompt does.
    why_modules   why the last call gave None; None after a call that ran.
    """

    def __init__(
        self, module: Transformer, *, matrix_of: MatrixOf | None = None, dense: bool = False, bf16: bool = False
    ) -> None:
        self.module, self.matrix_of, self.dense, self.bf16 = module, matrix_of, dense, bf16
        self.calls = Calls()
        self.arena = self.scratch = zeros(0)
        self.why_modules: str | None = None

    def hidden(self, inputs: Sequence[int] | Tensor, rows: Rows, cross: CrossCache | None = None) -> Tensor | None:
        """The encoder's output [N, D], fp32, for whole rows of what it reads: ids [N], all of token type 0, or frames
        [N * stride, M]; None where the modules must run.  With `cross`, what `project` does with it.

        A row has the same bits in any batch and with any number of threads.  They depend on the processor where
        products are in bf16.
        """
        # The module is on the CPU, and so are ids; in the place of frames there are zeros, one per token.
        framed = isinstance(inputs, Tensor) and inputs.dim() != 1
        try:
            self.calls.check()
            binding = encoder_binding(self.module, self.bf16, cross is not None, self.matrix_of, rows.longest)
            ids = np.zeros(rows.total, np.int64) if framed else np.asarray(inputs, np.int64)
            if len(ids) != rows.total or not len(ids) or any(rows.past):
                raise NotServed("no tokens, or not as many as the rows have, or rows that continue others")
            if not binding.packed and not self.dense and not self.bf16:
                raise NotServed("dense weights: torch's matrix products are faster")
            limit = min(binding.limit, self.module.spec.source_context or binding.limit)
            check_rows((int(ids.min()), int(ids.max())), rows, binding.vocab, limit)
            token_rows = self._token_rows(binding, inputs, rows)
        except NotServed as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        stores = np.zeros(1, STORE)  # where there are none, instructions name the first one and read nothing of it
        if cross is not None:
            rows = cross.assign_places(rows)
            kept = StoreRecords(cross.stores)
            stores = kept.stores
        out = torch.empty(len(ids), binding.plan.outputs, dtype=torch.float32, device="cpu")
        self._call(binding, stores, ids, rows, token_rows, out)
        return out

    def project(self, inputs: Sequence[int] | Tensor, rows: Rows, cross: CrossCache) -> bool:
        """The same for sources of a decoder, whose layers' keys and values of it go to `cross`; the slots of `rows` are
        those of the decoder's rows.  False where the modules must run.  Raises as `CrossCache.fill`."""
        return self.hidden(inputs, rows, cross) is not None

    def _token_rows(self, binding: Binding, inputs: Sequence[int] | Tensor, rows: Rows) -> Tensor | None:
        """The output of the convolutions for frames, where the plan reads that."""
        embed = self.module.input
        if not binding.of_call:
            if isinstance(inputs, Tensor) and inputs.dim() != 1:
                raise NotServed("the encoder reads ids")
            return None
        assert isinstance(embed, Frames)
        if not isinstance(inputs, Tensor) or inputs.shape != (rows.total * embed.spec.stride, embed.spec.conv1.inputs):
            raise NotServed("the encoder reads frames, as many as the rows have")
        return embed.convolved(inputs, rows).float().contiguous()

    def _call(
        self, binding: Binding, stores: Records, ids: Integers, rows: Rows,
        token_rows: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        """Pieces of the batch, each on a thread of its own where there are enough of them."""
        check_plan(binding.plan, binding.matrices, len(stores))
        threads = usable_threads(torch.get_num_threads())
        pieces = _pieces(rows.lengths, min(TOKENS, max(LEAST, -(-len(ids) // threads))))
        labels = labels_of(ids.tolist(), rows, [[0] * len(rows)] * 2)
        labels_of_pieces = [piece_of(labels, first, last) for first, last in pieces]
        most = max(last - first for first, last in pieces)
        arena, scratch = binding.plan.arena * most, binding.plan.scratch + most
        if self.arena.numel() < arena * threads:
            self.arena = zeros(arena * threads)
        if self.scratch.numel() < scratch * threads:
            self.scratch = zeros(scratch * threads)
        matrices = np.empty((len(pieces), len(binding.matrices)), MATRIX)
        matrices[:] = binding.matrices
        plans, calls = (PlanStruct * len(pieces))(), (Call * len(pieces))()
        records, width = binding.plan.instructions, out.stride(0)
        for own, plan, call, of_piece, (first, last) in zip(
            matrices, plans, calls, labels_of_pieces, pieces, strict=True
        ):
            for place in binding.of_call:
                assert token_rows is not None
                own[place] = (LAYOUT_F32, last - first, token_rows.shape[1], 0, token_rows[first].data_ptr())
            plan.count, plan.instructions = len(records), records.ctypes.data
            plan.weights, plan.stores = own.ctypes.data, stores.ctypes.data
            call.tokens, call.threads, call.scratch_floats = last - first, threads, scratch
            for name, label in zip(LABELS, of_piece, strict=False):  # none is chosen
                setattr(call, name, label.ctypes.data)
            call.arena, call.scratch = self.arena.data_ptr(), self.scratch.data_ptr()
            call.output, call.partial = out.data_ptr() + 4 * first * width, self.calls.partial.data_ptr()
        kernels = library()
        assert kernels is not None
        kernels.functions.run_steps(plans, calls, len(pieces), threads, arena)


def _pieces(lengths: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """Tokens [first, last) of neighbouring whole rows, up to `tokens` of them or one row."""
    pieces, first, before = [], 0, 0
    for end in accumulate(lengths):
        if end - first > tokens and before > first:
            pieces.append((first, before))
            first = before
        before = end
    return [*pieces, (first, before)]
