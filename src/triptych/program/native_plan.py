"""A plan of the native executor: instructions with their buffers, in levels with a barrier of
all threads between them.

A step's level is one more than the highest of those that it reads from, so the steps of a level need nothing of each
other and no thread waits between them.  Buffers are shared by vectors that do not live at the same level.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from triptych import ops
from triptych.native.step import (
    HEADER,
    INSTRUCTION,
    LAYOUT_TILES,
    MEMBER,
    NONE,
    OPERANDS,
    OUTPUT,
    QUERIES,
    QUERIES_BF16,
    SCORES,
    TILE_KEYS,
    Barrier,
    Index,
    MatrixLayout,
    Op,
    Over,
    Records,
    StoredType,
)
from .native_buffers import LINE, Buffer, buffers_of, lines, place
from .native_fusion import fused
from .native_operations import InstructionList, walk_entry
from .native_values import (
    NativeValue,
    PlanInstruction,
    PlanInstructions,
    PlanTable,
    Positions,
    StoredKeys,
    Vector,
    vector_of,
)
from .not_served import NotServed, check_lowered
from .program import Entry, Program

WIDEST = 1024  # numbers of a key or value, at most
_STORED = {torch.float32: StoredType.F32, torch.bfloat16: StoredType.BF16, torch.float16: StoredType.F16,
           torch.int8: StoredType.INT8}  # fmt: skip


@dataclass(frozen=True)
class SitePlace:
    """The place of the values of a site, after so many numbers per token; `shape` and `dtype` are those of a token."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class NativePlan:
    """The native form of a program.

    instructions   records of `INSTRUCTION`.
    tables         what instructions name by `weight` and `bias`, in order.
    arena          fp32 numbers per token of the arena.
    scratch        fp32 numbers of a thread beside one per token.
    partial        fp32 numbers of one range of positions of a token, where several threads share them.
    outputs        numbers of a result.
    reads          fp32 numbers per token of the sites that are read.
    sites          where each of these begins among them, with its shape and dtype.
    """

    instructions: Records
    tables: tuple[PlanTable, ...]
    arena: int
    scratch: int
    partial: int
    outputs: int
    reads: int = 0
    sites: dict[str, SitePlace] = field(default_factory=dict)


