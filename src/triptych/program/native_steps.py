"""From the operations of a program to the steps of the native executor, before buffers and barriers are decided.

A step computes vectors from vectors.  What has no numbers of its own - positions, rotations, biases of positions -
becomes a table that the binding fills, and operations that change no number (sites, splitting heads, casts between
floating-point types, since the executor computes in fp32) become other names of their input.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from triptych.native.step import GROUP, PAIR, Index, Op, Over, StoredType
from triptych.program.native_operations import ALIASES, NativeWalk
from triptych.program.native_values import (
    NativeValue,
    NotNative,
    PlanStep,
    PlanSteps,
    PlanTable,
    Positions,
    StoredKeys,
    Vector,
    uses_of,
    vector_of,
)
from triptych.program.program import Entry, Program


class StepMaker:
    """Walks the entries of a program.

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

    def make(self) -> PlanSteps:
        """The steps of `decode` and `unembed`.  Raises NotNative, naming what the executor lacks."""
        self._check_lowered()
        entry = self.program.entries["decode"]
        values: dict[str, NativeValue] = {
            "ids": "ids",
            "token_types": "types",
            "row_ends": "ends",
            "positions": Positions(),
        }
        if "cross_kv" in self.program.entries:
            for i, name in enumerate(self.program.entries["cross_kv"].outputs):
                values[name] = StoredKeys(len(self.windows) + i // 2, None, int(entry.values[name].shape[-1]))
        hidden = self.entry(entry, values, Over.TOKENS, {})
        chosen = Vector(hidden.width, Over.CHOSEN)
        self.add(Op.CHOOSE, chosen, {"input": hidden}, width=hidden.width)
        head = self.program.entries["unembed"]
        self.out.result = self.entry(head, {head.inputs[0]: chosen}, Over.CHOSEN, {})
        if self.out.result is chosen:
            raise NotNative("the head computes nothing")
        if missing := [name for name in self.reads if name not in self.out.sites]:
            raise NotNative(f"the native step does not keep {missing[0]}, which is read")
        return self.out

    def make_encoding(self) -> PlanSteps:
        """The steps of `encode`.  Raises NotNative, naming what the executor lacks."""
        self._check_lowered()
        self.encoding = True
        entry = self.program.entries["encode"]
        names = {"ids": "ids", "token_types": "types", "frames": "frames", "q_pos": "positions", "k_pos": "positions"}
        values: dict[str, NativeValue] = {"positions": Positions(), **names}
        if unknown := set(entry.inputs) - set(values):
            raise NotNative(f"the native step gives an encoder no {sorted(unknown)[0]}")
        if "frames" in entry.inputs:
            entry = self._convolved(entry, values)
        self.out.result = self.entry(entry, values, Over.TOKENS, {})
        return self.out

    def make_source(self) -> PlanSteps:
        """The steps of `encode` and then of `cross_kv`, whose keys and values go to a store for each layer of the
        decoder.  Raises NotNative, naming what the executor lacks."""
        memory, entry = self.make_encoding().result, self.program.entries["cross_kv"]
        assert memory is not None
        values: dict[str, NativeValue] = {entry.inputs[0]: memory}
        first = len(self.out.steps)
        self.entry(entry, values, Over.TOKENS, {})
        linear = [step for step in self.out.steps[first:] if step.op in (Op.LINEAR, Op.LINEAR_BF16)]
        linear = [step for step in linear if step.tables["weight"].name.endswith(".weight")]  # not those of adapters
        for before, step in zip(linear[:-2], linear[2:], strict=True):  # of two layers: few vectors live at once
            step.after.append(before)
        for layer, (k, v) in enumerate(zip(entry.outputs[::2], entry.outputs[1::2], strict=True)):
            groups, width = (int(n) for n in entry.values[k].shape[1:])
            numbers = {"groups": groups, "width": width, "value_width": int(entry.values[v].shape[-1]), "store": layer}
            stored = {"keys": vector_of(values, k), "values": vector_of(values, v)}
            self.add(Op.EXTEND, None, stored, {}, **numbers)
        return self.out

    def _convolved(self, entry: Entry, values: dict[str, NativeValue]) -> Entry:
        """The entry behind the convolutions of frames, whose result the caller computes and gives."""
        last = max(i for i, step in enumerate(entry.instructions) if step.op == "conv1d")
        step = entry.instructions[last]
        out = Vector(int(self.program.weights[step.weights["weight"]][0]))
        values[step.out[0]] = self.look_up(out, PlanTable("rows of the call"), Index.TOKENS)
        return replace(entry, instructions=entry.instructions[last + 1 :])

    def _check_lowered(self) -> None:
        if self.program.unlowered:
            name, reason = next(iter(self.program.unlowered.items()))
            raise NotNative(f"{name} runs as a module: {reason}")

    def entry(self, entry: Entry, values: dict[str, NativeValue], over: Over, names: dict[str, str]) -> Vector:
        """Walk one entry; `names` are prefixes of weights that stand for others (experts)."""
        walk = NativeWalk(self, entry, values, over, names, uses_of(entry, ALIASES))
        for step in entry.instructions:
            values[step.out[0]] = walk.result(step)
            if step.op == "site" and step.out[0] in self.reads:
                self.out.keep(step.out[0], values[step.out[0]], entry)
        return vector_of(values, entry.outputs[0])

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
