"""A call of a native plan that stops between its instructions and goes on later, so that other calls run meanwhile.

The values of a plan lie in the arena from one instruction to the next, so a call that has an arena of its own can stop
wherever no thread is in the middle of something.  What it computes does not depend on where it stopped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from triptych.attention import Rows
from triptych.attention.cache_steps import CacheStep
from triptych.native.step import Barrier, Op, PlanStruct, Records
from .native_calls import Calls
from .native_tables import Binding

MOST_PIECES = 64  # so that to begin them takes little beside what they compute


@dataclass(eq=False)
class CallInPieces:
    """Tokens `ids` of `rows` on their way through a plan.

    chosen      the tokens whose logits are wanted, [C, V] in `out`.
    prompts     of each row, how many of its tokens are of its prompt.
    binding     the plan, with the weights that the call began with.
    versions    of the weights then (`module_changes.versions`).
    calls       its memory, which no other call uses meanwhile.
    step        that of the cache, which is counted when all is done.
    pieces      runs [first, end) of instructions that are left.
    seconds     what those that are done have taken.
    longest     seconds of the longest of them.
    """

    ids: list[int]
    rows: Rows
    chosen: list[int]
    prompts: list[int]
    binding: Binding
    versions: list[Any]
    calls: Calls
    step: CacheStep
    labels: npt.NDArray[np.int32]
    out: Tensor
    pieces: deque[tuple[int, int]]
    seconds: float = 0.0
    longest: float = 0.0

    def go_on(self, plan: PlanStruct, pages: npt.NDArray[np.int32], seconds: float | None) -> bool:
        """Run pieces for about so many seconds, one at least; all that are left with None.  Whether all are done.
        `plan` and `pages` are those of now: stores and tables may have moved since the last piece."""
        spent = 0.0
        while self.pieces:
            if spent and seconds is not None and spent + self.longest > seconds:
                return False
            first, end = self.pieces.popleft()
            start = perf_counter()
            self.calls.run(self.binding.plan, part_of_plan(plan, self.binding, first, end), self.labels, self.chosen,
                           self.out, None, pages)  # fmt: skip
            taken = perf_counter() - start
            self.longest = max(self.longest, taken)
            spent += taken
            self.seconds += taken
        self.step.finish()
        return True


def part_of_plan(plan: PlanStruct, binding: Binding, first: int, end: int) -> PlanStruct:
    """`struct plan` of the instructions [first, end) alone."""
    part, records = PlanStruct(), binding.plan.instructions
    part.count, part.alone, part.weights, part.stores = end - first, plan.alone, plan.weights, plan.stores
    part.instructions = records.ctypes.data + first * records.itemsize
    return part


def pieces_of(records: Records) -> deque[tuple[int, int]]:
    """The instructions of a plan in at most about `MOST_PIECES` runs: none begins where threads need not meet, or
    between the tokens of one expert."""
    cuts, of_expert = [0], False
    for i, (op, barrier) in enumerate(zip(records["op"].tolist(), records["barrier"].tolist(), strict=True)):
        if i and barrier == Barrier.BEFORE and not of_expert and op != Op.TAKE:
            cuts.append(i)
        of_expert = op == Op.TAKE or (of_expert and op != Op.GIVE)
    cuts = cuts[:: -(-len(cuts) // MOST_PIECES)]
    return deque(zip(cuts, [*cuts[1:], len(records)], strict=True))