def plan_of(
    program: Program, packed: frozenset[str] = frozenset(), dtype: torch.dtype = torch.float32,
    windows: Sequence[int | None] = (), reads: Collection[str] = (), bf16: bool = False,
) -> NativePlan:  # fmt: skip
    """The plan of `decode` and `unembed`.

    packed    names of weights that are stored packed.
    dtype     what the cache keeps of keys and values.
    windows   of each layer's store; None for one that keeps every token.
    reads     sites of `decode` whose values the step leaves in memory of the caller.
    bf16      products with packed weights and those of attention are in bf16, as the tokens of prompts have them.

    Raises NotServed, naming what the executor lacks.
    """
    maker = InstructionList(program, packed, stored_type(dtype), windows, "packed" if bf16 else None, reads)
    _check_entries(program, "decode", "unembed")
    entry, head = program.entries["decode"], program.entries["unembed"]
    values: dict[str, NativeValue] = {
        "ids": "ids", "token_types": "types", "row_ends": "ends", "positions": Positions(),
    }  # fmt: skip
    if "cross_kv" in program.entries:
        for i, name in enumerate(program.entries["cross_kv"].outputs):
            values[name] = StoredKeys(len(windows) + i // 2, None, int(entry.values[name].shape[-1]))
    hidden = walk_entry(maker, entry, values)
    chosen = Vector(hidden.width, Over.CHOSEN)
    maker.add(Op.CHOOSE, chosen, {"input": hidden}, width=hidden.width)
    maker.out.result = walk_entry(maker, head, {head.inputs[0]: chosen}, Over.CHOSEN)
    if maker.out.result is chosen:
        raise NotServed("the head computes nothing")
    for name in reads:
        if name not in maker.out.sites or maker.out.sites[name].over is not Over.TOKENS:
            raise NotServed(f"the native step does not keep {name}, which is read")
    return _assembled(maker.out, bf16, entry)


def encoding_plan_of(
    program: Program, packed: frozenset[str] = frozenset(), bf16: bool = False, source: bool = False
) -> NativePlan:
    """The plan of `encode`: the hidden states of all tokens of whole rows, whose tokens see all of their row.

    `packed` are names of weights that are stored packed; with `bf16` all products with weights are in bf16.  With
    `source` it is followed by `cross_kv`: the keys and values that a layer of the decoder looks at go to a store of its
    own, and with `bf16` products with packed weights and those of attention are in bf16, as in prompts.  Raises
    NotServed, naming what the executor lacks.
    """
    products: Literal["all", "packed"] = "packed" if source else "all"
    maker = InstructionList(program, packed, StoredType.F32, [], products if bf16 else None, encoding=True)
    _check_entries(program, "encode", *(["cross_kv"] if source else []))
    entry = program.entries["encode"]
    names = {"ids": "ids", "token_types": "types", "frames": "frames", "q_pos": "positions", "k_pos": "positions"}
    values: dict[str, NativeValue] = {"positions": Positions(), **names}
    if unknown := set(entry.inputs) - set(values):
        raise NotServed(f"the native step gives an encoder no {sorted(unknown)[0]}")
    if "frames" in entry.inputs:  # the caller computes the convolutions of frames, and gives their result
        last = max(i for i, step in enumerate(entry.instructions) if step.op == "conv1d")
        step = entry.instructions[last]
        out = Vector(program.weights[step.weights["weight"]][0])
        values[step.result] = maker.look_up(out, PlanTable("rows of the call"), Index.TOKENS)
        entry = replace(entry, instructions=entry.instructions[last + 1 :])
    maker.out.result = walk_entry(maker, entry, values)
    if source:
        _add_cross(maker, maker.out.result)
    return _assembled(maker.out, bf16, entry)


def _add_cross(maker: InstructionList, memory: Vector) -> None:
    """The steps of `cross_kv`, whose keys and values go to a store for each layer of the decoder."""
    entry = maker.program.entries["cross_kv"]
    values: dict[str, NativeValue] = {entry.inputs[0]: memory}
    first = len(maker.out.steps)
    walk_entry(maker, entry, values)
    linear = [step for step in maker.out.steps[first:] if step.op in (Op.LINEAR, Op.LINEAR_BF16)]
    linear = [step for step in linear if step.tables["weight"].name.endswith(".weight")]  # not those of adapters
    for before, step in zip(linear[:-2], linear[2:], strict=True):  # of two layers: few vectors live at once
        step.after.append(before)
    for layer, (k, v) in enumerate(zip(entry.outputs[::2], entry.outputs[1::2], strict=True)):
        groups, width = (int(n) for n in entry.values[k].shape[1:])
        numbers = {"groups": groups, "width": width, "value_width": int(entry.values[v].shape[-1]), "store": layer}
        stored = {"keys": vector_of(values, k), "values": vector_of(values, v)}
        maker.add(Op.EXTEND, None, stored, {}, **numbers)


def _check_entries(program: Program, *entries: str) -> None:
    if lacking := [name for name in entries if name not in program.entries]:
        raise NotServed(f"the program has no {lacking[0]}")
    check_lowered(program)


def stored_type(dtype: torch.dtype) -> StoredType:
    """The type of a store of tensors of this dtype.  Raises NotServed for one that the native step does not read."""
    if dtype not in _STORED:
        raise NotServed(f"the cache holds {dtype}; the native step reads fp32, fp16, bf16 and int8")
    return _STORED[dtype]


def check_plan(plan: NativePlan, matrices: Records, stores: int) -> None:
    """Raises NotServed for instructions that name a table of `matrices` or a store that there is not, a table in an
    unknown layout, or an unknown operation: the C functions trust them."""
    records, operations = plan.instructions, plan.instructions["op"]
    wrong = (operations < min(Op)) | (operations > max(Op))
    for op, member in MEMBER.items():
        own = operations == op
        for name in OPERANDS[member].tables.split():
            places = records[member][name]
            wrong |= own & ((places < NONE) | (places >= len(matrices)))
        if member == "attend":
            wrong |= own & ((records[member]["store"] < 0) | (records[member]["store"] >= stores))
    if wrong.any():
        raise NotServed(f"instruction {int(wrong.argmax())} of its plan names what there is not")
    if not np.isin(matrices["layout"], [LAYOUT_TILES, *MatrixLayout]).all():
        raise NotServed("a table of its plan has an unknown layout")


def _assembled(steps: PlanInstructions, bf16: bool, entry: Entry) -> NativePlan:
    """The plan of some steps; `entry` has the shapes and dtypes of the sites that are read."""
    steps = fused(steps) if bf16 else steps
    levels = _levels(steps)
    ordered = sorted(steps.steps, key=lambda step: levels[step])
    buffers = buffers_of(steps, ordered, levels)
    arena, reads = place(buffers, steps)
    tables: dict[PlanTable, int] = {}
    records = np.zeros(len(ordered), INSTRUCTION)
    for record, step in zip(records, ordered, strict=True):
        _write(record, step, buffers, tables)
    _set_barriers(records, ordered, levels)
    assert steps.result is not None
    scratch, partial = _scratch(ordered)
    sites: dict[str, SitePlace] = {}
    for name, vector in steps.sites.items():
        info = entry.values[name]
        shape = tuple(int(n) for n in info.shape[1:])
        sites[name] = SitePlace(OUTPUT - 1 - buffers[vector].offset, shape, ops.dtype_of(info.dtype))
    return NativePlan(records, tuple(tables), arena, scratch, partial, steps.result.width, reads, sites)


def _scratch(ordered: list[PlanInstruction]) -> tuple[int, int]:
    """What `step_attend.c` needs: numbers of each thread (`struct scratch`), and of a token's range (`partial`)."""
    scratch = partial = 0
    for step in ordered:
        if step.op is Op.ATTEND:
            heads, width, value_width = (int(step.numbers[name]) for name in ("heads", "width", "value_width"))
            if width + value_width > 2 * WIDEST:
                raise NotServed(f"keys and values of {width + value_width} numbers together")
            queries = QUERIES_BF16 if step.numbers.get("bf16") else QUERIES
            tile = TILE_KEYS * max(width, value_width)
            scratch = max(scratch, queries * (SCORES + value_width) + tile + LINE)
            partial = max(partial, heads * lines(value_width + 2))
    return scratch, partial


def _levels(steps: PlanInstructions) -> dict[PlanInstruction, int]:
    maker: dict[Vector, PlanInstruction] = {}
    levels: dict[PlanInstruction, int] = {}
    for step in steps.steps:
        before = [maker[vector] for vector in step.reads.values()] + step.after
        levels[step] = 1 + max((levels[other] for other in before), default=-1)
        maker.update(dict.fromkeys(step.writes.values(), step))
    return levels


def _write(record: Any, step: PlanInstruction, buffers: dict[Vector, Buffer], tables: dict[PlanTable, int]) -> None:
    member = MEMBER.get(step.op, "")
    own = OPERANDS.get(member)
    named = () if own is None else (*own.buffers.split(), *own.tables.split())
    values: dict[str, float] = dict.fromkeys(("input", "output", *named), NONE)
    values |= {"op": step.op, "rows": step.over, **step.numbers}
    values |= {name: buffers[vector].offset for name, vector in (step.reads | step.writes).items()}
    values |= {name: tables.setdefault(table, len(tables)) for name, table in step.tables.items()}
    for name, value in values.items():
        (record if name in HEADER else record[member])[name] = value


def _set_barriers(records: Records, ordered: list[PlanInstruction], levels: dict[PlanInstruction, int]) -> None:
    """All threads meet between two levels.  An expert without tokens is passed over, with its barriers; what follows it
    then begins with one."""
    before, after_expert = 0, False
    for i, step in enumerate(ordered):
        if levels[step] != before or (after_expert and step.over is not Over.EXPERT):
            records["barrier"][i] = Barrier.BEFORE
        before, after_expert = levels[step], step.op is Op.GIVE
        if step.op is Op.TAKE:
            end = next(j for j in range(i, len(ordered)) if ordered[j].op is Op.GIVE)
            if all(one.over is Over.EXPERT for one in ordered[i : end + 1]):
                records["expert"]["skip"][i] = end - i
                if i and ordered[i - 1].op is Op.GIVE:
                    records["barrier"][i] = Barrier.IF_ANY
