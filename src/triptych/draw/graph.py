"""The boxes and arrows of a program: every operation that computes is a box, and operations that only name, reshape or
store a value are passed through.  Places are rows and lanes here, pixels in `paint.py`.  The drawing of a
model and the diagram of the live page show the same boxes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.program import Instruction, Program
from triptych.program.kind_programs import layers_of

PASSED = frozenset(("site", "split_heads", "merge_heads", "cast", "extend", "shift"))
UNDRAWN = frozenset(("rotation_cos", "rotation_sin"))  # the tables of a rotation, which its box speaks of
POSITIONS = frozenset(("cos", "sin", "q_pos", "k_pos", "positions"))  # inputs without an arrow
# Attention is one operation, and three boxes: part -> the inputs that it reads.
ATTENTION: dict[str, tuple[str, ...]] = {"scores": ("q", "k", "bias"), "softmax": (), "mix": ("v",)}
START, END = "start", "end"
EMBED = re.compile(r"(^|\.)embed$")


@dataclass(eq=False)
class Arrow:
    """Into a box: the argument and the value that enter, None between the parts of attention; `source` is the box that
    made the value, None where it comes from outside the picture."""

    key: str | None
    value: str | None
    source: Box | None


@dataclass(eq=False)
class Box:
    """One operation of an entry, or one part of an attention.

    index   of the instruction in its entry.
    layer   its number, `start` before all layers or `end` behind them.
    site    the name of its result, where it has one.
    depth   the row among the boxes of its layer; `lane` 0 is the residual stream, and 1, 2, ... are beside it.
    """

    entry: str
    index: int
    step: Instruction
    part: str | None
    layer: int | str
    arrows: list[Arrow]
    site: str | None = None
    depth: int = 0
    lane: int = 1

    @property
    def kind(self) -> str:
        return self.part or self.step.op

    @property
    def name(self) -> str:
        """Different for all boxes of a program."""
        return f"{self.entry}:{self.step.out[0]}" + (f":{self.part}" if self.part else "")


def boxes_of(program: Program, stack: str) -> list[Box]:
    """All boxes of a stack, `encode` or `decode`, with what a decoder reads of the encoder and, of the last stack, the
    head; each placed among those of its layer."""
    names = ["cross_kv"] * (stack == "decode" and "cross_kv" in program.entries) + [stack]
    last = stack == ("decode" if "decode" in program.entries else "encode")
    box_of: dict[tuple[str, str], Box | None] = {}
    boxes: list[Box] = []
    for name in names + ["unembed"] * (last and "unembed" in program.entries):
        entry = program.entries[name]
        if name == "unembed":
            box_of[name, entry.inputs[0]] = box_of.get((stack, program.entries[stack].outputs[0]))
        if name == "decode":
            box_of |= {(name, value): box_of.get(("cross_kv", value)) for value in entry.inputs}
        for index, (step, layer) in enumerate(zip(entry.instructions, _layers(program, name), strict=True)):
            arrows = [Arrow(key, value, box_of.get((name, value))) for key, value in step.inputs.items()]
            own = _boxes(name, index, step, layer, arrows)
            boxes += own
            box = own[-1] if own else None
            if step.op in PASSED and arrows:
                box = arrows[0].source
                if step.op == "site" and box is not None and box.site is None:
                    box.site = step.out[0]
            box_of[name, step.out[0]] = box
        if name == "unembed" and boxes[-1].site is None:
            boxes[-1].site = entry.outputs[0]
    for layer in {box.layer for box in boxes}:
        _place([box for box in boxes if box.layer == layer])
    return boxes


def _boxes(entry: str, index: int, step: Instruction, layer: int | str, arrows: Sequence[Arrow]) -> list[Box]:
    """Those of one operation: none for one that is passed through, and three, one after the other, of attention."""
    if step.op in PASSED | UNDRAWN:
        return []
    if step.op != "attend":
        return [Box(entry, index, step, None, layer, [arrow for arrow in arrows if arrow.key not in POSITIONS])]
    boxes: list[Box] = []
    for part, keys in ATTENTION.items():
        before = [Arrow(None, None, box) for box in boxes[-1:]]
        boxes.append(Box(entry, index, step, part, layer, before + [arrow for arrow in arrows if arrow.key in keys]))
    return boxes


def _layers(program: Program, name: str) -> list[int | str]:
    """The layer of each instruction; before the embeddings are complete `start`, and behind the last layer `end`."""
    entry = program.entries[name]
    if name == "unembed":
        return [END] * len(entry.instructions)
    numbers = layers_of(entry)
    sites = (i for i, step in enumerate(entry.instructions) if step.op == "site" and EMBED.search(step.out[0]))
    first = next(sites, -1)
    return [START if i <= first else END if number is None else number for i, number in enumerate(numbers)]


def _place(boxes: Sequence[Box]) -> None:
    own = set(boxes)
    for box in boxes:
        inside = [arrow.source for arrow in box.arrows if arrow.source in own]
        box.depth = 1 + max((source.depth for source in inside), default=-1)
        outside = any(arrow.key and arrow.source not in own for arrow in box.arrows)
        stream = any(source.lane == 0 for source in inside)
        adds = box.step.op == "add" and (outside or stream)
        named = re.search(r"resid_(mid|post|pre)$|(^|\.)embed$", box.site or "")
        box.lane = 0 if adds or (box.step.op.endswith("norm") and named and stream) else 1
    # A box that reads nothing of its layer stands just above its first reader.
    for box in reversed(boxes):
        readers = [other.depth for other in boxes if any(arrow.source is box for arrow in other.arrows)]
        if readers and not any(arrow.source in own for arrow in box.arrows):
            box.depth = max(box.depth, min(readers) - 1)
    for depth in {box.depth for box in boxes}:
        for lane, box in enumerate([box for box in boxes if box.depth == depth and box.lane], 1):
            box.lane = lane
