"""The list of steps that a program becomes, before buffers and barriers are decided."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from triptych.native.step import GROUP, PAIR, Index, Op, Over, StoredType
from triptych.program.native_values import (
    PlanStep,
    PlanSteps,
    PlanTable,
    Vector,
)
from triptych.program.program import Program


class StepList:
    """The steps of a program so far, and what decides about the next ones.

    packed    weights that are stored packed: vectors are rounded before they are multiplied with them.
    stored    what the cache keeps of keys and values.
    windows   of each layer's store.
    bf16      vectors and weights are rounded to bf16 where they are multiplied: "all", whatever they are stored as,
              or "packed", with packed weights and in the attention of a row to itself.
    reads     sites whose vectors are kept.
    """

    def __init__(
        self, program: Program, packed: frozenset[str], stored: StoredType, windows: list[int | None], *,
        bf16: Literal["all", "packed"] | None = None, reads: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.program, self.packed, self.stored, self.windows = program, packed, stored, windows
        self.bf16, self.reads = bf16, reads
        self.out = PlanSteps()
        self.rounded: dict[tuple[Vector, bool], Vector] = {}
        self.attended: set[int] = set()
        self.encoding = False

    def add(
        self, op: Op, out: Vector | None, reads: dict[str, Vector], tables: dict[str, PlanTable] | None = None,
        **numbers: float,
    ) -> PlanStep:  # fmt: skip
        over = out.over if out is not None else Over.TOKENS
        writes = {} if out is None else {"output": out}
        step = PlanStep(op, over, reads, writes, tables or {}, numbers)
        if op in (Op.MAP, Op.MAP_MULTIPLY, Op.ADD, Op.ROTATE, Op.STORED):
            step.takes_over = "input"
        self.out.steps.append(step)
        return step

    def look_up(self, out: Vector, table: PlanTable, index: Index, shift: int = 0) -> Vector:
        """`out`, filled with the rows of a table at an index, which is first moved by `shift`."""
        self.add(Op.EMBED, out, {}, {"table": table}, row=index, shift=shift, width=out.width)
        return out

    def round_input(self, x: Vector, bf16: bool) -> Vector:
        """x rounded for packed weights, or for products in bf16; once for all of either."""
        if (x, bf16) not in self.rounded:
            codes = x.width // 4 + 3 * x.width // GROUP + 48  # and each of three parts begins at 64 bytes
            codes = -(-x.width // PAIR) * PAIR // 2 if bf16 else codes
            self.rounded[x, bf16] = Vector(codes, x.over)
            self.add(Op.ROUND_BF16 if bf16 else Op.ROUND, self.rounded[x, bf16], {"input": x}, width=x.width)
        return self.rounded[x, bf16]
