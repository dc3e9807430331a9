"""Fuses steps of a native plan: an activation, a gate, a sum and a rounding to bf16 become part of the matrix product
before them, and a rounding becomes part of the norm before it."""

from collections.abc import Mapping

from triptych.native.step import Op
from .native_values import PlanInstruction, PlanInstructions, Vector

_TAKING = (Op.LINEAR_BF16, Op.LAYER_NORM, Op.RMS_NORM)


def fused(steps: PlanInstructions) -> PlanInstructions:
    """The same steps, where what alone reads the result of a step of `_TAKING` is made part of it, where it can be.
    The step then stands where the last of them stood: all that it reads is made before."""
    readers: dict[Vector, list[PlanInstruction]] = {}
    maker: dict[Vector, PlanInstruction] = {}
    for step in steps.steps:
        for vector in step.reads.values():
            readers.setdefault(vector, []).append(step)
        maker.update(dict.fromkeys(step.writes.values(), step))
    needed = {*steps.sites.values(), steps.result}
    read_once = {vector for vector, users in readers.items() if len(users) == 1 and vector not in needed}
    gates = {step: gate for step in steps.steps if (gate := _gate_of(step, maker, read_once)) is not None}
    gating = set(gates.values())
    moved = set(gating)
    stands_at: dict[PlanInstruction, PlanInstruction] = {}
    for step in steps.steps:
        last = step
        while step.op in _TAKING and step not in gating and step.writes["output"] in read_once:
            after = readers[step.writes["output"]][0]
            is_fused = after in moved or after in stands_at  # a sum of two products is part of the first of them
            if is_fused or not _fuse(step, after, gates.get(after)):
                break
            moved.add(last)
            last = after
        stands_at.setdefault(last, step)
    return PlanInstructions([stands_at[step] for step in steps.steps if step not in moved], steps.result, steps.sites)


def _gate_of(
    step: PlanInstruction, maker: Mapping[Vector, PlanInstruction], read_once: set[Vector]
) -> PlanInstruction | None:
    """The product whose function `step` multiplies by another one of the same vectors, if nothing else reads either."""
    if step.op is not Op.MAP_MULTIPLY or not read_once.issuperset(step.reads.values()):
        return None
    gate, other = (maker[step.reads[name]] for name in ("input", "other"))
    alike = gate is not other and gate.op is other.op is Op.LINEAR_BF16 and gate.reads == other.reads
    return gate if alike and "bias" not in gate.tables else None


def _fuse(step: PlanInstruction, after: PlanInstruction, gate: PlanInstruction | None) -> bool:
    """Make `after`, which alone reads the result of `step` and where there is a `gate` of that, part of it; whether it
    can be."""
    result, numbers = step.writes["output"], step.numbers
    if after.over is not step.over or numbers.get("rounds"):
        return False
    if step.op is not Op.LINEAR_BF16 and (after.op is not Op.ROUND_BF16 or numbers["heads"] > 1):
        return False
    plain = not {"function", "more"} & {*numbers, *step.reads}
    match after.op:
        case Op.MAP if plain:
            numbers.update(function=after.numbers["function"], factor=after.numbers["factor"])
        case Op.MAP_MULTIPLY if gate is not None:
            numbers.update(function=after.numbers["function"], factor=after.numbers["factor"])
            step.tables["gate"] = gate.tables["weight"]
        case Op.ADD if "more" not in step.reads:
            step.reads["more"] = next(x for x in after.reads.values() if x is not result)
            step.takes_over = "more"
        case Op.ROUND_BF16:
            numbers["rounds"] = 1
        case _:
            return False
    step.writes = after.writes
    return True
