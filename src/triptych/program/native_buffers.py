"""Which vectors of a native plan share a buffer, and where each buffer lies in the memory of a step."""

from dataclasses import dataclass

from triptych.native.step import NONE, OUTPUT
from .native_values import PlanInstruction, PlanInstructions, Vector
from .not_served import NotServed

LINE = 16  # buffers begin at multiples of so many numbers: 64 bytes


@dataclass(eq=False)
class Buffer:
    width: int
    first: int
    last: int
    offset: int = NONE


def buffers_of(
    steps: PlanInstructions, ordered: list[PlanInstruction], levels: dict[PlanInstruction, int]
) -> dict[Vector, Buffer]:
    """A buffer for each vector.  A result takes over the buffer of an input that nothing else reads any more, and that
    is not kept."""
    site_vectors = steps.sites.values()
    readers: dict[Vector, list[PlanInstruction]] = {}
    for step in ordered:
        for vector in set(step.reads.values()):
            readers.setdefault(vector, []).append(step)
    buffers: dict[Vector, Buffer] = {}
    for step in ordered:
        level = levels[step]
        for vector in step.reads.values():
            buffers[vector].last = max(buffers[vector].last, level)
        for name, vector in step.writes.items():
            reused = step.reads.get(step.takes_over or "")
            if reused in site_vectors:
                reused = None
            if reused is not None and name == "output" and reused.width == vector.width and reused.over == vector.over:
                if step.forced or [one for one in readers[reused] if levels[one] >= level] == [step]:
                    buffers[vector] = buffers[reused]
                    continue
            elif step.forced and name == "output":
                raise NotServed("a sum over experts that does not fit its buffer")
            buffers[vector] = Buffer(vector.width, level, level)
    return buffers


def place(buffers: dict[Vector, Buffer], steps: PlanInstructions) -> tuple[int, int]:
    """Give each buffer the lowest place of the arena that is free while it lives; those that are kept have places of
    their own, in other memory.  The sizes of both."""
    assert steps.result is not None
    result = buffers[steps.result]
    result.offset = OUTPUT
    placed: list[Buffer] = []
    total = reads = 0
    for buffer in dict.fromkeys(buffers[vector] for vector in steps.sites.values()):
        buffer.offset = OUTPUT - 1 - reads
        reads += lines(buffer.width)
    for buffer in sorted(dict.fromkeys(buffers.values()), key=lambda one: one.first):
        if buffer.offset != NONE:
            continue
        size = lines(buffer.width)
        living = sorted((one.offset, one.offset + lines(one.width)) for one in placed if one.last >= buffer.first)
        offset = 0
        for begin, end in living:
            if offset + size <= begin:
                break
            offset = max(offset, end)
        buffer.offset = offset
        placed.append(buffer)
        total = max(total, offset + size)
    return total, reads


def lines(width: int) -> int:
    return (width + LINE - 1) // LINE * LINE
