"""Instructions of a decoding step that run as one: products of one input, and rotations by the same angles.

A GPU needs about as long to start a small operation as to run it, so that fewer of them take less time.
"""

from collections.abc import Hashable, Mapping, Sequence
from graphlib import TopologicalSorter

import torch
from torch import Tensor, nn

from .program import Instruction

Group = tuple[Instruction, ...]


def grouped(instructions: Sequence[Instruction], weights: Mapping[str, Tensor], *, joined: bool) -> list[Group]:
    """All instructions, in an order in which each finds its inputs; those of a group run as one.

    Grouped are the rotations of a layer by the same angles and, where `joined`, products of one input whose weights
    can become one matrix (`join`).
    """
    layer, members = 0, dict[Hashable, list[Instruction]]()
    for step in instructions:
        layer += step.op == "attend"
        members.setdefault(_kind(step, layer, weights, joined), []).append(step)
    kind_of = {step.result: kind for kind, group in members.items() for step in group}
    before = {
        kind: [kind_of[name] for step in group for name in step.inputs.values() if name in kind_of]
        for kind, group in members.items()
    }
    return [tuple(members[kind]) for kind in TopologicalSorter(before).static_order()]


def _kind(step: Instruction, layer: int, weights: Mapping[str, Tensor], joined: bool) -> Hashable:
    """Equal for instructions that may run as one."""
    if step.op == "rotate":
        return "rotate", layer, step.inputs["cos"], step.inputs["sin"], tuple(sorted(step.attributes.items()))
    own = [weights[name] for name in step.weights.values()]
    if joined and step.op == "linear" and all(type(x) is nn.Parameter and not x.is_inference() for x in own):
        return "linear", layer, step.inputs["x"], *sorted(step.weights), own[0].dtype
    return step.result


def join(parameters: Sequence[Tensor]) -> Tensor:
    """The rows of all parameters as one tensor [sum of rows, ...].

    The parameters become views of it: they keep their numbers, changes in place reach both, and it takes no memory of
    its own.  Those that are views of such a tensor already stay where they are.
    """
    first, sizes = parameters[0], [len(x) for x in parameters]
    at, together = first.data_ptr(), True
    for x in parameters:
        same = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        together = together and same and x.is_contiguous() and x.data_ptr() == at
        at += x.nbytes
    if together:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([x.detach() for x in parameters])
    for x, part in zip(parameters, whole.split(sizes), strict=True):
        x.data = part
    return whole
