"""Products in bf16 that do what follows them, too: an activation, then a sum, then the rounding of their result."""

from __future__ import annotations

from triptych.native.step import Op
from triptych.program.native_values import PlanStep, PlanSteps, Vector


def fused(steps: PlanSteps) -> PlanSteps:
    """The same steps, where every `MAP`, `ADD` and `ROUND_BF16` that alone reads the result of a product in bf16 is
    made part of it.  The product then stands where the last of them stood: all that it reads is made before."""
    readers: dict[Vector, list[PlanStep]] = {}
    for step in steps.steps:
        for vector in step.reads.values():
            readers.setdefault(vector, []).append(step)
    kept = steps.kept
    stands_at: dict[PlanStep, PlanStep] = {}
    moved: set[PlanStep] = set()
    for product in steps.steps:
        last = product
        while product.op is Op.LINEAR_BF16 and product.writes["output"] is not steps.result:
            after = readers.get(product.writes["output"], [])
            if len(after) != 1 or product.writes["output"] in kept or not _takes_in(product, after[0]):
                break
            moved.add(last)
            last = after[0]
        stands_at.setdefault(last, product)
    return PlanSteps([stands_at[step] for step in steps.steps if step not in moved], steps.result, steps.sites)


def _takes_in(product: PlanStep, after: PlanStep) -> bool:
    """Make `after`, which alone reads the result of `product`, part of it; whether it can be."""
    result, numbers = product.writes["output"], product.numbers
    if after.over is not product.over or numbers.get("number"):
        return False
    match after.op:
        case Op.MAP if not {"kind", "third"} & {*numbers, *product.reads}:
            numbers.update(kind=after.numbers["kind"], first=after.numbers["first"])
        case Op.ADD if "third" not in product.reads:
            product.reads["third"] = next(x for x in after.reads.values() if x is not result)
            product.takes_over = "third"
        case Op.ROUND_BF16:
            numbers["number"] = 1
        case _:
            return False
    product.writes = after.writes
    return True
