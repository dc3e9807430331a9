"""The program of a model from its spec alone: on meta tensors, with one block of each kind."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from triptych import nn
from triptych.spec import ModelSpec, StackSpec
from triptych.spec.parts import BlockSpec, ParallelBlockSpec
from .lower import lower
from .program import Entry, Instruction, Program

_LAYER = re.compile(r"(?:^|\.)blocks\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class KindProgram:
    """A model with one block of each kind, lowered.

    spec     the spec of that model.
    program  its program.
    layers   stack -> for each of its blocks the layers of the whole model that are like it.
    """

    spec: ModelSpec
    program: Program
    layers: dict[str, list[list[int]]]

    def repeats(self, entry: str) -> Iterator[tuple[Instruction, int]]:
        """The instructions of an entry, each with how often it runs in the whole model."""
        layers = self.layers.get("encoder" if entry == "encode" else "decoder", [])
        instructions = self.program.entries[entry].instructions
        for step, layer in zip(instructions, layers_of(self.program.entries[entry]), strict=True):
            yield step, 1 if layer is None else len(layers[layer])

    def flops(self, entry: str, sizes: Mapping[str, int]) -> Counter[str]:
        """FLOPs of an entry of the whole model by part: `projections`, `scores`, `mlp` and `head`."""
        total: Counter[str] = Counter()
        for step, times in self.repeats(entry):
            total[_part(entry, step)] += times * self.program.flops_of(entry, step, sizes)
        return total


def lower_kinds(spec: ModelSpec) -> KindProgram:
    """The program of `spec` with one block of each kind: layers that are alike are lowered once.  Nothing is allocated.

    Raises ConfigError as `lower`.
    """
    layers, changes = dict[str, list[list[int]]](), dict[str, StackSpec]()
    for name, stack in spec.stacks.items():
        groups: dict[BlockSpec | ParallelBlockSpec, list[int]] = {}
        for i, block in enumerate(stack.blocks):
            groups.setdefault(block, []).append(i)
        layers[name] = list(groups.values())
        changes[name] = replace(stack, blocks=tuple(groups))
    short = replace(spec, encoder=changes.get("encoder"), decoder=changes.get("decoder"))
    return KindProgram(short, lower(nn.empty(short)), layers)


def layers_of(entry: Entry) -> list[int | None]:
    """The block of each instruction: that of the next site in a block; None before and behind the blocks."""
    layer: int | None = None
    layers: list[int | None] = []
    for step in reversed(entry.instructions):
        name = step.result if step.op == "site" else next(iter(step.attributes.get("ports", ())), None)
        name = next(iter(step.weights.values()), "") if name is None and entry.inputs == ("memory",) else name
        if name is not None and (found := _LAYER.search(name)):
            layer = int(found[1])
        elif step.op == "site":
            layer = None
        layers.append(layer)
    return layers[::-1]


def _part(entry: str, step: Instruction) -> str:
    if entry == "unembed":
        return "head"
    if step.op in ("attend", "disentangled_bias"):
        return "scores"
    weight = next(iter(step.weights.values()), "")
    return "mlp" if step.op == "experts" or ".mlp." in weight or ".branch." in weight else "projections"
