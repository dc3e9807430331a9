"""Runs decoding steps natively, any mix of rows in one call, while the module is what its program was lowered from.

Packed weights are multiplied by integers, or in bf16 with the tokens of prompts (`prompts_in_bf16`).  Which of the two
a token gets depends on its role alone, so its bits do not depend on what else runs in the step.

`NativeStep.logits` decides so in each step: None where the modules must run, with the reason in `why_modules`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triptych.attention import Cache, CrossCache, Rows
from triptych.errors import InputError
from triptych.native import library
from triptych.native.step import Integers, PlanStruct
from triptych.nn import Transformer
from .module_changes import ModuleGuard, versions
from .native_calls import Calls, StoreRecords, labels_of, part_of, piece_of, plan_struct, zeros
from .native_encoder import Matmul, multiplies_in_bf16
from .native_pieces import CallInPieces, pieces_of
from .native_plan import plan_of
from .native_reads import StepReads
from .native_tables import LAYOUT_BF16, Binding, MatrixOf, bound
from .not_served import NotServed, check_rows

TOKENS = 256  # of one call: more run as several, so that the arena stays small
# Tokens of one step up to which dense models are faster here than as modules.  With AVX-512 the products of fp32
# weights are about as fast as those of torch's matrix library (with wide matrices and 256 vectors a fifth slower), and
# the rest of a step is faster.  bf16 weights are multiplied in fp32 here, by torch at twice that rate or more.
MOST_DENSE, MOST_DENSE_FP32 = 32, 256
NO_PAGES = np.zeros((0, 1), np.int32)


def prompts_in_bf16(module: Transformer, matmul: Matmul) -> bool:
    """Whether the tokens of prompts are multiplied with packed weights in bf16, as `matmul` says (`Matmul`).

    Raises InputError for an unknown `matmul`, and for "bf16" where no weight is packed or the processor has no such
    products.
    """
    packed = module.has_packed_weights
    bf16 = multiplies_in_bf16(module, matmul)
    if matmul == "bf16" and not packed:
        raise InputError(
            "matmul='bf16' is for packed weights, and no weight is packed; load with quantize='int8' or 'int4'"
        )
    return packed and bf16


class NativeStep:
    """The native executor over one cache.  One thread uses it at a time; others may use the same module.

    matrix_of     the run-time layout of a packed weight; without it, packed models run as modules.
    most_dense    tokens of one call, MOST_DENSE at least, up to which a model without packed weights runs here; None
                  for MOST_DENSE or, where it holds, MOST_DENSE_FP32.
    bf16          whether tokens of prompts are multiplied with packed weights in bf16.
    why_modules   why the last call gave None; None after a call that ran.
    guard         says in which steps the module is looked at; in all, without one.
    """

    def __init__(
        self, module: Transformer, cache: Cache, cross: CrossCache | None = None, *, matrix_of: MatrixOf | None = None,
        most_dense: int | None = None, bf16: bool = False, guard: ModuleGuard | None = None,
    ) -> None:  # fmt: skip
        self.module, self.cache, self.cross = module, cache, cross
        self.matrix_of, self.most_dense, self.bf16 = matrix_of, most_dense, bf16
        self.calls = Calls()
        self.calls_in_pieces: Calls | None = None  # the memory of a call that other calls interrupt
        self.why_modules: str | None = None
        self.guard = guard
        self._looked = False  # in the last call
        dtype = cache.stores[0].form.dtype if cache.stores else torch.float32
        self.plan_arguments = dtype, tuple(store.window for store in cache.stores)  # what all its plans depend on
        self.reads: tuple[str, ...] = ()  # of the last call
        self.binding: Binding | None = None  # of the last call
        self.plans: dict[Binding, PlanStruct] = {}
        self.stores: list[StoreRecords] = []  # of the cache, and of sources
        self.store_sizes = 0, 0, 0  # slots, places and chunks of pages then
        self.reused_logits = self.logits_memory = zeros(0)  # logits that were not to be kept, and their memory

    def logits(
        self, ids: Sequence[int], rows: Rows, chosen: Sequence[int], prompts: Sequence[int] | None = None,
        reads: StepReads | None = None, *, keep: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """Run the tokens `ids` [N] of `rows`, which continue the cache -> the logits of tokens `chosen`, in rising
        order, [C, V] fp32, in memory that the next call overwrites unless they are to `keep`.  Of each row, the first
        `prompts` of its tokens are of its prompt, none by default.  What the sites of `reads` pass goes there; it has
        been told of these rows (`StepReads.begin`).

        The caller has begun no step of the cache; this begins and finishes one.  Raises as `Cache.begin`.
        """
        mixed = self.bf16 and prompts is not None and any(prompts)
        bindings = self._ready(ids, rows, mixed, () if reads is None else reads.sites)
        if bindings is None:
            return None
        step = self.cache.begin(rows, "")
        self._follow_stores(bindings)
        sources = [[0] * len(rows.lengths)] * 2 if self.cross is None else self.cross.of(rows.slots)
        shape = len(chosen), bindings[0].plan.outputs
        if not keep and self.reused_logits.shape != shape:
            self._resize_logits(shape)
        out = torch.empty(shape, dtype=torch.float32, device="cpu") if keep else self.reused_logits
        if mixed:
            assert prompts is not None
            lengths = np.asarray(rows.lengths)
            places = np.arange(len(ids)) - np.repeat(rows.starts, lengths)
            of_prompts = places < np.repeat(prompts, lengths)
            self._run_by_role(bindings, labels_of(ids, rows, sources), of_prompts, np.asarray(chosen), out, reads)
        elif rows.longest == 1 and len(ids) <= TOKENS:
            labels = ids, rows.past, rows.slots, rows.starts, rows.ends, rows.ends, *sources  # as `piece_of`
            self.calls.run(bindings[0].plan, self.plans[bindings[0]], labels, chosen, out, reads, self._pages)
        else:
            self._run(bindings[0], labels_of(ids, rows, sources), chosen, out, reads)
        step.finish()
        return out

    # -- in pieces ------------------------------------------------------------------------------------------------

    def begin_in_pieces(
        self, ids: list[int], rows: Rows, chosen: list[int], prompts: list[int]
    ) -> CallInPieces | None:  # fmt: skip
        """Begin a call of tokens of prompts, as `logits` takes them, which `go_on` runs piece by piece: until it is
        done, these rows run in no other call, and no other begins in pieces.  None where it has to be one piece: for
        tokens of both roles, or more than one call takes, beside an encoder, and where the modules must run."""
        mixed = self.bf16 and any(prompts)
        if len(ids) > TOKENS or self.cross is not None or (mixed and list(rows.lengths) != prompts):
            return None
        bindings = self._ready(ids, rows, mixed, ())
        if bindings is None:
            return None
        step = self.cache.begin(rows, "")
        self.calls_in_pieces = self.calls_in_pieces or Calls()
        binding = bindings[-1]
        out = torch.empty((len(chosen), binding.plan.outputs), dtype=torch.float32, device="cpu")
        labels = piece_of(labels_of(ids, rows, [[0] * len(rows.lengths)] * 2), 0, len(ids))
        pieces = pieces_of(binding.plan.instructions)
        return CallInPieces(
            ids, rows, chosen, prompts, binding, versions(self.module), self.calls_in_pieces, step, labels, out, pieces
        )  # fmt: skip

    def go_on(self, call: CallInPieces, seconds: float | None) -> bool:
        """Run what is left of a call for about so many seconds -> whether all of it is done.  Raises NotServed where
        the module has changed since it began: what it has computed is worth nothing then."""
        bindings = self._ready(call.ids, call.rows, self.bf16 and any(call.prompts), ())
        if bindings is None or bindings[-1] is not call.binding or versions(self.module) != call.versions:
            raise NotServed(self.why_modules or "the module has changed")
        self._follow_stores(bindings)
        return call.go_on(self.plans[call.binding], self._pages, seconds)

    def _ready(self, ids: Sequence[int], rows: Rows, mixed: bool, reads: tuple[str, ...]) -> list[Binding] | None:
        """The binding of the module as it is now, and where tokens of prompts are `mixed` in, theirs; None, and why in
        `why_modules`, where these tokens cannot run here."""
        due = self.guard is None or self.guard.due() or self.why_modules is not None
        same = not due and not mixed and reads == self.reads
        last, self.reads = self.binding if same else None, reads
        positions = rows.end
        try:
            if due or self.binding is None:
                self.calls.check()
            self._looked = last is None or positions > last.positions
            if last is not None and not self._looked:
                bindings = [last]
            else:
                args = *self.plan_arguments, reads
                self.binding = bound(self.module, "step", plan_of, args, self.matrix_of, positions)
                bindings = [self.binding]
                if mixed:
                    bindings.append(bound(self.module, "prompt", plan_of, (*args, True), self.matrix_of, positions))
            binding = bindings[0]
            if len(ids) != rows.total or not ids:
                raise NotServed("no tokens, or not as many as the rows have")
            if len(ids) > MOST_DENSE and not binding.packed and len(ids) > self._most_dense(binding):
                raise NotServed(f"{len(ids)} tokens at once and dense weights: torch's matrix products are faster")
            limit = min(binding.limit, self.module.spec.context or binding.limit)
            check_rows(ids, rows, binding.vocab, limit, self.cross)
        except NotServed as reason:
            self.why_modules = str(reason)
            return None
        self.why_modules = None
        return bindings

    def _most_dense(self, binding: Binding) -> int:
        if self.most_dense is not None:
            return self.most_dense
        kernels = library()
        fast = kernels is not None and kernels.wide and LAYOUT_BF16 not in binding.matrices["layout"]
        return MOST_DENSE_FP32 if fast else MOST_DENSE

    def _resize_logits(self, shape: tuple[int, int]) -> None:
        """Give logits that the next call may overwrite this shape, in the same memory: the system would have to clear
        the pages of other memory."""
        size = shape[0] * shape[1]
        if self.logits_memory.numel() < size:
            self.logits_memory = torch.empty(size, dtype=torch.float32, device="cpu")
        self.reused_logits = self.logits_memory[:size].view(shape)

    # -- the call -------------------------------------------------------------------------------------------------

    def _run_by_role(
        self, bindings: Sequence[Binding], labels: Integers, of_prompts: npt.NDArray[np.bool_],
        chosen: Integers, out: Tensor, reads: StepReads | None,
    ) -> None:  # fmt: skip
        """First the tokens of prompts, then the others, which may continue the same rows."""
        for binding, mine in zip(reversed(bindings), (of_prompts, ~of_prompts), strict=True):
            if mine.any():
                places, wanted = mine.cumsum() - 1, mine[chosen]
                part = out.new_empty(int(wanted.sum()), out.shape[1])
                self._run(binding, part_of(labels, mine), places[chosen[wanted]].tolist(), part, reads)
                out[torch.from_numpy(wanted)] = part

    def _run(
        self, binding: Binding, labels: Integers, chosen: Sequence[int], out: Tensor,
        reads: StepReads | None,
    ) -> None:  # fmt: skip
        """All tokens of `labels` by one plan, in pieces."""
        count, done = labels.shape[1], 0
        for first in range(0, count, TOKENS):
            last = min(first + TOKENS, count)
            own = chosen if count <= TOKENS else [token - first for token in chosen[done:] if token < last]
            piece, part = piece_of(labels, first, last), out[done : done + len(own)]
            self.calls.run(binding.plan, self.plans[binding], piece, own, part, reads, self._pages)
            done += len(own)

    def _follow_stores(self, bindings: Sequence[Binding]) -> None:
        """Structures of the plans, made anew where the weights or the stores moved.  Between two looks at the module
        only this thread's own code ran, and stores move when there are more slots or places."""
        cache, cross = self.cache, self.cross
        self._pages = NO_PAGES if cache.pages is None else cache.pages.numbers
        sizes = len(cache.lengths), cache.capacity, 0 if cache.pages is None else len(cache.pages.chunks)
        if not self._looked and cross is None and sizes == self.store_sizes and bindings[0] in self.plans:
            return
        self.store_sizes = sizes
        stores = [cache.stores] if cross is None else [cache.stores, cross.stores]
        if len(self.stores) != len(stores) or not all(map(StoreRecords.follow, self.stores, stores)):
            self.stores, self.plans = [], {}
            self.stores = [StoreRecords(cache.stores, *sizes[:2]), *map(StoreRecords, stores[1:])]
            self.records = np.concatenate([one.stores for one in self.stores])
        if not self.plans.keys() >= set(bindings):
            self.plans = {one: self.plans.get(one) or plan_struct(one, self.records) for one in bindings}
