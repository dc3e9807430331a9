"""The steps of whole programs: of `decode` and `unembed`, of `encode`, and of an encoder with what a decoder reads."""

from __future__ import annotations

from dataclasses import replace

from triptych.native.step import Index, Op, Over
from triptych.program.native_operations import StepList, walk_entry
from triptych.program.native_values import (
    NativeValue,
    NotNative,
    PlanSteps,
    PlanTable,
    Positions,
    StoredKeys,
    Vector,
    vector_of,
)
from triptych.program.program import Entry


class StepMaker(StepList):
    """Walks the entries of a program."""

    def make(self) -> PlanSteps:
        """The steps of `decode` and `unembed`.  Raises NotNative, naming what the executor lacks."""
        self._check("decode", "unembed")
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
        hidden = walk_entry(self, entry, values, Over.TOKENS, {})
        chosen = Vector(hidden.width, Over.CHOSEN)
        self.add(Op.CHOOSE, chosen, {"input": hidden}, width=hidden.width)
        head = self.program.entries["unembed"]
        self.out.result = walk_entry(self, head, {head.inputs[0]: chosen}, Over.CHOSEN, {})
        if self.out.result is chosen:
            raise NotNative("the head computes nothing")
        if missing := [name for name in self.reads if name not in self.out.sites]:
            raise NotNative(f"the native step does not keep {missing[0]}, which is read")
        return self.out

    def make_encoding(self) -> PlanSteps:
        """The steps of `encode`.  Raises NotNative, naming what the executor lacks."""
        self._check("encode")
        self.encoding = True
        entry = self.program.entries["encode"]
        names = {"ids": "ids", "token_types": "types", "frames": "frames", "q_pos": "positions", "k_pos": "positions"}
        values: dict[str, NativeValue] = {"positions": Positions(), **names}
        if unknown := set(entry.inputs) - set(values):
            raise NotNative(f"the native step gives an encoder no {sorted(unknown)[0]}")
        if "frames" in entry.inputs:
            entry = self._convolved(entry, values)
        self.out.result = walk_entry(self, entry, values, Over.TOKENS, {})
        return self.out

    def make_source(self) -> PlanSteps:
        """The steps of `encode` and then of `cross_kv`, whose keys and values go to a store for each layer of the
        decoder.  Raises NotNative, naming what the executor lacks."""
        self._check("cross_kv")
        memory, entry = self.make_encoding().result, self.program.entries["cross_kv"]
        assert memory is not None
        values: dict[str, NativeValue] = {entry.inputs[0]: memory}
        first = len(self.out.steps)
        walk_entry(self, entry, values, Over.TOKENS, {})
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

    def _check(self, *entries: str) -> None:
        if lacking := [name for name in entries if name not in self.program.entries]:
            raise NotNative(f"the program has no {lacking[0]}")
        if self.program.unlowered:
            name, reason = next(iter(self.program.unlowered.items()))
            raise NotNative(f"{name} runs as a module: {reason}")
