"""The values, tables and steps of a plan of the native executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.attention.mask_lowering import conjuncts, window_of
from triptych.native.step import Op, Over
from triptych.spec.masks import Causal, Full, Mask, Window
from triptych.spec.positions import RopeSpec
from .not_served import NotServed
from .program import Entry


@dataclass(frozen=True)
class PlanTable:
    """Something that instructions read beside vectors, by its place in the plan's tables.

    kind     `matrix`, `tiles` (for products in bf16), `plain` (fp32 rows, unpacked where they are packed), `vector`
             (fp32), `rows of the call` (one for each token, which the caller computes), `rotation`, `far rotation`,
             `sinusoids`, `bias` (of keys up to the query) or `bias both ways`.
    name     the parameter it is made from.
    how      what else it is made from: a RopeSpec, or the attributes of an operation.
    """

    kind: str
    name: str = ""
    how: Any = None


@dataclass(eq=False)
class Vector:
    """A value of `width` numbers per token."""

    width: int
    over: Over = Over.TOKENS


@dataclass(eq=False)
class PlanInstruction:
    """One instruction.  `reads`, `writes`, `tables` and `numbers` are by the names of their fields in
    `triptych.native.step`; `after` are steps that must come before although no vector says so; `takes_over` names the
    read whose buffer the result must (`forced`) or may share."""

    op: Op
    over: Over
    reads: dict[str, Vector] = field(default_factory=dict)
    writes: dict[str, Vector] = field(default_factory=dict)
    tables: dict[str, PlanTable] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    after: list[PlanInstruction] = field(default_factory=list)
    takes_over: str | None = None
    forced: bool = False


@dataclass(frozen=True)
class Positions:
    """The position of each token, plus a constant."""

    shift: int = 0


@dataclass(frozen=True)
class Angles:
    spec: RopeSpec


@dataclass(frozen=True)
class StoredKeys:
    """Keys or values: those of the tokens of this call, or a source's (`new` is None)."""

    store: int
    new: Vector | None
    width: int


NativeValue = Vector | Positions | Angles | StoredKeys | PlanTable | str
"""What a value of a program is in the native step: a vector, what stands for one without numbers of its own, or the
name of an input."""


def vector_of(values: Mapping[str, NativeValue], name: str) -> Vector:
    """A value that is a vector.  Raises NotServed for another."""
    value = values.get(name)
    if not isinstance(value, Vector):
        raise NotServed(f"{name} is no vector of the tokens")
    return value


@dataclass(eq=False)
class PlanInstructions:
    """The steps of `decode` and `unembed`, or of `encode`, the vector of their result, and those of sites that are
    read, by name: they must be there when the step is done."""

    steps: list[PlanInstruction] = field(default_factory=list)
    result: Vector | None = None
    sites: dict[str, Vector] = field(default_factory=dict)


def window_in(mask: Mask, cross: bool) -> int:
    """The number of positions that a query sees, itself included; 0 for all."""
    seen = (Full,) if cross else (Causal, Window)
    if not all(isinstance(part, seen) for part in conjuncts(mask)):
        raise NotServed(f"the native step has no mask {mask}")
    back, ahead = window_of(mask) or (0, 0)
    if ahead:
        raise NotServed(f"a mask that lets queries see {ahead} positions ahead")
    return back


def uses_of(entry: Entry, aliases: Collection[str]) -> Counter[str]:
    """How often each value of an entry is read, through all its names; operations in `aliases` give another name."""
    root: dict[str, str] = {}
    uses: Counter[str] = Counter(entry.outputs)
    for step in entry.instructions:
        for name in step.inputs.values():
            if step.op in aliases:
                root[step.result] = root.get(name, name)
            else:
                uses[root.get(name, name)] += 1
    for name in entry.outputs:
        uses[root.get(name, name)] += 1
    return uses
